"""
SQL that casts PostgreSQL's text output to lake values, in DuckDB, whole columns at a time.

Each function takes an expression for the text and returns one for the value; NULL stays NULL. Valid server
output never fails: a value that the lake type cannot hold is converted as `docs/types.md` describes. Text
that no server prints fails instead of being misread. `typemap` assigns the functions to types.
"""

from __future__ import annotations

import enum

__all__ = [
    "Json",
    "array_to_json",
    "from_bool",
    "from_bytea",
    "from_date",
    "from_json",
    "from_numeric",
    "from_timestamp",
]


class Json(enum.Enum):
    """How a value is written in JSON: for arrays in the lake, and for change events."""

    BOOLEAN = "`true`, `false`"
    NUMBER = "number"
    FLOAT = 'number; `"NaN"`, `"Infinity"`, `"-Infinity"`'
    STRING = "string"
    BASE64 = "string, base64"
    PARSED = "as it is"


def from_bool(expr: str, _target: str) -> str:
    return f"({expr} = 't')"


def from_bytea(expr: str, _target: str) -> str:
    """Both formats of PostgreSQL: hex begins with a backslash and an x, the escape format never does."""
    tokens = rf"regexp_extract_all({expr}, '\\\\|\\[0-7]{{3}}|[^\\]+')"
    octal = "64 * cast(b[2] as integer) + 8 * cast(b[3] as integer) + cast(b[4] as integer)"
    byte = rf"case when b = '\\' then '\x5C' when prefix(b, '\') then printf('\x%02X', {octal}) else b end"
    escaped = f"cast(array_to_string(list_transform({tokens}, lambda b: {byte}), '') as blob)"
    return rf"case when prefix({expr}, '\x') then unhex(substr({expr}, 3)) else {escaped} end"


def from_numeric(expr: str, target: str) -> str:
    return f"case when {expr} = 'NaN' then null else cast({expr} as {target}) end"


def from_date(expr: str, target: str) -> str:
    # DuckDB parses '0044-03-15 BC' as a date AD instead of failing, so the cast cannot detect it.
    era = f"cast(left({expr}, -3) || ' (BC)' as {target})"
    return f"case when suffix({expr}, ' BC') then {era} else cast({expr} as {target}) end"


def from_timestamp(expr: str, target: str) -> str:
    """A plain cast; BC and times after DuckDB's last timestamp, which it refuses, are handled separately."""
    era = rf"regexp_replace({expr}, '^(\S+) (.*) BC$', '\1 (BC) \2')"
    rare = (
        f"case when suffix({expr}, ' BC') then cast({era} as {target})"
        rf" when regexp_matches({expr}, '^\d{{6}}-') then cast('infinity' as {target})"
        f" else cast({expr} as {target}) end"
    )
    return f"coalesce(try_cast({expr} as {target}), {rare})"


def from_json(expr: str, target: str) -> str:
    # PostgreSQL's json allows escapes that are not valid Unicode, such as a lone surrogate; DuckDB does not.
    return f"coalesce(try_cast({expr} as {target}), to_json({expr}))"


def array_to_json(expr: str, element: Json, delimiter: str = ",") -> str:
    """
    An array of any number of dimensions, as JSON.

    An array with lower bounds other than 1, such as `[0:1]={a,b}`, becomes a JSON string with PostgreSQL's
    text.
    """
    body = {
        Json.BOOLEAN: _boolean_array,
        Json.NUMBER: _number_array,
        Json.FLOAT: _float_array,
    }.get(element)
    array = body(expr) if body else _string_array(expr, element, delimiter)
    return f"case when prefix({expr}, '[') then to_json({expr}) else {array} end"


def _number_array(expr: str) -> str:
    brackets = f"replace(replace({expr}, '{{', '['), '}}', ']')"
    return f"cast(replace({brackets}, 'NULL', 'null') as json)"


def _boolean_array(expr: str) -> str:
    words = f"replace(replace(replace({expr}, 'NULL', 'null'), 'f', 'false'), 't', 'true')"
    return f"cast(replace(replace({words}, '{{', '['), '}}', ']') as json)"


def _float_array(expr: str) -> str:
    special = rf"""regexp_replace({expr}, '-?Infinity|NaN', '"\0"', 'g')"""
    return _number_array(f"case when regexp_matches({expr}, 'I|Na') then {special} else {expr} end")


def _string_array(expr: str, element: Json, delimiter: str) -> str:
    """
    Elements that PostgreSQL quotes where necessary, with a backslash before quotes and backslashes.

    Three ways, from the most general to the fastest, which measure 3.5, 0.6 and 0.3 s for a million small
    arrays.
    """
    mark, inside = _text(delimiter), _text("\\" + delimiter)[1:-1]
    unquoted = r"""regexp_replace(substr(t, 2, length(t) - 2), '\\(.)', '\1', 'g')"""
    value = f"""case when prefix(t, '"') then {unquoted} else t end"""
    token = f"""regexp_extract_all({expr}, '"(?:[^"\\\\]|\\\\.)*"|[^{{}}"{inside}]+|[{{}}{inside}]')"""
    json = f"""array_to_string(list_transform({token}, lambda t: case t when '{{' then '[' when '}}' then ']'
        when {mark} then ',' when 'NULL' then 'null' else {_element(value, element)} end), '')"""
    whole = f"cast({json} as json)"
    if element is not Json.STRING:
        return whole
    body = f"substr({expr}, 2, length({expr}) - 2)"
    # DuckDB parses lists with the same quotes, but more characters are special outside of them.
    native = f"to_json(cast('[' || {body} || ']' as varchar[]))"
    quoted = (
        f"case when regexp_matches({body}, '[''\\[\\](){{}}]') then {whole} else {native} end"
        if delimiter == ","
        else whole
    )
    plain = f"to_json(list_transform(string_split({body}, {mark}), lambda t: nullif(t, 'NULL')))"
    special = f"""contains({expr}, '"') or contains(substr({expr}, 2), '{{')"""
    return f"case when {expr} = '{{}}' then cast('[]' as json) when {special} then {quoted} else {plain} end"


def _element(value: str, element: Json) -> str:
    """A value as JSON text."""
    if element is Json.BASE64:
        value = f"base64({from_bytea(value, 'blob')})"
    text = f"cast(to_json({value}) as varchar)"
    if element is Json.PARSED:
        return f"case when try_cast({value} as json) is null then {text} else {value} end"
    return text


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
