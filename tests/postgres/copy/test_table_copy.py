"""How a table is cut into chunks."""

from __future__ import annotations

import itertools
from contextlib import closing

import pytest

from aqueduck.model.errors import AqueduckError
from aqueduck.postgres.catalog.tables import describe_table
from aqueduck.postgres.copy.table_copy import PAGE_BYTES, ChunkReader, export_snapshot_by_sql, plan_chunks
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


ATTACK = """
    create function public.leak() returns int language plpgsql as $$ begin
        perform pg_catalog.pg_notify('loot', s.cell) from public.secrets s;
        return 1;
    end $$;
    drop table public.t;
    create view public.t as select public.leak() as id, 'x'::text as v, '(1,1)'::tid as ctid;
    grant select on public.t to public;
"""


def test_a_view_in_the_place_of_a_table_runs_nothing(db: Database, role: str) -> None:
    """The attack: the owner of a table replaces it by a view between two chunks, whose functions would run as the service."""
    reader = db.service_role()
    db.execute(
        f"""
        create table public.secrets (cell text); insert into public.secrets values ('cell');
        create table public.t (id int primary key, v text);
        insert into public.t select g, md5(g::text) from generate_series(1, 2000) g;
        grant create on schema public to public; alter table public.t owner to "{role}";
        grant select on public.t, public.secrets to "{reader}"
        """
    )
    schema = describe_table(db.observer, "t")
    chunks = plan_chunks(db.observer, schema, chunk_bytes=PAGE_BYTES)
    assert chunks[1].first_page == 1
    snapshot = export_snapshot_by_sql(db.dsn_for(reader))
    with closing(snapshot), db.connect(role) as owner:
        owner.execute("listen loot")
        with ChunkReader(db.dsn_for(reader), snapshot.name) as chunk_reader:
            assert sum(batch.num_rows for batch in chunk_reader.rows(schema, chunks[0])) > 0
            owner.execute(ATTACK)
            with pytest.raises(AqueduckError, match="restricted"):
                list(chunk_reader.rows(schema, chunks[1]))
        db.execute("notify loot, 'the end'")
        assert [notice.payload for notice in owner.notifies(timeout=30, stop_after=1)] == ["the end"]
