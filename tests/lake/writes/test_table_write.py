"""Writes of other people's queries: files by tasks, one commit, exactly once, nothing left behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from aqueduck.config.lake_place import LakePlace
from aqueduck.lake.session.pool import LakePool
from aqueduck.lake.writes.table_write import BatchMark, PartFile, commit_parts, drop_parts, write_part
from aqueduck.lake.writes.write_target import WriteOrder, WriteTarget, open_target
from aqueduck.model.errors import (
    ConfigError,
    DuplicateKeyError,
    LakeError,
    LakeWriteError,
    PartitionedTargetError,
    ResyncNeededError,
    SchemaChangeError,
)
from aqueduck.model.schema import TableName
from tests.fix_lake import CATALOGS, catalog_of
from tests.fix_s3 import S3

TABLE = TableName("main", "t")
SCHEMA = pa.schema([("id", pa.int32()), ("v", pa.string())])


class Writes:
    """A lake and the steps of a write, as Spark takes them."""

    def __init__(self, place: LakePlace) -> None:
        self.place = place
        self.pool = LakePool(max_open=4, threads=2)

    def open(self, order: WriteOrder, schema: pa.Schema = SCHEMA) -> WriteTarget:
        return open_target(self.pool, self.place, order, schema)

    def parts(
        self, target: WriteTarget, tasks: list[pa.Table], mark: BatchMark | None = None
    ) -> list[PartFile]:
        written = [write_part(self.place, target, iter(t.to_batches()), mark) for t in tasks]
        return [part for part in written if part is not None]

    def write(self, order: WriteOrder, *tasks: pa.Table, mark: BatchMark | None = None) -> bool:
        target = self.open(order, tasks[0].schema)
        parts = self.parts(target, list(tasks), mark)
        try:
            return commit_parts(self.pool, self.place, order, target, parts, mark)
        except LakeError:
            drop_parts(self.pool, self.place, target, [part.path for part in parts])  # as Spark's abort does
            raise

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        with self.pool.use(self.place, read_only=True) as lake:
            return lake.execute(statement.replace("lake.", f"{lake.alias}."))

    def rows(self) -> list[tuple[Any, ...]]:
        return sorted(self.query("from lake.main.t"), key=str)

    def files(self) -> set[str]:
        return {p.name for p in Path(self.place.data_path).rglob("*.parquet")}


@pytest.fixture(params=[c if c == "sqlite" else pytest.param(c, marks=pytest.mark.slow) for c in CATALOGS])
def writes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Writes]:
    place = LakePlace(catalog=catalog_of(request.param, tmp_path, request), data_path=str(tmp_path / "data"))
    found = Writes(place)
    yield found
    found.pool.close()


def table(rows: list[tuple[int, str | None]]) -> pa.Table:
    return pa.table([[r[0] for r in rows], [r[1] for r in rows]], schema=SCHEMA)


def many(first: int, count: int) -> pa.Table:
    return table([(i, f"v{i}") for i in range(first, first + count)])


APPEND = WriteOrder(TABLE, "append")
UPSERT = WriteOrder(TABLE, "upsert", ("id",))


def test_large_parts_become_the_tables_files(writes: Writes) -> None:
    """Tasks write straight into the table's directory; the commit only adds their files."""
    target = writes.open(APPEND)
    parts = writes.parts(target, [many(0, 3000), many(3000, 3000)])
    assert commit_parts(writes.pool, writes.place, APPEND, target, parts, None)
    assert len(writes.rows()) == 6000
    assert writes.files() == {Path(p.path).name for p in parts}


def test_small_writes_leave_no_small_files(writes: Writes) -> None:
    """Few rows are inlined in the catalog, and the part is gone."""
    assert writes.write(APPEND, table([(1, "a")]), table([(2, None)]))
    assert writes.rows() == [(1, "a"), (2, None)]
    assert writes.files() == set()


