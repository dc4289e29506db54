"""The one loop of retries: what it tries again, how often, after which delays, and when it stops."""

from __future__ import annotations

import pytest

from aqueduck.model.errors import ConfigError, LakeBusyError, LakeError
from aqueduck.model.retries import doubled, doubling, restart_delay, retried


class Work:
    """Raises what it is given, one error a call, and then returns its number of calls."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.calls


def test_work_is_tried_again_after_each_delay() -> None:
    """A delay is waited for after a failure only, and the first success is returned."""
    waited: list[float] = []
    work = Work(LakeBusyError("a"), LakeBusyError("b"))
    assert retried(work, (1.0, 2.0, 4.0), waited.append, on=LakeBusyError) == 3
    assert waited == [1.0, 2.0]


def test_the_last_error_is_raised_when_no_delay_is_left() -> None:
    """The number of delays bounds the number of tries: one more than there are delays."""
    work = Work(*(LakeBusyError(str(n)) for n in range(9)))
    with pytest.raises(LakeBusyError, match="2"):
        retried(work, (0.0, 0.0), lambda _: None, on=LakeBusyError)
    assert work.calls == 3


def test_other_errors_are_raised_at_once() -> None:
    """Other errors, and final ones, are not retried."""
    for error in (ConfigError("c"), LakeBusyError("final")):
        work = Work(error)
        with pytest.raises(type(error)):
            retried(work, (0.0,), lambda _: None, on=LakeError, failed=lambda exc: "final" in str(exc))
        assert work.calls == 1


def test_a_wait_that_is_interrupted_ends_the_retries() -> None:
    """A service that stops does not try again: the error at hand is raised."""
    work = Work(LakeBusyError("busy"))
    with pytest.raises(LakeBusyError):
        retried(work, (1.0, 1.0), lambda _: True, on=LakeBusyError)
    assert work.calls == 1


def test_delays_double_up_to_their_limit() -> None:
    """Without jitter they are exact; with jitter each stays within its share; no number of failures is too large."""
    assert list(doubling(0.25, 4.0, times=6)) == [0.25, 0.5, 1.0, 2.0, 4.0, 4.0]
    spread = [list(doubling(1.0, 8.0, times=5, jitter=0.5)) for _ in range(50)]
    for number, middle in enumerate((1.0, 2.0, 4.0, 8.0, 8.0)):
        delays = [delays[number] for delays in spread]
        assert all(middle * 0.5 <= delay <= middle * 1.5 for delay in delays)
        assert len(set(delays)) > 1
    assert doubled(30.0, 10**6, 1800.0) == 1800.0


def test_a_query_restarts_later_after_each_failure() -> None:
    """The pause grows from one second to half a minute and stays there."""
    assert [restart_delay(n) for n in range(7)] == [1.0, 2.0, 5.0, 10.0, 30.0, 30.0, 30.0]
