"""The errors that an overview shows."""

from __future__ import annotations

from aqueduck.overview.problems import RECENT_MAX, Problems

BROKEN = "[lake.write] the disk is full. Fix: make room"


def test_an_error_that_stays_is_one_recent_error() -> None:
    """An overview is made once a second; an error that lasts does not push the others out."""
    problems = Problems("sync")
    first = problems.see(BROKEN, group="default", table="public.orders")
    again = problems.see(BROKEN, group="default", table="public.orders")

    assert first is not None
    assert again is first
    assert problems.recent() == (first,)
    assert (first.code, first.message, first.hint) == ("lake.write", "the disk is full", "make room")
    assert (first.flow, first.group, first.table) == ("sync", "default", "public.orders")


def test_an_error_that_comes_back_is_a_new_one() -> None:
    """An error that happened twice is listed twice among the recent errors, the newest first."""
    problems = Problems("sync")
    first = problems.see(BROKEN, group="default")
    assert problems.see(None, group="default") is None
    other = problems.see("[pg.auth] refused", group="default")
    third = problems.see(BROKEN, group="default")

    assert problems.recent() == (third, other, first)
    assert third is not first


def test_the_same_error_of_two_destinations_is_two() -> None:
    """If one table recovers, the error of the other stays."""
    problems = Problems("fanout")
    problems.see(BROKEN, destination="a")
    kept = problems.see(BROKEN, destination="b")
    problems.see(None, destination="a")

    assert problems.see(BROKEN, destination="b") is kept
    assert len(problems.recent()) == 2


def test_recent_errors_are_bounded() -> None:
    """A service that fails for weeks keeps the newest errors only."""
    problems = Problems("events")
    for number in range(RECENT_MAX + 5):
        problems.see(f"failure {number}", group="slot")

    assert len(problems.recent()) == RECENT_MAX
    assert problems.recent()[0].message == f"failure {RECENT_MAX + 4}"