def test_a_batch_is_written_once(writes: Writes) -> None:
    """Guarantee 1: the mark is in the transaction of the rows; a batch that comes again changes nothing."""
    mark = BatchMark("q1", 0)
    assert writes.write(APPEND, many(0, 2000), mark=mark)
    before = writes.files()
    assert not writes.write(APPEND, many(0, 2000), mark=mark)
    assert len(writes.rows()) == 2000
    assert writes.files() == before, "the second attempt's files are gone"
    assert writes.write(APPEND, many(2000, 1), mark=BatchMark("q1", 1))
    assert writes.write(APPEND, many(2001, 1), mark=BatchMark("q2", 0)), "another query counts for itself"
    assert len(writes.rows()) == 2002
    marks = writes.query("select query_id, table_name, batch_id from lake.aqueduck.spark_writes order by 1")
    assert marks == [("q1", "main.t", 1), ("q2", "main.t", 0)]


@pytest.fixture
def stored(s3: S3, tmp_path: Path) -> Iterator[Writes]:
    """A lake in an object store that only the options of the write name."""
    path = f"s3://{s3.make_bucket('spark')}/data/"
    place = LakePlace(catalog=f"sqlite:{tmp_path}/s3.sqlite", data_path=path, properties=s3.resolved)
    found = Writes(place)
    yield found
    found.pool.close()


def objects(s3: S3, writes: Writes) -> list[str]:
    """The names of the table's files in the bucket."""
    return [
        k for k in s3.keys(writes.place.data_path.split("/")[2], "data/main/t/") if k.endswith(".parquet")
    ]


def test_a_small_write_to_an_object_store_leaves_no_files(stored: Writes, s3: S3) -> None:
    """Few rows are inlined, and the part is removed with the credentials of the write."""
    assert stored.write(APPEND, many(0, 10))
    assert len(stored.rows()) == 10
    assert objects(s3, stored) == []


def test_a_batch_is_written_once_to_an_object_store(stored: Writes, s3: S3) -> None:
    """Guarantee 10 in S3: the batch that comes again changes nothing, and its files are gone; so are those of an abort."""
    mark = BatchMark("q1", 0)
    assert stored.write(APPEND, many(0, 2000), mark=mark)
    before = objects(s3, stored)
    assert not stored.write(APPEND, many(0, 2000), mark=mark)
    assert len(stored.rows()) == 2000
    assert objects(s3, stored) == before
    target = stored.open(APPEND)
    aborted = stored.parts(target, [many(5, 2000)])
    drop_parts(stored.pool, stored.place, target, [part.path for part in aborted])
    assert objects(s3, stored) == before


