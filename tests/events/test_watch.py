"""A publication that did not send everything while events were read from it: on PostgreSQL 18 the stream does not show it."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from aqueduck.events import service as events
from aqueduck.events.check import run_event_checks
from aqueduck.events.overview import EventsOverviews
from aqueduck.events.service import EventsService
from aqueduck.model.errors import PublicationError, SlotLostError, UnpublishedError
from aqueduck.postgres.capture import capture
from aqueduck.spark.formats import cdc_source
from tests.fix_events import Flow
from tests.fix_postgres import Database, wait_until
from tests.spark.formats.test_cdc_reader import Driver

PUBLISH = "create publication faucet_pub for table o, other"
GAPS = {
    "made again": ("drop publication faucet_pub", PUBLISH),
    "taken out": (
        "alter publication faucet_pub drop table o",
        "alter publication faucet_pub add table o",
    ),
}


@pytest.fixture
def flow(db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Flow:
    """A flow whose first event is delivered; it looks at the catalog all the time."""
    monkeypatch.setattr(events, "WATCH_SECONDS", 0.0)
    db.execute("create table o (id int primary key); create table other (id int primary key)")
    db.execute(PUBLISH)
    flow = Flow(db, tmp_path)
    deliver(flow)
    db.execute("insert into o values (1)")
    deliver(flow)
    assert flow.count() == 1
    return flow


def checked(flow: Flow) -> set[str]:
    """The codes of `aqueduck check`, which changes nothing (P-T07)."""
    return {r.error.code for r in run_event_checks(flow.service().config) if r.error is not None}


def deliver(flow: Flow, *, trust_slot: bool = False) -> None:
    """A run with `--once`."""
    service = flow.service()
    try:
        service.prepare(trust_slot=trust_slot)
        service.start(once=True)
        service.run_once(threading.Event())
    finally:
        service.stop()


ANOTHER_WAY = {
    "made for all tables": ("drop publication faucet_pub", "create publication faucet_pub for all tables")
}


@pytest.mark.parametrize("gap", (GAPS | ANOTHER_WAY).values(), ids=GAPS | ANOTHER_WAY)
def test_a_gap_while_no_flow_runs_is_said(flow: Flow, gap: tuple[str, str]) -> None:
    """P-E01, P-T05: changes that were not sent are reported at each start, until the file that the message names is removed."""
    flow.db.execute(gap[0])
    flow.db.execute("insert into o values (2)")
    flow.db.execute(gap[1])
    for _ in range(2):
        with pytest.raises(UnpublishedError, match=r"did not send .*o.* for a while") as caught:
            deliver(flow)
    assert checked(flow) == {"pg.unpublished"}
    note = flow.directory / "state" / "faucet_slot" / "publication"
    assert f"remove the file {note} and start again" in str(caught.value)
    note.unlink()
    assert checked(flow) == set()
    flow.db.execute("insert into o values (3)")
    deliver(flow)
    assert [line["after"]["id"] for line in flow.lines()] == [1, 3]


@pytest.mark.parametrize("gap", GAPS.values(), ids=GAPS)
def test_a_gap_while_the_flow_runs_ends_it(flow: Flow, gap: tuple[str, str]) -> None:
    """P-E01: the code is pg.unpublished, or pg.publication if the publication is missing when it is read."""
    service = flow.service()
    service.prepare()
    service.start()
    failures: list[BaseException] = []

    def supervise() -> None:
        try:
            service.supervise(threading.Event())
        except BaseException as exc:  # noqa: BLE001 - looked at below
            failures.append(exc)

    thread = threading.Thread(target=supervise)
    thread.start()
    try:
        flow.db.execute("insert into o values (2)")
        wait_until(lambda: flow.count() == 2, "the flow delivers", 60)
        flow.db.execute(
            ";".join((gap[0], "insert into o values (3)", gap[1])).replace(";insert", "; commit; insert")
        )
        thread.join(60)
    finally:
        service.stop()
    assert isinstance(failures[0], UnpublishedError | PublicationError)


@contextlib.contextmanager
def running(flow: Flow) -> Iterator[EventsService]:
    """The service in a thread."""
    service, stopping = flow.service(), threading.Event()
    service.prepare()
    service.start()
    thread = threading.Thread(target=service.supervise, args=(stopping,))
    thread.start()
    try:
        yield service
    finally:
        stopping.set()
        thread.join(60)
        service.stop()


def test_a_catalog_that_cannot_be_read_is_shown_while_events_flow(flow: Flow) -> None:
    """P-T01: the publication is not watched then, so the picture has an error and the time of the last look."""
    with running(flow) as service, psycopg.connect(flow.db.server.dsn, autocommit=True) as admin:
        overviews = EventsOverviews(service)

        def shown() -> str | None:
            error = overviews.overview().flows[0].error
            return None if error is None else error.code

        flow.db.execute("insert into o values (2)")
        wait_until(lambda: flow.count() == 2, "the flow delivers", 60)
        allow = f'alter database "{flow.db.name}" allow_connections '
        admin.execute((allow + "false").encode())
        try:
            wait_until(lambda: shown() is not None, "it is shown")
            blind_since = service.seen_at
            flow.db.execute("insert into o values (3)")
            wait_until(lambda: flow.count() == 3, "the stream continues", 60)
            assert overviews.overview().flows[0].seen_at == blind_since == service.seen_at
        finally:
            admin.execute((allow + "true").encode())
        wait_until(lambda: shown() is None, "it is over")
        assert service.seen_at > blind_since


def test_events_whose_slot_has_no_reader_are_shown_with_an_error(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-T01: the capture's last report may be old, so the server is asked whether the slot is still read."""
    monkeypatch.setattr("aqueduck.service.probe.STILL_SECONDS", 0.5)
    service = flow.service()
    overviews = EventsOverviews(service)

    def shown() -> str | None:
        service._watch_source()
        error = overviews.overview().flows[0].groups[0].error
        return None if error is None else error.code

    try:
        service.prepare()
        (service.directory / "capture.json").write_text('{"seen": 1}')  # of a capture that hangs
        service.status.state = "streaming"
        wait_until(lambda: shown() == "pg.connection_lost", "it is shown")
        service.start()
        wait_until(lambda: shown() is None, "it is read")
    finally:
        service.stop()


