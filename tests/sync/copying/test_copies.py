"""
Copies that are interrupted and continue under another snapshot, while the table changes all the time.

Everything is real but Spark: chunks are copied by the code that its tasks run, in this process, so that many
histories can be tried.  The whole way with Spark and kill -9 is in `tests/integration`.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from aqueduck.config.lake_place import LakePlace
from aqueduck.config.sync import LakeConfig
from aqueduck.lab.embedded import EmbeddedPostgres
from aqueduck.lake.commit.commit import BatchPlan, commit_batch
from aqueduck.lake.commit.copy_files import ChunkFile
from aqueduck.lake.fold.fold_tasks import FoldedTasks, plan_batch, segments_to_park
from aqueduck.lake.ledger.parking import copy_to_parking, ensure_parking, sealing
from aqueduck.lake.ledger.progress import Position, write_position
from aqueduck.lake.ledger.table_states import TableState, ensure_table_states, write_state
from aqueduck.lake.session.catalog import open_lake
from aqueduck.lake.target.mode_rows import present_rows
from aqueduck.model.batches import LeftToDriver, plan_fold_tasks
from aqueduck.model.errors import ConnectionLostError
from aqueduck.model.lifecycle import ErrorClass
from aqueduck.model.modes import UPSERT, TableMode
from aqueduck.model.schema import TableName, parse_lsn
from aqueduck.postgres.capture.capture import Capture
from aqueduck.postgres.capture.capture_settings import CaptureSettings
from aqueduck.postgres.capture.stage import Stage
from aqueduck.postgres.catalog.tables import describe_table
from aqueduck.postgres.publications.slots import create_slot
from aqueduck.spark.query.copy_job import CopyJob
from aqueduck.sync.copying.copies import Copier
from aqueduck.sync.copying.copy_reader import CopyJobs, CopySettings
from aqueduck.sync.status import GroupStatus
from aqueduck.sync.tables.column_versions import ColumnVersions
from aqueduck.sync.tables.prepare_tables import PreparedTable
from aqueduck.sync.tables.table_book import TableBook
from tests.fanout_lakes import connect
from tests.fix_postgres import Database, wait_until

PAGE = 8192


class World:
    """A table, a slot with its capture, a lake and a copier, without a query between them."""

    def __init__(
        self,
        db: Database,
        directory: Path,
        mode: TableMode = UPSERT,
        *,
        by_sql: bool = False,
        dsn: str | None = None,
        encrypted: bool = False,
    ) -> None:
        self.db = db
        self.mode = mode
        db.execute(
            "create table t (id int primary key, v text, doc text); alter table t alter doc set storage external"
        )
        db.execute("alter table t set (fillfactor = 60)")
        db.execute(
            "insert into t select g, repeat('v', 300), repeat(md5(g::text), 90) from generate_series(1, 300) g"
        )
        db.execute("create publication p for table t")
        with db.connect() as conn:
            self.position = create_slot(conn, "copies")
            self.schema = describe_table(conn, "public.t")
        self.config = LakeConfig(catalog=f"sqlite:{directory}/lake.sqlite", data_path=f"{directory}/data")
        if encrypted:
            connect(
                LakePlace(catalog=self.config.catalog, data_path=f"{directory}/data/"), "encrypted"
            ).close()
        self.lake = open_lake(self.config)
        ensure_table_states(self.lake)
        ensure_parking(self.lake)
        self.target = TableName("main", "t")
        self.oid = self.schema.oid
        state = TableState(self.oid, "public.t", self.target, False, 0, mode=mode)
        with self.lake.transaction():
            write_state(self.lake, "g", [state])
            write_position(self.lake, Position("g", self.position, None, "s", 1))
        self.book = TableBook(
            GroupStatus("g", position=self.position), self.lake, threading.Lock(), directory
        )
        self.book.begin({self.oid: PreparedTable(self.schema, self.target, True, mode)}, {})
        self.book.inform_capture()
        settings = CaptureSettings(
            dsn=dsn or db.dsn, capture="poll" if by_sql else "stream",
            slot="copies", publication="p", position=self.position, directory=str(directory),
        )  # fmt: skip
        self.stage = Stage(
            directory / "stage", segment_bytes=1 << 20, bytes_max=1 << 30, position=self.position
        )
        self.capture = Capture(settings, self.stage)
        self.capture.start()
        self.copier = Copier(
            CopySettings(dsn or db.dsn, "run", chunk_bytes=PAGE, by_sql=by_sql),
            self.book,
            CopyJobs(self.run_job),
            ColumnVersions(dsn or db.dsn, self.book),
            self.pump,
        )
        self.run: Callable[[CopyJob, int], ChunkFile] = lambda job, number: job.run([number])[0]

    @property
    def states(self) -> Mapping[int, TableState]:
        return self.book.states

    def close(self) -> None:
        self.copier.stop()
        self.capture.stop()
        self.lake.close()

    def run_job(self, job: CopyJob) -> list[ChunkFile]:
        return [self.run(job, number) for number in range(len(job.items))]

    def pump(self, position: int) -> bool:
        """What the query would do: all staged changes into the lake; true when it has everything before a position."""
        self.capture.check()
        self.capture.ask_position()
        reached = self.capture.seen >= position
        self.stage.cut()
        cuts = self.stage.between(self.position, 1 << 62)
        if cuts:
            segments = (s for c in cuts for s in c.segments)
            keep_truncated = [self.oid] if self.mode.keeps else []
            tasks: FoldedTasks = [
                (task, LeftToDriver.SMALL)
                for task in plan_fold_tasks(segments, keep_truncated=keep_truncated, direct_bytes_max=1 << 40)
            ]
            parked = copy_to_parking(
                self.config.data_path,
                "g",
                str(cuts[-1].position),
                segments_to_park(tasks, self.states),
                seal=sealing(self.lake),
            )
            self.book.begin_parking(parked)
            end = Position("g", cuts[-1].position, cuts[-1].time_us, "s", 1)
            plan = plan_batch(tasks, self.states, end, before=self.position, parked=parked)
            assert isinstance(plan, BatchPlan)
            commit_batch(self.lake, plan)
            self.position = end.position
            self.stage.release(self.position)
        return reached

    def copy_until_ready(self) -> None:
        """Try again and again, as the service does, without its pauses."""
        for _ in range(20):
            if self.states[self.oid].ready:
                return
            self.copier.retry_now(self.oid)
            wait_until(lambda: not self.copier.busy, "the try ends")
        raise AssertionError("the copy never came to its end")

    def catch_up(self) -> None:
        written = parse_lsn(self.db.value("select pg_current_wal_insert_lsn()::text"))
        self.db.execute("create table if not exists flush (); drop table flush")  # a commit that is flushed
        wait_until(lambda: self.pump(written), "the lake has everything")

    def assert_same(self) -> None:
        source = self.db.query("select id, v, doc from t order by id")
        with open_lake(self.config, read_only=True) as observer:
            present = present_rows(self.mode, self.schema, "lake.main.t")
            lake = observer.query(f"select id, v, doc from ({present}) order by id")[0]
        assert [row[0] for row in lake] == [row[0] for row in source]
        assert lake == source


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(db: Database, **options: Any) -> World:
        worlds.append(World(db, tmp_path, **options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


@pytest.fixture
def world(db: Database, make_world: Callable[..., World]) -> World:
    return make_world(db)


def change(db: Database, dice: random.Random) -> None:
    """One random change; keys come, go, move and return, large values stay or change."""
    some = dice.randint(1, 400)
    statement = dice.choice(
        (
            f"insert into t values ({some}, 'new', repeat(md5('{some}'), 90)) on conflict do nothing",
            f"update t set v = 'u{dice.random()}' where id = {some}",  # the large value is unchanged
            f"update t set v = repeat('w', 700) where id between {some} and {some + 3}",  # does not fit its page
            f"update t set doc = repeat(md5('{dice.random()}'), 90) where id = {some}",
            f"delete from t where id = {some}",
            f"update t set id = {dice.randint(401, 10**6)} where id = {some}",
            f"update t set id = {some} where id = (select max(id) from t where id > 400) and not exists"
            f" (select from t where id = {some})",
        )
    )
    db.execute(statement)


@pytest.mark.parametrize("by", ["stream", "sql", "encrypted", pytest.param("pooler", marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 12))])
def test_a_copy_continues_where_it_was_interrupted(
    db: Database, make_world: Callable[..., World], pooler: Callable[..., str], by: str, seed: int
) -> None:
    """P-S05, P-S22, P-E09: chunks of several snapshots, with changes all the time, become exactly the source's rows."""
    world = make_world(
        db,
        by_sql=by in ("sql", "pooler"),
        dsn=pooler() if by == "pooler" else None,
        encrypted=by == "encrypted",
    )
    dice = random.Random(seed)
    copied: list[int] = []
    stops = [dice.randint(1, 15)]

    def interrupted(job: CopyJob, number: int) -> ChunkFile:
        for _ in range(dice.randint(0, 6)):
            change(world.db, dice)
        if number == stops[0] or (len(copied) < 20 and dice.random() < 0.1):
            stops[0] = -1
            for _ in range(20):
                change(world.db, dice)
            if dice.random() < 0.3:
                world.db.execute("vacuum t")
            raise ConnectionLostError("the snapshot is gone")
        if job.items[number].journal_path is not None:
            copied.append(job.items[number].chunk.number)
        return job.run([number])[0]

    world.run = interrupted
    world.copy_until_ready()
    assert len(copied) == len(set(copied)), "no chunk is copied twice"
    world.catch_up()
    world.assert_same()
    assert not (world.copier.journals / str(world.oid)).exists()


