"""The reader of `postgres_cdc`, driven as Spark drives it but without one: offsets, limits, replay, rows."""

from __future__ import annotations

import datetime
import json
import uuid
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from aqueduck.model.errors import (
    ConfigError,
    NoKeyError,
    PrivilegeError,
    PublicationError,
    SchemaChangeError,
    SlotConflictError,
    SlotLostError,
    TableMissingError,
)
from aqueduck.model.schema import lsn_text, parse_lsn
from aqueduck.spark.formats.cdc_source import CdcReader, PostgresCdcSource
from aqueduck.spark.formats.spark_types import arrow_of
from tests.fix_postgres import Database, wait_until

Offset = dict[str, Any]


class Driver:
    """What Spark's planner and tasks do with a reader, in order."""

    def __init__(self, directory: Path, options: dict[str, str]) -> None:
        source = PostgresCdcSource({"stage_dir": str(directory), **options})
        self.schema = source.schema()
        reader = source.streamReader(self.schema)
        assert isinstance(reader, CdcReader)
        self.reader = reader

    def batch(self, start: Offset, end: Offset) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for partition in self.reader.partitions(start, end):
            for batch in self.reader.read(partition):
                assert batch.schema.equals(arrow_of(self.schema)), "Spark would refuse the batch"
                rows += batch.to_pylist()
        return rows

    def drain(self, start: Offset | None = None) -> tuple[list[list[dict[str, Any]]], Offset]:
        """All batches up to what is committed now, as with the trigger availableNow."""
        at = self.reader.initialOffset() if start is None else start
        self.reader.prepareForTriggerAvailableNow()
        batches = []
        while (end := self.reader.latestOffset(at, self.reader.getDefaultReadLimit())) != at:
            batches.append(self.batch(at, end))
            at = end
        return [batch for batch in batches if batch], at


Drive = Callable[..., Driver]


@pytest.fixture
def drive(db: Database, tmp_path: Path) -> Iterator[Drive]:
    """Makes readers of the slot `s` and the publication `p`, and stops them."""
    made: list[Driver] = []

    def make(**options: str) -> Driver:
        made.append(Driver(tmp_path, {"dsn": db.dsn, "slot": "s", "publication": "p", **options}))
        return made[-1]

    yield make
    for driver in made:
        driver.reader.stop()


@pytest.fixture
def orders(db: Database) -> Database:
    db.execute(
        "create table orders (id int primary key, total numeric(10,2), note text);"
        "create table items (id int primary key, name text);"
        "create publication p for all tables"
    )
    db.execute("select pg_create_logical_replication_slot('s', 'pgoutput')")
    return db


@pytest.fixture(params=["stream", "poll", pytest.param("auto", marks=pytest.mark.slow)])
def way(request: pytest.FixtureRequest, orders: Database) -> dict[str, str]:
    """Options that say how the slot of `orders` is read; with `auto` it has a backlog."""
    if request.param == "auto":
        orders.execute(
            "create table other (v text); insert into other select repeat('x', 1000) from generate_series(1, 4000)"
        )
    return {"capture": request.param, "catchup_bytes": "1m"}


def confirmed(db: Database) -> int:
    return parse_lsn(
        db.value("select confirmed_flush_lsn::text from pg_replication_slots where slot_name = 's'")
    )


def test_changes_of_all_tables_have_one_shape(orders: Database, drive: Drive, way: dict[str, str]) -> None:
    """P-E09, P-E10: however the slot is read, rows with both images as JSON, in the order of the stream, across tables."""
    orders.execute("insert into orders values (1, 9.50, 'ä\"b'); insert into items values (7, null)")
    orders.execute("update orders set note = null; delete from items; truncate orders, items")
    orders.execute("alter table items replica identity full; insert into items values (8, 'x')")
    orders.execute("update items set name = 'y'")
    driver = drive(tables="orders, items", **way)
    [rows], end = driver.drain()
    assert [(r["op"], r["table"]) for r in rows] == [
        ("insert", "orders"), ("insert", "items"), ("update", "orders"), ("delete", "items"),
        ("truncate", "orders"), ("truncate", "items"), ("insert", "items"), ("update", "items"),
    ]  # fmt: skip
    images = [(r["before"] and json.loads(r["before"]), r["after"] and json.loads(r["after"])) for r in rows]
    assert images == [
        (None, {"id": 1, "total": "9.50", "note": 'ä"b'}),
        (None, {"id": 7, "name": None}),
        (None, {"id": 1, "total": "9.50", "note": None}),
        ({"id": 7}, None),
        (None, None),
        (None, None),
        (None, {"id": 8, "name": "x"}),
        ({"id": 8, "name": "x"}, {"id": 8, "name": "y"}),
    ]
    assert {r["schema"] for r in rows} == {"public"}
    assert [r["seq"] for r in rows] == [0, 1, 0, 1, 2, 3, 0, 0]
    assert rows[0]["xid"] == rows[1]["xid"] != rows[2]["xid"]
    assert all(r["lsn"] <= r["commit_lsn"] < parse_lsn(end["lsn"]) for r in rows)
    assert rows[0]["lsn"] < rows[1]["lsn"] < rows[2]["lsn"]
    assert rows[0]["commit_lsn"] == rows[1]["commit_lsn"] < rows[2]["commit_lsn"]
    age = datetime.datetime.now(datetime.UTC) - rows[0]["commit_time"]
    assert datetime.timedelta() <= age < datetime.timedelta(minutes=5)


