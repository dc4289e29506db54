"""
The types and values of DuckDB that a lake keeps exactly, and how a column is converted to and from Arrow.

DuckLake 1.0 stores rows in Parquet files, or inlines a few of them in its catalog as text.  Files cannot represent
some values exactly (`kept`) and some types at all (`refuse_types`).  Inlined text of nested types is not read back
correctly (`is_inlined`).  docs/types.md lists the types; tests/lake/values/test_types.py measures them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import duckdb

from aqueduck.lake.session.sql import ident
from aqueduck.model.errors import LakeTypeError, ValueCastError
from aqueduck.model.routing import SourceColumn

__all__ = [
    "SELF",
    "compared",
    "is_adopted",
    "is_inlined",
    "kept",
    "one_key",
    "received",
    "refuse_types",
    "sent",
    "unkept",
    "unkept_error",
]

SELF = "aqueduck_v"
"""The name of the value in a rule, for lambdas."""

_PARQUET_VARIANT = 'struct(metadata blob, "value" blob)'


def _double(value: str, kind: str) -> str:
    return f"coalesce(try_cast(cast({value} as double) as {kind}) = {value}, false)"


def _interval(value: str, _: str) -> str:
    parts = {
        part: f"date_part('{part}', {value})" for part in ("year", "month", "day", "hour", "microsecond")
    }
    micros = f"date_part('minute', {value}) * 60000000 + {parts['microsecond']}"
    return (
        " and ".join(f"{part} >= 0" for part in parts.values())
        + f" and {parts['hour']} < 1194 and {parts['microsecond']} % 1000 = 0"
        + f" and {parts['hour']} * 3600000000 + {micros} < 4294967296000"
    )


_LEAVES: dict[str, Callable[[str, str], str]] = {
    "HUGEINT": _double,  # a DOUBLE in files
    "UHUGEINT": _double,
    "TIME WITH TIME ZONE": lambda value, _: f"date_part('timezone', {value}) = 0",  # files have UTC only
    "TIMESTAMP_S": lambda value, _: f"isfinite({value})",
    "INTERVAL": _interval,  # three unsigned numbers of 32 bits: months, days, milliseconds
    "VARIANT": lambda value, _: f"try(variant_to_parquet_variant({value})) is not null",
}
"""By type: the condition that a value that is not null is unchanged after it was written to a file and read."""


_NOT_ADOPTED = frozenset({"HUGEINT", "UHUGEINT", "TIME WITH TIME ZONE", "VARIANT"})


@functools.cache
def _shape(kind: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The shape of a type (leaf, list, map or struct), and its inner types by name."""
    parsed = duckdb.sqltype(kind)
    if parsed.id not in ("list", "array", "map", "struct", "union"):
        return "leaf", ()
    children = [(name, child) for name, child in parsed.children if not isinstance(child, int)]
    return str(parsed.id), tuple((name, str(child)) for name, child in children)


def leaves(kind: str) -> Iterable[str]:
    """The leaf types within a type."""
    _, children = _shape(kind)
    return (leaf for _, child in children for leaf in leaves(child)) if children else (kind,)


def is_inlined(kind: str) -> bool:
    """Whether DuckLake can inline values of the type and read them back."""
    return kind != "VARIANT" and not _shape(kind)[1]


def is_adopted(kind: str) -> bool:
    """Whether DuckLake can add a file that another program wrote with a column of the type."""
    return all(leaf not in _NOT_ADOPTED and not leaf.startswith("GEOMETRY") for leaf in leaves(kind))


def refuse_types(columns: Mapping[str, str], table: str) -> None:
    """Raise if a column (name: type) has a type that cannot be written to a file."""
    for name, kind in columns.items():
        inside = {*leaves(kind)}
        if "TIME_NS" in inside or ("VARIANT" in inside and kind != "VARIANT"):
            raise LakeTypeError(
                f"the column {name} is {kind}, which DuckLake cannot write to a file",
                hint="store its values in a column of type VARCHAR or JSON (docs/types.md)",
                table=table,
            )


def kept(kind: str, value: str) -> str | None:
    """The condition that a lake keeps a value that is not null; None if it keeps all values of the type."""
    shape, children = _shape(kind)
    if shape == "leaf":
        return _LEAVES[kind](value, kind) if kind in _LEAVES else None
    inside = [rule for name, child in children if (rule := _inside(shape, name, child, value))]
    return " and ".join(inside) or None


def _inside(shape: str, name: str, kind: str, value: str) -> str | None:
    """The condition for one part of a nested value, by name; nulls pass."""
    if shape == "struct":
        rule = kept(kind, cell := f"({value}).{ident(name)}")
        return rule and f"({cell} is null or ({rule}))"
    rule = kept(kind, SELF)
    values = f"map_{name}s({value})" if shape == "map" else value
    return (
        rule
        and f"coalesce(list_bool_and(list_transform({values}, lambda {SELF}: {SELF} is null or ({rule}))), true)"
    )


def unkept(columns: Sequence[SourceColumn]) -> str | None:
    """SQL for the number of a column of `c0`, `c1`, … whose value a lake does not keep; None if it keeps all values."""
    rules = [(i, kept(column.type, f"c{i}")) for i, column in enumerate(columns)]
    cases = " ".join(f"when c{i} is not null and not ({rule}) then {i}" for i, rule in rules if rule)
    return f"case {cases} end" if cases else None


def unkept_error(column: SourceColumn, table: str) -> ValueCastError:
    """The error for a value that is not `kept`."""
    return ValueCastError(
        f"the column {column.name} has a value that DuckLake does not keep exactly as {column.type}",
        hint="store its values in a column of type VARCHAR (docs/types.md)",
        table=table,
    )


def one_key(kind: str, cell: str) -> str:
    """A key to group rows by without changing their cells: a plain `group by` returns -0 as 0."""
    return f"({cell} + 0)" if kind in ("FLOAT", "DOUBLE") else cell


def sent(kind: str, cell: str) -> str:
    """A cell converted for Arrow, which has no variants and whose intervals have nanoseconds."""
    if kind == "INTERVAL":
        months = f"date_part('year', {cell}) * 12 + date_part('month', {cell})"
        micros = (
            f"date_part('hour', {cell}) * 3600000000 + date_part('minute', {cell}) * 60000000"
            f" + date_part('microsecond', {cell})"
        )
        return f"struct_pack(m := {months}, d := date_part('day', {cell}), us := {micros})"
    return (
        f"cast(try(variant_to_parquet_variant({cell})) as {_PARQUET_VARIANT})" if kind == "VARIANT" else cell
    )


def received(kind: str, cell: str) -> str:
    """The reverse of `sent`."""
    if kind == "INTERVAL":
        return f"to_months({cell}.m::integer) + to_days({cell}.d::integer) + to_microseconds({cell}.us)"
    return f'variant_bytes_to_variant({cell}.metadata || {cell}."value")' if kind == "VARIANT" else cell


def compared(kind: str, cell: str) -> str:
    """A cell to hash: equal values get equal hashes, also numbers of different widths within a VARIANT."""
    once = sent(kind, cell)
    return sent(kind, received(kind, f"({once})")) if kind == "VARIANT" else once
