"""
Which tables of a group are to be copied, replayed or handed over now, and which wait because they failed.

`CopySchedule` decides and remembers; the threads that do the work are in `copies`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from aqueduck.lake.ledger.table_states import TableState
from aqueduck.model.errors import AqueduckError
from aqueduck.model.lifecycle import Lifecycle, SyncState, fail, retry_is_due

__all__ = ["CopySchedule", "Due", "Handover"]

SMALL_BYTES = 4 << 20
SMALL_TABLES_MAX = 25

Handover = Callable[[TableState], None]
"""Takes a table over from another group, instead of copying it."""


@dataclass(frozen=True, slots=True)
class Due:
    """Tables that are not ready and need not wait."""

    replays: Sequence[int]
    """Tables that were copied and whose parked changes may be applied now."""
    handovers: Sequence[int]
    copies: Sequence[int]


class CopySchedule:
    """The tables that are due, and those that failed."""

    def __init__(self) -> None:
        self.failures: dict[int, Lifecycle] = {}
        """Tables that failed, in a copy or a commit, until they are ready again."""
        self._handovers: dict[int, Handover] = {}
        self._alone: set[int] = set()
        """Small tables that failed together; each is copied alone next time."""

    def due(
        self,
        states: Mapping[int, TableState],
        *,
        disabled: Collection[int],
        is_busy: Callable[[int], bool],
    ) -> Due:
        oids = [
            oid
            for oid, state in states.items()
            if not state.ready and oid not in disabled and not is_busy(oid) and self._may_try(oid)
        ]
        replays = [oid for oid in oids if states[oid].error is not None]
        handovers = [oid for oid in oids if oid in self._handovers and oid not in replays]
        return Due(replays, handovers, [oid for oid in oids if oid not in {*replays, *handovers}])

    def _may_try(self, oid: int) -> bool:
        failed = self.failures.get(oid)
        return failed is None or retry_is_due(failed, datetime.now(UTC))

    def batches(
        self, oids: Sequence[int], sizes: Mapping[int, int], begun: Collection[int]
    ) -> list[list[int]]:
        """Which tables share a copy: small ones do, unless their copy has `begun`; large ones are copied one by one."""
        small = [o for o in oids if sizes.get(o, 0) <= SMALL_BYTES and o not in self._alone]
        small = [o for o in small if o not in begun]
        alone = [[o] for o in oids if o not in set(small)]
        return alone + [small[i : i + SMALL_TABLES_MAX] for i in range(0, len(small), SMALL_TABLES_MAX)]

    # -- results

    def failed(self, oid: int, error: AqueduckError) -> None:
        """A table failed, in a copy or in a commit."""
        now = datetime.now(UTC)
        self.failures[oid] = fail(self.failures.get(oid, Lifecycle(SyncState.PENDING, now)), error, now)

    def failed_together(self, oids: Collection[int]) -> None:
        """One of several tables failed: copy each alone, to find out which."""
        self._alone.update(oids)

    def succeeded(self, oids: Collection[int]) -> None:
        """The tables are ready, or their failures were not real."""
        for oid in oids:
            self.failures.pop(oid, None)
        self._alone.difference_update(oids)

    def retry_now(self, oid: int) -> None:
        """An operator reports that the cause of a failure was removed."""
        if oid in self.failures:
            self.failures[oid] = replace(self.failures[oid], retry_at=datetime.now(UTC))

    def raise_failures(self) -> None:
        """Raise the first failure, for a caller that waits for all copies."""
        for life in self.failures.values():
            assert life.failure is not None
            raise AqueduckError.from_text(life.failure.message) or AqueduckError(life.failure.message)

    def forget(self, oid: int) -> None:
        self.failures.pop(oid, None)
        self._handovers.pop(oid, None)

    # -- handovers

    def hand_over(self, oid: int, handover: Handover) -> None:
        """Another group hands the table over, so it is not copied."""
        self._handovers[oid] = handover

    def handover(self, oid: int) -> Handover | None:
        return self._handovers.get(oid)

    def handed_over(self, oid: int) -> None:
        self._handovers.pop(oid, None)
