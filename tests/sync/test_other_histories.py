"""A source whose past is not ours, and whose WAL has passed our position: found before anything is written."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from aqueduck.events.check import run_event_checks
from aqueduck.events.watch import EventsWatch
from aqueduck.lab.embedded import EmbeddedPostgres
from aqueduck.lake.ledger.progress import read_position
from aqueduck.lake.session.catalog import open_lake
from aqueduck.model.errors import SlotLostError
from aqueduck.model.schema import lsn_text, parse_lsn
from aqueduck.postgres.capture.cdc_prepare import look_again
from aqueduck.postgres.session.history import (
    KnownPast,
    parse_timelines,
    read_timelines,
    refuse_another_history,
)
from aqueduck.postgres.session.server import read_server
from aqueduck.sinks.bookmark_file import FileBookmarks
from aqueduck.spark.formats import cdc_source
from aqueduck.state_files.files import read_slot
from tests.fix_events import Flow
from tests.fix_failover import Twins
from tests.fix_postgres import Database, wait_until
from tests.spark.formats.test_cdc_reader import Driver
from tests.whole_group import WholeGroup

TABLES: dict[str, dict[str, str]] = {"t": {}}
ON_EACH_VERSION = pytest.mark.parametrize(
    "twins", [pytest.param(18, id="18"), pytest.param(16, marks=pytest.mark.slow, id="16")], indirect=True
)


@pytest.fixture
def group(twins: Twins, tmp_path: Path) -> WholeGroup:
    """A group whose lake has all that the copy of the server has."""
    twins.db.execute("create table t (id int primary key, v text); insert into t values (1, 'copied')")
    group = WholeGroup(twins.db, tmp_path, TABLES)
    group.runner.query.start = lambda *_, **__: None  # type: ignore[method-assign]
    group.stop()
    twins.back_up()
    return begin(group, twins)


def begin(group: WholeGroup, twins: Twins) -> WholeGroup:
    """Like a service that starts."""
    group.db = twins.db
    group.start(TABLES)
    group.runner.query.start = lambda *_, **__: None  # type: ignore[method-assign]
    return group


def lake_snapshots(group: WholeGroup) -> int:
    lake = open_lake(group.config.lake)
    [[count]] = lake.query("select count(*) from lake.snapshots()")[0]
    lake.close()
    return int(count)


@ON_EACH_VERSION
def test_a_standby_that_lacks_what_the_lake_has_is_refused_although_it_has_passed_it(
    group: WholeGroup, twins: Twins
) -> None:
    """P-T05, hazard 15: the lake's position lies beyond the point where the new timeline branches off."""
    twins.db.execute("insert into t select g, 'lost by the source' from generate_series(2, 101) g")
    group.apply()
    position = group.runner.stored_position()
    group.capture.stop()
    twins.fail_over(promote=True)
    twins.db.execute("insert into t values (2, 'of the new timeline')")
    twins.write_past(position)

    with pytest.raises(SlotLostError, match=r"timeline 2, which branches off timeline 1 at .* took over"):
        group.runner.start()  # as after a lost connection
    group.stop()
    before = lake_snapshots(group)
    with pytest.raises(SlotLostError, match="a standby took over that was behind"):
        begin(group, twins)
    assert lake_snapshots(group) == before

    group.with_options(on_slot_loss="resync")
    begin(group, twins)
    twins.db.execute("insert into t values (3, 'after the resync')")
    group.apply()
    assert [c.verdict for c in group.verify()] == ["identical"]
    group.stop()


def test_a_standby_that_has_everything_continues(group: WholeGroup, twins: Twins) -> None:
    """P-T05: with its slot carried along, and the lake not ahead of it, nothing is re-copied; then its timeline is ours."""
    copies = group.copies
    group.capture.stop()
    twins.fail_over(promote=True)
    twins.db.execute("insert into t values (2, 'of the new timeline')")
    group.db = twins.db
    group.runner.start()
    group.restart_capture()
    group.apply()
    assert [c.verdict for c in group.verify()] == ["identical"]
    stored = read_position(group.lake, "test")
    assert stored is not None
    assert (stored.timeline, group.copies) == (2, copies)
    group.stop()
    begin(group, twins).stop()


