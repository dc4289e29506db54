"""Chosen columns, names, masks and row filters: copy and stream both fill the lake as configured."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from aqueduck.lake.fold.row_filter import compile_filter
from aqueduck.model.columns.projection import Projection
from aqueduck.model.errors import ConfigError
from aqueduck.model.schema import Column, TableSchema
from tests.fix_postgres import Database
from tests.whole_group import WholeGroup, whole_group

SALT = "a long random text"
TASKS = [True, pytest.param(False, marks=pytest.mark.slow)]  # as tasks fold, and as the driver does


@pytest.fixture(autouse=True)
def salt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_SALT", SALT)


def hashed(text: str) -> str:
    """Independent of DuckDB."""
    return hashlib.sha256((SALT + text).encode()).hexdigest()


PEOPLE = """
    create table people (id int primary key, name text, email text, phone text, age int, country text, notes text);
    insert into people values (1, 'Ann', 'ann@x', '1', 30, 'DE', 'n1'), (2, 'Bob', null, '2', 40, 'FR', 'n2'),
                              (3, 'Cem', 'cem@x', null, null, 'DE', null)
"""
OPTIONS = {
    "exclude": ["notes"],
    "rename": {"name": "full_name"},
    "mask": {"email": "hash", "phone": {"constant": "none"}, "age": "redact"},
    "where": "country = 'DE'",
}


@pytest.mark.parametrize("tasks", TASKS)
def test_columns_masks_and_filters_apply_to_copy_and_stream_alike(
    db: Database, tmp_path: Path, tasks: bool
) -> None:
    """P-S12: the lake has the chosen columns under their names, masks in place of values, and only rows that pass."""
    db.execute(PEOPLE)
    with whole_group(db, tmp_path, {"people": OPTIONS}, salt_env="TEST_SALT") as group:
        assert group.columns("people") == ["id", "full_name", "email", "phone", "age", "country"]
        rows = "from lake.main.people order by id"
        assert group.read(rows) == [
            (1, "Ann", hashed("ann@x"), "none", None, "DE"),
            (3, "Cem", hashed("cem@x"), "none", None, "DE"),
        ]
        db.execute("""
            insert into people values (4, 'Dan', 'dan@x', '4', 4, 'DE', 'n'), (5, 'Eve', 'eve@x', '5', 5, 'FR', 'n');
            update people set country = 'DE' where id = 2;
            update people set country = null where id = 1;
            update people set email = 'new@x', age = 7 where id = 3;
            update people set id = 50, country = 'DE' where id = 5;
            delete from people where id = 4;
        """)
        group.apply(tasks=tasks)
        assert group.read(rows) == [
            (2, "Bob", None, "none", None, "DE"),
            (3, "Cem", hashed("new@x"), "none", None, "DE"),
            (50, "Eve", hashed("eve@x"), "none", None, "DE"),
        ]
        [result] = group.verify()
        assert (result.verdict, result.source_rows, result.lake_rows) == ("identical", 3, 3)
        group.lake.execute("update lake.main.people set full_name = 'x' where id = 3")
        [result] = group.verify()
        assert [d["key"] for d in result.differences] == [{"id": "3"}]


def refusal(db: Database, directory: Path, options: dict[str, Any], **keywords: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        WholeGroup(db, directory, {"people": options}, **keywords)
    return caught.value


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"columns": ["id", "nome"]}, "has no column nome"),
    ({"exclude": ["id"]}, "needs its key column id"),
    ({"columns": ["name"]}, "needs its key column id"),
    ({"rename": {"name": "EMAIL"}}, "both as"),
    ({"mask": {"id": "redact"}}, "cannot be a constant"),
    ({"mask": {"id": {"constant": "1"}}}, "cannot be a constant"),
    ({"mask": {"age": {"constant": "old"}}}, "is no INTEGER"),
    ({"mask": {"email": "hash"}}, "needs a salt"),
    ({"where": "age"}, "is INTEGER, not true or false"),
    ({"where": "nome = 'x'"}, "reads the column nome"),
    ({"where": "age > 1) group by (age"}, "more than one expression"),
    ({"where": "age in (select 1)"}, "has a subquery"),
    ({"where": "age > 10 * random()"}, "calls random"),
    ({"where": "now() > '2020-01-01'"}, "calls now"),
    ({"where": "ago(interval 1 day) > timestamp '2020-01-01'"}, "calls ago"),
    ({"where": "pg_sleep(1) is null"}, "calls pg_sleep"),
    ({"where": "age(timestamp '2020-01-01') > interval 1 day"}, "calls age"),
    ({"where": "current_localtime() > '12:00'"}, "calls current_localtime"),
    ({"where": "current_user() = 'duckdb'"}, "calls current_user"),
    ({"where": "current_setting('TimeZone') = name"}, "calls current_setting"),
    ({"where": "age >"}, "cannot be read"),
    ({"where": "max(age) > 1"}, "cannot be used"),
    ({"where": "name > 1 order by 1"}, "cannot be read"),
]


def test_options_that_cannot_work_are_refused_before_anything_is_made(db: Database, tmp_path: Path) -> None:
    """P-S02: each names the table and what is wrong, with a way out; neither slot nor publication is left behind."""
    db.execute(PEOPLE)
    for options, says in MISTAKES:
        error = refusal(db, tmp_path, options)
        assert says in str(error)
        assert "people" in str(error)
        assert error.hint
    assert db.query("select 1 from pg_replication_slots where database = current_database()") == []
    assert db.query("select 1 from pg_publication") == []


def test_a_row_filter_may_call_macros_that_are_fixed() -> None:
    """DuckDB writes many everyday functions as macros, and does not say whether their results change."""
    column = Column("name", 25, -1)
    table = TableSchema(1, "public", "people", (column,), (), "d")
    for where in (
        "nullif(name, '') is not null",
        "split_part(name, ' ', 1) = 'Bob'",
        "fdiv(length(name), 2) > 1",
    ):
        assert compile_filter(table, Projection(where=where)).condition


@pytest.mark.slow
def test_a_missing_salt_is_named_and_never_shown(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-S26: the variable's name is in the error; its value is in no file of ours, the lake's books included."""
    db.execute(PEOPLE)
    monkeypatch.delenv("TEST_SALT")
    options = {"mask": {"email": "hash"}}
    assert "TEST_SALT" in str(refusal(db, tmp_path, options, salt_env="TEST_SALT"))
    monkeypatch.setenv("TEST_SALT", SALT)
    with whole_group(db, tmp_path, {"people": options}, salt_env="TEST_SALT") as group:
        db.execute("update people set email = 'x'")
        group.apply(tasks=True)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert written
    assert [path for path in written if SALT.encode() in path.read_bytes()] == []