def test_a_transaction_left_open_for_the_whole_copy_arrives_once(world: World) -> None:
    """Hazard 1, P-S05, P-S07: its changes are neither in the copy nor lost, whenever it commits."""
    with world.db.connect() as other:

        def open_one(job: CopyJob, number: int) -> ChunkFile:
            if number == 0:
                other.execute("begin")
                other.execute("insert into t values (5000, 'open', 'all the time')")
                other.execute(
                    "update t set v = 'changed while open' where id <= 20; delete from t where id = 30"
                )
            else:
                world.db.execute(f"update t set v = 'short {number}' where id = {100 + number}")
            return job.run([number])[0]

        world.run = open_one
        world.copy_until_ready()
        world.catch_up()
        world.assert_same()
        other.execute("commit")
    world.catch_up()
    world.assert_same()
    assert (5000, "open") in world.db.query("select id, v from t")


@pytest.mark.slow
def test_a_commit_that_waits_for_a_standby_is_not_lost_around_a_copy_by_sql(
    new_server: Callable[..., EmbeddedPostgres], make_world: Callable[..., World]
) -> None:
    """Hazard 1: its commit is in WAL, and decoded, long before the copy's snapshot would show it."""
    db = Database(new_server(), "postgres")
    world = make_world(db, by_sql=True)
    db.execute("set synchronous_commit = local")
    db.execute("alter system set synchronous_standby_names = 'nobody'")
    db.execute("select pg_reload_conf()")
    done = threading.Event()

    def commit() -> None:
        with db.connect() as other:
            other.execute("set synchronous_commit = on")
            other.execute(
                "begin; insert into t values (9001, 'waits', 'x'); update t set v = 'waits' where id < 30;"
                " delete from t where id = 40; update t set id = 9002 where id = 41; commit"
            )
        done.set()

    waiting = threading.Thread(target=commit)
    waiting.start()
    wait_until(
        lambda: db.query("select from pg_stat_activity where wait_event = 'SyncRep'"), "the commit waits"
    )
    world.catch_up()
    world.book.mark_settled(
        [world.oid]
    )  # the table was published long before, as it is for any copy but the first
    world.copy_until_ready()
    assert not done.is_set()
    assert not db.query("select from t where id = 9001"), "no snapshot shows it"
    world.catch_up()
    db.execute("alter system reset synchronous_standby_names")
    db.execute("select pg_reload_conf()")
    waiting.join(60)
    world.catch_up()
    world.assert_same()
    assert db.query("select from t where id = 9001")


