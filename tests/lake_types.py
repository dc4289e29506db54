"""
The types of a lake for tests: values at their extremes, and those that DuckLake does not keep.

`KEPT` has each type that `create table` in a lake accepts; `LOST` values that DuckLake's files do not keep, by the
experiment in tests/lake/values/test_types.py; `UNWRITABLE` are types that it writes into no file.
"""

from __future__ import annotations

KEPT: dict[str, list[str]] = {
    "BOOLEAN": ["true", "false"],
    "TINYINT": ["'-128'", "127"],
    "SMALLINT": ["'-32768'", "32767"],
    "INTEGER": ["'-2147483648'", "2147483647"],
    "BIGINT": ["'-9223372036854775808'", "9223372036854775807"],
    "HUGEINT": ["'-9007199254740992'", "0", "9007199254740992"],
    "UTINYINT": ["0", "255"],
    "USMALLINT": ["0", "65535"],
    "UINTEGER": ["0", "4294967295"],
    "UBIGINT": ["0", "18446744073709551615"],
    "UHUGEINT": ["0", "9007199254740992", "'170141183460469231731687303715884105728'"],
    "FLOAT": ["'nan'", "'inf'", "'-inf'", "'-0.0'", "'3.4028235e38'", "'1e-45'", "0.1"],
    "DOUBLE": ["'nan'", "'inf'", "'-inf'", "'-0.0'", "'1.7976931348623157e308'", "'5e-324'", "0.1"],
    "DECIMAL(4,1)": ["'-999.9'", "999.9"],
    "DECIMAL(9,2)": ["'-9999999.99'", "9999999.99"],
    "DECIMAL(18,3)": ["'-999999999999999.999'", "'999999999999999.999'"],
    "DECIMAL(38,0)": [f"'-{'9' * 38}'", f"'{'9' * 38}'"],
    "DECIMAL(38,38)": [f"'-0.{'9' * 38}'", f"'0.{'0' * 37}1'"],
    "VARCHAR": ["''", "'NULL'", "'a''b\"c\\d'", "' x '", "'ünï🦆'", "'a' || chr(0) || 'b'", "repeat('x', 20000)"],
    "BLOB": ["''::blob", "'\\x00\\xff\\x80'::blob", "'\\x27\\x5c'::blob"],
    "UUID": [f"'{d * 8}-{d * 4}-{d * 4}-{d * 4}-{d * 12}'" for d in "08f"],
    "DATE": ["'infinity'", "'-infinity'", "'5877642-06-25 (BC)'", "'5881580-07-10'", "'0001-01-01'"],
    "TIME": ["'00:00:00'", "'24:00:00'", "'23:59:59.999999'"],
    "TIME WITH TIME ZONE": ["'00:00:00+00'", "'23:59:59.999999+00'"],
    "TIMESTAMP": ["'infinity'", "'-infinity'", "'290309-12-22 (BC) 00:00:00'", "'294247-01-10 04:00:54.775806'"],
    "TIMESTAMP_S": ["'290309-12-22 (BC) 00:00:00'", "'294247-01-10 04:00:54'"],
    "TIMESTAMP_MS": ["'infinity'", "'-infinity'", "'290309-12-22 (BC) 00:00:00'", "'294247-01-10 04:00:54.775'"],
    "TIMESTAMP_NS": ["'infinity'", "'-infinity'", "'1677-09-22 00:00:00'", "'2262-04-11 23:47:16.854775806'"],
    "TIMESTAMP WITH TIME ZONE": ["'infinity'", "'-infinity'", "'294247-01-10 04:00:54.775806+00'", "'0044-03-15 (BC) 12:00:00+00'"],
    "INTERVAL": ["'0 seconds'", "'1 month 1 day 0.001 seconds'", "to_months(2147483647)", "to_days(2147483647)", "'24 hours'",
                 "to_milliseconds(4294967295)"],
    "JSON": ["'null'", "'{\"a\": 1, \"a\":[1.50]}'", "'\"x\"'"],
    "VARIANT": ["1::variant", "{'a': 1, 'b': [1, 2.50]}::variant", "'x'::variant", "[1, '2'::variant]::variant",
                "'nan'::double::variant", "'infinity'::timestamp::variant", "'2020-01-01'::timestamp_ns::variant",
                "'\\x00\\xff'::blob::variant", "true::variant", "12.50::decimal(9, 2)::variant"],
    "GEOMETRY": ["'POINT (1 2)'", "'POINT EMPTY'", "'POLYGON ((0 0, 1 0, 1 1, 0 0))'", "'POINT Z (1 2 3)'"],
    "VARCHAR[]": ["[]", "['a''b', null, '\"', 'NULL', '', ',]}', 'a' || chr(0) || 'b']"],
    "DOUBLE[][]": ["[['nan'::double, null], []]"],
    "STRUCT(a VARCHAR, b STRUCT(c UHUGEINT, d TIME WITH TIME ZONE, e BLOB))": [
        "{'a': 'a''b', 'b': {'c': 1::uhugeint, 'd': '12:00:00+00'::timetz, 'e': '\\x00\\x27'::blob}}",
        "{'a': null, 'b': null}",
    ],
    "MAP(VARCHAR, HUGEINT)": ["map {'a''b': 1, '\"': null}", "map {}"],
    "MAP(UUID, TIMESTAMP_NS[])": [
        "map {'ffffffff-ffff-ffff-ffff-ffffffffffff'::uuid: ['2262-04-11 23:47:16.854775806'::timestamp_ns, null]}"
    ],
    'STRUCT("a b" INTERVAL[], "q""x" JSON, "date" DATE)': [
        "{'a b': [interval '1 day'], 'q\"x': '{\"z\": [1]}'::json, 'date': 'infinity'::date}"
    ],
}  # fmt: skip

LOST: dict[str, list[str]] = {
    "HUGEINT": ["9007199254740993", "'-170141183460469231731687303715884105728'", "'170141183460469231731687303715884105727'"],
    "UHUGEINT": ["9007199254740993", "'340282366920938463463374607431768211455'"],
    "TIME WITH TIME ZONE": ["'12:00:00+05:30'", "'00:00:00+15:59:59'", "'24:00:00-15:59:59'"],
    "TIMESTAMP_S": ["'infinity'", "'-infinity'"],
    "INTERVAL": ["'-1 day'", "'0.000001 seconds'", "to_months(-2147483648)", "to_milliseconds(4294967296)",
                 "to_microseconds(9223372036854775807)", "'1 month -1 day'"],
    "VARIANT": ["interval '1 day'::variant", "18446744073709551615::ubigint::variant", "['12:00:00+05:30'::timetz]::variant"],
    "HUGEINT[]": ["[1, 9007199254740993]"],
    "STRUCT(a STRUCT(b INTERVAL))": ["{'a': {'b': interval '-1 day'}}"],
    "MAP(TIME WITH TIME ZONE, INTEGER)": ["map {'12:00:00+05:30'::timetz: 1}"],
}  # fmt: skip

UNWRITABLE = ("TIME_NS", "TIME_NS[]", "VARIANT[]", "STRUCT(a VARIANT)", "MAP(VARCHAR, TIME_NS)")


def shown(column: str, kind: str) -> str:
    """A cell as text that differs for different values, in DuckDB's SQL."""
    if kind == "VARIANT":  # a number has no width in Parquet's variants
        return f"regexp_replace(variant_typeof({column}), '[0-9(].*', '') || {column}::varchar"
    return f"{column}::varchar"