def test_values_that_are_left_out_are_in_no_file(db: Database, tmp_path: Path) -> None:
    """P-S12: excluded, redacted and constant cells reach neither the stage nor the lake, by copy and by stream."""
    db.execute("create table t (id int primary key, a text, b text, c text, d text)")
    db.execute("insert into t values (1, 'seen', 'SECRET', 'SECRET', 'SECRET')")
    options = {"exclude": ["b"], "mask": {"c": "redact", "d": {"constant": "-"}}}
    with whole_group(db, tmp_path, {"t": options}) as group:
        db.execute("insert into t values (2, 'seen', 'SECRET', 'SECRET', 'SECRET')")
        db.execute("update t set b = b || 'SECRET' where id = 1")
        stage = group.runner.directory / "stage"
        release, group.stage.release = group.stage.release, lambda position: None  # type: ignore[assignment,method-assign]
        group.apply(tasks=True)
        assert any(b"seen" in path.read_bytes() for path in stage.rglob("*.arrow"))
        assert [p for p in tmp_path.rglob("*") if p.is_file() and b"SECRET" in p.read_bytes()] == []
        group.stage.release = release  # type: ignore[method-assign]
        assert group.read("from lake.main.t order by id") == [(1, "seen", None, "-"), (2, "seen", None, "-")]


@pytest.mark.slow
@pytest.mark.parametrize("tasks", TASKS)
def test_a_masked_key_still_identifies_rows(db: Database, tmp_path: Path, tasks: bool) -> None:
    """P-S08: updates, deletes and changes of a hashed key reach the right row."""
    db.execute("create table t (a text, b int, v int, primary key (a, b))")
    db.execute("insert into t select 'k' || g, g, 0 from generate_series(1, 50) g")
    options = {"mask": {"a": "hash", "b": "hash"}, "rename": {"a": "key"}}
    with whole_group(db, tmp_path, {"t": options}, salt_env="TEST_SALT") as group:
        db.execute("update t set v = 1 where b % 2 = 0; delete from t where b % 5 = 0")
        db.execute("update t set a = 'moved' where b = 7; insert into t values ('k5', 5, 9)")
        group.apply(tasks=tasks)
        want = sorted((hashed(a), hashed(str(b)), v) for a, b, v in db.query("select a, b, v from t"))
        assert sorted(group.read("select key, b, v from lake.main.t")) == want
        [result] = group.verify()
        assert (result.verdict, result.lake_rows) == ("identical", len(want))


