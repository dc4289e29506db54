"""
The whole way from source tables to a lake without Spark: what its tasks and its driver do, one after the other.

`Flow` captures tables of a database for real, commits batches for real, and copies tables chunk by chunk.
Stream and copy go to targets of their own, so that they can be compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aqueduck.config.sync import LakeConfig
from aqueduck.lake.commit.commit import commit_batch
from aqueduck.lake.fold.fold_tasks import FoldTaskWriter, plan_batch
from aqueduck.lake.ledger.parking import ensure_parking
from aqueduck.lake.ledger.progress import Position, write_position
from aqueduck.lake.ledger.table_states import TableState, ensure_table_states
from aqueduck.lake.session.catalog import open_lake
from aqueduck.lake.session.directories import table_directory
from aqueduck.lake.session.sql import lake_table
from aqueduck.lake.target.apply import add_files, empty_target, ensure_target
from aqueduck.lake.target.places import known_layout, notice_changes
from aqueduck.model.batches import plan_fold_tasks
from aqueduck.model.schema import TableName, TableSchema, parse_lsn
from aqueduck.postgres.capture.capture import Capture
from aqueduck.postgres.capture.capture_settings import CaptureSettings
from aqueduck.postgres.capture.stage import Stage
from aqueduck.postgres.catalog.tables import describe_table
from aqueduck.postgres.copy.table_copy import ChunkReader, export_snapshot, plan_chunks
from aqueduck.postgres.publications.slots import create_slot
from aqueduck.state_files.files import write_tables
from tests.chunk_files import written_chunk
from tests.fix_postgres import Database, wait_until

GROUP = "flow"
_numbers = itertools.count(1)


class Flow:
    """Tables on their way into a lake; `tables` are written as in a configuration."""

    def __init__(
        self, db: Database, directory: Path, tables: Sequence[str], *, catalog: str = "", inline_rows: int = 5
    ) -> None:
        self.db = db
        self.directory = directory
        db.execute(f"create publication flow for table {', '.join(tables)}")
        with db.connect() as conn:
            position = create_slot(conn, "flow")
            self.schemas = {name: describe_table(conn, name) for name in tables}
        self.lake = LakeConfig(
            catalog=catalog or f"sqlite:{directory / 'catalog.sqlite'}",
            data_path=str(directory / "data"),
            inline_rows=inline_rows,
        )
        self.session = open_lake(self.lake, threads=2)
        self._observer = open_lake(self.lake, read_only=True)
        self.states = {
            s.oid: TableState(s.oid, s.qualified, TableName("stream", s.name), True, 0)
            for s in self.schemas.values()
        }
        self.position = Position(GROUP, position, None, "1", 1)
        try:
            self._prepare()
        except BaseException:
            self._observer.close()
            self.session.close()
            raise
        self._write_tables()
        settings = CaptureSettings(
            dsn=db.dsn, slot="flow", publication="flow", position=position, directory=str(directory)
        )
        self.stage = Stage(directory / "stage", segment_bytes=1 << 20, bytes_max=1 << 30, position=position)
        self.capture = Capture(settings, self.stage)
        self.capture.start()

    def _prepare(self) -> None:
        ensure_table_states(self.session)
        ensure_parking(self.session)
        with self.session.transaction():
            write_position(self.session, self.position)
        for schema in self.schemas.values():
            with self.session.transaction():
                ensure_target(self.session, self.states[schema.oid].target, schema)

    def close(self) -> None:
        self.capture.stop()
        self._observer.close()
        self.session.close()

    def __enter__(self) -> Flow:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def catch_up(self, *, tasks: bool) -> None:
        """Bring everything committed so far into the lake, by the files of tasks or by the driver alone."""
        end = parse_lsn(self.db.value("select pg_current_wal_flush_lsn()::text"))

        def seen() -> bool:
            self.capture.check()
            self.capture.ask_position()
            return self.capture.seen >= end

        wait_until(seen, "the capture has seen it", 60)
        self.stage.cut()
        upto = self.stage.furthest(self.position.position, 1 << 40)
        cuts = self.stage.between(self.position.position, upto)
        if not cuts:
            return
        segments = [segment for cut in cuts for segment in cut.segments]
        for segment in segments:
            described = {s.oid: s for s in self.schemas.values()}[segment.table_oid]
            announced = TableSchema.from_json(segment.schema_json)
            assert announced.columns == described.columns
            assert sorted(announced.key) == sorted(
                described.key
            )  # the stream does not contain the key's order
        units = plan_fold_tasks(segments, direct_bytes_max=-1 if tasks else 1 << 40)
        files = [(task, self._writer().write(task)) for task in units]
        position = Position(GROUP, upto, cuts[-1].time_us, "1", 1)
        plan = plan_batch(files, self.states, position, before=self.position.position)
        assert commit_batch(self.session, plan)
        self.position = position
        self.stage.release(upto)

    def _writer(self) -> FoldTaskWriter:
        paths = (str(self.directory / name) for name in ("scratch", "tables.json", "skips"))
        return FoldTaskWriter(GROUP, f"run{next(_numbers)}", self.lake.data_path, *paths)

    def _write_tables(self) -> None:
        places = [
            (s, table_directory(self.session, self.states[s.oid].target)) for s in self.schemas.values()
        ]
        notice_changes(self.session)
        layouts = {oid: known_layout(self.session, state.target) for oid, state in self.states.items()}
        write_tables(self.directory / "tables.json", places, layouts=layouts)

    def lay_out(self, table: str, *changes: str) -> None:
        """Alter the layout of a table's two targets, as people do; tasks are told of it."""
        for schema in ("stream", "copied"):
            target = TableName(schema, table)
            with self.session.transaction():
                ensure_target(self.session, target, self.schemas[table])
            for change in changes:
                self.session.execute(f"alter table {lake_table(target)} {change}")
        self._write_tables()

    def copy(self, table: str, *, chunk_bytes: int = 8192) -> None:
        """Copy a table into its target of copies, which is emptied first."""
        schema = self.schemas[table]
        target = TableName("copied", schema.name)
        with self.session.transaction():
            ensure_target(self.session, target, schema)
        with self.db.connect() as conn:
            snapshot = export_snapshot(self.db.dsn)
            try:
                with ChunkReader(self.db.dsn, snapshot.name) as reader:
                    files = [
                        written_chunk(
                            reader.rows(schema, chunk), schema,
                            data_path=self.lake.data_path, directory=table_directory(self.session, target),
                            name=f"aqueduck-{GROUP}-copy{next(_numbers)}", chunk=chunk.number,
                            layout=known_layout(self.session, target),
                        )
                        for chunk in plan_chunks(conn, schema, chunk_bytes=chunk_bytes)
                    ]  # fmt: skip
            finally:
                snapshot.close()
        with self.session.transaction():
            empty_target(self.session, target, schema)
            add_files(self.session, target, [path for file in files for path in file.paths])

    def read(self, statement: str) -> list[tuple[Any, ...]]:
        """What an independent observer sees in the lake."""
        return self._observer.query(statement)[0]
