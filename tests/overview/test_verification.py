"""What a service decides about comparing itself: pure."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from aqueduck.config.sections import Section
from aqueduck.config.sync import VerifyConfig
from aqueduck.overview.values import VerifyOverview
from aqueduck.overview.verification import NEVER, Look, after, due, in_words, rest_seconds

NOW = datetime(2026, 1, 1, tzinfo=UTC)
IDENTICAL = Look(verdict="identical")
DAY = 86_400.0


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def test_a_look_that_failed_changes_no_verdict() -> None:
    """P-T01: a table that could not be compared keeps its last verdict, with the reason; it never becomes identical."""
    failed = Look(verdict="not compared", note="away")
    assert after(NEVER, failed, NOW, deep=True).verdict == "never"
    known = after(NEVER, Look(verdict="different", differences=3, note="3 missing"), ago(60), deep=True)
    still = after(known, failed, NOW, deep=True)
    assert (still.verdict, still.differences, still.at, still.failed_at) == ("different", 3, ago(60), NOW)
    assert in_words(still) == "3 missing; not compared since: away"


def test_a_difference_keeps_when_both_were_last_the_same() -> None:
    """Since when something may be wrong is known; a good look takes all of it back."""
    good = after(NEVER, IDENTICAL, ago(100), deep=False)
    bad = after(good, Look(verdict="different", differences=1), NOW, deep=True)
    assert (bad.identical_at, bad.at, bad.deep) == (ago(100), NOW, True)
    assert after(bad, IDENTICAL, NOW, deep=True) == VerifyOverview(
        verdict="identical", at=NOW, identical_at=NOW, deep=True
    )


def test_what_waits_longest_is_due_first() -> None:
    """Never looked at, then the oldest verdict; nothing before its interval has passed."""
    known = {
        "old": after(NEVER, IDENTICAL, ago(2 * DAY), deep=True),
        "older": after(NEVER, IDENTICAL, ago(3 * DAY), deep=True),
        "young": after(NEVER, IDENTICAL, ago(60), deep=True),
    }
    names = ["young", "old", "new", "older"]
    assert due(known, names, DAY, NOW, 9) == ["new", "older", "old"]
    assert due(known, names, DAY, NOW, 1) == ["new"]


def test_what_differs_or_failed_is_looked_at_sooner() -> None:
    """Five minutes after a difference, ten after a failure, and never more often than the interval says."""
    different = after(NEVER, Look(verdict="different"), ago(301), deep=True)
    failed = after(NEVER, Look(verdict="not compared"), ago(599), deep=True)
    assert due({"d": different, "f": failed}, ["d", "f"], DAY, NOW, 9) == ["d"]
    assert due({"f": failed}, ["f"], DAY, NOW + timedelta(seconds=2), 9) == ["f"]
    assert due({"f": failed}, ["f"], 30.0, NOW, 9) == ["f"]


def test_rest_makes_the_share() -> None:
    """A tenth of the time is work."""
    assert rest_seconds(2.0, 0.1) == pytest.approx(18.0)
    assert rest_seconds(2.0, 1.0) == 0.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("6h", 21_600),
        ("30 min", 1800),
        ("1.5d", 129_600),
        ("45s", 45),
        (60, 60),
        ("off", None),
        (False, None),
    ],
)
def test_intervals_are_written_as_people_write_them(text: object, seconds: float | None) -> None:
    """YAML reads a bare off as false."""
    assert VerifyConfig.model_validate({"interval": text}).interval == seconds


@pytest.mark.parametrize("text", ["6", "soon", "0h", 0, -1, True, "-1h", "1w"])
def test_other_intervals_are_refused(text: object) -> None:
    """With the forms that are known."""
    section: type[Section] = VerifyConfig
    with pytest.raises(ValueError, match="must be a time such as 30min, 6h or 1d, or off"):
        section.model_validate({"interval": text})
