"""Planning a batch: runs end at barriers, and fold tasks cover every segment that still matters exactly once."""

from __future__ import annotations

from typing import Any, Literal

from hypothesis import given
from hypothesis import strategies as st

from aqueduck.model.batches import FoldTask, plan_fold_tasks, plan_runs, share_tasks
from aqueduck.model.changes import SegmentRef

MIB = 1 << 20


Kind = Literal["rows", "truncate"]


def segment(
    ord_: int, *, oid: int = 1, version: int = 0, kind: Kind = "rows", size: int = MIB, **counts: int
) -> SegmentRef:
    values: dict[str, Any] = {
        "inserts": 1,
        "updates": 0,
        "deletes": 0,
        "key_changes": 0,
        "unchanged": 0,
        **counts,
    }
    return SegmentRef(
        oid,
        version,
        kind,
        f"/{ord_}",
        1,
        size,
        first_ord=ord_,
        last_lsn=0,
        last_ts=0,
        schema_json="{}",
        **values,
    )


segments = st.lists(
    st.builds(
        segment,
        st.integers(0, 10_000),
        oid=st.integers(1, 3),
        version=st.integers(0, 1),
        kind=st.sampled_from(["rows", "rows", "rows", "truncate"]),
        size=st.integers(1, 40 * MIB),
        updates=st.integers(0, 1),
        unchanged=st.integers(0, 1),
        key_changes=st.integers(0, 1),
    ),
    max_size=12,
    unique_by=lambda s: s.first_ord,
)


@given(segments)
def test_fold_tasks_write_every_segment_after_the_last_truncate_once(
    given_segments: list[SegmentRef],
) -> None:
    """Whatever a batch holds, each segment that still matters is written by exactly one fold task, or by all buckets of one run."""
    expected = []
    for oid in {s.table_oid for s in given_segments}:
        own = sorted((s for s in given_segments if s.table_oid == oid), key=lambda s: s.first_ord)
        last = max((i for i, s in enumerate(own) if s.kind == "truncate"), default=-1)
        expected += [s.first_ord for s in own[last + 1 :]]
    written = []
    for unit in plan_fold_tasks(given_segments):
        own_part = unit.segments if unit.own is None else unit.segments[slice(*unit.own)]
        if unit.own is not None or unit.bucket == 0:
            written += [s.first_ord for s in own_part if s.kind == "rows"]
    assert sorted(written) == sorted(expected)


@given(segments)
def test_a_run_never_crosses_a_barrier(given_segments: list[SegmentRef]) -> None:
    """Segments of one run have one version, are in order, and only the first run of a table empties it."""
    for run in plan_runs(given_segments):
        assert len({s.version for s in run.segments}) == 1
        assert [s.first_ord for s in run.segments] == sorted(s.first_ord for s in run.segments)
        truncates = [n for n, s in enumerate(run.segments) if s.kind == "truncate"]
        assert truncates in ([], [0] if run.number == 0 else [])


@given(segments)
def test_nothing_is_void_for_a_table_that_keeps(given_segments: list[SegmentRef]) -> None:
    """P-S11: where every change counts, all segments are planned, and each truncate begins a run."""
    runs = plan_runs(given_segments, keep_truncated=range(4))
    assert sorted(s.first_ord for r in runs for s in r.segments) == sorted(
        s.first_ord for s in given_segments
    )
    assert all(s.kind == "rows" for r in runs for s in r.segments[1:])


@given(segments)
def test_fold_tasks_survive_the_way_through_spark(given_segments: list[SegmentRef]) -> None:
    """A fold task reads back from JSON as it was."""
    for unit in plan_fold_tasks(given_segments):
        assert FoldTask.from_json(unit.to_json()) == unit


def test_unchanged_values_that_move_between_keys_stay_in_one_fold_task() -> None:
    """A chain of unchanged values through key changes cannot be followed across buckets."""
    run = [segment(i, size=40 * MIB, updates=1, unchanged=1, key_changes=1) for i in range(3)]
    assert [u.buckets for u in plan_fold_tasks(run)] == [1]


@given(segments, st.integers(1, 20))
def test_spark_tasks_take_all_fold_tasks_in_their_order(
    given_segments: list[SegmentRef], tasks_max: int
) -> None:
    """P-S28: there are never more Spark tasks than allowed, and none without work."""
    units = plan_fold_tasks(given_segments)
    tasks = share_tasks(units, tasks_max)
    in_order = [u for u in units if u.direct] + [u for u in units if not u.direct]
    assert [unit for task in tasks for unit in task] == in_order
    assert len(tasks) <= tasks_max
    assert all(tasks)
    large = [sum(not u.direct for u in task) for task in tasks]
    assert max(large, default=0) - min([n for n in large if n], default=0) <= 1, "they have as much to do"
    if len([u for u in units if not u.direct]) < tasks_max:
        assert max(large, default=0) <= 1, "no fold task waits for another without need"
