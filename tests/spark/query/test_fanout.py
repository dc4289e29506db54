"""Fan-out on a real Spark: the service's cycles, and the lake formats for other people's queries."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from aqueduck.config.fanout import parse_fanout
from aqueduck.config.lake_place import LakePlace
from aqueduck.fanout import run as fanout_run
from aqueduck.fanout.overview import FanoutOverviews
from aqueduck.fanout.service import FanoutService
from aqueduck.fanout.status import destination_rows
from aqueduck.overview.metrics import METRICS, scrape
from aqueduck.spark.formats.register import register_sources
from aqueduck.spark.session.session import build_session
from aqueduck.web.server import serve
from tests.fanout_lakes import Fan
from tests.fix_postgres import wait_until

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # for Spark's workers
        yield from started()


def started() -> Iterator[SparkSession]:
    session = build_session("local[2]", {}, "test")
    register_sources(session)
    yield session
    session.stop()


@pytest.fixture
def fan(tmp_path: Path) -> Iterator[Fan]:
    fan = Fan(tmp_path, {"one": "a", "two": "b"})
    fan.change("create table lake.t (id int, c varchar, v int)")
    yield fan
    fan.close()


def service_of(fan: Fan, spark: SparkSession, **sections: Any) -> FanoutService:
    destinations = [
        {"id": i, "routing_value": v, "catalog": fan.place(i).catalog, "data_path": fan.place(i).data_path}
        for i, v in fan.values.items()
    ]
    source = fan.place("source")
    config = {
        "source": {"catalog": source.catalog, "data_path": source.data_path, "table": "t"},
        "routing": {"field": "c", "key_columns": ["id"]},
        "destinations": destinations,
        **sections,
    }
    parsed = parse_fanout(json.dumps(config), base_dir=fan.directory, env={})
    return FanoutService(parsed, env={}, spark=spark)


def catch_up(service: FanoutService) -> None:
    fanout_run.catch_up(service, threading.Event())


def test_the_service_seeds_follows_and_rests(fan: Fan, spark: SparkSession) -> None:
    """P-F01, P-F03, P-F10, hazard 7: seed, changes and moves arrive; one read serves all; an idle poll writes nothing."""
    fan.change("insert into lake.t select i, (['a','b','x'])[1 + i % 3], i from range(300) r(i)")
    service = service_of(fan, spark)
    service.prepare()
    catch_up(service)
    assert fan.differing() == {}
    assert service.status.unrouted_rows == 100
    fan.change("update lake.t set c = 'b' where id < 10", "delete from lake.t where id between 50 and 60")
    fan.change(
        "insert into lake.t values (1000, null, 1), (1001, 'a', 1)",
        "update lake.t set id = 2000 where id = 99",
    )
    reads = service.status.reads
    assert service.poll()
    assert fan.differing() == {}
    assert service.status.reads == reads + 1
    assert service.status.null_rows == 1
    assert service.status.routing_moves == 7  # those of a and of nobody
    before = fan.snapshots()
    for _ in range(5):
        assert not service.poll()
        assert not service.help_others()
    assert fan.snapshots() == before
    assert service.status.reads == reads + 1
    [flow] = FanoutOverviews(service).overview().flows
    assert {d.name: (d.state, d.position, d.lag_snapshots) for d in flow.destinations} == dict.fromkeys(
        fan.values, ("live", before["source"], 0)
    )
    assert flow.counts.reads == reads + 1
    assert flow.counts.polls >= 6
    text, _ = scrape(FanoutOverviews(service).overview(), ready=True)
    assert f'aqueduck_fanout_reads_total{{flow="fanout"}} {reads + 1}.0'.encode() in text
    service.stop()


def test_a_served_fan_out_shows_what_happens(fan: Fan, spark: SparkSession) -> None:
    """P-F13, P-F17, P-F18: probes, metrics and the status of each destination follow the running service, without values."""
    fan.change("insert into lake.t select i, (['a','b','hunter2'])[1 + i % 3], i from range(300) r(i)")
    service = service_of(fan, spark, poll={"interval_seconds": 0.2}, server={"port": 0})
    service.prepare()
    stopping, reload = threading.Event(), threading.Event()
    following = threading.Thread(target=fanout_run.follow, args=(service, stopping, reload, None))
    with serve(service.config.server, FanoutOverviews(service), None, interval=0.2) as address:

        def get(path: str) -> Any:
            with urlopen(f"{address}{path}", timeout=60) as answer:
                return json.loads(answer.read())

        def states() -> list[tuple[str, int]]:
            return [(d["state"], d["position"]) for d in get("api/v1/destinations")["destinations"]]

        assert {state for state, _ in states()} == {"pending"}
        following.start()
        try:
            latest = fan.latest()
            wait_until(lambda: states() == [("live", latest)] * 2, "both are seeded", 120)
            assert get("api/v1/destinations/one")["rows_replicated"] == 100
            fan.change("delete from lake.t where id < 30")
            wait_until(lambda: states() == [("live", latest + 1)] * 2, "the change arrives", 120)
            assert get("healthz")["status"] == "ok"
            assert get("readyz")["ready"]
            with urlopen(f"{address}metrics", timeout=60) as answer:
                metrics = answer.read().decode()
            for name in (spec.name for spec in METRICS if spec.name.startswith("aqueduck_fanout_")):
                assert name in metrics or "seed" in name, name
            assert 'aqueduck_destination_rows_deleted_total{destination="two",flow="fanout"} 10.0' in metrics
            assert 'aqueduck_fanout_unrouted_rows_total{flow="fanout"} 100.0' in metrics
            everything = json.dumps(get("api/v1/status")) + metrics
            assert "hunter2" not in everything
            assert str(fan.directory) not in everything
        finally:
            stopping.set()
            following.join(120)
    assert fan.differing() == {}
    again = service_of(fan, spark)
    again.prepare()
    catch_up(again)
    assert again.status.destinations["two"].rows_replicated == 110  # also those of the first service
    service.stop()


def test_a_table_of_destinations_is_followed(fan: Fan, spark: SparkSession) -> None:
    """Rows of a lake table are destinations: they come and go, and a wrong one does not affect the others."""
    fan.change(
        "create table lake.tenants (id varchar, routing_value varchar, catalog varchar, data_path varchar, note int)"
    )

    def listed(name: str, value: str, place: LakePlace | None = None) -> str:
        place = place or fan.place(name)
        return f"insert into lake.tenants values ('{name}', '{value}', '{place.catalog}', '{place.data_path}', 1)"

    fan.change("insert into lake.t select i, (['a','b','c'])[1 + i % 3], i from range(30) r(i)")
    fan.change(listed("three", "c"), listed("again", "a", fan.place("one")))
    fan.change("insert into lake.tenants values ('bad', 'd', 'sqlite:x.db', './here', 1)")
    service = service_of(fan, spark, destinations_table="tenants")
    fan.values["three"] = "c"
    service.prepare()
    catch_up(service)
    assert fan.differing() == {}
    assert set(service.status.left_out) == {"again", "bad"}
    assert "absolute" in service.status.left_out["bad"]
    assert "same routing_value" in service.status.left_out["again"]
    fan.values["four"] = "d"
    fan.change(listed("four", "d"), "update lake.t set c = 'd' where id < 9")
    service.poll()
    catch_up(service)
    assert fan.differing() == {}
    fan.change("delete from lake.tenants where id = 'three'", "insert into lake.t values (100, 'c', 1)")
    service.poll()
    catch_up(service)
    assert {t.destination.id for t in service.served} == {"one", "two", "four"}
    assert service.status.unrouted_rows == 1
    service.stop()


def test_a_failing_destination_is_isolated_and_returns(fan: Fan, spark: SparkSession) -> None:
    """P-F09: the others continue, the error is in the state, and it catches up from its own cursor once it can."""
    service = service_of(fan, spark)
    service.prepare()
    catch_up(service)
    fan.change("insert into lake.t values (1, 'a', 1), (2, 'b', 2)")
    two = service.served["two"]
    good = two.destination
    broken = LakePlace(catalog=f"sqlite:{fan.directory}/no.db/x/y.db", data_path="/proc/none/")
    two.destination = type(good)(good.id, good.value, broken, good.target, good.cursor)
    service.poll()
    assert fan.rows("one") == [(1, "a", 1)]
    assert two.status.state == "errored"
    service.state_file.write(destination_rows(service.status))
    [row] = [r for r in service.state_file.read() if r["destination_id"] == "two"]
    assert row["last_error"].startswith("[lake.")
    assert row["retry_at"] is not None
    fan.change("insert into lake.t values (3, 'a', 3), (4, 'b', 4)")
    service.poll()
    assert [row[0] for row in fan.rows("one")] == [1, 3]
    two.destination, two.status.retry_at = good, None
    assert service.help_others()
    assert fan.differing() == {}
    assert str(two.status.state) == "live"
    service.stop()


def test_unknown_values_make_their_own_destinations(fan: Fan, spark: SparkSession) -> None:
    """A pattern serves every value: present at the start, added later, and removed meanwhile."""
    pattern = {
        "catalog": f"sqlite:{fan.directory}/{{value}}.sqlite",
        "data_path": f"{fan.directory}/{{value}}_data/",
    }
    fan.change("insert into lake.t values (1, 'a', 1), (2, 'p', 2), (3, null, 3)")
    service = service_of(fan, spark, dynamic=pattern)
    service.prepare()
    catch_up(service)
    fan.change("insert into lake.t values (4, 'q', 4), (5, 'p', 5)", "update lake.t set c = 'q' where id = 1")
    service.poll()
    catch_up(service)
    for value in ("p", "q"):
        fan.values[value] = value
    assert fan.differing() == {}
    assert service.status.destinations["q"].seeds == 1
    service.stop()
    fan.change("delete from lake.t where c = 'p'")
    again = service_of(fan, spark, dynamic=pattern)
    again.prepare()
    catch_up(again)
    assert fan.differing() == {}
    again.stop()


def test_a_replay_reads_history_instead_of_a_scan(fan: Fan, spark: SparkSession) -> None:
    """P-F10: `cdc_replay` begins before the table's first row; append-only destinations get rows that were deleted since."""
    fan.change("insert into lake.t values (1, 'a', 1), (2, 'a', 2)", "delete from lake.t where id = 1")
    routing = {"field": "c", "seed_mode": "cdc_replay"}
    service = service_of(fan, spark, routing=routing)
    service.prepare()
    catch_up(service)
    assert fan.rows("one") == [(1, "a", 1), (2, "a", 2)]
    service.stop()


