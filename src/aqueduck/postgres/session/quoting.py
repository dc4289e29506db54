"""Quoting for SQL that is sent to PostgreSQL; no other module quotes."""

from __future__ import annotations

from aqueduck.model.schema import TableName, TableSchema

__all__ = ["identifier", "literal", "table_identifier"]


def identifier(*parts: str) -> str:
    """A name, or a dotted name, quoted exactly."""
    for part in parts:
        if not part or "\x00" in part:
            raise ValueError("a name in PostgreSQL is not empty and has no zero byte")
    return ".".join('"' + part.replace('"', '""') + '"' for part in parts)


def table_identifier(table: TableSchema | TableName) -> str:
    """The schema-qualified name of a table."""
    return identifier(table.schema, table.name)


def literal(text: str) -> str:
    """A text constant, for statements that take no parameters."""
    if "\x00" in text:
        raise ValueError("text in PostgreSQL has no zero byte")
    quoted = text.replace("'", "''")
    # Without standard_conforming_strings a backslash would escape; E'' means the same everywhere.
    return "e'" + quoted.replace("\\", "\\\\") + "'" if "\\" in text else f"'{quoted}'"
