"""
A process that keeps an exported snapshot alive while the tasks of a read come and go.

A snapshot can be used while the session that exported it is open, and no process of a Spark read lives that
long: Spark plans the read in one Python worker, runs it in others, possibly on other machines, and notifies
none of them at the end. So `hold_snapshot` starts a process. Tasks report to it through PostgreSQL (NOTIFY),
which all of them can reach. The process ends a moment after all parts were read, when no part began or ended
for `seconds`, or when the Spark that started it has ended.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from typing import Any

import psycopg

from aqueduck.model.errors import AqueduckError, SnapshotGoneError
from aqueduck.postgres.session.connection import connect, translate_errors
from aqueduck.postgres.session.quoting import identifier, literal

__all__ = ["HeldSnapshot", "check_snapshot", "hold_snapshot", "report"]

LINGER_SECONDS = 30.0
"""How long a snapshot outlives the last part: for a read that is repeated at once, for example by a failed task."""

_holders: list[subprocess.Popen[str]] = []


@dataclass(frozen=True, slots=True)
class HeldSnapshot:
    """A snapshot that a separate process keeps alive."""

    name: str
    channel: str
    """The channel to which tasks report."""


def hold_snapshot(dsn: str, parts: int, seconds: int) -> HeldSnapshot:
    """Export a snapshot for a read of this many parts."""
    channel = f"aqueduck_read_{uuid.uuid4().hex[:16]}"
    order = {
        "dsn": dsn, "channel": channel, "parts": parts, "seconds": seconds, "linger": LINGER_SECONDS,
        "watch": os.getppid(),
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
    _holders[:] = [p for p in _holders if p.poll() is None] + [process]
    if not answer:
        raise AqueduckError("the process that holds the snapshot of a read did not start")
    answered = json.loads(answer)
    if "error" in answered:
        raise AqueduckError.from_text(answered["error"]) or AqueduckError(answered["error"])
    return HeldSnapshot(answered["snapshot"], channel)


def check_snapshot(conn: psycopg.Connection[Any], snapshot: HeldSnapshot) -> None:
    """Raise if the snapshot has ended."""
    try:
        with conn.transaction():
            conn.execute("set transaction isolation level repeatable read read only")
            conn.execute(f"set transaction snapshot {literal(snapshot.name)}".encode())
    except (psycopg.errors.UndefinedObject, psycopg.errors.DataError):
        raise SnapshotGoneError(
            "the snapshot under which the table is read has ended",
            hint="load the table again, and cache() it if it is used more than once; or raise snapshot_seconds",
        ) from None


def report(conn: psycopg.Connection[Any], snapshot: HeldSnapshot, what: str) -> None:
    """Report to the holder that a part began or ended."""
    with translate_errors("report a part of a read", conn=conn):
        conn.execute("select pg_notify(%s, %s)", (snapshot.channel, what))


def _hold(dsn: str, channel: str, parts: int, seconds: float, linger: float, watch: int) -> None:
    with (
        connect(dsn, application_name="aqueduck read") as listener,
        connect(dsn, application_name="aqueduck read", autocommit=False) as conn,
    ):
        with translate_errors("export a snapshot", conn=conn):
            conn.execute("set transaction isolation level repeatable read read only")
            conn.execute("set local idle_in_transaction_session_timeout = 0")
            row = conn.execute("select pg_export_snapshot()").fetchone()
            listener.execute(f"listen {identifier(channel)}".encode())
        assert row is not None
        _answer({"snapshot": row[0]})
        _wait(listener, parts, seconds, linger, watch)
        conn.rollback()


def _wait(listener: psycopg.Connection[Any], parts: int, seconds: float, linger: float, watch: int) -> None:
    ended: set[str] = set()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and _is_alive(watch):
        for message in listener.notifies(timeout=1.0, stop_after=1):
            if message.payload.startswith("end "):
                ended.add(message.payload)
            left = linger if len(ended) >= parts else seconds
            deadline = time.monotonic() + left


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _answer(answered: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(answered) + "\n")
    sys.stdout.flush()
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the parent process does not listen any longer


def main() -> None:
    """Read the request from standard input, answer with one line, and hold the snapshot."""
    order = json.loads(sys.stdin.readline())
    try:
        _hold(**order)
    except AqueduckError as exc:
        _answer({"error": str(exc)})


if __name__ == "__main__":
    main()
