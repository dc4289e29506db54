"""The service compares the lake with its source automatically, and reports the same result everywhere."""

from __future__ import annotations

import json
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aqueduck.fanout import run as fanout_run
from aqueduck.fanout.overview import FanoutOverviews
from aqueduck.fanout.service import FanoutService
from aqueduck.fanout.verify_schedule import fanout_verifier
from aqueduck.lake.compare import deep_digest
from aqueduck.lake.session.catalog import open_lake
from aqueduck.overview import metrics
from aqueduck.overview.readiness import ProgressWatch
from aqueduck.overview.values import DestinationOverview, TableOverview
from aqueduck.service.verify_schedule import Verifier
from aqueduck.spark.query.verify_job import InProcess
from aqueduck.sync.control import Wanted
from aqueduck.sync.overview import SyncOverviews
from aqueduck.sync.service import SyncService
from aqueduck.sync.verify_schedule import sync_verifier
from tests.fanout_lakes import Fan, config, connect
from tests.fix_postgres import Database, wait_until
from tests.small_spark import SmallSpark, SmallTaskContext
from tests.whole_group import WholeGroup, whole_group

Serve = Callable[..., FanoutService]


@pytest.fixture
def fan(tmp_path: Path) -> Iterator[Fan]:
    fan = Fan(tmp_path, {"one": "a", "two": "b"})
    fan.change(
        "create table lake.t (id int, c varchar, v int)",
        "insert into lake.t select i, (['a','b'])[1 + i % 2], i from range(20) r(i)",
    )
    yield fan
    fan.close()


