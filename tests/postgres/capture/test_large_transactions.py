"""Transactions that the server streams before they end, captured from real servers and compared with what they hold."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import psutil
import psycopg
import pyarrow as pa
import pytest

from aqueduck.lab.embedded import EmbeddedPostgres
from aqueduck.model.columns.typemap import lake_type
from aqueduck.model.schema import parse_lsn
from aqueduck.postgres.catalog.tables import describe_table
from tests.fix_postgres import Database, _new_database, wait_until
from tests.replica import Replica
from tests.restless import make_restless

SMALL: dict[str, str | int | bool] = {"logical_decoding_work_mem": "64kB", "max_prepared_transactions": 5}


@pytest.fixture(scope="module")
def small_memory() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(settings=SMALL) as server:
        yield server


@pytest.fixture
def big_db(small_memory: EmbeddedPostgres) -> Iterator[Database]:
    """A database on a server that streams transactions of more than 64 kB."""
    database = _new_database(small_memory)
    yield database
    database.drop()


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[..., Replica]]:
    made: list[Replica] = []

    def make(db: Database, *tables: str, **keywords: Any) -> Replica:
        directory = tmp_path / str(len(made))
        directory.mkdir()
        made.append(Replica(db, directory, tables or ("t",), **keywords))
        return made[-1]

    yield make
    for one in made:
        one.capture.stop()


ROWS = "insert into t select g, repeat('x', 100) from generate_series({}, {}) g"


def test_a_large_transaction_is_staged_while_it_is_open(
    big_db: Database, watch: Callable[..., Replica]
) -> None:
    """P-S29: its rows are on our disk before it commits, and arrive whole and at once when it does."""
    big_db.execute("create table t (id int primary key, v text)")
    watched = watch(big_db)
    with big_db.connect() as conn:
        conn.execute("begin")
        conn.execute(ROWS.format(1, 5000))
        watched.wait_unfinished(1)
        big_db.execute("insert into t values (9001, 'between')")
        watched.catch_up()
        assert list(watched.cells["t"]) == ["9001"]
        big_db.execute("insert into t values (9002, 'between')")
        conn.execute("commit")
    watched.catch_up()
    watched.assert_same()
    assert watched.stage.unfinished == (0, 0)
    assert len(watched.cells["t"]) == 5002
    assert [*map(len, watched.numbers.values())] == [1, 1, 5000]


def test_an_unfinished_transaction_does_not_hold_the_slot(
    big_db: Database, watch: Callable[..., Replica]
) -> None:
    """Promise 3: the slot follows other traffic while a streamed transaction is open, and nothing of it is lost by that."""
    big_db.execute("create table t (id int primary key, v text); create table other (id int)")
    watched = watch(big_db)
    with big_db.connect() as conn:
        conn.execute("begin")
        conn.execute(ROWS.format(1, 3000))
        watched.wait_unfinished(1)
        big_db.execute("insert into other select generate_series(1, 5000)")
        target = parse_lsn(big_db.value("select pg_current_wal_flush_lsn()::text"))
        confirmed = "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = 's'"
        wait_until(lambda: parse_lsn(big_db.value(confirmed)) >= target, "the slot follows")
        watched.capture.stop()
        watched.start()
        conn.execute("commit")
    watched.catch_up()
    watched.assert_same()
    assert len(watched.cells["t"]) == 3000


def test_the_setting_turns_it_off(big_db: Database, watch: Callable[..., Replica]) -> None:
    """`stream_in_progress: false` leaves large transactions to the server until they commit."""
    big_db.execute("create table t (id int primary key, v text)")
    watched = watch(big_db, stream_in_progress=False)
    with big_db.connect() as conn:
        conn.execute("begin")
        conn.execute(ROWS.format(1, 3000))
        big_db.execute("insert into t values (9001, 'between')")
        watched.catch_up()
        assert watched.stage.unfinished == (0, 0)
        conn.execute("commit")
    watched.catch_up()
    watched.assert_same()


def test_ddl_inside_large_transactions_and_their_savepoints(
    big_db: Database, watch: Callable[..., Replica]
) -> None:
    """P-S12: columns that come and go inside a streamed transaction, even in a part that is rolled back, and types that it creates."""
    big_db.execute("create table t (id int primary key, v text)")
    watched = watch(big_db)
    with big_db.connect() as conn:
        conn.execute("begin")
        conn.execute(ROWS.format(1, 2000))
        conn.execute("create type mood as enum ('ok'); create domain amount as numeric(10, 2)")
        conn.execute("alter table t add m mood[], add a amount")
        conn.execute("insert into t select g, 'x', '{ok}', 1.5 from generate_series(6001, 8000) g")
        watched.wait_unfinished(1)
        conn.execute("truncate t")
        conn.execute("insert into t select g, 'y', '{ok,ok}', 2.5 from generate_series(8001, 10000) g")
        conn.execute("commit")
    big_db.execute("insert into t values (1, 'after', '{}', 3.5)")
    watched.catch_up()
    watched.assert_same()
    assert len(watched.cells["t"]) == 2001
    assert watched.capture.streams_in_progress
    with big_db.connect() as conn:
        mapped = [(c.name, lake_type(c)) for c in describe_table(conn, "t").columns]
    assert [(c.name, lake_type(c)) for c in watched.last.columns] == mapped
    with big_db.connect() as conn:
        conn.execute("begin")
        conn.execute("insert into t (id, v) select g, 'x' from generate_series(2, 2000) g")
        conn.execute("savepoint a")
        conn.execute("alter table t add extra int default 7")
        conn.execute("insert into t (id, v) select g, 'void' from generate_series(2001, 4000) g")
        conn.execute("rollback to a")
        conn.execute("insert into t (id, v) select g, 'x' from generate_series(4001, 6000) g")
        conn.execute("commit")
    watched.catch_up()
    watched.assert_same()
    assert watched.capture.streams_in_progress


def test_a_transaction_that_the_server_cannot_stream_is_read_whole(
    big_db: Database, watch: Callable[..., Replica]
) -> None:
    """PostgreSQL fails to stream DDL after DDL that was rolled back; read after its end, the same transaction arrives."""
    big_db.execute("create table t (id int primary key, v text)")
    watched = watch(big_db)
    with big_db.connect() as conn:
        conn.execute("begin")
        conn.execute(ROWS.format(1, 2000))
        conn.execute("savepoint a")
        conn.execute("alter table t add extra int default 7")
        conn.execute("insert into t select g, 'void', g from generate_series(2001, 4000) g")
        conn.execute("rollback to a")
        conn.execute(ROWS.format(4001, 6000))
        conn.execute("alter table t add other int")
        conn.execute("insert into t select g, 'x', g from generate_series(6001, 8000) g")
        conn.execute("commit")
    big_db.execute("insert into t values (-1, 'after', 1)")
    watched.catch_up()
    watched.assert_same()
    assert len(watched.cells["t"]) == 6001
    assert not watched.capture.streams_in_progress, "the server can do it now: say so in the documents"


@pytest.mark.parametrize("restart", [False, True], ids=["running", "restarted"])
def test_prepared_transactions_arrive_when_they_are_committed(
    big_db: Database, watch: Callable[..., Replica], restart: bool
) -> None:
    """Two-phase commits, large and small: what is rolled back never shows, what is committed shows then, even after a restart."""
    big_db.execute("create table t (id int primary key, v text)")
    watched = watch(big_db)
    sizes = {"small": 10, "large": 3000, "small_void": 10, "large_void": 3000}
    for n, (name, rows) in enumerate(sizes.items()):
        with big_db.connect() as conn:
            conn.execute("begin")
            conn.execute(ROWS.format(n * 10_000, n * 10_000 + rows - 1))
            conn.execute(f"prepare transaction '{name}'".encode())
    big_db.execute("insert into t values (-1, 'meanwhile')")
    watched.catch_up()
    assert list(watched.cells["t"]) == ["-1"]
    if restart:
        watched.capture.stop()
        watched.start()
    for name in sizes:
        big_db.execute(f"{'rollback' if 'void' in name else 'commit'} prepared '{name}'")
    watched.catch_up()
    watched.assert_same()
    assert len(watched.cells["t"]) == 3011
    assert watched.stage.unfinished == (0, 0)


def _random_transactions(db: Database, seed: int, connections: int, steps: int, size: int) -> None:
    """Several connections at once: large writes, savepoints, rollbacks, commits; none waits for another's rows."""
    chance = random.Random(seed)
    conns: list[psycopg.Connection[Any]] = [db.connect() for _ in range(connections)]
    depth = [0] * connections
    open_ = [False] * connections
    next_id = seed * 100_000
    for _ in range(steps):
        n = chance.randrange(connections)
        conn = conns[n]
        if not open_[n]:
            conn.execute("begin")
            open_[n], depth[n] = True, 0
        what = chance.choice(["insert"] * 4 + ["update", "delete", "savepoint", "release", "back", "end"])
        table = chance.choice("tu")
        mine = f"id % {connections} = {n}"
        if what == "insert":
            rows = chance.choice([1, 30, size])
            ids = f"{next_id} * {connections} + g * {connections} + {n}"
            conn.execute(
                f"insert into {table} select {ids}, repeat(md5(g::text), 3) from generate_series(0, {rows - 1}) g".encode()
            )
            next_id += rows
        elif what == "update":
            conn.execute(f"update {table} set v = v || 'u' where {mine} and id % 3 = 0".encode())
        elif what == "delete":
            conn.execute(f"delete from {table} where {mine} and id % 7 = {chance.randrange(7)}".encode())
        elif what == "savepoint":
            depth[n] += 1
            conn.execute(f"savepoint s{depth[n]}".encode())
        elif what in ("release", "back") and depth[n]:
            to = chance.randint(1, depth[n])
            conn.execute(f"{'release' if what == 'release' else 'rollback to'} s{to}".encode())
            depth[n] = to - 1 if what == "release" else to
        elif what == "end":
            conn.execute(chance.choice((b"commit", b"commit", b"rollback")))
            open_[n] = False
    for n, conn in enumerate(conns):
        if open_[n]:
            conn.execute(chance.choice((b"commit", b"rollback")))
        conn.close()


