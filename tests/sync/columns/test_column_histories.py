"""Columns are added, dropped and renamed between rows, unobserved: the lake ends with the source's columns and rows."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from aqueduck.model.errors import CopyDisturbedError, SourceUnreachableError
from tests.fix_postgres import Database
from tests.whole_group import WholeGroup, whole_group

STORIES = {
    # statements, and the copies that they take if all of them are read at once
    "the_last_one_again": ("insert x; drop v; add v; insert y", 2),
    "the_last_one_again_and_more": ("insert x; drop v; add v; insert y; add z; insert z", 2),
    "a_new_one_again": ("add n; insert x; drop n; add n; insert y", 2),
    "one_in_the_middle_again": ("add n; insert x; drop v; add v; insert y", 1),
    "one_for_another": ("add n; update n = v; insert x; drop v; insert y; rename n v; insert z", 1),
    "one_for_another_at_once": ("add n; update n = v; drop v; rename n v; insert z", 1),
    "a_name_that_is_free_again": ("add x; insert a; rename x y; add x; insert b", 1),
    "the_old_name_for_a_new_one": ("rename v w; add v; insert a; add more; insert b", 1),
    "names_that_are_swapped": ("add x; insert a; rename v t; rename x v; rename t x; insert b; update x = v", 1),
    "one_after_the_other": ("drop v; add a; insert x; drop a; add b; insert y; drop b; add c; insert z", 2),
}  # fmt: skip
IN_SHORT = {"the_last_one_again_and_more", "one_for_another_at_once", "names_that_are_swapped"}


class Table:
    """One table of text columns, and short words for what is done to it."""

    def __init__(self, db: Database) -> None:
        self.db, self.rows, self.columns = db, 3, ["v"]
        db.execute(
            "create table t (id int primary key, v text); insert into t values (1, 'one'), (2, 'two'), (3, null)"
        )

    def do(self, words: str) -> None:
        what, *rest = words.split()
        getattr(self, what)(*rest)

    def insert(self, text: str) -> None:
        self.rows += 1
        cells = "".join(f", '{text} in {c}'" for c in self.columns)
        self.db.execute(f"insert into t values ({self.rows}{cells})")

    def update(self, column: str, _: str = "=", other: str | None = None) -> None:
        self.db.execute(
            f"update t set {column} = coalesce({other or column}, '') || '!' where id % 2 = {self.rows % 2}"
        )

    def add(self, column: str) -> None:
        default = " default 'at first'" if len(self.columns) % 3 == 1 else ""
        self.db.execute(f"alter table t add {column} text{default}")
        self.columns.append(column)

    def drop(self, column: str) -> None:
        self.db.execute(f"alter table t drop {column}")
        self.columns.remove(column)

    def rename(self, column: str, other: str) -> None:
        self.db.execute(f"alter table t rename {column} to {other}")
        self.columns[self.columns.index(column)] = other

    def anything(self, dice: random.Random) -> None:
        """One statement; names are few, so that they come back."""
        free = [name for name in "abc" if name not in self.columns]
        own = dice.choice(self.columns) if self.columns else None
        what = dice.choices(["insert", "update", "add", "drop", "rename", "delete"], [6, 4, 2, 2, 2, 1])[0]
        if what == "insert":
            self.insert(f"row {self.rows}")
        elif what == "delete":
            self.db.execute(f"delete from t where id = {dice.randint(1, self.rows)}")
        elif what == "add" and free:
            self.add(dice.choice(free))
        elif own and what == "update":
            self.update(own)
        elif own and what == "drop":
            self.drop(own)
        elif own and what == "rename" and free:
            self.rename(own, dice.choice(free))


def check(group: WholeGroup, history: object) -> None:
    assert [(c.verdict, c.note) for c in group.verify()] == [("identical", None)], history


@pytest.mark.parametrize("tasks", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "story", [s if s in IN_SHORT else pytest.param(s, marks=pytest.mark.slow) for s in STORIES]
)
def test_names_that_are_used_again(db: Database, tmp_path: Path, story: str, tasks: bool) -> None:
    """P-S12, hazard 5: all at once, as after a stop; an ambiguous table is re-copied."""
    words, copies = STORIES[story]
    table = Table(db)
    with whole_group(db, tmp_path, {"t": {}}) as group:
        for step in words.split("; "):
            table.do(step)
        group.apply(tasks=tasks)
        check(group, story)
        assert group.copies == copies
        for text in ("later", "and later"):
            table.insert(text)
            group.apply(tasks=tasks)
            check(group, story)
        assert group.copies == copies


@pytest.mark.parametrize(
    "story", ["the_last_one_again", pytest.param("a_new_one_again", marks=pytest.mark.slow)]
)
def test_what_is_not_clear_is_copied_under_load(db: Database, tmp_path: Path, story: str) -> None:
    """P-S12, P-S22: changes of the very version that was not clear come all the time, and one copy is enough."""
    table = Table(db)
    with whole_group(db, tmp_path, {"t": {}}) as group:
        copier = group.runner.copier
        usual = copier.jobs.run

        def under_load(job: Any) -> Any:
            files = usual(job)
            table.insert("after the snapshot")
            group.apply_only()
            return files

        copier.jobs.run = under_load
        for step in STORIES[story][0].split("; "):
            table.do(step)
        group.apply()
        check(group, story)
        assert group.copies == 2
        table.insert("later")
        group.apply()
        check(group, story)
        assert group.copies == 2


def test_a_server_that_is_away_is_no_answer(db: Database, tmp_path: Path) -> None:
    """P-S17: the batch fails as a whole and comes again; columns are not guessed for want of a connection."""
    table = Table(db)
    with whole_group(db, tmp_path, {"t": {}}) as group:
        table.do("rename v w")
        table.insert("x")
        versions, position = group.runner.versions, group.runner.stored_position()
        dsn, versions._dsn = versions._dsn, "host=127.0.0.1 port=1 connect_timeout=2"
        with pytest.raises(SourceUnreachableError):
            group.apply_only()
        assert group.runner.stored_position() == position
        versions._dsn = dsn
        group.apply()
        check(group, "away")


OPTIONS: dict[str, dict[str, Any]] = {
    "where": {"where": "id > 1"},
    "exclude": {"exclude": ["v"]},
    "mask": {"mask": {"v": "hash"}},
    "append": {"mode": "append"},
    "history": {"mode": "history"},
    "soft_delete": {"mode": "soft_delete"},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("story", STORIES)
def test_names_that_are_used_again_under_options(
    db: Database, tmp_path: Path, story: str, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-S12: the same with a projection or in another mode, all at once and step by step."""
    monkeypatch.setenv("TEST_SALT", "salt")
    table = Table(db)
    with whole_group(db, tmp_path, {"t": OPTIONS[options]}, salt_env="TEST_SALT") as group:
        words = STORIES[story][0].split("; ")
        for step in words:
            table.do(step)
        group.apply(tasks=True)
        check(group, story)
        for step in ("add late", "insert a", "drop late", "add late", "insert b"):
            table.do(step)
            group.apply(tasks=True)
        check(group, story)


