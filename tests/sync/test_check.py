from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from aqueduck.config.server import ServerConfig
from aqueduck.config.sync import SyncConfig, parse_config
from aqueduck.lab.embedded import EmbeddedPostgres
from aqueduck.lake.session.catalog import open_lake
from aqueduck.model.errors import (
    AuthenticationError,
    CatalogUnreachableError,
    ConfigError,
    DataPathError,
    LakeError,
    NoKeyError,
    PrivilegeError,
    SlotConflictError,
    SlotLimitError,
    SourceUnreachableError,
    TableMissingError,
    WalLevelError,
)
from aqueduck.postgres.catalog.tables import describe_table
from aqueduck.postgres.publications.slots import create_slot, ensure_publication
from aqueduck.postgres.registry.registry import call, install, manage_grants, reconcile_file, rows_of
from aqueduck.postgres.session.connection import connect
from aqueduck.service.check_server import CheckResult
from aqueduck.sync.check import run_checks
from aqueduck.sync.prepare import prepare
from tests.fix_postgres import Database

NewServer = Callable[..., EmbeddedPostgres]


def config_for(
    dsn: str,
    base: Path,
    *tables: str,
    catalog: str = "lake.ducklake",
    data_path: str = "data",
    capture: str = "stream",
) -> SyncConfig:
    lines = "".join(f"      - source: '{table}'\n" for table in tables)
    text = f"""
source:
  dsn: "{dsn}"
lake:
  catalog: "{catalog}"
  data_path: "{data_path}"
groups:
  - name: g
    capture: {capture}
    tables:{" []" if not tables else ""}
{lines}"""
    return parse_config(text, base_dir=base, env={})


def failures(config: SyncConfig) -> dict[str, CheckResult]:
    return {result.name: result for result in run_checks(config) if not result.ok}


def repair(db: Database, results: dict[str, CheckResult]) -> None:
    """Do, as the administrator, exactly what was printed; several tables may need the same statement."""
    assert [result.name for result in results.values() if not result.fix] == []
    for fix in {str(result.fix): None for result in results.values()}:
        db.execute(fix)


def everything_in(db: Database, folder: Path) -> object:
    """All that a check could have created."""
    names = """
        select 'slot', slot_name::text from pg_replication_slots
        union all select 'publication', pubname::text from pg_publication
        union all select 'relation', oid::text from pg_class where oid > 16384
        union all select 'schema', nspname::text from pg_namespace
    """
    # SQLite keeps these two beside a file that it has read; they are its own, and empty of data.
    files = [path for path in folder.rglob("*") if not path.name.endswith(("-wal", "-shm"))]
    return sorted(db.query(names)), sorted((path, path.is_file() and path.read_bytes()) for path in files)


@pytest.fixture
def shop(db: Database) -> Database:
    db.execute(
        "create table orders (id int primary key); create table items (id int, n int, primary key (id, n))"
    )
    return db


def test_a_setup_that_fits_passes_and_creates_nothing(shop: Database, tmp_path: Path) -> None:
    """P-E07: a check looks and does not touch."""
    before = everything_in(shop, tmp_path)
    results = run_checks(config_for(shop.dsn, tmp_path, "orders", "public.items"))
    assert [result.name for result in results if not result.ok] == []
    assert all(result.detail and result.fix is None and result.error is None for result in results)
    assert everything_in(shop, tmp_path) == before


def test_a_setup_that_exists_passes_too(shop: Database, tmp_path: Path) -> None:
    """After init the same checks hold."""
    with connect(shop.dsn) as conn:
        ensure_publication(conn, "aqueduck_g", [describe_table(conn, "orders")])
        create_slot(conn, "aqueduck_g")
    results = {result.name: result for result in run_checks(config_for(shop.dsn, tmp_path, "orders"))}
    assert all(result.ok for result in results.values())
    assert "exists" in results["slot aqueduck_g"].detail
    assert "publishes all 1 tables" in results["publication aqueduck_g"].detail


def test_following_the_printed_statements_is_enough_for_a_role(
    shop: Database, role: str, tmp_path: Path
) -> None:
    """P-S24: a role that starts with nothing ends with a working setup, and is no superuser."""
    shop.execute("create schema closed; create table closed.t (id int primary key)")
    config = config_for(shop.dsn_for(role), tmp_path, "orders", "closed.t")
    failed = failures(config)
    assert set(failed) == {
        "replication", "publication aqueduck_g", "table public.orders", "table closed.t",
        "ownership of public.orders", "ownership of closed.t",
    }  # fmt: skip
    assert all(isinstance(result.error, PrivilegeError) for result in failed.values())
    repair(shop, failed)
    assert failures(config) == {}
    with connect(shop.dsn_for(role)) as conn:
        assert conn.execute("select rolsuper from pg_roles where rolname = current_user").fetchone() == (
            False,
        )
        tables = [describe_table(conn, name) for name in ("orders", "closed.t")]
        ensure_publication(conn, "aqueduck_g", tables)
        create_slot(conn, "aqueduck_g")
        conn.execute("select * from closed.t")


