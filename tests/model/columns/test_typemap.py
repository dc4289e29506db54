from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aqueduck.lake.session.engine import new_connection
from aqueduck.model.columns.typemap import ARRAY_LAKE_TYPE, TABLE, cast_sql, lake_type
from aqueduck.model.schema import Column
from aqueduck.postgres.catalog.tables import describe_table
from tests.fix_postgres import Database
from tests.type_strategies import texts

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
    (
        "interval",
        "VARCHAR",
        [
            ("'1 year 2 days 03:00'", "1 year 2 days 03:00:00"),
            ("'-1 month +3 days -0.000001s'", "-1 mons +3 days -00:00:00.000001"),
        ],
    ),
    ("money", "VARCHAR", [("'-1234.5'", "-$1,234.50")]),
    ("bit(3)", "VARCHAR", [("b'010'", "010")]),
    ("varbit", "VARCHAR", [("b''", "")]),
    ("inet", "VARCHAR", [("'10.0.0.1/8'", "10.0.0.1/8")]),
    ("macaddr8", "VARCHAR", [("'08:00:2b:01:02:03:04:05'", "08:00:2b:01:02:03:04:05")]),
    ("box", "VARCHAR", [("'(1,2),(3,4)'", "(3,4),(1,2)")]),
    ("tsvector", "VARCHAR", [("'a:1 b:2'", "'a':1 'b':2")]),
    ("jsonpath", "VARCHAR", [("'$.a[*]'", '$."a"[*]')]),
    ("int4range", "VARCHAR", [("'[1,5]'", "[1,6)"), ("'empty'", "empty")]),
    ("datemultirange", "VARCHAR", [("'{[2024-01-01,2024-01-02]}'", "{[2024-01-01,2024-01-03)}")]),
    ("oid", "VARCHAR", [("4294967295", "4294967295")]),
    ("mood", "VARCHAR", [("'so so'", "so so")]),
    ("pair", "VARCHAR", [("row(1, 'a \"b')", '(1,"a ""b")'), ("row(null, '')", '(,"")')]),
    ("amount", "DECIMAL(10,2)", [("1.5", "1.50"), ("'NaN'", None)]),
    ("nested_amount", "DECIMAL(10,2)", [("1.5", "1.50")]),
    ("moods", "JSON", [("'{so so,NULL}'", '["so so",null]')]),
    ("numbers", "JSON", [("'{1,NULL}'", "[1,null]")]),
    (
        "integer[]",
        "JSON",
        [
            ("'{1,NULL,-3}'", "[1,null,-3]"),
            ("'{}'", "[]"),
            ("'{{1,2},{NULL,4}}'", "[[1,2],[null,4]]"),
            ("'[0:1]={1,2}'", '"[0:1]={1,2}"'),
        ],
    ),
    ("boolean[][]", "JSON", [("'{t,f,NULL}'", "[true,false,null]"), ("'{{t},{f}}'", "[[true],[false]]")]),
    (
        "double precision[]",
        "JSON",
        [("'{NaN,-Infinity,Infinity,-0,1e300,NULL}'", '["NaN","-Infinity","Infinity",-0,1e+300,null]')],
    ),
    ("numeric(5,1)[]", "JSON", [("'{1,2.25}'", '["1.0","2.3"]')]),
    (
        "text[]",
        "JSON",
        [
            (
                "array['', 'NULL', null, 'null', 'a,b', '{x}', '\"q\"']",
                '["","NULL",null,"null","a,b","{x}","\\"q\\""]',
            ),
            (
                r"array[E'\n\t\u0001', E'\\', ' ', 'it''s [x]', '🦆']",
                r"""["\n\t\u0001","\\"," ","it's [x]","🦆"]""",
            ),
            ("array[E'\\u0001b', 'plain']", r'["\u0001b","plain"]'),
            ("'{}'", "[]"),
            ("array[['a b', null], ['c', 'd']]", '[["a b",null],["c","d"]]'),
            ("'[2:3]={a,\"b c\"}'", r'"[2:3]={a,\"b c\"}"'),
        ],
    ),
    ("char(3)[]", "JSON", [("'{a,bcd}'", '["a  ","bcd"]')]),
    ("bytea[]", "JSON", [(r"array['\x00ff'::bytea, null, '']", '["AP8=",null,""]')]),
    ("json[]", "JSON", [("array['{\"a\": [1]}'::json, '\"x\"', '1.10']", '[{"a": [1]},"x",1.10]')]),
    ("box[]", "JSON", [("'{(1,1),(0,0);(2,2),(1,1)}'", '["(1,1),(0,0)","(2,2),(1,1)"]')]),
    ("timestamptz[]", "JSON", [("'{infinity,NULL}'", '["infinity",null]')]),
    ("mood[]", "JSON", [("'{so so,good}'", '["so so","good"]')]),
    ("amount[]", "JSON", [("'{1.5}'", '["1.50"]')]),
    ("small[]", "JSON", [("'{1,2}'", "[1,2]")]),
    ("pair[]", "JSON", [("array[row(1, 'x y')::pair]", r'["(1,\"x y\")"]')]),
    ("numbers[]", "JSON", [("array['{1,2}'::numbers]", '["{1,2}"]')]),
    ("int4range[]", "JSON", [("array['[1,5]'::int4range]", '["[1,6)"]')]),
]

