"""
How what was copied or parked takes effect: in one lake transaction, for one state of each table.

A landing is the target emptied, the copy's files, the changes that were parked meanwhile, and the table's state.  What is
done here counts only if the table still has the state that the work began with; and whether it came about is asked of the
lake if a commit got no answer.  What happens inside the transaction is in `lake.commit.copy_commit`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from aqueduck.lake.commit.commit import set_lineage, transact
from aqueduck.lake.commit.copy_commit import is_shown, land_copy, replay_parked
from aqueduck.lake.commit.copy_commit_modes import SessionFiles
from aqueduck.lake.commit.copy_files import ChunkFile
from aqueduck.lake.ledger.parking import parked_segments, remove_parked_files
from aqueduck.lake.ledger.partition_marks import write_marks
from aqueduck.lake.ledger.table_states import TableState, read_states, write_state
from aqueduck.lake.session.catalog import LakeSession
from aqueduck.lake.target.apply import check_target
from aqueduck.lake.target.places import check_place, with_places
from aqueduck.lake.upkeep.statistics import settle_statistics
from aqueduck.model.changes import SegmentRef
from aqueduck.model.errors import CopyDisturbedError, LakeError, TableDisabledError
from aqueduck.model.schema import TableName, TableSchema, lsn_text
from aqueduck.sync.copying.copy_journal import forget_journal
from aqueduck.sync.copying.running_copy import RunningCopy

__all__ = ["Landings"]


@dataclass
class Landings:
    """Of one group; whatever `Copier` has under the same name is the same thing."""

    lake: LakeSession
    group: str
    commit_lock: threading.Lock
    states: dict[int, TableState]
    directory: Path
    disabled: set[int]
    on_ready: Callable[[Mapping[int, int]], None]
    """Told which tables are ready, and how many rows a copy of each brought."""
    numbered: Callable[[TableSchema, Sequence[SegmentRef]], list[SegmentRef]]
    may_have_parked: Callable[[int], bool]
    _unsure: set[int] = field(default_factory=set)
    """Tables whose landing failed in a way that leaves open whether the lake has it."""

    def is_over(self, state: TableState) -> bool:
        """Whether the table was removed or got another state since: what is being done for this one is worth nothing."""
        return self.states.get(state.oid) is not state

    def land(
        self, copies: list[RunningCopy], again: dict[int, list[ChunkFile]], position: int
    ) -> dict[int, int]:
        """Copies, parked changes and states in one lake transaction; returns the rows by table."""
        rows: dict[int, int] = {}

        def write() -> tuple[list[TableState], list[SegmentRef]]:
            landed = []
            for copy in copies:
                state = replace(copy.state, ready=True, copy_position=position, error=None)
                if state.oid in self.disabled:  # its changes stay parked
                    why = str(TableDisabledError(f"{state.source} is disabled"))
                    state = replace(state, ready=False, error=why)
                files = copy.journal.files_by_session()
                if sum(map(len, files)) != len(copy.journal.chunks):
                    raise CopyDisturbedError("parts of the copy are gone", table=copy.schema.qualified)
                files[-1] += again[state.oid]
                sessions = [
                    SessionFiles(s.moment, tuple(f.path for f in found if f.path), s.time_us)
                    for s, found in zip(copy.journal.sessions, files, strict=True)
                ]
                landed.append(
                    land_copy(
                        self.lake,
                        self.group,
                        state,
                        copy.schema,
                        sessions,
                        parked[state.oid],
                        target_uuid=copy.target_uuid,
                    )
                )
                if copy.marks is not None:
                    write_marks(self.lake, self.group, state.oid, copy.marks)
                rows[state.oid] = sum(f.rows for found in files for f in found)
            names = ", ".join(c.schema.qualified for c in copies[:3]) + (", …" if len(copies) > 3 else "")
            write_state(self.lake, self.group, landed)
            set_lineage(self.lake, f"copy of {names}", {"group": self.group, "lsn": lsn_text(position)})
            return landed, [segment for found in parked.values() for segment in found]

        with self.commit_lock:
            if any(self.is_over(copy.state) for copy in copies):
                raise CopyDisturbedError("a table was removed, or is wanted otherwise, since its copy began")
            parked = self._parked([copy.state.oid for copy in copies])
            for copy in copies:
                mine, moment = parked[copy.state.oid], copy.session.moment
                fresh = iter(self.numbered(copy.schema, [s for s in mine if not is_shown(s, moment)]))
                parked[copy.state.oid] = [s if is_shown(s, moment) else next(fresh) for s in mine]
            self._unsure.update(copy.state.oid for copy in copies)
            landed, replayed = transact(self.lake, write, happened=lambda done: self._in_lake(done[0]))
            self._unsure.difference_update(copy.state.oid for copy in copies)
            self.states.update((state.oid, state) for state in landed)
            self._settle(landed)
            self._note_targets(landed)
            self.on_ready(rows)
        remove_parked_files(replayed)
        return rows

    def _settle(self, landed: Sequence[TableState]) -> None:
        """What a landing filled, it may have made anew."""
        targets = [state.target for state in landed]
        self.lake.memory.settled.difference_update(targets)
        with contextlib.suppress(LakeError):  # the next batch does it before its commit
            settle_statistics(self.lake, targets, self.lake.memory.settled)

    def _note_targets(self, landed: Sequence[TableState]) -> None:
        """Which tables the landing made: DuckLake numbers them when it commits."""
        with contextlib.suppress(LakeError):  # the next start does it
            known = with_places(self.lake, landed)
            if known:
                transact(self.lake, lambda: write_state(self.lake, self.group, known))
                self.states.update((state.oid, state) for state in known)

    def _parked(self, oids: Sequence[int]) -> dict[int, list[SegmentRef]]:
        asked = [oid for oid in oids if self.may_have_parked(oid)]
        found = parked_segments(self.lake, self.group, asked) if asked else {}
        return {oid: found.get(oid, []) for oid in oids}

    def _in_lake(self, states: Sequence[TableState]) -> bool:
        """Whether the lake has these states: asked after a commit without an answer."""
        known = read_states(self.lake, self.group)
        return all(known.get(s.oid) is not None and _same_progress(known[s.oid], s) for s in states)

    def not_landed(self, states: list[TableState]) -> list[TableState]:
        """Those whose copy is not in; a landing that seemed to fail may have come about after all."""
        if not any(state.oid in self._unsure for state in states):
            return states
        with self.commit_lock:
            known = read_states(self.lake, self.group)
            there = [s for s in states if s.oid in known and not _same_progress(known[s.oid], s)]
            self.states.update((s.oid, known[s.oid]) for s in there)
            self._unsure.difference_update(s.oid for s in states)
            for state in there:
                forget_journal(self.directory, state.oid)
                if known[state.oid].ready:  # what was parked since then comes now
                    self._replay_locked(known[state.oid])
        return [s for s in states if s not in there]

    def replay(self, state: TableState) -> bool:
        """What was parked of a table that failed, if it can be applied now; false if the table has another state by now."""
        with self.commit_lock:
            if self.is_over(state):
                return False
            self._replay_locked(state)
            return True

    def _replay_locked(self, state: TableState) -> None:
        self.finish_locked(replace(state, ready=True, error=None), f"replay of {state.source}")

    def finish_locked(
        self, ready: TableState, message: str, *, also: Callable[[], None] | None = None
    ) -> None:
        """Apply what was parked and mark the table as ready; `also` is done in the same lake transaction."""
        parked = self._parked([ready.oid])[ready.oid]

        def replay() -> TableState:
            self._check_target(ready)
            done = replay_parked(self.lake, self.group, ready, parked)
            write_state(self.lake, self.group, [done])
            if also is not None:
                also()
            set_lineage(self.lake, message, {"group": self.group})
            return done

        self.states[ready.oid] = transact(self.lake, replay, happened=lambda done: self._in_lake([done]))
        self._settle([ready])
        self.on_ready({ready.oid: 0})
        remove_parked_files(parked)

    def _check_target(self, ready: TableState) -> None:
        """Also where nothing is to be applied: a table that goes on has a target."""
        if ready.schema is not None:
            source = TableName(ready.schema.schema, ready.schema.name)
            check_place(self.lake, ready.target, ready.target_uuid, source)
            check_target(self.lake, ready.target, ready.schema, ready.mode)

    def set_state(self, state: TableState) -> None:
        """Write a table's state outside of any batch; the caller holds `commit_lock`."""
        transact(self.lake, lambda: write_state(self.lake, self.group, [state]))
        self.states[state.oid] = state


def _same_progress(one: TableState, other: TableState) -> bool:
    return (one.ready, one.copy_position, one.error) == (other.ready, other.copy_position, other.error)
