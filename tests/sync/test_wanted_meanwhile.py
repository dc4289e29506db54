"""What people want, and what goes wrong, while a table is copied, handed over, parked or committed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import psycopg
import pytest

from aqueduck.config.sync import TableConfig
from aqueduck.lake.commit.commit import commit_batch
from aqueduck.lake.commit.copy_files import ChunkFile
from aqueduck.lake.ledger.table_states import read_states, write_state
from aqueduck.lake.session.catalog import LakeSession, open_lake
from aqueduck.model.errors import CopyDisturbedError, LakeWriteError, PrivilegeError, SourceQueryError
from aqueduck.model.schema import TableName
from aqueduck.postgres.copy.table_copy import export_snapshot
from aqueduck.postgres.session.connection import connect
from aqueduck.spark.query.copy_job import CopyJob
from aqueduck.sync.control import Parting
from aqueduck.sync.groups.group_tables import add_tables, follow_name, remove_tables
from aqueduck.sync.tables.prepare_tables import describe_tables
from tests.fix_postgres import Database, wait_until
from tests.whole_group import WholeGroup, whole_group

BEFORE = [False, pytest.param(True, marks=pytest.mark.slow)]
ROWS = "insert into t select g, 'row ' || g from generate_series(1, 100) g"


@pytest.fixture
def group(db: Database, tmp_path: Path) -> Iterator[WholeGroup]:
    """A group with the table `t` of a hundred rows, copied."""
    db.execute(f"create table t (id int primary key, v text); {ROWS}")
    with whole_group(db, tmp_path, {"public.t": {}}) as made:
        yield made


def oid_of(group: WholeGroup, name: str = "t") -> int:
    return int(group.db.value("select %s::regclass::oid::int8", (name,)))


def rows(group: WholeGroup, table: str = "t") -> int:
    return int(group.read(f"select count(*) from lake.main.{table}")[0][0])


def assert_same(group: WholeGroup) -> None:
    assert [(found.verdict, found.note) for found in group.verify()] == [("identical", None)] * len(
        group.runner.tables
    )


def in_the_middle(group: WholeGroup, act: Callable[[], None], *, before: bool = False) -> None:
    """Have something happen once, when a copy has read its chunks or is about to."""
    run, todo = group.runner.copier.jobs.run, [act]

    def with_act(job: CopyJob) -> list[ChunkFile]:
        if before and todo:
            todo.pop()()
        files = run(job)
        if todo:
            todo.pop()()
        return files

    group.runner.copier.jobs.run = with_act


def settle(group: WholeGroup) -> None:
    """Copies that are due, including those that only become due by another one's end."""
    for _ in range(5):
        group.copy()


@pytest.mark.parametrize("before", BEFORE, ids=["after the chunks", "before the chunks"])
def test_a_resync_while_it_is_copied_is_that_copy(group: WholeGroup, before: bool) -> None:
    """P-S22: the journal was removed during the copy, which was then committed empty or failed permanently."""
    oid = oid_of(group)
    in_the_middle(group, lambda: group.runner.resync(oid), before=before)
    group.runner.resync(oid)
    settle(group)
    assert rows(group) == 100
    assert group.copies == 2
    group.db.execute("update t set v = 'after' where id < 10")
    group.apply()
    assert_same(group)


@pytest.mark.parametrize("before", BEFORE, ids=["after the chunks", "before the chunks"])
def test_a_table_that_is_removed_and_added_while_it_is_copied(group: WholeGroup, before: bool) -> None:
    """P-S03: a copy that began before the removal does not fill the new target, and does not change its state."""
    oid = oid_of(group)

    def other_target() -> None:
        remove_tables(group.runner, {oid: Parting("it was removed")})
        wanted = TableConfig(source="public.t", target="main.other", mode="history")
        add_tables(group.runner, [wanted], handover=lambda oid: None)

    in_the_middle(group, other_target, before=before)
    group.db.execute("delete from t where id > 50")
    group.runner.resync(oid)
    settle(group)
    assert rows(group) == 100, "the target that is no longer wanted is unchanged"
    assert rows(group, "other") == 50
    assert group.runner.states[oid].ready
    assert group.runner.states[oid].mode.name == "history"


def test_a_table_that_is_removed_while_it_is_copied(group: WholeGroup) -> None:
    oid = oid_of(group)
    in_the_middle(
        group, lambda: remove_tables(group.runner, {oid: Parting("it was removed", drop_target=True)})
    )
    group.runner.resync(oid)
    wait_until(lambda: not group.runner.copier.busy, "the copy ends")
    group.runner.copier.log_progress()
    assert group.runner.copier.schedule.failures == {}
    assert group.runner.states == {}
    with pytest.raises(duckdb.CatalogException):
        group.lake.con.execute("from lake.main.t")


