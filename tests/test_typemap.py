from __future__ import annotations

from collections.abc import Iterator

import duckdb
import pytest

from aqueduck.lake.engine import new_connection
from aqueduck.schema import Column
from aqueduck.typemap import cast_sql, lake_type
from tests.fix_postgres import Database

#: PostgreSQL type, lake type, and values: PostgreSQL's expression, what DuckDB prints of the lake's value.
CASES: list[tuple[str, str, list[tuple[str, str | None]]]] = [
    ("boolean", "BOOLEAN", [("true", "true"), ("false", "false")]),
    ("smallint", "SMALLINT", [("-32768", "-32768")]),
    ("integer", "INTEGER", [("2147483647", "2147483647")]),
    ("bigint", "BIGINT", [("-9223372036854775808", "-9223372036854775808")]),
    (
        "real",
        "FLOAT",
        [("'3.4028235e38'", "3.4028235e+38"), ("'NaN'", "nan"), ("'-Infinity'", "-inf"), ("0.1", "0.1")],
    ),
    ("double precision", "DOUBLE", [("'5e-324'", "5e-324"), ("'Infinity'", "inf"), ("'-0'", "-0.0")]),
    ("numeric(10,2)", "DECIMAL(10,2)", [("-99999999.99", "-99999999.99"), ("1.1", "1.10"), ("'NaN'", None)]),
    ("numeric(38,10)", "DECIMAL(38,10)", [("1234567890123456789012345678.0123456789",) * 2]),
    ("numeric(3,-2)", "DECIMAL(5,0)", [("12345", "12300")]),
    ("numeric(2,5)", "DECIMAL(5,5)", [("0.00012", ".00012")]),
    ("numeric(39,0)", "VARCHAR", [("9" * 39, "9" * 39)]),
    (
        "numeric",
        "VARCHAR",
        [("1.100", "1.100"), ("'NaN'", "NaN"), ("'Infinity'", "Infinity"), ("1e40", "1" + "0" * 40)],
    ),
    (
        "text",
        "VARCHAR",
        [("''", ""), (r"'\N'", r"\N"), ("E'a\\tb\\n\"''🦆'", "a\tb\n\"'🦆"), ("' BC'", " BC")],
    ),
    ("varchar(5)", "VARCHAR", [("'abc'", "abc")]),
    ("char(5)", "VARCHAR", [("'abc'", "abc  ")]),
    ('"char"', "VARCHAR", [("'x'", "x")]),
    ("name", "VARCHAR", [("'a name'", "a name")]),
    ("bytea", "BLOB", [(r"'\x00ff275c'", r"\x00\xFF\x27\x5C"), ("''", "")]),
    (
        "date",
        "DATE",
        [
            ("'2024-02-29'", "2024-02-29"),
            ("'infinity'", "infinity"),
            ("'-infinity'", "-infinity"),
            ("'0044-03-15 BC'", "0044-03-15 (BC)"),
            ("'4714-11-24 BC'", "4714-11-24 (BC)"),
            ("'5874897-12-31'", "5874897-12-31"),
        ],
    ),
    ("time", "TIME", [("'24:00:00'", "24:00:00"), ("'23:59:59.999999'", "23:59:59.999999")]),
    (
        "timestamp",
        "TIMESTAMP",
        [
            ("'2024-01-02 03:04:05.000006'", "2024-01-02 03:04:05.000006"),
            ("'infinity'", "infinity"),
            ("'-infinity'", "-infinity"),
            ("'0044-03-15 12:00:00.5 BC'", "0044-03-15 (BC) 12:00:00.5"),
            ("'4714-11-24 00:00:00 BC'", "4714-11-24 (BC) 00:00:00"),
            ("'294247-01-10 04:00:54.775806'", "294247-01-10 04:00:54.775806"),
            ("'294276-12-31 23:59:59.999999'", "infinity"),
        ],
    ),
    (
        "timestamptz",
        "TIMESTAMP WITH TIME ZONE",
        [
            ("'2024-01-02 03:04:05.5+05:30'", "2024-01-01 21:34:05.5+00"),
            ("'infinity'", "infinity"),
            ("'0044-03-15 12:00:00+00 BC'", "0044-03-15 (BC) 12:00:00+00"),
            ("'294276-12-31 23:59:59.999999+00'", "infinity"),
        ],
    ),
    ("uuid", "UUID", [("'ffffffff-ffff-ffff-ffff-ffffffffffff'", "ffffffff-ffff-ffff-ffff-ffffffffffff")]),
    ("json", "JSON", [('\'{"a": 1,  "a":2}\'', '{"a": 1,  "a":2}'), (r"""'"\ud800"'""", r'"\"\\ud800\""')]),
    ("jsonb", "JSON", [("'{\"b\":1e400}'", '{"b": 1' + "0" * 400 + "}"), ("'null'", "null")]),
    ("timetz", "VARCHAR", [("'12:00:00+05:30'", "12:00:00+05:30")]),
    ("interval", "VARCHAR", [("'1 year 2 days 03:00'", "1 year 2 days 03:00:00")]),
    ("inet", "VARCHAR", [("'10.0.0.1/8'", "10.0.0.1/8")]),
    ("integer[]", "VARCHAR", [("'{1,NULL,3}'", "{1,NULL,3}")]),
]

