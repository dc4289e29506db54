from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from aqueduck.model.errors import NoKeyError, PublicationError, TableMissingError
from aqueduck.model.schema import Column, TableSchema
from aqueduck.postgres.catalog.tables import describe_oid, describe_table, has_key
from aqueduck.postgres.publications.publications import refuse_without_key
from tests.fix_postgres import Database

Connection = psycopg.Connection[Any]


@pytest.fixture
def conn(any_db: Database) -> Iterator[Connection]:
    with any_db.connect() as made:
        yield made


def oid(db: Database, name: str, kind: str = "regclass") -> int:
    return int(db.value(f"select '{name}'::{kind}::oid::int8"))


def test_columns_come_in_their_order_with_types_as_people_write_them(
    any_db: Database, conn: Connection
) -> None:
    """Names, OIDs, modifiers and nullability are those of the catalog; dropped columns are gone."""
    any_db.execute(
        """create table t (id int primary key, gone int, price numeric(12, 2) not null, name varchar(20),
        "Odd ""name" timestamptz(3), tags text[], code char(4), free numeric);
        alter table t drop column gone; alter table t add late bool"""
    )
    table = describe_table(conn, "public.t")
    assert table == TableSchema(
        oid=oid(any_db, "t"),
        schema="public",
        name="t",
        columns=(
            Column("id", 23, -1, "integer", True),
            Column("price", 1700, 786438, "numeric(12,2)", True),
            Column("name", 1043, 24, "character varying(20)"),
            Column('Odd "name', 1184, 3, "timestamp(3) with time zone"),
            Column("tags", 1009, -1, "text[]"),
            Column("code", 1042, 8, "character(4)"),
            Column("free", 1700, -1, "numeric"),
            Column("late", 16, -1, "boolean"),
        ),
        key=("id",),
        identity="d",
    )
    assert describe_oid(conn, table.oid) == table


def test_generated_columns_are_left_out(db: Database) -> None:
    """They are not published, so the stream does not have them; identity columns it has."""
    db.execute(
        """create table t (id int generated always as identity primary key,
        stored int generated always as (id * 2) stored, virtual int generated always as (id * 3) virtual)"""
    )
    with db.connect() as conn:
        assert [column.name for column in describe_table(conn, "t").columns] == ["id"]


def test_domains_are_described_by_the_type_below(any_db: Database, conn: Connection) -> None:
    """The OID stays the domain's, as in the stream; name, modifier and base OID are those to map by."""
    any_db.execute(
        """create domain code as varchar(10) not null; create domain inner_code as code;
        create domain amount as numeric(10, 2); create domain numbers as int[];
        create table t (id int primary key, a code, b inner_code, c amount, d numbers)"""
    )
    described = {column.name: column for column in describe_table(conn, "t").columns}
    code, inner, amount, numbers = (
        oid(any_db, name, "regtype") for name in ("code", "inner_code", "amount", "numbers")
    )
    assert described["a"] == Column("a", code, 14, "character varying(10)", True, base_oid=1043)
    assert described["b"] == Column("b", inner, 14, "character varying(10)", True, base_oid=1043)
    assert described["c"] == Column("c", amount, 655366, "numeric(10,2)", base_oid=1700)
    assert described["d"] == Column("d", numbers, -1, "integer[]", base_oid=1007)


def test_arrays_of_types_that_are_not_built_in_tell_their_elements(
    any_db: Database, conn: Connection
) -> None:
    """Of enums, composites and domains, below domains too; what built-in arrays consist of is known anyway."""
    any_db.execute(
        """create type mood as enum ('ok'); create type pair as (a int, b text); create domain corner as box;
        create domain moods as mood[]; create domain amount as numeric(10, 2); create domain price as amount;
        create table t (id int primary key, a mood, b mood[], c moods, d pair[], e price[], f corner[], g moods[], h int[])"""
    )
    columns = {column.name: column for column in describe_table(conn, "t").columns}
    mood, mood_array, pair, moods = (
        oid(any_db, name, "regtype") for name in ("mood", "mood[]", "pair", "moods")
    )
    assert columns["a"] == Column("a", mood, -1, "mood")
    assert columns["b"] == Column("b", mood_array, -1, "mood[]", element_oid=mood)
    assert columns["c"] == Column("c", moods, -1, "mood[]", base_oid=mood_array, element_oid=mood)
    found = {name: (column.element_oid, column.delimiter) for name, column in columns.items()}
    assert found["d"] == (pair, ",")
    assert found["e"] == (1700, ",")
    assert found["f"] == (603, ";")
    assert found["g"] == (mood_array, ",")
    assert found["h"] == (0, ",")


