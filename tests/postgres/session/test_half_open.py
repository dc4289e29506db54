"""Connections that die silently: both ends notice within 30 s, for each kind of connection."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest

from aqueduck.config.sync import LakeConfig
from aqueduck.lab.embedded import EmbeddedPostgres
from aqueduck.lake.session.catalog import catalog_place, open_lake
from aqueduck.model.connections import CLIENT_END, SERVER_END
from aqueduck.model.errors import ConnectionLostError, ServiceLockedError
from aqueduck.postgres.capture.capture import Silence
from aqueduck.postgres.session.connection import connect, translate_errors
from aqueduck.postgres.session.group_lock import GroupLocks
from aqueduck.postgres.session.sqlwire import SqlConnection
from aqueduck.postgres.session.wire import CopyOutStream, connect_replication, connect_wire, start_stream
from tests.fix_events import Watched
from tests.fix_postgres import Database, wait_until
from tests.half_open import Wire, silent_proxy, wire

BOUND_SECONDS = 30.0


# -- what is set


def server_settings(query: Callable[[str], Any]) -> dict[str, str]:
    names = ", ".join(f"current_setting('{name}')" for name in SERVER_END)
    return dict(zip(SERVER_END, query(f"select {names}"), strict=True))


def test_both_ends_of_every_connection_have_a_bound(db: Database) -> None:
    """P-T06: SQL, bulk and replication connections."""
    wanted = {
        "tcp_keepalives_idle": "10", "tcp_keepalives_interval": "3", "tcp_keepalives_count": "3",
        "tcp_user_timeout": "20000", "client_connection_check_interval": "5s",
    }  # fmt: skip
    with connect(db.dsn) as conn:
        assert server_settings(lambda sql: conn.execute(sql.encode()).fetchone()) == wanted
        given = conn.info.get_parameters()
        assert {name: given[name] for name in CLIENT_END} == {n: str(v) for n, v in CLIENT_END.items()}
    bulk = SqlConnection(db.dsn, lambda: False)
    assert server_settings(lambda sql: bulk.query(sql)[0]) == wanted
    bulk.close()
    walsender = connect_replication(db.dsn)
    found = [walsender.exec_(f"show {name}".encode()).get_value(0, 0) for name in SERVER_END]
    assert [(v or b"").decode() for v in found] == [*list(wanted.values())[:-1], "0"]
    walsender.finish()


def test_both_ends_of_a_lakes_catalog_have_a_bound(db: Database, tmp_path: Path) -> None:
    """P-T06: DuckDB connects to a catalog in PostgreSQL on its own; what a vanished service held there is free as well."""
    catalog = f"postgres:{db.dsn} options='-c tcp_keepalives_idle=66'"
    lake = open_lake(LakeConfig(catalog=catalog, data_path=str(tmp_path)))
    try:
        names = ", ".join(f"current_setting(''{name}'') as {name}" for name in SERVER_END)
        found = lake.execute(f"from postgres_query('__ducklake_metadata_lake', 'select {names}')")
        assert found == [("66", "3", "3", "20000", "0")]
        given = catalog_place(catalog)
        assert [name for name, value in CLIENT_END.items() if f"{name}={value}" not in given] == []
    finally:
        lake.close()


def test_what_the_connection_string_says_wins(db: Database) -> None:
    """P-T06: the same for settings of the server's end."""
    dsn = f"{db.dsn} keepalives_idle=77 tcp_user_timeout=9000 options='-c tcp_keepalives_idle=66 -c work_mem=5MB'"
    with connect(dsn) as conn:
        assert conn.info.get_parameters()["keepalives_idle"] == "77"
        assert conn.execute("show tcp_keepalives_idle").fetchone() == ("66",)
        assert conn.execute("show tcp_keepalives_interval").fetchone() == ("3",)
        assert conn.execute("show work_mem").fetchone() == ("5MB",)
    for made in (connect_replication(dsn), connect_wire(dsn)):
        assert made.exec_(b"show tcp_keepalives_idle").get_value(0, 0) == b"66"
        assert made.exec_(b"show tcp_keepalives_count").get_value(0, 0) == b"3"
        made.finish()


