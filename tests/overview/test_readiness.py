"""Readiness turns red when something has work and makes no progress, and only then (P-F13)."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from aqueduck.model.lifecycle import SyncState
from aqueduck.overview.readiness import ProgressWatch
from aqueduck.overview.values import CopyOverview, FlowOverview, Problem, SeedOverview
from tests.web.made_up import BROKEN, START, destination, fanout, group, overview, sync, table


def look(watch: ProgressWatch, seconds: float, *flows: FlowOverview) -> list[str]:
    return [s.reason for s in watch.look(overview(*flows, at=START + timedelta(seconds=seconds)))]


def copying(rows: int) -> Any:
    return table("public.items", SyncState.SNAPSHOT, copy=CopyOverview(rows=rows))


def seeding(rows: int) -> SeedOverview:
    return SeedOverview(destinations=1, rows=rows, rows_total=1000)


def test_an_idle_group_is_ready_for_ever() -> None:
    """Nothing to do is no reason to be red."""
    watch = ProgressWatch(60)
    assert [look(watch, at, sync(group(table()))) for at in (0, 100, 10_000)] == [[], [], []]


def test_a_group_with_work_and_no_progress_is_stalled() -> None:
    """After the given time, the group, its waiting tables and the reason are named."""
    watch = ProgressWatch(60)
    stuck = sync(group(table(queued_changes=5), table("public.quiet"), lag_bytes=4096))
    assert look(watch, 0, stuck) == []
    assert look(watch, 59, stuck) == []
    (found,) = watch.look(overview(stuck, at=START + timedelta(seconds=61)))
    assert (found.flow, found.group, found.tables, found.seconds) == ("sync", "shop", ("public.orders",), 61)
    assert "do not reach the lake" in found.reason


@pytest.mark.parametrize(
    "moved", [{"batches": 1}, {"received_bytes": 9}, {"position": "0/FF"}, {"transactions": 2}]
)
def test_whatever_moves_keeps_a_busy_group_ready(moved: dict[str, Any]) -> None:
    """A batch, a byte or a transaction more is progress, also inside one huge transaction."""
    watch = ProgressWatch(60)
    look(watch, 0, sync(group(lag_bytes=1)))
    assert look(watch, 59, sync(group(lag_bytes=1, **moved))) == []
    assert look(watch, 118, sync(group(lag_bytes=1, **moved))) == []
    assert look(watch, 119, sync(group(lag_bytes=1, **moved))) != []


def test_time_without_work_does_not_count() -> None:
    """Work that comes after a quiet hour has the full time."""
    watch = ProgressWatch(60)
    look(watch, 0, sync(group(lag_bytes=1)))
    look(watch, 30, sync(group()))
    assert look(watch, 3600, sync(group(lag_bytes=1))) == []


def test_a_group_that_cannot_reach_its_source_is_stalled_although_nothing_is_known_to_wait() -> None:
    """A capture that is down cannot know how much there is: it counts as work, with its error."""
    watch = ProgressWatch(60)
    down = sync(group(state="retrying", error=Problem(code="pg.unreachable", message="no connection")))
    look(watch, 0, down)
    assert look(watch, 61, down) == ["the group shop is retrying: [pg.unreachable] no connection"]


def test_a_disabled_group_is_not_stalled() -> None:
    """A person paused it."""
    watch = ProgressWatch(60)
    paused = sync(group(table(queued_changes=5), state="disabled", lag_bytes=1))
    look(watch, 0, paused)
    assert look(watch, 61, paused) == []


def test_a_copy_that_moves_is_ready_and_one_that_does_not_is_named() -> None:
    """P-F13 for sync: a long copy is no failure, a copy without progress is."""
    watch = ProgressWatch(60)
    for at in range(0, 600, 50):
        assert look(watch, at, sync(group(copying(at)))) == []
    (found,) = watch.look(overview(sync(group(copying(550))), at=START + timedelta(seconds=611)))
    assert found.tables == ("public.items",)


def test_a_table_that_waits_for_its_turn_is_ready_while_another_is_copied() -> None:
    """Copies are few at a time: waiting is not standing still."""
    watch = ProgressWatch(60)
    waiting = table("public.later", SyncState.PENDING)
    look(watch, 0, sync(group(copying(1), waiting)))
    assert look(watch, 61, sync(group(copying(2), waiting))) == []


def test_a_table_that_failed_leaves_the_rest_ready() -> None:
    """One table cannot hurt another, not even their probe."""
    watch = ProgressWatch(60)
    look(watch, 0, sync(group(BROKEN)))
    assert look(watch, 61, sync(group(BROKEN))) == []


def test_a_long_seed_is_ready_and_a_fan_out_without_progress_is_not() -> None:
    """P-F13: health stays green during a long seed and turns red when progress stops."""
    watch = ProgressWatch(60)
    for at in range(0, 600, 50):
        assert look(watch, at, fanout(destination("a", "seeding"), seed=seeding(at))) == []
    still = fanout(destination("a", "seeding"), destination("b", position=7), seed=seeding(550))
    look(watch, 600, still)
    assert look(watch, 661, still) == ["1 of 2 destinations are behind and none moves"]


def test_one_failing_destination_leaves_a_fan_out_ready_but_all_of_them_do_not() -> None:
    """A failing destination is its own problem, until there is no other."""
    watch = ProgressWatch(60)
    failing = destination("a", "errored", lag_snapshots=9)
    look(watch, 0, fanout(failing, destination("b")))
    assert look(watch, 61, fanout(failing, destination("b"))) == []
    look(watch, 62, fanout(failing))
    assert look(watch, 130, fanout(failing)) == ["all 1 destinations have failed"]


def test_a_fan_out_whose_source_is_out_of_reach_is_stalled() -> None:
    """P-F13: a flow that cannot read its source cannot know whether there is work."""
    watch = ProgressWatch(60)
    blind = fanout(destination("a"), source_snapshot=7, error=Problem(code="lake.catalog", message="refused"))
    look(watch, 0, blind)
    assert look(watch, 61, blind) == ["the source cannot be read: [lake.catalog] refused"]


def test_an_overview_is_never_changed_by_looking() -> None:
    """Overviews are values: the same one can be looked at again."""
    one = overview(sync(group(lag_bytes=1)), at=START)
    watch = ProgressWatch(60)
    watch.look(one)
    assert watch.look(replace(one, at=START + timedelta(seconds=60))) != ()
