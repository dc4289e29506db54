"""
Plan reads of a fan-out's source from its catalog.

`SourceLake` finds the newest lake snapshot, the table at any of them, expired ones, and the ranges of lake snapshots
that have changes.  A `ReadPlan` has the result as plain data; `lake_changes` reads it in a worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aqueduck.config.lake_place import LakePlace
from aqueduck.lake.session.pool import PooledLake
from aqueduck.lake.session.sql import ident, literal
from aqueduck.lake.values.kept_types import refuse_types
from aqueduck.lake.values.nested import cell
from aqueduck.model.errors import LakeTableMissingError, LakeWriteError, RoutingError, SourceExpiredError
from aqueduck.model.routing import (
    PLACES,
    RESERVED,
    SnapshotRange,
    SourceColumn,
    SourceTable,
    had_upkeep,
    may_touch,
    readable_ranges,
)
from aqueduck.model.schema import TableName

__all__ = ["RangeRead", "ReadPlan", "SourceLake", "split_plan"]


@dataclass(frozen=True, slots=True)
class RangeRead:
    """A range of lake snapshots, with the table's name and columns at the range's end."""

    span: SnapshotRange
    table: TableName
    cells: tuple[str, ...]
    """The expression for each column of the plan."""
    table_id: int
    placed: bool = True
    """Whether DuckLake shows a row's file and place in it; a column with a name of `PLACES` hides them."""


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Everything a worker needs to read a range, or one lake snapshot whole."""

    place: LakePlace
    source: SourceTable
    """The table at the end of the range."""
    field: int
    keys: tuple[int, ...]
    start: int
    """A destination with this cursor needs exactly the changes of the range."""
    end: int
    table: TableName
    """The table's name at `end`."""
    reads: tuple[RangeRead, ...]
    scan: bool = False
    """Read the rows at `end` instead of changes."""
    stamp: int | None = None
    """When the source created the lake snapshot `end`, in microseconds; id and stamp identify one history of a lake."""
    strict: bool = False
    """
    Whether upkeep of the source happened in the range, or a column hides the places of rows.  Removals can then be dated
    too early, so destinations replace every touched key.
    """
    counted: bool = False
    """Whether destinations count their rows before they commit, and are re-seeded if the source has another number."""

    @property
    def field_type(self) -> str:
        return self.source.columns[self.field].type


