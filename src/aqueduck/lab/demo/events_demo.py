"""The demo of `events`: every change of a small shop becomes one line of JSON, in commit order."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
from rich.console import Group, RenderableType
from rich.text import Text

from aqueduck.lab.demo.play import Flow, Load
from aqueduck.lab.demo.screen import Count, Screen, grid
from aqueduck.lab.lab_server import lab_server, private_file
from aqueduck.lab.shop import KEYS, ShopLoad, create_shop

__all__ = ["EventsDemo", "Rows", "count_events"]

CONFIG = """\
version: 1
source:
  type: postgres-cdc
  config:
    connection_url: "{dsn}"
    slot_name: demo
    publication_name: demo
    create_slot_if_missing: true
sink:
  type: jsonl
  config:
    path: changes.jsonl
state:
  type: file
  config:
    path: bookmark
server:
  port: {port}
"""
COMPARED = {
    "customers": ("name", "email", "credit"),
    "orders": ("status", "total"),
    "order_items": ("sku", "quantity", "price"),
}
"""The columns whose values are compared at the end, as text."""
LAST = 4
BEHIND = 2_000


Rows = dict[tuple[object, ...], tuple[object, ...] | None]
"""The values of rows by key; `None` for a deleted row."""


class EventsDemo:
    """The demo while it runs."""

    source = "a PostgreSQL with a small shop"
    names = ("changes", "events")
    advice: tuple[str, ...] = (
        "your own database: write a file as in docs/events.md, then",
        "  [bold]aqueduck check -c events.yaml[/] and [bold]aqueduck run -c events.yaml[/]",
        "without a file: [bold]aqueduck tail --dsn …[/]",
    )

    def prepare(self, directory: Path, port: int, stack: contextlib.ExitStack) -> Path:
        server = stack.enter_context(lab_server(directory))
        create_shop(server.dsn)
        self._source = stack.enter_context(psycopg.connect(server.dsn, autocommit=True))
        self._source.execute("create publication demo for table customers, orders, order_items")
        file = directory / "events.yaml"
        private_file(file, CONFIG.format(dsn=server.dsn, port=port))
        self._events = _EventFile(directory / "changes.jsonl")
        self._load = ShopLoad(server.dsn)
        return file

    def load(self) -> Load:
        return self._load

    def runs(self, flow: Flow) -> bool:
        streaming = [group for group in flow["groups"] if group["state"] == "streaming"]
        return bool(streaming) and self._load.changes - self._events.read() < BEHIND

    def act(self) -> str:
        self._load.add_channel(self._source)
        return "[bold]alter table orders add column channel text[/]: the next events have it"

    def view(self, flow: Flow | None) -> RenderableType:
        events = self._events.read()
        state = flow["groups"][0]["state"] if flow and flow["groups"] else "no service"
        counts = grid(
            ("", "changes", "events", "state"), [("shop", f"{self._load.changes:,}", f"{events:,}", state)]
        )
        lines = (Text(line, overflow="ellipsis", no_wrap=True) for line in self._events.last)
        return Group(counts, *lines)

    def line(self, flow: Flow | None) -> str:
        return f"{self._load.transactions:,} transactions"

    def last_change(self) -> Callable[[Flow], bool]:
        self._source.execute("update customers set name = 'the last change' where id = 1")
        self._load.changes_of["customers"] += 1
        return lambda _flow: self._events.read() > 0 and "the last change" in self._events.last[-1]

    def look_back(self, screen: Screen, ended: float) -> None:
        """Events are the past; there is nothing to add."""

    def counts(self) -> Iterator[Count]:
        self._events.read()
        for name in KEYS:
            yield count_events(
                name, self._events.by_table.get(name, []), self._load.changes_of[name], self._source_rows
            )

    def _source_rows(self, table: str, rows: Rows) -> Rows:
        """What the source has of the rows that had events."""
        key = KEYS[table].split(", ")
        columns = ", ".join(f"{name}::text" for name in (*key, *COMPARED[table]))
        found = self._source.execute(f"select {columns} from {table}".encode())
        here = {tuple(row[: len(key)]): tuple(row[len(key) :]) for row in found}
        return {identity: here.get(identity) for identity in rows}


def count_events(
    table: str, lines: list[bytes], changes: int, source_rows: Callable[[str, Rows], Rows]
) -> Count:
    """
    Compare a table's events with the changes that were committed; equal lines of one transaction are one event twice.

    The contents are identical if the last event of each row has the row's values.
    """
    distinct = len(set(lines))
    rows = _last_rows(lines, KEYS[table].split(", "), COMPARED[table])
    return Count(
        table,
        source=changes,
        copy=len(lines),
        lost=max(0, changes - distinct),
        duplicated=len(lines) - distinct,
        identical=len(lines) == changes and rows == source_rows(table, rows),
    )


def _last_rows(lines: list[bytes], key: Sequence[str], columns: Sequence[str]) -> Rows:
    """The values of each row after its last event, `None` if it was deleted, by key."""
    rows: Rows = {}
    for line in lines:
        event = json.loads(line)
        after, before = event["after"], event["before"]
        identity = tuple(str((after or before)[name]) for name in key)
        rows[identity] = tuple(str(after[name]) for name in columns) if after else None
    return rows


class _EventFile:
    """The file of events, read as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._count = 0
        self.last: list[str] = []
        self.by_table: dict[str, list[bytes]] = {}

    def read(self) -> int:
        """The number of events so far."""
        with contextlib.suppress(FileNotFoundError), open(self._path, "rb") as file:
            file.seek(self._offset)
            text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._offset += len(whole)
            for line in whole.splitlines():
                self._take(line)
        return self._count

    def _take(self, line: bytes) -> None:
        event: dict[str, Any] = json.loads(line)
        self._count += 1
        self.by_table.setdefault(event["table"], []).append(line)
        shown = event["after"] or event["before"]
        self.last = [*self.last, f"{event['op']} {event['table']} {json.dumps(shown)}"][-LAST:]