@pytest.mark.parametrize("reader", ["stream", "restless", "bulk"])
@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 23))])
def test_random_histories_of_large_transactions(
    big_db: Database,
    watch: Callable[..., Replica],
    monkeypatch: pytest.MonkeyPatch,
    reader: str,
    seed: int,
) -> None:
    """
    P-S29, P-S07: concurrent, nested, partly rolled back; after them the replayed changes are the source's rows.

    Also if `auto` changes readers all the time, and if it reads transactions that are in progress in steps.
    """
    settings = {} if reader == "stream" else make_restless(monkeypatch, leaves_large=reader == "restless")
    big_db.execute(
        "create table t (id int primary key, v text); create table u (id int primary key, v text);"
        "create table unwatched (id int)"
    )
    watched = watch(big_db, "t", "u", **settings)
    for part in range(3):
        _random_transactions(big_db, seed * 100 + part, connections=4, steps=60, size=800)
        if part == 1:  # in the middle: nothing of what was unfinished may survive, nor be lost
            watched.capture.stop()
            watched.start()
        watched.catch_up()
        watched.assert_same()
    assert watched.stage.unfinished == (0, 0)
    assert watched.capture.streams_in_progress


def test_the_stream_is_read_with_little_memory(big_db: Database, watch: Callable[..., Replica]) -> None:
    """P-S29: a transaction far beyond the stage's limit passes through it; none of it waits for another to be applied."""
    big_db.execute("create table t (id int primary key, v text)")
    watched = watch(big_db)
    with big_db.connect() as conn:
        conn.execute("begin")
        conn.execute(ROWS.format(1, 20_000))
        watched.wait_unfinished(1)
        wait_until(lambda: watched.stage.unfinished[1] > 2 << 20, "more than the stage's limit is unfinished")
        assert watched.stage.staged_bytes == 0
        assert not watched.stage.full
        big_db.execute("insert into t values (-1, 'passes')")
        watched.catch_up()
        assert list(watched.cells["t"]) == ["-1"]
        conn.execute("commit")
    watched.catch_up()
    watched.assert_same()
    assert not list((watched.directory / "stage").iterdir())


