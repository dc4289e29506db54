"""
A source lake and some destinations for tests, with polls in this process and an observer of its own.

`Fan.poll` does what a cycle of the service does, without Spark; `Fan.differing` compares every destination with
the source's filtered rows, through connections that share nothing with the code under test.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb

from aqueduck.config.fanout import FanoutConfig, parse_fanout
from aqueduck.config.lake_place import LakePlace
from aqueduck.lake.destinations.buckets import apply_bucket
from aqueduck.lake.destinations.cycle import Applied, Destination
from aqueduck.lake.destinations.destination import read_state
from aqueduck.lake.session.engine import load_extension
from aqueduck.lake.session.pool import LakePool
from aqueduck.lake.source.lake_changes import ReadReport, Routes, check_routes, chunks, read_routed
from aqueduck.lake.source.source_lake import SourceLake
from aqueduck.model.errors import MergedChangesError, SourceExpiredError
from aqueduck.model.layout import AS_IT_IS, WantedLayout
from aqueduck.model.schema import TableName

T = TableName("main", "t")


@dataclass
class Fan:
    """One source table `t`, and a destination for each value."""

    directory: Path
    values: dict[str, str]
    """Destination id → routing value."""
    routing_field: str = "c"
    keys: tuple[str, ...] = ("id",)
    inline: int = 5
    places: dict[str, LakePlace] = field(default_factory=dict)
    pool: LakePool = field(default_factory=lambda: LakePool(threads=1))
    reports: list[ReadReport] = field(default_factory=list)
    layout: WantedLayout = AS_IT_IS
    observer: duckdb.DuckDBPyConnection = field(default_factory=lambda: engine())
    _source: duckdb.DuckDBPyConnection | None = None

    def place(self, name: str) -> LakePlace:
        default = LakePlace(
            catalog=f"sqlite:{self.directory}/{name}.sqlite", data_path=f"{self.directory}/{name}_data/"
        )
        return self.places.setdefault(name, default)

    # -- the source, as its users change it

    @property
    def source(self) -> duckdb.DuckDBPyConnection:
        if self._source is None:
            self._source = connect(self.place("source"), f"data_inlining_row_limit {self.inline}")
        return self._source

    def change(self, *statements: str) -> None:
        for statement in statements:
            self.source.execute(statement)

    def source_rows(self, value: str) -> list[tuple[Any, ...]]:
        return sorted(
            self.source.execute(
                # Concatenated: DuckLake's statistics of the table can be wrong, and would leave out files.
                f"select * from lake.t where \"{self.routing_field}\"::varchar || '' = ?",
                [value],
            ).fetchall(),
            key=repr,
        )

    # -- the fan-out

    def destinations(self) -> dict[str, Destination]:
        return {
            i: Destination(i, value, self.place(i), T, self.cursor(i), self.layout)
            for i, value in self.values.items()
        }

    def cursor(self, destination: str) -> int | None:
        with self.pool.use(self.place(destination)) as lake:
            state = read_state(lake, destination)
            return None if state is None else state.cursor

    def latest(self) -> int:
        with self.pool.use(self.place("source"), read_only=True) as lake:
            return SourceLake(lake, T).latest()

    def seed(self, *ids: str, at: int | None = None) -> list[Applied]:
        with self.pool.use(self.place("source"), read_only=True) as lake:
            source = SourceLake(lake, T)
            plan = source.plan_scan(self.routing_field, self.keys, source.latest() if at is None else at)
        return self._apply(plan, [d for i, d in self.destinations().items() if i in (ids or self.values)])

    def poll(self, *ids: str) -> list[Applied]:
        """One cycle for these destinations, or for all; those without a cursor, or with an expired one, are seeded."""
        mine = [d for i, d in self.destinations().items() if i in (ids or self.values)]
        new = [d.id for d in mine if d.cursor is None]
        done = self.seed(*new) if new else []
        mine = [d for d in mine if d.cursor is not None]
        if not mine:
            return done
        start = min(d.cursor for d in mine if d.cursor is not None)
        try:
            with self.pool.use(self.place("source"), read_only=True) as lake:
                source = SourceLake(lake, T)
                plan = source.plan(self.routing_field, self.keys, start, source.latest())
        except SourceExpiredError:
            return done + self.seed(*(d.id for d in mine))
        try:
            applied = self._apply(plan, mine)
        except MergedChangesError:
            return done + self.seed(*(d.id for d in mine))
        # What a reader got wrong is counted and seeded again: without this, a comparison would find nothing.
        assert not [a.id for a in applied if a.miscounted], "changes were misread"
        again = [a.id for a in applied if a.cursor is None]
        return done + applied + (self.seed(*again) if again else [])

    def _apply(self, plan: Any, mine: list[Destination]) -> list[Applied]:
        routes = Routes(
            tuple(d.value for d in mine),
            tuple(d.cursor or 0 for d in mine),
            tuple(i % 2 for i, _ in enumerate(mine)),
        )
        with self.pool.use(self.place("source"), read_only=True) as lake:
            check_routes(lake, plan, routes, [d.id for d in mine])
        name, report = read_routed(self.pool, plan, routes, count_after=plan.start - int(plan.scan))
        self.reports.append(report)
        done: list[Applied] = []
        for bucket in (0, 1):
            part = {i: d for i, d in enumerate(mine) if i % 2 == bucket}
            if part:
                streams = [chunk for chunk, _ in chunks(self.pool, name, plan, bucket)]
                done += apply_bucket(
                    self.pool, plan, part, streams, instance="test", expected=report.expected
                )
        return done

    # -- looking at it

    def rows(self, destination: str) -> list[tuple[Any, ...]]:
        return sorted(self.look(destination, "from lake.t"), key=repr)

    def look(self, name: str, query: str) -> list[tuple[Any, ...]]:
        """Ask a lake through an engine that the code under test knows nothing of."""
        allow(self.observer, self.place(name))
        self.observer.execute(attach_statement(self.place(name), "read_only"))
        try:
            return self.observer.execute(query).fetchall()
        finally:
            self.observer.execute("detach lake")

    def differing(self) -> dict[str, Any]:
        """Destinations that are not the source's filtered rows, with both sides."""
        found = {}
        for name, value in self.values.items():
            here, there = self.rows(name), self.source_rows(value)
            if here != there:
                found[name] = {"destination": here, "source": there}
        return found

    def snapshots(self) -> dict[str, int]:
        """The newest lake snapshot of every lake."""
        found = {}
        for name in ("source", *self.values):
            [[found[name]]] = self.look(name, "from lake.current_snapshot()")
        return found

    def let_go(self) -> None:
        """Close the connection with the source; the next change opens another."""
        if self._source is not None:
            self._source.close()
            self._source = None

    def close(self) -> None:
        self.pool.close()
        self.observer.close()
        self.let_go()


