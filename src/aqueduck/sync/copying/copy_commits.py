"""
How what was copied or parked takes effect: in one lake transaction, for one state of each table.

A copy commit is the target emptied, the copy's files, the changes that were parked meanwhile, and the table's state.  It
counts only if the table still has the state that the work began with; and whether it came about is asked of the
lake if it got no answer.  What happens inside the transaction is in `lake.commit.copy_commit`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from aqueduck.lake.commit.commit import set_lineage, transact
from aqueduck.lake.commit.copy_commit import commit_copy, replay_parked
from aqueduck.lake.commit.copy_commit_modes import SessionFiles
from aqueduck.lake.commit.copy_files import ChunkFile
from aqueduck.lake.ledger.parking import parked_segments, remove_parked_files
from aqueduck.lake.ledger.partition_marks import write_marks
from aqueduck.lake.ledger.table_states import TableState, read_states, write_state
from aqueduck.lake.target.apply import check_target
from aqueduck.lake.target.places import check_place, with_places
from aqueduck.lake.upkeep.statistics import settle_statistics
from aqueduck.model.changes import SegmentRef
from aqueduck.model.errors import CopyDisturbedError, LakeError
from aqueduck.model.schema import TableName, lsn_text
from aqueduck.sync.copying.copy_journal import forget_journal
from aqueduck.sync.copying.copy_reader import ReadTables
from aqueduck.sync.copying.running_copy import RunningCopy
from aqueduck.sync.tables.column_versions import ColumnVersions
from aqueduck.sync.tables.table_book import TableBook

__all__ = ["CopyCommits"]


class CopyCommits:
    """Of one group."""

    def __init__(self, book: TableBook, versions: ColumnVersions) -> None:
        self._book = book
        self._versions = versions
        self._unsure: set[int] = set()
        """Tables whose copy commit failed in a way that leaves open whether the lake has it."""

    def commit(self, read: ReadTables) -> dict[int, int]:
        """Copies, parked changes and states in one lake transaction; returns the rows by table."""
        book, copies = self._book, read.copies
        oids = [copy.state.oid for copy in copies]
        with book.commit_lock:
            if not all(book.is_current(copy.state) for copy in copies):
                raise CopyDisturbedError("a table was removed, or is wanted otherwise, since its copy began")
            parked = self._parked(oids)
            for copy in copies:
                parked[copy.state.oid] = self._numbered(copy, parked[copy.state.oid])
            self._unsure.update(oids)
            written = transact(
                book.lake,
                lambda: self._write(read, parked),
                happened=lambda done: self._in_lake([state for state, _ in done]),
            )
            self._unsure.difference_update(oids)
            states = [state for state, _ in written]
            book.written(states)
            self._settle(states)
            self._record_targets(states)
            rows = {state.oid: count for state, count in written}
            book.mark_ready(rows)
        remove_parked_files([segment for found in parked.values() for segment in found])
        return rows

    def _numbered(self, copy: RunningCopy, parked: Sequence[SegmentRef]) -> list[SegmentRef]:
        """Parked segments with the columns' numbers, of those that the copy does not have."""
        visibility = copy.session.visibility
        fresh = iter(self._versions.after(copy.schema, [s for s in parked if not visibility.shows_all(s)]))
        return [s if visibility.shows_all(s) else next(fresh) for s in parked]

    def _write(
        self, read: ReadTables, parked: Mapping[int, Sequence[SegmentRef]]
    ) -> list[tuple[TableState, int]]:
        """Inside a transaction: each table's new state, and the rows of its copy."""
        book, copies = self._book, read.copies
        written = []
        for copy in copies:
            oid = copy.state.oid
            ready = replace(copy.state, ready=True, copy_position=read.position, error=None)
            files = _files(copy, read)
            state = commit_copy(
                book.lake,
                book.group,
                book.unless_disabled(ready),  # its changes stay parked
                copy.schema,
                [
                    SessionFiles(s.visibility, tuple(f.path for f in found if f.path), s.time_us)
                    for s, found in zip(copy.journal.sessions, files, strict=True)
                ],
                parked[oid],
                target_uuid=copy.target_uuid,
            )
            if copy.marks is not None:
                write_marks(book.lake, book.group, oid, copy.marks)
            written.append((state, sum(f.rows for found in files for f in found)))
        names = ", ".join(c.schema.qualified for c in copies[:3]) + (", …" if len(copies) > 3 else "")
        write_state(book.lake, book.group, [state for state, _ in written])
        set_lineage(book.lake, f"copy of {names}", {"group": book.group, "lsn": lsn_text(read.position)})
        return written

    def _settle(self, states: Sequence[TableState]) -> None:
        """What a copy commit filled, it may have made anew."""
        targets, memory = [state.target for state in states], self._book.lake.memory
        memory.settled.difference_update(targets)
        with contextlib.suppress(LakeError):  # the next batch does it before its commit
            settle_statistics(self._book.lake, targets, memory.settled)

    def _record_targets(self, states: Sequence[TableState]) -> None:
        """Which tables the copy commit made: DuckLake numbers them when it commits."""
        book = self._book
        with contextlib.suppress(LakeError):  # the next start does it
            known = with_places(book.lake, states)
            if known:
                transact(book.lake, lambda: write_state(book.lake, book.group, known))
                book.written(known)

    def _parked(self, oids: Sequence[int]) -> dict[int, list[SegmentRef]]:
        # Asking the lake takes a third of a copy commit.
        asked = [oid for oid in oids if self._book.may_have_parked(oid)]
        found = parked_segments(self._book.lake, self._book.group, asked) if asked else {}
        return {oid: found.get(oid, []) for oid in oids}

    def _in_lake(self, states: Sequence[TableState]) -> bool:
        """Whether the lake has these states: asked after a commit without an answer."""
        known = read_states(self._book.lake, self._book.group)
        return all(known.get(s.oid) is not None and _same_progress(known[s.oid], s) for s in states)

    def not_committed(self, states: list[TableState]) -> list[TableState]:
        """Those whose copy is not in; a copy commit that seemed to fail may have come about after all."""
        book = self._book
        if not any(state.oid in self._unsure for state in states):
            return states
        with book.commit_lock:
            known = read_states(book.lake, book.group)
            there = [s for s in states if s.oid in known and not _same_progress(known[s.oid], s)]
            book.written(known[s.oid] for s in there)
            self._unsure.difference_update(s.oid for s in states)
            for state in there:
                forget_journal(book.directory, state.oid)
                if known[state.oid].ready:  # what was parked since then comes now
                    self._replay(known[state.oid])
        return [s for s in states if s not in there]

    def replay(self, state: TableState) -> bool:
        """What was parked of a table that failed, if it can be applied now; false if the table has another state by now."""
        with self._book.commit_lock:
            if not self._book.is_current(state):
                return False
            self._replay(state)
            return True

    def _replay(self, state: TableState) -> None:
        self.finish(replace(state, ready=True, error=None), f"replay of {state.source}")

    def finish(self, ready: TableState, message: str, *, also: Callable[[], None] | None = None) -> None:
        """
        Apply what was parked and mark the table as ready; `also` is done in the same lake transaction.

        The caller holds the commit lock.
        """
        book = self._book
        parked = self._parked([ready.oid])[ready.oid]

        def replay() -> TableState:
            self._check_target(ready)
            done = replay_parked(book.lake, book.group, ready, parked)
            write_state(book.lake, book.group, [done])
            if also is not None:
                also()
            set_lineage(book.lake, message, {"group": book.group})
            return done

        book.written([transact(book.lake, replay, happened=lambda done: self._in_lake([done]))])
        self._settle([ready])
        book.mark_ready({ready.oid: 0})
        remove_parked_files(parked)

    def _check_target(self, ready: TableState) -> None:
        """Also where nothing is to be applied: a table that goes on has a target."""
        if ready.schema is not None:
            source = TableName(ready.schema.schema, ready.schema.name)
            check_place(self._book.lake, ready.target, ready.target_uuid, source)
            check_target(self._book.lake, ready.target, ready.schema, ready.mode)


def _files(copy: RunningCopy, read: ReadTables) -> list[list[ChunkFile]]:
    """The files of each session of a copy; the last also has what came after the others."""
    files = copy.journal.files_by_session()
    if sum(map(len, files)) != len(copy.journal.chunks):
        raise CopyDisturbedError("parts of the copy are gone", table=copy.schema.qualified)
    files[-1] += read.again[copy.state.oid]
    return files


def _same_progress(one: TableState, other: TableState) -> bool:
    return (one.ready, one.copy_position, one.error) == (other.ready, other.copy_position, other.error)
