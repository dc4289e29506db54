"""Small files of a source are merged between two reads: what is deleted or moved afterwards arrives all the same."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aqueduck.config.sync import LakeConfig
from aqueduck.lake.session.catalog import open_lake
from aqueduck.lake.source.feed import Feed, read_part
from aqueduck.lake.source.lake_changes import Routes, read_routed
from aqueduck.lake.source.source_lake import SourceLake, split_plan
from aqueduck.lake.upkeep import relayout
from aqueduck.lake.upkeep.relayout import relayout_step
from tests.fanout_lakes import Fan, T

AFTERWARDS = (
    "delete from lake.t where id = 12",
    "update lake.t set v = 1 where id = 21",
    "update lake.t set c = 'teal' where id = 33",
)


@pytest.fixture
def fan(tmp_path: Path) -> Iterator[Fan]:
    """Eleven small commits that a merge made one file, and two destinations that are caught up."""
    fan = Fan(tmp_path, {"one": "quack", "two": "teal"}, inline=0)
    fan.change("create table lake.t (id int, c varchar, v int)")
    for n in range(11):
        fan.change(f"insert into lake.t select i, 'quack', 0 from range({n * 10}, {n * 10 + 10}) r(i)")
    fan.change("call ducklake_merge_adjacent_files('lake')")
    fan.poll()
    yield fan
    fan.close()


def changes(fan: Fan, start: int, end: int, parts: int = 1) -> list[tuple[Any, ...]]:
    """What `ducklake_changes` gives of a range: kind, lake snapshot, id, tenant and number."""
    with fan.pool.use(fan.place("source"), read_only=True) as lake:
        found = Feed(lake, T).changes(start, end, ["id", "c", "v"], parts)
    rows = [r for p in found for b in read_part(fan.pool, fan.place("source"), p) for r in b.to_pylist()]
    return sorted((r["_lake_snapshot_id"], r["_change_type"], r["id"], r["c"], r["v"]) for r in rows)


def test_what_is_deleted_or_moved_after_a_merge_leaves_its_destination(fan: Fan) -> None:
    """P-T03, P-F01, P-F02, hazard 13: each of several changes of a merged file arrives, polled one by one."""
    for statement in AFTERWARDS:
        fan.change(statement)
        fan.poll()
        assert fan.differing() == {}


def test_several_changes_of_a_merged_file_arrive_together(fan: Fan) -> None:
    """P-T03, hazard 13: the same in one transaction, and for destinations whose cursors differ."""
    fan.change(";".join(["begin", *AFTERWARDS, "commit"]))
    fan.poll("one")
    fan.change("delete from lake.t where id in (1, 22, 33)", "insert into lake.t values (22, 'teal', 5)")
    fan.poll()
    assert fan.differing() == {}


@pytest.mark.parametrize("parts", [1, 3])
def test_changes_of_a_merged_file_have_their_lake_snapshots(fan: Fan, parts: int) -> None:
    """P-T03, hazard 13: `ducklake_changes` loses no delete and dates each, however it is split up."""
    start = fan.latest()
    fan.change("delete from lake.t where id in (12, 105)", *AFTERWARDS[1:])
    assert changes(fan, start, start + 3, parts) == [
        (start + 1, "delete", 12, "quack", 0),
        (start + 1, "delete", 105, "quack", 0),
        (start + 2, "update_postimage", 21, "quack", 1),
        (start + 2, "update_preimage", 21, "quack", 0),
        (start + 3, "update_postimage", 33, "teal", 0),
        (start + 3, "update_preimage", 33, "quack", 0),
    ]
    assert changes(fan, start, start + 1, parts) == changes(fan, start, start + 3, parts)[:2]


def test_a_row_of_a_merged_file_is_inserted_and_deleted_at_its_time(fan: Fan) -> None:
    """P-T03, hazard 13: a history read after a merge has each insert and each delete once, at its time."""
    start = fan.latest()
    fan.change("insert into lake.t values (200, 'teal', 0)", "insert into lake.t values (201, 'teal', 0)")
    fan.change("call ducklake_merge_adjacent_files('lake')", "delete from lake.t where id in (200, 201)")
    assert changes(fan, start, start + 4) == [
        (start + 1, "insert", 200, "teal", 0),
        (start + 2, "insert", 201, "teal", 0),
        (start + 4, "delete", 200, "teal", 0),
        (start + 4, "delete", 201, "teal", 0),
    ]


def test_rows_that_leave_a_file_in_two_steps_are_reported_once(fan: Fan) -> None:
    """P-T03: one transaction deletes some rows of a file, then all others; `ducklake_changes` has each once."""
    start = fan.latest()
    fan.change("insert into lake.t values (200, 'teal', 0), (201, 'teal', 0)")
    fan.change("begin; delete from lake.t where id = 200; update lake.t set v = 1 where id = 201; commit")
    assert changes(fan, start + 1, start + 2) == [
        (start + 2, "delete", 200, "teal", 0),
        (start + 2, "update_postimage", 201, "teal", 1),
        (start + 2, "update_preimage", 201, "teal", 0),
    ]


def test_batches_are_limited_by_the_rows_of_each_lake_snapshot(fan: Fan) -> None:
    """P-T03: how many changes a lake snapshot has is counted where they happened, including those of merged files."""
    start = fan.latest()
    fan.change("delete from lake.t where id in (12, 105)", "delete from lake.t where id = 13")
    with fan.pool.use(fan.place("source"), read_only=True) as lake:
        assert Feed(lake, T).rows_by_snapshot(start, start + 2) == [(start + 1, 2), (start + 2, 1)]


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_plan_that_is_split_or_overtaken_by_a_merge_dates_removals(fan: Fan, parts: int) -> None:
    """P-T03: every reader gets each removal with its lake snapshot, even if files were merged before the read."""
    start = fan.latest()
    fan.change("insert into lake.t values (200, 'quack', 0)", "insert into lake.t values (201, 'quack', 0)")
    fan.change(*AFTERWARDS)
    with fan.pool.use(fan.place("source"), read_only=True) as lake:
        plan = SourceLake(lake, T).plan("c", ["id"], start, start + 5)
    fan.change("call ducklake_merge_adjacent_files('lake')")
    routes = Routes(("quack",), (start,), (0,))
    names = [read_routed(fan.pool, piece, routes)[0] for piece in split_plan(plan, parts)]
    rows = [row for name in names for row in fan.pool.con.execute(f"select s, op, c0 from {name}").fetchall()]
    assert sorted(rows) == [
        (start + 1, True, 200),
        (start + 2, True, 201),
        (start + 3, False, 12),
        (start + 4, False, 21),
        (start + 4, True, 21),
        (start + 5, False, 33),
    ]


def test_rows_that_a_relayout_rewrites_are_not_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P-F01, P-T03: rewritten rows have new row ids; without keys they must not arrive as inserted rows."""
    monkeypatch.setattr(relayout, "STEP_BYTES", 1)
    fan = Fan(tmp_path, {"one": "a"}, keys=(), inline=0)
    fan.change("create table lake.t (id int, c varchar, v int)")
    for n in range(2):
        fan.change(f"insert into lake.t select i, 'a', 0 from range({n * 10}, {n * 10 + 10}) r(i)")
    fan.poll()
    fan.change("alter table lake.t set partitioned by (v)")
    place = fan.place("source")
    with open_lake(LakeConfig(catalog=place.catalog, data_path=place.data_path)) as session:
        number, after = relayout_step(session, T, -1)
        assert number == 1
        assert relayout_step(session, T, after)[0] == 1
    fan.change("insert into lake.t values (100, 'a', 0)")
    done = fan.poll()
    assert [a.seeded for a in done] == [True]
    assert fan.differing() == {}
    fan.change("insert into lake.t values (101, 'a', 0)", "delete from lake.t where id = 1")
    fan.poll()
    assert len(fan.rows("one")) == 22  # it keeps the row that was deleted
    fan.close()


