"""Tables of events, in PostgreSQL and in a lake: their contents, refused input, and exactly once under crashes."""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from aqueduck.config.events import load_events
from aqueduck.config.sync import LakeConfig
from aqueduck.events.check import run_event_checks
from aqueduck.lake.fold.change_rows import EVENT_SCHEMA
from aqueduck.lake.session.catalog import open_lake
from aqueduck.lake.target import inlined
from aqueduck.model.bookmarks import Bookmark
from aqueduck.model.errors import AqueduckError, BookmarkError, SinkTableError
from aqueduck.model.event_parts import EventPart
from aqueduck.model.event_table import EVENT_COLUMNS
from aqueduck.model.schema import TableName, lsn_text
from aqueduck.sinks.lake_table import LakeEvents
from aqueduck.sinks.postgres_table import EventsTable
from tests.fix_events import Flow
from tests.fix_postgres import Database, wait_until

FlowOf = Callable[..., Flow]

SHOP = """
create table orders (id int primary key, v text, j json);
create table "Odd	Name" (id int primary key);
create publication faucet_pub for all tables;
"""
LAKE_SINK = {"catalog": "sqlite:./lake.sqlite", "data_path": "./lake", "table": "log.events"}


def sink_of(kind: str) -> dict[str, Any]:
    config = {"table": "log.events"} if kind == "postgres" else LAKE_SINK
    return {"type": kind, "config": config}


def stored(flow: Flow, kind: str) -> list[dict[str, Any]]:
    """What an independent reader finds; in PostgreSQL in the order in which it was written, in a lake in that of the changes."""
    names = ", ".join(c.name for c in EVENT_COLUMNS)
    if kind == "postgres":
        with flow.db.connect() as conn, conn.cursor(row_factory=psycopg.rows.dict_row) as cursor:
            return cursor.execute(f"select {names} from log.events order by ctid".encode()).fetchall()
    config = LakeConfig(
        catalog=f"sqlite:{flow.directory / 'lake.sqlite'}", data_path=str(flow.directory / "lake")
    )
    with open_lake(config, read_only=True) as lake:
        rows, columns = lake.query(f"select {names} from lake.log.events order by commit_lsn, seq")
    found = [dict(zip(columns, row, strict=True)) for row in rows]
    for row in found:
        row["commit_lsn"] = lsn_text(row["commit_lsn"])
        row["key"], row["event"] = (None if row[c] is None else json.loads(row[c]) for c in ("key", "event"))
    return found


@pytest.mark.parametrize("kind", ["postgres", "ducklake"])
def test_a_table_of_events_has_all_that_an_event_says(db: Database, flow_of: FlowOf, kind: str) -> None:
    """P-E03, P-E10: one row an event, in order, with names, times and values as they are; its own rows are no events."""
    flow = flow_of(sink=sink_of(kind))
    db.execute(SHOP)
    assert flow.once() == 0, flow.log()
    text = 'comma, "quote", \\back, \t tab, \r\n lines, NULL, Ünicode 🦆'
    with db.connect() as conn, conn.transaction():
        conn.execute("insert into orders values (1, %s, %s)", (text, '{"a":\r\n "\\u0001\\ud800"}'))
        conn.execute('insert into "Odd\tName" values (7)')
        conn.execute("truncate orders")
    db.execute("insert into orders values (2, null, null); delete from orders")
    assert flow.once() == 0, flow.log()
    rows = stored(flow, kind)
    assert [(r["op"], r["table_name"], r["seq"], r["key"]) for r in rows] == [
        ("insert", "orders", 0, {"id": 1}),
        ("insert", "Odd\tName", 1, {"id": 7}),
        ("truncate", "orders", 2, None),
        ("insert", "orders", 0, {"id": 2}),
        ("delete", "orders", 1, {"id": 2}),
    ]
    assert {r["schema_name"] for r in rows} == {"public"}
    assert rows[0]["event"]["after"]["v"] == text
    for row in rows:
        event = row["event"]
        assert (row["op"], row["commit_lsn"]) == (event["op"], event["lsn"])
        assert int(row["commit_time"].timestamp() * 1000) == event["ts_ms"]
    assert len({r["xid"] for r in rows}) == 2
    assert flow.once() == 0, flow.log()
    assert len(stored(flow, kind)) == 5, "what the sink wrote into the source's database is no event"


POINTS = (
    "events.parts_written",
    "sink.written:2",
    "sink.flushed",
    "bookmark.saved:2",
    "capture.before_confirm",
)


