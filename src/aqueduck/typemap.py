"""
PostgreSQL types in the lake: which DuckDB type a column gets, and how text becomes it.

Changes and copies both arrive as PostgreSQL's text output; `cast_sql` is the one way from
there to a lake value, so both give the same.  Legal output never fails: what a lake type
cannot hold is written as `docs/types.md` says.  Pure: expressions in, expressions out.

The text is expected as the server writes it with `DateStyle = ISO`, `bytea_output = hex` and
`extra_float_digits >= 1`, which is what our connections set.
"""

from __future__ import annotations

from collections.abc import Callable

from aqueduck.schema import Column

__all__ = ["cast_sql", "lake_type"]

BOOL, BYTEA, INT8, INT2, INT4 = 16, 17, 20, 21, 23
JSON, FLOAT4, FLOAT8, DATE, TIME = 114, 700, 701, 1082, 1083
TIMESTAMP, TIMESTAMPTZ, NUMERIC, UUID, JSONB = 1114, 1184, 1700, 2950, 3802

TEXT = "VARCHAR"
DECIMAL_DIGITS_MAX = 38

_TYPES = {
    BOOL: "BOOLEAN",
    BYTEA: "BLOB",
    INT2: "SMALLINT",
    INT4: "INTEGER",
    INT8: "BIGINT",
    FLOAT4: "FLOAT",
    FLOAT8: "DOUBLE",
    DATE: "DATE",
    TIME: "TIME",
    TIMESTAMP: "TIMESTAMP",
    TIMESTAMPTZ: "TIMESTAMP WITH TIME ZONE",
    UUID: "UUID",
    JSON: "JSON",
    JSONB: "JSON",
}


def lake_type(col: Column) -> str:
    """The DuckDB type of the column in the lake; text where there is no exact one."""
    if col.type_oid == NUMERIC:
        return _decimal(col.typmod)
    return _TYPES.get(col.type_oid, TEXT)


def cast_sql(col: Column, expr: str) -> str:
    """An expression that turns PostgreSQL's text `expr` into `lake_type(col)`; NULL stays NULL."""
    target = lake_type(col)
    if target == TEXT:
        return expr
    special = _CASTS.get(col.type_oid)
    return special(expr, target) if special else f"cast({expr} as {target})"


def _decimal(typmod: int) -> str:
    """The exact decimal for a numeric(p,s), or text if there is none."""
    if typmod < 4:
        return TEXT
    precision = (typmod - 4) >> 16 & 0xFFFF
    scale = ((typmod - 4 & 0x7FF) ^ 0x400) - 0x400  # eleven bits, signed
    # numeric(3,-2) rounds to hundreds, numeric(2,5) starts at the fifth decimal place.
    digits = max(precision, scale) if scale >= 0 else precision - scale
    return f"DECIMAL({digits},{max(scale, 0)})" if digits <= DECIMAL_DIGITS_MAX else TEXT


def _from_bool(expr: str, _target: str) -> str:
    return f"({expr} = 't')"


def _from_bytea(expr: str, _target: str) -> str:
    return f"unhex(substr({expr}, 3))"


def _from_numeric(expr: str, target: str) -> str:
    return f"case when {expr} = 'NaN' then null else cast({expr} as {target}) end"


def _from_date(expr: str, target: str) -> str:
    # DuckDB reads '0044-03-15 BC' as a date of our era, so this cannot be left to a failing cast.
    era = f"cast(left({expr}, -3) || ' (BC)' as {target})"
    return f"case when suffix({expr}, ' BC') then {era} else cast({expr} as {target}) end"


def _from_timestamp(expr: str, target: str) -> str:
    """The plain cast, and for the rare text that it refuses: BC, and times after DuckDB's last one."""
    era = rf"regexp_replace({expr}, '^(\S+) (.*) BC$', '\1 (BC) \2')"
    rare = (
        f"case when suffix({expr}, ' BC') then cast({era} as {target})"
        rf" when regexp_matches({expr}, '^\d{{6}}-') then cast('infinity' as {target})"
        f" else cast({expr} as {target}) end"
    )
    return f"coalesce(try_cast({expr} as {target}), {rare})"


def _from_json(expr: str, target: str) -> str:
    # The type json keeps escapes that are no Unicode, such as a lone surrogate; DuckDB does not.
    return f"coalesce(try_cast({expr} as {target}), to_json({expr}))"


_CASTS: dict[int, Callable[[str, str], str]] = {
    BOOL: _from_bool,
    BYTEA: _from_bytea,
    NUMERIC: _from_numeric,
    DATE: _from_date,
    TIMESTAMP: _from_timestamp,
    TIMESTAMPTZ: _from_timestamp,
    JSON: _from_json,
    JSONB: _from_json,
}