def test_the_capture_does_not_take_another_timeline_for_its_own(group: WholeGroup, twins: Twins) -> None:
    """P-T05: between the look at the server and the first byte, another server may take over: the query is started again."""
    group.capture.stop()
    twins.fail_over(promote=True)
    group.restart_capture()
    wait_until(lambda: not group.capture.is_alive(), "the capture has ended")
    with pytest.raises(Exception, match="another server has taken over"):
        group.capture.check()
    group.stop()


def test_a_role_without_rights_learns_what_would_prove_that_the_history_is_ours(
    group: WholeGroup, twins: Twins
) -> None:
    """P-T05: where the timelines cannot be read, a position that only the slot could prove is refused, with the grant."""
    position = group.runner.stored_position()
    group.stop()
    twins.fail_over(promote=True)
    twins.db.execute("create role poor login")  # without REPLICATION
    dsn = twins.db.dsn_for("poor")
    with twins.db.connect("poor") as conn:
        server = read_server(conn)
        assert read_timelines(conn, dsn, server.timeline) is None
        with pytest.raises(SlotLostError, match=r'grant execute on function pg_read_file\(text\) to "poor"'):
            refuse_another_history(conn, dsn, KnownPast(position, 1), server, None)
        twins.db.execute("grant execute on function pg_read_file(text) to poor")
        refuse_another_history(conn, dsn, KnownPast(position, 1), server, None)
        twins.db.execute(
            "revoke execute on function pg_read_file(text) from poor; alter role poor replication"
        )
        refuse_another_history(conn, dsn, KnownPast(position, 1), server, None)
        left = read_timelines(conn, dsn, server.timeline)
    assert left is not None
    assert list(left) == [1]


def test_a_backup_without_a_timeline_of_its_own_is_recognized_by_the_slot(
    group: WholeGroup, twins: Twins
) -> None:
    """P-T05: a copied data directory that is started again and written on past the lake's position."""
    for number in range(2, 4):  # with a checkpoint, decoding has a new place to begin
        twins.db.execute("checkpoint")
        twins.db.execute(f"insert into t values ({number}, 'lost by the source')")
        group.apply()
    wait_until(lambda: watched(group), "the slot's place is noted")
    position = group.runner.stored_position()
    group.stop()
    twins.fail_over(promote=False)
    twins.write_past(position)
    with pytest.raises(SlotLostError, match="restored from an older backup, and has continued"):
        begin(group, twins)


def test_a_service_that_runs_keeps_the_proof_of_a_backup(group: WholeGroup, twins: Twins) -> None:
    """P-T05: looks at the restored server raise, each of them, and the next start is refused."""
    for number in range(2, 4):
        twins.db.execute("checkpoint")
        twins.db.execute(f"insert into t values ({number}, 'lost by the source')")
        group.apply()
    wait_until(lambda: watched(group), "the slot's place is noted")
    position, noted = group.runner.stored_position(), read_slot(group.runner.directory / "slot")
    group.capture.stop()
    twins.fail_over(promote=False)
    twins.write_past(position)
    for _ in range(3):
        with pytest.raises(SlotLostError, match="restored from an older backup, and has continued"):
            group.watch.look(group.runner)
    assert read_slot(group.runner.directory / "slot") == noted
    group.stop()
    with pytest.raises(SlotLostError, match="restored from an older backup, and has continued"):
        begin(group, twins)


def watched(group: WholeGroup) -> bool:
    """Look as the service does every few seconds; whether it has recorded the slot's present position."""
    group.watch.look(group.runner)
    noted = read_slot(group.runner.directory / "slot")
    now = group.db.value(
        "select (restart_lsn - '0/0')::int8 from pg_replication_slots where slot_name = 'aqueduck_test'"
    )
    return noted is not None and noted.restart_lsn == now


def test_a_server_that_crashed_is_still_ours(group: WholeGroup, twins: Twins) -> None:
    """P-T05, P-S30: after a crash the slot is where it was when we last looked, or later."""
    twins.db.execute("checkpoint; insert into t values (2, 'here to stay')")
    group.apply()
    wait_until(lambda: watched(group), "the slot's place is noted")
    group.stop()
    twins.db.observer.close()
    twins.server.kill9()
    twins.restart()
    begin(group, twins)
    assert [c.verdict for c in group.verify()] == ["identical"]
    group.stop()


