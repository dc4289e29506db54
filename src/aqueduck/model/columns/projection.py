"""
What part of a source table goes into the lake, and in what form: the rules of a table's projection.

A `Projection` is what the user asked for: columns, names, masks, a row filter, and the publication if its own
lists and filters apply. It is part of the table's schema (`TableSchema.projection`), so that capture, tasks
and driver all have it. `lake_schema` is the table as the lake has it; it is the only function that
distinguishes the two. Pure: `lake.fold.projected` has the SQL, `lake.fold.row_filter` parses row filters.

Users name columns, but a column keeps only its number when it is renamed. Names are therefore bound to
numbers once (`bind`), and columns are found by number first. If neither number nor name identifies a column,
`problem` says so, and the table is re-copied: a guess could reveal values that should be masked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from aqueduck.model.errors import ConfigError

if TYPE_CHECKING:
    from aqueduck.model.schema import Column, TableSchema

__all__ = [
    "Cell",
    "Mask",
    "Projection",
    "bind",
    "blank_columns",
    "copies_cells",
    "filter_columns",
    "filters_rows",
    "is_clear",
    "lake_cells",
    "lake_schema",
    "masks_key",
    "only_needed",
    "other_rules",
    "problem",
    "salt_mark",
]

TEXT_OID = 25


@dataclass(frozen=True, slots=True)
class Mask:
    """What the lake has instead of a column's values."""

    kind: Literal["hash", "redact", "constant"]
    value: str = ""
    """For a constant: the value as PostgreSQL writes it."""


