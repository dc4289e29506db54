"""
A private directory of this process, for what queries spill, and for the sockets and files that Spark and its Python workers share.

Each process holds a lock on a file in its directory.  The next process removes directories that killed ones left behind.
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
    """The directory: new for each process, removed at its end; by default its path is short enough for names of sockets."""
    home = parent or tempfile.gettempdir()
    if parent is None and len(home) + len("/aqueduck-12345678/") + NAME_CHARACTERS > SOCKET_PATH_MAX:
        home = "/tmp"  # noqa: S108 - mkdtemp makes a new directory with mode 0700
    Path(home).mkdir(parents=True, exist_ok=True)
    for left in filter(_is_left, Path(home).glob("aqueduck-*")):
        shutil.rmtree(left, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix="aqueduck-", dir=home))
    _own(path)
    atexit.register(_remove, path, os.getpid())
    return path


def _remove(path: Path, maker: int) -> None:
    if os.getpid() == maker:  # a process that it forked may end before it
        shutil.rmtree(path, ignore_errors=True)


def _own(directory: Path) -> None:
    """Lock the directory until this process ends; the lock file gets its name only after it is locked."""
    file = os.open(directory / "new", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:  # storage without locks: other processes cannot know whether this one is alive, so the directory is kept
        return
    os.write(file, socket.gethostname().encode())
    (directory / "new").rename(directory / OWNER)


def _is_left(directory: Path) -> bool:
    """Whether a process of this user on this host created the directory and has ended."""
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