def test_a_flow_that_may_skip_changes_continues_after_a_gap(
    flow: Flow, capsys: pytest.CaptureFixture[str]
) -> None:
    """`on_unpublished: continue` reports the lost changes once, as a warning."""
    flow.source = {"on_unpublished": "continue"}
    for statement in (GAPS["taken out"][0], "insert into o values (2)", GAPS["taken out"][1]):
        flow.db.execute(statement)
    flow.db.execute("insert into o values (3)")
    deliver(flow)
    assert [line["after"]["id"] for line in flow.lines()] == [1, 3]
    assert "pg.unpublished" in "".join(capsys.readouterr()), "wherever logs go in this process"
    deliver(flow)
    said = capsys.readouterr()
    assert "pg.unpublished" not in said.out + said.err


def test_tables_that_come_and_go_for_good_are_no_gap(flow: Flow) -> None:
    """A table that joins, and one that leaves, are as their owner wants them."""
    flow.db.execute("create table late (id int primary key); alter publication faucet_pub add table late")
    flow.db.execute("alter publication faucet_pub drop table other")
    flow.db.execute("insert into late values (9)")
    deliver(flow)
    flow.db.execute("alter table late rename to later; insert into later values (10)")
    deliver(flow)
    assert [line["after"]["id"] for line in flow.lines()] == [1, 9, 10]


def test_a_query_on_postgres_cdc_ends_at_a_gap(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-T05: while it runs the tables are watched; a checkpoint knows how they are published."""
    monkeypatch.setattr(cdc_source, "WATCH_SECONDS", 0.0)
    db.execute("create table o (id int primary key); create table other (id int primary key)")
    db.execute(PUBLISH)
    db.execute("select pg_create_logical_replication_slot('s', 'pgoutput')")
    options = {"dsn": db.dsn, "slot": "s", "publication": "faucet_pub", "table": "o"}
    driver = Driver(tmp_path, options)
    try:
        db.execute("insert into o values (1)")
        _, at = driver.drain()
        for statement in ("alter publication faucet_pub drop table other", "insert into other values (1)"):
            db.execute(statement)
        db.execute("alter publication faucet_pub add table other")  # the watched tables do not include it
        db.execute("insert into o values (2)")
        _, at = driver.drain(at)
        for statement in GAPS["taken out"]:
            db.execute(statement)
        with pytest.raises(UnpublishedError, match="another checkpointLocation"):
            driver.drain(at)
        driver.reader.stop()
        driver = Driver(tmp_path, options)  # as a supervisor starts it again
        with pytest.raises(UnpublishedError, match=r"did not send public\.o for a while"):
            driver.drain(at)
        driver.reader.stop()
        for statement in GAPS["made again"]:
            db.execute(statement)
        driver = Driver(tmp_path, options)
        with pytest.raises(UnpublishedError, match="dropped and created again"):
            driver.drain(at)
    finally:
        driver.reader.stop()


def test_a_slot_that_is_made_again_between_two_polls_is_found(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard 10: an SQL reader reconnects without a restart of the flow, and checks the slot before it reads."""
    monkeypatch.setattr(capture, "POLL_RETRY_SECONDS", 2.0)
    flow.source = {"capture": "poll"}
    service = flow.service()
    service.prepare()
    service.start()
    flow.db.execute("insert into o values (2)")
    wait_until(lambda: flow.count() == 2, "the flow delivers", 60)

    def made_again() -> bool:
        """The server drops no slot that is being read."""
        flow.db.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'aqueduck'"
            " and datname = current_database()"
        )
        try:
            flow.db.execute("select pg_drop_replication_slot('faucet_slot')")
        except psycopg.errors.ObjectInUse:
            return False
        flow.db.execute("insert into o values (3)")
        flow.db.execute("select pg_create_logical_replication_slot('faucet_slot', 'pgoutput')")
        return True

    wait_until(made_again, "the slot is made again", 60)
    try:
        with pytest.raises(SlotLostError, match="re-created or moved"):
            service.supervise(threading.Event())
    finally:
        service.stop()


def test_a_slot_that_is_trusted_is_trusted_by_the_capture_too(flow: Flow) -> None:
    """P-E03: `--trust-slot` after state_dir was lost; the slot had followed a server on which nothing of ours happened."""
    flow.db.execute("select pg_logical_emit_message(true, 'x', 'y')")
    flow.db.execute("select pg_replication_slot_advance('faucet_slot', pg_current_wal_lsn())")
    shutil.rmtree(flow.directory / "state" / "faucet_slot")
    flow.db.execute("insert into o values (2)")
    with pytest.raises(SlotLostError, match="--trust-slot"):
        deliver(flow)
    deliver(flow, trust_slot=True)
    assert [line["after"]["id"] for line in flow.lines()] == [1, 2]
