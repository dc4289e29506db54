"""The proof behind the state STREAMING: a process reads the slot, and the position moves."""

from __future__ import annotations

import time

import pytest

from aqueduck.service.probe import OLD_SECONDS, STILL_SECONDS, Probe, Proof, Reading


def probe(at: float, *, active: bool = True, flushed: int = 100) -> Probe:
    return Probe(at, active, flushed)


def reading(seen: int, *, received: int = 0, waits: bool = False, polls: bool = False) -> Reading:
    return Reading("s", seen, received, waits, polls)


def error_after(*taken: tuple[Probe, Reading]) -> str | None:
    proof = Proof()
    for one, group in taken:
        proof.take(one, group)
    return None if proof.error is None else proof.error.message


LATE = STILL_SECONDS + 1


def test_a_slot_without_a_reader_is_found() -> None:
    """Not at once: a query that is started again lets go of it for a moment."""
    idle = reading(100)
    assert error_after((probe(0), idle), (probe(5, active=False), idle)) is None
    late = error_after((probe(0), idle), (probe(LATE, active=False), idle))
    assert late is not None
    assert "has had no reader" in late
    assert error_after((probe(0), idle), (probe(LATE, active=False), idle), (probe(LATE + 5), idle)) is None


def test_a_position_that_stops_while_the_server_advances_is_found() -> None:
    """The connection is there, and nothing comes."""
    late = error_after(
        (probe(0), reading(100)),
        (probe(5, flushed=200), reading(100)),
        (probe(LATE + 5, flushed=300), reading(100)),
    )
    assert late is not None
    assert "has not moved" in late


@pytest.mark.parametrize(
    "later",
    [reading(100), reading(150), reading(50, received=7), reading(50, waits=True)],
    ids=["it is where the server is", "it moves", "it receives a large transaction", "it waits on purpose"],
)
def test_what_moves_or_has_everything_is_well(later: Reading) -> None:
    assert error_after((probe(0), reading(50)), (probe(LATE), later)) is None


def test_an_old_probe_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the watch hangs, what it saw once is not shown for ever."""
    proof = Proof()
    assert not proof.is_old()
    proof.take(probe(1000), reading(100))
    monkeypatch.setattr(time, "monotonic", lambda: 1000 + OLD_SECONDS - 1)
    assert not proof.is_old()
    monkeypatch.setattr(time, "monotonic", lambda: 1000 + OLD_SECONDS)
    assert proof.is_old()


def test_a_slot_that_is_polled_is_active_now_and_then() -> None:
    polled = reading(100, polls=True)
    assert error_after((probe(0), polled), (probe(LATE, active=False), polled)) is None
