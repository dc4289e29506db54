"""
A table's projection as SQL: converts rows of the source table to rows of the lake table.

Both have text columns n0, n1, … (and o0, o1, … for old images), so code that reads segments or chunks works
with the lake's columns only.  Masks work on the text.  Only the row filter sees typed values.
`aqueduck.model.columns.projection` defines what a projection means.

If an update makes a row fail the filter, the change becomes a delete of its key, whether or not the lake has the row.
If an update makes a row pass, it stays an ordinary update, which deletes the key and writes the row.  Neither case needs
the old row.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import duckdb

from aqueduck.lake.session.sql import literal
from aqueduck.model.changes import OP_DELETE, OP_INSERT, OP_UPDATE, SegmentRef
from aqueduck.model.columns.projection import (
    Cell,
    blank_columns,
    copies_cells,
    filter_columns,
    lake_cells,
    other_rules,
    problem,
    salt_mark,
)
from aqueduck.model.columns.typemap import cast_sql
from aqueduck.model.errors import ConfigError, ResyncNeededError
from aqueduck.model.schema import TableSchema

__all__ = [
    "ChangeView",
    "change_view",
    "lost_value",
    "project_rows",
    "refuse_lost_values",
    "refuse_unclear",
    "refuse_unknown",
]

SALT = "aqueduck_salt"


def _set_salt(con: duckdb.DuckDBPyConnection, table: TableSchema) -> None:
    """Set the salt of the table's hashes as a variable of the connection, so that no SQL contains it."""
    wanted = table.streamed.projection
    if wanted is None or not wanted.salt:
        return
    salt = os.environ.get(wanted.salt_env, "")
    if salt_mark(salt) != wanted.salt:
        what = "holds another salt than in" if salt else "is not set here, but it is set in"
        raise ConfigError(
            f"the variable {wanted.salt_env} {what} the environment of the service",
            hint=f"Spark's executors need it too: set spark.executorEnv.{wanted.salt_env} under spark.conf",
            table=table.qualified,
        )
    con.execute(f"set variable {SALT} = ?", [salt])


def project_rows(
    con: duckdb.DuckDBPyConnection, table: TableSchema, relation: str, *, also: Sequence[str] = ()
) -> str:
    """
    Project the rows of a copy: from a relation with the source's cells n0, n1, … to one with the lake's.

    `also` names further columns of the relation, which are passed through.
    """
    source = table.streamed
    if source.projection is None or copies_cells(table):
        return relation
    _set_salt(con, table)
    cells = [f"{_cell(cell, 'n')} as n{i}" for i, cell in enumerate(lake_cells(source))]
    if source.projection.condition:
        relation = f"(from {_tested(source, relation)} where passes)"
    return f"(select {', '.join([*cells, *also])} from {relation} s)"


class ChangeView:
    """
    Presents the changes of segments as changes of the lake's table.

    For the `wanted` columns, `columns` returns the segment columns to read and `query` the SQL that computes them.
    """

    def __init__(
        self, con: duckdb.DuckDBPyConnection, table: TableSchema, *, keep_dropped: bool = False
    ) -> None:
        _set_salt(con, table)
        self._source = table.streamed
        assert self._source.projection is not None
        self._cells = lake_cells(self._source)
        self._reads = filter_columns(self._source)
        self._filters = bool(self._source.projection.condition)
        self._keep_dropped = keep_dropped
        """Whether an insert that fails the filter becomes a delete of its key instead of being left out."""
        self._key = {i for i, c in enumerate(self._source.columns) if c.name in self._source.key}

    def columns(self, wanted: Sequence[str]) -> list[str]:
        names = dict.fromkeys(["_op", "_kc"] if self._filters else [])
        for name in wanted:
            if name[0] in "no" and name[1:].isdigit():
                cell = self._cells[int(name[1:])]
                if cell.mask is None or cell.mask.kind == "hash":
                    names[f"{name[0]}{cell.index}"] = None
                    if name[0] == "o" and self._filters and cell.index in self._key:
                        names[f"n{cell.index}"] = None
            else:
                names[name] = None
        if self._filters:
            names |= dict.fromkeys(f"n{i}" for i in self._reads)
        return list(names) or ["_op"]

    def query(self, wanted: Sequence[str], relation: str) -> str:
        if not self._filters:
            cells = ", ".join(f"{self._expression(name)} as {name}" for name in wanted)
            return f"(select {cells} from {relation} s)"
        cells = ", ".join(f"{self._filtered(name)} as {name}" for name in wanted)
        kept = "" if self._keep_dropped else f" where s.passes or s._op <> {OP_INSERT}"
        return f"(select {cells} from {_tested(self._source, relation)} s{kept})"

    def _filtered(self, name: str) -> str:
        if name == "_op":
            return f"case when s.passes then s._op else {OP_DELETE}::tinyint end"
        if name == "_kc":
            return "s._kc and s.passes"
        if name[0] == "o" and name[1:].isdigit() and self._cells[int(name[1:])].index in self._key:
            # An insert or update that became a delete has its key in the new image, unless it changed the key.
            cell = self._cells[int(name[1:])]
            as_it_is = f"s.passes or s._kc or s._op = {OP_DELETE}"
            return f"case when {as_it_is} then {_cell(cell, 'o')} else {_cell(cell, 'n')} end"
        return self._expression(name)

    def _expression(self, name: str) -> str:
        if name == "_unchanged":
            return self._unchanged()
        if name[0] in "no" and name[1:].isdigit():
            return _cell(self._cells[int(name[1:])], name[0])
        return f"s.{name}"

    def _unchanged(self) -> str:
        """The lake's indexes of unchanged cells, without redacted and constant ones, whose value is known."""
        places = {
            cell.index: i
            for i, cell in enumerate(self._cells)
            if cell.mask is None or cell.mask.kind == "hash"
        }
        moved = " ".join(f"when {index} then {place}" for index, place in places.items())
        known = ", ".join(map(str, places))
        return f"list_transform(list_filter(s._unchanged, lambda c: c in ({known})), lambda c: case c {moved} end)"


