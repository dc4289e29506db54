"""Tables that come while others write to them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.fix_postgres import Database
from tests.whole_group import whole_group


@pytest.mark.parametrize("how", ["added", pytest.param("at a start", marks=pytest.mark.slow)])
def test_what_is_open_when_a_table_comes_is_waited_for(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Promise 6: the stream never has the changes of such a transaction from before the table was published, so the copy must have them."""
    db.execute("create table t (id int primary key); create table late (id int primary key)")
    with whole_group(db, tmp_path, {"t": {}}, group={"capture": "poll"}) as group, db.connect() as writer:
        monkeypatch.setattr(group, "copy", lambda: group.runner.copier.start())
        writer.execute("begin; insert into late values (1)")
        if how == "added":
            group.add("late")
        else:
            group.restart({"t": {}, "late": {}})
        later = threading.Timer(3.0, lambda: writer.execute("insert into late values (2); commit"))
        later.start()
        while group.runner.copier.busy:
            group.apply_only()
        later.join()
        group.runner.copier.raise_failures()
        db.execute("insert into late values (3)")
        group.apply_only()
        assert group.read("from lake.main.late order by id") == [(1,), (2,), (3,)]
