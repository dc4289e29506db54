"""The directory that Spark and its workers share is removed with its process, however that ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aqueduck.state_files.scratch import OWNER, scratch_directory

PROGRAM = """
import sys
from aqueduck.state_files.scratch import scratch_directory
print(scratch_directory(sys.argv[1]), flush=True)
sys.stdin.readline()
"""


class Other:
    """Another process with a directory of its own."""

    def __init__(self, parent: Path) -> None:
        command = [sys.executable, "-c", PROGRAM, str(parent)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.directory = Path(self.process.stdout.readline().strip())
        (self.directory / "secrets-1").write_text("geheim")

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def again() -> Iterator[None]:
    """A directory is made once for each parent, except in these tests."""
    scratch_directory.cache_clear()
    yield
    scratch_directory.cache_clear()


@pytest.mark.usefixtures("again")
def test_a_start_removes_what_killed_processes_left(tmp_path: Path) -> None:
    """What kill -9 left is gone with the next start; that of a process that runs stays."""
    killed, runs = Other(tmp_path), Other(tmp_path)
    killed.kill()
    assert (killed.directory / "secrets-1").exists()
    mine = scratch_directory(str(tmp_path))
    assert not killed.directory.exists()
    assert (runs.directory / "secrets-1").exists()
    assert mine.exists()
    runs.kill()


@pytest.mark.usefixtures("again")
def test_what_is_not_known_to_be_left_stays(tmp_path: Path) -> None:
    """A directory of another host or without a lock, a link, and one of another user are left alone."""
    host = socket.gethostname()
    for name, owner in (("host", f"{host}x"), ("none", None), ("linked", None), ("theirs", host)):
        directory = tmp_path / f"aqueduck-{name}"
        directory.mkdir(mode=0o700)
        (directory / "kept").touch()
        if owner is not None:
            (directory / OWNER).write_text(owner)
    (tmp_path / "elsewhere").write_text(host)
    (tmp_path / "aqueduck-linked" / OWNER).symlink_to(tmp_path / "elsewhere")
    (tmp_path / "aqueduck-link").symlink_to(tmp_path / "target")
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / OWNER).write_text(host)
    kept = {"host", "none", "linked"}
    if os.geteuid() == 0:  # only root can give a directory to another user
        os.chown(tmp_path / "aqueduck-theirs", 65534, 65534)
        kept.add("theirs")
    scratch_directory(str(tmp_path))
    assert {
        name
        for name in ("host", "none", "linked", "theirs")
        if (tmp_path / f"aqueduck-{name}" / "kept").exists()
    } == kept
    assert (tmp_path / "target" / OWNER).exists()
