"""What is found in the source's catalog, on the whole way but Spark: rewrites of partitions are no truncates."""

from __future__ import annotations

from pathlib import Path

import pytest

from aqueduck.sync.watching.source_watch import SourceWatch
from tests.fix_postgres import Database
from tests.whole_group import WholeGroup, whole_group

SETUP = """
    create table p (id int, v text, n int default 1, primary key (id)) partition by range (id);
    create table p_low partition of p for values from (0) to (1000);
    create table p_high partition of p for values from (1000) to (2000) partition by range (id);
    create table p_high_1 partition of p_high for values from (1000) to (1500);
    create table p_high_2 partition of p_high for values from (1500) to (2000);
    insert into p select g, 'copied' from generate_series(1, 1999) g;
"""


def look(group: WholeGroup, watch: SourceWatch) -> None:
    """The catalog as it is now, and the copies that this calls for."""
    group.apply()
    watch.look(group.runner)
    group.copy()


def verdicts(group: WholeGroup) -> set[str]:
    return {c.verdict for c in group.verify()}


REWRITES = (
    "vacuum (full) p_low",
    "vacuum (full) p",
    "cluster p_high_1 using p_high_1_pkey",
    "vacuum (full, freeze) p_low",
)


def rewrite_and_truncate(db: Database, directory: Path, mode: str, rewrites: tuple[str, ...]) -> None:
    db.execute(SETUP)
    watch, tables = SourceWatch(), {"p": {"mode": mode}}
    with whole_group(db, directory, tables) as group:
        for statement in rewrites:
            db.execute(statement)
            look(group, watch)
            assert group.copies == 1, statement
        db.execute("insert into p values (0, 'later'); update p set v = 'later' where id % 7 = 0")
        db.execute("vacuum (full) p_low")
        look(group, SourceWatch())  # as after a restart: the lake's marks are all that is known
        assert group.copies == 1
        assert verdicts(group) == {"identical"}

        db.execute("truncate p_high_2")
        db.execute(
            "begin; truncate p_low; insert into p select g, 'again' from generate_series(1, 9) g; commit"
        )
        db.execute("vacuum (full) p_low")
        look(group, watch)
        assert group.copies == 2
        assert verdicts(group) == {"identical"}
        look(group, watch)
        assert group.copies == 2


def test_a_rewritten_partition_of_a_log_is_no_truncated_one(db: Database, tmp_path: Path) -> None:
    """P-S14, P-S16: VACUUM FULL and CLUSTER cause no copy; a truncate of one partition does, whatever came after it."""
    rewrite_and_truncate(db, tmp_path, "append", REWRITES[1:2])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["upsert", "append", "history"])
def test_every_kind_of_rewrite(any_db: Database, tmp_path: Path, mode: str) -> None:
    """P-S14: the same on every server, one after the other."""
    rewrite_and_truncate(any_db, tmp_path, mode, REWRITES)


@pytest.mark.slow
def test_a_partition_that_was_away_for_a_while(db: Database, tmp_path: Path) -> None:
    """P-S14: rows that changed while it was detached are in no stream; the table is re-copied, even if none is left."""
    db.execute(SETUP)
    watch = SourceWatch()
    with whole_group(db, tmp_path, {"p": {}}) as group:
        look(group, watch)
        for number, statement in enumerate(("delete from p_high where id % 2 = 0", "delete from p_high_2")):
            db.execute("alter table p detach partition p_high")
            db.execute(statement)
            db.execute("alter table p attach partition p_high for values from (1000) to (2000)")
            look(group, watch)
            assert group.copies == 2 + number
            assert verdicts(group) == {"identical"}
        look(group, watch)
        assert group.copies == 3


@pytest.mark.slow
def test_rows_of_a_transaction_that_was_open_do_not_hide_a_truncate(db: Database, tmp_path: Path) -> None:
    """P-S14: a row that an older transaction writes after the truncate does not count as an earlier row."""
    db.execute(SETUP)
    watch = SourceWatch()
    with whole_group(db, tmp_path, {"p": {}}) as group:
        with db.connect() as old:
            old.execute("begin; create table has_a_number ()")
            db.execute("vacuum (full) p_high_1")
            watch.look(group.runner)
            db.execute("truncate p_low")
            old.execute("insert into p values (5, 'by an older transaction')")
            old.execute("commit")
        look(group, watch)
        assert group.copies == 2
        assert verdicts(group) == {"identical"}


@pytest.mark.slow
def test_a_truncate_of_the_whole_table_is_in_the_stream(db: Database, tmp_path: Path) -> None:
    """P-S11, P-S14: it changes every partition, and is not re-copied; the next one of a single partition is."""
    db.execute(SETUP)
    watch = SourceWatch()
    with whole_group(db, tmp_path, {"p": {}}) as group:
        look(group, watch)
        db.execute("truncate p; insert into p values (1, 'after'), (1600, 'after')")
        look(group, watch)
        assert group.copies == 1
        assert verdicts(group) == {"identical"}
        db.execute("truncate p_high_2")
        look(group, watch)
        assert group.copies == 2
        assert verdicts(group) == {"identical"}
