"""Columns that change while no row does, of tables with options and in a publication of the user's: as the stream would bring them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from aqueduck.model.errors import AqueduckError, ResyncNeededError
from aqueduck.sync.watching.column_watch import ColumnWatch
from tests.fix_postgres import Database
from tests.sync.watching.test_quiet_columns import pass_by, waiting
from tests.whole_group import WholeGroup, whole_group

TABLE = """
    create table t (id int primary key, a text, b text, c int);
    insert into t select g, 'a' || g, 'b' || g, g from generate_series(1, 3) g;
    create table u (id int primary key)
"""
OWN = {"publication": "theirs", "publication_by": "user"}


@pytest.fixture(autouse=True)
def salt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_SALT", "salt")


def options_of(**options: Any) -> dict[str, Any]:
    return {"t": options, "u": {}}


def assert_identical(group: WholeGroup, story: object = None) -> None:
    assert [(c.verdict, c.note) for c in group.verify()] == [("identical", None)] * 2, story


def text_of(group: WholeGroup) -> str:
    return str(group.read("from lake.main.t"))


Case = tuple[dict[str, Any], str, list[str], int]

CASES: dict[str, Case] = {
    # options, what changes, the lake's columns afterwards, copies of t
    "added to a list": ({"columns": ["id", "a"]}, "alter table t add d text default 'hidden'", ["id", "a"], 1),
    "added": ({"exclude": ["b"]}, "alter table t add d int default 7", ["id", "a", "c", "d"], 1),
    "an excluded one dropped": ({"exclude": ["b"]}, "alter table t drop b", ["id", "a", "c"], 1),
    "an excluded one renamed": (
        {"exclude": ["b"]},
        "alter table t rename b to z; alter table t add d int",
        ["id", "a", "c", "d"],
        1,
    ),
    "an excluded one added again": (
        {"exclude": ["b"]},
        "alter table t drop b; alter table t add b text default 'hidden'",
        ["id", "a", "c"],
        1,
    ),
    "names swapped": (
        {"exclude": ["b"]},
        "update t set b = 'hidden'; alter table t rename a to tmp; alter table t rename b to a;"
        " alter table t rename tmp to b",
        ["id", "c"],
        1,
    ),
    "a chosen one dropped": (
        {"columns": ["id", "a", "c"], "rename": {"a": "x"}},
        "alter table t drop a",
        ["id", "c"],
        1,
    ),
    "a chosen one renamed": ({"columns": ["id", "a"]}, "alter table t rename a to z", ["id", "z"], 1),
    "one with another name renamed": (
        {"columns": ["id", "a"], "rename": {"a": "x"}},
        "alter table t rename a to z",
        ["id", "x"],
        1,
    ),
    "a masked one renamed": (
        {"mask": {"a": "hash", "b": "redact"}},
        "update t set a = 'hidden', b = 'hidden'; alter table t rename a to z; alter table t rename b to a",
        ["id", "z", "a", "c"],
        1,
    ),
    "a masked one added again with values": (
        {"mask": {"a": "hash"}},
        "alter table t drop a; alter table t add a text default 'hidden'",
        ["id", "b", "c", "a"],
        2,  # the rows of before have values that are to be masked
    ),
    "another type of a hashed one": (
        {"mask": {"c": "hash"}},
        "alter table t alter c type text using 'hidden'",
        ["id", "a", "b", "c"],
        2,
    ),
    "another type of one that only the filter reads": (
        {"columns": ["id", "a"], "where": "c > 1"},
        "alter table t alter c type bigint",
        ["id", "a"],
        2,  # untouched rows may pass or not pass now
    ),
    "the last one again": ({"exclude": ["a"]}, "alter table t drop c; alter table t add c int", ["id", "b", "c"], 1),
}  # fmt: skip
QUICK = {"added to a list", "names swapped", "a masked one renamed", "another type of one that only the filter reads"}  # fmt: skip


@pytest.mark.parametrize(
    "case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES]
)
def test_columns_of_a_quiet_table_with_options_reach_the_lake(
    db: Database, tmp_path: Path, case: str
) -> None:
    """P-S12: the options hold for what comes, nothing is shown that was to be hidden, and `verify` says identical."""
    options, change, columns, copies = CASES[case]
    db.execute(TABLE)
    with whole_group(db, tmp_path, options_of(**options), salt_env="TEST_SALT") as group:
        watch = ColumnWatch()
        watch.look(group.runner)
        db.execute(change)
        pass_by(group, watch)
        assert sorted(group.columns("t")) == sorted(columns)
        assert "hidden" not in text_of(group)
        assert_identical(group)
        assert group.copies == copies
        db.execute(
            "update t set id = id + 100 where id = 1; delete from t where id = 2; insert into t values (9)"
        )
        group.apply()
        assert_identical(group)
        assert group.copies == copies


PROBLEMS: dict[str, Case] = {
    "the filter's column is dropped": ({"where": "c > 1"}, "alter table t drop c", ["row filter"], 1),
    "two columns with one name": ({"rename": {"a": "x"}}, "alter table t add x int", ["both as x"], 1),
    "a key that is a constant": (
        {"mask": {"a": "redact"}},
        "alter table t drop constraint t_pkey; alter table t add primary key (a)",
        ["key column a"],
        1,
    ),
}


@pytest.mark.parametrize(
    "case", [c if c.startswith("two") else pytest.param(c, marks=pytest.mark.slow) for c in PROBLEMS]
)
@pytest.mark.parametrize("quiet", [True, False])
@pytest.mark.parametrize("policy", ["resync", "stop"])
def test_what_no_longer_fits_the_options_stops_the_table(
    db: Database, tmp_path: Path, case: str, quiet: bool, policy: str
) -> None:
    """P-S12: with the same reason, whether a row comes or not; the lake keeps its rows, and later ones are parked."""
    options, change, [reason], _ = PROBLEMS[case]
    db.execute(TABLE)
    with whole_group(db, tmp_path, options_of(**options), group={"on_type_change": policy}) as group:
        before = group.read("from lake.main.t order by id")
        watch = ColumnWatch()
        watch.look(group.runner)
        db.execute(change)
        if quiet:
            pass_by(group, watch)
        else:
            db.execute("insert into t (id, a) values (10, 'x')")
            group.apply_only()
        with pytest.raises(AqueduckError, match=reason) as caught:
            group.copy()
        assert isinstance(caught.value, ResyncNeededError) == (policy == "stop")
        [state] = [s for s in group.runner.states.values() if s.source == "public.t"]
        assert not state.ready
        db.execute("insert into t (id, a) values (11, 'y')")
        group.apply_only()
        assert group.read("from lake.main.t order by id") == before
        assert group.runner.book.parked[state.oid].rows > 0


OTHERS: dict[str, tuple[str, str, list[str], int]] = {
    # the publication, what changes, the lake's columns afterwards, copies of t
    "one more in the table": ("t, u", "alter table t add d int default 7", ["id", "a", "b", "c", "d"], 1),
    "one less in the table": ("t, u", "alter table t drop a", ["id", "b", "c"], 1),
    "one more beside the list": ("t (id, a), u", "alter table t add d int", ["id", "a"], 1),
    "a listed one renamed": ("t (id, a), u", "alter table t rename a to z", ["id", "z"], 1),
    "one wider": ("t, u", "alter table t alter c type bigint", ["id", "a", "b", "c"], 1),
    "one more in the list": ("t (id, a), u", "alter publication theirs set table t (id, a, b), u", ["id", "a", "b"], 2),
    "one less in the list": ("t (id, a, b), u", "alter publication theirs set table t (id, b), u", ["id", "b"], 1),
    "no list any more": ("t (id, a), u", "alter publication theirs set table t, u", ["id", "a", "b", "c"], 2),
    "another filter": (
        "t where (id > 1), u", "alter publication theirs set table t where (id > 2), u", ["id", "a", "b", "c"], 2
    ),
    "generated columns": (
        "t, u",
        "alter table t add g int generated always as (c + 1) stored;"
        " alter publication theirs set (publish_generated_columns = stored)",
        ["id", "a", "b", "c", "g"],
        2,
    ),
}  # fmt: skip
QUICK_OTHERS = {"one more in the table", "one less in the list", "another filter"}


@pytest.mark.parametrize(
    "case", [c if c in QUICK_OTHERS else pytest.param(c, marks=pytest.mark.slow) for c in OTHERS]
)
def test_what_a_publication_of_the_users_sends_of_a_quiet_table_reaches_the_lake(
    db: Database, tmp_path: Path, case: str
) -> None:
    """P-S12: columns of the table, of the publication's list, and its filter: the lake has what would be sent."""
    publication, change, columns, copies = OTHERS[case]
    db.execute(TABLE)
    db.execute(f"create publication theirs for table {publication}")
    with whole_group(db, tmp_path, options_of(), group=OWN) as group:
        watch = ColumnWatch()
        watch.look(group.runner)
        db.execute(change)
        pass_by(group, watch)
        assert sorted(group.columns("t")) == sorted(columns)
        assert_identical(group)
        assert group.copies == copies
        db.execute(
            "update t set c = 8 where id = 3; delete from t where id = 2; insert into t (id) values (9)"
        )
        group.apply()
        assert_identical(group)
        assert group.copies == copies


