"""
Servers that share a past: a copy of a data directory that is started in the place of its original, as it is or promoted.

The copy takes the original's port, so that the connection strings of a test lead to it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from aqueduck.lab.embedded import EmbeddedPostgres
from tests.fix_postgres import Database, wait_until

NewServer = Callable[..., EmbeddedPostgres]


class Twins:
    """A server, and a copy of it as it was when `back_up` was called."""

    def __init__(self, new_server: NewServer, version: int) -> None:
        self._new_server = new_server
        self.server = new_server(version=version)
        with psycopg.connect(self.server.dsn, autocommit=True) as admin:
            admin.execute("create database test_twins")
        self.db = Database(self.server, "test_twins")

    def back_up(self) -> None:
        """A copy of the whole data directory, with its slots; the server has been stopped for it."""
        self.db.observer.close()
        self.server.stop()
        self._copy = Path(f"{self.server.data_dir}-copy")
        subprocess.run(["cp", "-a", self.server.data_dir, self._copy], check=True)
        self.server.start()
        self.db = Database(self.server, "test_twins")

    def fail_over(self, *, promote: bool) -> None:
        """The server is gone for ever; its copy takes over, on a timeline of its own if it was a standby."""
        self.db.observer.close()
        self.server.stop("immediate")
        if promote:
            signal = self._copy / "standby.signal"
            signal.touch()
            owner = self._copy.stat()
            with contextlib.suppress(PermissionError):
                signal.chmod(0o600)
                os.chown(signal, owner.st_uid, owner.st_gid)
        self.server = self._new_server(self._copy, version=self.server.version, port=self.server.port)
        self.db = Database(self.server, "test_twins")
        if promote:
            assert self.db.value("select pg_promote()")
            wait_until(lambda: not self.db.value("select pg_is_in_recovery()"), "the standby is promoted")

    def restart(self) -> None:
        """The server that was killed is back."""
        self.server.start()
        self.db = Database(self.server, "test_twins")

    def write_past(self, position: int) -> None:
        """WAL of others, until the server has passed a position."""
        self.db.execute("create table if not exists filler (t text)")
        at = "select (pg_current_wal_lsn() - '0/0')::int8"
        while self.db.value(at) <= position + 100_000:
            self.db.execute("insert into filler select repeat('x', 1000) from generate_series(1, 1000)")


@pytest.fixture
def twins(new_server: NewServer, request: pytest.FixtureRequest) -> Iterator[Twins]:
    """On PostgreSQL 18, or the version of a parameter."""
    pair = Twins(new_server, getattr(request, "param", 18))
    yield pair
    pair.db.observer.close()
