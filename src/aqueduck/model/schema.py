"""
A source table's columns, and the names and positions that identify tables and changes.

Plain values only. `postgres` reads them from a server, `typemap` maps the types, `lake` turns them into lake
columns. A WAL position is an `int` everywhere; `lsn_text` and `parse_lsn` convert it for people and for SQL.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from aqueduck.model.columns.column_numbers import UNCLEAR, match_numbers
from aqueduck.model.columns.projection import Projection, lake_schema, only_needed

__all__ = ["Column", "TableName", "TableSchema", "lsn_text", "parse_lsn", "parse_table_name"]

_LSN = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")
_PART = re.compile(r'\s*(?:"((?:[^"\x00]|"")+)"|([^\W\d][\w$]*))\s*')
_PLAIN = re.compile(r"[a-z_][a-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Column:
    """One column, as the server's catalog or a Relation message describes it."""

    name: str
    type_oid: int
    typmod: int
    type_name: str = ""
    """The output of `format_type`; empty if unknown."""
    not_null: bool = False
    base_oid: int = 0
    """For a domain, its base type; 0 for other types, or if unknown."""
    element_oid: int = 0
    """For an array of a user-defined type, the base type of its elements; otherwise 0."""
    delimiter: str = ","
    """The delimiter between the elements of an array."""
    number: int = field(default=0, compare=False)
    """Its number in the catalog, which is never reused in the table; 0 if unknown."""
    missing: str | None = field(default=None, compare=False)
    """The value, as text, of rows that are older than the column."""
    computed: bool = field(default=False, compare=False)
    """Whether existing rows got values that the stream did not send."""