def test_files_that_cannot_be_removed_do_not_undo_a_commit(
    writes: Writes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the commit, a storage that fails costs a stray file: an error would make Spark write the rows again."""

    def fails(*arguments: Any) -> Any:
        raise OSError("slow down")

    target, mark = writes.open(APPEND), BatchMark("q", 0)
    parts = writes.parts(target, [many(0, 10)], mark)
    monkeypatch.setattr("pyarrow.fs.LocalFileSystem", fails)
    assert commit_parts(writes.pool, writes.place, APPEND, target, parts, mark)
    assert not commit_parts(writes.pool, writes.place, APPEND, target, parts, mark)
    assert len(writes.rows()) == 10


def test_files_of_a_dead_attempt_are_removed(writes: Writes) -> None:
    """A driver that died before the commit leaves files; the same batch, when it comes again, takes them away."""
    mark = BatchMark("q", 7)
    target = writes.open(APPEND)
    dead = writes.parts(target, [many(0, 2000)], mark)
    writes.parts(target, [many(0, 2000)], BatchMark("q", 77))  # of another batch: not ours to touch
    assert writes.write(APPEND, many(0, 2000), mark=mark)
    assert Path(dead[0].path).name not in writes.files()
    assert len(writes.files()) == 2


def test_dropping_parts_never_touches_the_tables_files(writes: Writes) -> None:
    """If the answer to a commit is lost, Spark aborts: files that the catalog knows stay."""
    target = writes.open(APPEND)
    committed = writes.parts(target, [many(0, 2000)])
    commit_parts(writes.pool, writes.place, APPEND, target, committed, None)
    stray = writes.parts(target, [many(5000, 2000)])
    drop_parts(writes.pool, writes.place, target, [p.path for p in (*committed, *stray)])
    assert writes.files() == {Path(committed[0].path).name}
    assert len(writes.rows()) == 2000


def test_overwrite_replaces_everything_at_once(writes: Writes) -> None:
    """Also with nothing: an empty result empties the table."""
    writes.write(APPEND, many(0, 2000))
    over = WriteOrder(TABLE, "overwrite")
    assert writes.write(over, many(10, 1500))
    assert len(writes.rows()) == 1500
    target = writes.open(over)
    assert commit_parts(writes.pool, writes.place, over, target, [], None)
    assert writes.rows() == []


@pytest.mark.parametrize("count", [10, 3000])
def test_upsert_replaces_rows_by_key(writes: Writes, count: int) -> None:
    """Rows of known keys are replaced, others added; files are taken as they are where keys are unique."""
    writes.write(APPEND, many(0, 5000))
    changed = table([(i, "new") for i in range(4990, 4990 + count)])
    assert writes.write(UPSERT, changed)
    rows = writes.rows()
    assert len(rows) == 4990 + count
    assert sum(v == "new" for _, v in rows) == count


def test_two_rows_of_a_key_need_an_order(writes: Writes) -> None:
    """The order decides which row wins, even across tasks; it is never guessed."""
    with pytest.raises(DuplicateKeyError, match="set the option order"):
        writes.write(UPSERT, table([(1, "a")]), table([(1, "b")]))
    assert writes.rows() == []
    ordered = dataclasses.replace(UPSERT, order=("n",))
    schema = SCHEMA.append(pa.field("n", pa.int64()))
    one = pa.table([[1, 2], ["late", "x"], [9, 1]], schema=schema)
    two = pa.table([[1], ["early"], [3]], schema=schema)
    assert writes.write(ordered, two, one)
    assert writes.rows() == [(1, "late"), (2, "x")]
    assert writes.files() == set()


def test_changes_are_applied_with_their_deletes_and_truncates(writes: Writes) -> None:
    """A stream of changes keeps a table the same as its source: the last change of a key counts."""
    order = WriteOrder(TABLE, "upsert", ("id",), ("lsn", "seq"), "_op")
    schema = pa.schema([*SCHEMA, ("_op", pa.string()), ("lsn", pa.int64()), ("seq", pa.int64())])

    def changes(*rows: tuple[int | None, str | None, str, int, int]) -> pa.Table:
        return pa.table([list(column) for column in zip(*rows, strict=True)], schema=schema)

    writes.write(order, changes((1, "a", "insert", 1, 0), (2, "b", "insert", 1, 1), (3, "c", "insert", 1, 2)))
    assert writes.rows() == [(1, "a"), (2, "b"), (3, "c")]
    writes.write(
        order, changes((2, None, "delete", 3, 0)), changes((2, "x", "update", 2, 0), (1, "z", "update", 2, 1))
    )
    assert writes.rows() == [(1, "z"), (3, "c")]
    writes.write(
        order,
        changes((9, "gone", "insert", 4, 0), (None, None, "truncate", 5, 0), (4, "d", "insert", 5, 1)),
    )
    assert writes.rows() == [(4, "d")]


def test_values_that_did_not_change_stay(writes: Writes) -> None:
    """A cell that an update left out is read from the same write or from the table; a missing one is an error."""
    order = WriteOrder(TABLE, "upsert", ("id",), ("n",), "op", "lacks")
    more = [("op", pa.string()), ("n", pa.int64()), ("lacks", pa.list_(pa.string()))]
    schema = pa.schema([("id", pa.int32()), ("v", pa.string()), ("Big", pa.string()), *more])

    def changes(*rows: tuple[Any, ...]) -> pa.Table:
        return pa.table([list(column) for column in zip(*rows, strict=True)], schema=schema)

    writes.write(order, changes((1, "a", "large", "insert", 1, None), (2, "b", None, "insert", 1, None)))
    writes.write(
        order,
        changes((1, "c", None, "update", 2, ["big"]), (3, "d", "huge", "insert", 2, None)),
        changes((3, "e", None, "update", 3, ["Big"]), (2, "f", "now", "update", 3, [])),
    )
    assert writes.rows() == [(1, "c", "large"), (2, "f", "now"), (3, "e", "huge")]
    with pytest.raises(ResyncNeededError, match="replica identity full"):
        writes.write(order, changes((9, "x", None, "update", 4, ["Big"])))
    writes.write(order, changes((9, "x", None, "update", 5, ["Big"]), (9, None, None, "delete", 6, None)))
    assert len(writes.rows()) == 3


@pytest.mark.parametrize(
    "again", [(), ((2, "w", "written and gone", "insert", 3, None), (2, None, None, "delete", 4, None))]
)
def test_a_row_that_takes_a_deleted_key_does_not_inherit(writes: Writes, again: tuple[Any, ...]) -> None:
    """A value that did not change is the row's own, never that of a deleted row whose key it has now."""
    order = WriteOrder(TABLE, "upsert", ("id",), ("n",), "op", "lacks")
    more = [("op", pa.string()), ("n", pa.int64()), ("lacks", pa.list_(pa.string()))]
    schema = pa.schema([("id", pa.int32()), ("v", pa.string()), ("big", pa.string()), *more])

    def changes(*rows: tuple[Any, ...]) -> pa.Table:
        return pa.table([list(column) for column in zip(*rows, strict=True)], schema=schema)

    writes.write(order, changes((1, "a", "of one", "insert", 1, None), (2, "b", "of two", "insert", 1, None)))
    moved = [
        (2, None, None, "delete", 2, None), *again,
        (1, None, None, "delete", 5, None), (2, "a", None, "update", 5, ["big"]),
    ]  # fmt: skip
    with pytest.raises(ResyncNeededError, match="replica identity full"):
        writes.write(order, changes(*moved))
    assert writes.rows() == [(1, "a", "of one"), (2, "b", "of two")]
    writes.write(
        order, changes(*moved[:-1], (2, "a", "sent", "insert", 6, None), (2, "c", None, "update", 7, ["big"]))
    )
    assert writes.rows() == [(2, "c", "sent")]


def test_a_table_is_made_without_the_columns_that_steer(writes: Writes) -> None:
    """Order and op are stored only where the table has them."""
    schema = SCHEMA.append(pa.field("n", pa.int64()))
    rows = pa.table([[1], ["a"], [5]], schema=schema)
    assert writes.write(WriteOrder(TABLE, "upsert", ("id",), ("n",)), rows)
    assert [c for (c,) in writes.query("select column_name from (describe lake.main.t)")] == ["id", "v"]
    kept = WriteOrder(TableName("main", "u"), "upsert", ("id",), ("n",))
    with writes.pool.use(writes.place) as lake:
        lake.execute(f"create table {lake.alias}.main.u (id int, v varchar, n bigint)")
    assert writes.write(kept, rows)
    assert writes.query("from lake.main.u") == [(1, "a", 5)]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (pa.schema([("id", pa.int32())]), "the column v is missing"),
        (SCHEMA.append(pa.field("w", pa.int32())), "the table has no column w"),
        (
            pa.schema([("id", pa.int64()), ("v", pa.string())]),
            "id is INTEGER in the table, which cannot take BIGINT",
        ),
        (pa.schema([("id", pa.int32()), ("v", pa.int32())]), "cannot take INTEGER"),
        (pa.schema([("id", pa.int32()), ("ID", pa.int32()), ("v", pa.string())]), "differ only in case"),
    ],
)
def test_rows_that_do_not_fit_are_refused_before_any_task(
    writes: Writes, schema: pa.Schema, message: str
) -> None:
    """The schema is checked when the write is planned."""
    writes.open(APPEND)
    with pytest.raises(SchemaChangeError, match=message):
        writes.open(APPEND, schema)


