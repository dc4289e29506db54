"""Calls change the desired state once, by name, and notify the service."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from aqueduck.model.errors import (
    AqueduckError,
    ConfigError,
    NoKeyError,
    SourceQueryError,
    TableMissingError,
    TableRecreatedError,
)
from aqueduck.model.lifecycle import Lifecycle, SyncState, fail
from aqueduck.model.modes import TableMode
from aqueduck.model.schema import TableName, parse_table_name
from aqueduck.postgres.catalog.tables import describe_table
from aqueduck.postgres.registry.registry import (
    call,
    delete_removed,
    install,
    listen,
    read_desired,
    reconcile_file,
    rows_of,
    wait_for_notice,
    write_observed,
)
from aqueduck.postgres.session.connection import connect
from tests.fix_postgres import Database
from tests.postgres.registry.wishes import config_of, group, refused, synced, table

Connection = psycopg.Connection[Any]


def test_adding_a_table_is_one_call(conn: Connection) -> None:
    """P-S01: the group, the target and everything else have defaults."""
    assert call(conn, "add_table", source="a") == table(conn).id
    wanted = group(conn)
    assert (wanted.slot_name, wanted.publication) == ("aqueduck_default", "aqueduck_default")
    assert (wanted.capture, wanted.enabled, wanted.removed, wanted.lake) == ("auto", True, False, None)
    [row] = wanted.tables
    assert (row.source, row.target) == (TableName("public", "a"), TableName("main", "a"))
    assert (row.mode, row.copy, row.enabled, row.observed.state) == (
        "upsert",
        True,
        True,
        SyncState.PENDING,
    )
    assert row.observed.source_oid == describe_table(conn, "a").oid


def test_sources_may_share_a_target_that_distinguishes_them(any_db: Database, conn: Connection) -> None:
    """P-S15: the same mode and column, another value; the value is the source's name by default, and stays with the mapping."""
    any_db.execute("create table second (id int primary key); create table third (id int primary key)")
    shared = {"target": "both", "mode": "history", "source_column": "src"}
    call(conn, "add_table", source="a", **shared)
    call(conn, "add_table", source="second", **shared, source_value="see")
    call(conn, "add_table", source="second", **shared, source_value="see")  # the same again
    modes = {str(row.source): row.table_mode for row in group(conn).tables}
    assert modes["public.a"] == TableMode("history", "src", "public.a")
    assert modes["public.second"] == TableMode("history", "src", "see")
    for other in (
        {"source_value": "public.a"},
        {"source_value": "see"},
        {"source_column": "other"},
        {"mode": "upsert"},
        {"source_column": None},
    ):
        assert "already filled" in str(refused(conn, "add_table", **{"source": "third", **shared, **other}))
    refused(conn, "add_table", source="third", source_value="x")
    refused(conn, "add_table", source="third", mode="nonsense")
    for function in ("tables", "status"):
        assert [(r["source_column"], r["source_value"]) for r in rows_of(conn, function)] == [
            ("src", "public.a"),
            ("src", "see"),
        ]


def test_adding_the_same_again_changes_nothing(any_db: Database, conn: Connection) -> None:
    """P-S01: a script can be run twice."""
    arguments = {"source": "a", "target": "Shop.A", "mode": "append", "copy": False}
    first = call(conn, "add_table", **arguments)
    listen(conn)
    before = any_db.query("select ctid, * from aqueduck.table_mappings")
    assert call(conn, "add_table", **arguments) == first
    assert call(conn, "add_table", source="public.A", mode="append") == first
    assert any_db.query("select ctid, * from aqueduck.table_mappings") == before
    assert not wait_for_notice(conn, 0.1)


@pytest.mark.parametrize(
    ("difference", "fix"),
    [
        ({"target": "other"}, "remove_table('public.a')"),
        ({"mode": "append"}, "remove_table('public.a')"),
        ({"group_name": "g"}, "move_table('public.a', 'g')"),
    ],
)
def test_adding_it_differently_is_refused(conn: Connection, difference: dict[str, str], fix: str) -> None:
    """A second call never changes silently what the first one wanted."""
    call(conn, "create_group", name="g")
    call(conn, "add_table", source="a")
    error = refused(conn, "add_table", source="a", **difference)
    assert isinstance(error, ConfigError)
    assert "already synced" in error.message
    assert fix in str(error.hint)


