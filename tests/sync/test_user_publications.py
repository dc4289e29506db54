"""Publications that people made: column lists, row filters, whole schemas; the copy equals what they send."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aqueduck.config.events import PostgresCdcConfig
from aqueduck.events.prepare import prepare_source
from aqueduck.model.errors import AqueduckError, NoKeyError, PublicationError
from aqueduck.postgres.capture.cdc_prepare import prepare_cdc
from aqueduck.postgres.catalog.tables import describe_table
from aqueduck.postgres.publications.published import refuse_narrowed
from aqueduck.sync.check import run_checks
from tests.fix_postgres import Database
from tests.whole_group import WholeGroup, whole_group

TASKS = [True, pytest.param(False, marks=pytest.mark.slow)]  # as tasks fold, and as the driver does
GROUP = {"publication": "theirs", "publication_by": "user"}
TABLE = """
    create table t (id int primary key, a text, b int, c text);
    insert into t select g, 'a' || g, g, 'c' || g from generate_series(1, 6) g
"""


def check(group: WholeGroup, rows: int) -> None:
    assert [(r.verdict, r.note, r.lake_rows) for r in group.verify()] == [("identical", None, rows)]


@pytest.mark.parametrize("tasks", TASKS)
def test_lists_and_filters_of_a_publication_apply_to_the_copy(
    any_db: Database, tmp_path: Path, tasks: bool
) -> None:
    """P-S12: the lake has the listed columns of the rows that pass, even when rows move in and out; the publication stays."""
    db = any_db
    db.execute(TABLE)
    db.execute("create publication theirs for table t (id, b, c) where (id > 3)")
    with whole_group(db, tmp_path, {"t": {}}, group=GROUP) as group:
        assert group.read("from lake.main.t order by id") == [(i, i, f"c{i}") for i in (4, 5, 6)]
        db.execute(
            "update t set id = 1 + 100 where id = 1; update t set id = -4 where id = 4; insert into t values (7), (0)"
        )
        db.execute("update t set b = 0 where id in (2, 5); delete from t where id in (3, 6)")
        group.apply(tasks=tasks)
        want = db.query("select id, b, c from t where id > 3 order by id")
        assert group.read("from lake.main.t order by id") == want
        check(group, len(want))
        group.restart({"t": {}})
        assert group.copies == 1
        assert [r for r in run_checks(group.config) if not r.ok] == []
    assert db.query(
        "select attnames::text[], rowfilter from pg_publication_tables where pubname = 'theirs'"
    ) == [(["id", "b", "c"], "(id > 3)")]


@pytest.mark.parametrize(
    "what", ["table t (id, b, c)", "table t where (id > 3)", "table t with (publish = 'insert, update')"]
)
def test_test_decoding_does_not_send_what_a_publication_keeps_back(
    db: Database, tmp_path: Path, what: str
) -> None:
    """P-E09: only pgoutput keeps to lists and filters; with the other plugin such a publication is refused, by all flows."""
    db.execute(TABLE)
    db.execute(f"create publication theirs for {what}")
    with db.connect() as conn:
        refuse_narrowed(conn, "theirs", "pgoutput")
        with pytest.raises(PublicationError, match="which test_decoding does not apply"):
            refuse_narrowed(conn, "theirs", "test_decoding")
        with pytest.raises(PublicationError, match="not every kind of change"):
            prepare_cdc(
                db.dsn, slot="s", publication="theirs", tables=(), create=True, plugin="test_decoding"
            )
    source = PostgresCdcConfig(
        connection_url=db.dsn, slot_name="s", publication_name="theirs", plugin="test_decoding"
    )
    with pytest.raises(PublicationError, match="does not apply"):
        prepare_source(source, db.dsn, None, tmp_path / "confirmed")
    with (
        pytest.raises(PublicationError),
        whole_group(db, tmp_path, {"t": {}}, group={**GROUP, "plugin": "test_decoding"}),
    ):
        pass
    assert db.query("select from pg_replication_slots where database = %s", [db.name]) == []


@pytest.mark.slow
def test_a_plain_publication_of_a_user_works_with_test_decoding(system_db: Database, tmp_path: Path) -> None:
    """P-E09: `publication_by: user` and the plugin go together where tables are published whole."""
    db = system_db
    db.execute(TABLE)
    db.execute("create table other (id int primary key); create publication theirs for table t")
    with whole_group(db, tmp_path, {"t": {}}, group={**GROUP, "plugin": "test_decoding"}) as group:
        db.execute(
            "update t set a = 'it''s' where id = 1; delete from t where id = 2; insert into other values (1)"
        )
        db.execute("update t set id = 20, c = null where id = 3; insert into t values (8, null, 8, 'x')")
        group.apply()
        assert group.read("from lake.main.t order by id") == db.query("select * from t order by id")


@pytest.mark.slow
def test_our_options_come_on_top(db: Database, tmp_path: Path) -> None:
    """P-S12: both filters hold, and options name what the publication sends."""
    db.execute(TABLE)
    db.execute("create publication theirs for table t (id, b, c) where (id > 2)")
    options = {"exclude": ["c"], "rename": {"b": "n"}, "where": "c <> 'c5'"}
    with whole_group(db, tmp_path, {"t": options}, group=GROUP) as group:
        db.execute(
            "update t set c = 'c5' where id = 6; update t set c = 'x' where id in (1, 5); update t set id = 20 where id = 2"
        )
        group.apply()
        assert group.columns("t") == ["id", "n"]
        assert group.read("from lake.main.t order by id") == [(3, 3), (4, 4), (5, 5), (20, 2)]
        check(group, 4)
        with pytest.raises(AqueduckError, match="has no column a"):
            group.restart({"t": {"exclude": ["a"]}})


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=pytest.mark.slow) for what in ("all tables", "tables in schema public")]
)
def test_publications_of_everything_can_be_used(any_db: Database, tmp_path: Path, what: str) -> None:
    """P-S14: only tables of the configuration are followed; partitions come in the name of their root."""
    db = any_db
    db.execute(TABLE)
    db.execute(
        "create table other (id int primary key); create table p (id int, k int, primary key (id, k)) partition by list (k);"
        " create table p1 partition of p for values in (1); create table p2 partition of p for values in (2);"
        " insert into p values (1, 1), (2, 2)"
    )
    db.execute(f"create publication theirs for {what} with (publish_via_partition_root = true)")
    with whole_group(db, tmp_path, {"t": {}, "p": {}}, group=GROUP) as group:
        db.execute(
            "insert into other values (1); update t set b = 0; insert into p values (3, 1); update p set k = 2 where id = 1"
        )
        group.apply()
        assert group.read("from lake.main.p order by id") == [(1, 2), (2, 2), (3, 1)]
        assert [r.verdict for r in group.verify()] == ["identical", "identical"]
        assert group.read("select count(*) from (show all tables) where name = 'other'") == [(0,)]


@pytest.mark.parametrize("capture", ["stream", "poll"])
def test_a_table_is_added_that_the_stream_has_described_before(
    db: Database, tmp_path: Path, capture: str
) -> None:
    """P-S12: the server keeps sending it without a new description; changes after its copy are applied."""
    db.execute(TABLE + "; create table late (id int primary key, v text)")
    db.execute("create publication theirs for all tables")
    with whole_group(db, tmp_path, {"t": {}}, group={**GROUP, "capture": capture}) as group:
        for statement in ("insert into late values (1, 'before')", "update late set v = v || '?'"):
            db.execute(statement)
            group.apply()
        group.add("late")
        db.execute("insert into late values (2, 'after'); update late set v = v || '!' where id = 1")
        group.apply()
        assert group.read("from lake.main.late order by id") == [(1, "before?!"), (2, "after")]


UNFIT = [
    ("select 1", "does not exist", "create publication"),
    ("create publication theirs for table other", "does not publish public.t", "add table"),
    (
        "create publication theirs for table t with (publish = 'insert')",
        "every kind of change",
        "set (publish",
    ),
    ("create publication theirs for table p", "names of its partitions", "publish_via_partition_root"),
]


def test_a_publication_that_cannot_do_is_refused_with_the_statement_that_repairs_it(
    db: Database, tmp_path: Path
) -> None:
    """P-S02: nothing is followed half; the publication is not touched."""
    db.execute(TABLE + "; create table other (id int primary key)")
    db.execute(
        "create table p (id int primary key) partition by list (id);"
        " create table p1 partition of p for values in (1)"
    )
    for statement, says, fix in UNFIT:
        db.execute(statement)
        with pytest.raises(PublicationError, match=says) as caught:
            WholeGroup(db, tmp_path, {"p" if "table p" in statement else "t": {}}, group=GROUP)
        assert fix in str(caught.value)
        db.execute("drop publication if exists theirs")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("table t (id, a)", "table t (id, a, b)"),
        ("table t (id, a, b)", "table t (id, b)"),
        ("table t where (id > 3)", "table t where (id > 4)"),
        ("table t where (id > 3)", "table t"),
    ],
)
@pytest.mark.slow
@pytest.mark.parametrize("running", [True, False])
def test_another_list_or_filter_is_noticed(
    db: Database, tmp_path: Path, before: str, after: str, running: bool
) -> None:
    """P-S12: with the next change of the table, or at the next start; the lake then has what the publication sends."""
    db.execute(TABLE)
    db.execute(f"create publication theirs for {before}")
    with whole_group(db, tmp_path, {"t": {}}, group=GROUP) as group:
        db.execute("update t set a = a || 'x'")
        group.apply()
        if not running:
            group.capture.stop()
        db.execute(f"alter publication theirs set {after}")
        if not running:
            group.restart({"t": {}})
        db.execute("update t set a = a || 'y'")
        group.apply()
        [row] = db.query(
            "select attnames::text[], coalesce(rowfilter, 'true') from pg_publication_tables where pubname = 'theirs'"
        )
        want = db.query(f"select {', '.join(row[0])} from t where {row[1]} order by id")
        assert group.read(f"select {', '.join(row[0])} from lake.main.t order by id") == want
        assert sorted(group.columns("t")) == sorted(row[0])
        check(group, len(want))


@pytest.mark.slow
@pytest.mark.parametrize("tasks", TASKS)
def test_a_row_that_a_publication_lets_in_without_its_large_value_is_copied(
    any_db: Database, tmp_path: Path, tasks: bool
) -> None:
    """P-S10: PostgreSQL sends an insert that lacks the value; the lake never shows NULL in its place."""
    db = any_db
    db.execute(
        "create table t (id int primary key, body text, n int); alter table t alter body set storage external"
    )
    db.execute("insert into t select g, repeat(md5(g::text), 400), 0 from generate_series(1, 3) g")
    db.execute("create publication theirs for table t where (id > 1)")
    with whole_group(db, tmp_path, {"t": {}}, group=GROUP) as group:
        db.execute("update t set n = 1 where id = 3")
        group.apply(tasks=tasks)
        assert group.copies == 1
        db.execute("update t set id = 10 where id = 1")
        group.apply(tasks=tasks)
        want = db.query("select id, md5(body) from t order by id")
        assert group.read("select id, md5(body) from lake.main.t order by id") == want


# -- Generated and identity columns


def table_of_every_kind(db: Database) -> None:
    virtual = ", twice int generated always as (n * 2) virtual" if db.server.version >= 18 else ""
    db.execute(
        "create table t (id bigint generated always as identity primary key, other int generated by default as identity,"
        f" total int generated always as (n + 1) stored, n int{virtual})"
    )
    db.execute("insert into t (n) values (1), (2), (3)")


@pytest.mark.parametrize("tasks", TASKS)
def test_generated_columns_are_not_in_the_lake_and_identity_columns_are(
    any_db: Database, tmp_path: Path, tasks: bool
) -> None:
    """P-S12: by copy and by stream the same, on every server."""
    db = any_db
    table_of_every_kind(db)
    with whole_group(db, tmp_path, {"t": {}}) as group:
        db.execute(
            "insert into t (n, other) values (4, 40); update t set n = 9 where id = 2; delete from t where id = 1"
        )
        db.execute(
            "alter table t add late int generated always as (n * 3) stored; insert into t (n) values (5)"
        )
        group.apply(tasks=tasks)
        assert group.columns("t") == ["id", "other", "n"]
        assert group.read("from lake.main.t order by id") == db.query(
            "select id, other, n from t order by id"
        )
        check(group, 4)
        assert group.copies == 1


@pytest.mark.slow
def test_stored_generated_columns_come_if_a_publication_sends_them(db: Database, tmp_path: Path) -> None:
    """P-S12: PostgreSQL 18 can; the copy computes what the stream brings. Virtual columns are never sent."""
    table_of_every_kind(db)
    db.execute("create publication theirs for table t with (publish_generated_columns = stored)")
    with whole_group(db, tmp_path, {"t": {"where": "total > 2"}}, group=GROUP) as group:
        db.execute(
            "insert into t (n) values (4); update t set n = 0 where id = 2; update t set n = 8 where id = 1"
        )
        group.apply()
        assert group.columns("t") == ["id", "other", "total", "n"]
        want = db.query("select id, other, total, n from t where total > 2 order by id")
        assert group.read("from lake.main.t order by id") == want
        check(group, len(want))


@pytest.mark.slow
def test_a_listed_generated_column_comes_too(db: Database, tmp_path: Path) -> None:
    """P-S12: a column list may name it, for any default of the publication."""
    table_of_every_kind(db)
    db.execute("create publication theirs for table t (id, total)")
    with whole_group(db, tmp_path, {"t": {}}, group=GROUP) as group:
        db.execute("insert into t (n) values (4); update t set n = 0 where id = 2")
        group.apply()
        assert group.read("from lake.main.t order by id") == db.query("select id, total from t order by id")


def test_a_key_with_a_generated_column_is_refused_with_a_way_out(any_db: Database) -> None:
    """P-S02: the stream would lack the columns that match rows."""
    any_db.execute("create table t (n int, g int generated always as (n + 1) stored primary key)")
    with any_db.connect() as conn, pytest.raises(NoKeyError, match="generated column") as caught:
        describe_table(conn, "t")
    assert caught.value.hint


@pytest.mark.slow
def test_naming_a_generated_column_says_that_it_is_not_there(db: Database, tmp_path: Path) -> None:
    """P-S02: options name columns that are sent."""
    table_of_every_kind(db)
    options: dict[str, Any] = {"t": {"columns": ["id", "total"]}}
    with pytest.raises(AqueduckError, match="has no column total"):
        WholeGroup(db, tmp_path, options)
