"""
Cells of many tables as values of the catalog: one statement of the engine for each type, not for each table.

The engine casts PostgreSQL's text exactly as the ordinary way does (`cast_sql`), and writes the value as DuckLake
writes it into a catalog: each kind of catalog stores a type in its own way.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from aqueduck.lake.session.catalog import LakeSession
from aqueduck.lake.session.failures import lake_errors
from aqueduck.model.columns.typemap import cast_sql, lake_type
from aqueduck.model.schema import Column

__all__ = ["Cells", "Slot", "ducklake_type", "stored_exactly"]

_NAMES = {
    "BOOLEAN": "boolean", "SMALLINT": "int16", "INTEGER": "int32", "BIGINT": "int64", "FLOAT": "float32",
    "DOUBLE": "float64", "BLOB": "blob", "DATE": "date", "TIME": "time", "TIMESTAMP": "timestamp",
    "TIMESTAMP WITH TIME ZONE": "timestamptz", "UUID": "uuid", "JSON": "json", "VARCHAR": "varchar",
}  # fmt: skip
_QUOTED = "'''' || {} || ''''"
_BYTES = "'''\\x' || hex({}) || ''''"
_PLAIN = "{}::varchar"
_TEXT = _QUOTED.format("{}::varchar")
_SQLITE_TEXT = "'''' || replace({}::varchar, '''', '''''') || ''''"
_LITERALS = {
    "postgres": {
        "BOOLEAN": _PLAIN, "SMALLINT": _PLAIN, "INTEGER": _PLAIN, "BIGINT": _PLAIN, "DECIMAL": _PLAIN,
        "BLOB": _BYTES, "VARCHAR": _BYTES, "JSON": _BYTES,
    },
    "sqlite": {
        "BOOLEAN": "{}::int::varchar", "SMALLINT": _PLAIN, "INTEGER": _PLAIN, "BIGINT": _PLAIN,
        "BLOB": "'from_hex(''' || hex({}) || ''')'", "VARCHAR": _SQLITE_TEXT, "JSON": _SQLITE_TEXT,
    },
}  # fmt: skip
"""The literal of a value in an `insert` of the catalog, by its type; other types are stored as text without quotes in it."""


def ducklake_type(column: Column) -> str:
    """The column's type as DuckLake's catalog names it."""
    kind = lake_type(column)
    return kind.lower() if kind.startswith("DECIMAL") else _NAMES[kind]


def stored_exactly(column: Column) -> bool:
    """Whether equal values of the column are stored equally, so that the catalog can find a row by them."""
    return lake_type(column) not in ("FLOAT", "DOUBLE", "JSON", "BLOB")


@dataclass(slots=True)
class Slot:
    """The cells of one column of one table: as literals of the catalog, and their extremes as statistics have them."""

    literals: list[str] = field(default_factory=list)
    lowest: str | None = None
    highest: str | None = None
    has_null: bool = False


@dataclass(slots=True)
class _OfOneType:
    kind: str
    cast: str
    slots: list[Slot] = field(default_factory=list)
    arrays: list[pa.Array] = field(default_factory=list)


class Cells:
    """Collects columns of text, and casts all of them at once."""

    def __init__(self, session: LakeSession) -> None:
        self._session = session
        self._types: dict[tuple[str, str], _OfOneType] = {}

    def add(self, column: Column, cells: pa.ChunkedArray) -> Slot:
        """A slot that `cast` fills."""
        kind, expression = lake_type(column), cast_sql(column, "c")
        group = self._types.setdefault((kind, expression), _OfOneType(kind, expression))
        slot = Slot()
        group.slots.append(slot)
        group.arrays.append(cells)
        return slot

    def cast(self) -> None:
        """Fill all slots; raises if a text is not a value of its type."""
        for group in self._types.values():
            self._cast(group)

    def _cast(self, group: _OfOneType) -> None:
        sizes = [len(array) for array in group.arrays]
        chunks = [chunk for array in group.arrays for chunk in array.chunks]
        numbers = pa.array([n for n, size in enumerate(sizes) for _ in range(size)], pa.int32())
        places = pa.array(range(sum(sizes)), pa.int32())
        texts = pa.chunked_array(chunks, pa.string())
        literals = self._literal(group.kind)
        con, name = self._session.con, "aqueduck_direct_cells"
        stat = "v::varchar" if group.kind in ("BLOB", "JSON") else "v"
        with lake_errors("folding a batch"):
            con.register(name, pa.table([places, numbers, texts], ["i", "s", "c"]))
            try:
                typed = f"select i, s, {group.cast} as v from {name}"
                found = con.execute(f"select {literals.format('v')} from ({typed}) order by i").fetchall()
                extremes = con.execute(
                    f"select s, min({stat})::varchar, max({stat})::varchar, bool_or(v is null) from ({typed}) group by s"
                ).fetchall()
            finally:
                con.unregister(name)
        at = 0
        for slot, size in zip(group.slots, sizes, strict=True):
            slot.literals = ["NULL" if text is None else text for (text,) in found[at : at + size]]
            at += size
        for number, lowest, highest, has_null in extremes:
            slot = group.slots[number]
            slot.lowest, slot.highest, slot.has_null = lowest, highest, bool(has_null)

    def _literal(self, kind: str) -> str:
        return _LITERALS[self._session.kind].get(kind.partition("(")[0], _TEXT)
