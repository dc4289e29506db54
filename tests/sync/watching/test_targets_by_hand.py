"""People's hands on the lake: targets that are dropped, renamed, replaced, altered or partitioned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aqueduck.config.sync import LakeConfig
from aqueduck.lake.session.catalog import open_lake
from aqueduck.model.errors import AqueduckError, TargetReplacedError
from aqueduck.model.lifecycle import SyncState
from aqueduck.spark.query.copy_job import CopyJob
from aqueduck.sync.control import Parting
from aqueduck.sync.groups.group_tables import remove_tables
from aqueduck.sync.observe import table_state
from aqueduck.sync.watching.target_watch import TargetWatch
from tests.fix_postgres import Database, wait_until
from tests.whole_group import WholeGroup, whole_group

TWO: dict[str, dict[str, str]] = {"public.t": {}, "public.u": {}}


@pytest.fixture
def tables(db: Database) -> Database:
    for name in "tu":
        db.execute(
            f"create table {name} (id int primary key, v text); insert into {name} values (1, 'a'), (2, 'b')"
        )
    return db


def by_hand(directory: Path, *statements: str) -> None:
    """Another user changes the lake, through a connection of their own."""
    config = LakeConfig(catalog=f"sqlite:{directory}/lake.sqlite", data_path=f"{directory}/data")
    with open_lake(config) as lake:
        for statement in statements:
            lake.execute(statement)


def oid_of(group: WholeGroup, name: str) -> int:
    return next(oid for oid, t in group.runner.tables.items() if t.schema.name == name)


def error_of(group: WholeGroup, name: str) -> str | None:
    """The code that people see, or nothing if the table streams."""
    oid = oid_of(group, name)
    state = table_state(group.runner, oid)
    life = group.runner.copier.schedule.failures.get(oid)
    text = (
        life.failure.message
        if life is not None and life.failure is not None
        else group.runner.states[oid].error
    )
    assert (text is not None) == (state is SyncState.ERRORED), (state, text)
    error = None if text is None else AqueduckError.from_text(text)
    return None if error is None else error.code


def rows(group: WholeGroup, name: str) -> list[tuple[Any, ...]]:
    return sorted(group.read(f"select * from lake.main.{name}"))


def source_rows(db: Database, name: str) -> list[tuple[Any, ...]]:
    return sorted(db.query(f"select * from {name}"))


def assert_whole(group: WholeGroup, db: Database) -> None:
    for name in "tu":
        assert rows(group, name) == source_rows(db, name)
    assert {c.verdict for c in group.verify()} == {"identical"}


def resync(group: WholeGroup, name: str) -> None:
    group.runner.resync(oid_of(group, name))
    copier = group.runner.copier
    wait_until(lambda: not copier.busy, "the copy has ended", 60)


GONE = "drop table lake.main.t"
RENAMED = "alter table lake.main.t rename to elsewhere"
REPLACED = ("drop table lake.main.t", "create table lake.main.t (id int, v varchar)")
FOREIGN = ("drop table lake.main.t", "create table lake.main.t as select 42 as answer")
VIEW = ("drop table lake.main.t", "create view lake.main.t as select 1 as id, 'x' as v")
SCHEMA = ("create table lake.main.u2 as from lake.main.u", "drop table lake.main.t")
PARTITIONED = "alter table lake.main.t set partitioned by (v, v)"
ADDED = "alter table lake.main.t add column mine integer"
LOST = "alter table lake.main.t drop column v"
RETYPED = "alter table lake.main.t alter column id set data type bigint"

HANDS = {
    "dropped": ((GONE,), "lake.table_missing"),
    "renamed": ((RENAMED,), "lake.table_missing"),
    "replaced by the like": (REPLACED, "lake.table_replaced"),
    "replaced by another": (FOREIGN, "lake.table_replaced"),
    "replaced by a view": (VIEW, "lake.table_replaced"),
    "partitioned": ((PARTITIONED,), "lake.partitioned"),
    "column added": ((ADDED,), "lake.schema_change"),
    "column dropped": ((LOST,), "lake.schema_change"),
}


@pytest.mark.parametrize(
    "tasks", [pytest.param(False, marks=pytest.mark.slow), True], ids=["by the driver", "by tasks"]
)
@pytest.mark.parametrize(
    "hand", [h if h in ("dropped", "partitioned") else pytest.param(h, marks=pytest.mark.slow) for h in HANDS]
)
def test_a_target_in_other_hands_is_named_at_the_next_write(
    tables: Database, tmp_path: Path, hand: str, tasks: bool
) -> None:
    """P-L03, P-T04: its table is errored with a code, with its changes parked, for any size of the batch; others continue."""
    statements, code = HANDS[hand]
    with whole_group(tables, tmp_path, TWO) as group:
        tables.execute("insert into t values (3, 'c')")
        group.apply(tasks=tasks)
        assert_whole(group, tables)
        by_hand(tmp_path, *statements)
        found = rows(group, "t") if hand not in ("dropped", "renamed") else None
        tables.execute(
            "insert into t values (4, 'd'); update t set v = 'x' where id = 1; insert into u values (3, 'c')"
        )
        group.apply_only(tasks=tasks)
        assert error_of(group, "t") == code
        assert error_of(group, "u") is None
        assert rows(group, "u") == source_rows(tables, "u")
        assert group.runner.book.parked[oid_of(group, "t")].rows == 2
        if found is not None:
            assert rows(group, "t") == found, "it was not written into"


def look(group: WholeGroup, watch: TargetWatch) -> None:
    """What the service does every few seconds, and what follows from it."""
    watch.look(group.runner)
    wait_until(lambda: not group.runner.copier.busy, "it has been acted upon", 60)


UNDONE = {
    "renamed": "alter table lake.main.elsewhere rename to t",
    "partitioned": 'alter table "lake"."main"."t" reset partitioned by',
    "column added": "alter table lake.main.t drop column mine",
}


@pytest.mark.parametrize(
    "hand", [h if h == "partitioned" else pytest.param(h, marks=pytest.mark.slow) for h in UNDONE]
)
def test_a_quiet_table_is_named_within_a_look_and_continues_when_it_is_right_again(
    tables: Database, tmp_path: Path, hand: str
) -> None:
    """P-L03, P-T01: it is found without a write, and parked changes are replayed without a request when it is undone."""
    statements, code = HANDS[hand]
    watch = TargetWatch()
    with whole_group(tables, tmp_path, TWO) as group:
        look(group, watch)
        assert error_of(group, "t") is None
        by_hand(tmp_path, *statements)
        look(group, watch)
        assert error_of(group, "t") == code
        tables.execute("insert into t values (4, 'd'); insert into u values (4, 'd')")
        group.apply_only()
        by_hand(tmp_path, UNDONE[hand])
        look(group, watch)
        assert error_of(group, "t") is None
        assert_whole(group, tables)
        assert group.copies == 1, "what was parked was enough"


@pytest.mark.parametrize(
    "hand",
    [h if h == "dropped" else pytest.param(h, marks=pytest.mark.slow) for h in HANDS if "replaced" not in h],
)
def test_a_resync_brings_a_target_back(tables: Database, tmp_path: Path, hand: str) -> None:
    """P-L03: the step that the error names re-creates and copies the target, with the changes made meanwhile."""
    statements, code = HANDS[hand]
    with whole_group(tables, tmp_path, TWO) as group:
        by_hand(tmp_path, *statements)
        tables.execute("insert into t values (4, 'd')")
        group.apply_only()
        assert error_of(group, "t") == code
        if hand == "partitioned":
            resync(group, "t")
            assert error_of(group, "t") == code, "a copy would fail as well"
            by_hand(tmp_path, UNDONE[hand])
        tables.execute("delete from t where id = 1")
        group.apply_only()
        resync(group, "t")
        assert error_of(group, "t") is None
        tables.execute("insert into t values (5, 'e')")
        group.apply()
        assert_whole(group, tables)


def test_a_table_in_the_targets_place_is_never_written_or_dropped(tables: Database, tmp_path: Path) -> None:
    """P-L03, P-T11: not by batches, not by a resync, not by a restart, not by removing the table; renamed away, a resync helps."""
    with whole_group(tables, tmp_path, TWO) as group:
        by_hand(tmp_path, *FOREIGN)
        tables.execute("insert into t values (4, 'd')")
        group.apply_only()
        resync(group, "t")
        assert error_of(group, "t") == "lake.table_replaced"
        group.stop()
        group.start_without_copies(TWO)
        wait_until(lambda: not group.runner.copier.busy, "it was tried", 60)
        assert error_of(group, "t") == "lake.table_replaced"
        assert group.read("from lake.main.t") == [(42,)]
        by_hand(tmp_path, "alter table lake.main.t rename to theirs")
        resync(group, "t")
        assert_whole(group, tables)
        by_hand(tmp_path, *REPLACED, "insert into lake.main.t values (42, 'mine')")
        remove_tables(group.runner, {oid_of(group, "t"): Parting("it was removed", drop_target=True)})
        assert rows(group, "t") == [(42, "mine")]
        assert group.read("from lake.main.theirs") == [(42,)]


@pytest.mark.parametrize(
    "hand", ["dropped", *(pytest.param(h, marks=pytest.mark.slow) for h in HANDS if h != "dropped")]
)
def test_a_target_that_changed_while_no_service_ran_is_named_at_the_start(
    tables: Database, tmp_path: Path, hand: str
) -> None:
    """P-L03: even if nothing is written to the table; until then `verify` reports it."""
    statements, code = HANDS[hand]
    with whole_group(tables, tmp_path, TWO) as group:
        group.capture.stop()
        by_hand(tmp_path, *statements)
        verdicts = {c.table: c for c in group.verify()}
        assert verdicts["public.u"].verdict == "identical"
        if code != "lake.partitioned":
            assert verdicts["public.t"].verdict == "not compared"
            assert f"[{code}]" in (verdicts["public.t"].note or "")
        group.runner.copier.stop()
        group.lake.close()
        group.start_without_copies(TWO)
        wait_until(lambda: not group.runner.copier.busy, "it was tried", 60)
        assert error_of(group, "t") == code
        assert error_of(group, "u") is None


@pytest.fixture
def during(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Have another connection change the lake while a copy reads."""
    run = CopyJob.run

    def set_up(*statements: str) -> None:
        left = [statements]

        def changed(job: CopyJob, numbers: Any) -> Any:
            if left:
                by_hand(tmp_path, *left.pop())
            return run(job, numbers)

        monkeypatch.setattr(CopyJob, "run", changed)

    return set_up