#: Types that are not built in.
USER_TYPES = """
    create type mood as enum ('so so', 'good'); create type pair as (a int, b text);
    create domain amount as numeric(10, 2); create domain nested_amount as amount check (value > 0);
    create domain small as smallint; create domain moods as mood[]; create domain numbers as int[];
"""

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
    with db.connect() as conn:
        return describe_table(conn, "t", need_key=False).columns[0]


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kolkata"])
def test_every_type_arrives_as_documented(db: Database, engine: duckdb.DuckDBPyConnection, zone: str) -> None:
    """Values as the server prints them become the lake's values of docs/types.md, in any session time zone."""
    db.execute(f"{SESSION}; set timezone = '{zone}'; {USER_TYPES}")
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
    db.execute(USER_TYPES)
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
        (1007, "{1,x}"),
        (1000, "{maybe}"),
        (1009, "{a,{b}"),
    ],
)
def test_text_that_is_no_such_value_fails(engine: duckdb.DuckDBPyConnection, oid: int, text: str) -> None:
    """What PostgreSQL would never print is an error, and not silently something else."""
    with pytest.raises(duckdb.Error):
        engine.execute(
            f"select {cast_sql(Column('x', oid, -1), 'x')} from (select ?::varchar as x)", [text]
        ).fetchall()


def test_an_unknown_type_is_text() -> None:
    """A type without an entry keeps PostgreSQL's text."""
    assert lake_type(Column("x", 999_999, -1)) == "VARCHAR"
    assert cast_sql(Column("x", 999_999, -1), "n0") == "n0"


def test_bytea_is_read_in_both_formats(db: Database, engine: duckdb.DuckDBPyConnection) -> None:
    """A server that prints `escape` gives the same bytes, alone and in arrays."""
    value = bytes(range(256)) + rb"\\x41 \x \101"
    found = {}
    for style in ("hex", "escape"):
        db.execute(f"set bytea_output = '{style}'")
        text, texts = db.query("select %(v)s::bytea::text, array[%(v)s::bytea]::text", {"v": value})[0]
        scalar, array = (cast_sql(Column("x", oid, -1), "x") for oid in (17, 1001))
        found[style] = [
            engine.execute(f"select {cast} from (select ?::varchar as x)", [x]).fetchone()
            for cast, x in ((scalar, text), (array, texts))
        ]
    assert found["hex"] == found["escape"] == [(value,), (f'["{base64.b64encode(value).decode()}"]',)]


@given(st.lists(st.none() | texts, max_size=5), st.sampled_from([0, 1, 3]))
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_arrays_of_any_text_keep_every_element(
    db: Database, engine: duckdb.DuckDBPyConnection, elements: list[str | None], rows: int
) -> None:
    """P-S06: quotes, escapes, separators, brackets, NULL and "NULL", in one dimension and in two."""
    value: list[object] = [list(elements) for _ in range(rows)] if rows and elements else list(elements)
    text = db.value("select %s::text[]::text", [value])
    query = f"select {cast_sql(Column('x', 1009, -1), 'x')} from (select ?::varchar as x)"
    found = engine.execute(query, [text]).fetchone()
    assert found is not None
    assert json.loads(found[0]) == value


def test_the_table_has_every_built_in_type(any_db: Database) -> None:
    """Each type of the server's catalog that a table can hold has its row, under the right OIDs, on every version."""
    rows = any_db.query("""
        select format_type(t.oid, null), t.oid::int8, t.typarray::int8 from pg_type t
        where t.typnamespace = 'pg_catalog'::regnamespace and t.typtype in ('b', 'r', 'm') and t.typarray <> 0
    """)
    mapped = {name: oids for row in TABLE for name, oids in row.oids.items()}
    assert mapped == {name: (oid, array) for name, oid, array in rows}


def test_arrow_types_are_what_duckdb_gives(engine: duckdb.DuckDBPyConnection) -> None:
    """The Arrow types in the table are those that DuckDB returns."""
    for row in TABLE:
        arrow = str(engine.execute(f"select null::{row.lake} as x").to_arrow_table().schema.field(0).type)
        assert arrow.partition("(")[0] == row.arrow, row.lake


def documented_table() -> list[str]:
    """The table of docs/types.md as it follows from the code."""
    lines = []
    for row in TABLE:
        names = ", ".join(f"`{name}`" for name in row.oids)
        if row.lake == "DECIMAL":
            lines.append(
                f"| `numeric(p,s)` of up to 38 digits | `decimal128(p, s)` | `DECIMAL(p,s)` | {row.json.value} |"
            )
            lines.append(f"| `numeric`, or of more digits | `string` | `VARCHAR` | {row.json.value} |")
        else:
            lines.append(f"| {names} | `{row.arrow}` | `{row.lake}` | {row.json.value} |")
    lines.append(f"| arrays, also of the types below | `string` | `{ARRAY_LAKE_TYPE}` | array |")
    lines.append(
        "| enums, composites, ranges of your own, types of extensions | `string` | `VARCHAR` | string |"
    )
    lines.append("| domains | | as the type below | |")
    return lines


def test_the_document_has_the_table_of_the_code() -> None:
    """docs/types.md lists exactly what is mapped."""
    text = (Path(__file__).parents[3] / "docs" / "types.md").read_text()
    table = text.partition("| PostgreSQL | Arrow | DuckLake | JSON |\n|---|---|---|---|\n")[2].partition(
        "\n\n"
    )[0]
    assert table.splitlines() == documented_table()


def test_a_list_is_one_cast_away(engine: duckdb.DuckDBPyConnection) -> None:
    """The expressions in docs/types.md return the elements as they were."""
    array = cast_sql(Column("x", 1009, -1), "x")
    query = f"select cast({array} as varchar[]) from (select ?::varchar as x)"
    assert engine.execute(query, [r'{a,"b \"c\"",NULL,"NULL"}']).fetchone() == (["a", 'b "c"', None, "NULL"],)