def test_what_spark_reads_as_text_can_be_written_as_text(writes: Writes) -> None:
    """Types that Spark lacks take their text; narrower numbers fit wider ones; a NULL where none may be is refused."""
    with writes.pool.use(writes.place) as lake:
        lake.execute(
            f"create table {lake.alias}.main.t (id bigint not null, u uuid, j json, d decimal(10,2))"
        )
    schema = pa.schema(
        [("id", pa.int16()), ("u", pa.string()), ("j", pa.string()), ("d", pa.decimal128(5, 1))]
    )
    uid = "5b0e7d0a-0000-4000-8000-000000000001"
    writes.write(APPEND, pa.table([[1], [uid], ['{"a":1}'], [None]], schema=schema))
    assert [(i, str(u), j) for i, u, j, _ in writes.rows()] == [(1, uid, '{"a":1}')]
    with pytest.raises(LakeWriteError, match="id is null"):
        writes.write(APPEND, pa.table([[None], [uid], ["1"], [None]], schema=schema))
    assert writes.files() == set()


def test_a_partitioned_table_is_filled_by_the_driver(writes: Writes) -> None:
    """Its files have to lie by partition, which DuckLake does itself."""
    with writes.pool.use(writes.place) as lake:
        lake.execute(f"create table {lake.alias}.main.t (id int, v varchar)")
        lake.execute(f"alter table {lake.alias}.main.t set partitioned by (v)")
    rows = table([(i, "ab"[i % 2]) for i in range(3000)])
    assert writes.write(APPEND, rows)
    assert len(writes.rows()) == 3000