def test_a_history_file_is_read_as_the_server_writes_it() -> None:
    """Comments and empty lines are left out."""
    text = "1\t0/3000060\tno recovery target specified\n\n# by hand\n2\tA/B0\tbefore 2000-01-01\n"
    assert parse_timelines(text) == {1: 0x3000060, 2: (0xA << 32) + 0xB0}


# -- the flow events, and postgres_cdc


@pytest.fixture
def events(twins: Twins, tmp_path: Path) -> Flow:
    """A flow that has delivered one event, which the copy of the server has, too."""
    twins.db.execute("create table o (id int primary key); create publication faucet_pub for table o")
    flow = Flow(twins.db, tmp_path)
    deliver(flow)
    twins.db.execute("insert into o values (1)")
    deliver(flow)
    twins.back_up()
    flow.db = twins.db
    return flow


def deliver(flow: Flow) -> None:
    """A run with `--once`."""
    service = flow.service()
    try:
        service.prepare()
        service.start(once=True)
        service.run_once(threading.Event())
    finally:
        service.stop()


@pytest.mark.parametrize(
    ("promote", "past", "reason"),
    [
        (False, False, "beyond the server's"),
        (False, True, "has continued from there"),
        (True, True, "branches off timeline 1"),
    ],
)
def test_a_flow_of_events_is_refused_by_a_server_that_lacks_what_was_delivered(
    events: Flow, twins: Twins, promote: bool, past: bool, reason: str
) -> None:
    """P-T05: a restored server made rows that were in no event, and the run said that all was well."""
    for number in range(2, 5):
        twins.db.execute("checkpoint")
        twins.db.execute(f"insert into o values ({number})")
        deliver(events)
    bookmark = FileBookmarks(events.directory / "state", "faucet_slot").load()
    assert bookmark is not None
    assert (bookmark.timeline, events.count()) == (1, 4)
    twins.fail_over(promote=promote)
    twins.db.execute("insert into o values (77)")
    if past:
        twins.write_past(bookmark.position)
    before = events.config_file.parent.joinpath("changes.jsonl").read_bytes()
    events.db = twins.db
    if past and not promote:  # a flow that runs meanwhile learns it, and forgets nothing
        watch = EventsWatch(
            events.service().config.source, twins.db.dsn, events.directory / "state" / "faucet_slot"
        )
        for _ in range(3):
            with pytest.raises(SlotLostError, match=reason):
                watch.look(1, bookmark.position)
    results = run_event_checks(events.service().config)
    [found] = [r for r in results if r.name == "slot faucet_slot"]
    assert reason in found.detail
    with pytest.raises(SlotLostError, match=reason) as caught:
        deliver(events)
    assert "remove the bookmark" in str(caught.value)
    assert events.config_file.parent.joinpath("changes.jsonl").read_bytes() == before


def test_a_flow_of_events_continues_with_a_standby_that_has_everything(events: Flow, twins: Twins) -> None:
    """P-T05: nothing is lost or doubled if the slot was carried along."""
    twins.fail_over(promote=True)
    events.db = twins.db
    twins.db.execute("insert into o values (2)")
    deliver(events)
    deliver(events)
    assert [line["after"]["id"] for line in events.lines()] == [1, 2]


