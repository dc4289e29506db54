"""A lake and a state directory of 0.1.0 are taken over: nothing is re-copied, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

from aqueduck.lake.session.catalog import open_lake
from tests.fix_postgres import Database
from tests.whole_group import WholeGroup, whole_group


def as_0_1_left_it(group: WholeGroup) -> None:
    """Remove what 0.1.0 did not record: own targets, the uuids of targets, the slot's last position, verdicts."""
    with open_lake(group.config.lake) as lake:
        lake.execute("drop table lake.aqueduck.targets")
        lake.execute("alter table lake.aqueduck.tables drop column target_uuid")
    (group.runner.directory / "slot").unlink(missing_ok=True)


def test_a_group_continues_from_the_state_of_0_1(db: Database, tmp_path: Path) -> None:
    """The lake's position, the states of the tables and parked changes are read as they are; no table is re-copied."""
    db.execute(
        "create table t (id int primary key, v text); create table u (id int primary key, v text);"
        " insert into t select g, 'copied' from generate_series(1, 50) g; insert into u values (1, 'copied')"
    )
    with whole_group(db, tmp_path, {"t": {}, "u": {}}) as group:
        db.execute("insert into t values (51, 'streamed'); update u set v = 'streamed'")
        group.apply()
        copies = group.copies
        group.stop()
        as_0_1_left_it(group)
        db.execute(
            "update t set v = 'meanwhile' where id <= 2; delete from u; insert into u values (2, 'new')"
        )
        group.start({"t": {}, "u": {}})
        group.apply()
        assert group.copies == copies
        assert {(c.verdict, c.note) for c in group.verify()} == {("identical", None)}
        assert group.read("select count(*) filter (v = 'meanwhile'), count(*) from lake.main.t") == [(2, 51)]
        assert all(state.target_uuid for state in group.runner.states.values())
