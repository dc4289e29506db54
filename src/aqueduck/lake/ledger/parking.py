"""
Parked changes: segments of tables that are not ready, kept in the lake until the tables are.

The files are written below the lake's data path first.  Their references go into `aqueduck.parked` in the
transaction that moves the group's position.  Replaying them is an ordinary fold.  A file without a
reference is an orphan and is removed at the next start.  In an encrypted lake, each file is encrypted with a key of
its own, which its reference has, and is decrypted to local scratch for the time of a replay.

Whoever may write the lake can also write references.  Files are read and removed with the rights of the service, so a
reference to a file outside the group's parking directory is refused.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from aqueduck.lake.session.catalog import OWN_SCHEMA, LakeSession
from aqueduck.lake.session.encryption import seal_file, unseal_file
from aqueduck.lake.session.engine import is_remote
from aqueduck.lake.session.sql import LAKE, qualified
from aqueduck.lake.session.storage import (
    copy_file,
    discard_file,
    is_below,
    join,
    list_files,
    remove_file,
    sync_file,
)
from aqueduck.model.changes import SegmentRef
from aqueduck.model.errors import ForeignPathError
from aqueduck.state_files.private_files import private_directory

__all__ = [
    "copy_to_parking",
    "ensure_parking",
    "forget_parked",
    "ord_after_parked",
    "parked_segments",
    "parked_totals",
    "parking_files",
    "record_parked",
    "remove_parked_files",
    "remove_parking_orphans",
    "sealing",
    "unsealed",
]

_COPY_AGAIN = "find out who wrote it, delete it from aqueduck.parked, and re-copy the table: aqueduck tables resync -c FILE TABLE"

TABLE = qualified(LAKE, OWN_SCHEMA, "parked")


def ensure_parking(session: LakeSession) -> None:
    session.execute(
        f"create table if not exists {TABLE} (group_name varchar, source_oid ubigint, position ubigint, number integer,"
        " rows bigint, bytes bigint, segment varchar, parked_at timestamptz)",
        doing="preparing the lake",
    )


def parking_directory(data_path: str, group: str) -> str:
    return join(data_path, f"{OWN_SCHEMA}/parked/{group}")


Seal = Callable[[str, str], str]
"""Writes an encrypted copy of the file at the first path to the second one; returns its key."""


def sealing(session: LakeSession) -> Seal | None:
    """How files are parked in this lake: encrypted, or as they are."""
    return functools.partial(seal_file, session) if session.encrypted else None


def copy_to_parking(
    data_path: str, group: str, run_id: str, segments: Iterable[SegmentRef], *, seal: Seal | None = None
) -> list[SegmentRef]:
    """Copy staged segments durably, before the transaction that records the copies."""
    directory = parking_directory(data_path, group)
    if not is_remote(directory):  # parked rows have masked values in clear text
        private_directory(Path(directory))
    kept = []
    for segment in segments:
        path, key = "", None
        if segment.kind == "rows":
            path = join(directory, f"{run_id}-{segment.table_oid}-{segment.first_ord}.arrow")
            if seal is not None:
                key = seal(segment.path, path)
            elif is_remote(path):
                copy_file(segment.path, path)
            else:
                shutil.copyfile(segment.path, path)
            sync_file(path)
        kept.append(replace(segment, path=path, key=key))
    return kept


@contextlib.contextmanager
def unsealed(
    session: LakeSession, parked: Mapping[int, Sequence[SegmentRef]], scratch: Path
) -> Iterator[Mapping[int, Sequence[SegmentRef]]]:
    """The parked segments with files that can be read; the decrypted ones exist in `scratch` for the time of the block."""
    shutil.rmtree(scratch, ignore_errors=True)  # a process that was killed leaves them
    if not any(segment.key for found in parked.values() for segment in found):
        yield parked
        return
    try:
        private_directory(scratch)
        yield {oid: [_unsealed(session, s, scratch) for s in found] for oid, found in parked.items()}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _unsealed(session: LakeSession, segment: SegmentRef, scratch: Path) -> SegmentRef:
    if segment.key is None:
        return segment
    file = scratch / Path(segment.path).name
    unseal_file(session, segment.path, segment.key, file)
    return replace(segment, path=str(file))


def record_parked(session: LakeSession, group: str, position: int, segments: Sequence[SegmentRef]) -> None:
    """Inside the transaction that moves the group's position to `position`."""
    for number, segment in enumerate(segments):
        session.execute(
            f"insert into {TABLE} values (?, ?, ?, ?, ?, ?, ?, now())",
            [
                group,
                segment.table_oid,
                position,
                number,
                segment.rows,
                segment.bytes,
                json.dumps(segment.to_dict()),
            ],
            doing="parking changes",
        )