def test_a_table_that_is_partitioned_during_a_write_is_filled_all_the_same(writes: Writes) -> None:
    """P-L01: the partitioning is checked in the transaction of the commit; after a reset files are added again."""
    target = writes.open(APPEND)
    parts = writes.parts(target, [many(0, 3000)])
    with writes.pool.use(writes.place) as lake:
        lake.execute(f"alter table {lake.alias}.main.t set partitioned by (bucket(4, id))")
    assert commit_parts(writes.pool, writes.place, APPEND, target, parts, None)
    with writes.pool.use(writes.place) as lake:
        lake.execute(f"alter table {lake.alias}.main.t reset partitioned by")
    added = writes.parts(target, [many(3000, 3000)])
    assert commit_parts(writes.pool, writes.place, APPEND, target, added, None)
    assert len(writes.rows()) == 6000
    assert {Path(p.path).name for p in added} <= writes.files()


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (WriteOrder(TABLE, "upsert", ("nope",)), "keys names a column nope"),
        (WriteOrder(TABLE, "upsert", ("id",), op="v"), "op and unchanged require the option order"),
        (WriteOrder(TABLE, "append", order=("v",)), "order requires the option keys"),
    ],
)
def test_options_that_contradict_the_rows_are_refused(
    writes: Writes, order: WriteOrder, message: str
) -> None:
    """Bad input is named before anything exists in the lake."""
    with pytest.raises(ConfigError, match=message):
        writes.open(order)


def test_a_lost_race_is_tried_again(writes: Writes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another writer of the same rows costs a moment, not the batch; ours comes after it."""
    if writes.place.catalog.endswith(".ducklake"):
        pytest.skip("a DuckDB file has one writer")
    assert writes.write(UPSERT, many(0, 2000))
    others, passed = Writes(writes.place), []

    def point(name: str) -> None:
        passed.append(name)
        if passed == ["write.before_commit"]:
            others.write(UPSERT, table([(1, "theirs"), (5000, "theirs")]))

    monkeypatch.setattr("aqueduck.lake.writes.table_write.faults.point", point)
    assert writes.write(UPSERT, table([(1, "ours"), (2, "ours")]), mark=BatchMark("q", 0))
    others.pool.close()
    assert passed.count("write.before_commit") == 3, "ours was tried twice"
    assert len(writes.rows()) == 2001
    assert writes.query("select id, v from lake.main.t where id in (1, 2, 5000) order by id") == [
        (1, "ours"), (2, "ours"), (5000, "theirs"),
    ]  # fmt: skip


def test_an_upsert_into_a_table_whose_rows_a_bucket_hides_is_refused(writes: Writes) -> None:
    """DuckLake would not find the old rows, so each updated row would be there twice."""
    writes.write(UPSERT, many(0, 3000))
    with writes.pool.use(writes.place) as lake:
        lake.execute(f"alter table {lake.alias}.main.t set partitioned by (bucket(4, id))")
    before = writes.rows()
    with pytest.raises(PartitionedTargetError, match="when it had rows"):
        writes.write(UPSERT, many(0, 10))
    assert writes.rows() == before
