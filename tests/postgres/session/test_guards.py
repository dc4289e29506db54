"""
No connection of ours runs functions that another role planted, and none reads only a part of a table.

Each test is an attack, by a role that may do no more than create in the schema `public`.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from aqueduck.config.sync import LakeConfig
from aqueduck.lake.session.catalog import open_lake
from aqueduck.model.errors import AqueduckError, TableMissingError
from aqueduck.postgres.copy.copy_connections import copy_connections
from aqueduck.postgres.registry.registry import call, install
from aqueduck.postgres.session.connection import connect, is_pooled
from aqueduck.postgres.session.group_lock import GroupLocks
from aqueduck.postgres.session.quoting import identifier
from aqueduck.postgres.session.sqlwire import SqlConnection
from aqueduck.postgres.session.wire import connect_replication
from aqueduck.sync.prepare import prepare
from tests.fix_postgres import Database
from tests.small_service import small_config

UNGUARDED = """
    select p.oid::regprocedure::text from pg_proc p where p.pronamespace = 'aqueduck'::regnamespace
    and not coalesce(p.proconfig @> array['search_path=pg_catalog, pg_temp'], false)
"""
TAKES_OVER = "as $$ begin execute 'alter role mallory superuser'; return null; end $$"


@pytest.fixture
def mallory(db: Database) -> Iterator[str]:
    """A role that may create in `public`, with functions there that fit better than the server's own."""
    db.execute("create role mallory login; grant create on schema public to mallory")
    names = ", ".join(["text"] * 6)
    with db.connect("mallory") as conn:
        for function in (
            "format(text, name, name) returns text",
            "format(text, text, text) returns text",
            "format(text, text) returns text",
            f"json_build_object({names}) returns json",
            "has_schema_privilege(oid, varchar) returns bool",
        ):
            conn.execute(f"create function public.{function} language plpgsql {TAKES_OVER}".encode())
    yield "mallory"
    db.execute("drop owned by mallory; drop role mallory")


def _is_superuser(db: Database, role: str) -> bool:
    return bool(db.value("select rolsuper from pg_roles where rolname = %s", (role,)))


def test_functions_in_public_do_not_run_as_the_service(db: Database, mallory: str, tmp_path: Path) -> None:
    """`aqueduck init` by a superuser runs nothing of a role that may create in `public`, also under a hostile DSN."""
    db.execute("create table public.t (id int primary key)")
    config = small_config(db, tmp_path, "public.t")
    hostile = {"dsn": db.dsn + " options='-csearch_path=public,pg_catalog'"}
    config = config.model_copy(update={"source": config.source.model_copy(update=hostile)})
    assert list(prepare(config))
    assert not _is_superuser(db, mallory)


def test_functions_in_public_do_not_run_for_who_asks_the_registry(db: Database, mallory: str) -> None:
    """A DBA in psql, whose search path is the usual one, can call every function of the registry."""
    db.execute("create table public.t (id int primary key)")
    with connect(db.dsn) as conn:
        install(conn)
    db.execute("select aqueduck.add_table('public.t')")
    for function in ("status", "tables", "groups", "list_settings"):
        assert db.query(f"select * from aqueduck.{function}()")
    with pytest.raises(psycopg.DatabaseError, match="not synced"):
        db.execute("select aqueduck.remove_table('public.nothing')")
    assert not _is_superuser(db, mallory)


def test_every_function_of_the_registry_has_its_own_search_path(any_db: Database) -> None:
    """Also in a registry that an older program installed: the next start mends it."""
    with connect(any_db.dsn) as conn:
        install(conn)
        assert any_db.query(UNGUARDED) == []
        any_db.execute(
            "alter function aqueduck.status() reset search_path; update aqueduck.schema_version set functions_hash = ''"
        )
        assert any_db.query(UNGUARDED) == [("aqueduck.status()",)]
        assert install(conn)
    assert any_db.query(UNGUARDED) == []


def test_a_role_that_is_called_like_the_registry_gets_the_same_refusals(db: Database) -> None:
    """With "$user" in the search path, the registry's functions are known by other names; refusals are recognized by SQLSTATE."""
    db.execute("create role aqueduck login")
    try:
        db.execute("create schema aqueduck authorization aqueduck")
        with connect(db.dsn_for("aqueduck")) as conn:
            install(conn)
            with pytest.raises(TableMissingError) as caught:
                call(conn, "add_table", source="nothing")
        assert caught.value.hint is not None
        with db.connect("aqueduck") as psql, pytest.raises(psycopg.DatabaseError) as raw:
            psql.execute("select aqueduck.add_table('nothing')")
        assert raw.value.sqlstate == "QD003"
    finally:
        db.execute("drop owned by aqueduck cascade; drop role aqueduck")


