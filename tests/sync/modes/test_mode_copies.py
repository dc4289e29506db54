"""Copies in every mode: the first, interrupted ones, and later ones that must not lose what the target keeps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from aqueduck.lake.commit.copy_files import ChunkFile
from aqueduck.lake.session.catalog import open_lake
from aqueduck.model.errors import ConnectionLostError
from aqueduck.model.modes import TableMode
from aqueduck.spark.query.copy_job import CopyJob
from tests.fix_postgres import Database
from tests.sync.copying.test_copies import World, change

MODES = ("append", "history", "soft_delete")


@pytest.fixture(params=MODES)
def world(request: pytest.FixtureRequest, db: Database, tmp_path: Path) -> Iterator[World]:
    source = ("src", "one") if request.param != "append" else (None, None)
    with closing(World(db, tmp_path, TableMode(request.param, *source))) as world:
        # Unchanged values are the log's one gap: with the whole old row in WAL it has none.
        db.execute("alter table t replica identity full")
        yield world


def read(world: World, statement: str) -> list[tuple[Any, ...]]:
    with open_lake(world.config, read_only=True) as observer:
        return observer.query(statement)[0]


def resync(world: World) -> None:
    with world.book.commit_lock:
        world.book.await_copy(world.oid)
    world.copier.forget(world.oid)
    world.copy_until_ready()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.slow
def test_interrupted_copies_and_later_ones(world: World, seed: int) -> None:
    """The same in every mode, for longer."""
    interrupt_and_resync(world, seed)


@pytest.mark.slow
def test_an_interrupted_copy_and_a_later_one_of_a_log(db: Database, tmp_path: Path) -> None:
    """P-S16: chunks of several snapshots and a resync end in the source's rows; the log has each change once."""
    with closing(World(db, tmp_path, TableMode("append"))) as world:
        db.execute("alter table t replica identity full")
        interrupt_and_resync(world, 1)


def interrupt_and_resync(world: World, seed: int) -> None:
    """P-S05, P-S16, P-S22: chunks of several snapshots and a resync end in the source's rows; a log has each change once."""
    dice = random.Random(seed)
    stops = [dice.randint(3, 10)]

    def interrupted(job: CopyJob, number: int) -> ChunkFile:
        for _ in range(dice.randint(0, 3)):
            change(world.db, dice)
        if number == stops[0]:
            stops[0] = -1
            for _ in range(10):
                change(world.db, dice)
            raise ConnectionLostError("the snapshot is gone")
        return job.run([number])[0]

    world.run = interrupted
    world.copy_until_ready()
    world.catch_up()
    world.assert_same()
    for _ in range(20):
        change(world.db, dice)
    world.catch_up()
    world.assert_same()
    before = read(world, "select count(*) from lake.main.t")[0][0]
    stops[0] = -1
    world.run = interrupted
    world.db.execute("delete from t where id between 40 and 60; insert into t values (7777, 'late', 'doc')")
    resync(world)
    world.catch_up()
    world.assert_same()
    assert read(world, "select count(*) from lake.main.t")[0][0] > before, "what was kept is still there"
    if world.mode.name == "append":
        [(repeated,)] = read(
            world,
            "select count(*) from (select 1 from lake.main.t where _op not in ('copy', 'resync')"
            " group by _commit_lsn, _seq having count(*) > 1)",
        )
        assert repeated == 0
        assert read(world, "select count(*) from lake.main.t where _op = 'resync'") == [(1,)]
        assert read(world, "select _op from lake.main.t where id = 7777 order by _commit_lsn, _seq") == [
            ("insert",),
            ("copy",),
        ], "changes between the request and the copy are in the log as well"
    if world.mode.name == "history":
        [(broken,)] = read(world, "select count(*) from lake.main.t where _valid_to < _valid_from")
        [(doubled,)] = read(
            world,
            "select count(*) from (select id from lake.main.t where _valid_to is null group by id having count(*) > 1)",
        )
        assert (broken, doubled) == (0, 0)
        assert read(world, "select count(*) from lake.main.t where id = 50 and _valid_to is null") == [(0,)]


def test_a_truncate_before_the_copy_does_not_reach_its_rows(world: World) -> None:
    """P-S05, P-S11: a truncate that committed before the copy, and comes with a later batch, is part of the copy."""
    world.db.execute("truncate t; insert into t select g, 'new', 'doc' from generate_series(1, 5) g")
    world.copy_until_ready()  # nothing of it was applied or parked
    world.catch_up()
    world.assert_same()
    assert read(world, "select count(*) from lake.main.t") == [(5,)]
    world.db.execute(
        "insert into t values (6, 'before', 'doc'); truncate t cascade; insert into t values (7, 'x', 'y')"
    )
    world.catch_up()
    world.assert_same()
    counts = {"append": 8, "history": 7, "soft_delete": 7}  # five copies, 6 and 7; a log has the truncate
    assert read(world, "select count(*) from lake.main.t") == [(counts[world.mode.name],)]


def test_a_column_with_another_type_is_set_aside(db: Database, tmp_path: Path) -> None:
    """P-S12: what a log has of a column stays under another name, and the rows are re-copied beside it."""
    with closing(World(db, tmp_path, TableMode("append"))) as world:
        db.execute("delete from t where id > 5")
        db.execute("vacuum full t")
        world.copy_until_ready()
        world.catch_up()
        db.execute("alter table t alter v type int using length(v)")
        resync(world)
        rows = read(
            world, "select _op, v, v_1 = repeat('v', 300) from lake.main.t order by _commit_lsn, _seq"
        )
        assert rows == [*[("copy", None, True)] * 5, ("resync", None, None), *[("copy", 300, None)] * 5]
