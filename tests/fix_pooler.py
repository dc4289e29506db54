"""
A real pgbouncer between a test and its server, which gives every transaction another server connection.

`pooler` starts one on loopback for a database; tests that need it are skipped where the program is not installed.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from tests.fix_postgres import Database, wait_until

CONFIG = """
[databases]
* = host=127.0.0.1 port={server}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {directory}/users.txt
pool_mode = transaction
default_pool_size = 10
server_round_robin = 1
logfile = {directory}/pgbouncer.log
pidfile = {directory}/pgbouncer.pid
"""


def _program() -> str | None:
    return shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def _somebody() -> dict[str, int]:
    """It refuses to run as root."""
    if os.getuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid}


@contextlib.contextmanager
def run_pooler(db: Database, directory: Path) -> Iterator[Callable[..., str]]:
    """Yields what makes a connection string of a user, through the pooler."""
    program = _program()
    if program is None:
        pytest.skip("pgbouncer is not installed on this machine")
    directory.mkdir(mode=0o777)
    directory.chmod(0o777)
    for parent in directory.parents[:-1]:
        with contextlib.suppress(PermissionError):
            parent.chmod(parent.stat().st_mode | 0o011)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    roles = db.query("select rolname from pg_roles where rolcanlogin")
    (directory / "users.txt").write_text("".join(f'"{name}" ""\n' for (name,) in roles))
    (directory / "pgbouncer.ini").write_text(
        CONFIG.format(server=db.server.port, port=port, directory=directory)
    )
    process = subprocess.Popen(
        [program, "-q", str(directory / "pgbouncer.ini")],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **_somebody(),  # type: ignore[call-overload]
    )  # fmt: skip

    def dsn(user: str = "postgres") -> str:
        return f"host=127.0.0.1 port={port} dbname={db.name} user='{user}'"

    def answers() -> bool:
        assert process.poll() is None, "pgbouncer has ended"
        try:
            psycopg.connect(dsn(), connect_timeout=2).close()
        except psycopg.Error:
            return False
        return True

    try:
        wait_until(answers, "pgbouncer answers")
        yield dsn
    finally:
        process.terminate()
        process.wait(timeout=30)


@pytest.fixture
def pooler(db: Database, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """`pooler()` is a connection string of the test's database through a transaction-pooling pgbouncer."""
    with run_pooler(db, tmp_path / "pooler") as dsn:
        yield dsn