def test_each_statement_repairs_its_own_check(shop: Database, role: str, tmp_path: Path) -> None:
    """P-S24: executing one fix makes that one check pass, and not by accident of another."""
    config = config_for(shop.dsn_for(role), tmp_path, "orders")
    while failed := failures(config):
        name, result = failed.popitem()
        repair(shop, {name: result})
        assert name not in failures(config)


def registry_check(config: SyncConfig) -> CheckResult:
    [result] = [result for result in run_checks(config) if result.name == "registry"]
    return result


def test_the_grants_for_the_registry_are_printed_and_enough(
    shop: Database, role: str, tmp_path: Path
) -> None:
    """P-S24: a role without rights gets the exact statements; with them it manages and looks."""
    with connect(shop.dsn) as conn:
        install(conn)
    config = config_for(shop.dsn_for(role), tmp_path, "orders")
    before = registry_check(config)
    assert before.ok, "the file alone is enough"
    assert "the file alone" in before.detail
    assert before.fix == "; ".join(manage_grants(role))
    shop.execute(before.fix)
    after = registry_check(config)
    assert (after.ok, after.fix) == (True, None)
    with connect(shop.dsn_for(role)) as conn:
        call(conn, "add_table", source="public.orders")
        assert [row["source"] for row in rows_of(conn, "status")] == ["public.orders"]


def test_a_role_that_may_not_create_the_registry_gets_the_statement(
    shop: Database, role: str, tmp_path: Path
) -> None:
    """P-S24: after one statement of an administrator, the role can install it."""
    config = config_for(shop.dsn_for(role), tmp_path, "orders")
    before = registry_check(config)
    assert before.fix == f'create schema aqueduck authorization "{role}"'
    shop.execute(before.fix)
    assert registry_check(config) == CheckResult("registry", True, "will be installed")
    with connect(shop.dsn_for(role)) as conn:
        assert install(conn)
    assert registry_check(config).detail.endswith("is installed")


def test_membership_in_the_owner_is_enough(shop: Database, role: str, tmp_path: Path) -> None:
    """P-S24: a table of an ordinary role stays with it; no role is made a member of a superuser."""
    owner = f"{shop.name} owner"
    shop.execute(f'create role "{owner}"; alter table orders owner to "{owner}"')
    config = config_for(shop.dsn_for(role), tmp_path, "orders")
    assert failures(config)["ownership of public.orders"].fix == f'grant "{owner}" to "{role}"'
    repair(shop, failures(config))
    assert failures(config) == {}
    shop.execute(f'alter table orders owner to postgres; drop owned by "{owner}"; drop role "{owner}"')


def test_a_publication_that_fits_needs_no_ownership(shop: Database, role: str, tmp_path: Path) -> None:
    """P-S24: an administrator may publish the tables instead of giving them away."""
    with connect(shop.dsn) as conn:
        ensure_publication(conn, "aqueduck_g", [describe_table(conn, "orders")])
    shop.execute(f'alter role "{role}" replication; grant select on orders to "{role}"')
    assert failures(config_for(shop.dsn_for(role), tmp_path, "orders")) == {}


def test_a_publication_of_another_role_that_must_change_is_reported(
    shop: Database, role: str, tmp_path: Path
) -> None:
    """P-S24: the printed statement hands it over."""
    with connect(shop.dsn) as conn:
        ensure_publication(conn, "aqueduck_g", [describe_table(conn, "items")])
    config = config_for(shop.dsn_for(role), tmp_path, "orders")
    assert "belongs to another role" in failures(config)["publication aqueduck_g"].detail
    repair(shop, failures(config))
    assert failures(config) == {}


def test_tables_are_checked_one_by_one(shop: Database, tmp_path: Path) -> None:
    """P-S02: one bad table does not hide another."""
    shop.execute("create table keyless (a int)")
    failed = failures(config_for(shop.dsn, tmp_path, "orders", "keyless", "missing"))
    assert {name: type(result.error) for name, result in failed.items()} == {
        "table public.keyless": NoKeyError,
        "table public.missing": TableMissingError,
    }
    assert "does not exist" in failed["table public.missing"].detail