@pytest.mark.slow
def test_a_slot_of_test_decoding_gives_the_same_rows(system_db: Database, tmp_path: Path) -> None:
    """P-E09: its lines become rows like those of pgoutput, batch by batch, including batches that are read again."""
    db = system_db
    db.execute("create table items (id int primary key, name text); create publication p for table items")
    options = {"dsn": db.dsn, "publication": "p", "max_rows_per_trigger": "5", "create": "true"}
    wire = Driver(tmp_path / "wire", {**options, "slot": "wire"})
    texts = Driver(tmp_path / "text", {**options, "slot": "text", "plugin": "test_decoding"})
    again = Driver(tmp_path / "text", {**options, "slot": "text", "plugin": "test_decoding"})
    try:
        starts = [driver.reader.initialOffset() for driver in (wire, texts)]
        for n in range(1, 30):
            db.execute(
                f"insert into items values ({n}, E'it''s\\n{n}'); update items set name = null where id = {n - 1}"
            )
        db.execute("delete from items where id = 3; truncate items")
        expected = [row for batch in wire.drain(starts[0])[0] for row in batch]
        batches, _ = texts.drain(starts[1])
        rows = [row for batch in batches for row in batch]
        assert len(rows) == 59
        members = ("op", "schema", "table", "xid", "seq", "commit_time", "before", "after")
        assert [[r[m] for m in members] for r in rows] == [[r[m] for m in members] for r in expected]
        assert max(len(batch) for batch in batches) <= 5
        texts.reader.stop()
        middle = {**starts[1], "lsn": lsn_text(batches[4][-1]["commit_lsn"] + 1)}
        assert again.batch(starts[1], middle) == [row for batch in batches[:5] for row in batch]
    finally:
        for driver in (wire, texts, again):
            driver.reader.stop()


def test_an_envelope_gives_whole_events_with_their_keys(orders: Database, drive: Drive) -> None:
    """P-E10: key and value as a Kafka sink wants them; only of the tables that are named."""
    orders.execute("insert into orders values (1, 2, 'n'); insert into items values (7, 'x'); truncate items")
    [rows], _ = drive(envelope="debezium", tables="items").drain()
    assert [r["key"] for r in rows] == ['{"id":7}', None]
    events = [json.loads(r["value"]) for r in rows]
    assert [(e["op"], e["after"]) for e in events] == [("c", {"id": 7, "name": "x"}), ("t", None)]
    assert events[0]["source"]["db"] == orders.name


def test_a_named_table_has_its_own_columns_and_types(db: Database, drive: Drive) -> None:
    """Typed rows: the table's columns, what happened, and what an update did not send; a changed key is two rows."""
    db.execute(
        "create table t (id int8 primary key, n numeric(10,2), d date, ts timestamptz, u uuid, b bytea, f float8,"
        " ok bool, j jsonb, a int[], big text); alter table t alter big set storage external"
    )
    driver = drive(table="t", create="true")
    start = driver.reader.initialOffset()
    key = uuid.uuid4()
    db.execute(
        "insert into t values (1, 1.5, '2024-02-29', '2024-01-01 12:00+01', %s, '\\x00ff', 0.5, true,"
        " '{\"k\": 1}', '{1,null}', repeat('x', 9000))",
        (key,),
    )
    db.execute("update t set n = null")
    db.execute("update t set id = 2")
    db.execute("delete from t; truncate t")
    [rows], _ = driver.drain(start)
    meta = [(r["_op"], r["id"], r["_unchanged"]) for r in rows]
    assert meta == [
        ("insert", 1, None),
        ("update", 1, ["big"]),
        ("delete", 1, None),
        ("update", 2, ["big"]),
        ("delete", 2, None),
        ("truncate", None, None),
    ]
    first = {name: value for name, value in rows[0].items() if not name.startswith("_")}
    assert first == {
        "id": 1, "n": Decimal("1.50"), "d": datetime.date(2024, 2, 29),
        "ts": datetime.datetime(2024, 1, 1, 11, tzinfo=datetime.UTC), "u": str(key), "b": b"\x00\xff", "f": 0.5,
        "ok": True, "j": '{"k": 1}', "a": "[1,null]", "big": "x" * 9000,
    }  # fmt: skip
    assert rows[4]["n"] is None
    order = [(r["_commit_lsn"], r["_seq"]) for r in rows]
    assert order == sorted(order)


