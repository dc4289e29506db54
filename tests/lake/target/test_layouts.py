"""Targets that people partition and sort: files are written per partition, whoever writes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from aqueduck.lake.commit.commit import TableFailed
from aqueduck.lake.session import partition_files
from aqueduck.lake.upkeep.orphans import remove_orphans
from aqueduck.model.errors import LakeError, PartitionedTargetError, PartitionValueError
from aqueduck.model.schema import TableName
from tests.docs.test_docs import blocks
from tests.fix_lake import Lake
from tests.fix_postgres import Database
from tests.flow import GROUP, Flow
from tests.layouts import files_of, misplaced, unsorted

ROWS = 3000
KEYS = {
    "tenant": ["tenant"],
    "year(made), month(made)": ["year(made)", "month(made)"],
    "bucket(4, id)": ["(murmur3_32(id) & 2147483647) % 4"],
    "tenant, day(d), hour(tz)": ["tenant", "day(d)", "hour(tz)"],
    "lower, small, price": ["lower", "small", "price"],
    "real": ["real"],
    "bucket(3, tenant), tenant": ["(murmur3_32(tenant) & 2147483647) % 3", "tenant"],
    "tenant, month(made)": ["tenant", "month(made)"],
}
ODD = [
    "",
    "null",
    "NULL",
    "__HIVE_DEFAULT_PARTITION__",
    "a/b",
    "a=b",
    "50%",
    "%2F",
    "ü€😀",
    " x ",
    "a+b",
    ".",
    "..",
    "'q'",
    "[*?]",
]


COLUMNS = (
    "id int primary key, tenant text, made timestamp, d date, tz timestamptz, small smallint,"
    ' price numeric(10, 2), "real" real, "lower" boolean, pad text default repeat(\'x\', 20)'
)


@pytest.fixture(autouse=True)
def _large_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every task's share of a partition is large enough for a file."""
    monkeypatch.setattr(partition_files, "SHARE_BYTES_MIN", 1)


@pytest.fixture
def flow(db: Database, tmp_path: Path) -> Iterator[Flow]:
    """One table."""
    db.execute(f"create table t ({COLUMNS})")
    with Flow(db, tmp_path, ["t"]) as flow:
        yield flow


def fill(db: Database, table: str = "t", rows: int = ROWS) -> None:
    """Rows of three tenants, three months on both sides of 1970, and NULL in every column that may have it."""
    db.execute(
        f"insert into {table} select i, (array['a', 'b', null])[1 + i % 3],"
        " case when i % 5 > 0 then timestamp '1969-11-30 23:00' + i % 3 * interval '1 month' end,"
        " case when i % 7 > 0 then date '1965-03-01' + i % 2 end,"
        " case when i % 2 > 0 then timestamptz '2024-03-31 00:30+02' + i % 4 * interval '1 hour' end,"
        " (i % 2)::smallint, (i % 2)::numeric / 4, (i % 2)::real / 3, i % 2 = 0"
        f" from generate_series(0, {rows - 1}) i"
    )


def same(flow: Flow, schema: str = "stream", table: str = "t") -> None:
    """Source rows are lake rows."""
    columns = "id, tenant, made::text, d::text, extract(epoch from tz)::bigint, small, price::text, pad"
    source = flow.db.observer.execute(f"select {columns} from {table} order by id").fetchall()
    lake = flow.read(
        "select id, tenant, made::varchar, d::varchar, epoch(tz)::bigint, small, price::varchar, pad"
        f" from lake.{schema}.{table} order by id"
    )
    assert lake == source


@pytest.mark.parametrize("tasks", [True, False])
def test_every_file_has_the_rows_of_one_partition(db: Database, tmp_path: Path, tasks: bool) -> None:
    """Tasks, driver and copies write files by partition, for each transform; updates move rows between partitions."""
    tables = {f"t{n}": keys for n, keys in enumerate(KEYS)}
    for table in tables:
        db.execute(f"create table {table} ({COLUMNS})")
    with Flow(db, tmp_path, list(tables)) as flow:
        for table, keys in tables.items():
            flow.lay_out(table, f"set partitioned by ({keys})", "set sorted by (id)")
            fill(db, table)
        flow.catch_up(tasks=tasks)
        for table in tables:
            same(flow, "stream", table)
            db.execute(
                f"update {table} set tenant = 'c', made = made + interval '1 year', small = 7 where id % 4 = 0"
            )
            db.execute(f"delete from {table} where id % 11 = 0")
        flow.catch_up(tasks=tasks)
        for table, keys in tables.items():
            if tasks:
                flow.copy(table, chunk_bytes=1 << 18)
            for schema in ["stream", "copied"] if tasks else ["stream"]:
                same(flow, schema, table)
                assert misplaced(flow.read, schema, table, KEYS[keys]) == [], keys
                assert unsorted(flow.read, schema, table, "id") == [], keys
                assert files_of(flow.read, schema, table), "there are files"


def test_odd_values_are_partitions_like_others(flow: Flow) -> None:
    """DuckDB takes some texts in a path for NULL: rows with those are inserted by DuckLake."""
    flow.lay_out("t", "set partitioned by (tenant)")
    listed = ", ".join("'" + value.replace("'", "''") + "'" for value in ODD)
    flow.db.execute(
        f"insert into t (id, tenant) select i, (array[{listed}])[1 + i % {len(ODD)}] from generate_series(1, 450) i"
    )
    flow.catch_up(tasks=True)
    flow.copy("t")
    for schema in ("stream", "copied"):
        same(flow, schema)
        assert misplaced(flow.read, schema, "t", ["tenant"]) == []
        for value in ODD:
            text = value.replace("'", "''")
            assert flow.read(f"select count(*) from lake.{schema}.t where tenant = '{text}'") == [(30,)], (
                value
            )


