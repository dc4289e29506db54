"""
Plan the work of one batch: which segments are folded together, and by whom.

A table's segments fall into *runs* at its barriers (a truncate, which begins a run, and a new
version of its columns); runs are applied in order.  A small run is applied by the driver straight from
its segments.  A large one becomes *units*, each a Spark task that writes files.  Runs are split by
size, at segments; only where unchanged values have to be followed, by key bucket.
Pure functions over segment references; reading and writing is in `lake` and `spark`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

from aqueduck.model.changes import SegmentRef

__all__ = ["Run", "Unit", "plan_runs", "plan_tasks", "plan_units"]

DIRECT_BYTES_MAX = 4 << 20
UNIT_BYTES = 48 << 20
BUCKETS_MAX = 64


@dataclass(frozen=True, slots=True)
class Run:
    """Segments of one table between two barriers; a truncate is the first of them."""

    table_oid: int
    number: int
    segments: tuple[SegmentRef, ...]

    @property
    def bytes(self) -> int:
        return sum(s.bytes for s in self.segments)

    @property
    def insert_only(self) -> bool:
        return not any(s.updates or s.deletes for s in self.segments)


@dataclass(frozen=True, slots=True)
class Unit:
    """A piece of a run: applied directly by the driver, or folded into files by one task."""

    table_oid: int
    run: int
    direct: bool
    bucket: int
    buckets: int
    segments: tuple[SegmentRef, ...]
    own: tuple[int, int] | None = None
    """Which of the segments this unit writes the rows of; all of them decide which rows those are."""

    @property
    def truncate(self) -> SegmentRef | None:
        """The truncate that comes before the rows."""
        return self.segments[0] if self.segments[0].kind == "truncate" else None

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Unit:
        values = json.loads(text)
        values["segments"] = tuple(SegmentRef.from_dict(s) for s in values["segments"])
        values["own"] = tuple(values["own"]) if values["own"] else None
        return cls(**values)


def plan_runs(segments: Iterable[SegmentRef], *, keeping: Collection[int] = ()) -> list[Run]:
    """The runs of a batch, table by table; what a truncate makes void is left out, but for the tables in `keeping`."""
    tables: dict[int, list[SegmentRef]] = {}
    for segment in segments:
        tables.setdefault(segment.table_oid, []).append(segment)
    runs: list[Run] = []
    for oid, own in tables.items():
        ordered = sorted(own, key=lambda s: s.first_ord)
        runs += _table_runs(oid, ordered if oid in keeping else _from_last_truncate(ordered))
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
    # Versions are counted by each run of the service, and parked segments may be of several.
    return one.version == other.version and one.schema_json == other.schema_json


def plan_units(
    segments: Iterable[SegmentRef],
    *,
    keeping: Collection[int] = (),
    direct_bytes_max: int = DIRECT_BYTES_MAX,
    unit_bytes: int = UNIT_BYTES,
) -> list[Unit]:
    """The units of a batch; `keeping` as in `plan_runs`."""
    units: list[Unit] = []
    for run in plan_runs(segments, keeping=keeping):
        if run.bytes <= direct_bytes_max:
            units.append(_unit(run, run.segments, direct=True))
        elif run.insert_only:
            units += [_unit(run, piece) for piece in _pieces(run.segments, unit_bytes)]
        elif any(s.unchanged for s in run.segments):
            buckets = _buckets(run, unit_bytes)
            units += [_unit(run, run.segments, bucket=b, buckets=buckets) for b in range(buckets)]
        else:
            units += _owners(run, _pieces(run.segments, unit_bytes))
    return units


def plan_tasks(units: Sequence[Unit], tasks_max: int) -> list[list[Unit]]:
    """
    Which units share a task: none does where there may be as many tasks, and a task handles its own one after the other.

    Units stay in their order.  Those for the driver are no work for a task: all of them share one, or go with the first.
    """
    direct = [unit for unit in units if unit.direct]
    large = [unit for unit in units if not unit.direct]
    count = min(tasks_max, len(large))
    cuts = [len(large) * i // count for i in range(count + 1)] if count else []
    tasks = [large[start:end] for start, end in pairwise(cuts)]
    if not direct:
        return tasks
    if len(tasks) < tasks_max:
        return [direct, *tasks]
    return [[*direct, *tasks[0]], *tasks[1:]]


def _owners(run: Run, pieces: list[list[SegmentRef]]) -> list[Unit]:
    """A unit for each piece: it looks at the keys of the whole run and writes its own rows."""
    units = []
    at = 0
    for number, piece in enumerate(pieces):
        unit = _unit(run, run.segments, bucket=number, buckets=len(pieces))
        units.append(replace(unit, own=(at, at + len(piece))))
        at += len(piece)
    return units


def _unit(
    run: Run, segments: Sequence[SegmentRef], *, direct: bool = False, bucket: int = 0, buckets: int = 1
) -> Unit:
    return Unit(run.table_oid, run.number, direct, bucket, buckets, tuple(segments))


def _pieces(segments: Sequence[SegmentRef], unit_bytes: int) -> list[list[SegmentRef]]:
    pieces: list[list[SegmentRef]] = [[]]
    size = 0
    for segment in segments:
        if pieces[-1] and size + segment.bytes > unit_bytes:
            pieces.append([])
            size = 0
        pieces[-1].append(segment)
        size += segment.bytes
    return pieces


def _buckets(run: Run, unit_bytes: int) -> int:
    if any(s.unchanged for s in run.segments) and any(s.key_changes for s in run.segments):
        return 1  # an unchanged value may have to be followed from key to key
    return min(BUCKETS_MAX, max(1, -(-run.bytes // unit_bytes)))
