"""JSON lines files: cut back to the bookmark, rotated by size and time, visible only when whole, honest about errors."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from aqueduck.model.bookmarks import Bookmark
from aqueduck.model.errors import BookmarkError, SinkPathError, SinkWriteError
from aqueduck.model.event_parts import EventPart
from aqueduck.sinks.bookmark_file import FileBookmarks
from aqueduck.sinks.files import JsonlSink, RotatedJsonlSink


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def part(directory: Path, text: str, number: int = 0) -> EventPart:
    path = directory / f"{number}.part"
    path.write_text(text)
    return EventPart(number, str(path), text.count("\n"), len(text))


def visible(directory: Path) -> dict[str, str]:
    return {p.name: p.read_text() for p in sorted(directory.glob("changes-*"))}


def test_a_file_is_cut_back_to_what_the_bookmark_knows(tmp_path: Path) -> None:
    """P-E03: events after the last bookmark are written again, at the same offset of the file."""
    path = tmp_path / "out" / "changes.jsonl"
    sink = JsonlSink(path)
    sink.recover(None)
    sink.write([part(tmp_path, "1\n"), part(tmp_path, "2\n", 1)], 10)
    bookmark = Bookmark(10, "x", None, sink.place())
    sink.write([part(tmp_path, "3\n")], 20)
    sink.close()
    again = JsonlSink(path)
    again.recover(bookmark)
    assert path.read_text() == "1\n2\n"
    again.write([part(tmp_path, "3\n")], 20)
    assert path.read_text() == "1\n2\n3\n"
    again.close()


def test_a_file_of_another_program_is_only_appended_to(tmp_path: Path) -> None:
    """Without a bookmark, or with one about another file, nothing is cut."""
    path = tmp_path / "changes.jsonl"
    path.write_text("theirs\n")
    sink = JsonlSink(path)
    sink.recover(Bookmark(10, "x", None, {"path": "/elsewhere", "length": 0}))
    sink.write([part(tmp_path, "ours\n")], 20)
    assert path.read_text() == "theirs\nours\n"


@pytest.mark.parametrize("how", ["longer", "shorter", "moved"])
def test_a_file_that_another_changed_is_looked_at_again_before_more_is_written(
    tmp_path: Path, how: str
) -> None:
    """P-E03: nothing is written over lines of others, beyond a file's end, or into a file that has another name by now."""
    path = tmp_path / "changes.jsonl"
    sink = JsonlSink(path)
    sink.recover(None)
    sink.write([part(tmp_path, "1\n2\n")], 10)
    bookmark = Bookmark(10, "x", None, sink.place())
    if how == "moved":
        path.rename(tmp_path / "aside.jsonl")
    else:
        path.write_text("1\n2\ntheirs\n" if how == "longer" else "1\n")
    with pytest.raises(SinkWriteError, match="another"):
        sink.write([part(tmp_path, "3\n")], 20)
    sink.recover(bookmark)
    sink.write([part(tmp_path, "3\n")], 20)
    expected = {"longer": "1\n2\n3\n", "shorter": "1\n3\n", "moved": "3\n"}
    assert path.read_text() == expected[how]
    if how == "moved":
        assert (tmp_path / "aside.jsonl").read_text() == "1\n2\n"


def test_an_unfinished_file_that_another_published_gets_nothing_more(tmp_path: Path) -> None:
    """P-E10: a file that is visible never changes, also not by a service that does not know of it yet."""
    path = tmp_path / "changes.jsonl"
    first = RotatedJsonlSink(path, rotate_bytes=100, rotate_seconds=None)
    first.recover(None)
    first.write([part(tmp_path, "1\n")], 0x10)
    second = RotatedJsonlSink(path, rotate_bytes=100, rotate_seconds=None)
    second.recover(Bookmark(0x10, "x", None, first.place()))
    assert second.tick(0x10, final=True)
    second.settle(0x10)
    with pytest.raises(SinkWriteError, match="another"):
        first.write([part(tmp_path, "2\n")], 0x20)
    assert list(visible(tmp_path).values()) == ["1\n"]


def test_files_are_rotated_by_size(tmp_path: Path) -> None:
    """P-E10: a file is finished by the batch with which it reaches its size, named after its last position, never changed."""
    sink = RotatedJsonlSink(tmp_path / "changes.jsonl", rotate_bytes=6, rotate_seconds=None)
    sink.recover(None)
    for position, text in ((0x10, "1\n2\n"), (0x20, "3\n"), (0x30, "4\n")):
        sink.write([part(tmp_path, text)], position)
        sink.settle(position)
    assert visible(tmp_path) == {"changes-00000001-0000000000000020.jsonl": "1\n2\n3\n"}


