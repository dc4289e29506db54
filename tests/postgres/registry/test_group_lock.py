"""One service for a group at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import psycopg
import pytest

from aqueduck.errors import (
    ServiceLockedError,
)
from aqueduck.postgres.connection import connect
from aqueduck.postgres.group_lock import GroupLocks, lock_group, lock_key, try_lock_group, unlock_group
from aqueduck.postgres.registry import (
    call,
    rows_of,
)
from tests.fix_postgres import Database, wait_until
from tests.postgres.registry.wishes import refused

Connection = psycopg.Connection[Any]


def test_a_second_service_for_a_group_is_refused(any_db: Database, conn: Connection) -> None:
    """Two would overwrite each other's position; other groups are free."""
    with any_db.connect() as first:
        lock_group(first, "g")
        assert not try_lock_group(conn, "g")
        with pytest.raises(ServiceLockedError, match=rf"process {first.info.backend_pid} of the server"):
            lock_group(conn, "g")
        lock_group(conn, "h")
        unlock_group(first, "g")
        unlock_group(first, "g")
        assert try_lock_group(conn, "g")


def test_the_lock_passes_on_when_a_service_dies(any_db: Database, conn: Connection) -> None:
    """The lock lives as long as the connection of the one who has it."""
    first = any_db.connect()
    assert try_lock_group(first, "g")
    any_db.execute("select pg_terminate_backend(%s)", [first.info.backend_pid])
    wait_until(lambda: try_lock_group(conn, "g"), "the lock is free", seconds=5)
    first.close()


def test_a_lock_needs_no_registry(db: Database, role: str) -> None:
    """Where only the file is used, two services still keep out of each other's way."""
    with db.connect(role) as first, db.connect(role) as second:
        assert try_lock_group(first, "g")
        assert not try_lock_group(second, "g")


@pytest.mark.parametrize("name", ["default", "g", "x" * 40, "a_1"])
def test_a_running_group_is_shown(any_db: Database, conn: Connection, name: str) -> None:
    """Everybody can see whether what `status()` says is of now; a lock elsewhere does not count."""
    call(conn, "create_group", name=name)
    call(conn, "add_table", source="a", group_name=name)
    assert conn.execute("select aqueduck._lock_key(%s)", (name,)).fetchone() == (lock_key(name),)
    with closing(psycopg.connect(any_db.server.dsn, autocommit=True)) as elsewhere:
        assert try_lock_group(elsewhere, name)
        assert [row["running"] for row in rows_of(conn, "status")] == [False]
    with any_db.connect() as service:
        assert try_lock_group(service, name)
        assert [row["running"] for row in rows_of(conn, "status")] == [True]
        assert [(row["running"], row["note"]) for row in rows_of(conn, "groups")] == [(True, None)]
        assert "a service runs" in refused(conn, "release_group", name=name).message


@pytest.mark.parametrize("pooled", [False, True])
def test_a_service_keeps_its_groups_over_lost_connections(
    db: Database, pooler: Callable[..., str], pooled: bool
) -> None:
    """P-E09: one service a group, also through a pooler, which would give a session's lock to others."""
    dsn = pooler() if pooled else db.dsn
    locks, others = GroupLocks(dsn), GroupLocks(dsn)
    try:
        locks.take("g")
        locks.take("h")
        for _ in range(5):  # a pooler has several server connections
            with pytest.raises(ServiceLockedError):
                others.take("g")
        locks.release("h")
        others.take("h")
        db.execute("select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory' and granted")
        wait_until(lambda: not db.query("select from pg_locks where locktype = 'advisory'"), "they are gone")
        locks.keep()
        others.keep()
        with pytest.raises(ServiceLockedError):
            others.take("g")
        with pytest.raises(ServiceLockedError):
            locks.take("h")
    finally:
        locks.close()
        others.close()


def test_a_lock_that_is_no_services_is_named_with_the_way_out(db: Database, role: str) -> None:
    """Whoever may connect can take an advisory lock: the error says which role did, and the statements free the group."""
    with connect(db.dsn_for(role)) as stranger, connect(db.dsn) as service:
        stranger.execute("select pg_advisory_lock(%s)", (lock_key("g"),))
        with pytest.raises(ServiceLockedError, match="is no service") as caught:
            lock_group(service, "g")
        assert caught.value.hint is not None
        db.execute(caught.value.hint.partition(";")[0])
        wait_until(lambda: try_lock_group(service, "g"), "the group is free")
