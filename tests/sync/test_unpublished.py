"""Tables that their group's own publication did not send for a while: their changes are lost, so they are re-copied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aqueduck.lake.commit.copy_files import ChunkFile
from aqueduck.spark.query.copy_job import CopyJob
from aqueduck.sync.watching.source_watch import SourceWatch
from tests.fix_postgres import Database
from tests.whole_group import WholeGroup, whole_group

SETUP = """
    create table t (id int primary key, v int); insert into t values (1, 1), (2, 2);
    create table other (id int primary key)
"""
TABLES: dict[str, Any] = {"t": {}, "other": {}}


def check(group: WholeGroup) -> None:
    found = group.verify()
    assert {(c.verdict, c.note) for c in found} == {("identical", None)}, found


@pytest.mark.parametrize(
    "change",
    [
        "alter publication aqueduck_test drop table t; update t set v = 7",
        pytest.param(
            "alter publication aqueduck_test drop table t; update t set v = 7; alter publication aqueduck_test add table t",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "alter publication aqueduck_test set (publish = 'insert'); update t set v = 7",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_publication_that_was_changed_by_hand(db: Database, tmp_path: Path, change: str) -> None:
    """P-S17, P-S30: missing changes are detected in the catalog; the stream alone shows only the later ones."""
    db.execute(SETUP)
    watch = SourceWatch()
    with whole_group(db, tmp_path, TABLES) as group:
        watch.look(group.runner)
        db.execute(change)
        watch.look(group.runner)
        group.copy()
        check(group)
        db.execute("update t set v = 8 where id = 1; insert into other values (1)")
        group.apply()
        check(group)
        copies = group.copies
        watch.look(group.runner)
        group.copy()
        assert group.copies == copies


GAPS = {
    "taken out and put back": ("alter publication {0} drop table t", "alter publication {0} add table t"),
    "made again": (
        "drop publication {0}",
        "create publication {0} for table only t, only other with (publish_via_partition_root = true)",
    ),
    "made for all tables": ("drop publication {0}", "create publication {0} for all tables"),
    "without updates for a while": (
        "alter publication {0} set (publish = 'insert')",
        "alter publication {0} set (publish = 'insert, update, delete, truncate')",
    ),
}
THEIRS = {"publication": "theirs", "publication_by": "user"}
OURS_QUICK = ("taken out and put back", False)
THEIRS_QUICK = (("made for all tables", True), ("without updates for a while", False))


def _gaps(*quick: tuple[str, bool], without: str = "") -> list[Any]:
    found = [(gap, running) for gap in GAPS for running in (False, True) if gap != without]
    return [case if case in quick else pytest.param(*case, marks=pytest.mark.slow) for case in found]


@pytest.mark.parametrize(("gap", "running"), _gaps(OURS_QUICK, without="made for all tables"))
def test_a_gap_of_our_publication_that_is_over_is_found(
    db: Database, tmp_path: Path, gap: str, running: bool
) -> None:
    """P-S17, P-T04: somebody took a table out and put it back, between two looks of the watch or while the service was stopped."""
    db.execute(SETUP)
    with whole_group(db, tmp_path, TABLES) as group:
        pass_gap(db, group, "aqueduck_test", gap, running=running)


@pytest.mark.parametrize(("gap", "running"), _gaps(*THEIRS_QUICK))
def test_a_gap_of_a_users_publication_that_is_over_is_found(
    db: Database, tmp_path: Path, gap: str, running: bool
) -> None:
    """P-S17, P-T04: the same for a publication of the user's, which the service never changes."""
    db.execute(SETUP)
    db.execute("create publication theirs for table t, other")
    with whole_group(db, tmp_path, TABLES, group=THEIRS) as group:
        pass_gap(db, group, "theirs", gap, running=running)


def pass_gap(db: Database, group: WholeGroup, publication: str, gap: str, *, running: bool) -> None:
    """Source and lake agree after it; and what was found once is copied once."""
    group.watch.look(group.runner)
    if not running:
        group.capture.stop()
    before, after = GAPS[gap]
    for statement in (before, "update t set v = 7", after):
        db.execute(statement.format(publication))
    if not running:
        group.restart(TABLES)
    group.watch.look(group.runner)
    group.copy()
    db.execute("insert into t values (9, 9); insert into other values (1)")
    group.apply()
    check(group)
    copies = group.copies
    group.restart(TABLES)
    group.watch.look(group.runner)
    group.copy()
    assert group.copies == copies