def test_files_are_rotated_by_time_also_when_nothing_happens(tmp_path: Path) -> None:
    """P-E10: the age counts from the first event; an empty file is never published."""
    clock = Clock()
    sink = RotatedJsonlSink(tmp_path / "changes.jsonl", rotate_bytes=None, rotate_seconds=60, clock=clock)
    sink.recover(None)
    clock.now += 500
    assert not sink.tick(0x10), "nothing to publish"
    sink.write([part(tmp_path, "1\n")], 0x10)
    clock.now += 59
    assert not sink.tick(0x10)
    clock.now += 1
    assert sink.tick(0x10)
    assert visible(tmp_path) == {}, "not before the bookmark says so"
    sink.settle(0x10)
    assert visible(tmp_path) == {"changes-00000001-0000000000000010.jsonl": "1\n"}
    sink.write([part(tmp_path, "2\n")], 0x20)
    assert sink.tick(0x20, final=True), "the run is over"
    sink.settle(0x20)
    assert len(visible(tmp_path)) == 2


def test_a_rename_that_a_crash_prevented_is_made_up_for(tmp_path: Path) -> None:
    """The bookmark says that the file is finished: it appears at the next start, once, even if it was removed since."""
    path = tmp_path / "changes.jsonl"
    sink = RotatedJsonlSink(path, rotate_bytes=2, rotate_seconds=None)
    sink.recover(None)
    sink.write([part(tmp_path, "1\n")], 0x10)
    finished = Bookmark(0x10, "x", None, sink.place())
    sink.close()
    for _ in range(2):  # a crash before the rename, then one after it
        again = RotatedJsonlSink(path, rotate_bytes=2, rotate_seconds=None)
        again.recover(finished)
        again.close()
        assert visible(tmp_path) == {"changes-00000001-0000000000000010.jsonl": "1\n"}
    (tmp_path / "changes-00000001-0000000000000010.jsonl").unlink()
    again = RotatedJsonlSink(path, rotate_bytes=2, rotate_seconds=None)
    again.recover(finished)
    again.write([part(tmp_path, "2\n")], 0x20)
    again.settle(0x20)
    assert visible(tmp_path) == {"changes-00000002-0000000000000020.jsonl": "2\n"}


def rotated(path: Path) -> RotatedJsonlSink:
    return RotatedJsonlSink(path, rotate_bytes=100, rotate_seconds=None)


@pytest.mark.parametrize("make", [JsonlSink, rotated])
def test_an_unwritable_path_is_a_typed_error(tmp_path: Path, make: Callable[[Path], object]) -> None:
    """Bad input: a directory that cannot be created is reported before anything is read."""
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "changes.jsonl"
    with pytest.raises(SinkPathError, match=r"not a directory|file exists"):
        make(path)
    (tmp_path / "a-directory").mkdir()
    with pytest.raises(SinkPathError, match="directory"):
        JsonlSink(tmp_path / "a-directory")


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    """Bad input: half a batch is never left behind, and the error is one that is tried again."""
    path = tmp_path / "changes.jsonl"
    sink = JsonlSink(path)
    sink.recover(None)
    sink.write([part(tmp_path, "1\n")], 10)
    first, second = part(tmp_path, "2\n" * 1000), part(tmp_path, "3\n" * 100_000, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(SinkWriteError, match="too large"):
            sink.write([first, second], 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_text() == "1\n"
    sink.write([first, second], 20)
    assert path.stat().st_size == 2 + 2000 + 200_000


def test_a_bookmark_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    """The file is renamed into place; one that cannot be read is a typed error, not a fresh start."""
    store = FileBookmarks(tmp_path / "state", "slot")
    assert store.load() is None
    store.save(Bookmark(0x16A4F88, "x", 5, {"length": 7}))
    assert store.load() == Bookmark(0x16A4F88, "x", 5, {"length": 7})
    file = tmp_path / "state" / "slot.json"
    assert json.loads(file.read_text())["position"] == "0/16A4F88"
    file.write_text("{")
    with pytest.raises(BookmarkError, match="cannot be read"):
        store.load()
    (tmp_path / "file").write_text("")
    with pytest.raises(SinkPathError, match="cannot be written"):
        FileBookmarks(tmp_path / "file", "slot").save(Bookmark(1, "x"))
