"""The registry is installed where it may be, and used with the rights that are documented."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from aqueduck.model.errors import (
    ConfigError,
    PrivilegeError,
    SourceQueryError,
)
from aqueduck.model.lifecycle import SyncState
from aqueduck.postgres.publications.ownership import read_ownership
from aqueduck.postgres.registry import registry_install
from aqueduck.postgres.registry.registry import (
    TableObservation,
    call,
    check_registry,
    claim_group,
    delete_removed,
    install,
    manage_grants,
    monitor_grants,
    read_desired,
    reconcile_file,
    rows_of,
    write_observed,
)
from aqueduck.postgres.registry.registry_install import exists
from aqueduck.postgres.registry.registry_rows import lake_of
from aqueduck.postgres.session.connection import connect
from aqueduck.postgres.session.quoting import identifier
from tests.fix_postgres import Database
from tests.postgres.registry.wishes import config_of, group, refused, run_all, table

Connection = psycopg.Connection[Any]


def test_installing_twice_changes_nothing(any_db: Database) -> None:
    """`aqueduck init` is idempotent."""
    with connect(any_db.dsn) as conn:
        assert check_registry(conn) == "will be installed"
        assert install(conn)
        before = any_db.query("select * from aqueduck.schema_version")
        assert not install(conn)
        assert check_registry(conn) == f"version {len(registry_install.migrations())} is installed"
    assert any_db.query("select * from aqueduck.schema_version") == before


def test_an_upgrade_keeps_everything(
    any_db: Database, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new version runs its new migrations, and does not touch rows and objects of users."""
    call(conn, "add_table", source="a")
    any_db.execute("create view mine as select source, state from aqueduck.status()")
    wanted = read_desired(conn)
    newer = [*registry_install.migrations(), "alter table aqueduck.settings add column reason text"]
    monkeypatch.setattr(registry_install, "migrations", lambda: newer)
    assert check_registry(conn) == "will be upgraded"
    assert install(conn)
    assert not install(conn)
    assert any_db.value("select version from aqueduck.schema_version") == len(newer)
    assert any_db.query("select reason from aqueduck.settings") == []
    assert read_desired(conn) == wanted
    assert any_db.query("select * from mine") == [("public.a", "PENDING")]


def test_functions_of_another_build_are_replaced(any_db: Database, conn: Connection) -> None:
    """The functions are always those of the program that runs."""
    any_db.execute(
        """create or replace function aqueduck.get_setting(name text, group_name text default null,
               source text default null) returns text language sql as 'select ''old''';
           update aqueduck.schema_version set functions_hash = 'old'"""
    )
    assert install(conn)
    assert call(conn, "get_setting", name="inline_rows") == "1000"


