"""
One table while it is copied, and the changes that invalidate the copy.

Chunks are read by the current names of the table and its columns, and by pages of its files.  If the name, the columns or
the files change after the snapshot, the chunks may not belong to one table, and the copy is discarded.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from aqueduck.lake.ledger.partition_marks import Marks
from aqueduck.lake.ledger.table_states import TableState
from aqueduck.lake.target.mode_rows import copied_columns
from aqueduck.model.errors import CopyDisturbedError
from aqueduck.model.layout import PLAIN, TableLayout
from aqueduck.model.schema import TableSchema
from aqueduck.postgres.catalog.structure import read_horizon, read_structure
from aqueduck.postgres.copy.table_copy import Chunk, plan_chunks, read_column_marks
from aqueduck.spark.query.copy_job import CopyItem
from aqueduck.sync.copying.copy_journal import CopyJournal, CopySession

__all__ = ["RunningCopy", "check_undisturbed", "refuse_changed"]


@dataclass(slots=True)
class RunningCopy:
    """One table while it is copied."""

    state: TableState
    schema: TableSchema
    place: str
    journal: CopyJournal
    session: CopySession
    beside: bool = False
    """Whether rows of an earlier copy stay, and earlier changes count as well."""
    target_uuid: str | None = None
    """The uuid of the target, if it existed when the copy began; None if that is not known."""
    layout: TableLayout = PLAIN
    """The target's layout when the copy began."""
    marks: Marks | None = None
    """The partitions that were read, once all chunks are done."""

    def items(self, prefix: str) -> list[CopyItem]:
        # The name is unique for each copy: the lake may still show the file of an earlier one.
        name = f"{prefix}-{self.state.oid}-{uuid.uuid4().hex[:8]}"
        chunks = self.journal.missing()
        more = copied_columns(self.state.mode, self.session.position, self.session.time_us)
        rest = (more, tuple(name for name, _ in self.state.mode.columns), self.layout)
        items = [
            CopyItem(
                self.schema, c, self.place, f"{name}-copy-{c.number}",
                str(self.journal.chunk_path(c.number, self.session)), *rest,
            )
            for c in chunks
        ]  # fmt: skip
        again = self.journal.rescans()
        return items + [
            CopyItem(self.schema, c, self.place, f"{name}-since-{c.number}", None, *rest) for c in again
        ]

    def start_over(self, why: str) -> CopyDisturbedError:
        """Discard what has been read."""
        self.journal.clear()
        return CopyDisturbedError(f"the table {why} while it was copied", table=self.schema.qualified)


def refuse_changed(conn: psycopg.Connection[Any], copies: Sequence[RunningCopy]) -> None:
    """Raise if the table still exists with other columns or another name: another table may have its name now."""
    marks = read_column_marks(conn, [copy.state.oid for copy in copies])
    for copy in copies:
        found = marks.get(copy.state.oid)
        if found is not None and any(found.get(n) != mark for n, mark in copy.journal.columns.items()):
            raise copy.start_over("got other columns")
        now = _relations(conn, copy)
        if any(_name(now.get(c.relation, c)) != _name(c) for c in copy.journal.chunks):
            raise copy.start_over("got another name")


def check_undisturbed(conn: psycopg.Connection[Any], copies: Sequence[RunningCopy]) -> None:
    """After the last chunk: raise if the chunks are not one state of each table; record the partitions of partitioned tables."""
    refuse_changed(conn, copies)
    horizon = read_horizon(conn)
    leaves = read_structure(conn, [copy.state.oid for copy in copies]).leaves
    for copy in copies:
        now = _relations(conn, copy)
        if any(c.relation not in now or now[c.relation].filenode != c.filenode for c in copy.journal.chunks):
            raise copy.start_over("was rewritten, truncated or lost a partition")
        if copy.state.oid in leaves:
            nodes = {c.relation: c.filenode for c in copy.journal.chunks}
            ties = {oid: leaf.ties for oid, leaf in leaves[copy.state.oid].items() if oid in nodes}
            copy.marks = Marks(nodes, horizon, ties)


def _relations(conn: psycopg.Connection[Any], copy: RunningCopy) -> dict[int, Chunk]:
    """The table or its partitions as they are now, each as one chunk."""
    return {c.relation: c for c in plan_chunks(conn, copy.schema, chunk_bytes=1 << 62)}


def _name(chunk: Chunk) -> tuple[str, str]:
    return chunk.schema, chunk.table