@pytest.mark.kills("events")
@pytest.mark.parametrize("kind", ["postgres", "ducklake"])
@pytest.mark.parametrize(
    "point",
    [p if p.startswith("sink.written") else pytest.param(p, marks=pytest.mark.faults) for p in POINTS],
)
def test_a_kill_loses_and_doubles_nothing_in_a_table(
    db: Database, flow_of: FlowOf, kind: str, point: str
) -> None:
    """P-E03, hazard 8: rows and bookmark are one transaction, so a crash leaves both or neither."""
    flow = flow_of(sink=sink_of(kind), more={"segment_bytes": "64KiB", "batch_bytes_max": "64KiB"})
    db.execute(SHOP)
    assert flow.once() == 0, flow.log()
    load(db, 1, 400)
    assert flow.once(fault=point) == -9, flow.log()
    before = [r["event"]["after"]["id"] for r in stored(flow, kind)]
    assert before == list(range(1, len(before) + 1)), "a reader sees whole batches only"
    load(db, 401, 450)
    assert flow.once() == 0, flow.log()
    assert [r["event"]["after"]["id"] for r in stored(flow, kind)] == list(range(1, 451))


def load(db: Database, first: int, last: int) -> None:
    db.execute(
        f"do $$ begin for i in {first} .. {last} loop insert into orders values (i, repeat('x', 500));"
        " if i % 10 = 0 then commit; end if; end loop; end $$"
    )


@pytest.mark.slow
def test_a_connection_that_breaks_loses_and_doubles_nothing(db: Database, flow_of: FlowOf) -> None:
    """P-E03, hazard 3: the sink's session is ended while events flow; the flow recovers automatically."""
    flow = flow_of(sink=sink_of("postgres"), more={"flush_interval_ms": 10})
    db.execute(SHOP)
    service = flow.service()
    stopping = threading.Event()

    def has(count: int) -> bool:
        return bool(db.value("select count(*) from log.events") >= count)

    try:
        service.prepare()
        service.start()
        running = threading.Thread(target=service.supervise, args=(stopping,))
        running.start()
        for n in (1, 2):
            db.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'aqueduck bookmark'"
            )
            load(db, 100 * n - 99, 100 * n)
            wait_until(functools.partial(has, 100 * n), "all events are there", 90)
    finally:
        stopping.set()
        service.stop()
    running.join(30)
    assert [r["event"]["after"]["id"] for r in stored(flow, "postgres")] == list(range(1, 201))


def part(directory: Path, number: int) -> EventPart:
    path = directory / f"{number}.part"
    row = ["insert", "s", "t", 1, 1, 0, 1, number, '{"id":1}', "{}"]
    batch = pa.RecordBatch.from_arrays(
        [pa.array([cell], f.type) for cell, f in zip(row, EVENT_SCHEMA, strict=True)], schema=EVENT_SCHEMA
    )
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_file(out, EVENT_SCHEMA) as writer:
        writer.write_batch(batch)
    return EventPart(number, str(path), 1, path.stat().st_size)


@pytest.mark.parametrize("kind", ["postgres", pytest.param("ducklake", marks=pytest.mark.slow)])
def test_a_second_writer_of_the_slot_is_refused(db: Database, tmp_path: Path, kind: str) -> None:
    """P-E03: a service that lost the slot's lock without noticing does not deliver events that its successor delivered."""
    table = TableName("log", "events")
    lake = LakeConfig(catalog=f"sqlite:{tmp_path / 'l.sqlite'}", data_path=str(tmp_path / "d"))

    def made() -> EventsTable | LakeEvents:
        one = EventsTable(db.dsn, table, "s") if kind == "postgres" else LakeEvents(lake, table, "s")
        one.recover(one.load())
        return one

    with contextlib.closing(made()) as first, contextlib.closing(made()) as second:
        first.save(Bookmark(10, "c"))
        first.write([part(tmp_path, 1)], 20)
        first.save(Bookmark(20, "c"))
        second.write([part(tmp_path, 2)], 20)
        with pytest.raises(BookmarkError, match="another service"):
            second.save(Bookmark(20, "c"))
        assert first.load() == Bookmark(20, "c")
        second.recover(second.load())
        second.save(Bookmark(30, "c"))
        assert first.load() == Bookmark(30, "c")
    if kind == "postgres":
        assert db.value("select count(*) from log.events") == 1
    else:
        with open_lake(lake, read_only=True) as observer:
            assert observer.query("select count(*) from lake.log.events")[0] == [(1,)]