class SourceLake:
    """Queries the source's catalog through one session."""

    def __init__(self, lake: PooledLake, table: TableName, *, key: str = "source.table") -> None:
        self._lake = lake
        self._table = table
        self._key = key
        """The configuration key that has the table's name."""

    def latest(self) -> int:
        """The newest lake snapshot."""
        [[snapshot]] = self._ask(f"from {ident(self._lake.alias)}.current_snapshot()")
        return int(snapshot)

    def stamps(self, snapshots: Iterable[int]) -> dict[int, int]:
        """The creation times of those lake snapshots that exist, in microseconds since the Unix epoch."""
        rows = self._ask(
            "select snapshot_id, epoch_us(snapshot_time::timestamptz)"
            f" from {self._lake.metadata}.ducklake_snapshot where snapshot_id in ({', '.join(map(str, snapshots))})"
        )
        return {int(snapshot): int(stamp) for snapshot, stamp in rows}

    def refuse_stale_session(self, snapshot: int) -> None:
        """
        Raise if this session cached tables of another history of the lake; otherwise remember the history of `snapshot`.

        A session that fails is discarded, so the next one reads the tables again.
        """
        before, seen = self._lake.memory.get("history", (snapshot, None))
        found = self.stamps({before, snapshot})
        if seen not in (None, found.get(before)):
            raise LakeWriteError(
                "the source lake was restored to an earlier state", table=self._table.qualified
            )
        self._lake.memory["history"] = snapshot, found.get(snapshot)

    def refuse_other_history(self, snapshot: int, stamp: int | None) -> None:
        """Raise if the lake snapshot is no longer the one with this stamp."""
        if stamp is not None and self.stamps([snapshot]).get(snapshot) != stamp:
            raise LakeWriteError(
                "the source lake was restored to an earlier state meanwhile", table=self._table.qualified
            )

    def last_touch(self, since: int, latest: int) -> int:
        """The last lake snapshot after `since` that may have changed the table or has expired; `since` if there is none."""
        table_id, _ = self._identity(latest)
        rows = self._ask(
            f"select snapshot_id, changes_made from {self._lake.metadata}.ducklake_snapshot_changes"
            f" where snapshot_id > {since} and snapshot_id <= {latest} order by snapshot_id desc"
        )
        last = latest
        for snapshot, text in rows:
            if snapshot != last or may_touch(text or "", table_id, self._table):
                return last
            last -= 1
        return last

    def _identity(self, snapshot: int) -> tuple[int, str]:
        """The table's id and uuid at a lake snapshot."""
        rows = self._named_at(snapshot)
        if not rows:
            raise LakeTableMissingError(
                "the table does not exist in the source lake",
                hint=f"check {self._key} and source.data_path",
                table=self._table.qualified,
            )
        return int(rows[0][0]), rows[0][1]

    def exists_at(self, snapshot: int) -> bool:
        """Whether a table had the name at a lake snapshot."""
        return bool(self._named_at(snapshot))

    def _named_at(self, snapshot: int) -> list[tuple[Any, ...]]:
        meta = self._lake.metadata
        return self._ask(
            f"select t.table_id, t.table_uuid::varchar from {meta}.ducklake_table t"
            f" join {meta}.ducklake_schema s using (schema_id)"
            " where lower(s.schema_name) = lower(?) and lower(t.table_name) = lower(?)"
            f" and {_alive('t', snapshot)} and {_alive('s', snapshot)}",
            (self._table.schema, self._table.name),
        )

    def table_at(self, snapshot: int) -> tuple[int, int, SourceTable]:
        """The table at a lake snapshot: its id, the lake snapshot that created it, and its columns."""
        table_id, uuid = self._identity(snapshot)
        # A rename keeps the id and adds a new row to the catalog.
        [[made]] = self._ask(
            f"select min(begin_snapshot) from {self._lake.metadata}.ducklake_table where table_id = {table_id}"
        )
        return table_id, int(made), SourceTable(uuid, self._columns_at(table_id, snapshot)[1])

    def _columns_at(self, table_id: int, snapshot: int) -> tuple[TableName, tuple[SourceColumn, ...]]:
        meta = self._lake.metadata
        names = self._ask(
            f"select s.schema_name, t.table_name from {meta}.ducklake_table t join {meta}.ducklake_schema s"
            f" using (schema_id) where t.table_id = {table_id} and {_alive('t', snapshot)}"
            f" and {_alive('s', snapshot)}"
        )
        name = TableName(*names[0])
        parts = self._ask(
            "select parent_column, column_id, column_name, column_type, initial_default"
            f" from {meta}.ducklake_column c where table_id = {table_id} and {_alive('c', snapshot)}"
            " order by column_order, column_id"
        )
        by_name = {column.name: column for column in _tree(parts)}
        described = self._ask(
            "select column_name, column_type from"
            f" (describe from {self._lake.table(name)} at (version => {snapshot}))"
        )
        columns = tuple(replace(by_name[name], type=kind) for name, kind in described)
        return name, columns

    def refuse_gap(self, cursor: int, end: int) -> None:
        """
        Raise if a lake snapshot from `cursor` to `end` has expired.

        The cursor's own lake snapshot is needed too: its expiry removes the files that were dropped right after it.
        """
        [[count]] = self._ask(
            f"select count(*) from {self._lake.metadata}.ducklake_snapshot"
            f" where snapshot_id between {cursor} and {end}"
        )
        if count != end - cursor + 1:
            raise SourceExpiredError(
                f"{end - cursor + 1 - count} of the lake snapshots {cursor} to {end} have expired",
                hint="keep lake snapshots longer than the slowest reader needs",
                table=self._table.qualified,
            )

    def refuse_unreadable(self, table_id: int, start: int, end: int) -> None:
        """Raise if changes after `start` cannot be read: they expired, or a column had a name that DuckLake reserves."""
        self.refuse_gap(start, end)
        last = self._reserved_until(table_id, end)
        if last > start:
            raise SourceExpiredError(
                f"until lake snapshot {last} the table had a column named {', '.join(RESERVED[:-1])} or {RESERVED[-1]}",
                hint="such a name hides DuckLake's description of a change; start after it",
                table=self._table.qualified,
            )

    def _reserved_until(self, table_id: int, end: int) -> int:
        """The last lake snapshot before `end` at which a column had a name that DuckLake's change functions use."""
        [[last]] = self._ask(
            f"select coalesce(max(end_snapshot), 0) - 1 from {self._lake.metadata}.ducklake_column"
            f" where table_id = {table_id} and parent_column is null and end_snapshot <= {end}"
            f" and lower(column_name) in ({', '.join(map(literal, RESERVED))})"
        )
        return int(last)

    def readable_from(self, end: int) -> int:
        """The oldest lake snapshot from which all changes up to `end` can still be read."""
        rows = self._ask(
            f"select snapshot_id from {self._lake.metadata}.ducklake_snapshot"
            f" where snapshot_id <= {end} order by snapshot_id desc"
        )
        first = end
        for (snapshot,) in rows:
            if snapshot < first - 1:
                break
            first = int(snapshot)
        return max(first, self._reserved_until(self.table_at(end)[0], end))

    def seconds_at(self, snapshot: int) -> float | None:
        """The creation time of a lake snapshot, in seconds since the Unix epoch."""
        rows = self._ask(
            f"select epoch(snapshot_time::timestamptz) from {self._lake.metadata}.ducklake_snapshot"
            f" where snapshot_id = {snapshot}"
        )
        return float(rows[0][0]) if rows else None

    def plan(self, field: str, keys: Sequence[str], start: int, end: int) -> ReadPlan:
        """A plan to read the changes after `start` up to and including `end`."""
        table_id, made, source = self.table_at(end)
        source.refuse_reserved_names()
        reads, upkeep = self.reads(table_id, made, source, start, end)
        plan = self._plan(source, field, keys, start, end, tuple(reads), scan=False)
        hidden = any(read.span.removes and not read.placed for read in reads)
        strict = bool(keys) and (upkeep or hidden)
        return replace(plan, strict=strict, counted=strict)

    def reads(
        self, table_id: int, made: int, source: SourceTable, start: int, end: int
    ) -> tuple[list[RangeRead], bool]:
        """The reads of a range that produce the columns of `source`, and whether upkeep of files happened in it."""
        self.refuse_unreadable(table_id, start, end)
        meta = self._lake.metadata
        changes = self._ask(
            f"select snapshot_id, changes_made from {meta}.ducklake_snapshot_changes"
            f" where snapshot_id > {max(start, made - 1)} and snapshot_id <= {end} order by snapshot_id"
        )
        done = [(int(snapshot), text or "") for snapshot, text in changes]
        deletes = self._ask(
            "select distinct begin_snapshot, coalesce(partial_max, begin_snapshot)"
            f" from {meta}.ducklake_delete_file where table_id = {table_id}"
            f" and begin_snapshot <= {end} and coalesce(partial_max, begin_snapshot) > {start}"
        )
        removed = [(int(first), int(last)) for first, last in deletes]
        spans = readable_ranges(done, table_id, removed, self._altered(table_id))
        reads = [RangeRead(span, *self._cells(table_id, source, span.last)) for span in spans]
        return reads, had_upkeep(done, table_id)

    def plan_scan(self, field: str, keys: Sequence[str], at: int) -> ReadPlan:
        """A plan to read the whole table at a lake snapshot."""
        table_id, _, source = self.table_at(at)
        read = RangeRead(SnapshotRange(at, at), *self._cells(table_id, source, at))
        return self._plan(source, field, keys, at, at, (read,), scan=True)

    def _plan(
        self,
        source: SourceTable,
        field: str,
        keys: Sequence[str],
        start: int,
        end: int,
        reads: tuple[RangeRead, ...],
        *,
        scan: bool,
    ) -> ReadPlan:
        source.refuse_reserved_names()
        refuse_types(source.types, self._table.qualified)
        places = {column.name.lower(): i for i, column in enumerate(source.columns)}
        for key, name in (("routing.field", field), *(("routing.key_columns", k) for k in keys)):
            if name.lower() not in places:
                raise RoutingError(
                    f"{key}: the source table has no column {name}",
                    hint=f"columns: {', '.join(column.name for column in source.columns)}",
                    table=self._table.qualified,
                )
        indexes = tuple(places[key.lower()] for key in keys)
        place = self._lake.place
        return ReadPlan(
            place, source, places[field.lower()], indexes, start, end, self._table, reads, scan,
            stamp=self.stamps([end]).get(end),
        )  # fmt: skip

    def _altered(self, table_id: int) -> set[int]:
        """The lake snapshots at which the table's name or columns changed."""
        meta = self._lake.metadata
        where = f"where table_id = {table_id}"
        rows = self._ask(
            f"select begin_snapshot from {meta}.ducklake_table {where}"
            f" union select begin_snapshot from {meta}.ducklake_column {where}"
            f" union select end_snapshot from {meta}.ducklake_column {where} and end_snapshot is not null"
        )
        return {int(snapshot) for (snapshot,) in rows}

    def _cells(
        self, table_id: int, source: SourceTable, at: int
    ) -> tuple[TableName, tuple[str, ...], int, bool]:
        """The fields of a `RangeRead` whose range ends at the lake snapshot."""
        table, columns = self._columns_at(table_id, at)
        then = {column.id: column for column in columns}
        cells = tuple(cell(then.get(column.id), column) for column in source.columns)
        return table, cells, table_id, not any(column.name.lower() in PLACES for column in columns)

    def _ask(self, statement: str, parameters: Sequence[str] = ()) -> list[tuple[Any, ...]]:
        return self._lake.execute(statement, parameters, doing="reading the source's catalog")