@pytest.mark.parametrize("seed", range(4))
def test_append_only_destinations_never_double_updates(tmp_path: Path, seed: int) -> None:
    """P-F01, P-T03: without keys an update adds nothing, even if its file was merged before it was read."""
    dice, numbers = random.Random(seed), itertools.count()
    fan = Fan(tmp_path, {"one": "a"}, keys=(), inline=dice.choice((0, 0, 5)))
    fan.change("create table lake.t (id int, c varchar, v int)")
    fan.poll()
    expected: Counter[int] = Counter()
    """How often each id was inserted, or, after a seed, was there."""
    for _ in range(60):
        match dice.choice(
            ("insert", "insert", "update", "delete", "mixed", "merge", "flush", "poll", "poll")
        ):
            case "insert":
                first = next(numbers) * 100
                fan.change(f"insert into lake.t select i, 'a', 0 from range({first}, {first + 3}) r(i)")
                expected.update(range(first, first + 3))
            case "update":
                fan.change(f"update lake.t set v = v + 1 where id % 3 = {dice.randrange(3)}")
            case "delete":
                fan.change(f"delete from lake.t where id % 100 = {dice.randrange(3)} and v > 1")
            case "mixed":
                first = next(numbers) * 100
                fan.change(
                    f"begin; insert into lake.t values ({first}, 'a', 0); delete from lake.t where id = {first - 100}; commit"
                )
                expected[first] += 1
            case "merge":
                fan.change("call ducklake_merge_adjacent_files('lake')")
            case "flush":
                fan.change("call ducklake_flush_inlined_data('lake')")
            case _:
                done = fan.poll()
                assert not [a.error for a in done if a.error]
                if any(a.seeded for a in done):
                    expected = Counter(i for i, _, _ in fan.source_rows("a"))
                assert Counter(i for i, _, _ in fan.rows("one")) == expected, seed
    fan.close()
