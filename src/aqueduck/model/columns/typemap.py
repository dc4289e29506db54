"""
PostgreSQL types in the lake: the DuckDB type of each column, and the cast from text.

`TABLE` is the whole mapping; `docs/types.md` documents it, and a test compares both with each other and with
a server's catalog. `cast_sql` is the only cast from PostgreSQL's text output to a lake value; copies read
some types in binary instead (`postgres.decode.copybinary`), and a test compares the two ways. The SQL is in
`casts`. Pure: columns and expressions in, expressions out.

The text must be written with `DateStyle = ISO`, `IntervalStyle = postgres` and `extra_float_digits >= 1`,
which our connections set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aqueduck.model.columns import casts
from aqueduck.model.columns.casts import Json
from aqueduck.model.schema import Column

__all__ = ["ARRAY_LAKE_TYPE", "TABLE", "TypeRow", "cast_sql", "decimal_digits", "keeps_values", "lake_type"]

NUMERIC = 1700
TEXT = "VARCHAR"
ARRAY_LAKE_TYPE = "JSON"
DECIMAL_DIGITS_MAX = 38


@dataclass(frozen=True, slots=True)
class TypeRow:
    """Types that are mapped alike: PostgreSQL → Arrow → DuckLake → JSON."""

    lake: str
    arrow: str
    json: Json
    oids: Mapping[str, tuple[int, int]]
    """By the name that `format_type` returns: the OIDs of the type and of its array."""
    cast: Callable[[str, str], str] | None = None
    """For types that need more than a plain cast: (expression, lake type) → expression."""


TABLE = (
    TypeRow("BOOLEAN", "bool", Json.BOOLEAN, {"boolean": (16, 1000)}, casts.from_bool),
    TypeRow("SMALLINT", "int16", Json.NUMBER, {"smallint": (21, 1005)}),
    TypeRow("INTEGER", "int32", Json.NUMBER, {"integer": (23, 1007)}),
    TypeRow("BIGINT", "int64", Json.NUMBER, {"bigint": (20, 1016)}),
    TypeRow("FLOAT", "float", Json.FLOAT, {"real": (700, 1021)}),
    TypeRow("DOUBLE", "double", Json.FLOAT, {"double precision": (701, 1022)}),
    TypeRow("DECIMAL", "decimal128", Json.STRING, {"numeric": (NUMERIC, 1231)}, casts.from_numeric),
    TypeRow("BLOB", "binary", Json.BASE64, {"bytea": (17, 1001)}, casts.from_bytea),
    TypeRow("DATE", "date32[day]", Json.STRING, {"date": (1082, 1182)}, casts.from_date),
    TypeRow("TIME", "time64[us]", Json.STRING, {"time without time zone": (1083, 1183)}),
    TypeRow(
        "TIMESTAMP",
        "timestamp[us]",
        Json.STRING,
        {"timestamp without time zone": (1114, 1115)},
        casts.from_timestamp,
    ),
    TypeRow(
        "TIMESTAMP WITH TIME ZONE",
        "timestamp[us, tz=UTC]",
        Json.STRING,
        {"timestamp with time zone": (1184, 1185)},
        casts.from_timestamp,
    ),
    TypeRow("UUID", "string", Json.STRING, {"uuid": (2950, 2951)}),
    TypeRow("JSON", "string", Json.PARSED, {"json": (114, 199), "jsonb": (3802, 3807)}, casts.from_json),
    TypeRow(
        TEXT,
        "string",
        Json.STRING,
        {
            "text": (25, 1009), "character varying": (1043, 1015), "character": (1042, 1014), "name": (19, 1003), '"char"': (18, 1002),
            "interval": (1186, 1187), "time with time zone": (1266, 1270), "money": (790, 791), "xml": (142, 143),
            "bit": (1560, 1561), "bit varying": (1562, 1563),
            "inet": (869, 1041), "cidr": (650, 651), "macaddr": (829, 1040), "macaddr8": (774, 775),
            "point": (600, 1017), "line": (628, 629), "lseg": (601, 1018), "box": (603, 1020), "path": (602, 1019),
            "polygon": (604, 1027), "circle": (718, 719),
            "tsvector": (3614, 3643), "tsquery": (3615, 3645), "gtsvector": (3642, 3644), "jsonpath": (4072, 4073),
            "int4range": (3904, 3905), "int8range": (3926, 3927), "numrange": (3906, 3907), "daterange": (3912, 3913),
            "tsrange": (3908, 3909), "tstzrange": (3910, 3911),
            "int4multirange": (4451, 6150), "int8multirange": (4536, 6157), "nummultirange": (4532, 6151),
            "datemultirange": (4535, 6155), "tsmultirange": (4533, 6152), "tstzmultirange": (4534, 6153),
            "oid": (26, 1028), "xid": (28, 1011), "xid8": (5069, 271), "cid": (29, 1012), "tid": (27, 1010),
            "pg_lsn": (3220, 3221), "pg_snapshot": (5038, 5039), "txid_snapshot": (2970, 2949),
            "int2vector": (22, 1006), "oidvector": (30, 1013), "refcursor": (1790, 2201), "aclitem": (1033, 1034),
            "regclass": (2205, 2210), "regcollation": (4191, 4192), "regconfig": (3734, 3735), "regdictionary": (3769, 3770),
            "regnamespace": (4089, 4090), "regoper": (2203, 2208), "regoperator": (2204, 2209), "regproc": (24, 1008),
            "regprocedure": (2202, 2207), "regrole": (4096, 4097), "regtype": (2206, 2211),
        },
    ),
)  # fmt: skip

_ROWS = {oid: row for row in TABLE for oid, _ in row.oids.values()}
_ELEMENTS = {array: oid for row in TABLE for oid, array in row.oids.values()}
_OTHER = TypeRow(TEXT, "string", Json.STRING, {})
_BOX = 603
_STRINGS = {25, 1043}  # text, character varying
# varchar(n), varbit(n), time(n), timestamp(n), with and without time zone: a higher limit changes no value.
_BOUNDED = {1043, 1562, 1083, 1266, 1114, 1184}


def lake_type(col: Column) -> str:
    """The DuckDB type of the column in the lake; text if no type matches exactly."""
    oid = _stored_oid(col)
    if _element_oid(col):
        return ARRAY_LAKE_TYPE
    if oid != NUMERIC:
        return _ROWS.get(oid, _OTHER).lake
    digits = decimal_digits(col)
    return f"DECIMAL({digits[0]},{digits[1]})" if digits else TEXT


def keeps_values(was: Column, now: Column) -> bool:
    """
    Whether a column whose type changed keeps its values as the lake shows them.

    PostgreSQL does not send the rows that such a change rewrites. False if in doubt: `char(5)` as `char(10)`
    or `text` has other spaces, `timestamp(0)` is rounded, `jsonb` orders its keys.
    """
    one, other = _element_oid(was) or _stored_oid(was), _element_oid(now) or _stored_oid(now)
    if bool(_element_oid(was)) != bool(_element_oid(now)):
        return False
    if one != other and not {one, other} <= _STRINGS:
        return False
    if now.typmod == was.typmod or now.typmod == -1:
        return True
    return other in _BOUNDED and -1 < was.typmod <= now.typmod


def cast_sql(col: Column, expr: str) -> str:
    """An expression that casts PostgreSQL's text `expr` to `lake_type(col)`; NULL stays NULL."""
    element = _element_oid(col)
    if element:
        delimiter = ";" if element == _BOX else col.delimiter
        return casts.array_to_json(expr, _ROWS.get(element, _OTHER).json, delimiter)
    target = lake_type(col)
    if target == TEXT:
        return expr
    special = _ROWS[_stored_oid(col)].cast
    return special(expr, target) if special else f"cast({expr} as {target})"


def _stored_oid(col: Column) -> int:
    """The OID that determines the mapping: for a domain, its base type."""
    return col.base_oid or col.type_oid


def _element_oid(col: Column) -> int:
    """The type of an array's elements; 0 if the column is not an array, or if only the catalog knows the type."""
    return col.element_oid or _ELEMENTS.get(_stored_oid(col), 0)


def decimal_digits(col: Column) -> tuple[int, int] | None:
    """Precision and scale of the exact decimal for a numeric(p,s); None if the lake has text."""
    if _stored_oid(col) != NUMERIC or col.typmod < 4:
        return None
    precision = (col.typmod - 4) >> 16 & 0xFFFF
    scale = ((col.typmod - 4 & 0x7FF) ^ 0x400) - 0x400  # eleven bits, signed
    # numeric(3,-2) rounds to hundreds, numeric(2,5) starts at the fifth decimal place.
    digits = max(precision, scale) if scale >= 0 else precision - scale
    return (digits, max(scale, 0)) if digits <= DECIMAL_DIGITS_MAX else None
