"""A directory of this process for this user alone, in which Spark and its Python workers meet."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

__all__ = ["scratch_directory"]

SOCKET_PATH_MAX = 108
NAME_CHARACTERS = 48


@functools.cache
def scratch_directory(parent: str | None = None) -> Path:
    """New for each process and removed at its end; where no parent is named, sockets have room for their names."""
    home = parent or tempfile.gettempdir()
    if parent is None and len(home) + len("/aqueduck-12345678/") + NAME_CHARACTERS > SOCKET_PATH_MAX:
        home = "/tmp"  # noqa: S108 - mkdtemp makes a new directory with mode 0700
    Path(home).mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix="aqueduck-", dir=home))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path