def test_a_transaction_that_the_caller_opens_is_his_own(db: Database) -> None:
    """What is set outlives a rollback, and leaves no transaction behind."""
    with connect(db.dsn, autocommit=False) as conn:
        assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        conn.execute("select 1")
        conn.rollback()
        assert conn.execute("show tcp_keepalives_idle").fetchone() == ("10",)


# -- silence, although a system in between still answers


def test_silence_is_asked_about_before_it_is_an_end() -> None:
    """P-T06: the second half begins with the question, so a peer that slept is not cut off."""
    now = 0.0
    silence = Silence(30.0, lambda: now)
    now = 14.9
    assert not silence.lasts()
    now = 1000.0
    assert silence.lasts()
    now = 1014.9
    assert not silence.lasts()
    silence.broken()
    now = 1029.9
    assert silence.lasts()
    now = 1045.0
    with pytest.raises(ConnectionLostError, match="for 30 s"):
        silence.lasts()


@pytest.mark.parametrize("how", ["stream", "poll"])
def test_a_capture_notices_that_nothing_comes(db: Database, watch: Callable[..., Watched], how: str) -> None:
    """P-T06, hazard 17: packets of one direction are dropped by a system that acknowledges them."""
    db.execute("create table t (id int primary key)")
    with silent_proxy(db.server.port) as proxy:
        options = {"silence_timeout_seconds": 1.0, "capture": how}
        watched = watch(db, dsn=db.dsn_for("postgres", port=proxy.port), settings=options)
        db.execute("insert into t values (1)")
        assert len(watched.events()) == 1
        time_of_silence = time.monotonic()
        proxy.silence()
        wait_until(lambda: watched.capture._failures or not watched.capture.is_alive(), "it is noticed", 20)
        assert time.monotonic() - time_of_silence >= 0.5
        if how == "stream":
            with pytest.raises(ConnectionLostError, match="nothing was heard of the server for 1 s"):
                watched.capture.check()


def test_an_idle_server_is_not_given_up(db: Database, watch: Callable[..., Watched]) -> None:
    """P-T06: an idle server answers requests, so it does not count as dead."""
    db.execute("create table t (id int primary key)")
    watched = watch(db, settings={"silence_timeout_seconds": 0.2})
    asked = time.monotonic()
    wait_until(lambda: time.monotonic() - asked > 1.5, "several such times have passed")
    watched.capture.check()
    db.execute("insert into t values (1)")
    assert len(watched.events()) == 1


def test_a_long_statement_is_told_from_a_server_that_is_gone(db: Database) -> None:
    """P-T06: a step of an SQL reader may decode for minutes; another connection must find its server process."""
    with silent_proxy(db.server.port) as proxy:
        dsn = db.dsn_for("postgres", port=proxy.port, connect_timeout=2)
        conn = SqlConnection(dsn, lambda: False)
        for piece in conn.copy("copy (select pg_sleep(1.5)) to stdout", 0.3):
            if bytes(piece).endswith(b"Z\0\0\0\5I"):
                break
        pieces = conn.copy("copy (select pg_sleep(1.5)) to stdout", 0.3)
        proxy.silence()
        with pytest.raises(ConnectionLostError, match="the server does not answer"):
            list(pieces)
        conn.close()


# -- packets that are lost, and the kernels of both ends


@pytest.fixture(scope="module")
def far() -> Iterator[tuple[EmbeddedPostgres, Wire]]:
    """A server that listens on a wire."""
    with wire(os.getpid() % 200) as line, EmbeddedPostgres() as server:
        with (server.data_dir / "pg_hba.conf").open("a") as rules:
            rules.write(f"host all all {line.there}/24 trust\n")
        with psycopg.connect(server.dsn, autocommit=True) as admin:
            admin.execute("alter system set listen_addresses = '*'")
        server.restart()
        with psycopg.connect(server.dsn, autocommit=True) as admin:
            admin.execute("create table t (id int primary key, v text); create publication p for table t")
            admin.execute("insert into t select g, repeat('x', 1000) from generate_series(1, 100000) g")
            admin.execute("select pg_create_logical_replication_slot('s', 'pgoutput')")
        yield server, line


