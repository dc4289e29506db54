"""
Find rows by their keys: the condition for a statement without parameters, such as COPY.

Only for key types whose text is the same in the lake as in PostgreSQL. For other keys, callers read the whole
table.
"""

from __future__ import annotations

from collections.abc import Sequence

from aqueduck.model.schema import TableSchema
from aqueduck.postgres.session.quoting import identifier, literal

__all__ = ["can_look_up", "key_condition"]

_TYPES = {
    16: "boolean",
    20: "bigint",
    21: "smallint",
    23: "integer",
    25: "text",
    1042: "bpchar",
    1043: "varchar",
    2950: "uuid",
}


def can_look_up(table: TableSchema) -> bool:
    """Whether rows of the table can be found by the text of their keys."""
    return all(table.columns[i].type_oid in _TYPES for i in table.key_indexes)


def key_condition(table: TableSchema, keys: Sequence[Sequence[str | None]]) -> str:
    """
    The condition that a row's key is one of `keys`, whose parts are in the order of the table's key; a NULL
    matches nothing.
    """
    columns = [table.columns[i] for i in table.key_indexes]
    arrays = ", ".join(
        f"array[{', '.join(_value(key[i]) for key in keys)}]::{_TYPES[c.type_oid]}[]"
        for i, c in enumerate(columns)
    )
    names = ", ".join(identifier(c.name) for c in columns)
    return f"({names}) in (select * from unnest({arrays}) as wanted)"


def _value(text: str | None) -> str:
    return "null" if text is None else literal(text)
