"""
Compile a table's row filter: DuckDB parses it, and only expressions with a fixed result for each row are allowed.

`compile_filter` returns the condition over f0, f1, … and the source columns that these stand for.  Names are replaced
in the parsed expression, not in its text, so a column may have any name.  `projected` evaluates the condition.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import duckdb

from aqueduck.lake.session.engine import new_connection
from aqueduck.lake.session.sql import literal
from aqueduck.model.columns.projection import Projection
from aqueduck.model.columns.typemap import cast_sql, lake_type
from aqueduck.model.errors import ConfigError
from aqueduck.model.schema import Column, TableSchema

__all__ = ["check_constants", "compile_filter"]

_REFUSED = {
    "SUBQUERY": "a subquery",
    "LAMBDA": "a lambda",
    "WINDOW": "a window function",
    "STAR": "a star",
    "PARAMETER": "a parameter",
    "POSITIONAL_REFERENCE": "a position",
}
# Constant within a connection, but different between processes.
_ELSEWHERE = {"current_setting", "getvariable", "getenv"}


def compile_filter(table: TableSchema, wanted: Projection) -> Projection:
    """The projection with its compiled condition and the columns it reads; raises `ConfigError` if it is invalid."""
    if not wanted.where:
        return wanted
    con = new_connection(threads=1)
    try:
        condition = _parsed(con, table, wanted.where)
        _refuse_what_changes(con, table, condition)
        reads = _replace_columns(table, wanted, condition)
        sql = _sql(con, condition)
        _check_type(con, table, sql, [_column(table, wanted, name) for name in reads])
    finally:
        con.close()
    return replace(wanted, condition=sql, reads=tuple(reads))


def check_constants(table: TableSchema, wanted: Projection) -> None:
    """Raise if the constant of a mask is not a value of its column's type."""
    con = new_connection(threads=1)
    try:
        for name, mask in wanted.masks:
            column = next((c for c in table.columns if c.name == name), None)
            if mask.kind != "constant" or column is None:
                continue
            try:
                con.execute(
                    f"select {cast_sql(column, 'x')} from (select {literal(mask.value)} as x)"
                ).fetchall()
            except duckdb.Error:
                raise ConfigError(
                    f"the constant for {name} of {table.qualified} is no {lake_type(column)}",
                    hint="write a value of the column's type under mask",
                    table=table.qualified,
                ) from None
    finally:
        con.close()


def _parsed(con: duckdb.DuckDBPyConnection, table: TableSchema, where: str) -> dict[str, Any]:
    """The syntax tree; raises unless the text is exactly one expression."""
    [(text,)] = con.execute("select json_serialize_sql(?)", [f"select 1 where ({where}\n)"]).fetchall()
    tree = json.loads(text)
    if tree["error"]:
        raise _wrong(
            table, f"cannot be read: {str(tree.get('error_message', 'no reason given')).splitlines()[0]}"
        )
    node = tree["statements"][0]["node"] if len(tree["statements"]) == 1 else {}
    plain = (
        node.get("type") == "SELECT_NODE" and node["from_table"]["type"] == "EMPTY" and not node["modifiers"]
    )
    others = ("having", "qualify", "sample", "group_expressions")
    if not plain or node["where_clause"] is None or any(node.get(name) for name in others):
        raise _wrong(table, "is more than one expression")
    condition: dict[str, Any] = node
    return condition


def _refuse_what_changes(con: duckdb.DuckDBPyConnection, table: TableSchema, node: dict[str, Any]) -> None:
    for part in _parts(node["where_clause"]):
        if part.get("class") in _REFUSED:
            raise _wrong(table, f"has {_REFUSED[part['class']]}, which is not possible here")
        if part.get("class") == "FUNCTION" and not _is_fixed(con, part):
            raise _wrong(table, f"calls {part['function_name']}, whose result for a row may change")


