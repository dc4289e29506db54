"""
Plan the work of one batch: which segments are folded together, and by which task.

A table's segments are divided into *runs* at its barriers (a truncate, which begins a run, and a new version
of its columns). Runs are applied in order. The driver applies a small run directly from its segments. A large
run becomes *fold tasks*, and Spark tasks turn these into files. Runs are split by size, at segments;
they are split by key bucket only if unchanged values must be looked up in earlier changes. Pure functions
over segment references; `lake` and `spark` read and write.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

from aqueduck.model.changes import SegmentRef

__all__ = ["FoldTask", "LeftToDriver", "Run", "plan_fold_tasks", "plan_runs", "share_tasks"]

DIRECT_BYTES_MAX = 4 << 20
TASK_BYTES = 48 << 20
BUCKETS_MAX = 64


@dataclass(frozen=True, slots=True)
class Run:
    """Segments of one table between two barriers; only the first may be a truncate."""

    table_oid: int
    number: int
    segments: tuple[SegmentRef, ...]

    @property
    def bytes(self) -> int:
        return sum(s.bytes for s in self.segments)

    @property
    def insert_only(self) -> bool:
        return not any(s.updates or s.deletes for s in self.segments)


class LeftToDriver(enum.StrEnum):
    """Why there are no files of a fold task, or none that count: the driver folds its segments, or parks them."""

    SMALL = "small"
    """The driver is faster than a Spark task."""
    PARKED = "parked"
    """The table is not ready."""
    NO_TARGET = "no_target"
    """The target is missing, and with it the place of its files."""
    UNCLEAR_COLUMNS = "unclear_columns"
    """Only the driver can ask the source's catalog which columns these are."""
    NO_COLUMNS = "no_columns"
    NO_KEY = "no_key"
    """The changes have no key by which rows could be found: the driver records an error of the table."""
    NEEDS_COPY = "needs_copy"
    """The changes cannot be applied: the driver starts a new copy of the table."""
    NO_SALT = "no_salt"
    """The worker lacks the salt of a mask."""
    COPY_CAME_IN = "copy_came_in"
    """The files have changes that the table's copy brought while they were written."""


@dataclass(frozen=True, slots=True)
class FoldTask:
    """A piece of a run: applied by the driver directly, or folded into files in a Spark task."""

    table_oid: int
    run: int
    direct: bool
    bucket: int
    buckets: int
    segments: tuple[SegmentRef, ...]
    own: tuple[int, int] | None = None
    """The segments whose rows it writes; all segments of the run decide which rows those are."""

    @property
    def truncate(self) -> SegmentRef | None:
        """The truncate that precedes the rows."""
        return self.segments[0] if self.segments[0].kind == "truncate" else None

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> FoldTask:
        values = json.loads(text)
        values["segments"] = tuple(SegmentRef.from_dict(s) for s in values["segments"])
        values["own"] = tuple(values["own"]) if values["own"] else None
        return cls(**values)


def plan_runs(segments: Iterable[SegmentRef], *, keep_truncated: Collection[int] = ()) -> list[Run]:
    """
    The runs of a batch, table by table; changes before a truncate are left out, except for the tables in
    `keep_truncated`.
    """
    tables: dict[int, list[SegmentRef]] = {}
    for segment in segments:
        tables.setdefault(segment.table_oid, []).append(segment)
    runs: list[Run] = []
    for oid, own in tables.items():
        ordered = sorted(own, key=lambda s: s.first_ord)
        runs += _table_runs(oid, ordered if oid in keep_truncated else _from_last_truncate(ordered))
    return runs


def _from_last_truncate(segments: Sequence[SegmentRef]) -> Sequence[SegmentRef]:
    last = max((i for i, s in enumerate(segments) if s.kind == "truncate"), default=0)
    return segments[last:]


def _table_runs(oid: int, segments: Sequence[SegmentRef]) -> list[Run]:
    runs: list[list[SegmentRef]] = []
    for segment in segments:
        if runs and segment.kind == "rows" and _same_version(runs[-1][-1], segment):
            runs[-1].append(segment)
        else:
            runs.append([segment])
    return [Run(oid, n, tuple(run)) for n, run in enumerate(runs)]


def _same_version(one: SegmentRef, other: SegmentRef) -> bool:
    # Each run of the service counts versions anew, and parked segments may come from several.
    return one.version == other.version and one.schema_json == other.schema_json


def plan_fold_tasks(
    segments: Iterable[SegmentRef],
    *,
    keep_truncated: Collection[int] = (),
    direct_bytes_max: int = DIRECT_BYTES_MAX,
    task_bytes: int = TASK_BYTES,
) -> list[FoldTask]:
    """The fold tasks of a batch; `keep_truncated` as in `plan_runs`."""
    tasks: list[FoldTask] = []
    for run in plan_runs(segments, keep_truncated=keep_truncated):
        if run.bytes <= direct_bytes_max:
            tasks.append(_task(run, run.segments, direct=True))
        elif run.insert_only:
            tasks += [_task(run, piece) for piece in _pieces(run.segments, task_bytes)]
        elif any(s.unchanged for s in run.segments):
            buckets = _buckets(run, task_bytes)
            tasks += [_task(run, run.segments, bucket=b, buckets=buckets) for b in range(buckets)]
        else:
            tasks += _owners(run, _pieces(run.segments, task_bytes))
    return tasks


def share_tasks(tasks: Sequence[FoldTask], spark_tasks_max: int) -> list[list[FoldTask]]:
    """
    Assign fold tasks to Spark tasks: one each if there may be that many; otherwise a Spark task runs several in turn.

    Fold tasks keep their order. The driver's need no Spark task of their own: they share one, or join the first.
    """
    direct = [task for task in tasks if task.direct]
    large = [task for task in tasks if not task.direct]
    count = min(spark_tasks_max, len(large))
    cuts = [len(large) * i // count for i in range(count + 1)] if count else []
    shared = [large[start:end] for start, end in pairwise(cuts)]
    if not direct:
        return shared
    if len(shared) < spark_tasks_max:
        return [direct, *shared]
    return [[*direct, *shared[0]], *shared[1:]]


def _owners(run: Run, pieces: list[list[SegmentRef]]) -> list[FoldTask]:
    """A fold task for each piece: it reads the keys of the whole run and writes its own rows."""
    tasks = []
    at = 0
    for number, piece in enumerate(pieces):
        task = _task(run, run.segments, bucket=number, buckets=len(pieces))
        tasks.append(replace(task, own=(at, at + len(piece))))
        at += len(piece)
    return tasks


def _task(
    run: Run, segments: Sequence[SegmentRef], *, direct: bool = False, bucket: int = 0, buckets: int = 1
) -> FoldTask:
    return FoldTask(run.table_oid, run.number, direct, bucket, buckets, tuple(segments))


def _pieces(segments: Sequence[SegmentRef], task_bytes: int) -> list[list[SegmentRef]]:
    pieces: list[list[SegmentRef]] = [[]]
    size = 0
    for segment in segments:
        if pieces[-1] and size + segment.bytes > task_bytes:
            pieces.append([])
            size = 0
        pieces[-1].append(segment)
        size += segment.bytes
    return pieces


def _buckets(run: Run, task_bytes: int) -> int:
    if any(s.unchanged for s in run.segments) and any(s.key_changes for s in run.segments):
        return 1  # an unchanged value may have to be looked up under an earlier key
    return min(BUCKETS_MAX, max(1, -(-run.bytes // task_bytes)))