def test_a_copy_of_a_table_that_was_rewritten_starts_over(world: World) -> None:
    """Pages of a table that was truncated or rewritten between two chunks say nothing about its rows."""
    copied: list[int] = []

    def disturbed(job: CopyJob, number: int) -> ChunkFile:
        copied.append(number)
        if len(copied) == 3:
            world.db.execute("delete from t where id % 2 = 0")
            world.db.execute("vacuum full t")
        return job.run([number])[0]

    world.run = disturbed
    world.copier.start()
    wait_until(lambda: not world.copier.busy, "the try ends")
    life = world.copier.schedule.failures[world.oid]
    assert life.failure is not None
    assert (life.failure.code, life.failure.error_class) == ("copy.disturbed", ErrorClass.TRANSIENT)
    assert life.retry_at is not None
    world.copy_until_ready()
    assert copied.count(0) == 2
    world.catch_up()
    world.assert_same()


def test_a_table_dropped_in_the_middle_waits_for_a_person(world: World) -> None:
    """A clear error about that table; no copied row is left in the lake."""

    def dropped(job: CopyJob, number: int) -> ChunkFile:
        if number == 2:
            world.db.execute("drop table t")
        return job.run([number])[0]

    world.run = dropped
    world.copier.start()
    wait_until(lambda: not world.copier.busy, "the try ends")
    life = world.copier.schedule.failures[world.oid]
    assert life.failure is not None
    assert life.failure.error_class is ErrorClass.CONFIGURATION
    assert life.retry_at is None
    assert "does not exist" in life.failure.message
    with open_lake(world.config, read_only=True) as observer:
        assert observer.query("select table_name from duckdb_tables() where schema_name = 'main'")[0] == []


