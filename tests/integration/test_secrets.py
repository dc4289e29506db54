"""A busy service tells its secrets to nobody: not in blocks, command lines, logs, event logs or files that others may read."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fix_postgres import Database
from tests.stranger import RefusedError, SilentError, fetch_block, listening_ports

pytestmark = [pytest.mark.spark, pytest.mark.slow]

PLANTED = b"-planted"


def blocks(pid: int) -> Iterator[bytes]:
    """What a stranger gets from the ports of a service that does not authenticate."""
    for port in listening_ports(pid):
        for number in range(200):
            try:
                yield fetch_block(port, f"broadcast_{number // 2}{'_piece0' * (number % 2)}")
            except (SilentError, ConnectionError):
                break
            except RefusedError:
                continue


def commands(pid: int) -> Iterator[str]:
    """What `ps` shows of a service."""
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with contextlib.suppress(psutil.Error):  # a worker may just have ended
            yield " ".join(process.cmdline())


def open_files(directory: Path) -> Iterator[Path]:
    """Files that users other than ours may read."""
    for path in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and stat.S_IMODE(path.stat().st_mode) & 0o077:
                yield path


def test_a_busy_service_tells_no_secret(
    db: Database, sync_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passwords, settings and cells, while it copies and streams; authentication is off, so that blocks can be seen."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    db.execute("create table t (id int primary key, v text)")
    db.execute("insert into t select g, 'cell-planted' from generate_series(1, 2000) g")
    sync = sync_of("public.t", copy=True, segment_bytes="1MiB")
    sync.dsn = f"{db.dsn} password=password-planted"
    events = tmp_path / "events"
    events.mkdir()
    sync.spark = {
        "master": "local[2]",
        "conf": {
            "spark.authenticate": "false",
            "spark.broadcast.compress": "false",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.compress": "false",
            "spark.eventLog.dir": events.as_uri(),
            "spark.executorEnv.PLANTED": "variable-planted",
            "spark.hadoop.fs.s3a.secret.key": "hadoop-planted",
        },
    }
    process = sync.started()
    sync.wait_same()
    db.execute(
        "insert into t select g, 'cell-planted' || repeat('x', 400) from generate_series(10000, 18000) g"
    )
    sync.wait_same()

    got = list(blocks(process.pid))
    assert any(b"aqueduck" in block for block in got), "a closure of ours is among them"
    # Spark's own settings are in its closures: only authentication keeps these.
    assert not [block[:200] for block in got if b"password-planted" in block or b"cell-planted" in block]
    assert not [command for command in commands(process.pid) if "-planted" in command]
    assert "-planted" not in sync.log()
    told = [path for path in events.rglob("*") if path.is_file()]
    assert told
    assert not [path for path in told if PLANTED in path.read_bytes()]
    ours = {sync.config_file}
    assert not [path for path in set(open_files(tmp_path)) - ours if PLANTED in path.read_bytes()]
    sync.stop(process)
    assert not list((tmp_path / "tmp").glob("aqueduck-*/secrets-*"))
