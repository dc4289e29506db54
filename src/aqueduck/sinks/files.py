"""
JSON lines in files: one file that is appended to, or rotated files.  Both deliver exactly once.

One file: after a batch is on disk, the bookmark has the length of the file.  At the next start the file is truncated to
that length, and events that a crash left behind it are written again.

Rotated files: events are collected in a hidden file next to them.  When it is large or old enough, the bookmark marks it
as finished, and then it is renamed; after a crash, the next start repeats the rename.  Readers see only complete files
with whole transactions, and may remove them.  The file name has the position of the last transaction.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from aqueduck import faults
from aqueduck.model.bookmarks import Bookmark
from aqueduck.model.errors import SinkPathError, SinkWriteError, system_reason
from aqueduck.model.event_parts import EventPart, PartFormat

__all__ = ["JsonlSink", "RotatedJsonlSink"]

_COPY_BYTES = 64 << 20
_NO_KERNEL_COPY = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM)


class _OpenFile:
    """A file that is appended to, and truncated to a length that is known to be good."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _path_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self.length = os.fstat(self._fd).st_size

    def cut(self, length: int) -> None:
        """Truncate the file to `length`."""
        with _write_errors():
            if length < self.length:
                os.ftruncate(self._fd, length)
                os.fsync(self._fd)
                self.length = length

    def append(self, parts: Sequence[EventPart]) -> None:
        """Append all parts and sync, or append nothing."""
        self._refuse_changed()
        good = self.length
        try:
            with _write_errors():
                for part in parts:
                    self._append_file(Path(part.path))
                faults.point("sink.written")
                os.fsync(self._fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, good)
            self.length = good
            raise

    def _refuse_changed(self) -> None:
        """Raise if another program changed the file, so that its lines are not overwritten and ours leave no gap."""
        found = None
        with _write_errors(), contextlib.suppress(FileNotFoundError):
            found = self.path.stat()
        if found is None or not os.path.samestat(found, os.fstat(self._fd)) or found.st_size != self.length:
            raise SinkWriteError(
                "the sink's file was changed, moved or removed by another program",
                hint="let no other program write the file; the flow resumes from its bookmark",
            )

    def _append_file(self, part: Path) -> None:
        with open(part, "rb") as source:
            size = os.fstat(source.fileno()).st_size
            done = 0
            while done < size:
                done += self._copy(source.fileno(), done, size - done)
        self.length += size

    def _copy(self, source: int, at: int, count: int) -> int:
        """Copy bytes in the kernel if possible; it may not be for files on different filesystems."""
        place = self.length + at
        try:
            copied = os.copy_file_range(source, self._fd, min(count, _COPY_BYTES), at, place)
        except (AttributeError, OSError) as exc:
            if isinstance(exc, OSError) and exc.errno not in _NO_KERNEL_COPY:
                raise
            copied = 0
        return copied or os.pwrite(self._fd, os.pread(source, min(count, 1 << 20), at), place)

    def close(self) -> None:
        os.close(self._fd)


class JsonlSink:
    """Appends to one file."""

    part_format: PartFormat = "text"
    batch_bytes_max: int | None = None

    def __init__(self, path: Path) -> None:
        self._file = _OpenFile(path)

    def recover(self, bookmark: Bookmark | None) -> None:
        before, self._file = self._file, _OpenFile(self._file.path)
        before.close()
        if bookmark is not None and bookmark.place.get("path") == str(self._file.path):
            self._file.cut(int(bookmark.place["length"]))

    def place(self) -> dict[str, Any]:
        return {"path": str(self._file.path), "length": self._file.length}

    def write(self, parts: Sequence[EventPart], position: int) -> None:
        self._file.append(parts)

    def tick(self, position: int, *, final: bool = False) -> bool:
        return False

    def settle(self, position: int) -> None: ...

    def close(self) -> None:
        self._file.close()


class RotatedJsonlSink:
    """Files that appear complete: `changes-00000001-00000000016A4F88.jsonl`, and so on."""

    part_format: PartFormat = "text"

    def __init__(
        self,
        path: Path,
        *,
        rotate_bytes: int | None,
        rotate_seconds: float | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._rotate_bytes = rotate_bytes
        self._rotate_seconds = rotate_seconds
        self._clock = clock
        self._begun_at = clock()
        self.batch_bytes_max = rotate_bytes
        self._number = 1
        self._publish = False
        self._file: _OpenFile | None = None
        with _path_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)

    def recover(self, bookmark: Bookmark | None) -> None:
        place = bookmark.place if bookmark is not None else {}
        if bookmark is not None and place.get("path") == str(self._path):
            self._number = int(place["number"])
            self._begun_at = float(place["begun_at"])
            self._reopen(int(place["length"]))
            self._publish = bool(place["publish"])
            self.settle(bookmark.position)
        else:
            self._number = 1 + self._last_number()
            self._reopen(0)

    def _reopen(self, length: int) -> None:
        """Reopen the unfinished file with the bookmark's number and length, and remove all other unfinished files."""
        self.close()
        keep = self._unfinished()
        for path in self._path.parent.glob(f".{self._path.name}.*.open"):
            if path != keep:
                path.unlink(missing_ok=True)
        self._file = _OpenFile(keep)
        self._file.cut(length)

    def _unfinished(self) -> Path:
        return self._path.with_name(f".{self._path.name}.{self._number:08d}.open")

    def _last_number(self) -> int:
        name = re.compile(
            rf"{re.escape(self._path.stem)}-(\d{{8,}})-[0-9A-F]{{16}}{re.escape(self._path.suffix)}"
        )
        found = (name.fullmatch(p.name) for p in self._path.parent.iterdir())
        return max((int(m[1]) for m in found if m), default=0)

    def place(self) -> dict[str, Any]:
        return {
            "path": str(self._path),
            "number": self._number,
            "length": self._opened.length,
            "begun_at": self._begun_at,
            "publish": self._publish,
        }

    @property
    def _opened(self) -> _OpenFile:
        assert self._file is not None, "recover() first"
        return self._file

    def write(self, parts: Sequence[EventPart], position: int) -> None:
        if self._opened.length == 0:
            self._begun_at = self._clock()
        self._opened.append(parts)
        self.tick(position)

    def tick(self, position: int, *, final: bool = False) -> bool:
        large = self._rotate_bytes is not None and self._opened.length >= self._rotate_bytes
        age = self._clock() - self._begun_at
        old = self._rotate_seconds is not None and age >= self._rotate_seconds
        self._publish = self._opened.length > 0 and (large or old or final)
        return self._publish

    def settle(self, position: int) -> None:
        """Rename the file that the bookmark marks as finished; repeated after a crash."""
        if not self._publish:
            return
        final = self._path.with_name(
            f"{self._path.stem}-{self._number:08d}-{position:016X}{self._path.suffix}"
        )
        if self._opened.length:  # otherwise an earlier run renamed it already
            with _write_errors():
                self._opened.path.rename(final)
                _sync_directory(final.parent)
            faults.point("sink.renamed")
        self._number += 1
        self._publish = False
        self._begun_at = self._clock()
        self._reopen(0)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _path_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        hint = f"let sink.config.path name a file that this user may write, in {path.parent}"
        raise SinkPathError(f"the sink's file cannot be opened: {system_reason(exc)}", hint=hint) from exc


@contextlib.contextmanager
def _write_errors() -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        hint = "free disk space; the whole batch is then written again"
        raise SinkWriteError(f"the sink's file cannot be written: {system_reason(exc)}", hint=hint) from exc