def test_small_shares_gather_in_the_catalog(flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of many partitions writes a file for each large one; the rows of all others are inlined together."""
    monkeypatch.setattr(partition_files, "SHARE_BYTES_MIN", 10_000)
    flow.lay_out("t", "set partitioned by (tenant)")
    for batch, tasks in enumerate([True, False]):
        flow.db.execute(
            "insert into t (id, tenant) select i, case when i % 2 = 0 then 'large' else 'small ' || i % 400 end"
            f" from generate_series({batch * 1000 + 1}, {batch * 1000 + 1000}) i"
        )
        flow.catch_up(tasks=tasks)
        same(flow)
        files = files_of(flow.read, "stream", "t")
        assert {values for _, values in files.values()} == {("large",)}
        assert len(files) == batch + 1


def test_a_layout_that_changes_while_tasks_write_is_respected(flow: Flow) -> None:
    """Files that were written for other partitions are not added: DuckLake inserts their rows."""
    flow.lay_out("t", "set partitioned by (tenant)")
    for change, keys in (
        ("set partitioned by (bucket(2, id))", ["(murmur3_32(id) & 2147483647) % 2"]),
        ("set partitioned by (month(made))", ["month(made)"]),
        ("reset partitioned by", []),
    ):
        fill(flow.db)
        flow.session.execute(f"alter table lake.stream.t {change}")  # the tasks are not told
        flow.catch_up(tasks=True)
        same(flow)
        flow.db.execute("truncate t")
        if keys:
            assert misplaced(flow.read, "stream", "t", keys) == []
        flow.catch_up(tasks=True)


def test_a_renamed_and_widened_partition_column_stays_one(flow: Flow) -> None:
    """Files from before keep their rows, and new ones have the new name; a dropped one is refused with its way out."""
    flow.lay_out("t", "set partitioned by (small)")
    fill(flow.db)
    flow.catch_up(tasks=True)
    flow.session.execute("alter table lake.stream.t alter small set data type integer")
    flow.session.execute("alter table lake.stream.t rename small to little")
    same_rows = "select count(*), count(distinct little), sum(little) from lake.stream.t"
    assert flow.read(same_rows) == [(ROWS, 2, ROWS // 2)]
    assert flow.read("select count(*) from lake.stream.t where little = 1") == [(ROWS // 2,)]
    with pytest.raises(LakeError, match="Cannot drop column"):
        flow.session.execute("alter table lake.stream.t drop little")


def test_a_value_that_is_too_long_for_a_directory_is_refused(flow: Flow) -> None:
    """DuckLake could not write it either, at the latest when it is flushed; without named directories it can."""
    flow.lay_out("t", "set partitioned by (tenant)")
    flow.db.execute("insert into t (id, tenant) values (1, repeat('ü', 50))")
    with pytest.raises(TableFailed, match="too long") as failed:
        flow.catch_up(tasks=False)
    assert isinstance(failed.value.error, PartitionValueError)
    assert "reset partitioned by" in str(failed.value.error.hint)
    flow.session.execute(
        "call lake.set_option('hive_file_pattern', false, schema => 'stream', table_name => 't')"
    )
    flow.session.memory.places.clear()  # DuckLake does not count a change of options
    flow.catch_up(tasks=True)
    same(flow)


def test_a_partition_that_repeats_another_is_refused(flow: Flow) -> None:
    """DuckLake accepts it and then fails on every flush."""
    flow.lay_out("t", "set partitioned by (tenant, tenant)")
    fill(flow.db, rows=10)
    with pytest.raises(TableFailed, match="cannot be written") as failed:
        flow.catch_up(tasks=False)
    assert isinstance(failed.value.error, PartitionedTargetError)


def test_directories_above_the_table_say_nothing(db: Database, tmp_path: Path) -> None:
    """In a data path such as `tenant=prod`, a column of that name keeps its values, with and without partitions."""
    db.execute("create table t (id int primary key, tenant text)")
    with Flow(db, tmp_path / "tenant=prod", ["t"]) as flow:
        for keys in (None, "tenant", "bucket(2, id)"):
            db.execute("truncate t")
            flow.catch_up(tasks=True)
            if keys is not None:
                flow.lay_out("t", f"set partitioned by ({keys})")
            db.execute("insert into t select i, 'own' from generate_series(1, 100) i")
            flow.catch_up(tasks=True)
            flow.copy("t")
            for schema in ("stream", "copied"):
                assert flow.read(f"select tenant, count(*) from lake.{schema}.t group by 1") == [
                    ("own", 100)
                ], keys


def test_orphans_in_directories_of_partitions_are_found(flow: Flow) -> None:
    """Files of a batch that failed are removed, wherever they are below the table's directory."""
    flow.lay_out("t", "set partitioned by (tenant)")
    fill(flow.db)
    flow.catch_up(tasks=True)
    [path, *_] = [path for path in flow.directory.rglob("*.parquet") if "tenant=a" in str(path)]
    orphan = path.with_name(f"aqueduck-{GROUP}-old-1.parquet")
    orphan.write_bytes(path.read_bytes())
    assert remove_orphans(flow.session, GROUP, [TableName("stream", "t")]) == [str(orphan)]
    same(flow)


def test_the_statements_of_the_document_are_accepted(lake: Lake) -> None:
    """docs/layout.md, run as it is."""
    lake.session.execute("create table lake.main.orders (id int, tenant text, created_at timestamp)")
    for name, block in blocks("sql"):
        if name.startswith("docs/layout.md-"):
            for statement in filter(str.strip, block.split(";")):
                if "add_table" not in statement:  # see tests/sync/test_layout_options.py
                    lake.session.execute(statement)