def test_a_failed_upgrade_leaves_the_old_version(
    any_db: Database, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-S01: a failed installation is rolled back."""
    broken = [*registry_install.migrations(), "create table aqueduck.more (); select 1 / 0"]
    monkeypatch.setattr(registry_install, "migrations", lambda: broken)
    with pytest.raises(SourceQueryError):
        install(conn)
    assert any_db.value("select version from aqueduck.schema_version") == len(broken) - 1
    assert any_db.value("select to_regclass('aqueduck.more')") is None


def test_a_registry_of_a_newer_program_is_left_alone(any_db: Database, conn: Connection) -> None:
    """An old program does not write into tables that it does not know."""
    any_db.execute("update aqueduck.schema_version set version = 99")
    with pytest.raises(ConfigError, match="version 99"):
        install(conn)


def test_services_may_install_at_the_same_time(any_db: Database) -> None:
    """One of them does it, the others wait and find it done."""
    results: list[bool] = []

    def run() -> None:
        with connect(any_db.dsn) as conn:
            results.append(install(conn))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False, False, False, True]


def test_a_role_that_may_not_install_learns_the_statement(any_db: Database, user: str) -> None:
    """P-S24: the printed statement is enough, and the role is no superuser afterwards either."""
    any_db.execute("create table a (id int primary key)")
    with connect(any_db.dsn_for(user)) as conn:
        for attempt in (check_registry, install):
            with pytest.raises(PrivilegeError) as caught:
                attempt(conn)
        assert caught.value.hint == f"create schema aqueduck authorization {identifier(user)}"
        run_all(any_db, caught.value.hint)
        assert install(conn)
        assert call(conn, "add_table", source="a") == 1
        assert write_observed(conn, [TableObservation(id=1, state=SyncState.SNAPSHOT)]) == 1


def test_a_schema_that_an_administrator_made_is_used(any_db: Database, user: str) -> None:
    """P-S24: the right to create in it is enough."""
    any_db.execute("create schema aqueduck")
    with connect(any_db.dsn_for(user)) as conn:
        with pytest.raises(PrivilegeError) as caught:
            install(conn)
        run_all(any_db, caught.value.hint)
        assert install(conn)


def test_a_schema_of_another_user_is_not_filled(any_db: Database, user: str) -> None:
    """Its owner could replace the functions that others call, and make a schema of that name before anybody needs it."""
    any_db.execute(f"create schema aqueduck authorization {identifier(user)}")
    with connect(any_db.dsn) as admin:
        with pytest.raises(PrivilegeError, match=f"belongs to {user}") as caught:
            install(admin)
        assert caught.value.hint is not None
        run_all(any_db, caught.value.hint.partition("or: ")[2])
        assert install(admin)


@pytest.fixture
def squatter(any_db: Database, user: str) -> str:
    """A role that may create schemas made `aqueduck` first, with views that call a function of hers."""
    any_db.execute(f"grant create on database {identifier(any_db.name)} to {identifier(user)}")
    with any_db.connect(user) as conn:
        conn.execute(
            "create schema aqueduck; create table aqueduck.settings ();"
            " create function aqueduck.take() returns text language plpgsql as"
            " $$ begin insert into aqueduck.trace values (current_user); return 'x'; end $$;"
            " create table aqueduck.trace (who text);"
            " create view aqueduck.schema_version as select 1 as version, aqueduck.take() as functions_hash;"
            " create view aqueduck.sync_groups as select aqueduck.take() as name, aqueduck.take() as lake,"
            " aqueduck.take() as made_slot, aqueduck.take() as made_publication, false as adopt;"
            " grant all on schema aqueduck to public; grant all on all tables in schema aqueduck to public"
        )
    return user


def test_a_schema_that_was_made_first_runs_nothing(any_db: Database, squatter: str) -> None:
    """The attack: a role that may create schemas had its functions run as the service, or as the superuser at `aqueduck init`."""
    any_db.execute("drop role if exists victim; create role victim login")
    try:
        for dsn in (any_db.dsn, any_db.dsn_for("victim")):
            with connect(dsn) as conn:
                for attempt in (check_registry, install):
                    with pytest.raises(PrivilegeError):
                        attempt(conn)
                assert lake_of(conn, "x") is None
                assert read_ownership(conn, "x") is None
        assert any_db.query("select * from aqueduck.trace") == []
    finally:
        any_db.execute("drop role victim")


def test_a_registry_of_an_ordinary_role_is_not_used(any_db: Database, user: str) -> None:
    """The attack, with a registry that is whole and has triggers: its owner has to be trusted, and a grant says so."""
    any_db.execute(f"create schema aqueduck authorization {identifier(user)}; drop role if exists victim")
    any_db.execute("create role victim login")
    try:
        with connect(any_db.dsn_for(user)) as conn:
            install(conn)
        with any_db.connect(user) as conn:
            for grant in manage_grants("victim"):
                conn.execute(grant.encode())
        with connect(any_db.dsn_for("victim")) as conn:
            for use in (exists, install):
                with pytest.raises(PrivilegeError, match=f"belongs to {user}") as caught:
                    use(conn)
            assert caught.value.hint is not None
            any_db.execute(caught.value.hint.partition(": ")[2].partition(";")[0])
            assert not install(conn)
    finally:
        any_db.execute("drop owned by victim; drop role victim")


def test_a_service_can_use_a_registry_of_another_role(any_db: Database, conn: Connection, user: str) -> None:
    """P-S24: `aqueduck init` may be run by an administrator; the grants are in the error."""
    with connect(any_db.dsn_for(user)) as service:
        with pytest.raises(PrivilegeError) as caught:
            install(service)
        assert caught.value.hint == "; ".join(manage_grants(user))
        run_all(any_db, caught.value.hint)
        assert not install(service)
        assert reconcile_file(service, config_of({"name": "default", "names": ["a"]}))
        row = table(service)
        assert write_observed(service, [replace(row.observed, rows_synced=1)]) == 1
        assert claim_group(service, "default", "/lake")
        call(service, "drop_group", name="default", with_tables=True)
        assert delete_removed(service, groups=[group(service).id]) == {"default"}


def test_only_the_owner_upgrades(any_db: Database, conn: Connection, user: str) -> None:
    """P-S24: the error of a role that may use the registry names who may upgrade it."""
    run_all(any_db, manage_grants(user))
    any_db.execute("update aqueduck.schema_version set functions_hash = 'old'")
    with (
        connect(any_db.dsn_for(user)) as service,
        pytest.raises(PrivilegeError, match="by its owner postgres"),
    ):
        install(service)


def test_an_administrator_upgrades_without_taking_over(
    any_db: Database, user: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an upgrade adds belongs to the owner of the registry."""
    any_db.execute(f"create schema aqueduck authorization {identifier(user)}")
    with connect(any_db.dsn_for(user)) as service:
        install(service)
    newer = [*registry_install.migrations(), "create table aqueduck.more ()"]
    monkeypatch.setattr(registry_install, "migrations", lambda: newer)
    with connect(any_db.dsn) as admin:
        assert install(admin)
        assert admin.execute("select current_user::text").fetchone() == ("postgres",)
    owners = any_db.query(
        "select distinct pg_get_userbyid(relowner)::text from pg_class where relnamespace = 'aqueduck'::regnamespace"
    )
    assert owners == [(user,)]


def test_looking_needs_two_grants_and_managing_a_third(any_db: Database, conn: Connection, user: str) -> None:
    """P-S24: monitoring needs no privileged role, and cannot change anything."""
    call(conn, "add_table", source="a")
    with connect(any_db.dsn_for(user)) as other:
        with pytest.raises(PrivilegeError):
            rows_of(other, "status")
        run_all(any_db, monitor_grants(user))
        for function in ("status", "groups", "tables", "list_settings"):
            assert rows_of(other, function)
        assert call(other, "get_setting", name="inline_rows", source="a") == "1000"
        changes: list[tuple[str, dict[str, Any]]] = [
            ("create_group", {"name": "g"}),
            ("add_table", {"source": "b"}),
            ("set_setting", {"name": "inline_rows", "value": "1", "source": "a"}),
            ("set_setting", {"name": "inline_rows", "value": "1"}),
            ("set_setting", {"name": "inline_rows", "value": None}),
            ("move_table", {"source": "a", "group_name": "g"}),
            ("resync_table", {"source": "a"}),
            ("retry_table", {"source": "a"}),
            ("disable_table", {"source": "a"}),
            ("enable_table", {"source": "a"}),
            ("disable_group", {"name": "g"}),
            ("enable_group", {"name": "g"}),
            ("release_group", {"name": "g"}),
            ("remove_table", {"source": "a"}),
            ("drop_group", {"name": "g"}),
        ]
        for function, arguments in changes[:4]:
            error = refused(other, function, **arguments)
            assert isinstance(error, PrivilegeError)
            assert error.hint == "; ".join(manage_grants(user))
        run_all(any_db, manage_grants(user)[-1])
        for function, arguments in changes:
            call(other, function, **arguments)