def test_a_full_identity_brings_what_an_update_left_out(db: Database, drive: Drive) -> None:
    """With the whole old row in the stream nothing is missing, and a delete has every column."""
    db.execute(
        "create table t (id int primary key, v int, big text); alter table t alter big set storage external;"
        "alter table t replica identity full"
    )
    driver = drive(table="public.t", create="true")
    start = driver.reader.initialOffset()
    db.execute("insert into t values (1, 1, repeat('x', 9000))")
    db.execute("update t set v = 2")
    db.execute("delete from t")
    [rows], _ = driver.drain(start)
    assert [(r["_op"], r["v"], len(r["big"]), r["_unchanged"]) for r in rows] == [
        ("insert", 1, 9000, None), ("update", 2, 9000, None), ("delete", 2, 9000, None),
    ]  # fmt: skip


def test_limits_cut_batches_at_transactions(orders: Database, drive: Drive) -> None:
    """Admission control: at most so many rows a batch, unless one transaction has more; nothing is lost or doubled."""
    first = 0
    for size in (3, 4, 2, 9, 1, 1, 1, 1):
        orders.execute(f"insert into items select g, 'x' from generate_series({first}, {first + size - 1}) g")
        first += size
    batches, _ = drive(maxRowsPerTrigger="5", table="items").drain()
    sizes = [len(b) for b in batches]
    assert sum(sizes) == 22
    assert [s for s in sizes if s > 5] == [9]
    ids = [r["id"] for b in batches for r in b]
    assert sorted(ids) == [i for (i,) in orders.query("select id from items order by id")]
    commits = [{r["_commit_lsn"] for r in b} for b in batches]
    assert sum(map(len, commits)) == len(set().union(*commits)), "no transaction is in two batches"


def test_all_available_ignores_the_limits(orders: Database, drive: Drive) -> None:
    """The trigger `once` asks for everything, regardless of the options."""
    for i in range(6):
        orders.execute("insert into items values (%s, 'x')", (i,))
    driver = drive(max_rows_per_trigger="2", table="items")
    start = driver.reader.initialOffset()
    end = driver.reader.latestOffset(start, ReadAllAvailable())
    assert len(driver.batch(start, end)) == 6


def test_a_repeated_batch_has_the_same_rows(orders: Database, drive: Drive, way: dict[str, str]) -> None:
    """Offsets are replayable: after a restart, a batch that was not committed is read again exactly, whatever came since."""
    orders.execute("insert into items values (1, 'a')")
    first = drive(tables="orders, items", **way)
    start = first.reader.initialOffset()
    orders.execute("insert into items values (2, 'b'); insert into orders values (1, 1, 'c')")
    [rows], end = first.drain(start)
    first.reader.stop()
    orders.execute("insert into items values (3, 'c')")
    again = drive(tables="orders, items", **way)
    assert again.batch(start, end) == rows
    later = again.reader.latestOffset(end, again.reader.getDefaultReadLimit())
    assert [json.loads(r["after"])["id"] for r in again.batch(end, later)] == [3]


def test_only_what_spark_committed_is_confirmed(orders: Database, drive: Drive, way: dict[str, str]) -> None:
    """Guarantee 3: the slot stays where it is until the batch is durable, then it moves."""
    driver = drive(**way)
    start = driver.reader.initialOffset()
    before = confirmed(orders)
    orders.execute("insert into items values (1, 'a')")
    _, end = driver.drain(start)
    assert confirmed(orders) == before
    driver.reader.commit(end)
    wait_until(lambda: confirmed(orders) == parse_lsn(end["lsn"]), "the slot is confirmed")


