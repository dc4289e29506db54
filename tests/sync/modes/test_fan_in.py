"""
Several sources of one target in two running groups, on the whole way but Spark: each has its own connection to the lake.

A single conflict is in tests/lake/fold/test_modes.py.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.fix_postgres import Database
from tests.whole_group import WholeGroup, whole_group

REGIONS = ("eu", "us", "asia")
GROUPS = {"one": ("eu", "asia"), "two": ("us",)}
ALL = ("upsert", "append", "history", "soft_delete")


def wanted(regions: tuple[str, ...], modes: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    return {
        f"{region}.{mode}": {
            "target": f"main.{mode}_all", "mode": mode, "source_column": "region", "source_value": region,
        }
        for region in regions for mode in modes
    }  # fmt: skip


def make(db: Database, modes: tuple[str, ...]) -> None:
    for region in REGIONS:
        db.execute(f"create schema {region}")
        for mode in modes:
            db.execute(
                f"create table {region}.{mode} (id int primary key, v text, doc text);"
                f" alter table {region}.{mode} alter doc set storage external;"
                f" insert into {region}.{mode} select g, '{region}', repeat('d', 3000) from generate_series(1, 30) g"
            )


def change(db: Database, dice: random.Random, region: str, modes: tuple[str, ...]) -> None:
    """Something to each table of one source; ids meet those of the other sources."""
    for mode in modes:
        key, other = dice.randrange(1, 40), dice.randrange(1, 40)
        statement = dice.choice(
            [
                "insert into {t} values ({k}, 'new', repeat('n', 3000)) on conflict (id) do update set v = 'again'",
                "update {t} set v = v || '!' where id between {k} and {k} + 3",
                "update {t} set id = {o} where id = {k} and not exists (select from {t} where id = {o})",
                "delete from {t} where id in ({k}, {o})",
            ]
        )
        db.execute(statement.format(t=f"{region}.{mode}", k=key, o=other))


def at_once(*work: Callable[[], None]) -> None:
    failures: list[BaseException] = []

    def run(one: Callable[[], None]) -> None:
        try:
            one()
        except BaseException as exc:  # noqa: BLE001 - raised below
            failures.append(exc)

    threads = [threading.Thread(target=run, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in failures:
        raise failure


def check(groups: list[WholeGroup], modes: tuple[str, ...]) -> None:
    found = {c.table: c.verdict for group in groups for c in group.verify()}
    assert found == {f"{region}.{mode}": "identical" for region in REGIONS for mode in modes}


def counts(group: WholeGroup, mode: str) -> dict[str, int]:
    return dict(group.read(f"select region, count(*) from lake.main.{mode}_all group by all"))


def play(db: Database, directory: Path, rounds: int) -> None:
    modes = ALL
    make(db, modes)
    dice = random.Random(rounds)
    with ExitStack() as stack:
        groups = [
            stack.enter_context(whole_group(db, directory, wanted(regions, modes), name=name))
            for name, regions in GROUPS.items()
        ]
        one, two = groups
        for number in range(rounds):
            for region in REGIONS * 3:
                change(db, dice, region, modes)
            at_once(
                lambda: one.apply(tasks=dice.random() < 0.3), lambda: two.apply(tasks=dice.random() < 0.3)
            )
            if number % 5 == 4:
                check(groups, modes)

        for mode in modes:
            db.execute(f"truncate us.{mode}; insert into us.{mode} values (1, 'after', null)")
            change(db, dice, "eu", modes)
        at_once(one.apply, two.apply)
        check(groups, modes)
        assert counts(two, "upsert")["us"] == 1
        assert counts(two, "upsert")["eu"] > 1

        resynced = [oid for oid, t in one.runner.tables.items() if t.schema.schema == "eu"]
        before = counts(two, "upsert")
        for mode in modes:
            one.lake.execute(f"delete from lake.main.{mode}_all where region = 'eu' and id % 2 = 0")

        def resync() -> None:
            for oid in resynced:
                one.runner.resync(oid)
            one.apply()

        def go_on() -> None:
            for _ in range(5):
                change(db, dice, "us", modes)
                two.apply()

        at_once(resync, go_on)
        one.apply()
        check(groups, modes)
        assert counts(two, "upsert")["asia"] == before["asia"]
        repeated = one.read(
            "select count(*) from (select 1 from lake.main.append_all where _op not in ('copy', 'resync')"
            " group by region, _commit_lsn, _seq having count(*) > 1)"
        )
        assert repeated == [(0,)]


@pytest.mark.slow
def test_two_groups_fill_the_same_targets_at_the_same_time(any_db: Database, tmp_path: Path) -> None:
    """P-S15, P-S19: copies, changes, truncates and resyncs of one source, in every mode, while another group commits too."""
    play(any_db, tmp_path, 12)


@pytest.mark.slow
def test_columns_of_one_source_come_while_the_other_group_writes(db: Database, tmp_path: Path) -> None:
    """P-S12, P-S15: a column that one source gets, renames or widens leaves the others' rows and files alone."""
    make(db, ("upsert",))
    tables = {name: wanted(regions, ("upsert",)) for name, regions in GROUPS.items()}
    with (
        whole_group(db, tmp_path, tables["one"], name="one") as one,
        whole_group(db, tmp_path, tables["two"], name="two") as two,
    ):
        db.execute("alter table eu.upsert add extra int default 7; update eu.upsert set v = 'x' where id = 1")
        db.execute("insert into us.upsert select g, 'new', 'd' from generate_series(100, 150) g")
        at_once(one.apply, lambda: two.apply(tasks=True))
        db.execute("alter table us.upsert add extra int; update us.upsert set extra = id")
        db.execute(
            "alter table eu.upsert alter extra type bigint; update eu.upsert set extra = 1 + (1::int8 << 40)"
        )
        at_once(lambda: two.apply(tasks=True), lambda: one.apply(tasks=True))
        db.execute("alter table eu.upsert rename v to w; update eu.upsert set w = 'renamed' where id < 5")
        db.execute("update us.upsert set v = 'not renamed' where id < 5; delete from us.upsert where id > 20")
        at_once(one.apply, lambda: two.apply(tasks=True))
        assert {c.verdict for group in (one, two) for c in group.verify()} == {"identical"}
        rows = one.read(
            "select region, count(v), count(w), count(extra) from lake.main.upsert_all group by all"
        )
        assert {region: (v > 0, w > 0) for region, v, w, _ in rows} == {
            "eu": (False, True), "us": (True, False), "asia": (True, False),
        }  # fmt: skip