def change_view(
    con: duckdb.DuckDBPyConnection,
    table: TableSchema,
    segments: Sequence[SegmentRef],
    *,
    all_keys: bool = False,
) -> ChangeView | None:
    """
    The view of a run's segments; None if they need no projection.

    With `all_keys`, the row filter leaves out no change.
    """
    wanted = table.streamed.projection
    if wanted is None or not (wanted.changes_columns or wanted.condition):
        return None
    follows = any(s.unchanged for s in segments) and any(s.updates or s.deletes for s in segments)
    return ChangeView(con, table, keep_dropped=follows or all_keys)


# -- What PostgreSQL does not send


def refuse_unclear(table: TableSchema, current: TableSchema | None) -> None:
    """Raise if the projection is ambiguous for these columns, or if the target was filled by other rules."""
    reason = problem(table) or (None if current is None else other_rules(current, table))
    if reason is not None:
        raise ResyncNeededError(f"{table.qualified} {reason}", table=table.qualified)


def refuse_unknown(con: duckdb.DuckDBPyConnection, table: TableSchema, relation: str) -> None:
    """
    Raise if a run needs unchanged large values that neither the run nor the target has.

    The row filter may read such a value.  A publication's row filter may turn an update into an insert without them.
    `relation` is (_op, _unchanged) of the segments.
    """
    source = table.streamed
    assert source.projection is not None
    reads = filter_columns(source)
    needed = {cell.index for cell in lake_cells(source)} - blank_columns(source)
    conditions = [f"_op = {OP_INSERT} and list_has_any(_unchanged, {_list(needed)})"] if needed else []
    conditions += [f"_op = {OP_UPDATE} and list_has_any(_unchanged, {_list(reads)})"] if reads else []
    if conditions:
        _raise_if_any(con, table, f"from {relation} where {' or '.join(conditions)}")


def refuse_lost_values(
    con: duckdb.DuckDBPyConnection, table: TableSchema, entries: str, cells: str, present: int
) -> None:
    """
    Raise if an unchanged value would be read from the target although the row left the lake in between.

    The target's row with the same key is then another row or an older version.
    """
    same = " and ".join(f"e.k{i} is not distinct from f.t{i}" for i in range(len(table.key)))
    _raise_if_any(
        con,
        table,
        f"from {cells} f join {entries} e on {same} where f.patch and e.ord < f.ord and e.e & {present} = 0",
    )


def _raise_if_any(con: duckdb.DuckDBPyConnection, table: TableSchema, rows: str) -> None:
    found = con.execute(f"select count(*) {rows}").fetchone()
    if found and found[0]:
        raise lost_value(table)


def lost_value(table: TableSchema) -> ResyncNeededError:
    """The error for a row that starts to pass the row filter without its large values."""
    return ResyncNeededError(
        "an update made a row pass the row filter, but PostgreSQL did not send the row's unchanged large values",
        hint=f"to avoid further re-copies: alter table {table.streamed.qualified} replica identity full",
        table=table.qualified,
    )


def _list(indexes: Iterable[int]) -> str:
    return f"[{', '.join(map(str, sorted(indexes)))}]::smallint[]"


# -- Expressions


def _tested(source: TableSchema, relation: str) -> str:
    """The relation with the column `passes`, which is false where the row filter is false, NULL or an error."""
    assert source.projection is not None
    typed = "".join(
        f", {cast_sql(source.columns[index], f's.n{index}')} as f{i}"
        for i, index in enumerate(filter_columns(source))
    )
    passes = f"coalesce(try({source.projection.condition}), false)"
    return f"(select *, {passes} as passes from (select s.*{typed} from {relation} s))"


def _cell(cell: Cell, image: str) -> str:
    if cell.mask is None:
        return f"s.{image}{cell.index}"
    if cell.mask.kind == "hash":
        return f"sha256(getvariable({literal(SALT)}) || s.{image}{cell.index})"
    if cell.mask.kind == "constant":
        return literal(cell.mask.value)
    return "cast(null as varchar)"
