"""Unique constraints that are checked late: within a transaction, two rows may have the same key."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.fix_postgres import Database
from tests.whole_group import whole_group

LATE = "deferrable initially deferred"
KINDS = {
    "by whole rows": f"id int primary key {LATE}, k int not null",
    "by whole rows, without a primary key": f"id int not null unique {LATE}, k int not null",
    "by an index that is checked at once": f"id int primary key {LATE}, k int not null unique",
    "by another primary key": f"id int not null unique {LATE}, k int primary key",
}
BATCHES = [
    ["begin; update t set id = 2 where k = 1; update t set id = 1 where k = 2; commit"],
    [
        "update t set id = 41 - id",  # in one statement: each key is there twice for a while
        "update t set v = v || '!' where id < 10",
        "update t set id = id % 3 + 1 where id <= 3",
    ],
    [
        "begin; insert into t values (7, 107, 'came under a taken key'); delete from t where id = 7 and k <> 107; commit",
        "begin; update t set id = 8 where id = 9; delete from t where id = 8 and k = (select min(k) from t where id = 8);"
        " update t set v = 'stayed' where id = 8; commit",
        "begin; update t set id = 11 where id = 10; update t set id = 10 where id = 11; rollback",
        "begin; update t set id = 13 where id = 12; update t set v = v || '?' where id = 13;"
        " update t set id = 12 where id = 13 and k = (select max(k) from t where id = 13); commit",
    ],
]


IN_SHORT = {("by whole rows", True), ("by an index that is checked at once", False)}


@pytest.mark.parametrize(
    ("kind", "tasks"),
    [
        pytest.param(*case, marks=() if case in IN_SHORT else pytest.mark.slow)
        for case in itertools.product(KINDS, (False, True))
    ],
)
def test_keys_are_swapped_within_a_transaction(db: Database, tmp_path: Path, kind: str, tasks: bool) -> None:
    """P-S08, P-S10: by one statement and by several, in a ring, and with rows that come and go under a taken key."""
    db.execute(
        f"create table t ({KINDS[kind]}, v text, doc text); alter table t alter doc set storage external"
    )
    if "another" not in kind:
        db.execute("alter table t replica identity full")
    db.execute(
        "insert into t select g, g, 'row ' || g, repeat(md5(g::text), 200) from generate_series(1, 40) g"
    )
    with whole_group(db, tmp_path, {"t": {}}) as group:
        for statements in BATCHES:
            for statement in statements:
                db.execute(statement)
            group.apply(tasks=tasks)
            rows = "select id, k, v, md5(doc) from {} order by id"
            assert group.read(rows.format("lake.main.t")) == db.query(rows.format("t")), statements
        assert [c.verdict for c in group.verify()] == ["identical"]
        assert group.copies == 1, "nothing was re-copied"
