"""
SQL that converts nested values to the fields of another lake snapshot.

DuckDB casts structs by field names.  Only its id identifies a field that was renamed, or dropped and added again
under the same name.  The value is therefore rebuilt field by field.
"""

from __future__ import annotations

from aqueduck.lake.session.sql import ident, literal
from aqueduck.model.routing import SourceColumn

__all__ = ["cell"]


def cell(then: SourceColumn | None, now: SourceColumn) -> str:
    """The expression that reads a column of `now` from rows written as `then`; None means the column did not exist."""
    if then is None:
        return f"cast({literal(now.default)} as {now.type})"
    value = _built(ident(then.name), then, now, 0)
    return value if (then.type, then.fields) == (now.type, now.fields) else f"cast({value} as {now.type})"


def _built(value: str, then: SourceColumn, now: SourceColumn, depth: int) -> str:
    """The value with the fields of `now`, before a cast to its type."""
    if then.fields == now.fields or _kind(then) != _kind(now):
        return value
    each = f"aqueduck_{depth}"
    match _kind(now):
        case "list":
            element = _built(each, then.fields[0], now.fields[0], depth + 1)
            return f"list_transform({value}, lambda {each}: {element})"
        case "map":
            parts = zip(("key", "value"), then.fields, now.fields, strict=True)
            entry = ", ".join(
                f"{part} := {_built(f'{each}.{part}', a, b, depth + 1)}" for part, a, b in parts
            )
            entries = f"list_transform(map_entries({value}), lambda {each}: struct_pack({entry}))"
            return f"map_from_entries({entries})"
        case _:
            return f"case when {value} is not null then struct_pack({_fields(value, then, now, depth)}) end"


def _fields(value: str, then: SourceColumn, now: SourceColumn, depth: int) -> str:
    known = {field.id: field for field in then.fields}
    return ", ".join(
        f"{ident(field.name)} := "
        + (
            _built(f"{value}.{ident(known[field.id].name)}", known[field.id], field, depth + 1)
            if field.id in known
            else literal(field.default)
        )
        for field in now.fields
    )


def _kind(column: SourceColumn) -> str:
    """The kind of a column with fields (list, map or struct), from DuckLake's or DuckDB's name of its type."""
    kind = column.type.lower()
    if kind.endswith("]"):
        return "list"
    return "map" if kind.startswith("map") else kind.partition("(")[0]
