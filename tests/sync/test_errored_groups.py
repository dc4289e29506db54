"""P-S19: a group that cannot go on stands where it is and is seen, while the others go on."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aqueduck.config.sync import SyncConfig, load_config
from aqueduck.lake.ledger.table_states import read_states
from aqueduck.lake.session.catalog import open_lake
from aqueduck.model.errors import AqueduckError, ConnectionLostError, ServiceLockedError, SlotLostError
from aqueduck.postgres.session.group_lock import GroupLocks
from aqueduck.sync.control import Wanted
from aqueduck.sync.overview import SyncOverviews
from aqueduck.sync.prepare import prepare
from aqueduck.sync.service import SyncService
from tests.fix_postgres import Database


@pytest.fixture
def config(db: Database, tmp_path: Path) -> SyncConfig:
    """Two groups, `one` and `two`, with a table each of the same name."""
    db.execute("create table one (id int primary key); create table two (id int primary key)")
    values = {
        "source": {"dsn": db.dsn},
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


def look(service: SyncService, *, noticed: bool = False) -> None:
    control = service.reconciler._control
    assert control is not None
    service.reconciler._reconcile(control.wanted(), noticed=noticed)


def stub(**fields: Any) -> Any:
    """A runner that runs nothing."""
    return SimpleNamespace(**fields, refused={}, stop=lambda: None, refresh=lambda: None)


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
    """That one is no errored group: the first service has it, and writes how it fares."""
    with service_of(config) as first, service_of(config) as second:
        first.prepare()
        with pytest.raises(ServiceLockedError):
            second.prepare()
        assert second.errored == {}


def test_an_errored_group_is_tried_again_when_somebody_acts(
    db: Database, config: SyncConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notice, other settings, or a minute: not all the time."""
    list(prepare(config))
    db.execute("select pg_drop_replication_slot('aqueduck_two')")
    with service_of(config) as service:
        service.prepare()
        started: list[str] = []
        monkeypatch.setattr(service, "start_group", started.append)  # what Spark does is not the point here
        monkeypatch.setattr(service.reconciler, "_act_on_requests", lambda wanted: None)
        monkeypatch.setattr(service.reconciler, "_change_tables", lambda wanted, every: None)
        service.running["one"] = stub(tables={})
        tried = service.errored["two"].retry_at
        look(service)
        assert service.errored["two"].retry_at == tried
        look(service, noticed=True)
        assert service.errored["two"].retry_at > tried
        assert started == []
        db.execute("select aqueduck.set_setting('on_slot_loss', 'resync', group_name => 'two')")
        look(service)
        assert started == ["two"]
        assert service.errored == {}
        assert "two" in service.prepared


@pytest.mark.parametrize("wanted", ["disable_group('two')", "drop_group('two', with_tables => true)"])
def test_an_errored_group_can_be_given_up(
    db: Database, config: SyncConfig, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    list(prepare(config))
    db.execute("select pg_drop_replication_slot('aqueduck_two')")
    with service_of(config) as service:
        service.prepare()
        monkeypatch.setattr(service.reconciler, "_act_on_requests", lambda wanted: None)
        monkeypatch.setattr(service.reconciler, "_change_tables", lambda wanted, every: None)
        service.running["one"] = stub(tables={})
        db.execute(f"select aqueduck.{wanted}")
        look(service)
        assert service.errored == {}
        assert set(service.running) == {"one"}
        with service_of(config) as other:  # nobody has its lock
            other._locks = GroupLocks(config.source.dsn)
            other._lock("two")


class _Query:
    """A query that ended with an error."""

    def __init__(self, error: AqueduckError) -> None:
        self.error = error

    def check(self) -> None:
        raise self.error


def _runner(name: str, error: AqueduckError) -> Any:
    status = SimpleNamespace(last_error=None, restarts=0, state="streaming")
    group = SimpleNamespace(name=name, on_slot_loss="stop")
    return stub(group=group, query=_Query(error), status=status, retry_at=None, failures=0, tables={})


def test_a_group_that_is_tried_again_keeps_nobody_waiting(
    config: SyncConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause of one group was a pause of all: requests by SQL, copies and other groups waited for it."""
    service = SyncService(config)
    restarted: list[str] = []
    monkeypatch.setattr(service, "_restart", lambda runner: restarted.append(runner.group.name))
    runner = _runner("one", ConnectionLostError("the connection was lost"))
    runner.failures = 4
    began = time.monotonic()
    service._recover(runner)
    service._recover(runner)
    assert time.monotonic() - began < 1
    assert restarted == []
    assert runner.status.restarts == 1
    assert runner.retry_at - began == pytest.approx(30, abs=1)
    runner.retry_at = time.monotonic()
    service._recover(runner)
    assert restarted == ["one"]


def test_an_error_that_needs_a_person_ends_only_its_group(config: SyncConfig) -> None:
    service = SyncService(config)
    one, two = (_runner(name, SlotLostError("the slot is gone")) for name in ("one", "two"))
    service.running |= {"one": one, "two": two}
    service.wanted |= {group.name: Wanted(group) for group in config.groups}
    service._recover(one)
    assert set(service.running) == {"two"}
    assert set(service.errored) == {"one"}
    with pytest.raises(SlotLostError):  # nothing is left to go on
        service._recover(two)


def test_a_table_that_was_removed_with_its_target_and_added_before_a_start(
    db: Database, config: SyncConfig
) -> None:
    """The target goes first, and what the lake knew of the table with it: the table begins anew."""
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