def _is_fixed(con: duckdb.DuckDBPyConnection, call: dict[str, Any]) -> bool:
    """Whether the result of a call depends on its arguments alone; a macro's, if all that it calls is fixed."""
    name = str(call["function_name"]).lower()
    if name in _ELSEWHERE or _depends_on_session(name, len(call["children"])):
        return False
    found = con.execute(
        "select stability, macro_definition, parameters from duckdb_functions() where function_name = ?",
        [name],
    ).fetchall()
    return all(
        _is_fixed_macro(con, definition, parameters)
        if definition is not None
        else stability in ("CONSISTENT", None)
        for stability, definition, parameters in found
    )


def _is_fixed_macro(con: duckdb.DuckDBPyConnection, definition: str, parameters: list[str]) -> bool:
    """Names that are no parameters, such as `current_timestamp`, are calls without parentheses."""
    [(text,)] = con.execute("select json_serialize_sql(?)", [f"select {definition}"]).fetchall()
    tree = json.loads(text)
    if tree["error"]:
        return False
    parts = list(_parts(tree["statements"][0]["node"]["select_list"]))
    names = {str(part["column_names"][-1]).lower() for part in parts if part.get("class") == "COLUMN_REF"}
    calls = [part for part in parts if part.get("class") == "FUNCTION"]
    return (
        not any(part.get("class") == "SUBQUERY" for part in parts)
        and names <= {parameter.lower() for parameter in parameters}
        and all(_is_fixed(con, call) for call in calls)
    )


def _depends_on_session(name: str, arguments: int) -> bool:
    """
    Whether a function's result depends on the clock or the session; DuckDB marks some of these as consistent.

    A function without arguments, such as `current_localtime()`, returns a constant, the time, the user or the place.
    """
    return (arguments == 0 and name != "pi") or (name == "age" and arguments == 1)


def _replace_columns(table: TableSchema, wanted: Projection, node: dict[str, Any]) -> list[str]:
    """Replace column names by f0, f1, … and return the names in that order."""
    reads: list[str] = []
    for part in _parts(node["where_clause"]):
        if part.get("class") != "COLUMN_REF":
            continue
        # The last part of a dotted name is the column: `orders.country`.
        name = _name(table, wanted, str(part["column_names"][-1]))
        if name not in reads:
            reads.append(name)
        part["column_names"] = [f"f{reads.index(name)}"]
    return reads


def _name(table: TableSchema, wanted: Projection, written: str) -> str:
    """The column name that `written` means, current or former: an exact match, else one in lower case."""
    names = [c.name for c in table.columns] + [name for name, _ in wanted.numbers]
    if written in names:
        return written
    if written.lower() in names:
        return written.lower()
    raise _wrong(table, f"reads the column {written}, which the table does not have")


def _column(table: TableSchema, wanted: Projection, name: str) -> Column:
    number = dict(wanted.numbers).get(name, 0)
    by_number = [c for c in table.columns if number and c.number == number]
    found = by_number or [c for c in table.columns if c.name == name]
    if not found:
        raise _wrong(table, f"reads the column {name}, which the table no longer has")
    return found[0]


def _sql(con: duckdb.DuckDBPyConnection, node: dict[str, Any]) -> str:
    tree = {"error": False, "statements": [{"node": node, "named_param_map": []}]}
    [(text,)] = con.execute("select json_deserialize_sql(?::json)", [json.dumps(tree)]).fetchall()
    return str(text).partition(" WHERE ")[2]


def _check_type(
    con: duckdb.DuckDBPyConnection, table: TableSchema, condition: str, columns: list[Column]
) -> None:
    cells = ", ".join(f"cast(null as {lake_type(c)}) as f{i}" for i, c in enumerate(columns)) or "1 as none"
    try:
        con.execute(f"select 1 from (select {cells}) where {condition}").fetchall()
        [(kind,)] = con.execute(f"select typeof({condition}) from (select {cells})").fetchall()
    except duckdb.Error as exc:
        raise _wrong(table, f"cannot be used: {str(exc).splitlines()[0]}") from None
    if kind != "BOOLEAN":
        raise _wrong(table, f"is {kind}, not true or false")


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    """All objects of a JSON tree."""
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from _parts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _parts(inner)


def _wrong(table: TableSchema, what: str) -> ConfigError:
    return ConfigError(
        f"the row filter of {table.qualified} {what}",
        hint="where takes an expression over the table's columns, such as country = 'DE'",
        table=table.qualified,
    )