def test_no_session_has_another_search_path(db: Database, role: str) -> None:
    """Whatever the connection string, the role and the database say."""
    db.execute(
        f"alter role {identifier(role)} set search_path = public; alter role {identifier(role)} replication"
    )
    dsn = db.dsn_for(role) + " options='-csearch_path=public -crow_security=on'"
    wanted = [("pg_catalog", "off")]
    asked = "select current_setting('search_path'), current_setting('row_security')"
    for autocommit in (True, False):
        with connect(dsn, autocommit=autocommit) as conn:
            conn.execute("select 1")
            conn.rollback()
            assert conn.execute(asked).fetchall() == wanted
    reader = SqlConnection(dsn, lambda: False)
    assert reader.query(asked) == wanted
    reader.close()
    stream = connect_replication(dsn)
    assert stream.exec_(asked.encode()).get_value(0, 0) == b"pg_catalog"
    stream.finish()


def test_a_catalog_in_postgresql_finds_no_functions_of_others(db: Database, tmp_path: Path) -> None:
    """DuckDB connects to the lake's catalog on its own, and looks there for a table of secrets by its bare name."""
    lake = open_lake(LakeConfig(catalog=f"postgres:{db.dsn}", data_path=str(tmp_path)))
    try:
        asked = "from postgres_query('__ducklake_metadata_lake', 'select current_setting(''search_path'')')"
        assert lake.execute(asked) == [("pg_catalog",)]
        lake.execute("create table lake.t as select 1 as a")
        assert lake.execute("from lake.t") == [(1,)]
    finally:
        lake.close()


class Pooler:
    """A pooler, as far as a client sees one: it refuses `options`, and reports a process number of its own."""

    def __init__(self, port: int) -> None:
        self._server = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._session, args=(client,), daemon=True).start()

    def _session(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            length = struct.unpack("!I", client.recv(4, socket.MSG_WAITALL))[0]
            startup = client.recv(length - 4, socket.MSG_WAITALL)
            if startup == struct.pack("!I", 80877103):  # TLS?
                client.sendall(b"N")
                length = struct.unpack("!I", client.recv(4, socket.MSG_WAITALL))[0]
                startup = client.recv(length - 4, socket.MSG_WAITALL)
            if b"\0options\0" in startup:
                refusal = b"SFATAL\0C08P01\0Munsupported startup parameter: options\0\0"
                client.sendall(b"E" + struct.pack("!I", len(refusal) + 4) + refusal)
                return
            with socket.create_connection(("127.0.0.1", self._server)) as server:
                server.sendall(struct.pack("!I", length) + startup)
                while True:  # up to the process number, which becomes another
                    kind = server.recv(1, socket.MSG_WAITALL)
                    head = server.recv(4, socket.MSG_WAITALL)
                    body = server.recv(struct.unpack("!I", head)[0] - 4, socket.MSG_WAITALL)
                    if kind == b"K":
                        body = struct.pack("!I", 1) + body[4:]
                    client.sendall(kind + head + body)
                    if kind in (b"Z", b"E"):
                        break
                thread = threading.Thread(target=_pump, args=(client, server), daemon=True)
                thread.start()
                _pump(server, client)

    def close(self) -> None:
        self._listener.close()


def _pump(one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := one.recv(65536):
            other.sendall(data)
        other.shutdown(socket.SHUT_WR)


@pytest.fixture
def pooled(db: Database) -> Iterator[str]:
    """A connection string through something that looks like a transaction pooler."""
    pooler = Pooler(db.server.port)
    yield f"host=127.0.0.1 port={pooler.port} dbname={db.name} user=postgres"
    pooler.close()


def test_through_a_pooler_each_transaction_has_the_guards(db: Database, pooled: str) -> None:
    """Nothing is left in a session that others get next, and nothing of ours runs without."""
    asked = "select current_setting('search_path'), current_setting('row_security')"
    wanted = [("pg_catalog", "off")]
    with connect(pooled) as conn:
        assert is_pooled(conn)
        assert conn.execute(asked).fetchall() == wanted
        with conn.transaction():
            assert conn.execute(asked).fetchall() == wanted
        left = conn.pgconn.exec_(asked.encode())
        assert left.get_value(0, 0) == b'"$user", public'
    with connect(pooled, autocommit=False) as conn:
        conn.execute("set transaction isolation level repeatable read read only")
        assert conn.execute(asked).fetchall() == wanted
    reader = SqlConnection(pooled, lambda: False)
    assert reader.is_pooled
    assert reader.query(asked) == wanted
    reader.close()
    stream = copy_connections.take(pooled)
    stream.close()


def test_locks_and_the_registry_work_through_a_pooler(db: Database, pooled: str) -> None:
    """The guards do not end a transaction that holds a lock."""
    with connect(pooled) as conn:
        assert install(conn)
        assert call(conn, "create_group", name="g")
    one, other = GroupLocks(pooled), GroupLocks(pooled)
    one.take("g")
    one.check()
    with pytest.raises(AqueduckError, match="already runs"):
        other.take("g")
    one.release("g")
    other.take("g")
    one.close()
    other.close()


def test_a_catalog_behind_a_pooler_can_be_opened(pooled: str, tmp_path: Path) -> None:
    """One that refuses `options` is asked again without."""
    lake = open_lake(LakeConfig(catalog=f"postgres:{pooled}", data_path=str(tmp_path)))
    lake.execute("create table lake.t as select 1 as a")
    found = lake.execute("from lake.t")
    lake.close()
    assert found == [(1,)]