def test_ten_times_the_rows_take_no_more_memory(big_db: Database, watch: Callable[..., Replica]) -> None:
    """P-S29: neither the capture nor the server holds a transaction in memory; the server does not write it to disk either."""
    big_db.execute("create table t (id int primary key, v text)")
    watched = watch(big_db)
    base = _rows_while_going_on(big_db, watched, 0, 20_000)
    peak = _rows_while_going_on(big_db, watched, 100_000, 200_000)
    assert peak["ours"] < base["ours"] + (40 << 20), (base, peak)
    assert peak["server"] < base["server"] + (20 << 20), (base, peak)
    spilled = "select spill_txns, stream_txns > 0 from pg_stat_replication_slots where slot_name = 's'"
    wait_until(
        lambda: big_db.query(spilled) == [(0, True)], "the server has streamed all and spilled nothing"
    )
    assert len(watched.cells["t"]) == 220_000


def _rows_while_going_on(db: Database, watched: Replica, first: int, rows: int) -> dict[str, int]:
    """Insert so many rows in one transaction; the most memory that was resident meanwhile, here and in the walsender."""
    pid = db.value("select active_pid from pg_replication_slots where slot_name = 's'")
    ours, server = psutil.Process(), psutil.Process(pid)
    most = {"ours": 0, "server": 0}

    def look() -> None:
        most["ours"] = max(most["ours"], ours.memory_info().rss)
        held = server.memory_info()
        most["server"] = max(most["server"], held.rss - held.shared)

    with db.connect() as conn:
        conn.execute("begin")
        for start in range(first, first + rows, 10_000):
            conn.execute(ROWS.format(start, start + 9_999))
            look()
        wanted = watched.stage.rows + rows // 2

        def staged() -> bool:
            look()
            watched.capture.check()
            return watched.stage.rows >= wanted or watched.stage.unfinished[1] > rows * 80

        wait_until(staged, "most of it is staged")
        conn.execute("commit")
    end = parse_lsn(db.value("select pg_current_wal_insert_lsn()::text"))

    def seen() -> bool:
        look()
        watched.capture.check()
        watched.capture.ask_position()
        return watched.capture.seen >= end

    wait_until(seen, "all of it is staged", 120)
    watched.catch_up()
    return most


