"""The control plane is lost and restored in several ways: groups continue, and nothing is removed without a request."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

from aqueduck.lab.embedded import EmbeddedPostgres, StopMode
from aqueduck.model.errors import ServiceLockedError
from aqueduck.postgres.session.group_lock import lock_group, lock_key
from aqueduck.sync.verify import verify_tables
from tests.fix_postgres import Database, _new_database, wait_until
from tests.local_service import LocalService, local_config, local_service

pytestmark = pytest.mark.usefixtures("without_spark")

SETUP = "create table {0} (id int primary key, v text); insert into {0} select g, 'old' from generate_series(1, 20) g"


def make_tables(db: Database, *names: str) -> None:
    for name in names:
        db.execute(SETUP.format(name))


@pytest.mark.parametrize("mode", ["immediate", pytest.param("fast", marks=pytest.mark.slow)])
def test_a_restart_of_the_server_keeps_tables_that_were_added_by_sql(
    new_server: Callable[..., EmbeddedPostgres], tmp_path: Path, mode: StopMode
) -> None:
    """P-T02, hazard 14: while the registry is out of reach, the desired state is unknown, and nothing is removed."""
    server = new_server(version=18)
    db = _new_database(server)
    make_tables(db, "customers", "invoices")
    config = local_config(db, tmp_path, {"test": ["public.customers"]})
    with local_service(db, config) as service:
        db.execute("select aqueduck.add_table('public.invoices', group_name => 'test')")
        service.wait_streaming("public.customers", "public.invoices")
        db.observer.close()
        server.stop(mode)
        looks = service.looks
        wait_until(lambda: service.looks > looks + 5, "it has looked without a registry")
        server.start()
        db.__post_init__()
        service.wait_streaming("public.customers", "public.invoices")
        db.execute("insert into customers values (100, 'after'); insert into invoices values (100, 'after')")
        service.wait_same("customers", "invoices")
        assert service.published() == {"public.customers", "public.invoices"}


ADDED = "select aqueduck.add_table('public.invoices', group_name => 'test')"


@contextlib.contextmanager
def two_tables(db: Database, directory: Path) -> Iterator[LocalService]:
    """`customers` is in the file, `invoices` was added by SQL; both stream."""
    make_tables(db, "customers", "invoices")
    config = local_config(db, directory, {"test": ["public.customers"]})
    with local_service(db, config) as service:
        db.execute(ADDED)
        service.wait_streaming("public.customers", "public.invoices")
        yield service


def change_both(service: LocalService) -> None:
    for table in ("customers", "invoices"):
        service.db.execute(
            f"insert into {table} select coalesce(max(id), 0) + 1, 'new' from {table}; update {table} set v = v || '.'"
        )
    service.wait_same("customers", "invoices")


LOSSES = {
    "the schema is dropped": (
        "alter schema aqueduck rename to dropped",
        "alter schema dropped rename to aqueduck",
    ),
    "a table of it is dropped": (
        "alter table aqueduck.sync_groups rename to dropped",
        "alter table aqueduck.dropped rename to sync_groups",
    ),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_registry_that_is_gone_wants_nothing_else(db: Database, tmp_path: Path, loss: str) -> None:
    """P-T02: a registry dropped while the service runs is not re-created: everything continues in the last desired state, visibly."""
    lose, restore = LOSSES[loss]
    with two_tables(db, tmp_path) as service:
        db.execute(lose)
        wait_until(lambda: service.flow().error is not None, "the picture says so")
        change_both(service)
        assert service.published() == {"public.customers", "public.invoices"}
        db.execute(restore)
        wait_until(lambda: service.flow().error is None, "it is found again")
        change_both(service)
        assert service.published() == {"public.customers", "public.invoices"}
        db.execute("select aqueduck.remove_table('public.invoices')")
        wait_until(lambda: service.published() == {"public.customers"}, "what is removed goes")


def test_a_registry_without_a_row_removes_nothing(db: Database, tmp_path: Path) -> None:
    """P-T02: a registry restored from an older backup lacks a table: the table continues, status says so, and adding it again is enough."""
    with two_tables(db, tmp_path) as service:
        db.execute("delete from aqueduck.table_mappings where source_table = 'invoices'")
        wait_until(
            lambda: code_of(service, "public.invoices") == "registry.incomplete", "the picture says so"
        )
        change_both(service)
        assert service.published() == {"public.customers", "public.invoices"}
        db.execute(ADDED)
        wait_until(lambda: code_of(service, "public.invoices") is None, "it is wanted again")
        service.wait_streaming("public.invoices")
        change_both(service)
        assert service.copies() == 2


def test_a_start_with_a_new_registry_forgets_nothing(db: Database, tmp_path: Path) -> None:
    """P-T02: a table that is in the lake but not in the new registry is reported and not followed; added again, it is copied."""
    with two_tables(db, tmp_path) as service:
        config = service.config
    db.execute("drop schema aqueduck cascade")
    with local_service(db, config) as service:
        service.wait_streaming("public.customers")
        assert code_of(service, "public.invoices") == "registry.incomplete"
        db.execute("update invoices set v = 'nobody sends it'")
        db.execute(ADDED)
        service.wait_streaming("public.invoices")
        change_both(service)
        assert code_of(service, "public.invoices") is None
        db.execute("select aqueduck.remove_table('public.invoices')")
        wait_until(lambda: service.published() == {"public.customers"}, "what is removed goes")
        config = service.config
    with local_service(db, config) as service:
        service.wait_streaming("public.customers")
        assert code_of(service, "public.invoices") is None, "what was removed is no stray"


def code_of(service: LocalService, source: str) -> str | None:
    """The error of a table on the page."""
    found = [t for group in service.flow().groups for t in group.tables if t.source == source]
    return found[0].error.code if found and found[0].error is not None else None


LOCKS = "select pid from pg_stat_activity where datname = current_database() and application_name = 'aqueduck lock'"


def test_a_lock_that_was_lost_is_taken_again(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-T01: without it another service could take the group, and status said that no service runs it."""
    monkeypatch.setattr("aqueduck.sync.service.WATCH_SECONDS", 0.2)
    with two_tables(db, tmp_path) as service:
        before = db.value(LOCKS)
        db.execute("select pg_terminate_backend(%s, 5000)", (before,))
        wait_until(lambda: db.query(LOCKS) not in ([], [(before,)]), "there is another connection")
        wait_until(lambda: db.value("select running from aqueduck.groups()"), "the lock is taken again")
        change_both(service)