@pytest.mark.parametrize(
    "used",
    [
        "create index on public.orders (id) where public.looks(1)",
        "create statistics public.s on (public.looks(2)::int + id), (id * 2) from public.orders",
        "create operator public.### (function = public.looks, rightarg = int);"
        "create index on public.orders (id) where operator(public.###) 1",
    ],
    ids=["index", "statistics", "operator"],
)
def test_functions_that_run_as_the_service_are_noted(
    shop: Database, role: str, tmp_path: Path, used: str
) -> None:
    """The attack: an immutable function in an index looks who reads the table, and runs as the service when it plans its query."""
    shop.execute(
        f"""
        create function public.looks(int) returns bool immutable language plpgsql as $$ begin return true; end $$;
        {used}
        """
    )
    [mine] = [
        r for r in run_checks(config_for(shop.dsn, tmp_path, "orders")) if r.name == "table public.orders"
    ]
    assert "NOTE" not in mine.detail
    shop.execute(f'alter function public.looks owner to "{role}"')
    [noted] = [
        r
        for r in run_checks(config_for(shop.service_dsn, tmp_path, "orders"))
        if r.name == "table public.orders"
    ]
    assert noted.ok
    assert f"public.looks of {role}" in noted.detail


def test_an_identity_that_would_break_updates_is_reported(shop: Database, tmp_path: Path) -> None:
    """P-S02: with REPLICA IDENTITY NOTHING publishing would make the application fail."""
    shop.execute("alter table orders replica identity nothing")
    config = config_for(shop.dsn, tmp_path, "orders")
    assert isinstance(failures(config)["table public.orders"].error, NoKeyError)
    repair(shop, failures(config))
    assert failures(config) == {}


def test_a_slot_of_another_program_is_reported(shop: Database, tmp_path: Path) -> None:
    """A slot of that name which is not ours is a conflict, with the statement that drops it."""
    shop.execute("select pg_create_physical_replication_slot('aqueduck_g')")
    config = config_for(shop.dsn, tmp_path, "orders")
    assert isinstance(failures(config)["slot aqueduck_g"].error, SlotConflictError)
    shop.execute("select pg_drop_replication_slot('aqueduck_g')")
    assert failures(config) == {}


def test_settings_that_are_too_low_are_repaired_by_what_is_printed(
    new_server: NewServer, tmp_path: Path
) -> None:
    """wal_level, slots and walsenders: the statements, and a restart as they say, are enough."""
    low = {"wal_level": "replica", "max_replication_slots": 1, "max_wal_senders": 1}
    server = new_server(settings=low)
    with psycopg.connect(server.dsn, autocommit=True) as conn:
        conn.execute("create table public.t (id int primary key)")
    config = config_for(server.dsn, tmp_path, "t")
    failed = failures(config)
    assert {name: type(result.error) for name, result in failed.items()} == {
        "wal_level": WalLevelError,
        "free slots": SlotLimitError,
        "free walsenders": SlotLimitError,
    }
    with psycopg.connect(server.dsn, autocommit=True) as conn:
        for result in failed.values():
            assert "restart" in str(result.fix)
            conn.execute(str(result.fix).encode())
    server.restart()
    assert failures(config) == {}


def test_a_server_that_is_not_there_leaves_the_lake_to_check(tmp_path: Path) -> None:
    """Checks that do not need the connection still run."""
    results = {
        result.name: result
        for result in run_checks(config_for("host=127.0.0.1 port=1 user=a", tmp_path, "t"))
    }
    assert isinstance(results["connection"].error, SourceUnreachableError)
    without_server = {"data path", "catalog", "state directory", "HTTP server", "traces", "Java"}
    assert set(results) == {"connection", *without_server}
    assert results["data path"].ok


