"""Cuts connections to PostgreSQL at a named call: before the statement, or after it and before its answer."""

from __future__ import annotations

import contextlib
import re
import threading
from dataclasses import dataclass, field
from typing import Any, Literal

import psycopg
import pytest

from tests.fix_postgres import Database

When = Literal["before", "after"]
Whose = Literal["its own", "all"]


@dataclass(frozen=True)
class Cut:
    """At the next statement of this kind: whose connections end, and whether it still happens."""

    statement: str
    when: When
    whose: Whose


@dataclass
class Cutter:
    """Sees every statement of this process, but for those of observers."""

    db: Database
    admin: psycopg.Connection[Any]
    statements: dict[str, None] = field(default_factory=dict)
    """What kinds were seen since `forget`, in order."""
    fired: list[Cut] = field(default_factory=list)
    _armed: Cut | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = psycopg.Cursor.execute

        def execute(cursor: psycopg.Cursor[Any], query: Any, *arguments: Any, **keywords: Any) -> Any:
            if not (cursor.connection.info.parameter_status("application_name") or "").startswith("aqueduck"):
                return plain(cursor, query, *arguments, **keywords)
            cut = self._see(_kind(query))
            if cut is None:
                return plain(cursor, query, *arguments, **keywords)
            if cut.when == "after":
                plain(cursor, query, *arguments, **keywords)
            self._end(cut, cursor.connection.info.backend_pid)
            if cut.when == "after":
                # libpq has to notice it: after we close a connection, even its user is unknown.
                with contextlib.suppress(psycopg.OperationalError):
                    plain(cursor, "select 1")
                raise psycopg.OperationalError("server closed the connection unexpectedly")
            return plain(cursor, query, *arguments, **keywords)

        monkeypatch.setattr(psycopg.Cursor, "execute", execute)

    def forget(self) -> None:
        with self._lock:
            self.statements.clear()

    def arm(self, cut: Cut | None) -> None:
        with self._lock:
            self._armed = cut

    def _see(self, kind: str) -> Cut | None:
        with self._lock:
            self.statements[kind] = None
            if self._armed is None or self._armed.statement != kind:
                return None
            cut, self._armed = self._armed, None
            self.fired.append(cut)
            return cut

    def _end(self, cut: Cut, pid: int) -> None:
        with self._lock:
            self.admin.execute(
                "select pg_terminate_backend(pid, 2000) from pg_stat_activity"
                " where datname = %s and (pid = %s or %s and application_name like 'aqueduck%%')",
                (self.db.name, pid, cut.whose == "all"),
            )


def _kind(query: Any) -> str:
    """A statement without the names and numbers in it."""
    text = query.decode() if isinstance(query, bytes) else str(query)
    return re.sub(r"\s+", " ", re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "…", text)).strip()[:160]