def test_a_missing_table_does_not_exist(any_db: Database, conn: Connection) -> None:
    """P-S02: the message says so, and nothing is left behind."""
    error = refused(conn, "add_table", source="nowhere.orders")
    assert isinstance(error, TableMissingError)
    assert f"the table nowhere.orders does not exist in the database {any_db.name}" in error.message
    assert read_desired(conn) == ()


SHAPES = [
    "create table t (id int primary key)",
    "create table t (id int)",
    "create table t (id int unique)",
    "create table t (id int not null unique)",
    "create table t (id int not null unique); alter table t replica identity using index t_id_key",
    "create table t (id int primary key, n int not null unique); "
    "alter table t replica identity using index t_n_key",
    "create table t (id int); alter table t replica identity full",
    "create table t (id int unique); alter table t replica identity full",
    "create table t (id int not null unique); alter table t replica identity full",
    "create table t (id int primary key deferrable)",
    "create table t (id int primary key deferrable); alter table t replica identity full",
    "create table t (id int primary key) partition by range (id)",
    "create unlogged table t (id int primary key)",
    "create view t as select 1 as id",
    "create materialized view t as select 1 as id",
    "create sequence t",
]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_table_is_refused_if_and_only_if_the_service_would_refuse_it(db: Database, shape: str) -> None:
    """P-S02: the call itself reports a missing key, not the table's state later."""
    db.execute(shape)
    with connect(db.dsn) as conn:
        install(conn)
        try:
            describe_table(conn, "t")
        except NoKeyError:
            error = refused(conn, "add_table", source="t")
            assert isinstance(error, NoKeyError)
            assert "mode => 'append'" in str(error.hint)
            assert call(conn, "add_table", source="t", mode="append")
        except AqueduckError:
            refused(conn, "add_table", source="t")
            refused(conn, "add_table", source="t", mode="append")
        else:
            assert call(conn, "add_table", source="t")


@pytest.mark.parametrize("source", ["aqueduck.settings", "pg_catalog.pg_class"])
def test_system_tables_are_refused(conn: Connection, source: str) -> None:
    """Syncing the registry itself would never come to rest."""
    assert "of the system" in refused(conn, "add_table", source=source).message


def test_a_target_takes_one_table_only(conn: Connection) -> None:
    """Two tables would overwrite each other; DuckDB's names ignore case."""
    call(conn, "add_table", source="a", target="main.Orders")
    assert "already filled from public.a" in refused(conn, "add_table", source="b", target="orders").message


@pytest.mark.parametrize(
    "written",
    ["a", "A", "x.a", "X.A", '"A"', '"X y"."A ""q"', ' x . "a.b" ', '"x"."é"', "_a1$", "x.y.z", "", ".", "a.",
     ".a", "1a", "a b", '"a', "a-b", '""', "a;drop", None],
)  # fmt: skip
def test_names_are_read_in_sql_as_in_the_file(conn: Connection, written: str | None) -> None:
    """What works in YAML works in psql."""
    for default, fold in (("public", True), ("main", False)):
        query = "select aqueduck._parse_name(%s, %s, %s)"
        try:
            name = parse_table_name(written or "", default_schema=default, fold_case=fold)
        except ValueError:
            with pytest.raises(psycopg.Error, match="is not a table name"):
                conn.execute(query, (written, default, fold))
        else:
            assert conn.execute(query, (written, default, fold)).fetchone() == ([name.schema, name.name],)


def test_odd_names_go_through_every_function(any_db: Database, conn: Connection) -> None:
    """What `status()` shows can be given back to the functions."""
    any_db.execute("""create schema "S x"; create table "S x"."T ""q'" (id int primary key)""")
    call(conn, "add_table", source="""\"S x"."T ""q'\"""")
    [row] = rows_of(conn, "status")
    for function in ("resync_table", "disable_table", "enable_table", "remove_table"):
        call(conn, function, source=row["source"])
    assert rows_of(conn, "status") == []


def test_a_renamed_table_is_found_by_its_new_name(any_db: Database, conn: Connection) -> None:
    """A table is its OID; a new table under the old name is another one."""
    added = call(conn, "add_table", source="a")
    any_db.execute("alter table a rename to c; create table a (id int primary key)")
    assert [row["source"] for row in rows_of(conn, "status")] == ["public.c"]
    assert table(conn, "c").id == added
    assert "is not synced" in refused(conn, "resync_table", source="a").message
    assert call(conn, "add_table", source="c") == added
    assert call(conn, "add_table", source="a", target="a2") != added