def test_a_journal_without_its_files_is_not_trusted(world: World) -> None:
    """The data path was emptied meanwhile: those chunks are re-copied."""
    count = 0

    def once(job: CopyJob, number: int) -> ChunkFile:
        nonlocal count
        count += 1
        if count == 4:
            raise ConnectionLostError("the snapshot is gone")
        return job.run([number])[0]

    world.run = once
    world.copier.start()
    wait_until(lambda: not world.copier.busy, "the try ends")
    files = sorted(Path(world.config.data_path).rglob("*.parquet"))
    assert len(files) == 3
    files[0].unlink()
    world.copy_until_ready()
    world.catch_up()
    world.assert_same()


def test_retries_wait_longer_each_time(world: World) -> None:
    """P-S22: 30 s after the first failure, twice that after each further one; a person need not wait."""

    def failing(job: CopyJob, number: int) -> ChunkFile:
        raise ConnectionLostError("the server is away")

    world.run = failing
    waits = []
    for _ in range(3):
        world.copier.retry_now(world.oid)
        wait_until(lambda: not world.copier.busy, "the try ends")
        life = world.copier.schedule.failures[world.oid]
        assert life.retry_at is not None
        waits.append(round((life.retry_at - life.since).total_seconds() / 30))
        world.copier.start()
        assert not world.copier.busy, "it is not due yet"
    assert life.failures == 3
    world.run = lambda job, number: job.run([number])[0]
    world.copy_until_ready()
    assert world.oid not in world.copier.schedule.failures
    assert waits[0] == 1
    assert waits[2] >= 4