BIG = "repeat(md5(random()::text), 400)"  # stored out of line


def toasted(db: Database, *, identity: str) -> None:
    db.execute(
        "create table t (id int primary key, body text, tag text, live boolean);"
        " alter table t alter column body set storage external, alter column tag set storage external;"
        f" alter table t replica identity {identity}"
    )


def check_toasted(group: WholeGroup) -> None:
    want = group.db.query("select id, md5(body), tag from t where live order by id")
    assert group.read("select id, md5(body), tag from lake.main.t order by id") == want


@pytest.mark.parametrize("tasks", TASKS)
@pytest.mark.parametrize("identity", ["default", pytest.param("full", marks=pytest.mark.slow)])
def test_rows_that_enter_the_filter_have_their_large_values(
    db: Database, tmp_path: Path, identity: str, tasks: bool
) -> None:
    """P-S10: with a full identity the stream brings them, otherwise the table is re-copied; the lake is right either way."""
    toasted(db, identity=identity)
    db.execute(f"insert into t select g, {BIG}, 'x', g % 2 = 0 from generate_series(1, 4) g")
    with whole_group(db, tmp_path, {"t": {"where": "live"}}) as group:
        check_toasted(group)
        db.execute(
            "update t set tag = 'y' where id = 2"
        )  # in the filter before and after: the lake has the value
        group.apply(tasks=tasks)
        check_toasted(group)
        assert group.copies == 1
        db.execute("update t set live = true where id = 1")
        group.apply(tasks=tasks)
        check_toasted(group)
        assert group.copies == (1 if identity == "full" else 2)


@pytest.mark.slow
@pytest.mark.parametrize("tasks", TASKS)
def test_a_large_value_of_another_row_with_the_same_key_is_never_taken(
    db: Database, tmp_path: Path, tasks: bool
) -> None:
    """P-S10: a row that was inserted outside of the filter and entered it later does not get earlier values of its key."""
    toasted(db, identity="default")
    db.execute(f"insert into t values (1, {BIG}, 'old', true)")
    with whole_group(db, tmp_path, {"t": {"where": "live"}}) as group:
        db.execute("delete from t; insert into t values (1, repeat(md5('new'), 400), 'new', false)")
        db.execute("update t set live = true")
        group.apply(tasks=tasks)
        check_toasted(group)


@pytest.mark.slow
def test_a_filter_that_reads_an_unsent_value_copies_the_table_again(db: Database, tmp_path: Path) -> None:
    """P-S10: whether the row passes cannot be known from the stream, so it is not guessed."""
    toasted(db, identity="default")
    db.execute(f"insert into t select g, {BIG}, 'x', true from generate_series(1, 3) g")
    with whole_group(db, tmp_path, {"t": {"where": "length(body) > 100"}}) as group:
        db.execute("update t set tag = 'y' where id = 2")
        group.apply()
        check_toasted(group)
        assert group.copies == 2
        db.execute("update t set body = 'short' where id = 2")
        group.apply()
        assert [row[0] for row in group.read("select id from lake.main.t order by id")] == [1, 3]


@pytest.mark.slow
def test_a_mask_of_an_unsent_value_stays_what_it_was(db: Database, tmp_path: Path) -> None:
    """P-S10: a hash is kept with the row, within a batch and across batches, even when columns before it are left out."""
    toasted(db, identity="default")
    db.execute(f"insert into t select g, {BIG}, 'x', true from generate_series(1, 3) g")
    options = {"exclude": ["tag"], "mask": {"body": "hash"}}
    with whole_group(db, tmp_path, {"t": options}, salt_env="TEST_SALT") as group:
        db.execute(f"update t set live = false where id = 1; insert into t values (4, {BIG}, 'y', true)")
        db.execute("update t set live = null where id = 4; update t set id = 20 where id = 2")
        for tasks in (True, False):
            group.apply(tasks=tasks)
            want = [
                (i, hashed(body), live)
                for i, body, live in db.query("select id, body, live from t order by id")
            ]
            assert group.read("from lake.main.t order by id") == want
            db.execute("update t set live = true")
        assert group.copies == 1