def test_an_idle_source_moves_the_offset(orders: Database, drive: Drive) -> None:
    """Hazard 4: changes of other tables do not pin WAL; the offset moves without rows, and the slot with it."""
    driver = drive(table="items", idle_seconds="1")
    start = driver.reader.initialOffset()
    orders.execute("insert into orders select g, g, 'x' from generate_series(1, 1000) g")
    limit = driver.reader.getDefaultReadLimit()
    ends: list[Offset] = []

    def moved() -> bool:
        ends.append(driver.reader.latestOffset(start, limit))
        return ends[-1] != start

    wait_until(moved, "the offset moves")
    assert driver.batch(start, ends[-1]) == []
    driver.reader.commit(ends[-1])
    wait_until(lambda: confirmed(orders) == parse_lsn(ends[-1]["lsn"]), "the slot moves")


def test_a_run_that_ends_with_what_is_there_does_end(orders: Database, drive: Drive) -> None:
    """AvailableNow stops at its target although changes keep coming, in the middle of what is staged if need be."""
    driver = drive(table="items")
    start = driver.reader.initialOffset()
    orders.execute("insert into items values (1, 'a')")
    driver.reader.prepareForTriggerAvailableNow()
    for i in range(2, 30):
        orders.execute("insert into items values (%s, 'later')", (i,))
    limit = driver.reader.getDefaultReadLimit()
    end = driver.reader.latestOffset(start, limit)
    assert [r["id"] for r in driver.batch(start, end)] == [1]
    assert driver.reader.latestOffset(end, limit) == end
    rest, _ = driver.drain(end)
    assert [r["id"] for batch in rest for r in batch] == list(range(2, 30))


def test_a_new_column_asks_for_a_restart_and_then_is_there(orders: Database, drive: Drive) -> None:
    """Nothing is lost silently: the running query stops by name, the next one has the column, a dropped one is no problem."""
    driver = drive(table="items")
    start = driver.reader.initialOffset()
    orders.execute("insert into items values (1, 'a')")
    orders.execute("alter table items add column price int; insert into items values (2, 'b', 5)")
    with pytest.raises(SchemaChangeError, match="new column price"):
        driver.drain(start)
    driver.reader.stop()
    again = drive(table="items")
    [rows], _ = again.drain(start)
    assert [(r["id"], r["name"], r["price"]) for r in rows] == [(1, "a", None), (2, "b", 5)]
    again.reader.stop()
    orders.execute("alter table items drop column price")
    last = drive(table="items")
    [rows], _ = last.drain(start)
    assert [(r["id"], r["name"]) for r in rows] == [(1, "a"), (2, "b")]
    assert "price" not in rows[0]


def test_the_stage_is_gone_when_the_query_ends(orders: Database, drive: Drive, tmp_path: Path) -> None:
    """Staged changes are scratch: a query removes its own, and those of a dead query on the same slot."""
    driver = drive()
    orders.execute("insert into items values (1, 'a')")
    driver.drain()
    [place] = tmp_path.glob("aqueduck-cdc-s-*")
    driver.reader.stop()
    assert list(place.iterdir()) == []
    (place / "of-a-dead-query").mkdir()
    again = drive()
    again.drain()
    assert not (place / "of-a-dead-query").exists()


# -- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slot": "No Slot"}, "the option slot must be"),
        ({"tabel": "x"}, "has no option tabel"),
        ({"max_rows_per_trigger": "many"}, "max_rows_per_trigger must be a whole number"),
        ({"max_bytes_per_trigger": "0"}, "max_bytes_per_trigger must be a number of bytes"),
        ({"envelope": "avro"}, "envelope must be one of"),
        ({"create": "maybe"}, "create must be true or false"),
        ({"starting_lsn": "12"}, "starting_lsn must be a position"),
        ({"table": "a", "tables": "b"}, "cannot be combined with"),
        ({"table": "a b"}, "the option table must be a table"),
        ({"capture": "push"}, "capture must be one of stream, poll, auto"),
        ({"plugin": "wal2json"}, "plugin must be one of pgoutput, test_decoding"),
        ({"plugin": "test_decoding", "capture": "stream"}, "requires the option capture = poll"),
        ({"publication": ""}, "requires the option publication"),
        (
            {"dsn": "", "dsn_env": "AQUEDUCK_NO_SUCH"},
            "the option dsn_env: the variable AQUEDUCK_NO_SUCH is not set",
        ),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, str], message: str) -> None:
    """Options are checked when the query is created, and the error names the option and its values."""
    given = {"dsn": "host=127.0.0.1 password=hunter2", "slot": "s", "publication": "p", **options}
    with pytest.raises(ConfigError, match=message) as caught:
        PostgresCdcSource(given).schema()
    assert "hunter2" not in str(caught.value)