@pytest.mark.parametrize("mode", ["upsert", pytest.param("history", marks=pytest.mark.slow)])
def test_a_target_that_is_dropped_during_its_copy_is_made_by_it(
    tables: Database, tmp_path: Path, during: Callable[..., None], mode: str
) -> None:
    """P-L03: the copy fills a new table."""
    with whole_group(tables, tmp_path, {"public.t": {"mode": mode}, "public.u": {}}) as group:
        during(GONE)
        resync(group, "t")
        assert error_of(group, "t") is None
        tables.execute("insert into t values (4, 'd')")
        group.apply()
        assert {c.verdict for c in group.verify()} == {"identical"}


@pytest.mark.parametrize(
    ("statements", "code"),
    [
        (("create table lake.main.t as select 42 as answer",), "lake.table_replaced"),
        pytest.param(
            ("create view lake.main.t as select 42 as answer",), "lake.table_replaced", marks=pytest.mark.slow
        ),
    ],
    ids=["table", "view"],
)
def test_a_table_that_takes_the_name_during_the_first_copy_is_left_alone(
    tables: Database, tmp_path: Path, during: Callable[..., None], statements: tuple[str, ...], code: str
) -> None:
    """P-T11: a table that another user created while the source was copied is not emptied."""
    during(*statements)
    with pytest.raises(TargetReplacedError), whole_group(tables, tmp_path, {"public.t": {}}):
        pass
    with open_lake(
        LakeConfig(catalog=f"sqlite:{tmp_path}/lake.sqlite", data_path=f"{tmp_path}/data")
    ) as lake:
        assert lake.query("from lake.main.t")[0] == [(42,)]