def test_a_transaction_older_than_the_publications_list_comes_first(any_db: Database, tmp_path: Path) -> None:
    """P-S12: changing a publication does not wait, so the lake waits for the rows that still have the old columns."""
    db = any_db
    db.execute(TABLE)
    db.execute("create publication theirs for table t (id, a, b), u")
    with whole_group(db, tmp_path, options_of(), group=OWN) as group, db.connect() as other:
        watch = ColumnWatch()
        watch.look(group.runner)
        with other.transaction():
            other.execute("insert into t values (4, 'old', 'old')")
            db.execute("alter publication theirs set table t (id, b), u")
            pass_by(group, watch)
            assert group.columns("t") == ["id", "a", "b"]
            assert waiting(group) == "columns that wait for the changes before them: a"
        pass_by(group, watch)
        pass_by(group, watch)
        assert group.columns("t") == ["id", "b"]
        assert waiting(group) is None
        assert_identical(group)
        assert group.copies == 1


def test_both_kinds_of_rules_hold_together(db: Database, tmp_path: Path) -> None:
    """P-S12: options on top of a publication of the user's."""
    db.execute(TABLE)
    db.execute("create publication theirs for table t (id, a, b), u")
    options = options_of(mask={"a": "hash"}, rename={"b": "x"})
    with whole_group(db, tmp_path, options, group=OWN, salt_env="TEST_SALT") as group:
        watch = ColumnWatch()
        watch.look(group.runner)
        db.execute("alter table t rename a to z; alter table t add d text default 'hidden'")
        db.execute("alter table t rename b to y; update t set z = 'hidden' where id = 1")
        pass_by(group, watch)
        assert group.columns("t") == ["id", "z", "x"]
        assert "hidden" not in text_of(group)
        assert_identical(group)