#: What our connections set.
SESSION = "set datestyle = 'ISO'; set bytea_output = 'hex'; set extra_float_digits = 1; set intervalstyle = 'postgres'"


@pytest.fixture(scope="module")
def engine() -> Iterator[duckdb.DuckDBPyConnection]:
    con = new_connection()
    yield con
    con.close()


def column_of(db: Database, type_name: str) -> Column:
    """A column as the server's catalog describes it."""
    db.execute(f"drop table if exists t; create table t (x {type_name})")
    [[oid, typmod]] = db.query(
        "select atttypid::int, atttypmod from pg_attribute where attrelid = 't'::regclass and attnum = 1"
    )
    return Column("x", oid, typmod)


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kolkata"])
def test_every_type_arrives_as_documented(db: Database, engine: duckdb.DuckDBPyConnection, zone: str) -> None:
    """Values as the server prints them become the lake's values of docs/types.md, in any session time zone."""
    db.execute(f"{SESSION}; set timezone = '{zone}'")
    for type_name, expected_type, values in CASES:
        column = column_of(db, type_name)
        assert lake_type(column) == expected_type, type_name
        for value, expected in values:
            # format() uses the type's output function, as pgoutput does; a cast to text strips char(n).
            text = db.value(f"select format('%s', ({value})::{type_name})")
            found = engine.execute(
                f"select y::varchar, typeof(y) from (select {cast_sql(column, 'x')} as y from (select ?::varchar as x))",
                [text],
            ).fetchone()
            assert found == (expected, expected_type), (type_name, value)


def test_null_stays_null(db: Database, engine: duckdb.DuckDBPyConnection) -> None:
    """NULL of every type is NULL in the lake, not an empty or a special value."""
    for type_name, expected_type, _ in CASES:
        column = column_of(db, type_name)
        found = engine.execute(
            f"select typeof(y), y is null from (select {cast_sql(column, 'null::varchar')} as y)"
        ).fetchone()
        assert found == (expected_type, True), type_name


@pytest.mark.parametrize(
    ("oid", "text"),
    [
        (23, "abc"),
        (1082, "15.03.2024"),
        (1114, "15.03.2024 10:00"),
        (1184, "nonsense"),
        (17, r"\xzz"),
        (2950, "1"),
    ],
)
def test_text_that_is_no_such_value_fails(engine: duckdb.DuckDBPyConnection, oid: int, text: str) -> None:
    """What PostgreSQL would never print is an error, and not silently something else."""
    with pytest.raises(duckdb.Error):
        engine.execute(
            f"select {cast_sql(Column('x', oid, -1), 'x')} from (select ?::varchar as x)", [text]
        ).fetchall()


def test_an_unknown_type_is_text() -> None:
    """Whatever has no row of its own keeps PostgreSQL's text."""
    assert lake_type(Column("x", 999_999, -1)) == "VARCHAR"
    assert cast_sql(Column("x", 999_999, -1), "n0") == "n0"