@pytest.fixture
def serve(fan: Fan, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Start a service of the fan's destinations that has caught up."""
    monkeypatch.setattr("aqueduck.spark.query.fanout_query.TaskContext", SmallTaskContext)
    monkeypatch.setattr("aqueduck.overview.verification.RECHECK_SECONDS", 0.0)
    monkeypatch.setattr("aqueduck.overview.verification.RETRY_SECONDS", 0.0)
    services: list[FanoutService] = []

    def start(**sections: Any) -> FanoutService:
        services.append(FanoutService(config(fan, **sections), env={}, spark=SmallSpark()))
        services[-1].prepare()
        fanout_run.catch_up(services[-1], threading.Event())
        return services[-1]

    yield start
    for service in services:
        service.source.close()


def damage(fan: Fan, name: str, *statements: str) -> None:
    with connect(fan.place(name), "data_inlining_row_limit 5", "meta_busy_timeout 10000") as con:
        for statement in statements:
            con.execute(statement)


def shown(service: FanoutService) -> dict[str, DestinationOverview]:
    return {d.name: d for d in FanoutOverviews(service).overview().destinations}


def scraped(overview: Any, name: str) -> dict[str, float]:
    """Samples of a metric by destination."""
    text = metrics.scrape(overview, ready=True)[0].decode()
    lines = [line for line in text.splitlines() if line.startswith(name + "{")]
    return {re.findall('destination="(.*?)"', line)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def test_a_difference_is_the_same_everywhere_and_a_seed_repairs_it(fan: Fan, serve: Serve) -> None:
    """P-T01: overview, errors, metrics and the state file agree; /readyz stays; the destination is seeded and found identical."""
    service = serve(verify={"interval": "0.001s"})
    verifier = fanout_verifier(service)
    assert {d.verified.verdict for d in shown(service).values()} == {"never"}
    damage(fan, "one", "update lake.t set v = -1 where id = 4", "delete from lake.t where id = 6")
    assert verifier.turn()
    overview = FanoutOverviews(service).overview()
    one, two = (d.verified for d in overview.destinations)
    assert (one.verdict, one.differences, one.deep) == ("different", 2, True)
    assert (two.verdict, two.differences) == ("identical", 0)
    assert [(e.code, e.destination) for e in overview.errors] == [("verify.different", "one")]
    assert overview.destinations[0].error == overview.errors[0]
    assert scraped(overview, "aqueduck_destination_verify_differences") == {"one": 2, "two": 0}
    assert scraped(overview, "aqueduck_destination_verify_last_success_timestamp_seconds")["one"] == 0
    assert not ProgressWatch(0).look(overview)
    flow = overview.flows[0].verification
    assert flow is not None
    assert (flow.identical, flow.different, flow.never, flow.oldest_at) == (1, 1, 0, None)
    service.write_state()
    rows = {r["destination_id"]: (r["verdict"], r["differences"]) for r in service.state_file.read()}
    assert rows == {"one": ("different", 2), "two": ("identical", 0)}
    service.poll()
    fanout_run.catch_up(service, threading.Event())
    assert not fan.differing()
    assert service.status.reseeds == 1
    assert verifier.turn()
    assert {d.verified.verdict for d in shown(service).values()} == {"identical"}
    assert shown(service)["one"].error is None


def test_a_difference_is_only_reported_where_the_file_says_so(fan: Fan, serve: Serve) -> None:
    """And rows of another tenant are never removed: a seed would leave them anyway."""
    service = serve(verify={"interval": "0.001s", "on_difference": "report"})
    damage(fan, "one", "delete from lake.t where id = 6")
    assert fanout_verifier(service).turn()
    assert not service.reseed_wanted
    service = serve(verify={"interval": "0.001s"})
    damage(fan, "two", "insert into lake.t values (2, 'a', 2)")
    assert fanout_verifier(service).turn()
    assert service.reseed_wanted == {"one"}
    assert shown(service)["two"].verified.note == "main.t: rows 1 of another tenant"


def test_what_cannot_be_looked_at_keeps_its_verdict_and_says_why(fan: Fan, serve: Serve) -> None:
    """A destination that is away is neither identical nor different; the others are compared."""
    service = serve(verify={"interval": "0.001s"})
    verifier = fanout_verifier(service)
    verifier.turn()
    good = shown(service)["one"].verified
    catalog = Path(fan.place("one").catalog.removeprefix("sqlite:"))
    catalog.rename(catalog.with_suffix(".away"))
    verifier.turn()
    verified = {name: d.verified for name, d in shown(service).items()}
    assert (verified["one"].verdict, verified["one"].at) == ("identical", good.at)
    assert verified["one"].failed_at is not None
    assert "lake.catalog" in (verified["one"].failure or "")
    assert verified["two"].failed_at is None


def test_a_source_that_is_away_proves_nothing(fan: Fan, serve: Serve) -> None:
    """Every destination says that it could not be compared."""
    service = serve(verify={"interval": "0.001s"})
    catalog = Path(fan.place("source").catalog.removeprefix("sqlite:"))
    catalog.rename(catalog.with_suffix(".away"))
    fanout_verifier(service).turn()
    assert {d.verified.verdict for d in shown(service).values()} == {"never"}
    assert all(d.verified.failure for d in shown(service).values())


def test_verdicts_outlive_the_service(fan: Fan, serve: Serve) -> None:
    """A restart knows the last results, and compares nothing before it is due; a damaged file counts as never compared."""
    service = serve()
    fanout_verifier(service).turn()
    before = {name: d.verified for name, d in shown(service).items()}
    again = serve()
    assert {name: d.verified for name, d in shown(again).items()} == before
    assert not fanout_verifier(again).turn()
    path = again.state_file.path.with_suffix(".verified.json")
    path.write_text(path.read_text()[:-20])
    assert {d.verified.verdict for d in shown(serve()).values()} == {"never"}


def test_a_comparison_is_given_up_when_the_flow_needs_the_machine(
    fan: Fan, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lag between two reads ends the comparison; only completely read tables are called identical."""
    service = serve(verify={"interval": "0.001s", "pause_lag_seconds": 5})
    verifier = fanout_verifier(service)
    read = deep_digest.sum_source

    def then_behind(*arguments: Any) -> Any:
        service.status.destinations["two"].lag_seconds = 60.0
        return read(*arguments)

    monkeypatch.setattr("aqueduck.fanout.verify_deep.sum_source", then_behind)
    verifier.turn()
    verified = [d.verified for d in shown(service).values()]
    assert {v.verdict for v in verified} == {"never"}
    assert all("a destination is 60 s behind" in (v.failure or "") for v in verified)


def test_a_destination_that_failed_does_not_keep_the_others_from_being_compared(
    fan: Fan, serve: Serve
) -> None:
    """P-T01, P-F09: it stays behind until somebody repairs it, and would put off every comparison until then."""
    service = serve(verify={"interval": "0.001s", "pause_lag_seconds": 0.01})
    Path(fan.place("two").catalog.removeprefix("sqlite:")).write_text("no catalog")
    fan.change("insert into lake.t values (20, 'a', 20), (21, 'b', 21)")
    service.poll()
    wait_until(
        lambda: service.poll() or service.status.destinations["two"].lag_seconds > 0.01, "it is behind"
    )
    assert service.status.destinations["two"].state == "errored"
    fanout_verifier(service).turn()
    verified = {name: d.verified for name, d in shown(service).items()}
    assert verified["one"].verdict == "identical"
    assert (verified["two"].verdict, verified["two"].failed_at is None) == ("never", False)


def test_a_thread_starts_only_where_an_interval_is_set(fan: Fan, serve: Serve) -> None:
    """Off means off: no thread, no metric, and the page says so."""
    service = serve(verify={"interval": "off"})
    verifier = fanout_verifier(service)
    verifier.start()
    verifier.stop()
    assert "verify" not in {t.name for t in threading.enumerate()}
    overview = FanoutOverviews(service).overview()
    assert overview.flows[0].verification is None
    assert not scraped(overview, "aqueduck_destination_verify_differences")


def test_the_thread_looks_when_it_is_due_and_ends_with_the_service(
    fan: Fan, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Automatically, from its first turn on; stopping does not wait for an interval."""
    monkeypatch.setattr("aqueduck.service.verify_schedule.FIRST_SECONDS", 0.0)
    service = serve(verify={"interval": "1h"})
    verifier = fanout_verifier(service)
    verifier.start()
    wait_until(
        lambda: {d.verified.verdict for d in shown(service).values()} == {"identical"},
        "every destination was looked at",
    )
    verifier.stop()
    assert "verify" not in {t.name for t in threading.enumerate()}


# -- sync


def synced(group: WholeGroup) -> tuple[SyncService, Verifier]:
    """The service of a group that runs without Spark, and its verifier."""
    verify = group.config.verify.model_copy(update={"interval": 0.001})
    service = SyncService(group.config.model_copy(update={"verify": verify}))
    service._lake, service.running = group.lake, {group.name: group.runner}
    return service, sync_verifier(service, InProcess)


def change_lake(group: WholeGroup, statement: str) -> None:
    """By another user's session."""
    with open_lake(group.config.lake) as session:
        session.execute(statement)


def tables(service: SyncService, group: WholeGroup) -> dict[str, TableOverview]:
    found = SyncOverviews(service)._tables(group.runner, Wanted(group.runner.group))
    return {t.source.removeprefix("public."): t for t in found}


@pytest.fixture
def two_tables(db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WholeGroup]:
    monkeypatch.setattr("aqueduck.overview.verification.RECHECK_SECONDS", 0.0)
    monkeypatch.setattr("aqueduck.overview.verification.RETRY_SECONDS", 0.0)
    db.execute("create table a (id int primary key, v text); create table b (id int primary key, v text)")
    with whole_group(db, tmp_path, {"a": {}, "b": {"mode": "append"}}) as group:
        db.execute("insert into a select g, 'x' from generate_series(1, 50) g; insert into b values (1, 'x')")
        group.apply()
        yield group


def test_tables_are_compared_one_at_a_time(two_tables: WholeGroup) -> None:
    """Each turn is one table; a row changed in the lake by hand is an error of that table, with the command that repairs it."""
    service, verifier = synced(two_tables)
    change_lake(two_tables, "update lake.main.a set v = 'y' where id = 7")
    change_lake(two_tables, "delete from lake.main.a where id = 8")
    assert verifier.turn()
    assert sorted(t.verified.verdict for t in tables(service, two_tables).values()) == ["different", "never"]
    assert verifier.turn()
    found = tables(service, two_tables)
    a, b = found["a"], found["b"]
    assert (a.verified.verdict, a.verified.differences, b.verified.verdict) == ("different", 2, "identical")
    assert a.verified.note == "2 keys differ (1 changed, 1 missing)"
    assert a.error is not None
    assert (a.error.code, a.error.hint) == ("verify.different", "aqueduck tables resync -c FILE public.a")
    assert "7" not in (a.verified.note or "") + a.error.message


def test_a_change_that_is_twice_in_a_log_is_a_difference(two_tables: WholeGroup) -> None:
    """Rows of now are right, and yet an entry was written twice: only a deep comparison sees it."""
    service, verifier = synced(two_tables)
    change_lake(two_tables, "insert into lake.main.b from lake.main.b where _op <> 'copy'")
    while verifier.turn() and tables(service, two_tables)["b"].verified.verdict == "never":
        pass
    assert tables(service, two_tables)["b"].verified.verdict == "different"
    note = tables(service, two_tables)["b"].verified.note or ""
    assert "1 changes that are in the log more than once" in note


def test_a_group_that_retries_does_not_keep_other_tables_from_being_compared(
    two_tables: WholeGroup,
) -> None:
    """P-T01: changes that it staged before its source went away grow older as long as that lasts."""
    service, verifier = synced(two_tables)
    two_tables.runner.status.state, two_tables.runner.status.lag_seconds = "retrying", 3600.0
    verifier.turn()
    assert "identical" in {t.verified.verdict for t in tables(service, two_tables).values()}


def test_a_source_that_is_away_is_no_verdict(two_tables: WholeGroup) -> None:
    """The database cannot be reached: the reason is shown, and no table is identical."""
    service, _ = synced(two_tables)
    source = service.config.source.model_copy(update={"dsn": "host=127.0.0.1 port=1 dbname=x"})
    service.config = service.config.model_copy(update={"source": source})
    assert sync_verifier(service, InProcess).turn()
    verified = [t.verified for t in tables(service, two_tables).values() if t.verified.failed_at]
    assert [v.verdict for v in verified] == ["never"]
    assert "pg.unreachable" in (verified[0].failure or "")


def test_a_lake_that_is_behind_is_not_called_different(
    db: Database, two_tables: WholeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the lake does not have yet is late, not lost."""
    monkeypatch.setattr("aqueduck.sync.verify_schedule.WAIT_SECONDS", 0.0)
    service, verifier = synced(two_tables)
    db.execute("insert into a values (1000, 'late'); insert into b values (1000, 'late')")
    verifier.turn()
    verifier.turn()
    verified = [t.verified for t in tables(service, two_tables).values()]
    assert {v.verdict for v in verified} == {"never"}
    assert all("may only be late" in (v.failure or "") for v in verified), json.dumps(verified, default=str)


@pytest.mark.slow
def test_a_busy_fan_out_is_never_called_different_until_it_is(
    fan: Fan, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lanes, load and upkeep beside the verifier: identical every time; a row deleted by hand is found and seeded again."""
    monkeypatch.setattr("aqueduck.service.verify_schedule.TURN_SECONDS", 0.05)
    catalog = sqlite3.connect(fan.place("source").catalog.removeprefix("sqlite:"))
    catalog.execute("pragma journal_mode = wal")  # readers and writers of the source leave each other alone
    catalog.close()
    service = serve(
        verify={"interval": "0.5s", "share": 1.0},
        poll={"interval_seconds": 0.1},
        maintenance={"interval_seconds": 1},
    )
    stopping = threading.Event()
    lanes = threading.Thread(target=fanout_run.follow, args=(service, stopping, threading.Event(), None))
    lanes.start()
    try:
        seen = set()
        for n in range(100, 130):
            fan.change(
                f"insert into lake.t values ({n}, 'a', 1)",
                f"update lake.t set c = 'b', v = v + 1 where id = {n - 5}",
                f"delete from lake.t where id = {n - 9}",
            )
            if n % 10 == 0:
                fan.change(
                    "call ducklake_merge_adjacent_files('lake')", "call ducklake_flush_inlined_data('lake')"
                )
            looked = {name: verified.at for name, verified in service.verdicts.all().items()}
            if n % 4 == 0:
                wait_until(
                    lambda looked=looked: any(  # type: ignore[misc]
                        verified.at != looked.get(name) for name, verified in service.verdicts.all().items()
                    ),
                    "a destination was compared once more",
                    60,
                )
            seen |= {verified.verdict for verified in service.verdicts.all().values()}
        assert seen <= {"identical", "never"}
        assert service.status.reseeds == 0
        damage(fan, "one", "delete from lake.t where id = 4")
        wait_until(lambda: service.status.reseeds == 1, "the loss was found and seeded again", 60)
        wait_until(
            lambda: {v.verdict for v in service.verdicts.all().values()} == {"identical"},
            "the seed repaired it",
            60,
        )
    finally:
        stopping.set()
        lanes.join()
    assert not fan.differing()
