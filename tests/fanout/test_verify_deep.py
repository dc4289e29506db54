"""`verify --deep` of a fan-out compares every row of every destination at its cursor, by connections of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aqueduck.fanout import verify_deep as fanout_deep
from aqueduck.fanout.verdicts import DestinationComparison
from aqueduck.fanout.verify import verify_destinations
from aqueduck.lake.compare import deep_digest
from tests.fanout_lakes import Fan, config, connect

UPKEEP = [
    "call ducklake_merge_adjacent_files('lake')",
    "call ducklake_flush_inlined_data('lake')",
    "call ducklake_rewrite_data_files('lake', delete_threshold => 0)",
]
NO_KEYS = {"routing": {"field": "c"}}


@pytest.fixture
def fan(tmp_path: Path) -> Iterator[Fan]:
    fan = Fan(tmp_path, {"one": "a", "two": "b"})
    fan.change(
        "create table lake.t (id int, c varchar, v double, i interval)",
        "insert into lake.t select i, (['a','b','x'])[1 + i % 3], i / 7, to_months(1) from range(300) r(i)",
    )
    fan.poll()
    yield fan
    fan.close()


def damage(fan: Fan, name: str, *statements: str) -> None:
    """By another user's connection."""
    with connect(fan.place(name), "data_inlining_row_limit 5") as con:
        for statement in statements:
            con.execute(statement)


def deeply(fan: Fan, **sections: Any) -> dict[str, DestinationComparison]:
    found = verify_destinations(config(fan, **sections), env={}, deep=True)
    return {r.destination: r for r in found}


def test_rows_that_were_changed_by_hand_are_counted_by_kind(fan: Fan) -> None:
    """P-T03: a row deleted, added, changed or doubled in a destination is a difference of that kind; the other is identical."""
    damage(
        fan,
        "one",
        "delete from lake.t where id = 3",
        "insert into lake.t values (1000, 'a', 1, null)",
        "update lake.t set v = 8 where id in (6, 9)",
        "insert into lake.t from lake.t where id = 12",
    )
    found = deeply(fan)
    counts = found["one"].deep
    assert counts is not None
    assert (counts.missing, counts.extra, counts.changed, counts.repeated) == (1, 1, 2, 1)
    assert (found["one"].verdict, found["one"].differing) == ("different", 5)
    assert found["one"].note == "main.t: rows 1 missing, 1 extra, 2 changed, 1 repeated"
    assert (found["two"].verdict, found["two"].note, found["two"].rows) == ("identical", None, 100)


def test_rows_of_another_tenant_are_found_and_their_values_are_not_shown(fan: Fan) -> None:
    """A row whose value belongs to another destination or to the source is a leak; only its table and number are reported."""
    damage(
        fan,
        "one",
        "insert into lake.t values (4, 'b', 0, null), (7, 'b', 0, null), (5, 'x', 0, null)",
    )
    found = deeply(fan)["one"]
    assert found.deep is not None
    assert (found.verdict, found.deep.foreign, found.deep.missing) == ("different", 3, 0)
    assert found.note == "main.t: rows 3 of another tenant"


def test_a_row_moved_to_another_tenant_in_the_destination_is_missing_and_foreign(fan: Fan) -> None:
    """Both halves of a move that never happened in the source are differences."""
    damage(fan, "one", "update lake.t set c = 'b' where id = 3")
    found = deeply(fan)["one"]
    assert found.deep is not None
    assert (found.verdict, found.deep.missing, found.deep.foreign) == ("different", 1, 1)


def test_rows_of_unknown_values_are_counted_and_not_judged(fan: Fan) -> None:
    """Rows that another user keeps in a destination's table under a value of their own are reported as not compared."""
    damage(fan, "one", "insert into lake.t values (1000, 'mine', 1, null)")
    found = deeply(fan)["one"]
    assert found.verdict == "identical"
    assert (
        found.note == "not compared: 1 rows with routing values that neither the source nor a destination has"
    )


def test_two_destinations_may_share_a_table(tmp_path: Path) -> None:
    """Rows of a value are no leak if its own destination keeps them in the same lake."""
    first = Fan(tmp_path, {"one": "a"})
    second = Fan(tmp_path, {"two": "b"}, places=first.places)
    second.places["two"] = first.place("one")
    try:
        first.change(
            "create table lake.t (id int, c varchar)", "insert into lake.t values (1, 'a'), (2, 'b')"
        )
        first.poll()
        second.poll()
        assert {r.verdict for r in (*deeply(first).values(), *deeply(second).values())} == {"identical"}
    finally:
        first.close()
        second.close()


def test_equal_values_that_are_not_the_same_are_distinguished(fan: Fan) -> None:
    """A month is not thirty days, although DuckDB compares them as equal."""
    damage(fan, "one", "update lake.t set i = to_days(30) where id = 3")
    counts = deeply(fan)["one"].deep
    assert counts is not None
    assert counts.changed == 1