@pytest.mark.slow
def test_other_options_copy_the_table_again_and_the_same_do_not(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-S12: what the lake shows follows the file: columns, filter, salt; an unchanged file costs nothing."""
    db.execute(PEOPLE)
    group = WholeGroup(db, tmp_path, {"people": {}}, salt_env="TEST_SALT")
    try:
        steps: list[tuple[dict[str, Any], int]] = [
            ({}, 1),
            (OPTIONS, 2),
            (OPTIONS, 2),
            ({**OPTIONS, "where": "age > 35"}, 3),
            ({"columns": ["id", "age"]}, 4),
            ({}, 5),
        ]
        for options, copies in steps:
            group.restart({"people": options})
            assert group.copies == copies
            db.execute("update people set age = age + 1")
            group.apply()
            assert [r.verdict for r in group.verify()] == ["identical"]
        assert group.columns("people") == ["id", "name", "email", "phone", "age", "country", "notes"]
        group.restart({"people": OPTIONS})
        monkeypatch.setenv("TEST_SALT", "another")
        group.restart({"people": OPTIONS})
        assert group.copies == 7
        assert [r.verdict for r in group.verify()] == ["identical"]
    finally:
        group.stop()


@pytest.mark.slow
def test_another_filter_copies_the_table_again(db: Database, tmp_path: Path) -> None:
    """P-S12: options that changed while the service was stopped are noticed at its start."""
    db.execute(PEOPLE)
    with whole_group(db, tmp_path, {"people": {"where": "age > 35"}}) as group:
        assert group.read("select id from lake.main.people") == [(2,)]
        group.restart({"people": {"where": "age < 35", "exclude": ["notes"]}})
        assert group.read("select id from lake.main.people") == [(1,)]
        assert "notes" not in group.columns("people")


@pytest.mark.slow
def test_columns_called_like_our_own_can_be_chosen_and_filtered(db: Database, tmp_path: Path) -> None:
    """No name of a source column is taken for one of ours."""
    names = [
        "_op",
        "_ord",
        "_kc",
        "n0",
        "n1",
        "o0",
        "f0",
        "s",
        "passes",
        "version",
        "k0",
        "t0",
        "r",
        "select",
    ]
    columns = ", ".join(f'"{name}" int' for name in names)
    db.execute(f'create table t (id int primary key, {columns}, "gone" int)')
    db.execute(
        f"insert into t select g, {', '.join(f'g * {i}' for i in range(len(names)))}, 0 from generate_series(1, 3) g"
    )
    where = '"passes" >= 0 and "f0" >= 0 and "n0" < 100 and _op = 0 and "select" > 0'
    with whole_group(db, tmp_path, {"t": {"exclude": ["gone"], "where": where}}) as group:
        for more, tasks in ((10, False), (100, True)):
            shown = ", ".join(f'"{name}"' for name in names)
            want = db.query(f'select id, {shown} from t where "n0" < 100 order by id')
            assert group.read(f"select id, {shown} from lake.main.t order by id") == want
            db.execute(
                'update t set "n0" = 200 where id = 1; update t set "s" = 7; delete from t where id = 2'
            )
            db.execute(f"insert into t select id + {more}, {shown}, 0 from t")
            group.apply(tasks=tasks)
        assert [r.verdict for r in group.verify()] == ["identical"]


@pytest.mark.parametrize("by", ["us", pytest.param("user", marks=pytest.mark.slow)])
def test_a_table_is_removed_and_added_with_other_options(db: Database, tmp_path: Path, by: str) -> None:
    """P-S12: while the capture continues, changes come with the new options at once; the copy for them is the only one."""
    db.execute(PEOPLE + "; create table other (id int primary key); create publication p for all tables")
    theirs = {"publication": "p", "publication_by": "user"} if by == "user" else {}
    with whole_group(db, tmp_path, {"people": {"exclude": ["notes"]}, "other": {}}, group=theirs) as group:
        db.execute("update people set age = 31 where id = 1")
        group.apply()
        group.remove("people")
        group.add("people", exclude=["notes"], mask={"phone": {"constant": "none"}})
        copies = group.copies
        db.execute("update people set phone = '7' where id = 1; delete from people where id = 2")
        group.apply()
        rows = [(1, "Ann", "ann@x", "none", 31, "DE"), (3, "Cem", "cem@x", "none", None, "DE")]
        assert group.read("from lake.main.people order by id") == rows
        assert group.copies == copies