@pytest.mark.parametrize(
    ("definition", "key", "identity"),
    [
        ("create table t (b int, a int, primary key (a, b))", ("a", "b"), "d"),
        ("create table t (a int primary key, b int unique not null)", ("a",), "d"),
        (
            "create table t (a int primary key, b int not null, c int not null);"
            "create unique index i on t (c, b) include (a); alter table t replica identity using index i",
            ("c", "b"),
            "i",
        ),
        ("create table t (a int primary key, b int); alter table t replica identity full", ("a",), "f"),
        ("create table t (b int not null unique); alter table t replica identity full", ("b",), "f"),
        ("create table t (a int primary key deferrable); alter table t replica identity full", (), "f"),
        (
            "create table t (a int primary key deferrable, b int not null unique); alter table t replica identity full",
            ("b",),
            "f",
        ),
        ("create table t (a int primary key); alter table t replica identity nothing", ("a",), "n"),
        ("create table t (a int primary key) partition by range (a)", ("a",), "d"),
        ('create table t ("Key ""x" int primary key)', ('Key "x',), "d"),
    ],
)
def test_the_key_is_what_old_rows_are_known_by(
    any_db: Database, conn: Connection, definition: str, key: tuple[str, ...], identity: str
) -> None:
    """P-S02, P-S08: the primary key in its order, but under USING INDEX that index's columns."""
    any_db.execute(definition)
    table = describe_table(conn, "t")
    assert (table.key, table.identity) == (key, identity)
    assert [table.columns[index].name for index in table.key_indexes] == list(key)


@pytest.mark.parametrize(
    "definition",
    [
        "create table t (a int)",
        "create table t (a int unique)",
        "create table t (a int not null unique)",
        "create table t (a int not null unique); alter table t replica identity nothing",
        "create table t (a int not null); create unique index on t (a) where a > 1",
    ],
)
def test_a_table_without_a_key_is_refused_with_the_ways_out(
    any_db: Database, conn: Connection, definition: str
) -> None:
    """P-S02: the hint names a primary key, a replica identity index, and append."""
    any_db.execute(definition)
    with pytest.raises(NoKeyError) as caught:
        describe_table(conn, "t")
    hint = str(caught.value.hint)
    ways = ("add primary key", "replica identity using index", "replica identity full")
    for way in (*(f'alter table "public"."t" {w}' for w in ways), "mode: append"):
        assert way in hint
    assert caught.value.table == "public.t"
    assert describe_table(conn, "t", need_key=False).key == ()


def test_a_deferrable_primary_key_is_refused_with_the_ways_out(any_db: Database, conn: Connection) -> None:
    """P-S02: it is named as the reason, and the hint does not ask for a second primary key."""
    any_db.execute("create table t (a int primary key deferrable)")
    with pytest.raises(NoKeyError, match=r"primary key of public\.t is deferrable") as caught:
        describe_table(conn, "t")
    assert "add primary key" not in str(caught.value.hint)
    any_db.execute('alter table "public"."t" replica identity full')
    assert 'alter table "public"."t" replica identity full' in str(caught.value.hint)
    assert describe_table(conn, "t").key == ()


@pytest.mark.parametrize("more", ["", "; create unique index on t (abs(a))"])
def test_the_full_identity_will_do_without_a_key(any_db: Database, conn: Connection, more: str) -> None:
    """P-S10: with the full identity, a row is found by all of its cells."""
    any_db.execute(f"create table t (a int){more}; alter table t replica identity full")
    found = describe_table(conn, "t")
    assert (found.key, found.identity) == ((), "f")
    with pytest.raises(NoKeyError, match="mode history"):
        refuse_without_key(found, "history")


def test_a_unique_index_that_would_do_is_named(any_db: Database, conn: Connection) -> None:
    """P-S02: the first statement of the hint works as it is printed."""
    any_db.execute('create table t (a int, b int not null); create unique index "I 1" on t (b)')
    with pytest.raises(NoKeyError) as caught:
        describe_table(conn, "t")
    any_db.execute(str(caught.value.hint))
    assert describe_table(conn, "t").key == ("b",)