def test_a_service_whose_group_another_one_took_ends(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock went with its connection, and another service was faster: two would fill one lake."""
    monkeypatch.setattr("aqueduck.sync.service.WATCH_SECONDS", 2.0)
    with two_tables(db, tmp_path) as service:
        db.execute(f"select pg_terminate_backend(pid, 5000) from ({LOCKS}) l")
        lock_group(db.observer, "test")
        wait_until(lambda: service.error is not None, "it ends")
        assert isinstance(service.error, ServiceLockedError)


def test_verify_names_what_is_wanted_and_is_not_in_the_lake(db: Database, tmp_path: Path) -> None:
    """P-T07: the registry wants it, the running service never knew it."""
    with two_tables(db, tmp_path) as service:
        config = service.config
    make_tables(db, "later")
    db.execute("select aqueduck.add_table('public.later', group_name => 'test')")
    found = {c.table: (c.verdict, c.note) for c in verify_tables(config)}
    assert found == {
        "public.customers": ("identical", None),
        "public.invoices": ("identical", None),
        "public.later": ("not compared", "it is not in the lake yet"),
    }


def test_a_service_starts_though_a_role_without_rights_has_its_lock(db: Database, tmp_path: Path) -> None:
    """The attack: `mallory` may only connect, and takes the lock that the group's name gives."""
    make_tables(db, "customers")
    config = local_config(db, tmp_path, {"test": ["public.customers"]})
    db.execute("create role mallory login")
    with db.connect("mallory") as mallory, structlog.testing.capture_logs() as said:
        mallory.execute("select pg_advisory_lock(%s)", (lock_key("test"),))
        with local_service(db, config) as service:
            service.wait_same("customers")
            with pytest.raises(ServiceLockedError, match="another service"), local_service(db, config):
                pass
    assert any("role mallory" in str(line.get("holders")) for line in said)
    db.execute("drop role mallory")
