"""The reader of `postgres_table`, driven as Spark drives it but without one: consistency, filters, and its holder."""

from __future__ import annotations

import datetime
import os
import pickle
import signal
from decimal import Decimal
from typing import Any

import duckdb
import pytest
from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, In, IsNull, LessThanOrEqual, StringStartsWith

from aqueduck.model.errors import (
    AuthenticationError,
    ConfigError,
    CopyDisturbedError,
    PrivilegeError,
    SnapshotGoneError,
    TableMissingError,
)
from aqueduck.model.schema import Column
from aqueduck.postgres.copy import snapshot_holder
from aqueduck.spark.formats.pushed_filters import lake_condition, postgres_condition
from aqueduck.spark.formats.spark_types import arrow_of
from aqueduck.spark.formats.table_source import PostgresTableSource, TableReader
from tests.fix_postgres import Database, wait_until

ROWS = 4000


@pytest.fixture
def table(db: Database) -> Database:
    db.execute(
        "create table t (id int primary key, v text, n numeric(8,2), at timestamptz);"
        f"insert into t select g, repeat('x', 200), g, '2024-01-01' from generate_series(1, {ROWS}) g"
    )
    return db


def made(
    db: Database, *, filters: list[Filter] | None = None, **options: str
) -> tuple[TableReader, list[Any]]:
    """A planned read: its reader as tasks get it, and its partitions."""
    source = PostgresTableSource({"dsn": db.dsn, "table": "t", "partition_bytes": "128k", **options})
    reader = source.reader(source.schema())
    assert isinstance(reader, TableReader)
    if filters is not None:
        assert list(reader.pushFilters(filters)) == filters, "Spark applies them once more"
    partitions = reader.partitions()
    return pickle.loads(pickle.dumps((reader, list(partitions))))  # type: ignore[no-any-return]


def rows_of(reader: TableReader, partitions: list[Any]) -> list[dict[str, Any]]:
    expected = arrow_of(reader._schema)
    batches = [batch for partition in partitions for batch in reader.read(partition)]
    assert all(batch.schema.equals(expected) for batch in batches), "Spark would refuse the batch"
    return [row for batch in batches for row in batch.to_pylist()]


def holders(db: Database) -> list[int]:
    rows = db.query(
        "select pid from pg_stat_activity where application_name = 'aqueduck read' and datname = %s"
        " and state = 'idle in transaction'",
        (db.name,),
    )
    return [pid for (pid,) in rows]


def test_all_parts_see_one_moment(table: Database) -> None:
    """What is committed after the plan is in no part: not an insert, not an update, not a delete."""
    reader, partitions = made(table)
    assert len(partitions) > 3
    table.execute("insert into t values (0, 'late', 0, now()); update t set v = 'late' where id <= 100")
    table.execute(f"delete from t where id > {ROWS - 100}")
    rows = rows_of(reader, partitions)
    assert sorted(row["id"] for row in rows) == list(range(1, ROWS + 1))
    assert {row["v"] for row in rows} == {"x" * 200}
    assert rows[0]["n"] == Decimal(rows[0]["id"])
    assert {row["at"] for row in rows} == {datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)}
    assert len(holders(table)) == 1