def test_a_token_variable_that_is_not_set_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start would refuse it, so `check` does, with the statement that sets one."""
    monkeypatch.delenv("NO_SUCH_TOKEN", raising=False)
    config = config_for("host=127.0.0.1 port=1 user=a", tmp_path, "t")
    open_to_changes = config.model_copy(update={"server": ServerConfig(token_env="NO_SUCH_TOKEN")})
    [found] = [result for result in run_checks(open_to_changes) if result.name == "HTTP server"]
    assert not found.ok
    assert "export NO_SUCH_TOKEN=" in str(found.fix)


def test_a_wrong_password_is_reported_without_it(new_server: NewServer, tmp_path: Path) -> None:
    """P-S23: the login is named, the password is not."""
    server = new_server(password="right")
    [result] = failures(config_for(server.dsn_for("postgres", password="hunter2"), tmp_path, "t")).values()
    assert isinstance(result.error, AuthenticationError)
    assert "hunter2" not in repr(result)


def test_a_replication_connection_is_really_tried(new_server: NewServer, tmp_path: Path) -> None:
    """A superuser has the attribute, and still a server without walsenders does not let it in."""
    server = new_server(settings={"max_wal_senders": 0, "max_replication_slots": 4})
    assert isinstance(failures(config_for(server.dsn, tmp_path))["replication"].error, SlotLimitError)


def test_who_polls_needs_no_replication_connection(new_server: NewServer, tmp_path: Path) -> None:
    """P-E09: no walsender, no superuser: the attribute REPLICATION is enough, and its absence is reported."""
    server = new_server(settings={"max_wal_senders": 0, "max_replication_slots": 4})
    with psycopg.connect(server.dsn, autocommit=True) as admin:
        admin.execute("create role poller login; grant create on database postgres to poller")
        polls = config_for(server.dsn_for("postgres", "poller"), tmp_path, capture="poll")
        [(name, result)] = failures(polls).items()
        assert (name, result.fix) == ("replication", 'alter role "poller" replication')
        admin.execute("alter role poller replication")
        assert failures(polls) == {}


def test_a_stream_through_a_pooler_is_refused(
    db: Database, tmp_path: Path, pooler: Callable[..., str]
) -> None:
    """P-E09: the message names the way out; polling through it is fine."""
    found = failures(config_for(pooler(), tmp_path))["pooler"]
    assert "capture: poll" in (found.fix or "")
    assert failures(config_for(pooler(), tmp_path, capture="poll")) == {}


# -- the lake


@pytest.mark.parametrize("path", ["file/data", "/proc/nowhere/data"])
def test_a_data_path_that_cannot_be_written_is_reported(
    pg: EmbeddedPostgres, tmp_path: Path, path: str
) -> None:
    """The path is really tried, so root sees the error as well."""
    (tmp_path / "file").touch()
    failed = failures(config_for(pg.dsn, tmp_path, data_path=path))
    assert isinstance(failed["data path"].error, DataPathError)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_reported(pg: EmbeddedPostgres, tmp_path: Path) -> None:
    """The nearest folder that exists decides."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    config = config_for(pg.dsn, tmp_path, data_path="closed/deep/data", catalog="closed/lake.ducklake")
    failed = failures(config)
    assert set(failed) == {"data path", "catalog"}
    closed.chmod(0o700)
    assert failures(config) == {}


@pytest.mark.parametrize("catalog", ["file/lake.ducklake", "sqlite:file/lake.sqlite", "sqlite:."])
def test_a_catalog_file_that_cannot_be_made_is_reported(
    pg: EmbeddedPostgres, tmp_path: Path, catalog: str
) -> None:
    """A catalog below a file, or in place of a folder, cannot be opened."""
    (tmp_path / "file").touch()
    failed = failures(config_for(pg.dsn, tmp_path, catalog=catalog))
    assert isinstance(failed["catalog"].error, CatalogUnreachableError)


def test_a_catalog_in_postgres_is_reached(db: Database, role: str, tmp_path: Path) -> None:
    """Without the right to create tables there, the printed statement gives it; nothing is created."""
    config = config_for(db.dsn, tmp_path, catalog=f"postgres:{db.dsn_for(role)}")
    failed = failures(config)
    assert isinstance(failed["catalog"].error, CatalogUnreachableError)
    repair(db, failed)
    before = everything_in(db, tmp_path)
    assert failures(config) == {}
    assert everything_in(db, tmp_path) == before


@pytest.mark.parametrize("catalog", ["lake.ducklake", "sqlite:lake.sqlite", "postgres:{}"])
def test_a_lake_that_exists_is_opened_and_not_changed(db: Database, tmp_path: Path, catalog: str) -> None:
    """P-E07: every kind of catalog is really opened, and left as it was."""
    config = config_for(db.dsn, tmp_path, catalog=catalog.format(db.dsn))
    open_lake(config.lake).close()
    before = everything_in(db, tmp_path)
    results = {result.name: result for result in run_checks(config)}
    assert results["catalog"].ok, results["catalog"]
    assert "can be opened" in results["catalog"].detail
    assert everything_in(db, tmp_path) == before


