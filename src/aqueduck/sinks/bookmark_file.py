"""The bookmark in a file, which is replaced atomically: written to another file, synced and renamed."""

from __future__ import annotations

import os
from pathlib import Path

from aqueduck import faults
from aqueduck.model.bookmarks import Bookmark
from aqueduck.model.errors import SinkPathError, system_reason

__all__ = ["FileBookmarks"]


class FileBookmarks:
    """Stores the bookmark as `<directory>/<name>.json`."""

    def __init__(self, directory: Path, name: str) -> None:
        self._path = directory / f"{name}.json"

    def load(self) -> Bookmark | None:
        try:
            return Bookmark.from_json(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise self._failed("read", exc) from exc

    def save(self, bookmark: Bookmark) -> None:
        temporary = self._path.with_suffix(".tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "w", encoding="utf-8") as out:
                out.write(bookmark.to_json() + "\n")
                out.flush()
                os.fsync(out.fileno())
            faults.point("bookmark.before_rename")
            temporary.replace(self._path)
            directory = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as exc:
            raise self._failed("written", exc) from exc

    def _failed(self, doing: str, exc: OSError) -> SinkPathError:
        hint = f"make {self._path.parent} a directory that this user may write, on a disk with free space"
        return SinkPathError(f"the bookmark cannot be {doing}: {system_reason(exc)}", hint=hint)

    def close(self) -> None:
        """Nothing to do: no file stays open between calls."""
