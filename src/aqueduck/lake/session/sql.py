"""Quote names and values in SQL for DuckDB; no other module does."""

from __future__ import annotations

from collections.abc import Iterable

from aqueduck.model.schema import TableName

__all__ = [
    "LAKE",
    "equal",
    "ident",
    "idents",
    "lake_table",
    "literal",
    "qualified",
    "string_list",
]

LAKE = "lake"
"""The name under which a session attaches the lake."""


def ident(name: str) -> str:
    """A quoted identifier."""
    if not name or "\x00" in name:
        raise ValueError("a name in DuckDB must not be empty or contain a zero byte")
    return '"' + name.replace('"', '""') + '"'


def idents(names: Iterable[str]) -> str:
    """Quoted identifiers, separated by commas."""
    return ", ".join(map(ident, names))


def qualified(*parts: str) -> str:
    """A dotted name, such as a schema and a table."""
    return ".".join(map(ident, parts))


def lake_table(target: TableName) -> str:
    """A table of the attached lake."""
    return qualified(LAKE, target.schema, target.name)


def equal(kind: str, one: str, other: str) -> str:
    """
    A condition that two values of a type are equal; null if one of them is null.

    It does not use `=` for BLOB: DuckDB looks up the text of such a constant in a file's Bloom filter and then
    skips rows that have the value (tests/lake/values/test_blob_equality.py).
    """
    return f"hex({one}) = hex({other})" if kind == "BLOB" else f"{one} = {other}"


def literal(value: str | int | None) -> str:
    """A constant: text, a number or NULL."""
    if value is None:
        return "null"
    if isinstance(value, int):
        return str(value)
    if "\x00" in value:
        raise ValueError("text in SQL must not contain a zero byte")
    return "'" + value.replace("'", "''") + "'"


def string_list(values: Iterable[str]) -> str:
    """A list of text constants."""
    return "[" + ", ".join(map(literal, values)) + "]"