def test_a_table_that_was_created_again_is_copied_again(any_db: Database, conn: Connection) -> None:
    """Its rows are others: the mapping follows the name, and asks for a new copy."""
    added = call(conn, "add_table", source="a")
    any_db.execute("drop table a")
    assert [row["source"] for row in rows_of(conn, "status")] == ["public.a"]
    any_db.execute("create table a (id int primary key)")
    assert call(conn, "add_table", source="a") == added
    assert table(conn).resync_wanted
    assert table(conn).observed.source_oid == describe_table(conn, "a").oid


def test_adding_a_table_that_was_created_again_is_consent(any_db: Database, conn: Connection) -> None:
    """The file, read at each start, is no consent; adding the table by SQL is, and copies it even if the service knows it."""
    arguments = {"source": "a", "group_name": "g"}
    config = config_of({"name": "g", "names": ["a"]})
    reconcile_file(conn, config)
    any_db.execute("drop table a; create table a (id int primary key)")
    assert reconcile_file(conn, config)
    row = table(conn)
    assert row.observed.source_oid == describe_table(conn, "a").oid
    assert not row.resync_wanted
    call(conn, "add_table", **arguments)
    assert not table(conn).resync_wanted, "it is not known yet that the lake has other rows"
    error = TableRecreatedError("it is another one")
    failed = fail(Lifecycle(SyncState.PENDING, datetime.now(UTC)), error, datetime.now(UTC))
    write_observed(conn, [row.observed.after(failed)])
    reconcile_file(conn, config)
    assert not table(conn).resync_wanted
    call(conn, "add_table", **arguments)
    assert table(conn).resync_wanted


def test_a_removed_table_waits_for_the_service(conn: Connection) -> None:
    """The row stays until publication and lake are in order; the name is free at once."""
    old = call(conn, "add_table", source="a")
    call(conn, "remove_table", source="a", drop_target=True)
    assert synced(conn) == set()
    new = call(conn, "add_table", source="a")
    removed, added = group(conn).tables
    assert (removed.id, removed.removed, removed.drop_target) == (old, True, True)
    assert (added.id, added.removed) == (new, False)
    delete_removed(conn, tables=[old, new])
    assert [row.id for row in group(conn).tables] == [new]


def test_a_move_names_both_groups_until_it_is_done(conn: Connection) -> None:
    """The service learns where the table is and where it should be."""
    call(conn, "add_table", source="a")
    here = group(conn)
    write_observed(conn, [replace(table(conn).observed, active_group_id=here.id)])
    there = call(conn, "create_group", name="there")
    call(conn, "move_table", source="a", group_name="there")
    call(conn, "move_table", source="a", group_name="there")
    [row] = group(conn, "there").tables
    assert (row.observed.active_group_id, there) == (here.id, group(conn, "there").id)
    assert group(conn).tables == ()


def test_each_request_is_carried_out_once(conn: Connection) -> None:
    """P-S22: a resync that is asked for while another one runs is not lost."""
    call(conn, "add_table", source="a")
    assert not table(conn).resync_wanted
    call(conn, "resync_table", source="a")
    begun = table(conn)
    call(conn, "resync_table", source="a")
    write_observed(conn, [replace(begun.observed, resync_done=begun.resync_requested)])
    assert table(conn).resync_wanted
    write_observed(conn, [replace(begun.observed, resync_done=table(conn).resync_requested)])
    assert not table(conn).resync_wanted
    call(conn, "retry_table", source="a")
    assert table(conn).retry_wanted


def test_tables_and_groups_are_switched(conn: Connection) -> None:
    """P-S19: a disabled group disables its tables in the eyes of people."""
    call(conn, "add_table", source="a")
    call(conn, "disable_table", source="a")
    assert (group(conn).enabled, table(conn).enabled) == (True, False)
    call(conn, "enable_table", source="a")
    call(conn, "disable_group", name="default")
    assert (group(conn).enabled, table(conn).enabled) == (False, True)
    assert [row["enabled"] for row in rows_of(conn, "status")] == [False]
    call(conn, "enable_group", name="default")
    assert [row["enabled"] for row in rows_of(conn, "status")] == [True]