@pytest.mark.slow
def test_the_catalog_does_not_grow_with_every_bookmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-S32 for events: old bookmarks and small batches are moved out of the catalog now and then; a restart counts them."""
    monkeypatch.setattr(inlined, "ROWS_MAX", 8)
    lake = LakeConfig(catalog=f"sqlite:{tmp_path / 'l.sqlite'}", data_path=str(tmp_path / "d"))
    number = 0
    for _ in range(2):
        with contextlib.closing(LakeEvents(lake, TableName("main", "events"), "s")) as sink:
            sink.recover(sink.load())
            for _ in range(11):
                number += 1
                sink.write([part(tmp_path, number)], number)
                sink.save(Bookmark(number, "c", events=number))
            assert all(count <= 9 for count in sink._lake.memory.inlined_rows.values())
    with open_lake(lake, read_only=True) as observer:
        assert observer.query("select seq from lake.main.events order by 1")[0] == [
            (n,) for n in range(1, 23)
        ]
        tables = observer.query(
            "select table_name from __ducklake_metadata_lake.ducklake_inlined_data_tables"
        )[0]
        counts = [
            observer.query(f"select count(*) from __ducklake_metadata_lake.{t}")[0][0][0] for (t,) in tables
        ]
    assert max(counts) <= 10


def checked(flow: Flow) -> dict[str, tuple[bool, str]]:
    flow.write_config()
    config = load_events(flow.config_file)
    assert config is not None
    return {r.name: (r.ok, r.detail) for r in run_event_checks(config)}


def refusal(flow: Flow) -> AqueduckError:
    service = flow.service()
    try:
        with pytest.raises(AqueduckError) as caught:
            service.prepare()
    finally:
        service.stop()
    return caught.value


def test_check_probes_a_table_and_makes_nothing(db: Database, flow_of: FlowOf) -> None:
    """P-E07: whether the table would be created, fits the events, and may be written."""
    db.execute(SHOP)
    flow = flow_of(sink=sink_of("postgres"))
    assert checked(flow)["sink"] == (True, "log.events will be created")
    assert db.query("select from pg_namespace where nspname = 'log'") == []
    assert flow.once() == 0, flow.log()
    assert checked(flow)["sink"] == (True, "log.events can take events")
    flow = flow_of(sink=sink_of("ducklake"))
    ok, said = checked(flow)["sink"]
    assert ok
    assert "can be created" in said
    assert not (flow.directory / "lake.sqlite").exists()


def test_a_table_that_cannot_take_events_is_refused(db: Database, flow_of: FlowOf) -> None:
    """Bad input: columns that are missing, of another type, or that would need a value; jsonb and columns of one's own are fine."""
    db.execute(SHOP)
    db.execute("create schema log; create table log.events (seq text, commit_lsn pg_lsn, mine int not null)")
    flow = flow_of(sink=sink_of("postgres"))
    error = refusal(flow)
    assert isinstance(error, SinkTableError)
    assert "seq is text" in error.message
    assert "event is missing" in error.message
    assert "mine needs a value" in error.message
    assert checked(flow)["sink"][0] is False
    columns = ", ".join(f"{c.name} {c.postgres}".replace("json", "jsonb") for c in EVENT_COLUMNS)
    db.execute(f"drop table log.events; create table log.events (n bigserial primary key, {columns})")
    assert flow.once() == 0, flow.log()
    load(db, 1, 10)
    assert flow.once() == 0, flow.log()
    assert len(stored(flow, "postgres")) == 10


def test_a_table_of_events_in_partitions_does_not_feed_on_itself(db: Database, flow_of: FlowOf) -> None:
    """P-E03: a publication names partitions one by one; rows in them are no events, even in a partition that is attached later."""
    columns = ", ".join(f"{c.name} {c.postgres}" for c in EVENT_COLUMNS)
    db.execute(SHOP)
    db.execute(
        f"create schema log; create table log.events ({columns}) partition by range (seq);"
        "create table log.first partition of log.events for values from (0) to (1)"
    )
    flow = flow_of(sink=sink_of("postgres"))
    process = flow.fork()
    wait_until(flow.streams, "it streams", 60, log=flow.log)
    db.execute("insert into orders values (1)")
    wait_until(lambda: bool(db.query("select from log.first")), "the event is there", 60, log=flow.log)
    db.execute("create table log.rest partition of log.events default; insert into orders values (2), (3)")
    wait_until(lambda: bool(db.query("select from log.rest")), "the events are there", 60, log=flow.log)
    for n in range(4, 8):  # each would bring those of the one before
        db.execute(f"insert into orders values ({n})")
        wait_until(
            lambda: bool(db.query(f"select from log.events where event->'after'->>'id' = '{n}'")),  # noqa: B023 - used at once
            "the event is there",
            60,
            log=flow.log,
        )
    assert process.end(signal.SIGTERM) == 0, flow.log()
    found = "select table_name, event->'after'->>'id' from log.events order by commit_lsn, seq"
    assert db.query(found) == [("orders", str(n)) for n in range(1, 8)]


def test_a_role_that_may_not_write_gets_the_statement(db: Database, flow_of: FlowOf) -> None:
    """P-E07: the grant that is missing, in `check` and in the error of a run."""
    db.execute(SHOP)
    role = f"poor_{db.name}"
    db.execute(f"create role {role} login; create schema log")
    flow = flow_of(
        sink={
            "type": "postgres",
            "config": {"table": "log.events", "connection_url": f"{db.dsn} user={role}"},
        }
    )
    try:
        ok, said = checked(flow)["sink"]
        assert not ok
        assert "permission denied for schema log" in said
        db.execute(f"grant usage on schema log to {role}")
        assert "may not create in the schema" in checked(flow)["sink"][1]
        error = refusal(flow)
        assert "permission denied for schema log" in error.message
        assert "grant" in (error.hint or "")
    finally:
        db.execute(f"drop owned by {role}; drop role {role}")