@dataclass(frozen=True, slots=True)
class TableSchema:
    """One version of a source table's columns."""

    oid: int
    schema: str
    name: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    """Names of the columns that identify rows."""
    identity: str
    """The replica identity: d(efault), i(ndex), f(ull) or n(othing)."""
    projection: Projection | None = None
    """The projection, if the lake does not have the whole table unchanged."""
    source: TableSchema | None = None
    """Under a projection: the columns as the source has them."""
    newest: int = field(default=0, compare=False)
    """The highest column number ever used in the catalog; 0 if unknown."""

    @property
    def streamed(self) -> TableSchema:
        """The table as stream and copy deliver it."""
        return self.source or self

    @property
    def in_lake(self) -> TableSchema:
        """The table as the lake has it."""
        return lake_schema(self)

    @property
    def qualified(self) -> str:
        """The name for people, such as `public.orders`."""
        return f"{self.schema}.{self.name}"

    @property
    def key_indexes(self) -> tuple[int, ...]:
        """The indexes of the key's columns in `columns`, in the key's order."""
        places = {column.name: index for index, column in enumerate(self.columns)}
        return tuple(places[name] for name in self.key)

    def numbered(
        self, before: TableSchema, now: TableSchema | None, dropped: Collection[int] = ()
    ) -> TableSchema:
        """
        The same version with column numbers, which the stream does not send.

        `before` is the previous version, `now` the table in the catalog, which may be ahead, with the numbers
        that it has `dropped`. If several matches are possible, all columns are `UNCLEAR`. Without a catalog,
        columns are matched by name.
        """
        known = {c.number: c for c in before.columns}
        newest = before.newest or max(known, default=0)
        if now is None or min(known, default=1) <= 0:
            return self._like(before.columns, newest)
        current = {c.number: c for c in now.columns}
        # With a projection, this version and the previous one may lack columns that are not needed.
        needed = {c.number for c in only_needed(now).columns}
        unseen = dropped if self.projection is not None else [n for n in dropped if n > newest]
        found = match_numbers(
            [c.name for c in self.columns],
            {number: c.name for number, c in known.items()}, newest,
            {number: c.name for number, c in current.items()}, unseen, current.keys() - needed,
        )  # fmt: skip
        if found is None:
            return replace(self, columns=tuple(replace(c, number=UNCLEAR) for c in self.columns))
        # A column that existed but was not sent, because it was generated, has values in older rows.
        hidden = {n for n in found if n <= newest and n not in known}
        columns = tuple(
            _numbered(column, number, current.get(number) or known.get(number), hidden=number in hidden)
            for column, number in zip(self.columns, found, strict=True)
        )
        return replace(self, columns=columns, newest=max(newest, *found) if found else newest)

    def following(self, before: TableSchema) -> TableSchema:
        """
        The table in the catalog as the successor of the version `before`: its numbers identify all columns.

        A column that existed before and was not sent has values in older rows.
        """
        known = {c.number for c in before.columns}
        newest = before.newest or max(known, default=0)
        if min(known, default=1) <= 0:
            return self._like(before.columns, newest)
        columns = tuple(
            replace(c, computed=c.computed or (c.number <= newest and c.number not in known))
            for c in self.columns
        )
        return replace(self, columns=columns)

    def settled(self, now: TableSchema | None) -> TableSchema:
        """
        The same version with the catalog's numbers if the catalog has exactly these columns, otherwise
        without numbers.
        """
        if now is not None and [_shape(c) for c in now.columns] == [_shape(c) for c in self.columns]:
            return self._like(now.columns, now.newest)
        return replace(self, columns=tuple(replace(c, number=0) for c in self.columns))

    def _like(self, others: Iterable[Column], newest: int) -> TableSchema:
        """Copy numbers from columns with the same names; 0 for the others."""
        by_name = {c.name: c for c in others}
        columns = tuple(
            _numbered(c, by_name[c.name].number if c.name in by_name else 0, by_name.get(c.name))
            for c in self.columns
        )
        return replace(self, columns=columns, newest=newest)

    def to_json(self) -> str:
        """The schema as one line of JSON, the same text for equal schemas."""
        return json.dumps(_plain(self), separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> TableSchema:
        """The reverse of `to_json`."""
        return cls._from_dict(json.loads(text))

    @classmethod
    def _from_dict(cls, values: dict[str, Any]) -> TableSchema:
        columns = tuple(Column(**column) for column in values.pop("columns"))
        projection, source = values.pop("projection", None), values.pop("source", None)
        return cls(
            columns=columns,
            key=tuple(values.pop("key")),
            projection=None if projection is None else Projection.from_dict(projection),
            source=None if source is None else cls._from_dict(source),
            **values,
        )


@dataclass(frozen=True, slots=True, order=True)
class TableName:
    """A schema and a table in it, both as the catalog spells them."""

    schema: str
    name: str

    @property
    def qualified(self) -> str:
        """The name for people, such as `public.orders`; equals `TableSchema.qualified`."""
        return f"{self.schema}.{self.name}"

    @property
    def folded(self) -> TableName:
        """In lower case: the lake treats names that differ only in case as one table."""
        return TableName(self.schema.lower(), self.name.lower())

    def __str__(self) -> str:
        """The name, quoted where necessary: `parse_table_name` reads it back."""
        return ".".join(map(_quote_where_needed, (self.schema, self.name)))


def parse_table_name(text: str, *, default_schema: str, fold_case: bool = True) -> TableName:
    """
    Read `table` or `schema.table`, either part quoted as in SQL.

    With `fold_case` an unquoted part is lowercased, as PostgreSQL does it.  Text of any other
    form raises `ValueError`.
    """
    parts: list[str] = []
    place = 0
    while found := _PART.match(text, place):
        quoted, plain = found.groups()
        parts.append(quoted.replace('""', '"') if quoted else plain.lower() if fold_case else plain)
        place = found.end()
        if text[place : place + 1] != ".":
            break
        place += 1
    if place != len(text) or len(parts) not in (1, 2) or text.endswith("."):
        raise ValueError('must be a table name such as orders, public.orders or "My Schema"."Orders"')
    return TableName(*parts) if len(parts) == 2 else TableName(default_schema, parts[0])


def lsn_text(position: int) -> str:
    """The position as PostgreSQL writes it, such as `0/16A4F88`."""
    if not 0 <= position < 1 << 64:
        raise ValueError("a position is a number of 64 bits")
    return f"{position >> 32:X}/{position & 0xFFFFFFFF:X}"


def parse_lsn(text: str) -> int:
    """The position in text such as `0/16A4F88`; anything else raises `ValueError`."""
    found = _LSN.fullmatch(text)
    if not found:
        raise ValueError("a position is written as two hexadecimal numbers, such as 0/16A4F88")
    return int(found[1], 16) << 32 | int(found[2], 16)


def _plain(table: TableSchema) -> dict[str, Any]:
    """As plain values, without fields that only a projection needs if there is none."""
    values = asdict(table)
    for inner in (values, values["source"] or {}):
        for name in ("projection", "source"):
            if inner.get(name) is None:
                inner.pop(name, None)
    return values


def _numbered(column: Column, number: int, known: Column | None, *, hidden: bool = False) -> Column:
    if known is None:  # dropped: the values of older rows no longer matter
        return replace(column, number=number, missing=None, computed=False)
    return replace(column, number=number, missing=known.missing, computed=known.computed or hidden)


def _shape(column: Column) -> tuple[str, int]:
    return column.name, column.type_oid


def _quote_where_needed(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else '"' + name.replace('"', '""') + '"'