def test_a_missing_slot_is_an_error_unless_it_may_be_made(db: Database, drive: Drive) -> None:
    """P-E06: the message has the statement that makes it."""
    db.execute("create table t (id int primary key); create publication p for table t")
    with pytest.raises(SlotLostError, match="pg_create_logical_replication_slot"):
        drive().reader.initialOffset()
    assert drive(create="true").reader.initialOffset()["lsn"]
    assert db.value("select plugin from pg_replication_slots where slot_name = 's'") == "pgoutput"


def test_a_publication_is_made_only_for_named_tables(db: Database, drive: Drive) -> None:
    """Which tables it should have is never guessed, and one that would break the application's updates is refused."""
    db.execute("create table t (id int primary key); create table bare (id int)")
    with pytest.raises(ConfigError, match="not said which tables"):
        drive(create="true").reader.initialOffset()
    with pytest.raises(NoKeyError, match="replica identity"):
        drive(create="true", tables="bare").reader.initialOffset()
    drive(create="true", tables="t").reader.initialOffset()
    assert db.query("select tablename::text from pg_publication_tables where pubname = 'p'") == [("t",)]


def test_a_publication_without_the_table_is_refused(orders: Database, drive: Drive) -> None:
    """Instead of a stream that stays empty: the statement that adds the table."""
    orders.execute("drop publication p; create publication p for table orders")
    with pytest.raises(PublicationError, match=r'alter publication "p" add table "public"\."items"'):
        drive(table="items").reader.initialOffset()
    with pytest.raises(TableMissingError):
        drive(table="nothing")
    orders.execute("drop publication p")
    with pytest.raises(PublicationError, match="does not exist"):
        drive(table="items").reader.initialOffset()


def test_a_slot_of_another_plugin_is_refused(orders: Database, drive: Drive) -> None:
    """Reading it would give bytes that mean something else."""
    orders.execute("select pg_drop_replication_slot('s')")
    orders.execute("select pg_create_physical_replication_slot('s')")
    with pytest.raises(SlotConflictError, match="physical replication, not a permanent one for pgoutput"):
        drive().reader.initialOffset()
    orders.execute("select pg_drop_replication_slot('s')")  # it belongs to no database, and would stay
    orders.execute("select pg_create_logical_replication_slot('s', 'pgoutput')")
    with pytest.raises(SlotConflictError, match="for pgoutput, not a permanent one for test_decoding"):
        drive(plugin="test_decoding").reader.initialOffset()


def test_missing_rights_are_named(orders: Database, drive: Drive, role: str) -> None:
    """A role without REPLICATION gets the statement that grants it."""
    orders.execute("select pg_drop_replication_slot('s')")
    with pytest.raises(PrivilegeError, match="replication"):
        drive(dsn=orders.dsn_for(role), create="true").reader.initialOffset()


def test_a_checkpoint_never_skips_over_a_gap(orders: Database, drive: Drive) -> None:
    """Hazard 10: a slot that is gone, re-created, or of another cluster stops a restarted query."""
    driver = drive()
    start = driver.reader.initialOffset()
    orders.execute("insert into items values (1, 'a')")
    driver.drain(start)
    driver.reader.stop()
    limit = driver.reader.getDefaultReadLimit()
    with pytest.raises(SlotConflictError, match="another PostgreSQL cluster"):
        drive().reader.latestOffset({**start, "system": "1"}, limit)
    with pytest.raises(SlotLostError, match="beyond the server"):
        drive().reader.latestOffset({**start, "lsn": "FF/0"}, limit)
    orders.execute("select pg_drop_replication_slot('s')")
    with pytest.raises(SlotLostError, match="does not exist, but the checkpoint"):
        drive(create="true").reader.latestOffset(start, limit)
    orders.execute("select pg_create_logical_replication_slot('s', 'pgoutput')")
    with pytest.raises(SlotLostError, match="re-created or moved"):
        drive().reader.latestOffset(start, limit)


def test_batches_fit_sparks_schema(orders: Database, drive: Drive) -> None:
    """A subset of columns that the user's own schema names is what tasks send."""
    from pyspark.sql.types import LongType, StringType, StructField, StructType

    orders.execute("insert into items values (1, 'a')")
    source = PostgresCdcSource({"dsn": orders.dsn, "slot": "s", "publication": "p", "table": "items"})
    schema = StructType([StructField("name", StringType()), StructField("id", LongType())])
    reader = source.streamReader(schema)
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()  # type: ignore[attr-defined]
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    [partition] = reader.partitions(start, end)
    [batch] = reader.read(partition)
    assert isinstance(batch, pa.RecordBatch)
    assert batch.schema.equals(arrow_of(schema))
    assert batch.to_pylist() == [{"name": "a", "id": 1}]
    reader.stop()
