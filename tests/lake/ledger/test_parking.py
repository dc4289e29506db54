"""Parked changes are as durable as the position that is confirmed to the server because of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aqueduck.lake.ledger.parking import copy_to_parking
from aqueduck.model.changes import SegmentRef


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
    segment = SegmentRef(
        table_oid=7, version=1, kind="rows", path=str(staged), rows=1, bytes=4, inserts=1, updates=0, deletes=0,
        key_changes=0, unchanged=0, first_ord=1, last_lsn=1, last_ts=0, schema_json="{}",
    )  # fmt: skip
    [parked] = copy_to_parking(str(tmp_path / "lake"), "default", "run", [segment])
    file = Path(parked.path)
    assert file.read_bytes() == b"rows"
    assert {file.stat().st_ino, file.parent.stat().st_ino} <= synced
