"""Parked changes are as durable as the position that is confirmed because of them, and only they are read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from aqueduck.lake.ledger.parking import (
    TABLE,
    copy_to_parking,
    ensure_parking,
    parked_segments,
    parking_directory,
    record_parked,
    remove_parked_files,
    remove_parking_orphans,
)
from aqueduck.lake.ledger.removal import forget_groups
from aqueduck.model.changes import SegmentRef
from aqueduck.model.errors import ForeignPathError
from tests.fix_lake import Lake

STAGED = SegmentRef(
    table_oid=7, version=1, kind="rows", path="", rows=1, bytes=4, inserts=1, updates=0, deletes=0,
    key_changes=0, unchanged=0, first_ord=1, last_lsn=1, last_ts=0, schema_json="{}",
)  # fmt: skip


def test_parked_files_are_on_disk_before_they_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the commit the server forgets the changes, so a power failure must not lose the files that have them."""
    synced: set[int] = set()
    sync = os.fsync

    def record(descriptor: int) -> None:
        sync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", record)
    staged = tmp_path / "segment.arrow"
    staged.write_bytes(b"rows")
    [parked] = copy_to_parking(str(tmp_path / "lake"), "default", "run", [replace(STAGED, path=str(staged))])
    file = Path(parked.path)
    assert file.read_bytes() == b"rows"
    assert {file.stat().st_ino, file.parent.stat().st_ino} <= synced


def test_parked_files_are_private_in_a_lake_that_is_shared(tmp_path: Path) -> None:
    """A lake whose files a group may read shows masked columns only as masked; parked changes have their clear text."""
    staged = tmp_path / "segment.arrow"
    staged.write_bytes(b"rows")
    before = os.umask(0o027)
    try:
        (tmp_path / "lake").mkdir()
        [parked] = copy_to_parking(
            str(tmp_path / "lake"), "default", "run", [replace(STAGED, path=str(staged))]
        )
    finally:
        os.umask(before)
    assert (tmp_path / "lake").stat().st_mode & 0o777 == 0o750
    assert Path(parked.path).parent.stat().st_mode & 0o777 == 0o700


def planted(path: str, kind: str = "rows") -> str:
    segment = replace(STAGED, path=path)
    return json.dumps({**segment.to_dict(), "kind": kind})


@pytest.mark.parametrize(
    "row",
    [
        lambda victim, own: planted(str(victim)),
        lambda victim, own: planted(str(victim), kind="truncate"),
        lambda victim, own: planted(f"{own}/../../../../victim"),
        lambda victim, own: planted(f"{own}/link"),
        lambda victim, own: planted(f"{own}/linked/victim"),
        lambda victim, own: planted(f"{own}2/other.arrow"),
        lambda victim, own: planted(""),
        lambda victim, own: planted("s3://bucket/other.arrow"),
        lambda victim, own: '{"path": 7}',
        lambda victim, own: "[" * 100_000,
    ],
    ids=["path", "truncate", "dots", "link", "directory", "sibling", "none", "remote", "invalid", "deep"],
)
def test_a_row_of_the_lake_cannot_name_a_file_elsewhere(
    lake: Lake, tmp_path: Path, row: Callable[[Path, str], str]
) -> None:
    """Whoever writes the lake could otherwise make the service read, and then remove, any file of its user."""
    victim = tmp_path / "victim"
    victim.write_text("secret")
    own = Path(parking_directory(lake.config.data_path, "default"))
    for directory in (own, Path(f"{own}2")):
        directory.mkdir(parents=True)
        (directory / "segment.arrow").touch()
    (own / "link").symlink_to(victim)
    (own / "linked").symlink_to(tmp_path)
    ensure_parking(lake.session)
    lake.session.execute(
        f"insert into {TABLE} values ('default', 7, 1, 0, 1, 1, ?, now())", [row(victim, str(own))]
    )
    with pytest.raises(ForeignPathError, match="parked") as error:
        parked_segments(lake.session, "default", [7])
    assert "secret" not in str(error.value)
    assert "victim" not in str(error.value)
    if not row(victim, str(own)).startswith("[["):
        remove_parking_orphans(lake.session, "default")
        assert not (own / "segment.arrow").exists()  # an orphan
    forget_groups(lake.session, ["default"])
    assert victim.read_text() == "secret"


def test_parked_changes_are_found_through_a_link_to_the_data_path(lake: Lake, tmp_path: Path) -> None:
    """A data path may be a link, for example to another volume."""
    (tmp_path / "data").rename(tmp_path / "volume")
    (tmp_path / "data").symlink_to(tmp_path / "volume")
    staged = tmp_path / "segment.arrow"
    staged.write_bytes(b"rows")
    ensure_parking(lake.session)
    kept = copy_to_parking(lake.config.data_path, "default", "run", [replace(STAGED, path=str(staged))])
    record_parked(lake.session, "default", 1, kept)
    assert parked_segments(lake.session, "default", [7]) == {7: kept}
    assert remove_parking_orphans(lake.session, "default") == []
    remove_parked_files(kept)
    assert not Path(kept[0].path).exists()