def play(db: Database, directory: Path, seed: int, *, batches: int) -> None:
    dice = random.Random(seed)
    table = Table(db)
    history: list[str] = []
    execute = db.execute
    db.execute = lambda *given: (history.append(str(given[0])), execute(*given))[1]  # type: ignore[method-assign, func-returns-value]
    with whole_group(db, directory, {"t": {}}, group={"copy_chunk_bytes": 8192}) as group:
        copier = group.runner.copier
        usual = copier.jobs.run

        def disturbed(job):  # type: ignore[no-untyped-def]
            for _ in range(dice.randint(0, 2)):
                table.anything(dice)
            return usual(job)

        copier.jobs.run = disturbed
        for _ in range(batches):
            for _ in range(dice.randint(1, 8)):
                table.anything(dice)
            if dice.random() < 0.2:
                [oid] = group.runner.tables
                group.runner.resync(oid)
            tasks = dice.random() < 0.5
            history.append(f"-- apply, tasks {tasks}")
            while True:
                try:
                    group.apply(tasks=tasks)
                    break
                except CopyDisturbedError:
                    [oid] = group.runner.tables
                    copier.retry_now(oid)
            copier.jobs.run = usual
            table.insert("so that the stream describes the columns")
            group.apply(tasks=tasks)
            check(group, history)
            copier.jobs.run = disturbed


def test_a_random_history(db: Database, tmp_path: Path) -> None:
    """P-S12, P-S04: columns change between rows, between batches and while the table is copied."""
    play(db, tmp_path, 1, batches=6)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 42))
def test_many_random_histories(db: Database, tmp_path: Path, seed: int) -> None:
    """P-S12, P-S04: the same, longer."""
    play(db, tmp_path, seed, batches=12)