def engine() -> duckdb.DuckDBPyConnection:
    """A DuckDB with what lakes need."""
    con = duckdb.connect(":memory:", config={"threads": "1"})
    for name in ("ducklake", "sqlite_scanner", "postgres_scanner", "httpfs"):
        load_extension(con, name)
    con.execute("set TimeZone = 'UTC'")
    return con


def attach_statement(place: LakePlace, *options: str) -> str:
    catalog = place.catalog
    if catalog.startswith("postgresql://"):
        catalog = f"postgres:{catalog}"
    given = [f"data_path '{place.data_path}'", *options]
    if place.metadata_schema:
        given.append(f"metadata_schema '{place.metadata_schema}'")
    return f"attach 'ducklake:{catalog}' as lake ({', '.join(given)})"


def allow(con: duckdb.DuckDBPyConnection, place: LakePlace) -> None:
    """Tell the engine how to reach the lake's object store, if it has one."""
    given = dict(place.properties)
    if given:
        con.execute(
            f"create or replace secret store (type s3, key_id '{given['s3_access_key_id']}',"
            f" secret '{given['s3_secret_access_key']}', endpoint '{given['s3_endpoint']}',"
            " use_ssl false, url_style 'path', region 'us-east-1')"
        )


def connect(place: LakePlace, *options: str) -> duckdb.DuckDBPyConnection:
    """A lake attached as `lake` on a connection of the test's own."""
    con = engine()
    allow(con, place)
    con.execute(attach_statement(place, *options))
    return con


def document(fan: Fan, **sections: Any) -> dict[str, Any]:
    """A configuration file for it."""

    def lake(name: str) -> dict[str, str]:
        return {"catalog": str(fan.place(name).catalog), "data_path": fan.place(name).data_path}

    return {
        "source": {**lake("source"), "table": "t"},
        "routing": {"field": "c", "key_columns": ["id"]},
        "destinations": [{"id": i, "routing_value": v, **lake(i)} for i, v in fan.values.items()],
        **sections,
    }


def config(fan: Fan, **sections: Any) -> FanoutConfig:
    return parse_fanout(json.dumps(document(fan, **sections)), base_dir=fan.directory, env={})