def test_a_table_that_is_disabled_while_it_is_copied(group: WholeGroup) -> None:
    """Its copy is committed; later changes are parked until the table is enabled."""
    oid = oid_of(group)
    in_the_middle(group, lambda: group.runner.set_enabled(oid, False))
    group.runner.resync(oid)
    settle(group)
    assert not group.runner.states[oid].ready
    group.db.execute("insert into t values (1000, 'while it is disabled')")
    group.apply()
    assert rows(group) == 100
    group.runner.set_enabled(oid, True)
    settle(group)
    assert rows(group) == 101
    assert_same(group)


@contextlib.contextmanager
def lost_answers(
    monkeypatch: pytest.MonkeyPatch, message: str, *, then_away: bool = False
) -> Iterator[list[str]]:
    """The next commit of a transaction with such a message happens, and its answer is lost; so is the catalog, if asked for."""
    execute, said = LakeSession.execute, [""]
    lost: list[str] = []

    def losing(self: LakeSession, statement: str, *arguments: Any, **keywords: Any) -> Any:
        if statement.startswith("call") and "set_commit_message" in statement:
            said[0] = statement
        result = execute(self, statement, *arguments, **keywords)
        if statement == "commit" and message in said[0] and not lost:
            lost.append(said[0])
            raise LakeWriteError("the connection to the catalog was lost")
        return result

    query = LakeSession.query

    def away(self: LakeSession, *arguments: Any, **keywords: Any) -> Any:
        if lost and then_away:
            raise LakeWriteError("the catalog does not answer")
        return query(self, *arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(LakeSession, "execute", losing)
        patch.setattr(LakeSession, "query", away)
        yield lost


def test_a_copy_commit_whose_answer_was_lost_counts(
    group: WholeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard 3: a row that was deleted while the table was copied came back with the second copy commit."""
    oid = oid_of(group)

    def change() -> None:
        group.db.execute("delete from t where id = 7")
        group.apply_only()

    in_the_middle(group, change)
    with lost_answers(monkeypatch, "copy of") as lost:
        group.runner.resync(oid)
        settle(group)
    assert lost
    assert group.copies == 2
    assert group.runner.states[oid].ready
    group.db.execute("insert into t values (1000, 'after')")
    group.apply()
    assert_same(group)


def test_a_copy_commit_with_a_lost_answer_is_found_later(
    group: WholeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog stays away: the copy is repeated only after a check that it was not committed."""
    oid = oid_of(group)
    copier = group.runner.copier
    with lost_answers(monkeypatch, "copy of", then_away=True) as lost:
        group.runner.resync(oid)
        wait_until(lambda: not copier.busy, "the copy commit fails")
    assert lost
    assert not group.runner.states[oid].ready
    group.db.execute("delete from t where id = 7; insert into t values (1000, 'parked')")
    group.apply_only()
    copier.retry_now(oid)
    settle(group)
    assert group.copies == 2, "the copy commit counts; there is no third one"
    assert_same(group)


def test_changes_that_were_parked_of_a_ready_table_are_applied_at_the_next_start(group: WholeGroup) -> None:
    """A crash between a copy commit without an answer and the next try: the lake says ready, and changes are parked."""
    oid = oid_of(group)
    ready = group.runner.states[oid]
    group.runner.set_enabled(oid, False)
    group.db.execute("delete from t where id = 7; insert into t values (1000, 'parked')")
    group.apply_only()
    with group.lake.transaction():
        write_state(group.lake, "test", [ready])
    group.restart({"public.t": {}})
    settle(group)
    assert read_states(group.lake, "test")[oid].ready
    assert group.read("select count(*) from lake.aqueduck.parked") == [(0,)]
    assert_same(group)


def test_a_batch_that_fails_after_a_table_was_isolated_isolates_no_table(
    group: WholeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory and lake agree on which tables are ready; otherwise parked changes would be forgotten."""
    oid = oid_of(group)
    group.lake.execute("alter table lake.main.t rename column v to w")
    group.lake.memory.targets.clear()
    group.db.execute("insert into t values (1000, 'x')")
    failing = [LakeWriteError("the catalog is away")]

    def write(*arguments: Any) -> None:
        if failing:
            raise failing.pop()
        write_state(*arguments)

    monkeypatch.setattr("aqueduck.lake.commit.commit.write_state", write)
    with pytest.raises(LakeWriteError):
        group.apply_only()
    assert group.runner.states[oid].ready
    assert group.runner.copier.schedule.failures == {}
    group.lake.execute("alter table lake.main.t rename column w to v")
    group.apply()
    assert_same(group)


def test_what_a_commit_without_an_answer_parked_is_replayed(
    group: WholeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver knows only that it may exist."""
    oid = oid_of(group)
    group.runner.set_enabled(oid, False)
    group.db.execute("delete from t where id = 7; insert into t values (1000, 'parked')")

    def commit(*arguments: Any) -> None:
        commit_batch(*arguments)
        raise LakeWriteError("the catalog is away")

    with monkeypatch.context() as patch:
        patch.setattr("aqueduck.sync.groups.group_commits.commit_batch", commit)
        with pytest.raises(LakeWriteError):
            group.apply_only()
    assert group.runner.book.parked == {}
    group.runner.set_enabled(oid, True)
    settle(group)
    group.apply()
    assert_same(group)


@pytest.mark.parametrize("rows", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_what_was_parked_before_the_target_is_made_lands_with_it(
    db: Database, tmp_path: Path, rows: int
) -> None:
    """Targets, their files, inlined rows of what was parked and the states of all of them: one transaction of the lake."""
    names = ["a", "b", "c"]
    db.execute("create table t (id int primary key, v text)")
    for name in names:
        db.execute(f"create table {name} (id int primary key, v text)")
        db.execute(f"insert into {name} select g, 'copied' from generate_series(1, {rows}) g")
    with whole_group(db, tmp_path, {"public.t": {}}) as group:

        def change() -> None:
            for name in ("a", "c"):
                db.execute(f"insert into {name} values (10, 'parked'), (11, 'parked')")
                db.execute(f"update {name} set v = 'parked' where id = 1; delete from {name} where id = 2")
            group.apply_only()

        in_the_middle(group, change)
        add_tables(
            group.runner, [TableConfig(source=f"public.{name}") for name in names], handover=lambda oid: None
        )
        settle(group)
        assert group.copies == 2, "the three of them together"
        with open_lake(group.config.lake, read_only=True) as reader:
            for name in names:
                found = reader.query(f"from lake.main.{name} order by id")[0]
                assert found == db.query(f"select * from {name} order by id")


def test_a_replay_that_needs_a_copy_gets_one(group: WholeGroup) -> None:
    """`on_type_change: resync`: a table that was disabled meanwhile waited for a person."""
    oid = oid_of(group)
    group.runner.set_enabled(oid, False)
    group.db.execute("alter table t alter v type varchar(20); alter table t alter id type text")
    group.db.execute("insert into t values ('x', 'y')")
    group.apply_only()
    group.runner.set_enabled(oid, True)
    wait_until(lambda: not group.runner.copier.busy, "the replay ends")
    failed = group.runner.copier.schedule.failures[oid]
    assert failed.retry_at is not None, "automatically, after a pause"
    group.runner.copier.retry_now(oid)
    settle(group)
    assert group.copies == 2
    assert_same(group)


def test_a_table_that_cannot_be_published_is_not_followed(
    db: Database, role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was copied, shown as streaming, and never got a change."""
    db.execute(
        f"create table t (id int primary key); create table foreign_one (id int primary key); {ROWS_2}"
    )
    with whole_group(db, tmp_path, {"public.t": {}}) as group:
        runner = group.runner

        def fails(*_: Any) -> None:
            raise SourceQueryError("canceling statement due to lock timeout")

        with monkeypatch.context() as patch:
            patch.setattr("aqueduck.sync.groups.group_tables.publish", fails)
            with pytest.raises(SourceQueryError):
                add_tables(runner, [TableConfig(source="public.foreign_one")], handover=lambda oid: None)
        settle(group)
        assert list(runner.tables) == list(runner.states) == [oid_of(group)]
        assert set(read_states(group.lake, "test")) == {oid_of(group)}
        add_tables(runner, [TableConfig(source="public.foreign_one")], handover=lambda oid: None)
        settle(group)
        db.execute("insert into foreign_one values (3)")
        group.apply()
        assert_same(group)


ROWS_2 = "insert into foreign_one values (1), (2)"


def test_a_table_of_another_role_is_refused_alone(db: Database, role: str, tmp_path: Path) -> None:
    """Guarantee 5: one table that the role may not publish does not keep the group from starting."""
    db.execute(f'create table mine (id int primary key); alter table mine owner to "{role}"')
    db.execute(f'create table theirs (id int primary key); grant select on theirs to "{role}"')
    db.execute("create publication already for table theirs")
    with whole_group(db, tmp_path, {"public.mine": {}}) as group, connect(db.dsn_for(role)) as conn:
        tables = [TableConfig(source="public.mine"), TableConfig(source="public.theirs")]
        one = group.config.groups[0]
        found, refused = describe_tables(conn, group.config, one, tables, {})
        assert [t.schema.name for t in found.values()] == ["mine"]
        assert isinstance(refused["public.theirs"], PrivilegeError)
        assert str(refused["public.theirs"].hint).endswith("and set publication_by: user for the group")
        # An administrator has published it: nothing is left to be done.
        found, refused = describe_tables(
            conn, group.config, one.model_copy(update={"publication": "already"}), tables[1:], {}
        )
        assert not refused


def test_names_that_are_swapped_keep_their_counts(group: WholeGroup, db: Database) -> None:
    """Counts by name ended the service: one table had the other's entry, and the other had none."""
    db.execute("create table u (id int primary key, v text)")
    add_tables(group.runner, [TableConfig(source="public.u")], handover=lambda oid: None)
    settle(group)
    t, u = oid_of(group, "t"), oid_of(group, "u")
    db.execute("alter table t rename to x; alter table u rename to t; alter table x rename to u")
    follow_name(group.runner, t, TableName("public", "u"))
    follow_name(group.runner, u, TableName("public", "t"))
    db.execute(
        "insert into u values (1000, 'of the first'); insert into t values (1, 'of the second'), (2, 'too')"
    )
    group.apply()
    counts = group.runner.status.tables
    assert (counts[t].inserts, counts[u].inserts) == (1, 2)


def test_a_copy_that_waits_for_its_snapshot_can_be_given_up(db: Database) -> None:
    """The server waits for an open transaction; a service that is stopped does not."""
    given_up = threading.Event()
    threading.Timer(0.5, given_up.set).start()
    with psycopg.connect(db.dsn) as open_one:
        open_one.execute("select pg_current_xact_id()")
        with pytest.raises(CopyDisturbedError):
            export_snapshot(db.dsn, given_up.is_set)


def test_stopping_a_group_ends_its_jobs(group: WholeGroup) -> None:
    """The attack: stopping waited for a copy of hours, and delayed the other groups too."""
    cancelled = threading.Event()
    copier = group.runner.copier

    def endless(job: CopyJob) -> list[ChunkFile]:
        assert cancelled.wait(60)
        raise CopyDisturbedError("a task of the copy was lost")

    copier.jobs.run, copier.jobs.cancel = endless, cancelled.set
    group.runner.resync(oid_of(group))
    wait_until(lambda: copier.is_copying(oid_of(group)), "the copy is under way")
    copier.stop()
    assert cancelled.is_set()
    assert not copier.busy
    assert copier.schedule.failures == {}


def test_a_handover_that_becomes_a_copy_leaves_the_table_to_one_group(db: Database, tmp_path: Path) -> None:
    """Changes that the first group had not applied yet arrived after the copy: old values replaced new ones, and rows were doubled."""
    db.execute(f"create table t (id int primary key, v text); create table u (id int primary key); {ROWS}")
    with (
        whole_group(db, tmp_path, {"public.t": {}}, name="giver") as giver,
        whole_group(db, tmp_path, {"public.u": {}}, name="taker") as taker,
    ):
        oid = oid_of(giver)
        db.execute(
            "insert into t values (1000, 'the giver has staged it'); update t set v = 'old' where id = 1"
        )
        for one in (giver.runner, giver.runner.book):  # as in a service: one session, one lock
            one.lake, one.commit_lock = taker.lake, taker.runner.commit_lock
        giver.runner.has_everything_before = lambda position: False  # type: ignore[method-assign]
        db.execute("update t set v = 'new' where id = 1")
        add_tables(taker.runner, [TableConfig(source="public.t")], handover=lambda oid: giver.runner)
        settle(taker)
        assert taker.runner.states[oid].ready
        assert oid not in giver.runner.states
        giver.apply_only()
        taker.apply()
        found = taker.read(
            "select id, count(*), min(v) from lake.main.t where id in (1, 1000) group by id order by id"
        )
        assert found == [(1, 1, "new"), (1000, 1, "the giver has staged it")]
        assert set(read_states(taker.lake, "giver")) == set()
