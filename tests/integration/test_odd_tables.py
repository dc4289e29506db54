"""Tables that are legal and unusual: odd names, many columns, few columns, huge rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from aqueduck.lake.session.sql import ident
from aqueduck.model.errors import NoKeyError
from aqueduck.postgres.catalog.tables import describe_table
from aqueduck.postgres.session.quoting import identifier
from tests.fix_postgres import Database
from tests.flow import Flow

LONG = "long " + "é" * 29  # 63 bytes
NAMES = [
    'a "quoted" name', "with.dot", "it's", "Upper Case", "snow ☃ 🦆", LONG, "select", "back\\slash",
    "per%cent {brace}", " ", "tab\tand\nnewline",
]  # fmt: skip
#: Names that we or DuckLake use ourselves.
OURS = [
    "_op", "_ord", "_lsn", "_kc", "_unchanged", "n0", "o0", "k0", "v0", "t0", "u0", "e", "t", "b", "r", "f", "l", "ord", "link", "patch",
    "filename", "file_row_number", "snapshot_id", "change_type", "x",
]  # fmt: skip


#: Names that DuckLake keeps for itself while it inlines rows.
RESERVED = ["row_id", "begin_snapshot", "end_snapshot", "rowid"]


@pytest.mark.parametrize(
    ("names", "columns", "inline_rows"),
    [
        pytest.param(NAMES, [*NAMES, *OURS], 5, id="inlined"),
        pytest.param(NAMES[:1], [*NAMES, *OURS, *RESERVED], 5, id="never inlined"),
        pytest.param(NAMES[:1], [*NAMES, *OURS, *RESERVED], 0, id="in files"),
    ],
)
def test_odd_names_of_tables_and_columns_arrive_as_they_are(
    db: Database, tmp_path: Path, names: list[str], columns: list[str], inline_rows: int
) -> None:
    """P-S06: dots, quotes, spaces, Unicode, capitals, 63 bytes, SQL's words and our own, by stream and by copy."""
    tables = [identifier(name) for name in names]
    definitions = ", ".join(f"{identifier(name)} text[]" for name in columns)
    for table in tables:
        key = ", ".join(identifier(name) for name in (NAMES[0], "t", "k0"))
        db.execute(f"create table {table} ({definitions}, primary key ({key}))")
    cells = [[f"{name} {row}"] for row in range(3) for name in columns]
    with Flow(db, tmp_path, tables, inline_rows=inline_rows) as flow:
        places = ", ".join(["%s::text[]"] * len(columns))
        for table in tables:
            percent = table.replace("%", "%%")
            db.execute(f"insert into {percent} values ({places}), ({places}), ({places})", cells)
        flow.catch_up(tasks=False)
        for table in tables:
            db.execute(
                f"update {table} set {identifier('e')} = '{{new}}' where {identifier('n0')} = '{{n0 0}}'"
            )
            db.execute(
                f"update {table} set {identifier('k0')} = '{{moved}}' where {identifier('n0')} = '{{n0 1}}'"
            )
            db.execute(f"delete from {table} where {identifier('n0')} = '{{n0 2}}'")
        flow.catch_up(tasks=True)
        shown = ", ".join(f"{identifier(name)}[1]" for name in columns)
        read = ", ".join(f"{ident(name)}->>0" for name in columns)
        for name, table in zip(names, tables, strict=True):
            want = sorted(db.query(f"select {shown} from {table}"))
            assert len(want) == 2
            flow.copy(table)
            for place in ("stream", "copied"):
                assert sorted(flow.read(f"select {read} from lake.{place}.{ident(name)}")) == want, (
                    place,
                    name,
                )


@pytest.mark.slow
def test_a_table_with_as_many_columns_as_postgresql_allows(db: Database, tmp_path: Path) -> None:
    """1 600 columns, full rows, rows of NULL, an update and a delete."""
    names = [f"c{i}" for i in range(1, 1600)]
    db.execute(f"create table wide (id int primary key, {', '.join(f'{name} int' for name in names)})")
    with Flow(db, tmp_path, ["wide"]) as flow:
        db.execute(
            f"insert into wide select g, {', '.join(f'g + {i}' for i in range(1, 1600))} from generate_series(1, 3) g"
        )
        db.execute("insert into wide (id) values (4), (5)")
        flow.catch_up(tasks=False)
        db.execute(
            "update wide set c1599 = -1 where id = 2; update wide set c1 = null where id = 3; delete from wide where id = 1"
        )
        flow.catch_up(tasks=True)
        flow.copy("wide")
        want = db.query("select * from wide order by id")
        assert len(want) == 4
        for place in ("stream", "copied"):
            assert flow.read(f"from lake.{place}.wide order by id") == want


@pytest.mark.slow
def test_rows_of_megabytes_arrive_whole(db: Database, tmp_path: Path) -> None:
    """P-S06: large text, bytes, JSON and arrays, changed and left alone in an update, by stream and by copy."""
    db.execute("create table big (id int primary key, t text, b bytea, j jsonb, a int[], s text[], n int)")
    with Flow(db, tmp_path, ["big"]) as flow:
        db.execute("""
            insert into big select g, repeat('é🦆\\ "' || g, 300000), decode(repeat('00ff5c', 700000), 'hex'),
                jsonb_build_object('k', repeat('x', 2000000)), array(select generate_series(1, 200000)),
                array(select 'it''s "' || i from generate_series(1, 5000) i), 0
            from generate_series(1, 3) g
        """)
        flow.catch_up(tasks=False)
        db.execute("update big set n = 1 where id = 1; update big set t = t || 'x' where id = 2")
        flow.catch_up(tasks=True)
        flow.copy("big")
        want = db.query(
            "select id, md5(t), md5(encode(b, 'hex')), md5(j::text), cardinality(a), a[200000], md5(s[5000]), n from big order by id"
        )
        for place in ("stream", "copied"):
            found = flow.read(
                "select id, md5(t), md5(lower(hex(b))), md5(j::varchar), json_array_length(a), (a->>199999)::int, md5(s->>4999), n"
                f" from lake.{place}.big order by id"
            )
            assert found == want


def test_rows_with_nothing_but_a_key_or_nothing_but_null(db: Database, tmp_path: Path) -> None:
    """A table of key columns only, and rows that are NULL but for the key."""
    db.execute(
        "create table only_key (a int, b text, primary key (b, a));"
        "create table nulls (id int primary key, a text, b int[], c numeric(9,2))"
    )
    with Flow(db, tmp_path, ["only_key", "nulls"]) as flow:
        db.execute(
            "insert into only_key values (1, ''), (2, 'NULL'), (3, '\\N'); insert into nulls select generate_series(1, 20)"
        )
        flow.catch_up(tasks=True)
        db.execute(
            "update only_key set b = 'x' where a = 1; delete from only_key where a = 2; delete from nulls where id > 2"
        )
        flow.catch_up(tasks=False)
        for table in ("only_key", "nulls"):
            flow.copy(table)
            want = db.query(f"select * from {table} order by 1")
            assert len(want) == 2
            for place in ("stream", "copied"):
                assert flow.read(f"from lake.{place}.{table} order by 1") == want


def test_a_table_without_columns_is_refused_with_a_way_out(db: Database) -> None:
    """There is nothing by which its rows could be matched."""
    db.execute("create table nothing ()")
    with db.connect() as conn, pytest.raises(NoKeyError):
        describe_table(conn, "nothing")