@pytest.mark.parametrize("catalog", ["lake.ducklake", "sqlite:lake.sqlite"])
def test_a_file_that_is_no_catalog_is_reported(pg: EmbeddedPostgres, tmp_path: Path, catalog: str) -> None:
    """A file of another kind is refused, and not overwritten."""
    file = tmp_path / catalog.removeprefix("sqlite:")
    file.write_text("my thesis, the only copy\n" * 1000)
    failed = failures(config_for(pg.dsn, tmp_path, catalog=catalog))
    assert isinstance(failed["catalog"].error, CatalogUnreachableError)
    assert "thesis" in file.read_text()


def test_a_file_of_sqlite_without_a_lake_gets_one(pg: EmbeddedPostgres, tmp_path: Path) -> None:
    """What the service would do is no failure."""
    with contextlib.closing(sqlite3.connect(tmp_path / "lake.sqlite")) as file:
        file.execute("create table mine (id int)")
    config = config_for(pg.dsn, tmp_path, catalog="sqlite:lake.sqlite")
    assert failures(config) == {}
    open_lake(config.lake).close()
    assert failures(config) == {}


@pytest.mark.parametrize("version", ["99.0", "0.3"])
def test_a_catalog_of_another_version_says_which(pg: EmbeddedPostgres, tmp_path: Path, version: str) -> None:
    """P-L04: for a newer or older catalog, both versions are named; a start refuses it too, and does not change it."""
    config = config_for(pg.dsn, tmp_path, catalog="sqlite:lake.sqlite")
    open_lake(config.lake).close()
    with contextlib.closing(sqlite3.connect(tmp_path / "lake.sqlite")) as file:
        file.execute("update ducklake_metadata set value = ? where key = 'version'", [version])
        file.commit()
        before = list(file.iterdump())
    assert f"has DuckLake version {version}, but this is DuckLake 1." in failures(config)["catalog"].detail
    with pytest.raises(LakeError, match=f"has DuckLake version {version}"):
        open_lake(config.lake)
    with contextlib.closing(sqlite3.connect(tmp_path / "lake.sqlite")) as file:
        assert list(file.iterdump()) == before


def test_another_data_path_is_refused_with_that_of_the_lake(pg: EmbeddedPostgres, tmp_path: Path) -> None:
    """The message names what to put back."""
    open_lake(config_for(pg.dsn, tmp_path, data_path="first").lake).close()
    fix = failures(config_for(pg.dsn, tmp_path, data_path="second"))["catalog"].fix
    assert fix is not None
    assert fix.endswith(f"{tmp_path}/first/")


def test_a_file_in_the_way_is_not_repaired_by_making_a_folder(pg: EmbeddedPostgres, tmp_path: Path) -> None:
    """The repair names the obstacle."""
    (tmp_path / "file").touch()
    failed = failures(config_for(pg.dsn, tmp_path, data_path="file/data"))
    assert failed["data path"].fix == f"choose another path, or move the file {tmp_path}/file away"


def test_a_group_that_fills_another_lake_is_reported(shop: Database, tmp_path: Path) -> None:
    """The service would refuse it, because a group fills one lake."""
    first = config_for(shop.dsn, tmp_path, "orders", catalog="sqlite:a.sqlite", data_path="a")
    with connect(shop.dsn) as conn:
        install(conn)
        reconcile_file(conn, first)
    assert failures(first) == {}
    second = config_for(shop.dsn, tmp_path, "orders", catalog="sqlite:b.sqlite", data_path="b")
    failed = failures(second)
    assert failed["group g"].detail == f"the group g fills another lake, {tmp_path}/a"
    assert str(failed["group g"].fix).endswith("select aqueduck.release_group('g')")


def test_a_catalog_server_that_is_not_there_is_reported(pg: EmbeddedPostgres, tmp_path: Path) -> None:
    """The catalog's own error code, and no password."""
    config = config_for(pg.dsn, tmp_path, catalog="postgres:host=127.0.0.1 port=1 user=a password=hunter2")
    [result] = failures(config).values()
    assert isinstance(result.error, CatalogUnreachableError)
    assert "hunter2" not in repr(result)


def test_a_state_directory_that_cannot_be_written_is_reported(pg: EmbeddedPostgres, tmp_path: Path) -> None:
    """Stage and checkpoint need a writable directory."""
    (tmp_path / "file").touch()
    config = config_for(pg.dsn, tmp_path).model_copy(update={"state_dir": str(tmp_path / "file" / "state")})
    assert isinstance(failures(config)["state directory"].error, ConfigError)
    with pytest.raises(ConfigError, match=r"the directory .* cannot be created: not a directory"):
        list(prepare(config))
