"""
The state of a fan-out's destinations for readers: a SQLite database in `state_dir`, with one row per destination.

A row is written when it changes, even if the destination's own lake cannot be written.  The authoritative cursor
is in each destination's lake (`lake.destinations.destination`).  A second table has the values for which the pattern
made destinations; these are stored nowhere else.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from aqueduck.config.fanout import FanoutConfig
from aqueduck.config.fanout_roster import Made

__all__ = ["DestinationsFile", "state_path"]

_TABLE = """
create table if not exists destinations (
    destination_id text primary key, instance_id text, state text, last_snapshot_id integer,
    lag_snapshots integer, lag_seconds real, rows_replicated integer, last_error text, last_change_at text,
    retry_at text, verdict text, verified_at text, identical_at text, differences integer, verify_note text, updated_at text
)
"""
_SHAPE = 3
"""The version of the state table; one with another version is recreated, because its content comes from the lakes."""
_DISCOVERED = "create table if not exists discovered (routing_value text, made_at text, primary key (routing_value, made_at))"
"""The table of destinations that the pattern made, with their places; never recreated."""


class DestinationsFile:
    """The state of every destination as a SQLite table, for `aqueduck status` and users' own SQL."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: Mapping[str, tuple[Any, ...]] = {}
        self._remembered = Made()
        self._writing = threading.Lock()

    def write(self, rows: Mapping[str, tuple[Any, ...]]) -> None:
        """Write the rows, given by destination, that changed since the last call."""
        with self._writing:
            self._write(rows)

    def remember(self, made: Made) -> None:
        """Add the destinations that the pattern made, if any are new."""
        with self._writing:
            new = made - self._remembered
            if not new:
                return
            with self._open() as con:
                con.execute(_DISCOVERED)
                con.executemany("insert or ignore into discovered values (?, ?)", new)
            self._remembered = made

    def recall(self) -> Made:
        """All destinations that the pattern has made."""
        if not self.path.exists():
            return Made()
        with self._open() as con:
            if con.execute("select 1 from sqlite_master where name = 'discovered'").fetchone() is None:
                return Made()
            return Made(con.execute("select routing_value, made_at from discovered").fetchall())

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Open the file in a transaction, and create it if it is missing."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(sqlite3.connect(self.path, timeout=10)) as con, con:
            yield con

    def _write(self, rows: Mapping[str, tuple[Any, ...]]) -> None:
        changed = [row for key, row in rows.items() if self._written.get(key) != row]
        gone = [(key,) for key in self._written if key not in rows]
        if not changed and not gone:
            return
        with self._open() as con:
            if con.execute("pragma user_version").fetchone() != (_SHAPE,):
                con.execute("drop table if exists destinations")
                con.execute(f"pragma user_version = {_SHAPE}")
            con.execute(_TABLE)
            con.executemany(
                f"insert or replace into destinations values ({'?, ' * 15}"
                " strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))",
                changed,
            )
            con.executemany("delete from destinations where destination_id = ?", gone)
        self._written = rows

    def read(self) -> list[dict[str, Any]]:
        """The rows; empty before the first run of the service."""
        if not self.path.exists():
            return []
        with self._open() as con:
            if con.execute("select 1 from sqlite_master where name = 'destinations'").fetchone() is None:
                return []
            con.row_factory = sqlite3.Row
            return [dict(row) for row in con.execute("select * from destinations order by destination_id")]


def state_path(config: FanoutConfig) -> Path:
    """The path of the database in which an instance keeps the state of its destinations."""
    name = "".join(c if c.isalnum() or c in "-_" else "_" for c in config.instance.id)
    return Path(config.state_dir) / "fanout" / f"{name}.sqlite"