def split_plan(plan: ReadPlan, parts: int) -> list[ReadPlan]:
    """Split the plan into several that together read the same, for parallel tasks."""
    pieces: list[list[RangeRead]] = [[] for _ in range(parts)]
    snapshots = [(read, s) for read in plan.reads for s in range(read.span.first, read.span.last + 1)]
    if plan.scan or plan.strict or len(snapshots) < 2:
        return [plan]
    for number, (read, snapshot) in enumerate(snapshots):
        piece = pieces[number * parts // len(snapshots)]
        if piece and piece[-1].cells is read.cells and piece[-1].span.last == snapshot - 1:
            piece[-1] = replace(piece[-1], span=read.span.within(piece[-1].span.first, snapshot))
        else:
            piece.append(replace(read, span=read.span.within(snapshot, snapshot)))
    plans = [replace(plan, reads=tuple(piece), counted=False) for piece in pieces if piece]
    return [replace(plans[0], counted=plan.counted), *plans[1:]]


def _tree(parts: Sequence[tuple[Any, ...]], parent: int | None = None) -> tuple[SourceColumn, ...]:
    """Convert rows of the catalog's table of columns to columns with their fields."""
    return tuple(
        SourceColumn(int(number), name, kind, default, _tree(parts, number))
        for above, number, name, kind, default in parts
        if above == parent
    )


def _alive(table: str, snapshot: int) -> str:
    return (
        f"{table}.begin_snapshot <= {snapshot}"
        f" and ({table}.end_snapshot is null or {table}.end_snapshot > {snapshot})"
    )
