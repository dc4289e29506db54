"""
Random histories with upkeep of every kind between any two reads, for the fan-out and for `ducklake_changes`.

Unlike `test_fanout_histories`, which makes short ones and shrinks them, these are long: faults of DuckLake's feed show in tables
that were merged, flushed and rewritten several times.  A failure names seed, inlining and round, and repeats with them.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from aqueduck.lake.source.feed import Feed, read_part
from aqueduck.model.errors import SourceExpiredError
from tests.fanout_lakes import Fan, T

IDS = 60
TENANTS = ("quack", "teal", "nobody", None)
UPKEEP = (
    "call ducklake_merge_adjacent_files('lake')",
    "call ducklake_flush_inlined_data('lake')",
    "call ducklake_rewrite_data_files('lake', delete_threshold => 0)",
    "call ducklake_rewrite_data_files('lake')",
    "call ducklake_expire_snapshots('lake', older_than => now());"
    "call ducklake_cleanup_old_files('lake', cleanup_all => true)",
)


class Source:
    """A table that changes at random; ids are unique, as keys have to be. The third column is `value`."""

    def __init__(self, fan: Fan, dice: random.Random, value: str) -> None:
        self.fan, self.dice, self.value = fan, dice, value
        self.done: list[str] = []
        fan.change(f"create table lake.t (id int, c varchar, {value} int)")

    def change(self) -> None:
        statements = [self._statement() for _ in range(self.dice.choice((1, 1, 1, 1, 3)))]
        self._run(statements[0] if len(statements) == 1 else ";".join(["begin", *statements, "commit"]))

    def upkeep(self) -> None:
        self._run(self.dice.choices(UPKEEP, (6, 4, 3, 1, 1))[0])

    def _statement(self) -> str:
        dice, one = self.dice, self.dice.randrange(IDS)
        some = dice.choice((f"id = {one}", f"id % {dice.randrange(2, 9)} = {dice.randrange(3)}"))
        tenant = dice.choice(TENANTS)
        match dice.choices(("insert", "delete", "update", "move", "key", "swap"), (8, 4, 4, 3, 2, 1))[0]:
            case "insert":
                rows = f"from range({one}, {one + dice.randrange(1, 12)}) r(i) where i not in (select id from lake.t)"
                return f"insert into lake.t select i, {_text(tenant)}, {dice.randrange(9)} {rows}"
            case "delete":
                return f"delete from lake.t where {some}"
            case "update":
                return f"update lake.t set {self.value} = {self.value} + 1 where {some}"
            case "move":
                return f"update lake.t set c = {_text(tenant)} where {some}"
            case "key":
                free = f"{one + IDS} not in (select id from lake.t)"
                return f"update lake.t set id = {one + IDS} where id = {one} and {free}"
            case _:
                return f"update lake.t set id = {2 * one + 1} - id where id in ({one}, {one + 1})"

    def _run(self, step: str) -> None:
        try:
            self.fan.change(step)
        except duckdb.TransactionException:  # what DuckLake itself refuses to commit did not happen
            with contextlib.suppress(duckdb.Error):
                self.fan.source.execute("rollback")
            step = f"-- refused: {step}"
        self.done.append(step)


class Follower:
    """A consumer with all rows, which keeps them up to date by `ducklake_changes`."""

    def __init__(self, fan: Fan) -> None:
        self.fan = fan
        self.offset = fan.latest()
        self.rows: Counter[tuple[Any, ...]] = Counter()

    def follow(self, parts: int) -> None:
        latest = self.fan.latest()
        try:
            for kind, row in self._changes(latest, parts):
                self.rows[row] += 1 if kind in ("insert", "update_postimage") else -1
        except SourceExpiredError:
            self.rows = self.there()
        self.offset = latest

    def _changes(self, latest: int, parts: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
        place = self.fan.place("source")
        with self.fan.pool.use(place, read_only=True) as lake:
            pieces = Feed(lake, T).changes(self.offset, latest, ["id", "c", "v"], parts)
        for piece in pieces:
            for batch in read_part(self.fan.pool, place, piece):
                for row in batch.to_pylist():
                    assert self.offset < row["_lake_snapshot_id"] <= latest
                    yield row["_change_type"], (row["id"], row["c"], row["v"])

    def there(self) -> Counter[tuple[Any, ...]]:
        return Counter(self.fan.source.execute("select id, c, v from lake.t").fetchall())

    def differing(self) -> dict[str, Any]:
        there = self.there()
        rows = Counter({row: n for row, n in self.rows.items() if n})
        return {} if rows == there else {"too much": rows - there, "missing": there - rows}


def _text(value: str | None) -> str:
    return "null" if value is None else f"'{value}'"


def run(seed: int, inline: int, rounds: int, value: str = "v") -> None:
    """So many rounds of a history; each changes, keeps up and reads in any order, and is compared at its end."""
    dice = random.Random(f"{seed} {inline}")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        fan = Fan(Path(directory), {"one": "quack", "two": "teal"}, inline=inline)
        try:
            source = Source(fan, dice, value)
            follower = Follower(fan) if value == "v" else None
            fan.poll()
            for number in range(rounds):
                step(source, follower, dice)
                found = {**fan.differing(), **(follower.differing() if follower else {})}
                assert not found, (seed, inline, number, found, source.done[-12:])
        finally:
            fan.close()


def step(source: Source, follower: Follower | None, dice: random.Random) -> None:
    fan = source.fan
    for what in dice.choices(
        ("change", "upkeep", "poll one", "follow"), (6, 3, 1, 1), k=dice.randrange(1, 7)
    ):
        match what:
            case "change":
                source.change()
            case "upkeep":
                source.upkeep()
            case "poll one":
                fan.poll(dice.choice(("one", "two")))
            case _:
                if follower:
                    follower.follow(dice.randrange(1, 4))
    assert not [a.error for a in fan.poll() if a.error]
    if follower:
        follower.follow(dice.randrange(1, 4))


@pytest.mark.parametrize(("seed", "inline"), [(1, 0), (7, 5)])
def test_upkeep_between_polls_changes_nothing_that_arrives(seed: int, inline: int) -> None:
    """P-T03, P-T04, P-F01, P-F02, hazard 13: after each poll every destination is the source, and so is a replay of `ducklake_changes`."""
    run(seed, inline, rounds=14)


def test_a_column_that_hides_the_places_of_rows_doubles_none() -> None:
    """P-T03, P-F01: a merge gives updated rows other row ids, and rows cannot be told apart by file and number either."""
    run(26, 0, rounds=8, value="filename")


@pytest.mark.slow
@pytest.mark.parametrize("inline", [0, 5, 1000])
@pytest.mark.parametrize("seed", range(10, 16))
def test_upkeep_between_polls_over_long_histories(seed: int, inline: int) -> None:
    """P-T03, P-T04, P-F01, P-F02, hazard 13: the same for many long ones."""
    run(seed, inline, rounds=40)