def test_a_stream_of_changes_for_anyone(fan: Fan, spark: SparkSession) -> None:
    """Typed rows with their change; offsets are lake snapshots, limits hold, and a restart repeats nothing."""
    fan.change(
        "insert into lake.t values (1, 'a', 1), (2, 'b', null)", "update lake.t set v = 5 where id = 1"
    )
    fan.change("delete from lake.t where id = 2")
    seen: list[tuple[Any, ...]] = []
    batches: list[int] = []

    def keep(batch: Any, _number: int) -> None:
        rows = [tuple(row) for row in batch.collect()]
        batches.append(len(rows))
        seen.extend(rows)

    def drain(where: str = "") -> None:
        stream = spark.readStream.format("ducklake_changes").option("catalog", fan.place("source").catalog)
        stream = stream.option("table", "t").option("max_rows_per_trigger", "2").option("where", where)
        query = stream.load().writeStream.foreachBatch(keep)
        query = query.option("checkpointLocation", str(fan.directory / "checkpoint"))
        query.trigger(availableNow=True).start().awaitTermination()

    drain()
    assert sorted(seen, key=lambda row: (row[4], row[5], row[3])) == [
        (1, "a", 1, "insert", 2, 0),
        (2, "b", None, "insert", 2, 1),
        (1, "a", 5, "update_postimage", 3, 0),
        (1, "a", 1, "update_preimage", 3, 0),
        (2, "b", None, "delete", 4, 1),
    ]
    assert max(batches) <= 2
    fan.change("insert into lake.t values (3, 'c', 3)")
    seen.clear()
    drain()
    assert seen == [(3, "c", 3, "insert", 5, 2)]
    fan.change("update lake.t set v = v + 10 where id in (1, 3)")
    seen.clear()
    drain("v > 3 and _change_type <> 'update_preimage'")
    assert sorted(seen) == [(1, "a", 15, "update_postimage", 6, 0), (3, "c", 13, "update_postimage", 6, 2)]
    with pytest.raises(PySparkException, match="where cannot be used"):
        drain("nobody > 3")


def test_a_table_and_its_changes_as_a_batch(fan: Fan, spark: SparkSession) -> None:
    """At a lake snapshot, with a filter that is pushed down; expired ranges are a named error."""
    fan.change("insert into lake.t select i, 'a', i from range(1000) r(i)", "delete from lake.t where id > 9")
    read = spark.read.format("ducklake").option("catalog", fan.place("source").catalog).option("table", "t")
    assert read.load().count() == 10
    assert read.option("snapshot", "2").load().filter("id >= 990 and c = 'a'").count() == 10
    changes = spark.read.format("ducklake_changes").option("catalog", fan.place("source").catalog)
    counted = changes.option("table", "t").load().groupBy("_change_type").count().collect()
    assert {row[0]: row[1] for row in counted} == {"insert": 1000, "delete": 990}
    fan.change("call ducklake_expire_snapshots('lake', older_than => now())")
    with pytest.raises(PySparkException, match=r"lake\.expired"):
        changes.option("table", "t").load().collect()