def test_the_holder_leaves_when_all_parts_are_read(table: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is not kept from cleaning up: the snapshot ends soon after the last part."""
    monkeypatch.setattr(snapshot_holder, "LINGER_SECONDS", 0.5)
    reader, partitions = made(table)
    assert len(holders(table)) == 1
    process = snapshot_holder._holders[-1]
    rows_of(reader, partitions)
    wait_until(lambda: process.poll() is not None, "the holder ends", seconds=90)
    assert holders(table) == []
    with pytest.raises(SnapshotGoneError, match="load the table again"):
        rows_of(reader, partitions)


def test_an_abandoned_read_does_not_stay(table: Database) -> None:
    """A plan that is only explained holds its snapshot for `snapshot_seconds`, not for ever."""
    reader, partitions = made(table, snapshot_seconds="1")
    wait_until(lambda: holders(table) == [], "the snapshot ends")
    with pytest.raises(SnapshotGoneError):
        rows_of(reader, partitions[:1])


def test_a_lost_holder_is_a_named_error(table: Database) -> None:
    """Rows of two moments are never mixed: without the snapshot the read fails."""
    reader, partitions = made(table)
    assert rows_of(reader, partitions[:1])
    os.kill(snapshot_holder._holders[-1].pid, signal.SIGKILL)
    wait_until(lambda: holders(table) == [], "the snapshot ends")
    with pytest.raises(SnapshotGoneError):
        rows_of(reader, partitions[1:2])


def test_a_rewritten_table_is_not_read_as_empty(table: Database) -> None:
    """TRUNCATE makes a table look empty to older snapshots; the read says so instead."""
    reader, partitions = made(table)
    table.execute("truncate t")
    with pytest.raises(CopyDisturbedError, match="truncated or rewritten"):
        rows_of(reader, partitions)


def test_a_name_that_went_to_another_column_is_not_read_as_the_old_one(table: Database) -> None:
    """Tasks read columns by their names of now; values of two columns are never mixed."""
    reader, partitions = made(table)
    assert rows_of(reader, partitions[:1])
    table.execute("alter table t rename v to w; alter table t add v text default 'another'")
    with pytest.raises(CopyDisturbedError, match="was altered"):
        rows_of(reader, partitions[1:2])


def test_another_table_under_the_same_name_is_not_read(table: Database) -> None:
    """A table that is put in the place of another one is not taken for it."""
    reader, partitions = made(table)
    table.execute("create table other (like t); insert into other select * from t limit 10")
    table.execute("alter table t rename to was; alter table other rename to t")
    with pytest.raises(CopyDisturbedError, match="was renamed"):
        rows_of(reader, partitions[:1])


def test_partitions_of_a_table_are_all_read(db: Database) -> None:
    """A partitioned table is the sum of its leaves; small ones share a task."""
    db.execute("create table t (id int, v text) partition by range (id)")
    for part in range(5):
        db.execute(f"create table t{part} partition of t for values from ({part * 10}) to ({part * 10 + 10})")
    db.execute("insert into t select g, 'x' from generate_series(0, 49) g")
    reader, partitions = made(db)
    assert len(partitions) == 1
    assert sorted(row["id"] for row in rows_of(reader, partitions)) == list(range(50))


def test_filters_are_applied_by_the_server(table: Database) -> None:
    """Rows that a filter leaves out never leave the server."""
    wanted: list[Filter] = [
        GreaterThan(("id",), 10), LessThanOrEqual(("n",), Decimal("20.00")), In(("id",), (12, 15, 21)),
        LessThanOrEqual(("at",), datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)),
        StringStartsWith(("v",), "xx"),
    ]  # fmt: skip
    reader, partitions = made(table, filters=wanted)
    assert sorted(row["id"] for row in rows_of(reader, partitions)) == [12, 15]


def test_only_safe_filters_become_conditions() -> None:
    """Filters that the server might judge differently from Spark, or not understand, are left to Spark."""
    columns = {
        "t": Column("t", 25, -1),
        "i": Column("i", 23, -1),
        "u": Column("u", 2950, -1),
        "r": Column("r", 1700, -1),
    }
    unsafe: list[Filter] = [
        GreaterThan(("t",), "a"),  # the server's collation is not the order of bytes
        EqualTo(("u",), "no uuid"),
        EqualTo(("i",), "5"),
        EqualTo(("r",), Decimal(1)),  # without a scale it is text in Spark
        EqualTo(("t", "inside"), 1),
        EqualTo(("other",), 1),
        In(("i",), (1, "2")),
    ]
    assert postgres_condition(unsafe, columns) is None
    assert (
        postgres_condition([EqualTo(("t",), "o'b\\"), IsNull(("i",))], columns)
        == "\"t\" = e'o''b\\\\' and \"i\" is null"
    )
    assert lake_condition([]) == "true"
    day = datetime.date(2024, 1, 2)
    assert lake_condition([EqualTo(("d",), day), EqualTo(("b",), True)]) == (
        "\"d\" = cast('2024-01-02' as date) and \"b\" = cast('true' as boolean)"
    )


@pytest.mark.parametrize(
    ("kind", "stored", "asked"),
    [
        ("decimal(38,0)", "123456789012345678901234567890", "123456789012345678901234567890"),
        ("decimal(38,0)", "123456789012345678901234567890", "7"),
        ("decimal(38,0)", "100000000000000000000", "1E+20"),
        ("decimal(38,18)", "99999999999999999999.5", "1.000000000000000000"),
        ("decimal(3,3)", "0.125", "0.125"),
        ("decimal(10,2)", "-12.50", "-12.50"),
        ("decimal(38,38)", "0.1", "1E-38"),
    ],
)
def test_a_decimal_is_compared_with_all_of_its_digits(kind: str, stored: str, asked: str) -> None:
    """A pushed filter works for every value that the column can hold, and finds equal values."""
    con = duckdb.connect()
    con.execute(f"create table t as select cast('{stored}' as {kind}) as d")
    for filters in ([EqualTo(("d",), Decimal(asked))], [GreaterThan(("d",), Decimal(asked))]):
        condition = lake_condition(filters)
        assert condition != "true", "it is pushed"
        expected = Decimal(stored) == Decimal(asked) if "=" in condition else Decimal(stored) > Decimal(asked)
        assert con.execute(f"select count(*) from t where {condition}").fetchall() == [(int(expected),)]


def test_a_decimal_that_duckdb_cannot_hold_is_left_to_spark() -> None:
    """More than 38 digits, and what is no number."""
    for text in ("1E+38", "1E-39", "NaN", "Infinity"):
        assert lake_condition([EqualTo(("d",), Decimal(text))]) == "true"


def test_columns_and_names_are_checked_before_the_read(table: Database, role: str) -> None:
    """Bad input: a missing column, table or right is an error of the plan, with the next step in it."""
    reader, partitions = made(table, columns="v, id")
    assert list(rows_of(reader, partitions)[0]) == ["v", "id"]
    with pytest.raises(ConfigError, match="has no column nope"):
        made(table, columns="nope")
    with pytest.raises(TableMissingError):
        made(table, table="missing")
    with pytest.raises(ConfigError, match="partition_bytes must be"):
        made(table, partition_bytes="-1")
    with pytest.raises(PrivilegeError, match=r'grant select on "public"\."t"'):
        made(table, dsn=table.dsn_for(role))


def test_the_holder_says_why_it_cannot_hold(table: Database) -> None:
    """An error of the process that holds the snapshot keeps its type."""
    with pytest.raises(AuthenticationError):
        snapshot_holder.hold_snapshot(table.dsn_for("nobody at all"), 1, 5)