def test_a_change_in_the_source_by_hand_that_was_not_carried_is_found(fan: Fan) -> None:
    """A destination whose cursor is ahead of its rows: the difference is found in rows, not in cursors."""
    fan.change("delete from lake.t where id = 3", "update lake.t set c = 'b' where id = 6")
    cursor = fan.latest()
    damage(fan, "one", f"update lake.aqueduck.fanout_state set last_snapshot_id = {cursor}")
    found = deeply(fan)
    assert (found["one"].verdict, found["two"].verdict) == ("different", "identical")
    counts = found["one"].deep
    assert counts is not None
    assert (counts.extra, counts.total) == (2, 2)


def test_changes_inside_of_nested_columns_are_no_differences(fan: Fan) -> None:
    """Fields that come, go, change their names and their places: rows written before and after are the same on both sides."""
    fan.change(
        "alter table lake.t add column st struct(a int, b varchar)",
        "update lake.t set st = {'a': id, 'b': 'x'}",
    )
    fan.poll()
    fan.change(
        "alter table lake.t add column st.c int",
        "update lake.t set st = {'a': id, 'b': 'y', 'c': id} where id < 30",
        "alter table lake.t drop column st.b",
        "alter table lake.t rename column st.a to aa",
        "alter table lake.t add column st.a int",
    )
    fan.poll()
    assert {(r.verdict, r.note) for r in deeply(fan).values()} == {("identical", None)}
    damage(fan, "one", "update lake.t set st = {'aa': -1, 'c': 1, 'a': 1} where id = 3")
    assert deeply(fan)["one"].differing == 1


def test_an_append_only_destination_must_have_what_the_source_has(fan: Fan, tmp_path: Path) -> None:
    """Without keys, rows that the source removed stay and are no difference; one that is missing is."""
    log = Fan(tmp_path / "log", {"one": "a", "two": "b"}, keys=())
    log.directory.mkdir()
    try:
        log.change(
            "create table lake.t (id int, c varchar)", "insert into lake.t select i, 'a' from range(50) r(i)"
        )
        log.poll()
        log.change("delete from lake.t where id = 3")
        log.poll()
        found = deeply(log, **NO_KEYS)["one"]
        assert found.verdict == "identical"
        assert found.note == "append-only: 1 rows that the source updated or deleted stay unchanged"
        damage(log, "one", "delete from lake.t where id = 4")
        found = deeply(log, **NO_KEYS)["one"]
        assert (found.verdict, found.differing) == ("different", 1)
    finally:
        log.close()


def test_what_cannot_be_read_is_never_identical(fan: Fan) -> None:
    """P-T01: a destination that is away, one that is not seeded and an expired cursor are not compared, with the reason."""
    place = fan.place("one")
    fan.places["one"] = place.model_copy(update={"catalog": f"sqlite:{fan.directory}/gone/gone.sqlite"})
    assert {n: r.verdict for n, r in deeply(fan).items()} == {"one": "not compared", "two": "identical"}
    fan.places["one"] = place
    damage(fan, "one", "delete from lake.aqueduck.fanout_state")
    assert deeply(fan)["one"].note == "it is not seeded yet"
    fan.change(
        "insert into lake.t values (900, 'a', 1, null)", "insert into lake.t values (901, 'a', 1, null)"
    )
    fan.change("call ducklake_expire_snapshots('lake', older_than => now())")
    found = deeply(fan)["two"]
    assert (found.verdict, "lake.expired" in (found.note or "")) == ("not compared", True)


def test_more_differences_than_are_listed_are_said_to_be_there(
    fan: Fan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed memory: a destination that differs everywhere is different, without a count of each kind."""
    for module in (fanout_deep, deep_digest):
        monkeypatch.setattr(module, "LISTED_ROWS_MAX", 20)
    damage(fan, "one", "update lake.t set v = -1")
    found = deeply(fan)["one"]
    assert found.deep is not None
    assert (found.verdict, found.deep.more) == ("different", True)


def test_a_moving_fan_out_gives_no_false_alarm(fan: Fan) -> None:
    """Cycles, moves between tenants and upkeep of all lakes between any two reads of a comparison: all of it is identical."""
    moves = itertools.count(1000)

    def move(*_: object) -> None:
        n = next(moves)
        fan.change(
            f"insert into lake.t values ({n}, 'a', 1, null)",
            f"update lake.t set c = 'b', v = v + 1 where id % 10 = {n % 10} and c = 'a'",
            f"delete from lake.t where id % 17 = {n % 17}",
            UPKEEP[n % len(UPKEEP)],
        )
        fan.poll("one" if n % 2 else "two")
        damage(fan, "one" if n % 2 else "two", UPKEEP[n // 2 % len(UPKEEP)])

    for _ in range(6):
        found = verify_destinations(config(fan), env={}, deep=True, progress=move)
        assert {(r.verdict, r.note) for r in found} == {("identical", None)}
    assert next(moves) > 1010