@pytest.mark.parametrize(
    ("promote", "reason"), [(True, "branches off timeline 1 at"), (False, "has continued from there")]
)
def test_a_checkpoint_knows_the_past_of_its_server(
    twins: Twins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, promote: bool, reason: str
) -> None:
    """P-T05: `postgres_cdc` goes by the same rule, with timeline and slot in Spark's offsets."""
    monkeypatch.setattr(cdc_source, "WATCH_SECONDS", 0.0)
    twins.db.execute("create table o (id serial primary key); create publication p for table o")
    twins.db.execute("select pg_create_logical_replication_slot('s', 'pgoutput')")
    options = {"dsn": twins.db.dsn, "slot": "s", "publication": "p"}
    twins.back_up()
    driver = Driver(tmp_path, options)
    at = driver.reader.initialOffset()
    before = at["slot"]
    while at["slot"] == before:  # with a checkpoint, decoding has a new place to begin
        twins.db.execute("checkpoint; insert into o values (default)")
        _, at = driver.drain(at)
        driver.reader.commit(at)
    source = driver.reader._source
    driver.reader.stop()
    assert at["timeline"] == 1
    twins.fail_over(promote=promote)
    twins.write_past(parse_lsn(at["lsn"]))
    if not promote:  # a query that runs meanwhile learns it
        assert source is not None
        with pytest.raises(SlotLostError, match=reason):
            look_again(twins.db.dsn, "s", "p", source)
    driver = Driver(tmp_path, options)
    with pytest.raises(SlotLostError, match=reason):
        driver.drain(at)


# -- a standby that follows its primary, with slots that PostgreSQL itself carries along


class Pair(Database):
    """A database on a primary, then on the standby that takes over: the server that accepts writes."""

    ports: tuple[int, ...] = ()

    def dsn_for(self, user: str, **parameters: str | int) -> str:
        ports = ",".join(map(str, (self.server.port, *self.ports)))
        hosts = ",".join("127.0.0.1" for _ in (self.server, *self.ports))
        return f"host={hosts} port={ports} dbname={self.name} user={user} target_session_attrs=read-write"


@pytest.mark.slow
def test_a_failover_slot_that_was_synchronized_continues(
    new_server: Callable[..., EmbeddedPostgres], tmp_path: Path
) -> None:
    """P-T05: PostgreSQL 17 and later carry the slot along, and make the lake wait for the standby."""
    primary = new_server(settings={"synchronized_standby_slots": "standby"})
    pair = Pair(primary, "postgres")
    pair.execute("create table t (id int primary key, v text); insert into t values (1, 'copied')")
    pair.execute("select pg_create_physical_replication_slot('standby')")
    pair.execute("select pg_create_logical_replication_slot('aqueduck_test', 'pgoutput', false, false, true)")
    copy = Path(f"{primary.data_dir}-standby")
    subprocess.run(
        [primary.bin("pg_basebackup"), "-D", copy, "-d", primary.dsn, "-R", "-S", "standby", "-c", "fast"],
        check=True, capture_output=True, cwd="/", **primary._owner.process_arguments(),
    )  # fmt: skip
    follows = {
        "hot_standby_feedback": True,
        "sync_replication_slots": True,
        "synchronized_standby_slots": "",
    }
    with (copy / "postgresql.auto.conf").open("a") as conf:
        conf.write(f"primary_conninfo = '{primary.dsn}'\n")
    standby = new_server(copy, settings=follows)
    pair.ports = (standby.port,)
    group = WholeGroup(pair, tmp_path, TABLES)
    copies = group.copies
    pair.execute("insert into t values (2, 'before the failover')")
    group.apply()
    position = group.runner.stored_position()
    with psycopg.connect(standby.dsn, autocommit=True) as observer:
        synced = "select count(*) from pg_replication_slots where synced and not temporary and confirmed_flush_lsn >= %s::pg_lsn"
        wait_until(
            lambda: observer.execute(synced, (lsn_text(position),)).fetchone() == (1,),
            "the slot is synchronized",
        )
        pair.execute("insert into t values (3, 'not in the lake yet')")
        wait_until(lambda: observer.execute("select from t where id = 3").fetchall(), "the standby has it")
        group.capture.stop()
        pair.observer.close()
        primary.stop("immediate")
        observer.execute("select pg_promote()")
        wait_until(
            lambda: observer.execute("select pg_is_in_recovery()").fetchone() == (False,), "it is promoted"
        )
    group.db = pair = Pair(standby, "postgres")
    pair.execute("insert into t values (4, 'of the new timeline')")
    group.stop()
    group.start(TABLES)
    group.apply()
    assert group.read("select id from lake.main.t order by id") == [(1,), (2,), (3,), (4,)]
    stored = read_position(group.lake, "test")
    assert stored is not None
    assert (stored.timeline, group.copies) == (2, copies)
    group.stop()
    pair.observer.close()