@dataclass(frozen=True, slots=True)
class Projection:
    """What the user asked for; if empty, all columns unchanged."""

    columns: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    rename: tuple[tuple[str, str], ...] = ()
    masks: tuple[tuple[str, Mask], ...] = ()
    where: str = ""
    """The row filter as the user wrote it."""
    publication: str = ""
    """A publication of the user's whose column list and row filter apply."""
    salt_env: str = ""
    """The variable that holds the salt of hashes; never the salt itself."""
    salt: str = ""
    """A fingerprint that reveals a changed salt, see `salt_mark`."""
    condition: str = field(default="", compare=False)
    """The row filter over f0, f1, …: the columns of `reads`."""
    reads: tuple[str, ...] = field(default=(), compare=False)
    numbers: tuple[tuple[str, int], ...] = field(default=(), compare=False)
    """The column that each name referred to when it was bound."""
    published_where: str = ""
    """The publication's row filter as PostgreSQL writes it."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Projection:
        """The reverse of `dataclasses.asdict`, through JSON."""
        given: dict[str, Any] = {name: _tuples(value) for name, value in values.items()}
        given["masks"] = tuple((name, Mask(**mask)) for name, mask in values["masks"])
        return cls(**given)

    @property
    def named(self) -> list[str]:
        """Every named column, once."""
        names = [*self.columns, *self.exclude, *(n for n, _ in self.rename), *(n for n, _ in self.masks)]
        return list(dict.fromkeys([*names, *self.reads]))

    @property
    def changes_columns(self) -> bool:
        return bool(self.columns or self.exclude or self.rename or self.masks)


@dataclass(frozen=True, slots=True)
class Cell:
    """One column of the lake: the index of its source column, its name, and its mask."""

    index: int
    name: str
    mask: Mask | None


def salt_mark(salt: str) -> str:
    """A fingerprint of a salt that may be stored, to detect another salt."""
    return hashlib.sha256(b"aqueduck salt mark:" + salt.encode()).hexdigest()[:16]


# -- Binding names


def bind(table: TableSchema, wanted: Projection, before: Projection | None = None) -> TableSchema:
    """
    The table with its projection, every name bound to a column; raises `ConfigError` for names that cannot be
    bound.

    `before` is the projection as bound earlier: its columns may have been renamed or dropped since.
    """
    known = dict(before.numbers) if before is not None else {}
    numbers = []
    for name in wanted.named:
        number = known.get(name, 0)
        here = next((c.number for c in table.columns if c.name == name), 0)
        if not any(c.number == number for c in table.columns):
            number = here or number
        if not number and not any(c.name == name for c in table.columns):
            raise _wrong(table, f"has no column {name}", "correct the name under the table's options")
        numbers.append((name, number))
    bound = replace(table, projection=replace(wanted, numbers=tuple(numbers)))
    if found := _problem(bound):
        raise _wrong(table, *found)
    return bound


def _wrong(table: TableSchema, what: str, hint: str) -> ConfigError:
    return ConfigError(f"{table.qualified} {what}", hint=hint, table=table.qualified)


def problem(table: TableSchema) -> str | None:
    """Why the projection cannot be applied to these source columns; None if it can."""
    found = _problem(table.source or table)
    return None if found is None else found[0]


def _problem(source: TableSchema) -> tuple[str, str] | None:
    """The problem, with the fix."""
    if source.projection is None:
        return None
    if reason := _unclear(source, source.projection):
        return reason, "correct the table's options"
    cells = [(cell, source.columns[cell.index].name) for cell in lake_cells(source)]
    seen: dict[str, str] = {}
    for cell, name in cells:
        other = seen.setdefault(cell.name.lower(), name)
        if other != name:
            return f"would have {other} and {name} both as {cell.name}", "choose another name under rename"
    for cell, name in cells:
        if cell.mask is not None and cell.mask.kind != "hash" and name in source.key:
            reason = f"has the key column {name}, which cannot be a constant: rows would have the same key"
            return reason, "mask it with hash, which keeps keys apart"
    return None


def _unclear(source: TableSchema, wanted: Projection) -> str | None:
    """Why a name is ambiguous, or which required column is missing."""
    if any(c.number == 0 for c in source.columns):
        for name in wanted.named:
            if _find(source, name) is None:
                return f"has a column with a new name that may be {name}"
    for name in wanted.reads:
        if _find(source, name) is None:
            return f"has no column {name} any more, which its row filter reads"
    chosen = _chosen(source, wanted)
    for name in source.key:
        if next((i for i, c in enumerate(source.columns) if c.name == name), -1) not in chosen:
            return f"needs its key column {name} in the lake: it cannot be left out"
    return None


def other_rules(before: TableSchema, after: TableSchema) -> str | None:
    """
    Why rows that are already in the lake could differ under `after`; None if they cannot.

    The stream does not send them again. The result of a filter or a hash depends on the column's type; and
    another column has other values, even under the same name.
    """
    one, other = before.source or before, after.source or after
    if one.projection != other.projection:
        return "is published with another row filter"
    if one.projection is None or other.projection is None:
        return None
    for was, now in zip(filter_columns(one), filter_columns(other), strict=False):
        if _differ(one.columns[was], other.columns[now]):
            return f"has another column or type for {other.columns[now].name}, which its row filter reads"
    masks = {one.columns[cell.index].number: cell.mask for cell in lake_cells(one)}
    for cell in lake_cells(other):
        column = other.columns[cell.index]
        if column.number > 0 and masks.get(column.number, cell.mask) != cell.mask:
            return f"has another column with the name {column.name}, which is masked"
    hashes = {c.number: c for c in _hashed(one)}
    for column in _hashed(other):
        known = hashes.get(column.number)
        if known is not None and _differ(known, column):
            return f"has another type for {column.name}, which is masked by hash"
    return None


def _hashed(table: TableSchema) -> list[Column]:
    cells = lake_cells(table)
    return [table.columns[c.index] for c in cells if c.mask is not None and c.mask.kind == "hash"]


def _differ(one: Column, other: Column) -> bool:
    return (one.type_oid, one.typmod) != (other.type_oid, other.typmod) or bool(
        one.number and other.number and one.number != other.number
    )


def is_clear(table: TableSchema) -> bool:
    """Whether the projection can be applied to these columns without the catalog."""
    source = table.source or table
    return source.projection is None or (problem(table) is None and all(c.number > 0 for c in source.columns))


def _find(table: TableSchema, name: str) -> int | None:
    """The index of a named column: by the number it had, otherwise by its name."""
    assert table.projection is not None
    number = dict(table.projection.numbers).get(name, 0)
    by_number = [i for i, c in enumerate(table.columns) if number and c.number == number]
    by_name = [i for i, c in enumerate(table.columns) if c.name == name]
    return next(iter(by_number or by_name), None)


def _all(table: TableSchema, name: str) -> set[int]:
    """
    The columns that a name may refer to: for a column that must stay hidden, those with its number and with
    its name.
    """
    assert table.projection is not None
    number = dict(table.projection.numbers).get(name, 0)
    return {i for i, c in enumerate(table.columns) if c.name == name or (number and c.number == number)}


# -- Applying it to columns


def lake_schema(table: TableSchema) -> TableSchema:
    """
    The table as the lake has it: unchanged without a projection, otherwise with the source's columns beside
    it.
    """
    if table.projection is None:
        return table
    cells = lake_cells(table)
    names = {table.columns[cell.index].name: cell.name for cell in cells}
    columns = tuple(_masked(replace(table.columns[cell.index], name=cell.name), cell.mask) for cell in cells)
    key = tuple(names[name] for name in table.key)
    return replace(table, columns=columns, key=key, projection=None, source=table)


def lake_cells(table: TableSchema) -> list[Cell]:
    """The lake's columns in the source's order; `table` has the projection."""
    wanted = table.projection
    assert wanted is not None
    chosen = _chosen(table, wanted)
    keys = {i for i, c in enumerate(table.columns) if c.name in table.key}
    names = {_find(table, name): after for name, after in wanted.rename}
    masks: dict[int, Mask] = {}
    for name, mask in wanted.masks:
        masks |= dict.fromkeys(_all(table, name), mask)
    return [
        Cell(i, names.get(i, column.name), masks.get(i))
        for i, column in enumerate(table.columns)
        if i in chosen or i in keys
    ]


def _chosen(table: TableSchema, wanted: Projection) -> set[int]:
    chosen = set(range(len(table.columns)))
    if wanted.columns:
        chosen = {i for name in wanted.columns if (i := _find(table, name)) is not None}
    for name in wanted.exclude:
        chosen -= _all(table, name)
    return chosen


def _masked(column: Column, mask: Mask | None) -> Column:
    """
    A hash has the type text. Rows older than a new column have a default that would have to be masked, so
    they are re-copied.
    """
    if mask is None:
        return column
    if mask.kind == "hash":
        column = replace(
            column, type_oid=TEXT_OID, typmod=-1, type_name="text", base_oid=0, element_oid=0, delimiter=","
        )
    return replace(column, missing=None, computed=column.computed or column.missing is not None)


# -- What has to be read


def filters_rows(table: TableSchema) -> bool:
    """Whether our filter or the publication's may keep source rows out of the lake."""
    wanted = (table.source or table).projection
    return wanted is not None and bool(wanted.condition or wanted.published_where)


