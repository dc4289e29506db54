"""P-S19: a group that cannot continue stops with a visible error, while the others continue."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from aqueduck.config.sync import SyncConfig, load_config
from aqueduck.lake.ledger.table_states import read_states
from aqueduck.lake.session.catalog import open_lake
from aqueduck.model.errors import ServiceLockedError, SlotLostError
from aqueduck.postgres.session.group_lock import GroupLocks
from aqueduck.sync.overview import SyncOverviews
from aqueduck.sync.prepare import prepare
from aqueduck.sync.service import SyncService
from tests.fix_postgres import Database, wait_until
from tests.local_service import LocalService, local_service


@pytest.fixture
def config(db: Database, tmp_path: Path) -> SyncConfig:
    """Two groups, `one` and `two`, with a table each of the same name."""
    db.execute("create table one (id int primary key); create table two (id int primary key)")
    values = {
        "source": {"dsn": db.service_dsn},
        "lake": {"catalog": f"sqlite:{tmp_path}/lake.sqlite", "data_path": f"{tmp_path}/data"},
        "groups": [
            {"name": name, "tables": [{"source": f"public.{name}", "copy": False}]} for name in ("one", "two")
        ],
        "state_dir": f"{tmp_path}/state",
    }
    file = tmp_path / "aqueduck.yaml"
    file.write_text(json.dumps(values))  # JSON is YAML
    return load_config(file)


@contextlib.contextmanager
def service_of(config: SyncConfig) -> Iterator[SyncService]:
    service = SyncService(config)
    try:
        yield service
    finally:
        service.stop()


def groups(db: Database) -> dict[str, Any]:
    return dict(db.query("select name, error_code from aqueduck.groups()"))


def test_the_others_are_prepared(db: Database, config: SyncConfig) -> None:
    """At a start: the error is in the registry, on the page and at the group's tables; the other group is ready."""
    list(prepare(config))
    db.execute("select pg_drop_replication_slot('aqueduck_two')")
    with service_of(config) as service:
        service.prepare()
        assert set(service.prepared) == {"one"}
        assert isinstance(service.errored["two"].error, SlotLostError)
        service.reconciler.observe()
        assert groups(db) == {"one": None, "two": "pg.slot_lost"}
        tables = db.query("select source, state, error_code from aqueduck.status() order by source")
        assert tables == [("public.one", "PENDING", None), ("public.two", "ERRORED", "pg.slot_lost")]
        flow = SyncOverviews(service).overview().flows[0]
        assert [(g.name, g.state) for g in flow.groups] == [("one", "starting"), ("two", "errored")]
        problem = flow.groups[1].error
        assert problem is not None
        assert problem.code == "pg.slot_lost"
        assert flow.groups[1].tables[0].state.value == "ERRORED"
        with pytest.raises(SlotLostError):
            service.check()


def test_init_prepares_the_others_and_fails(db: Database, config: SyncConfig) -> None:
    list(prepare(config))
    db.execute("select pg_drop_replication_slot('aqueduck_one')")
    lines: list[str] = []
    with pytest.raises(SlotLostError):
        lines.extend(prepare(config))  # what comes before the error stays
    assert [line.partition(":")[0] for line in lines] == ["registry", "group two"]


def test_a_service_with_nothing_left_to_run_ends(db: Database, config: SyncConfig) -> None:
    list(prepare(config))
    db.execute("select pg_drop_replication_slot('aqueduck_one'), pg_drop_replication_slot('aqueduck_two')")
    with service_of(config) as service, pytest.raises(SlotLostError):
        service.prepare()


def test_a_group_of_another_service_is_refused(db: Database, config: SyncConfig) -> None:
    """It is no errored group: the first service has it, and writes its state."""
    with service_of(config) as first, service_of(config) as second:
        first.prepare()
        with pytest.raises(ServiceLockedError):
            second.prepare()
        assert second.errored == {}


def drop_slot(db: Database, group: str) -> None:
    """End its reader and drop the slot, before the reader is back."""

    def dropped() -> bool:
        with contextlib.suppress(psycopg.errors.ObjectInUse):
            db.execute(
                f"select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = 'aqueduck_{group}' and active;"
                f"select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name = 'aqueduck_{group}'"
            )
        return not db.query("select from pg_replication_slots where slot_name = %s", [f"aqueduck_{group}"])

    wait_until(dropped, "the slot is gone")


