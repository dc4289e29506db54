"""How a table is cut into chunks."""

from __future__ import annotations

import itertools

import pytest

from aqueduck.postgres.catalog.tables import describe_table
from aqueduck.postgres.copy.table_copy import PAGE_BYTES, plan_chunks
from tests.fix_postgres import Database


@pytest.mark.parametrize("pages", [1, 3, 8, 9, 17, 50, 1000])
def test_chunks_are_all_of_the_table_and_none_is_larger_than_asked_for(db: Database, pages: int) -> None:
    """`copy_chunk_bytes` is the most that an interrupted task has to do again."""
    db.execute(
        "create table t (id int primary key, v text); insert into t select g, md5(g::text) from generate_series(1, 9000) g"
    )
    schema = describe_table(db.observer, "t", need_key=True)
    size = db.value("select pg_relation_size('t')")
    chunks = plan_chunks(db.observer, schema, chunk_bytes=pages * PAGE_BYTES)
    assert chunks[0].first_page == 0
    assert chunks[-1].end_page is None
    assert all(a.end_page == b.first_page for a, b in itertools.pairwise(chunks))
    assert sum(c.bytes for c in chunks) == size
    assert all(0 < c.bytes <= pages * PAGE_BYTES for c in chunks)