def test_a_target_that_is_partitioned_during_its_copy_is_refused(
    tables: Database, tmp_path: Path, during: Callable[..., None]
) -> None:
    """P-L01: the table is errored with its code, and copied when the partitioning is reset."""
    watch = TargetWatch()
    with whole_group(tables, tmp_path, TWO) as group:
        during(PARTITIONED)
        resync(group, "t")
        assert error_of(group, "t") == "lake.partitioned"
        by_hand(tmp_path, UNDONE["partitioned"])
        look(group, watch)
        assert error_of(group, "t") is None
        assert_whole(group, tables)


def test_a_schema_that_is_dropped_comes_back_with_its_tables(tables: Database, tmp_path: Path) -> None:
    """P-L03: a resync makes the schema as well."""
    with whole_group(tables, tmp_path, {"public.t": {"target": "far.t"}, "public.u": {}}) as group:
        by_hand(tmp_path, "drop table lake.far.t", "drop schema lake.far")
        tables.execute("insert into t values (4, 'd')")
        group.apply_only()
        assert error_of(group, "t") == "lake.table_missing"
        resync(group, "t")
        assert error_of(group, "t") is None
        assert {c.verdict for c in group.verify()} == {"identical"}


def test_a_partitioned_table_is_no_target_for_a_new_table(tables: Database, tmp_path: Path) -> None:
    """P-L01: refused before anything is copied; the other tables run."""
    by_hand(tmp_path, "create table lake.main.t (id int, v varchar)", PARTITIONED)
    with whole_group(tables, tmp_path, TWO) as group:
        assert group.refused["public.t"].code == "lake.partitioned"
        assert group.refused["public.t"].hint == 'alter table "lake"."main"."t" reset partitioned by'
        assert rows(group, "u") == source_rows(tables, "u")