class Story:
    """Statements about columns and rows in a random order; names are few, so that they come back."""

    def __init__(self, db: Database, seed: int) -> None:
        self.db, self.dice, self.ids = db, random.Random(seed), 3
        self.columns = {"a": "hidden", "b": "seen", "c": "seen"}
        self.told: list[str] = []

    def step(self) -> None:
        free = [name for name in "abcd" if name not in self.columns]
        what = self.dice.choice(["rows", "add", "drop", "rename"])
        own = self.dice.choice(list(self.columns)) if self.columns else None
        if what == "add" and free:
            name = self.dice.choice(free)
            self.columns[name], default = "seen", self.dice.choice(["", " default 'seen'"])
            self.say(f"alter table t add {name} text{default}")
        elif what == "drop" and own:
            del self.columns[own]
            self.say(f"alter table t drop {own}")
        elif what == "rename" and own and free:
            name = self.dice.choice(free)
            values = [(name if n == own else n, v) for n, v in self.columns.items()]
            self.columns = dict(values)
            self.say(f"alter table t rename {own} to {name}")
        elif what == "rows":
            self.ids += 1
            cells = "".join(f", '{value}'" for value in self.columns.values())
            self.say(f"insert into t values ({self.ids}{cells})")
            if own:
                self.say(f"update t set {own} = {own} || '!' where id % 3 = {self.ids % 3}")

    def say(self, statement: str) -> None:
        self.told.append(statement)
        self.db.execute(statement)


STORIES: list[dict[str, Any]] = [
    {},
    {"mask": {"a": "hash"}, "rename": {"b": "x"}},
    {"exclude": ["a"]},
    {"mask": {"a": "redact"}, "where": "id <> 2"},
]


def tell(db: Database, directory: Path, seed: int, options: dict[str, Any], rounds: int) -> None:
    db.execute(
        "create table t (id int primary key, a text, b text, c text); create table u (id int primary key)"
    )
    db.execute("insert into t select g, 'hidden', 'seen', 'seen' from generate_series(1, 3) g")
    story = Story(db, seed)
    with whole_group(db, directory, options_of(**options), salt_env="TEST_SALT") as group:
        watch = ColumnWatch()
        for _ in range(rounds):
            for _ in range(story.dice.randrange(1, 4)):
                story.step()
                for _ in range(story.dice.randrange(3)):
                    story.dice.choice([lambda: watch.look(group.runner), group.apply])()
            pass_by(group, watch)
            pass_by(group, watch)
            assert_identical(group, (options, story.told))
            assert not options or "hidden" not in text_of(group), (options, story.told)


@pytest.mark.parametrize("options", STORIES[1:2])
def test_random_changes_of_columns_and_rows(db: Database, tmp_path: Path, options: dict[str, Any]) -> None:
    """P-S12: a table is quiet now and then; source and lake agree after every round."""
    tell(db, tmp_path, 1, options, 4)


@pytest.mark.slow
@pytest.mark.parametrize("options", STORIES)
@pytest.mark.parametrize("seed", range(2, 8))
def test_many_random_changes_of_columns_and_rows(
    db: Database, tmp_path: Path, seed: int, options: dict[str, Any]
) -> None:
    """P-S12: the same, longer."""
    tell(db, tmp_path, seed, options, 10)