@pytest.mark.parametrize(
    "source", ["nowhere", "nowhere.t", "T", '"public.t"', "a.b.c", "", "t; drop table t"]
)
def test_a_missing_table_says_that_it_does_not_exist(any_db: Database, conn: Connection, source: str) -> None:
    """P-S02: names fold as in SQL, and other text is not executed."""
    any_db.execute('create table t (id int primary key); create table "T" (id int primary key)')
    if source == "T":
        assert describe_table(conn, source).name == "t"
        assert describe_table(conn, '"T"').name == "T"
        return
    with pytest.raises(TableMissingError, match=r"does not exist|is not a table name"):
        describe_table(conn, source)
    assert describe_table(conn, "t").name == "t"


def test_an_oid_that_is_gone_is_a_missing_table(any_db: Database, conn: Connection) -> None:
    """P-S13: a renamed table is still found, a dropped one is missing."""
    any_db.execute("create table t (id int primary key); create schema elsewhere")
    number = oid(any_db, "t")
    any_db.execute("alter table t set schema elsewhere; alter table elsewhere.t rename to moved")
    assert describe_oid(conn, number).qualified == "elsewhere.moved"
    any_db.execute("drop table elsewhere.moved")
    with pytest.raises(TableMissingError, match="does not exist"):
        describe_oid(conn, number)


@pytest.mark.parametrize(
    ("definition", "kind"),
    [
        ("create view t as select 1", "a view"),
        ("create materialized view t as select 1", "a materialized view"),
        ("create sequence t", "a sequence"),
        ("create table x (id int constraint t primary key)", "an index"),
    ],
)
def test_what_is_no_table_is_refused(any_db: Database, conn: Connection, definition: str, kind: str) -> None:
    """Only tables have changes to follow; the error names the kind of the relation."""
    any_db.execute(definition)
    with pytest.raises(TableMissingError, match=f"public.t is {kind}"):
        describe_table(conn, "t")


@pytest.mark.parametrize("source", ["pg_catalog.pg_class", "information_schema.sql_features", "aqueduck.t"])
def test_a_table_that_is_not_the_users_is_refused(db: Database, source: str) -> None:
    """Those of the server cannot be published, and the registry's would make changes by being followed."""
    db.execute("create schema aqueduck; create table aqueduck.t (id int primary key)")
    with db.connect() as conn, pytest.raises(TableMissingError, match=f"{source} belongs to"):
        describe_table(conn, source, need_key=False)


def test_an_unlogged_table_is_refused_with_the_repair(any_db: Database, conn: Connection) -> None:
    """Its changes are not in WAL; the printed statement puts them there."""
    any_db.execute("create unlogged table t (id int primary key)")
    with pytest.raises(PublicationError, match="unlogged") as caught:
        describe_table(conn, "t")
    any_db.execute(str(caught.value.hint))
    assert describe_table(conn, "t").key == ("id",)


def test_describing_needs_no_rights(db: Database, role: str) -> None:
    """P-S24: a table is described from the catalog, which every role may read."""
    db.execute("create schema closed; create table closed.t (id int primary key)")
    with db.connect(role) as conn:
        assert describe_table(conn, "closed.t").key == ("id",)


def test_a_key_is_what_no_two_rows_share_at_any_moment(db: Database) -> None:
    """P-S08: an index over some columns is enough, unless it is partial, deferrable, over expressions or over nullable columns."""
    db.execute("create table t (a int not null, b int not null, c int)")
    with db.connect() as conn:
        table = oid(db, "t")
        for index, expected in {
            "create unique index i on t (a)": True,
            "create unique index i on t (b, a) include (c)": True,
            "create index i on t (a)": False,
            "create unique index i on t (a, c)": False,
            "create unique index i on t (a) where b > 0": False,
            "create unique index i on t (abs(a))": False,
            "alter table t add constraint i unique (a) deferrable": False,
        }.items():
            assert not has_key(conn, table, ("a", "b"))
            db.execute(index)
            assert has_key(conn, table, ("a", "b")) == expected, index
            assert not has_key(conn, table, ("c",))
            db.execute("alter table t drop constraint if exists i; drop index if exists i")
        db.execute("create unique index i on t (a); alter table t alter a drop not null")
        assert not has_key(conn, table, ("a", "b"))