def masks_key(table: TableSchema) -> bool:
    """Whether the lake's keys cannot be used to look up rows in the source."""
    source = table.source
    if source is None:
        return False
    return any(c.mask is not None and source.columns[c.index].name in source.key for c in lake_cells(source))


def filter_columns(table: TableSchema) -> list[int]:
    """The indexes of the columns that the row filter reads, in the order of f0, f1, …."""
    assert table.projection is not None
    found = [_find(table, name) for name in table.projection.reads]
    return [i for i in found if i is not None]


def only_needed(table: TableSchema) -> TableSchema:
    """The table without the columns that neither the lake nor the row filter needs; they need not be read."""
    if table.projection is None or not is_clear(table):
        return table
    needed = {cell.index for cell in lake_cells(table)} | set(filter_columns(table))
    return replace(table, columns=tuple(c for i, c in enumerate(table.columns) if i in needed))


def copies_cells(table: TableSchema) -> bool:
    """Whether the lake's rows equal the source's cell by cell, without masks, our filter or omitted columns."""
    source = table.source
    if source is None or source.projection is None:
        return True
    if source.projection.masks or source.projection.condition:
        return False
    return [cell.index for cell in lake_cells(source)] == list(range(len(source.columns)))


def blank_columns(table: TableSchema) -> set[int]:
    """Columns of the lake whose source values are not needed: they are redacted or constant."""
    if table.projection is None or not table.projection.masks:
        return set()
    blank = {cell.index for cell in lake_cells(table) if cell.mask is not None and cell.mask.kind != "hash"}
    return blank - set(filter_columns(table))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
