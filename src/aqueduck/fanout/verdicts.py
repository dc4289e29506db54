"""
The verdicts on a fan-out's destinations, as plain values.

`fanout.verify` (counts and sums) and `fanout.verify_deep` (every row) make them; `cli.show` prints them,
`service.verify_schedule` stores them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from aqueduck.model.errors import VerifyDifferenceError

__all__ = ["FOREIGN", "RESEED", "DeepCounts", "DestinationComparison", "Verdict", "raise_difference"]

RESEED = "delete its row of aqueduck.fanout_state in its lake: the service then re-seeds it"
FOREIGN = "delete the rows whose routing value is not the destination's: a seed keeps them, because they may be intended"


Verdict = Literal["identical", "different", "not compared"]


@dataclass(frozen=True, slots=True)
class DeepCounts:
    """The number of differing rows of a destination, by kind."""

    missing: int = 0
    extra: int = 0
    changed: int = 0
    repeated: int = 0
    foreign: int = 0
    """Rows of another tenant."""
    others: int = 0
    """Rows with routing values that neither the source nor a destination has: not compared."""
    more: bool = False
    """Whether more rows differ than were listed."""

    @property
    def total(self) -> int:
        return self.missing + self.extra + self.changed + self.repeated + self.foreign


@dataclass(frozen=True, slots=True)
class DestinationComparison:
    """One destination's verdict: identical, different, or not compared."""

    destination: str
    verdict: Verdict
    source_rows: int | None = None
    rows: int | None = None
    cursor: int | None = None
    """The source's lake snapshot at which both were compared."""
    note: str | None = None
    deep: DeepCounts | None = None
    """Only for a deep comparison."""

    @property
    def differing(self) -> int:
        """The number of differing rows as far as counted: from a deep comparison, otherwise at least one."""
        if self.verdict != "different":
            return 0
        return max(1, 0 if self.deep is None else self.deep.total)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "same": self.verdict == "identical"}


def raise_difference(results: Sequence[DestinationComparison]) -> None:
    """Raise if any destination differs."""
    differing = [r for r in results if r.verdict == "different"]
    if differing:
        first = differing[0]
        others = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        raise VerifyDifferenceError(
            f"{first.destination}{others} of {len(results)} destinations: {first.source_rows:,} rows in the source,"
            f" {first.rows:,} in the destination, at lake snapshot {first.cursor}",
            hint=RESEED if first.deep is None or not first.deep.foreign else FOREIGN,
        )
