"""One service for a group at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
import structlog

from aqueduck.model.errors import (
    ServiceLockedError,
)
from aqueduck.postgres.registry import registry_install
from aqueduck.postgres.registry.registry import (
    call,
    install,
    monitor_grants,
    rows_of,
)
from aqueduck.postgres.session.connection import connect
from aqueduck.postgres.session.group_lock import (
    GroupLocks,
    group_runs,
    lock_group,
    lock_key,
    try_lock_group,
    unlock_group,
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
    """Each role can see whether the answer of `status()` is current; a lock in another database does not count."""
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


@pytest.fixture
def mallory(any_db: Database) -> Iterator[str]:
    """A role that may only connect; all of its locks are released afterwards."""
    any_db.execute("create role mallory login")
    yield "mallory"
    any_db.execute("drop owned by mallory; drop role mallory")


def test_a_role_without_rights_keeps_no_service_out(any_db: Database, mallory: str) -> None:
    """The attack: any role that can connect can take a group's lock number; the service starts anyway and names that role."""
    with any_db.connect(mallory) as stranger, connect(any_db.dsn) as first, connect(any_db.dsn) as second:
        stranger.execute(
            "select pg_advisory_lock(%s), pg_advisory_lock(%s)", (lock_key("g"), lock_key("g") ^ 1)
        )
        with structlog.testing.capture_logs() as said:
            lock_group(first, "g")
        assert [line["group"] for line in said] == ["g"]
        assert said[0]["holders"][0].startswith(
            f"process {stranger.info.backend_pid} of the server, role mallory"
        )
        assert said[0]["hint"] == f"select pg_terminate_backend({stranger.info.backend_pid})"
        with pytest.raises(
            ServiceLockedError, match=rf"process {first.info.backend_pid} of the server, role postgres"
        ):
            lock_group(second, "g")
        assert group_runs(second, "g")
        unlock_group(first, "g")
        assert not group_runs(second, "g")
        assert try_lock_group(second, "g")


def test_a_service_that_started_under_attack_keeps_its_group(any_db: Database, mallory: str) -> None:
    """When the stranger lets go, the group's own number is free, and the group is not."""
    with any_db.connect(mallory) as stranger, connect(any_db.dsn) as first, connect(any_db.dsn) as second:
        stranger.execute("select pg_advisory_lock_shared(%s)", (lock_key("g"),))
        assert try_lock_group(first, "g")
        stranger.execute("select pg_advisory_unlock_all()")
        assert not try_lock_group(second, "g")
        assert not any_db.query(
            "select from pg_locks where locktype = 'advisory' and pid = %s", [second.info.backend_pid]
        )


@pytest.mark.parametrize("pooled", [False, True])
def test_of_services_that_start_under_attack_one_gets_the_group(
    db: Database, pooler: Callable[..., str], pooled: bool
) -> None:
    """P-E09: however many start at once, also through a pooler, no two of them have it."""
    db.execute("create role mallory login")
    dsn = pooler() if pooled else db.dsn
    with db.connect("mallory") as stranger:
        stranger.execute("select pg_advisory_lock(%s)", (lock_key("g"),))
        services = [GroupLocks(dsn) for _ in range(4)]
        refused_ones = []

        def take(locks: GroupLocks) -> None:
            try:
                locks.take("g")
            except ServiceLockedError as exc:
                refused_ones.append(exc)

        threads = [threading.Thread(target=take, args=(locks,)) for locks in services]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len([locks for locks in services if locks.has("g")]) == 1
        assert len(refused_ones) == 3
        for locks in services:
            locks.close()
    db.execute("drop role mallory")


def test_a_stranger_with_the_lock_is_no_running_service(
    any_db: Database, conn: Connection, mallory: str
) -> None:
    """`status()` does not call a group running that no service has, and `release_group` is not refused."""
    call(conn, "create_group", name="g")
    with any_db.connect(mallory) as stranger:
        stranger.execute("select pg_advisory_lock(%s)", (lock_key("g"),))
        assert [row["running"] for row in rows_of(conn, "groups")] == [False]
        with any_db.connect() as service:
            assert try_lock_group(service, "g")
            assert [row["running"] for row in rows_of(conn, "groups")] == [True]
        wait_until(lambda: not rows_of(conn, "groups")[0]["running"], "the server has ended the session")
        call(conn, "release_group", name="g")


def test_a_role_without_rights_holds_up_no_change(
    any_db: Database, conn: Connection, mallory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes wait for each other by a lock that only roles with the right to change can take."""
    monkeypatch.setattr(registry_install, "LOCK_SECONDS_MAX", 1)
    for statement in monitor_grants(mallory):
        any_db.execute(statement)
    with any_db.connect(mallory) as stranger:
        stranger.execute("select pg_advisory_lock(4704367180466350177)")  # what changes waited for earlier
        with pytest.raises(psycopg.errors.InsufficientPrivilege), stranger.transaction():
            stranger.execute("lock table aqueduck.settings in row exclusive mode")
        stranger.execute("begin; lock table aqueduck.settings in access share mode")
        call(conn, "add_table", source="a")
        any_db.execute("update aqueduck.schema_version set functions_hash = ''")
        assert install(conn)
