"""
The errors of one flow in an overview: current and recent ones.

The picture of a service is made once a second, from error texts that mostly do not change (`sync.overview`,
`fanout.overview`, `events.status`): an error keeps the time at which it was first seen, and counts once.
"""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime

from aqueduck.model.errors import AqueduckError, VerifyDifferenceError
from aqueduck.overview.values import Problem, VerifyOverview

__all__ = ["Problems", "difference"]

RECENT_MAX = 200


def difference(verified: VerifyOverview, next_step: str) -> str | None:
    """The difference that the last comparison found, as an error's text; None if it found none."""
    if verified.verdict != "different":
        return None
    about = f": {verified.note}" if verified.note else ""
    return str(VerifyDifferenceError(f"it was found to differ from the source{about}", hint=next_step))


class Problems:
    """The problems of a flow, its groups, tables and destinations; not thread-safe."""

    def __init__(self, flow: str) -> None:
        self._flow = flow
        self._recent: deque[Problem] = deque(maxlen=RECENT_MAX)
        self._present: dict[tuple[str | None, ...], tuple[str, Problem]] = {}

    def recent(self) -> tuple[Problem, ...]:
        """The newest first, including resolved ones."""
        return tuple(self._recent)

    def see(
        self,
        text: str | None,
        *,
        group: str | None = None,
        table: str | None = None,
        destination: str | None = None,
    ) -> Problem | None:
        """The error in a text; a new one is added to the recent errors."""
        about = (group, table, destination)
        if text is None:
            self._present.pop(about, None)
            return None
        before = self._present.get(about)
        if before is not None and before[0] == text:
            return before[1]
        found = AqueduckError.from_text(text) or AqueduckError(text)
        problem = Problem(
            code=found.code,
            message=found.message,
            hint=found.hint,
            at=datetime.now(UTC),
            flow=self._flow,
            group=group,
            table=table,
            destination=destination,
        )
        self._present[about] = (text, problem)
        self._recent.appendleft(problem)
        return problem
