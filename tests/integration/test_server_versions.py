"""The way of `sync` on the older servers: copy, stream, transactions in progress, DDL.  The newest one is used everywhere else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from aqueduck.lab.embedded import EmbeddedPostgres
from tests.fix_postgres import Database, SystemPostgres, _new_database, system_programs, wait_until
from tests.flow import Flow
from tests.replica import Replica

SETTINGS = {"logical_decoding_work_mem": "64kB"}


@pytest.fixture(scope="module", params=[16, 15])
def old_server(request: pytest.FixtureRequest) -> Iterator[EmbeddedPostgres]:
    """Servers that stream transactions of more than 64 kB: the embedded 16, and Debian's 15 where it is installed."""
    if request.param == 15:
        server: EmbeddedPostgres = SystemPostgres(system_programs(15), settings=SETTINGS)
    else:
        server = EmbeddedPostgres(version=request.param, settings=SETTINGS)
    with server:
        assert server.version == request.param
        yield server


@pytest.fixture
def old_db(old_server: EmbeddedPostgres) -> Iterator[Database]:
    database = _new_database(old_server)
    yield database
    database.drop()


def test_copy_and_stream_and_transactions_in_progress(old_db: Database, tmp_path: Path) -> None:
    """P-S05, P-S08, P-S29: copied and streamed rows, in small and large transactions, equal the source's."""
    old_db.execute("create table t (id int primary key, v text, n numeric(10,2), d timestamptz)")
    old_db.execute("alter table t alter v set storage external")
    with Flow(old_db, tmp_path, ["t"]) as flow:
        old_db.execute(
            "insert into t select g, repeat(md5(g::text), g % 100), g / 3.0, now() from generate_series(1, 500) g"
        )
        flow.catch_up(tasks=False)
        old_db.execute("update t set n = n + 1 where id % 3 = 0; delete from t where id % 7 = 0")
        old_db.execute("update t set id = -id where id % 10 = 0")
        flow.catch_up(tasks=True)
        with old_db.connect() as conn:
            conn.execute("begin")
            conn.execute("insert into t select g, 'x' from generate_series(1001, 4000) g")
            conn.execute("savepoint a")
            conn.execute("update t set v = 'void'")
            wait_until(lambda: flow.stage.unfinished[0] == 1, "the transaction is staged while it is open")
            conn.execute("rollback to a")
            conn.execute("insert into t select g, 'y' from generate_series(5001, 6000) g")
            conn.execute("commit")
        flow.catch_up(tasks=True)
        flow.copy("t")
        want = old_db.query("select id, v, n, d from t order by 1")
        assert len(want) > 4000
        for place in ("stream", "copied"):
            assert flow.read(f"select id, v, n, d from lake.{place}.t order by 1") == want


def test_columns_change_and_large_transactions_are_cut_off(old_db: Database, tmp_path: Path) -> None:
    """P-S12, P-S29: DDL between and inside transactions, a truncate, and a restart while one is open."""
    old_db.execute("create table t (id int primary key, v text)")
    replica = Replica(old_db, tmp_path, ("t",))
    try:
        old_db.execute("insert into t values (-1, 'a'); alter table t add n int default 5")
        old_db.execute("insert into t values (-2, 'b', 6); alter table t rename v to w")
        with old_db.connect() as conn:
            conn.execute("begin")
            conn.execute("insert into t select g, repeat('x', 50), g from generate_series(1, 3000) g")
            replica.wait_unfinished(1)
            replica.capture.stop()
            replica.start()
            conn.execute("alter table t drop n, add m bigint")
            conn.execute("insert into t select g, repeat('x', 50), g from generate_series(3001, 6000) g")
            conn.execute("commit")
        replica.catch_up()
        assert replica.cells["t"]["3000"] == {"id": "3000", "w": "x" * 50, "n": "3000"}
        assert replica.cells["t"]["3001"] == {"id": "3001", "w": "x" * 50, "m": "3001"}
        old_db.execute("truncate t; insert into t values (1, 'last', 7)")
        replica.catch_up()
        replica.assert_same()
        assert replica.capture.streams_in_progress
    finally:
        replica.capture.stop()


def test_a_transaction_that_an_older_server_cannot_stream(old_db: Database, tmp_path: Path) -> None:
    """P-S29: DDL after DDL that was rolled back to a savepoint; the capture falls back to whole transactions."""
    old_db.execute("create table t (id int primary key, v text)")
    replica = Replica(old_db, tmp_path, ("t",))
    try:
        with old_db.connect() as conn:
            conn.execute("begin")
            conn.execute("insert into t select g, 'x' from generate_series(1, 2000) g")
            conn.execute("savepoint a")
            conn.execute("alter table t add extra int default 7")
            conn.execute("insert into t select g, 'void', g from generate_series(2001, 4000) g")
            conn.execute("rollback to a")
            conn.execute("insert into t select g, 'x' from generate_series(4001, 6000) g")
            conn.execute("alter table t add other int")
            conn.execute("insert into t select g, 'x', g from generate_series(6001, 8000) g")
            conn.execute("commit")
        replica.catch_up()
        replica.assert_same()
        assert len(replica.cells["t"]) == 6000
        assert not replica.capture.streams_in_progress, "the server can do it now: say so in the documents"
    finally:
        replica.capture.stop()
