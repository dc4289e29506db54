"""Options of a table under Spark: its tasks project, mask and filter what they copy and fold."""

from __future__ import annotations

import json

import pytest

from tests.fix_postgres import wait_until
from tests.fix_service import Sync

pytestmark = pytest.mark.spark

OPTIONS = {
    "exclude": ["secret"],
    "rename": {"name": "full_name"},
    "mask": {"email": "hash", "phone": "redact"},
    "where": "n % 2 = 0",
}
WANTED = """
    select id, name, encode(sha256(convert_to('salt' || email, 'UTF8')), 'hex'), null::text, n from people where n % 2 = 0
"""


def test_tasks_apply_options_to_copies_and_large_batches(shared: Sync) -> None:
    """P-S12: PostgreSQL's own arithmetic over the source gives the lake's rows, after the copy and after each batch."""
    sync, db = shared, shared.db
    db.execute(
        "create table people (id int primary key, name text, email text, phone text, n int, secret text)"
    )
    db.execute(
        "insert into people select g, 'p' || g, g || '@x', 'phone', g, repeat('s', 90) from generate_series(1, 2000) g"
    )
    sync.db.execute(
        "select aqueduck.add_table('people', group_name => 'shared', options => %s)", (json.dumps(OPTIONS),)
    )
    sync.wait_state("STREAMING", "public.people")

    def same() -> bool:
        return sync.lake("select id, full_name, email, phone, n from lake.main.people order by id") == sorted(
            db.query(WANTED)
        )

    wait_until(same, "the copy is projected", 180, log=sync.log, pause=0.3)
    with sync.held():
        db.execute("update people set n = n + 1 where id % 3 = 0; delete from people where id % 7 = 0")
        db.execute(
            "insert into people select g, repeat('p', 60) || g, repeat('e', 60) || g, 'phone', g, repeat('s', 90)"
            " from generate_series(10001, 50000) g"
        )
        db.execute("update people set id = -id, n = 2 where id % 1000 = 1")
    wait_until(same, "the batch is projected", 180, log=sync.log, pause=0.5)
    oid = db.value("select 'people'::regclass::oid::int")
    folded = [f for f in (sync.directory / "data").rglob(f"*-{oid}-*.parquet") if "copy" not in f.name]
    assert folded, "Spark's tasks folded the batch"