HASTY = (
    " connect_timeout=5 keepalives_idle=1 keepalives_interval=1 keepalives_count=2 tcp_user_timeout=3000 options='"
    "-c tcp_keepalives_idle=1 -c tcp_keepalives_interval=1 -c tcp_keepalives_count=2 -c tcp_user_timeout=3000"
    " -c client_connection_check_interval=1000'"
)
IN_TIME = pytest.mark.parametrize(
    ("more", "seconds"),
    [
        pytest.param(HASTY, 10.0, id="hasty"),
        pytest.param("", BOUND_SECONDS, id="default", marks=pytest.mark.slow),
    ],
)


def stream(dsn: str, ready: Callable[[], None]) -> None:
    reader, buffer = start_stream(dsn, "s", "p", 0), np.empty(1 << 22, np.uint8)
    ready()
    while True:
        reader.read_into(buffer, 0, 0.2)
        reader.send_status(received=0, confirmed=0)


def poll(dsn: str, ready: Callable[[], None]) -> None:
    conn = SqlConnection(dsn, lambda: False)
    ready()
    while True:
        conn.query("select pg_current_wal_flush_lsn()")


def control(dsn: str, ready: Callable[[], None]) -> None:
    """Also the registry, the watch, the lock and the comparison of `verify`: a statement whose answer does not come."""
    with connect(dsn) as conn, translate_errors("wait"):
        ready()
        conn.execute("select pg_sleep(1000)")


def copy(dsn: str, ready: Callable[[], None]) -> None:
    reader, buffer = CopyOutStream(connect_wire(dsn)), np.empty(1 << 20, np.uint8)
    reader.start("copy (select * from t, generate_series(1, 100)) to stdout (format binary)")
    ready()
    while True:
        reader.read_into(buffer, 0)


@IN_TIME
def test_a_dead_link_ends_whatever_waits_on_it(
    far: tuple[EmbeddedPostgres, Wire], more: str, seconds: float
) -> None:
    """P-T06, hazard 17: nothing that the server says arrives any more, without a reset."""
    server, line = far
    dsn = f"{server.dsn_for('postgres', host=line.here)}{more}"
    ended: dict[str, float] = {}
    begun: set[str] = set()
    threads = []

    def follow(work: Callable[[str, Callable[[], None]], None]) -> None:
        with pytest.raises(ConnectionLostError):
            work(dsn, lambda: begun.add(work.__name__))
        ended[work.__name__] = time.monotonic()

    def begin() -> None:
        for work in (stream, poll, control, copy):
            threads.append(threading.Thread(target=follow, args=(work,)))
            threads[-1].start()

    line.run(begin)
    wait_until(lambda: len(begun) == 4, "all of them have begun")
    with line.losing_what_goes_there():
        lost = time.monotonic()
        wait_until(lambda: len(ended) == 4, "all of them have ended", seconds + 5)
    assert {name: at - lost for name, at in ended.items() if at - lost > seconds} == {}


@IN_TIME
def test_what_a_vanished_service_held_is_free(
    far: tuple[EmbeddedPostgres, Wire], more: str, seconds: float
) -> None:
    """P-T06: the lock of its group, its slot, and a statement that still runs for it."""
    server, line = far
    dsn = f"{server.dsn_for('postgres', host=line.here)}{more}"
    kept: list[Any] = []

    def begin() -> None:
        locks = GroupLocks(dsn)
        locks.take("g")
        worker = connect_wire(f"{dsn} application_name=worker")
        worker.send_query(b"select pg_sleep(1000)")
        kept.extend((locks, worker, start_stream(dsn, "s", "p", 0)))

    line.run(begin)
    others = GroupLocks(server.dsn)
    with psycopg.connect(server.dsn, autocommit=True) as observer:

        def held() -> set[str]:
            found = set()
            try:
                others.take("g")
                others.release("g")
            except ServiceLockedError:
                found.add("lock")
            if observer.execute(
                "select active from pg_replication_slots where slot_name = 's'"
            ).fetchone() == (True,):
                found.add("slot")
            if observer.execute("select from pg_stat_activity where application_name = 'worker'").fetchall():
                found.add("worker")
            return found

        assert held() == {"lock", "slot", "worker"}
        with line.losing_what_goes_there(), line.losing_what_comes_from_there():
            lost = time.monotonic()
            wait_until(lambda: not held(), "nothing is held any more", seconds + 5, pause=0.2)
        assert time.monotonic() - lost <= seconds
    others.close()
    for each in kept:
        with contextlib.suppress(Exception):
            (each.finish if hasattr(each, "finish") else each.close)()
