"""
Convert Spark's filters to SQL, for sources that can leave out rows themselves.

Spark applies every filter again, so a condition may pass more rows than the filter but never fewer.  A filter that
cannot be converted safely is left to Spark.
"""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

from aqueduck.lake.session.sql import ident
from aqueduck.lake.session.sql import literal as lake_literal
from aqueduck.model.schema import Column
from aqueduck.postgres.session.quoting import identifier
from aqueduck.postgres.session.quoting import literal as postgres_literal

__all__ = ["lake_condition", "postgres_condition"]

_ORDER: dict[type[Filter], str] = {
    GreaterThan: ">",
    GreaterThanOrEqual: ">=",
    LessThan: "<",
    LessThanOrEqual: "<=",
}

DECIMAL_DIGITS_MAX = 38

#: a value as SQL for a column and an operator; None where it is left to Spark
Value = Callable[[str, str, Any], str | None]


def lake_condition(filters: Iterable[Filter]) -> str:
    """The condition for those filters that DuckDB can evaluate."""
    return _joined(filters, ident, _lake_value) or "true"


def postgres_condition(filters: Iterable[Filter], columns: Mapping[str, Column]) -> str | None:
    """The condition for those filters that PostgreSQL can evaluate, on columns of known types."""

    def value(name: str, operator: str, value: Any) -> str | None:
        column = columns.get(name)
        return None if column is None else _postgres_value(column, operator, value)

    known = [f for f in filters if _attribute(f) in columns]
    return _joined(known, identifier, value)


def _joined(filters: Iterable[Filter], quote: Callable[[str], str], value: Value) -> str | None:
    conditions = [text for text in (_condition(f, quote, value) for f in filters) if text is not None]
    return " and ".join(conditions) or None


def _attribute(wanted: Filter) -> str | None:
    """The column of a filter; None if the filter is on a field within a column."""
    path: tuple[str, ...] = getattr(wanted, "attribute", ())
    return path[0] if len(path) == 1 else None


def _condition(wanted: Filter, quote: Callable[[str], str], value: Value) -> str | None:
    name = _attribute(wanted)
    if name is None:
        return None
    cell = quote(name)
    if isinstance(wanted, IsNull):
        return f"{cell} is null"
    if isinstance(wanted, IsNotNull):
        return f"{cell} is not null"
    if isinstance(wanted, In):
        values = [value(name, "=", v) for v in wanted.value if v is not None]
        return f"{cell} in ({', '.join(v for v in values if v)})" if values and all(values) else None
    if isinstance(wanted, StringStartsWith):
        prefix = value(name, "starts_with", wanted.value)
        return None if prefix is None else f"starts_with({cell}, {prefix})"
    if isinstance(wanted, EqualTo) or (isinstance(wanted, EqualNullSafe) and wanted.value is not None):
        operator = "="
    else:
        operator = _ORDER.get(type(wanted), "")
    text = value(name, operator, getattr(wanted, "value", None)) if operator else None
    return None if text is None else f"{cell} {operator} {text}"


def _lake_value(_name: str, _operator: str, value: Any) -> str | None:
    text = _text(value)
    if text is None:
        return None
    if isinstance(value, str) or type(value) is int:
        return lake_literal(value)
    kind = {bool: "boolean", datetime.date: "date"}.get(type(value))
    if isinstance(value, Decimal):
        kind = _decimal_type(value)
    elif isinstance(value, datetime.datetime):
        kind = "timestamptz" if value.tzinfo is not None else "timestamp"
    return None if kind is None else f"cast({lake_literal(text)} as {kind})"


def _decimal_type(value: Decimal) -> str | None:
    """The type with the value's own digits and scale: with a larger scale, DuckDB would cast the column and lose digits."""
    _, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int):
        return None
    scale = max(0, -exponent)
    width = max(len(digits) + max(0, exponent), scale)
    return f"decimal({width},{scale})" if width <= DECIMAL_DIGITS_MAX else None


_INTEGERS, _TEXTS = (20, 21, 23), (25, 1043)
_BOOL, _NUMERIC, _DATE, _TIMESTAMP, _TIMESTAMPTZ, _UUID = 16, 1700, 1082, 1114, 1184, 2950


def _postgres_value(column: Column, operator: str, value: Any) -> str | None:
    """
    A constant of the column's own type for the server.

    Range filters on text are left to Spark, because the server orders text by its collation and Spark by bytes.
    """
    oid, kind, text = column.type_oid, type(value), _text(value)
    ordered = {int: _INTEGERS, Decimal: (_NUMERIC,), datetime.date: (_DATE,)}.get(kind, ())
    if kind is datetime.datetime:
        ordered = (_TIMESTAMP,) if value.tzinfo is None else (_TIMESTAMPTZ,)
    fits = oid in ordered and (kind is not Decimal or column.typmod >= 4)
    if kind is bool:
        fits = oid == _BOOL and operator == "="
    elif kind is str:
        fits = (oid in _TEXTS and operator in ("=", "starts_with")) or (
            oid == _UUID and operator == "=" and _is_uuid(value)
        )
        fits = fits and "\x00" not in value
    elif operator == "starts_with":
        fits = False
    return postgres_literal(text) if fits and text is not None else None


def _is_uuid(value: str) -> bool:
    try:
        return str(uuid.UUID(value)) == value.lower()
    except ValueError:
        return False


def _text(value: Any) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime.datetime):
        return value.isoformat(sep=" ")
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return format(value, "f")
    return str(value) if isinstance(value, str | int) else None
