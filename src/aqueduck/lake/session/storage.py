"""
Files of the stage and of the lake, on this machine or in an object store.

Thin wrappers of `pyarrow.fs`, so that callers can pass a path or a URI.  Listing and removing raise `DataPathError`
for any error of the storage.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.fs

from aqueduck.lake.session.engine import is_remote
from aqueduck.lake.session.object_stores import remote_filesystem
from aqueduck.model.errors import DataPathError

__all__ = [
    "copy_file",
    "discard_file",
    "is_below",
    "join",
    "list_files",
    "list_times",
    "make_directory",
    "no_glob",
    "open_input",
    "remove_file",
    "sync_file",
]


def join(directory: str, name: str) -> str:
    """The path of a file in a directory."""
    return f"{directory.rstrip('/')}/{name}"


def is_below(directory: str, path: str) -> bool:
    """Whether a file is below a directory, after links and `..` on this machine; text that another program wrote is untrusted."""
    if is_remote(directory) or is_remote(path):
        inner = path.removeprefix(directory.rstrip("/") + "/")
        return inner != path and not {"", ".", ".."} & set(inner.split("/"))
    above = os.path.realpath(directory)
    return "\0" not in path and os.path.realpath(path).startswith(above.rstrip("/") + "/")


def no_glob(path: str) -> str:
    """The path as a pattern that matches only itself."""
    return "".join(f"[{c}]" if c in "[*?" else c for c in path)


def open_input(path: str) -> pa.NativeFile:
    """Open a file for reading, without a memory map."""
    if not is_remote(path):
        return pa.OSFile(path, "rb")
    filesystem, inner = _place(path)
    return filesystem.open_input_file(inner)


def copy_file(source: str, destination: str) -> None:
    """Copy a file, also between this machine and an object store."""
    (here, inner), (there, outer) = _place(source), _place(destination)
    pyarrow.fs.copy_files(inner, outer, source_filesystem=here, destination_filesystem=there)


def make_directory(directory: str) -> None:
    """Create a local directory; object stores have no directories."""
    if not is_remote(directory):
        Path(directory).mkdir(parents=True, exist_ok=True)


def sync_file(path: str) -> None:
    """Sync a local file to disk; object stores are durable already."""
    if is_remote(path):
        return
    for place in (path, str(Path(path).parent)):
        descriptor = os.open(place, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def list_files(directory: str, prefix: str) -> Iterator[str]:
    """Full paths of the files below a directory whose names begin with `prefix`; empty if the directory does not exist."""
    for info, place in _files(directory):
        if info.base_name.startswith(prefix):
            yield join(directory, place)


def list_times(directory: str) -> Iterator[tuple[str, datetime]]:
    """Relative paths and modification times of the files below a directory; empty if the directory does not exist."""
    for info, place in _files(directory):
        yield place, info.mtime


def remove_file(path: str) -> None:
    """Remove a file if it exists."""
    with _storage_errors("removing a file"), contextlib.suppress(FileNotFoundError):
        filesystem, inner = _place(path)
        filesystem.delete_file(inner)


def discard_file(path: str) -> None:
    """Remove a file that is no longer needed; if that fails, it remains as an orphan."""
    with contextlib.suppress(DataPathError):
        remove_file(path)


def _files(directory: str) -> list[tuple[pyarrow.fs.FileInfo, str]]:
    """The files with their paths below the directory, which has one more directory for each partition key."""
    with _storage_errors("listing files"):
        filesystem, inner = _place(directory)
        found = filesystem.get_file_info(pyarrow.fs.FileSelector(inner, allow_not_found=True, recursive=True))
    start = len(inner.rstrip("/")) + 1
    return [(info, info.path[start:]) for info in found if info.type is pyarrow.fs.FileType.File]


@contextlib.contextmanager
def _storage_errors(doing: str) -> Iterator[None]:
    """Translate storage errors; of an object store's message, which names keys and addresses, only the code is kept."""
    try:
        yield
    except (OSError, pa.ArrowException) as exc:
        code = re.search(r"AWS Error ([A-Z_]+)", str(exc))
        said = exc.strerror if isinstance(exc, OSError) else None
        reason = code[1] if code else (said or type(exc).__name__)
        hint = "check that lake.data_path can be reached, and the rights on it"
        raise DataPathError(f"{doing} of the lake failed: {reason}", hint=hint) from None


def _place(path: str) -> tuple[pyarrow.fs.FileSystem, str]:
    if is_remote(path):
        return remote_filesystem(path)
    return pyarrow.fs.LocalFileSystem(), path
