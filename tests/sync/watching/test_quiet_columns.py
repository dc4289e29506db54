"""Columns that change while no row does reach the lake, in order with the rows around them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aqueduck.lab.embedded import EmbeddedPostgres
from aqueduck.postgres.registry.registry import TableObservation
from aqueduck.sync.observe import observe_table
from aqueduck.sync.watching.column_watch import ColumnWatch
from tests.fix_postgres import Database, _new_database, wait_until
from tests.whole_group import WholeGroup, whole_group


@pytest.fixture
def group(db: Database, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[WholeGroup]:
    db.execute(
        "create table t (id int primary key, v text, n int); insert into t values (1, 'a', 1), (2, 'b', 2)"
    )
    db.execute("create table u (id int primary key)")
    mode = getattr(request, "param", "upsert")
    with whole_group(db, tmp_path, {"public.t": {"mode": mode}, "public.u": {}}) as made:
        yield made


def pass_by(group: WholeGroup, watch: ColumnWatch) -> None:
    """Look, let the stream pass what was seen (another table has a change), and look again."""
    watch.look(group.runner)
    group.db.execute("insert into u select coalesce(max(id), 0) + 1 from u")
    group.apply_only()
    watch.look(group.runner)
    wait_until(lambda: not group.runner.copier.busy, "copies have ended", 60)


def rows(group: WholeGroup) -> list[tuple[Any, ...]]:
    names = [n for n, _ in described(group)]
    return sorted(group.read(f"select {', '.join(names)} from lake.main.t"), key=str)


def described(group: WholeGroup) -> list[tuple[str, str]]:
    query = (
        "select attname from pg_attribute where attrelid = 't'::regclass and attnum > 0 and not attisdropped"
    )
    return [(n, n) for (n,) in group.db.query(f"{query} order by attnum")]


CHANGES = {
    "added": "alter table t add column c int",
    "added with a default": "alter table t add column c int default 7",
    "dropped": "alter table t drop column v",
    "renamed": "alter table t rename column v to w",
    "widened": "alter table t alter column n type bigint",
    "replaced": "alter table t add column c text default 'x'; alter table t drop column v; alter table t rename c to v",
    "another type": "alter table t alter column n type text",
}
QUICK = ("added with a default", "widened")


@pytest.mark.parametrize(
    "change", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CHANGES]
)
def test_columns_of_a_quiet_table_reach_the_lake(group: WholeGroup, change: str) -> None:
    """P-S12: without a row that changes, and `verify` says identical; rows that come later fit."""
    watch = ColumnWatch()
    watch.look(group.runner)
    group.db.execute(CHANGES[change])
    pass_by(group, watch)
    assert {c.verdict for c in group.verify()} == {"identical"}
    assert rows(group) == sorted(group.db.query("select * from t"), key=str)
    group.db.execute("update t set id = 3 where id = 2; insert into t (id) values (4)")
    group.apply()
    assert {c.verdict for c in group.verify()} == {"identical"}


def test_nothing_is_changed_before_the_lake_has_what_came_before(group: WholeGroup) -> None:
    """P-S12: rows from before the change that are still on their way come first, with the columns that they have."""
    watch = ColumnWatch()
    watch.look(group.runner)
    group.db.execute(
        "insert into t values (3, 'c', 3); alter table t drop column v; alter table t add column c int default 7"
    )
    watch.look(group.runner)
    assert group.columns("t") == ["id", "v", "n"], "the row with v is not in the lake yet"
    group.apply_only()
    watch.look(group.runner)
    watch.look(group.runner)
    assert {c.verdict for c in group.verify()} == {"identical"}


def test_the_stream_may_be_faster(group: WholeGroup) -> None:
    """P-S12: a row brings the columns before they are applied, and more columns come meanwhile: nothing is applied twice."""
    watch = ColumnWatch()
    watch.look(group.runner)
    group.db.execute("alter table t add column c int default 7")
    watch.look(group.runner)
    group.db.execute(
        "insert into t values (3, 'c', 3, 3); alter table t rename column c to d; alter table t add column e int"
    )
    group.apply()
    pass_by(group, watch)
    assert {c.verdict for c in group.verify()} == {"identical"}
    assert group.columns("t") == ["id", "v", "n", "d", "e"]


@pytest.mark.slow
@pytest.mark.parametrize("group", ["append", "history", "soft_delete"], indirect=True)
def test_a_target_that_keeps_more_gets_the_columns_too(group: WholeGroup) -> None:
    """P-S12: in every mode."""
    watch = ColumnWatch()
    watch.look(group.runner)
    group.db.execute("alter table t add column c int default 7; alter table t drop column v")
    pass_by(group, watch)
    assert "c" in group.columns("t")
    group.db.execute("insert into t values (4, 4, 4)")
    group.apply()
    assert {c.verdict for c in group.verify()} == {"identical"}


def test_a_change_from_before_the_start_is_found(db: Database, group: WholeGroup) -> None:
    """P-S12: a change made while the service was stopped, to a table without writes."""
    group.stop()
    db.execute("alter table t add column c int default 7")
    group.start({"public.t": {}, "public.u": {}})
    pass_by(group, ColumnWatch())
    assert {c.verdict for c in group.verify()} == {"identical"}


@pytest.mark.slow
@pytest.mark.parametrize("capture", ["poll", "stream"])
def test_quiet_columns_on_an_older_server_and_by_polling(
    pg16: EmbeddedPostgres, tmp_path: Path, capture: str
) -> None:
    """P-S12: PostgreSQL 16, by the stream and by `capture: poll`, whose positions are those of other messages."""
    db = _new_database(pg16)
    db.execute("create table t (id int primary key, v text, n int); insert into t values (1, 'a', 1)")
    db.execute("create table u (id int primary key)")
    try:
        with whole_group(db, tmp_path, {"public.t": {}, "public.u": {}}, group={"capture": capture}) as group:
            watch = ColumnWatch()
            watch.look(group.runner)
            db.execute("alter table t add column c int default 7; alter table t drop column v")
            pass_by(group, watch)
            assert {c.verdict for c in group.verify()} == {"identical"}
            assert rows(group) == [(1, 1, 7)]
            db.execute("insert into t values (2, 2, 2)")
            group.apply()
            assert {c.verdict for c in group.verify()} == {"identical"}
    finally:
        db.drop()


def waiting(group: WholeGroup) -> str | None:
    [oid] = [oid for oid, t in group.runner.tables.items() if t.schema.name == "t"]
    row: Any = SimpleNamespace(observed=TableObservation(id=1))
    return observe_table(group.runner, None, oid, row).verify_note


def test_columns_that_wait_are_shown(group: WholeGroup) -> None:
    """P-T01: the status names columns that the lake gets once it has the earlier changes."""
    watch = ColumnWatch()
    watch.look(group.runner)
    assert waiting(group) is None
    group.db.execute("insert into u values (0)")
    group.db.execute("alter table t add column c int default 7; alter table t drop column v")
    watch.look(group.runner)
    assert waiting(group) == "columns that wait for the changes before them: c, v"
    pass_by(group, watch)
    assert waiting(group) is None
    group.db.execute("alter table t drop column c")
    watch.look(group.runner)
    group.db.execute("insert into t (id) values (3)")
    group.apply()
    watch.look(group.runner)
    assert waiting(group) is None
