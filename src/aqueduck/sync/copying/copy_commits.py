"""
Commit a copy and its parked changes in one lake transaction, for one state of each table.

A copy commit empties the target, adds the copy's files, applies the changes that were parked meanwhile, and writes the
table's state.  It counts only if the table still has the state with which the copy began.  If the commit gets no answer,
the lake is asked whether it happened.  The statements inside the transaction are in `lake.commit.copy_commit`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from aqueduck.lake.commit.commit import set_lineage, transact
from aqueduck.lake.commit.copy_commit import commit_copy, replay_parked
from aqueduck.lake.commit.copy_commit_modes import SessionFiles
from aqueduck.lake.commit.copy_files import ChunkFile
from aqueduck.lake.ledger.parking import parked_segments, remove_parked_files, unsealed
from aqueduck.lake.ledger.partition_marks import write_marks
from aqueduck.lake.ledger.table_states import TableState, read_states, write_state
from aqueduck.lake.target.apply import check_target
from aqueduck.lake.target.layout_rows import discard_inserted
from aqueduck.lake.target.layouts import mend_partition_values
from aqueduck.lake.target.places import check_place, refuse_hidden_rows, with_places
from aqueduck.lake.target.set_layouts import set_file_sizes
from aqueduck.lake.upkeep.statistics import settle_statistics
from aqueduck.model.changes import SegmentRef
from aqueduck.model.errors import CopyDisturbedError, LakeError, LakeFileMissingError
from aqueduck.model.schema import TableName, lsn_text
from aqueduck.sync.copying.copy_journal import forget_journal
from aqueduck.sync.copying.copy_reader import ReadTables
from aqueduck.sync.copying.running_copy import RunningCopy
from aqueduck.sync.tables.column_versions import ColumnVersions
from aqueduck.sync.tables.table_book import TableBook

__all__ = ["CopyCommits"]


class CopyCommits:
    """The copy commits of one group."""

    def __init__(self, book: TableBook, versions: ColumnVersions) -> None:
        self._book = book
        self._versions = versions
        self._unsure: set[int] = set()
        """Tables whose copy commit failed without telling whether the lake has it."""

    def commit(self, read: ReadTables) -> dict[int, int]:
        """Commit copies, parked changes and states in one lake transaction; returns the rows by table."""
        book, copies = self._book, read.copies
        oids = [copy.state.oid for copy in copies]
        with book.commit_lock:
            if not all(book.is_current(copy.state) for copy in copies):
                raise CopyDisturbedError(
                    "a table was removed, or its options were changed, after its copy began"
                )
            parked = self._parked(oids)
            for copy in copies:
                parked[copy.state.oid] = self._numbered(copy, parked[copy.state.oid])
            self._unsure.update(oids)
            with unsealed(book.lake, parked, book.unsealed) as readable:
                try:
                    written = self._transact(read, readable)
                except LakeFileMissingError:
                    if len(copies) > 1:  # each is copied alone then
                        raise
                    book.lake.reopen()
                    written = self._transact(read, readable, anew=True)
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
        """The parked segments that the copy does not have, with their column numbers."""
        visibility = copy.session.visibility
        fresh = iter(self._versions.after(copy.schema, [s for s in parked if not visibility.shows_all(s)]))
        return [s if visibility.shows_all(s) else next(fresh) for s in parked]

    def _transact(
        self, read: ReadTables, parked: Mapping[int, Sequence[SegmentRef]], *, anew: bool = False
    ) -> list[tuple[TableState, int]]:
        return transact(
            self._book.lake,
            lambda: self._write(read, parked, anew),
            happened=lambda done: self._in_lake([state for state, _ in done]),
        )

    def _write(
        self, read: ReadTables, parked: Mapping[int, Sequence[SegmentRef]], anew: bool
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
                    SessionFiles(s.visibility, tuple(path for f in found for path in f.paths), s.time_us)
                    for s, found in zip(copy.journal.sessions, files, strict=True)
                ],
                parked[oid],
                target_uuid=copy.target_uuid,
                anew=anew,
            )
            if copy.marks is not None:
                write_marks(book.lake, book.group, oid, copy.marks)
            written.append((state, sum(f.rows for found in files for f in found)))
        names = ", ".join(c.schema.qualified for c in copies[:3]) + (", …" if len(copies) > 3 else "")
        write_state(book.lake, book.group, [state for state, _ in written])
        set_lineage(book.lake, f"copy of {names}", {"group": book.group, "lsn": lsn_text(read.position)})
        return written

    def _settle(self, states: Sequence[TableState]) -> None:
        """Targets that a copy commit filled may be new tables."""
        targets, memory = [state.target for state in states], self._book.lake.memory
        memory.settled.difference_update(targets)
        with contextlib.suppress(LakeError):  # the next batch does it before its commit
            settle_statistics(self._book.lake, targets, memory.settled)
            mend_partition_values(self._book.lake, memory.misfiled)
        discard_inserted(self._book.lake)

    def _record_targets(self, states: Sequence[TableState]) -> None:
        """Record the uuids of the tables that the copy commit created: DuckLake assigns them at the commit."""
        book = self._book
        with contextlib.suppress(LakeError):  # the next start does it
            known = with_places(book.lake, states)
            set_file_sizes(book.lake, [state.target for state in states])
            if known:
                transact(book.lake, lambda: write_state(book.lake, book.group, known))
                book.written(known)

    def _parked(self, oids: Sequence[int]) -> dict[int, list[SegmentRef]]:
        # Asking the lake takes a third of the time of a copy commit.
        asked = [oid for oid in oids if self._book.may_have_parked(oid)]
        found = parked_segments(self._book.lake, self._book.group, asked) if asked else {}
        return {oid: found.get(oid, []) for oid in oids}

    def _in_lake(self, states: Sequence[TableState]) -> bool:
        """Whether the lake has these states: asked after a commit without an answer."""
        known = read_states(self._book.lake, self._book.group)
        return all(known.get(s.oid) is not None and _same_progress(known[s.oid], s) for s in states)

    def not_committed(self, states: list[TableState]) -> list[TableState]:
        """Tables whose copy is not in the lake; a copy commit that seemed to fail may have happened after all."""
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
                if known[state.oid].ready:  # apply what was parked since then
                    self._replay(known[state.oid])
        return [s for s in states if s not in there]

    def replay(self, state: TableState) -> bool:
        """Apply what was parked for a failed table, if possible now; False if the table has another state meanwhile."""
        with self._book.commit_lock:
            if not self._book.is_current(state):
                return False
            self._replay(state)
            return True

    def _replay(self, state: TableState) -> None:
        self.finish(replace(state, ready=True, error=None), f"replay of {state.source}")

    def finish(self, ready: TableState, message: str, *, also: Callable[[], None] | None = None) -> None:
        """
        Apply what was parked and mark the table as ready; `also` runs in the same lake transaction.

        The caller holds the commit lock.
        """
        book = self._book
        parked = self._parked([ready.oid])[ready.oid]

        def replay(readable: Sequence[SegmentRef]) -> TableState:
            self._check_target(ready)
            done = replay_parked(book.lake, book.group, ready, readable)
            write_state(book.lake, book.group, [done])
            if also is not None:
                also()
            set_lineage(book.lake, message, {"group": book.group})
            return done

        with unsealed(book.lake, {ready.oid: parked}, book.unsealed) as readable:
            done = transact(
                book.lake, lambda: replay(readable[ready.oid]), happened=lambda done: self._in_lake([done])
            )
        book.written([done])
        self._settle([ready])
        book.mark_ready({ready.oid: 0})
        remove_parked_files(parked)

    def _check_target(self, ready: TableState) -> None:
        """Check the target, even if there is nothing to apply: a table that is ready must have one."""
        if ready.schema is not None:
            source = TableName(ready.schema.schema, ready.schema.name)
            check_place(self._book.lake, ready.target, ready.target_uuid, source)
            refuse_hidden_rows(self._book.lake, ready.target, source)
            check_target(self._book.lake, ready.target, ready.schema, ready.mode)


def _files(copy: RunningCopy, read: ReadTables) -> list[list[ChunkFile]]:
    """The files of each session of a copy; the last session also has the rows that are newer than the earlier ones."""
    files = copy.journal.files_by_session()
    if sum(map(len, files)) != len(copy.journal.chunks):
        raise CopyDisturbedError("parts of the copy are gone", table=copy.schema.qualified)
    files[-1] += read.again[copy.state.oid]
    return files


def _same_progress(one: TableState, other: TableState) -> bool:
    return (one.ready, one.copy_position, one.error) == (other.ready, other.copy_position, other.error)
