"""
Files of the stage and of the lake, on this machine or in an object store.

Thin wrappers of `pyarrow.fs`, so that everything above takes a path or a URI alike.  Listing and removing raise
`DataPathError`, whatever the storage says.
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
    """A file in a directory."""
    return f"{directory.rstrip('/')}/{name}"


def no_glob(path: str) -> str:
    """The path as a pattern that matches only itself."""
    return "".join(f"[{c}]" if c in "[*?" else c for c in path)


def open_input(path: str) -> pa.NativeFile:
    """A file to read; plain reads, no memory map."""
    if not is_remote(path):
        return pa.OSFile(path, "rb")
    filesystem, inner = _place(path)
    return filesystem.open_input_file(inner)


def copy_file(source: str, destination: str) -> None:
    """Copy a file between any two places."""
    (here, inner), (there, outer) = _place(source), _place(destination)
    pyarrow.fs.copy_files(inner, outer, source_filesystem=here, destination_filesystem=there)


def make_directory(directory: str) -> None:
    """Make a local directory; object stores have none."""
    if not is_remote(directory):
        Path(directory).mkdir(parents=True, exist_ok=True)


def sync_file(path: str) -> None:
    """Make a local file survive a crash of the machine; object stores do that by themselves."""
    if is_remote(path):
        return
    for place in (path, str(Path(path).parent)):
        descriptor = os.open(place, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def list_files(directory: str, prefix: str) -> Iterator[str]:
    """Full paths of the files in a directory whose names begin with `prefix`; none if it does not exist."""
    for info in _files(directory):
        if info.base_name.startswith(prefix):
            yield join(directory, info.base_name)


def list_times(directory: str) -> Iterator[tuple[str, datetime]]:
    """Names of the files in a directory, and when each was written last; none if it does not exist."""
    for info in _files(directory):
        yield info.base_name, info.mtime


def remove_file(path: str) -> None:
    """Remove a file if it is there."""
    with _storage_errors("removing a file"), contextlib.suppress(FileNotFoundError):
        filesystem, inner = _place(path)
        filesystem.delete_file(inner)


def discard_file(path: str) -> None:
    """Remove a file that is of no use any more; if that fails it stays, for whoever looks for orphans."""
    with contextlib.suppress(DataPathError):
        remove_file(path)


def _files(directory: str) -> list[pyarrow.fs.FileInfo]:
    with _storage_errors("listing files"):
        filesystem, inner = _place(directory)
        found = filesystem.get_file_info(pyarrow.fs.FileSelector(inner, allow_not_found=True))
    return [info for info in found if info.type is pyarrow.fs.FileType.File]


@contextlib.contextmanager
def _storage_errors(doing: str) -> Iterator[None]:
    """An object store's own words name keys and addresses: its error code will do."""
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
