"""The demo of `sync`: a small shop in an embedded PostgreSQL, replicated live into a lake."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
from rich.console import Group, RenderableType

from aqueduck.config.sync import parse_config
from aqueduck.lab.demo.lake_reader import PlainReader
from aqueduck.lab.demo.play import Flow, Load
from aqueduck.lab.demo.screen import Count, Screen, grid
from aqueduck.lab.lab_server import lab_server, private_file
from aqueduck.lab.shop import KEYS, ShopLoad, create_shop
from aqueduck.model.errors import NoSnapshotError
from aqueduck.model.schema import parse_lsn
from aqueduck.sync.asof import find_snapshot
from aqueduck.sync.verify import verify_tables

__all__ = ["SyncDemo"]

CONFIG = """\
source:
  dsn: "{dsn}"
lake:
  catalog: sqlite:lake.sqlite
  data_path: lake_data
groups:
  - name: shop
    flush_interval_ms: 500
    tables:
      - source: public.customers
      - source: public.orders
      - source: public.order_items
server:
  port: {port}
"""
QUESTION = """\
select c.country, count(*) as orders, sum(o.total) as revenue
from lake.main.orders o join lake.main.customers c on c.id = o.customer_id
group by all order by revenue desc limit 3"""
TIME_TRAVEL = (
    "select count(*) as orders, sum(total) as revenue\nfrom lake.main.orders at (version => {snapshot})"
)
SECONDS_BACK = 10
BEHIND = 512 * 1024
"""A service that has this many bytes to read has not caught up."""


class SyncDemo:
    """The demo while it runs."""

    source = "a PostgreSQL with a small shop"
    names = ("PostgreSQL", "lake")
    advice: tuple[str, ...] = (
        "your own database: write aqueduck.yaml as in the README, then",
        "  [bold]aqueduck check -c aqueduck.yaml[/] and [bold]aqueduck run -c aqueduck.yaml[/]",
        "other flows: [bold]aqueduck demo --flow fanout[/] and [bold]--flow events[/]",
    )

    def prepare(self, directory: Path, port: int, stack: contextlib.ExitStack) -> Path:
        server = stack.enter_context(lab_server(directory))
        create_shop(server.dsn)
        file = directory / "aqueduck.yaml"
        private_file(file, CONFIG.format(dsn=server.dsn, port=port))
        self._config = parse_config(file.read_text(), base_dir=directory, env={})
        self._source = stack.enter_context(psycopg.connect(server.dsn, autocommit=True))
        self._lake = PlainReader(directory / "lake.sqlite")
        stack.callback(self._lake.close)
        self._load = ShopLoad(server.dsn)
        return file

    def load(self) -> Load:
        return self._load

    def runs(self, flow: Flow) -> bool:
        group = _group(flow)
        tables = group.get("tables", ())
        streaming = len(tables) == len(KEYS) and all(table["state"] == "STREAMING" for table in tables)
        return streaming and group["lag_bytes"] < BEHIND

    def act(self) -> str:
        self._load.add_channel(self._source)
        return "[bold]alter table orders add column channel text[/]: the lake follows"

    def view(self, flow: Flow | None) -> RenderableType:
        states = {t["source"]: t["state"] for t in _group(flow).get("tables", ())}
        counts = grid(
            ("table", "PostgreSQL", "lake", "state"),
            (
                (
                    name,
                    self._source_rows(name),
                    self._lake_rows(name),
                    states.get(f"public.{name}", "no service"),
                )
                for name in KEYS
            ),
        )
        return Group(counts, grid(("country", "orders in the lake", "revenue"), self._lake.rows(QUESTION)))

    def line(self, flow: Flow | None) -> str:
        group = _group(flow)
        fresh = group.get("freshness_seconds")
        age = "–" if fresh is None else f"{fresh:.1f} s"
        behind = group.get("lag_bytes", 0) / 1024
        return f"{self._load.transactions:,} transactions  {behind:,.0f} KiB behind  fresh {age}"

    def last_change(self) -> Callable[[Flow], bool]:
        [(before,)] = self._source.execute("select pg_catalog.pg_current_wal_insert_lsn()::text").fetchall()
        self._source.execute("update customers set credit = credit where id = 1")
        position = parse_lsn(str(before))
        return lambda flow: parse_lsn(_group(flow).get("position") or "0/0") > position

    def look_back(self, screen: Screen, ended: float) -> None:
        moment = datetime.fromtimestamp(ended - SECONDS_BACK, UTC).isoformat()
        with contextlib.suppress(NoSnapshotError):  # the load was too short
            state = find_snapshot(self._config, lsn=None, time=moment, group="shop")
            sql = TIME_TRAVEL.format(snapshot=state.snapshot)
            names, past = self._lake.ask(sql)
            _, now = self._lake.ask("select count(*), sum(total) from lake.main.orders")
            rows = [(f"{SECONDS_BACK} s before", *past[0]), ("at the end", *now[0])]
            screen.question(
                "time travel, in DuckDB: aqueduck asof finds the version", sql, ("", *names), rows
            )

    def counts(self) -> Iterator[Count]:
        """Compare the keys of both sides, beside the verdict of `aqueduck verify` on all values."""
        verdicts = {r.table: r for r in verify_tables(self._config)}
        for name, key in KEYS.items():
            query = f"select {key} from {{}}{name}"
            source = {tuple(row) for row in self._source.execute(query.format("").encode())}
            lake = Counter(self._lake.ask(query.format("lake.main."))[1])
            yield Count(
                name,
                source=len(source),
                copy=lake.total(),
                lost=len(source - lake.keys()),
                duplicated=lake.total() - len(lake),
                identical=verdicts[f"public.{name}"].same,
            )

    def _source_rows(self, table: str) -> int:
        return int(self._source.execute(f"select count(*) from {table}".encode()).fetchall()[0][0])

    def _lake_rows(self, table: str) -> int | None:
        rows = self._lake.rows(f"select count(*) from lake.main.{table}")
        return rows[0][0] if rows else None


def _group(flow: Flow | None) -> dict[str, Any]:
    groups: list[dict[str, Any]] = flow["groups"] if flow else []
    return groups[0] if groups else {}
