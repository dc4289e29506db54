"""Columns that are called like the tables of our own statements."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fix_postgres import Database
from tests.whole_group import whole_group


@pytest.mark.parametrize("mode", ["history", pytest.param("soft_delete", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["t", pytest.param("c", marks=pytest.mark.slow)])
def test_a_second_copy_keeps_what_it_confirms(db: Database, tmp_path: Path, mode: str, name: str) -> None:
    """In a subquery, `t.id` was a part of the JSON column `t`: every open version ended."""
    db.execute(f"create table docs (id int primary key, {name} text[])")
    db.execute("insert into docs select g, array[g::text] from generate_series(1, 50) g")
    with whole_group(db, tmp_path, {"public.docs": {"mode": mode}}) as group:
        db.execute("insert into docs values (100, '{new}'); delete from docs where id = 7")
        group.apply_only()
        group.runner.resync(next(iter(group.runner.states)))
        while group.runner.copier.busy:
            group.apply_only()  # the copy waits until the lake has what came before it
        group.runner.copier.raise_failures()
        assert [found.verdict for found in group.verify()] == ["identical"]
        if mode == "history":
            assert group.read("select count(*) from lake.main.docs") == [(51,)]
