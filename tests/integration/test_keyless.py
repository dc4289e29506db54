"""Tables without a key: REPLICA IDENTITY FULL, rows that are equal, exactly as many as the source has."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.fix_postgres import Database
from tests.flow import Flow

SETUP = """
    create table keyless (a int, b text, c numeric(6,2), d double precision, e jsonb, f text);
    alter table keyless replica identity full;
    alter table keyless alter column f set storage external;
"""


def rows_of(db: Database) -> Counter[str]:
    return Counter(str(row) for row in db.query("select a, b, c, d::text, e::text, f from keyless"))


def rows_in(flow: Flow) -> Counter[str]:
    found: list[tuple[Any, ...]] = flow.read(
        "select a, b, c, case when d = 0 and signbit(d) then '-0' else rtrim(rtrim(printf('%.1f', d), '0'), '.') end, "
        "e::varchar, f from lake.stream.keyless"
    )
    return Counter(str(row) for row in found)


def test_columns_called_like_what_finds_the_rows(db: Database, tmp_path: Path) -> None:
    """P-S10: a user's column `rowid` hides the lake's own; each delete still removes one row, not all with the same value."""
    db.execute("create table odd (rowid int, k0 text); alter table odd replica identity full")
    with Flow(db, tmp_path, ["odd"]) as flow:
        db.execute(
            "insert into odd select 5, 'x' || g % 3 from generate_series(1, 9) g; insert into odd values (5, null)"
        )
        flow.catch_up(tasks=False)
        one = "(select ctid from odd where k0 = 'x{}' limit 1)"
        db.execute(f"delete from odd where ctid = {one.format(1)}; delete from odd where k0 is null")
        db.execute(f"update odd set k0 = 'x0' where ctid = {one.format(2)}")
        flow.catch_up(tasks=False)
        counted = "select k0, count(*) from {} group by k0 order by k0"
        assert flow.read(counted.format("lake.stream.odd")) == [("x0", 4), ("x1", 2), ("x2", 2)]
        assert db.query(counted.format("odd")) == [("x0", 4), ("x1", 2), ("x2", 2)]


@pytest.mark.parametrize("tasks", [False, True], ids=["by the driver", "by tasks"])
def test_equal_rows_are_kept_and_taken_one_by_one(db: Database, tmp_path: Path, tasks: bool) -> None:
    """P-S10: an update or a delete of one of several equal rows changes one row in the lake."""
    db.execute(SETUP)
    with Flow(db, tmp_path, ["keyless"]) as flow:
        db.execute(
            "insert into keyless (a, b) select 1, 'same' from generate_series(1, 5); insert into keyless default values"
        )
        db.execute(
            "insert into keyless (a, c, d, e) values (2, 'NaN', 'NaN', '{\"x\": [1, 2]}'), (null, 1.5, '-0', null)"
        )
        flow.catch_up(tasks=tasks)
        assert flow.read("select count(*) from lake.stream.keyless") == [(8,)]
        one = "(select ctid from keyless where a = 1 limit 1)"
        db.execute(f"delete from keyless where ctid = {one}")
        db.execute(f"update keyless set b = 'other' where ctid = {one}")
        flow.catch_up(tasks=tasks)
        counted = "select b, count(*) from lake.stream.keyless where a = 1 group by b order by b"
        assert flow.read(counted) == [("other", 1), ("same", 3)]
        # Back and forth within a batch is nothing; the rest of the rows is found although it is NULL or NaN.
        db.execute("update keyless set b = 'x' where a = 1; update keyless set b = 'same' where b = 'x'")
        db.execute("insert into keyless (a) values (9); delete from keyless where a = 9")
        db.execute("update keyless set b = 'seen' where a = 2 or a is null")
        flow.catch_up(tasks=tasks)
        assert flow.read(counted) == [("same", 4)]
        assert flow.read("select count(*) from lake.stream.keyless where b = 'seen'") == [(3,)]
        db.execute(
            "delete from keyless where a is null; truncate keyless; insert into keyless (a) values (7), (7)"
        )
        flow.catch_up(tasks=tasks)
        assert flow.read("select a, count(*) from lake.stream.keyless group by a") == [(7, 2)]


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 12))])
def test_random_histories_end_with_the_sources_rows(db: Database, tmp_path: Path, seed: int) -> None:
    """Few values, so that most rows have equals; large ones that are not sent again; batches of any size."""
    chance = random.Random(seed)
    db.execute(SETUP)
    large = "repeat('v', 3000)"
    with Flow(db, tmp_path, ["keyless"]) as flow:
        for _ in range(12):
            for _ in range(chance.randint(1, 8)):
                a = chance.randint(1, 3)
                one = f"ctid = any(array(select ctid from keyless where a = {a} order by random() limit {chance.randint(1, 2)}))"
                db.execute(
                    chance.choice(
                        [
                            f"insert into keyless (a, b, f) select {a}, 'b', {chance.choice(['null', large])} from generate_series(1, 2)",
                            f"update keyless set b = '{chance.choice('xy')}' where {one}",
                            f"update keyless set a = {chance.randint(1, 3)}, f = {chance.choice(['f', 'null', large])} where {one}",
                            f"delete from keyless where {one}",
                        ]
                    )
                )
            flow.catch_up(tasks=chance.random() < 0.5)
            assert rows_in(flow) == rows_of(db)


def test_what_comes_by_copy_is_found_by_the_stream(db: Database, tmp_path: Path) -> None:
    db.execute(SETUP)
    db.execute(
        "insert into keyless select 1, 'b', 1.25, 0.5, '{\"k\": null}', repeat('v', 3000) from generate_series(1, 3)"
    )
    with Flow(db, tmp_path, ["keyless"]) as flow:
        flow.copy("keyless")
        flow.session.execute("insert into lake.stream.keyless from lake.copied.keyless")
        db.execute("delete from keyless where ctid = (select max(ctid) from keyless)")
        db.execute("update keyless set a = 2 where ctid = (select min(ctid) from keyless)")
        flow.catch_up(tasks=True)
        assert rows_in(flow) == rows_of(db)