def test_the_order_of_rows_is_one_over_all_transactions(
    big_db: Database, watch: Callable[..., Replica]
) -> None:
    """Segments of streamed and of ordinary transactions can be sorted by their place, as folds and parked tables do."""
    big_db.execute("create table t (id int primary key, v text)")
    watched = watch(big_db)
    with big_db.connect() as conn:
        conn.execute("begin")
        conn.execute(ROWS.format(1, 3000))
        watched.wait_unfinished(1)
        big_db.execute("insert into t select g, 'b' from generate_series(5001, 5100) g")
        conn.execute("commit")
    big_db.execute("insert into t select g, 'c' from generate_series(6001, 6100) g")
    end = parse_lsn(big_db.value("select pg_current_wal_flush_lsn()::text"))
    wait_until(lambda: watched.capture.seen >= end, "all is staged")
    watched.stage.cut()
    paths = [s.path for cut in watched.stage.between(0, 1 << 62) for s in cut.segments]
    con = duckdb.connect()
    con.register("rows", pa.concat_tables(pa.ipc.open_file(path).read_all() for path in paths))
    by_commit = con.execute(
        "select count(*), max(_ord) - min(_ord) + 1, count(distinct _ord) from rows group by _lsn order by min(_ord)"
    )
    assert by_commit.fetchall() == [(100, 100, 100), (3000, 3000, 3000), (100, 100, 100)]
