"""
The whole chain in one history: PostgreSQL → sync → lake → fan-out, `ducklake_changes` and events, with upkeep between any two steps.

A `Chain` does one random step after the other.  Steps that write are processes of their own, and some are killed at
a durable step and then run again.  After each of them its end is compared with what it reads from; at the end all ends
are compared with the source.  Comparisons use connections of the test's own: psycopg for the source, an engine of DuckDB for each lake.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
from pyspark.sql.streaming.datasource import ReadMaxRows
from pyspark.sql.types import StructField, StructType

from aqueduck.config.lake_place import LakePlace
from aqueduck.model.errors import SourceExpiredError
from aqueduck.spark.formats.lake_source import LakeChangesSource
from tests.chain_steps import FANOUT_FAULTS, SYNC_FAULTS
from tests.fanout_lakes import Fan, connect, document
from tests.fix_events import Flow
from tests.fix_postgres import Database
from tests.forks import Forked

TENANTS = {"quack": "quack", "teal": "teal"}
"""Rows of other tenants, and of none, have no destination."""
COMPANIES = ("quack", "teal", "mallard", None)
EVENTS_FAULTS = (
    "capture.staged", "events.parts_written", "sink.written", "sink.flushed", "bookmark.saved:2",
    "bookmark.before_rename:2", "batch.committed",
)  # fmt: skip
SETUP = """
create table t (id int primary key, company text, n int, note text);
create table other (id int primary key, v text);
alter table t replica identity {identity};
insert into t select g, (array['quack', 'teal', 'mallard'])[1 + g % 3], g, repeat('x', g) from generate_series(1, 40) g;
create publication faucet_pub for table t;
"""
Row = tuple[Any, ...]


class Chain:
    """One history; the same seed gives the same one."""

    def __init__(self, seed: int, db: Database, directory: Path) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.db = db
        self.directory = directory
        self.full = bool(seed % 2)
        """Only with the full old row do events contain the earlier key of a row; so keys change only then."""
        self.inline_rows = self.random.choice((0, 0, 3, 50))
        self.steps: list[str] = []
        self.kills = 0
        self.foreign_upkeep = self.random.random() < 0.5
        db.observer.prepare_threshold = None  # columns change
        db.execute(SETUP.format(identity="full" if self.full else "default"))
        source = LakePlace(catalog=f"sqlite:{directory}/lake.sqlite", data_path=f"{directory}/data")
        self.fan = Fan(directory, dict(TENANTS), routing_field="company", places={"source": source})
        self.events = Flow(db, directory, state={"type": "file", "config": {"path": "./bookmark"}})
        self.changes = Changes(source)
        self._added: list[str] = []
        self.growing = True
        """Only inserts for a while: DuckLake merges files that have no deletes."""
        self._numbers = iter(range(1_000, 1_000_000))
        self._sync()
        self._write_fanout_file()
        self._events()

    def close(self) -> None:
        self.fan.close()

    # -- a history

    def run(self, rounds: int) -> None:
        choices: list[tuple[Callable[[], None], int]] = [
            (self._change_and_sync, 12), (self._fanout, 5), (self._read_changes, 4), (self._events, 1),
            (self._maintain, 2), (self._merge, 2), (self._flush, 1), (self._rewrite, 1), (self._expire, 1),
        ]  # fmt: skip
        upkeep = (self._maintain, self._merge, self._flush, self._rewrite)
        steps, weights = zip(*choices, strict=True)
        for _ in range(rounds):
            [step] = self.random.choices(steps, weights)
            step()
            if step in upkeep and self.random.random() < 0.6:
                self._fanout()  # so that the next changes come in a range of their own
                self._read_changes()
        self.settle()

    def settle(self) -> None:
        """Catch everything up, and compare all ends with the source."""
        for step in (self._sync, self._fanout, self._read_changes, self._events):
            step()
        rows = self._source("id, company, n, note")
        assert self.events_rows() == rows, self._story("the events do not add up to the source")

    def _story(self, problem: str) -> str:
        return f"{problem}; seed {self.seed}, inline_rows {self.inline_rows}, after {' → '.join(self.steps)}\n{self.log()}"

    def log(self) -> str:
        file = self.directory / "chain.log"
        return file.read_text(errors="replace")[-4000:] if file.exists() else ""

    # -- the source

    def _change_and_sync(self) -> None:
        """One batch of the lake; the source may change some more before it."""
        self._change_source()
        self._sync()

    def _change_source(self) -> None:
        self.growing = self.random.random() < (0.8 if self.growing else 0.3)
        self.steps.append("grow" if self.growing else "change")
        for _ in range(self.random.randint(1, 3)):
            with psycopg.connect(self.db.dsn) as conn:
                for _ in range(self.random.randint(1, 6)):
                    conn.execute(self._statement().encode())

    def _statement(self) -> str:
        some = f"id % {self.random.choice((2, 3, 5, 7))} = {self.random.randint(0, 2)}"
        one = f"id = (select id from t order by md5(id::text || {self.random.random()!r}) limit 1)"
        company = self.random.choice(COMPANIES)
        value = "null" if company is None else f"'{company}'"
        where = self.random.choice((some, one, one, one))
        statements = [
            f"insert into t (id, company, n, note) values ({next(self._numbers)}, {value},"
            f" {self.random.randint(0, 9)}, repeat('y', {self.random.randint(0, 9)}))",
            f"insert into t (id, company, n, note) select {next(self._numbers)} * 1000 + g, {value}, g, 'many'"
            f" from generate_series(1, {self.random.choice((3, 60))}) g",
            f"delete from t where {where}",
            f"update t set company = {value} where {where}",
            f"update t set n = n + 1 where {where}",
            f"insert into other values ({next(self._numbers)}, 'o')",
            f"delete from t where {one}; insert into t (id, company, n, note) values ({next(self._numbers)}, {value}, 0, 'again')",
        ]
        if self.full:
            statements.append(f"update t set id = {next(self._numbers)} where {one}")
        if self.random.random() < 0.04:
            return self._other_columns()
        if not self.growing and self.random.random() < 0.02:
            return "truncate t"
        return self.random.choice(statements[:2] if self.growing else statements)

    def _other_columns(self) -> str:
        """Columns that come, go and change their names, and a row by which the stream shows it."""
        number = next(self._numbers)
        steps = [f"alter table t add column c{number} int default {number}"]
        if self._added:
            column = self.random.choice(self._added)
            self._added.remove(column)
            steps += [
                f"alter table t drop column {column}",
                f"alter table t rename column {column} to c{number}",
            ]
        step = self.random.choice(steps)
        if not step.startswith("alter table t drop"):
            self._added.append(f"c{number}")
        return f"{step}; insert into t (id, company, n, note) values ({number}, 'quack', 1, 'columns')"

    def _source(self, columns: str) -> list[Row]:
        return sorted(self.db.query(f"select {columns} from t"), key=repr)

    # -- what is done to the chain

    def _run(self, name: str, faults: tuple[str, ...], start: Callable[[str | None], Forked]) -> None:
        """Once, or twice because the first time ended at a fault point."""
        self.steps.append(name)
        if faults and self.random.random() < 0.25:
            fault = self.random.choice(faults)
            code = start(fault).wait()
            assert code in (0, -9), self._story(f"{name} with a fault at {fault} ended with {code}")
            if code == -9:
                self.kills += 1
                self.steps.append(f"killed at {fault}")
        code = start(None).wait()
        assert code == 0, self._story(f"{name} ended with {code}")

    def _child(self, function: str, **arguments: Any) -> Callable[[str | None], Forked]:
        log = self.directory / "chain.log"
        return lambda fault: Forked(f"tests.chain_steps:{function}", log, fault=fault, **arguments)

    def _sync(self) -> None:
        tables: dict[str, dict[str, Any]] = {"public.t": {}, "public.other": {}}
        start = self._child(
            "sync", dsn=self.db.service_dsn, directory=str(self.directory), tables=tables,
            inline_rows=self.inline_rows, tasks=self.random.random() < 0.5,
        )  # fmt: skip
        self._run("sync", SYNC_FAULTS, start)
        assert self.lake_rows() == self._source("*"), self._story("the lake is not the source")

    def _write_fanout_file(self) -> None:
        self.fanout_file = self.directory / "fanout.yaml"
        values = document(
            self.fan,
            routing={"field": "company", "key_columns": ["id"]},
            poll={"max_snapshots": 50},
        )
        self.fanout_file.write_text(json.dumps(values))

    def _fanout(self) -> None:
        self._run("fanout", FANOUT_FAULTS, self._child("fanout", config_file=str(self.fanout_file)))
        rows = self.lake_rows()
        for name, value in TENANTS.items():
            mine = [row for row in rows if row[1] == value]
            assert self.fan.rows(name) == mine, self._story(f"{name} has not the rows of {value}")

    def _read_changes(self) -> None:
        self.steps.append("changes")
        assert self.changes.catch_up(), self._story("a change has the lake snapshot of another range")
        assert self.changes.rows == self.lake_rows("id, company, n, note"), self._story(
            f"the changes of the lake do not add up to it ({self.changes.restarts} restarts)"
        )

    def _events(self) -> None:
        self._run("events", EVENTS_FAULTS, lambda fault: self.events.fork(once=True, fault=fault))
        self.events.wait_free()

    def events_rows(self) -> list[Row]:
        """The rows that result from applying the events."""
        rows: dict[int, Row] = {}
        for event in self.events.lines():
            if event["op"] == "truncate":
                rows.clear()
            before, after = event["before"], event["after"]
            if before is not None:
                rows.pop(before["id"], None)
            if after is not None:
                rows[after["id"]] = (after["id"], after["company"], after["n"], after["note"])
        # Rows from before the slot are in no event.
        old = [
            row for row in self._source("id, company, n, note") if row[0] <= 40 and row[0] not in self._seen()
        ]
        return sorted([*rows.values(), *old], key=repr)

    def _seen(self) -> set[int]:
        images = [event[side] for event in self.events.lines() for side in ("before", "after")]
        return {image["id"] for image in images if image is not None}

    def lake_rows(self, columns: str = "*") -> list[Row]:
        return sorted(self.fan.look("source", f"select {columns} from lake.t"), key=repr)

    # -- upkeep: our own, and that of others

    def _maintain(self) -> None:
        readers = [str(self.fanout_file)] if self.random.random() < 0.7 else []
        self._run("maintain", (), self._child("maintain", directory=str(self.directory), readers=readers))

    def _merge(self) -> None:
        self._others("merge", "call ducklake_merge_adjacent_files('lake')")

    def _flush(self) -> None:
        self._others("flush", "call ducklake_flush_inlined_data('lake')")

    def _rewrite(self) -> None:
        # DuckLake 1.5.5 shows removed rows again in the past if their removal is flushed after a rewrite.
        self._others(
            "rewrite",
            "call ducklake_flush_inlined_data('lake')",
            "call ducklake_rewrite_data_files('lake', delete_threshold => 0.01)",
        )

    def _expire(self) -> None:
        self._others("expire", "call ducklake_expire_snapshots('lake', older_than => now())")

    def _others(self, name: str, *statements: str) -> None:
        """Done by another client of the lake, in its own session."""
        if not self.foreign_upkeep:
            return
        self.steps.append(name)
        with connect(self.fan.place("source")) as con:
            for statement in statements:
                con.execute(statement)


class Changes:
    """A stream over `ducklake_changes` that applies what it reads; starts again where history has expired."""

    COLUMNS = ("id", "company", "n", "note")

    def __init__(self, place: LakePlace) -> None:
        self._place = place
        self._rows: Counter[Row] = Counter()
        self._reader: Any = None
        self._offset: dict[str, Any] = {}
        self.restarts = 0

    @property
    def rows(self) -> list[Row]:
        return sorted(self._rows.elements(), key=repr)

    def catch_up(self) -> bool:
        """Apply new changes; false if a change is outside of the requested range."""
        if self._reader is None:
            self._begin()
        try:
            return self._batch()
        except SourceExpiredError:
            self.restarts += 1
            self._begin()
            return True

    def _options(self) -> dict[str, str]:
        return {"catalog": self._place.catalog, "data_path": self._place.data_path, "table": "t"}

    def _begin(self) -> None:
        """The rows of now, and changes from here on."""
        with connect(self._place) as con:
            [[at]] = con.execute("from lake.current_snapshot()").fetchall()
            found = con.execute(
                f"select {', '.join(self.COLUMNS)} from lake.t at (version => {at})"
            ).fetchall()
        self._rows = Counter(found)
        source = LakeChangesSource({**self._options(), "starting_snapshot": str(at + 1)})
        names = (*self.COLUMNS, "_change_type", "_lake_snapshot_id", "_rowid")
        fields = {field.name: field for field in source.schema().fields}
        schema = StructType([StructField(name, fields[name].dataType) for name in names])
        self._reader = source.streamReader(schema)
        self._offset = self._reader.initialOffset()

    def _batch(self) -> bool:
        reader = self._reader
        end = reader.latestOffset(self._offset, ReadMaxRows(1 << 30))
        found = [
            tuple(row.values())
            for partition in reader.partitions(self._offset, end)
            for batch in reader.read(partition)
            for row in batch.to_pylist()
        ]
        for *row, kind, snapshot, _rowid in sorted(found, key=lambda row: row[-2]):
            assert self._offset["lake_snapshot"] < snapshot <= end["lake_snapshot"], (
                "a change of another range"
            )
            self._rows[tuple(row)] += -1 if kind in ("delete", "update_preimage") else 1
        self._rows = Counter({row: count for row, count in self._rows.items() if count})
        self._offset = end
        return True
