"""
A directory of this process for this user alone, in which Spark and its Python workers meet.

A process that is killed leaves its directory behind.  The next one removes it: each holds a lock on a file in its own.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path

__all__ = ["scratch_directory"]

SOCKET_PATH_MAX = 108
NAME_CHARACTERS = 48
OWNER = "owner"


@functools.cache
def scratch_directory(parent: str | None = None) -> Path:
    """New for each process and removed at its end; where no parent is named, sockets have room for their names."""
    home = parent or tempfile.gettempdir()
    if parent is None and len(home) + len("/aqueduck-12345678/") + NAME_CHARACTERS > SOCKET_PATH_MAX:
        home = "/tmp"  # noqa: S108 - mkdtemp makes a new directory with mode 0700
    Path(home).mkdir(parents=True, exist_ok=True)
    for left in filter(_is_left, Path(home).glob("aqueduck-*")):
        shutil.rmtree(left, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix="aqueduck-", dir=home))
    _own(path)
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def _own(directory: Path) -> None:
    """Lock it until this process ends, however it ends; nobody sees the file before it is locked."""
    file = os.open(directory / "new", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:  # storage without locks: nobody can tell whether we live, so it stays
        return
    os.write(file, socket.gethostname().encode())
    (directory / "new").rename(directory / OWNER)


def _is_left(directory: Path) -> bool:
    """Whether a process of this user and this host made it, and has ended."""
    try:
        found = directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return False
        file = os.open(directory / OWNER, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if os.read(file, 256) != socket.gethostname().encode():  # locks need not reach over hosts
            return False
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(file)
