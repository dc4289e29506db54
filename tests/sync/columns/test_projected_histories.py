"""Random histories of tables with options, against a model that knows nothing of streams: the source, projected in Python."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import pytest

from tests.fix_postgres import Database
from tests.whole_group import WholeGroup, whole_group

OPTIONS = {
    "exclude": ["secret"],
    "rename": {"state": "status", "n": "amount"},
    "mask": {"email": "hash", "body": "hash", "note": "redact"},
    "where": "n % 3 <> 0 and state in ('open', 'paid')",
}
STATES = ["open", "paid", "void", None]


@pytest.fixture(autouse=True)
def salt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_SALT", "salt")


def projected(db: Database) -> list[tuple[Any, ...]]:
    """What the lake should show, from the source as it is now; independent of the code under test."""

    def hashed(text: str | None) -> str | None:
        return None if text is None else hashlib.sha256(("salt" + text).encode()).hexdigest()

    rows = db.query("select a, b, n, state, email, body, note from t")
    passing = [r for r in rows if r[2] is not None and r[2] % 3 != 0 and r[3] in ("open", "paid")]
    shown = [
        (a, b, n, state, hashed(email), hashed(body), None) for a, b, n, state, email, body, _ in passing
    ]
    return sorted(shown)


class History:
    """Statements about a few keys, so that they meet again and again."""

    def __init__(self, db: Database, seed: int) -> None:
        self.db, self.dice = db, random.Random(seed)

    def key(self) -> tuple[str, int]:
        return self.dice.choice("xyz"), self.dice.randrange(4)

    def step(self) -> None:
        a, b = self.key()
        dice = self.dice
        what = dice.choices(
            ["insert", "update", "touch", "move", "delete", "truncate"], [6, 6, 4, 2, 3, 0.2]
        )[0]
        n, state = dice.choice([None, *range(9)]), dice.choice(STATES)
        large = dice.random() < 0.5
        body = f"{dice.random()}" * (400 if large else 1)
        where = " where a = %(a)s and b = %(b)s"
        values = {"a": a, "b": b, "n": n, "state": state, "body": body, "email": f"{dice.randrange(5)}@x"}
        statements = {
            "insert": "insert into t values (%(a)s, %(b)s, %(n)s, %(state)s, %(email)s, %(body)s, 'note', 'secret')"
            " on conflict (a, b) do update set n = excluded.n, body = excluded.body",
            "update": f"update t set n = %(n)s, email = %(email)s{where}",
            "touch": f"update t set state = %(state)s{where}",
            "move": "update t set a = %(c)s, b = %(d)s, n = %(n)s" + where
            + " and not exists (select from t where a = %(c)s and b = %(d)s)",
            "delete": f"delete from t{where}",
            "truncate": "truncate t",
        }  # fmt: skip
        values["c"], values["d"] = self.key()
        self.db.execute(statements[what], values)

    def batch(self) -> None:
        """Some transactions; a few have several changes or are rolled back."""
        for _ in range(self.dice.randrange(1, 8)):
            self.db.execute("begin")
            for _ in range(self.dice.randrange(1, 12)):
                self.step()
            self.db.execute(self.dice.choice(["commit", "commit", "commit", "rollback"]))


def play(db: Database, directory: Path, seed: int, identity: str, batches: int) -> None:
    db.execute(
        "create table t (a text, b int, n int, state text, email text, body text, note text, secret text, primary key (a, b));"
        " alter table t alter body set storage external;"
        f" alter table t replica identity {identity}"
    )
    history = History(db, seed)
    history.batch()
    with whole_group(db, directory, {"t": OPTIONS}, salt_env="TEST_SALT") as group:
        check(group)
        for number in range(batches):
            history.batch()
            group.apply(tasks=history.dice.random() < 0.5)
            check(group)
            if number % 7 == 5:
                group.restart({"t": OPTIONS})
        assert [r.verdict for r in group.verify()] == ["identical"]
        if identity == "full":
            assert group.copies == 1


def check(group: WholeGroup) -> None:
    columns = "a, b, amount, status, email, body, note"
    assert sorted(group.read(f"select {columns} from lake.main.t")) == projected(group.db)


@pytest.mark.parametrize("identity", ["default", pytest.param("full", marks=pytest.mark.slow)])
def test_the_lake_is_the_projected_source_after_every_batch(
    db: Database, tmp_path: Path, identity: str
) -> None:
    """P-S08, P-S10, P-S12: after any history of rows in and around the filter, the lake has the rows that pass, masked."""
    play(db, tmp_path, 1, identity, 8)


@pytest.mark.slow
@pytest.mark.parametrize("identity", ["default", "full"])
@pytest.mark.parametrize("seed", range(2, 10))
def test_many_histories(any_db: Database, tmp_path: Path, seed: int, identity: str) -> None:
    """P-S08, P-S10, P-S12: the same, longer, and on every server."""
    play(any_db, tmp_path, seed, identity, 25)