def parked_segments(session: LakeSession, group: str, oids: Iterable[int]) -> dict[int, list[SegmentRef]]:
    """The parked segments of each of these tables, in order."""
    parked: dict[int, list[SegmentRef]] = {oid: [] for oid in oids}
    rows, _ = session.query(
        f"select source_oid, segment from {TABLE} where group_name = ? and source_oid in (select unnest(?))"
        " order by position, number",
        [group, list(parked)],
    )
    for oid, text in rows:
        parked[oid].append(_segment_of(session, group, text))
    return parked


def _segment_of(session: LakeSession, group: str, text: str) -> SegmentRef:
    try:
        segment = SegmentRef.from_dict(json.loads(text))
        path = segment.path if segment.kind == "truncate" else segment.path or "/"
    except (ValueError, TypeError, RecursionError):
        raise ForeignPathError("a row of aqueduck.parked is invalid", hint=_COPY_AGAIN) from None
    if path and not is_below(parking_directory(session.config.data_path, group), path):
        said = "a row of aqueduck.parked names a file outside the directory of parked changes"
        raise ForeignPathError(said, hint=_COPY_AGAIN)
    return segment


def parked_totals(session: LakeSession, group: str) -> dict[int, tuple[int, int, datetime]]:
    """Parked rows, bytes and the time of the oldest change, by table."""
    rows, _ = session.query(
        f"select source_oid, sum(rows)::bigint, sum(bytes)::bigint, epoch_us(min(parked_at)) from {TABLE}"
        " where group_name = ? group by source_oid",
        [group],
    )
    return {oid: (n, size, datetime.fromtimestamp(us / 1e6, UTC)) for oid, n, size, us in rows}


def ord_after_parked(session: LakeSession, group: str) -> int:
    """The first change number after those of all parked changes; 0 if none are parked."""
    rows, _ = session.query(
        f"select max((segment::json->>'last_ord')::bigint) + 1 from {TABLE} where group_name = ?", [group]
    )
    return int(rows[0][0] or 0)


def forget_parked(session: LakeSession, group: str, *oids: int) -> None:
    """Delete the references, inside the transaction that replays or voids the changes."""
    session.execute(
        f"delete from {TABLE} where group_name = ? and source_oid in (select unnest(?))", [group, list(oids)]
    )


def remove_parked_files(segments: Iterable[SegmentRef]) -> None:
    """Remove the files, after the transaction that deleted their references."""
    for segment in segments:
        if segment.path:
            discard_file(segment.path)


def remove_parking_orphans(session: LakeSession, group: str) -> list[str]:
    """Remove files without a reference, which a crash between the copy and the commit leaves behind."""
    rows, _ = session.query(f"select segment->>'path' from {TABLE} where group_name = ?", [group])
    known = {Path(path).name for (path,) in rows if path}
    orphans = [file for file in parking_files(session, group) if Path(file).name not in known]
    for file in orphans:
        remove_file(file)
    return orphans


def parking_files(session: LakeSession, group: str) -> list[str]:
    """All files in the parking directory of a group; what a link leads to is not in it."""
    directory = parking_directory(session.config.data_path, group)
    return [file for file in list_files(directory, "") if is_below(directory, file)]