def test_another_owner_of_the_publication_is_no_gap(db: Database, tmp_path: Path) -> None:
    """P-S24: `check` may print `alter publication … owner to`; what was sent stays what it was."""
    db.execute(SETUP)
    with whole_group(db, tmp_path, TABLES) as group:
        group.watch.look(group.runner)
        db.execute("create role publisher superuser; alter publication aqueduck_test owner to publisher")
        copies = group.copies
        group.watch.look(group.runner)
        group.restart(TABLES)
        assert group.copies == copies
    db.execute("alter publication aqueduck_test owner to postgres; drop role publisher")


def test_a_publication_that_is_changed_in_the_middle_of_a_copy(db: Database, tmp_path: Path) -> None:
    """P-S17, P-S22: the running copy is older than the missing changes, so another one follows."""
    db.execute(SETUP)
    watch = SourceWatch()
    with whole_group(db, tmp_path, TABLES) as group:
        watch.look(group.runner)
        [oid] = (oid for oid, table in group.runner.tables.items() if table.schema.name == "t")
        run, todo = (
            group.runner.copier.jobs.run,
            ["alter publication aqueduck_test drop table t; update t set v = 7"],
        )

        def disturbed(job: CopyJob) -> list[ChunkFile]:
            files = run(job)
            while todo:
                db.execute(todo.pop())
                watch.look(group.runner)
            return files

        group.runner.copier.jobs.run = disturbed
        group.runner.resync(oid)
        group.copy()
        watch.look(group.runner)
        group.copy()
        check(group)


def test_a_publication_that_was_changed_while_no_service_ran(db: Database, tmp_path: Path) -> None:
    """P-S17, P-S30: a start publishes the table again, and copies it."""
    db.execute(SETUP)
    with whole_group(db, tmp_path, TABLES) as group:
        group.capture.stop()
        db.execute("alter publication aqueduck_test drop table t; update t set v = 7")
        group.restart(TABLES)
        check(group)
        assert group.copies == 2
        group.restart(TABLES)
        assert group.copies == 2


def test_a_table_that_a_start_refused(db: Database, tmp_path: Path) -> None:
    """P-S02, P-S17: without a key it was taken out of the publication; with a new key, it continued with a gap."""
    db.execute(SETUP)
    with whole_group(db, tmp_path, TABLES) as group:
        db.execute("alter table t drop constraint t_pkey")
        group.restart(TABLES)
        assert list(group.refused) == ["public.t"]
        db.execute("insert into t values (3, 3)")
        group.apply()
        db.execute("alter table t add primary key (id)")
        group.restart(TABLES)
        check(group)


def test_a_table_whose_name_another_one_has_by_now(db: Database, tmp_path: Path) -> None:
    """P-S13: a table that is added published the other one instead, and ours was not sent any more."""
    db.execute(SETUP)
    with whole_group(db, tmp_path, {"t": {}}) as group:
        [oid] = group.runner.tables
        db.execute("alter table t rename to t_before; create table t (id int primary key, v int)")
        group.add("other")
        db.execute("update t_before set v = 7; insert into t values (9, 9); insert into other values (1)")
        group.apply()
        assert db.value("select array_agg(prrelid::int8) @> array[%s::int8] from pg_publication_rel", (oid,))
        assert group.read("select v from lake.main.t order by id") == [(7,), (7,)]


def test_a_table_that_left_and_came_back_is_copied_once(db: Database, tmp_path: Path) -> None:
    """P-S19: a table that leaves and comes back between two looks of the watch has missed nothing."""
    db.execute(SETUP)
    watch = SourceWatch()
    with whole_group(db, tmp_path, TABLES) as group:
        watch.look(group.runner)
        group.remove("t")
        group.add("t")
        copies = group.copies
        watch.look(group.runner)
        group.copy()
        assert group.copies == copies
        check(group)
