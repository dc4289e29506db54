"""
A capture without Spark and without a lake, whose offered changes are replayed row by row.

`Replica` holds what a replica would hold: compare it with the source at any commit.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from aqueduck.model.schema import TableSchema, parse_lsn
from aqueduck.postgres.capture.capture import Capture
from aqueduck.postgres.capture.capture_settings import CaptureSettings
from aqueduck.postgres.capture.stage import Stage
from aqueduck.postgres.catalog.tables import describe_table
from aqueduck.postgres.publications.slots import create_slot
from aqueduck.state_files.files import write_tables
from tests.fix_postgres import Database, wait_until


class Replica:
    """A capture of some tables without Spark; `catch_up` replays what it offers."""

    def __init__(self, db: Database, directory: Path, tables: tuple[str, ...], **keywords: Any) -> None:
        self.db, self.directory = db, directory
        with db.connect() as conn:
            conn.execute(f"create publication p for table {', '.join(tables)}".encode())
            position = create_slot(conn, "s")
            self.schemas = [describe_table(conn, f"public.{name}") for name in tables]
        write_tables(directory / "tables.json", [(s, None) for s in self.schemas])
        self.settings = CaptureSettings(
            dsn=db.dsn, slot="s", publication="p", position=position, directory=str(directory),
            segment_bytes=32 << 10, slot_retries=8, **keywords,
        )  # fmt: skip
        self.cells: dict[str, dict[str, dict[str, Any]]] = {s.name: {} for s in self.schemas}
        self.numbers: dict[int, list[int]] = {}
        self.after = position
        self.start()

    def start(self) -> None:
        self.stage = Stage(
            self.directory / "stage", segment_bytes=32 << 10, bytes_max=256 << 10, position=self.after
        )
        self.capture = Capture(replace(self.settings, position=self.after), self.stage)
        self.capture.start()

    def wait_unfinished(self, transactions: int) -> None:
        def there() -> bool:
            self.capture.check()
            return self.stage.unfinished[0] == transactions

        wait_until(there, f"{transactions} unfinished transactions are staged")

    def catch_up(self) -> None:
        """Take everything that is committed now, batch by batch, as the lake would."""
        end = parse_lsn(self.db.value("select pg_current_wal_insert_lsn()::text"))
        self.db.execute("select pg_logical_emit_message(true, '', ''), pg_current_xact_id()")
        while self.capture.seen < end or self.stage.has_ready(self.after):
            self.capture.check()
            self.stage.cut()
            upto = self.stage.furthest(self.after, 1 << 20)
            for cut in self.stage.between(self.after, upto):
                for segment in sorted(cut.segments, key=lambda s: s.first_ord):
                    self._replay(segment)
            self.stage.release(upto)
            self.after = upto
            self.capture.ask_position()

    def _replay(self, segment: Any) -> None:
        table = self.last = TableSchema.from_json(segment.schema_json)
        rows = self.cells[table.name]
        if segment.kind == "truncate":
            rows.clear()
            self.numbers.setdefault(segment.xid, []).append(segment.seq)
            return
        names = [c.name for c in table.columns]
        for r in pa.ipc.open_file(segment.path).read_all().to_pylist():
            assert r["_lsn"]
            assert r["_ts"]
            self.numbers.setdefault(r["_xid"], []).append(r["_seq"])
            if r["o0"] is not None:
                rows.pop(r["o0"])
            if r["_op"] != 3:
                image = {name: r[f"n{i}"] for i, name in enumerate(names)}
                assert r["_op"] == 2 or r["n0"] not in rows, "nothing is inserted twice"
                rows[r["n0"]] = image

    def assert_same(self) -> None:
        """The replayed rows equal the source's."""
        for schema in self.schemas:
            with self.db.connect() as conn:
                names = [c.name for c in describe_table(conn, schema.name).columns]
            found = self.db.query(f"select {', '.join(f'{n}::text' for n in names)} from {schema.name}")
            want = {row[0]: dict(zip(names, row, strict=True)) for row in found}
            assert {k: {n: v.get(n) for n in names} for k, v in self.cells[schema.name].items()} == want
        for xid, numbers in self.numbers.items():
            assert sorted(numbers) == list(range(len(numbers))), f"the numbers of {xid} have a gap"