@pytest.fixture
def errored(
    db: Database, config: SyncConfig, without_spark: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LocalService]:
    """A service that runs `one`; `two` has no slot, and its next automatic retry is an hour away."""
    monkeypatch.setattr("aqueduck.sync.service.ERRORED_SECONDS", 3600.0)
    list(prepare(config))
    drop_slot(db, "two")
    with local_service(db, config) as running:
        running.wait_streaming("public.one")
        assert set(running.service.errored) == {"two"}
        yield running


def test_an_errored_group_is_retried_after_a_user_acts(db: Database, errored: LocalService) -> None:
    """A notice, other settings, or a minute: not all the time."""
    service = errored.service
    tried, looks = service.errored["two"].retry_at, errored.looks
    wait_until(lambda: errored.looks > looks + 3, "it has looked at what is wanted")
    assert service.errored["two"].retry_at == tried
    db.execute("select aqueduck.set_setting('flush_interval_ms', '70', group_name => 'one')")
    wait_until(lambda: service.errored["two"].retry_at > tried, "a notice has it tried")
    db.execute("select aqueduck.set_setting('on_slot_loss', 'resync', group_name => 'two')")
    errored.wait_streaming("public.one", "public.two")
    assert service.errored == {}
    db.execute("insert into one values (1); insert into two values (1)")
    errored.wait_same("one", "two")


@pytest.mark.parametrize("wanted", ["disable_group('two')", "drop_group('two', with_tables => true)"])
def test_an_errored_group_can_be_given_up(
    db: Database, config: SyncConfig, errored: LocalService, wanted: str
) -> None:
    """The service continues without it, and its lock is free for others."""
    db.execute(f"select aqueduck.{wanted}")
    wait_until(lambda: not errored.service.errored, "it is given up")
    assert set(errored.service.running) == {"one"}
    others = GroupLocks(config.source.dsn)
    others.take("two")
    others.close()


@pytest.mark.usefixtures("without_spark")
def test_a_group_that_is_retried_does_not_delay_the_others(
    db: Database, config: SyncConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause of one group was a pause of all: requests by SQL, copies and other groups waited for it."""
    monkeypatch.setattr("aqueduck.model.retries.RESTART_SECONDS", (3600.0,))
    db.execute("create table three (id int primary key); insert into three values (1)")
    with local_service(db, config) as running:
        running.wait_streaming("public.one", "public.two")
        one = running.service.running["one"]
        db.execute(
            "select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = 'aqueduck_one'"
        )
        wait_until(lambda: one.retry_at is not None, "the group pauses")
        db.execute(
            "insert into two values (2); select aqueduck.add_table('public.three', group_name => 'two')"
        )
        running.wait_streaming("public.three")
        running.wait_same("two", "three")
        assert one.retry_at is not None
        assert one.status.restarts == 1


@pytest.mark.usefixtures("without_spark")
def test_an_error_that_needs_a_person_ends_only_its_group(db: Database, config: SyncConfig) -> None:
    """The service ends with the last of its groups."""
    with local_service(db, config) as running:
        running.wait_streaming("public.one", "public.two")
        drop_slot(db, "one")
        wait_until(lambda: set(running.service.errored) == {"one"}, "the group is errored")
        db.execute("insert into two values (2)")
        running.wait_same("two")
        drop_slot(db, "two")
        wait_until(lambda: isinstance(running.error, SlotLostError), "nothing is left to continue")


def test_a_table_that_was_removed_with_its_target_and_added_before_a_start(
    db: Database, config: SyncConfig
) -> None:
    """The target is dropped first, with the lake's state of the table: the table starts again."""
    list(prepare(config))
    oid = db.value("select 'one'::regclass::oid::int8")
    db.execute("update aqueduck.table_mappings set source_oid = %s where source_table = 'one'", (oid,))
    with open_lake(config.lake) as lake:
        lake.execute("insert into lake.main.one values (1)")
        assert read_states(lake, "one")[oid].ready
    with db.connect() as conn, conn.transaction():
        conn.execute("select aqueduck.remove_table('public.one', drop_target => true)")
        conn.execute("select aqueduck.add_table('public.one', group_name => 'one')")
    with service_of(config) as service:
        service.prepare()
        assert db.query("select count(*) from aqueduck.table_mappings where removed_at is not null") == [(0,)]
        assert service.lake.query("from lake.main.one")[0] == [], "it is there, and begins anew"