def test_a_group_with_tables_is_not_dropped_by_mistake(conn: Connection) -> None:
    """The tables go only where the call says so, and the lake keeps them."""
    call(conn, "add_table", source="a")
    assert "has 1 tables" in refused(conn, "drop_group", name="default").message
    call(conn, "drop_group", name="default", with_tables=True)
    dropped = group(conn)
    assert dropped.removed
    assert [(row.removed, row.drop_target) for row in dropped.tables] == [(True, False)]
    assert rows_of(conn, "groups") == []
    assert delete_removed(conn, groups=[dropped.id]) == {"default"}
    assert read_desired(conn) == ()


def test_a_dropped_group_can_be_wanted_back(conn: Connection) -> None:
    """A dropped group that is created again keeps its row and settings, and is not deleted with the earlier request."""
    first = call(conn, "create_group", name="g", slot_name="mine")
    call(conn, "drop_group", name="g")
    assert "does not exist" in refused(conn, "disable_group", name="g").message
    assert call(conn, "create_group", name="g") == first
    assert (group(conn, "g").slot_name, group(conn, "g").removed) == ("mine", False)
    assert delete_removed(conn, groups=[first]) == set()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"name": "Shop"}, "group name 'Shop'"),
        ({"name": "x" * 41}, "group name"),
        ({"name": None}, "group name NULL"),
        ({"name": "h", "slot_name": "a-b"}, "slot_name 'a-b'"),
        ({"name": "h", "publication": ""}, "publication ''"),
        ({"name": "h", "capture": "guess"}, "capture 'guess'"),
        ({"name": "h", "slot_name": "aqueduck_g"}, "slot aqueduck_g belongs to the group g"),
        ({"name": "h", "publication": "aqueduck_g"}, "publication aqueduck_g belongs to the group g"),
        ({"name": "g", "slot_name": "other"}, "exists already"),
    ],
)
def test_bad_properties_of_a_group_are_refused_by_name(
    conn: Connection, arguments: dict[str, str], problem: str
) -> None:
    """P-S26: the message says which one."""
    made = call(conn, "create_group", name="g")
    assert call(conn, "create_group", name="g") == made
    assert problem in refused(conn, "create_group", **arguments).message


def test_what_does_not_exist_is_named(conn: Connection) -> None:
    """Every function about a table or a group says which one it does not know."""
    for function in ("remove_table", "resync_table", "retry_table", "enable_table", "disable_table"):
        assert refused(conn, function, source="a").message == "public.a is not synced"
    for function in ("drop_group", "enable_group", "disable_group", "release_group"):
        assert refused(conn, function, name="g").message == "the group g does not exist"
    assert "group g does not exist" in refused(conn, "add_table", source="a", group_name="g").message


def test_without_the_registry_a_call_says_how_to_get_it(db: Database) -> None:
    """An error of a missing schema is no error about a table of the user."""
    with connect(db.dsn) as conn:
        error = refused(conn, "add_table", source="a")
    assert isinstance(error, SourceQueryError)
    assert error.hint == "run: aqueduck init"


def test_a_change_is_heard_at_once(any_db: Database, conn: Connection) -> None:
    """P-S25: the service does not wait for its next look, here a minute away."""
    listen(conn)
    heard: list[bool] = []
    waiting = threading.Thread(target=lambda: heard.append(wait_for_notice(conn, 60)))
    waiting.start()
    any_db.execute("select aqueduck.add_table('a')")
    waiting.join(30)
    assert heard == [True]


def test_a_notice_says_what_changed(any_db: Database, conn: Connection) -> None:
    """Other programs can follow along; one transaction is heard once by the service."""
    listen(conn)
    any_db.execute("begin; select aqueduck.add_table('a'); select aqueduck.resync_table('a'); commit")
    notices = [json.loads(notice.payload) for notice in conn.notifies(timeout=5, stop_after=3)]
    assert notices == [
        {"what": "create_group", "group": "default"},
        {"what": "add_table", "group": "default", "source": "public.a"},
        {"what": "resync_table", "source": "a"},
    ]
    any_db.execute("begin; select aqueduck.disable_table('a'); select aqueduck.enable_table('a'); commit")
    assert wait_for_notice(conn, 5)
    assert not wait_for_notice(conn, 0.1)


def test_what_is_rolled_back_is_not_heard(any_db: Database, conn: Connection) -> None:
    """A change is part of the caller's transaction."""
    listen(conn)
    any_db.execute("begin; select aqueduck.add_table('a'); rollback")
    assert not wait_for_notice(conn, 0.2)
    assert read_desired(conn) == ()
