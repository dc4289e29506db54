"""
One cycle of a fan-out as a Spark job: read once, shuffle by destination, apply.

    range(parts) ─ read and route (DuckDB) ─▶ chunks by bucket ─ shuffle ─▶ apply each destination ─▶ results

Spark shuffles chunks: Arrow streams of a few megabytes with the changes of one bucket of destinations, so that no
value is converted to a type of the JVM.  One task applies one bucket.  Sessions with destinations stay open in the
Python worker between jobs.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import pyarrow as pa
from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from aqueduck import faults
from aqueduck.lake.destinations.buckets import apply_bucket
from aqueduck.lake.destinations.cycle import Applied, Destination
from aqueduck.lake.destinations.destination import read_state
from aqueduck.lake.destinations.net_changes import drop
from aqueduck.lake.session.pool import LakePool
from aqueduck.lake.source.lake_changes import ReadReport, Routes, chunks, read_routed
from aqueduck.lake.source.source_lake import ReadPlan, split_plan
from aqueduck.model.errors import AqueduckError, LakeWriteError, SparkStartError, own_error

__all__ = ["CycleResult", "Found", "Workers", "find_cursors", "run_cycle"]

_SHUFFLED = pa.schema([("bucket", pa.int32()), ("chunk", pa.binary()), ("report", pa.string())])
_RESULT = pa.schema([("result", pa.string())])

BEAT_SECONDS = 2.0

_pool: LakePool | None = None


@dataclass(frozen=True, slots=True)
class Workers:
    """Settings of a job's tasks."""

    instance: str
    tasks: int
    """The number of buckets; one task applies each."""
    threads: int = 4
    """The number of destinations that a task writes at the same time."""
    max_open: int = 50
    memory_limit: str = "1GB"
    progress_file: str | None = None
    """The file to which progress is written, on storage that workers share with the driver."""

    def pool(self) -> LakePool:
        """The session pool of the current process."""
        global _pool
        if _pool is None:
            _pool = LakePool(memory_limit=self.memory_limit)
        _pool.max_open = self.max_open
        return _pool

    def progressed(self, rows: int = 0, destinations: int = 0) -> None:
        """Report more rows that were read or written, and more destinations that are done."""
        if self.progress_file is not None:
            with contextlib.suppress(OSError), open(self.progress_file, "ab", buffering=0) as file:
                file.write(b"%d %d\n" % (rows, destinations))

    @contextlib.contextmanager
    def alive(self) -> Iterator[None]:
        """Touch the file while the block runs and uses CPU time, to show that it is working and not only waiting."""
        stopping = threading.Event()

        def beat() -> None:
            used = time.process_time()
            while not stopping.wait(BEAT_SECONDS):
                before, used = used, time.process_time()
                if used - before > BEAT_SECONDS / 100 and self.progress_file is not None:
                    with contextlib.suppress(OSError):
                        Path(self.progress_file).touch()

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()


@dataclass(frozen=True, slots=True)
class Found:
    """The state read from a destination's lake, or the error of reading it."""

    id: str
    cursor: int | None = None
    """None if there is none, or if it belongs to another source table, routing value or terms."""
    rows: int = 0
    changed_at: float | None = None
    stamp: int | None = None
    error: str | None = None


@dataclass
class CycleResult:
    """The result of a job."""

    applied: list[Applied]
    report: ReadReport = field(default_factory=ReadReport)
    reads: int = 0
    """The number of reads of the source: one for all destinations, or one for each part of the range."""
    pool_open: int = 0
    pool_created: int = 0
    pool_evicted: int = 0
    seconds: float = 0.0


def run_cycle(
    spark: SparkSession,
    plan: ReadPlan,
    destinations: Sequence[Destination],
    workers: Workers,
    *,
    elsewhere: Sequence[str] = (),
    parts: int = 1,
    count_after: int | None = None,
    want_unknown: bool = False,
    lane: str,
    hanging: Callable[[], bool] = lambda: False,
) -> CycleResult:
    """
    Bring the destinations to the end of the plan; `elsewhere` are values that other instances serve.

    Blocks until the job is done.  If the job fails as a whole, this raises, and what destinations committed stays.
    `hanging` is called periodically; if it returns true, the job is cancelled and this raises too.
    """
    buckets = _buckets(destinations, workers.tasks)
    routes = Routes(
        (*(d.value for d in destinations), *elsewhere),
        (*(d.cursor or 0 for d in destinations), *(plan.end for _ in elsewhere)),
        (*buckets, *(-1 for _ in elsewhere)),
    )
    pieces = split_plan(plan, parts)
    read = _reader(pieces, routes, workers, count_after, want_unknown)
    apply = _applier(plan, list(zip(buckets, destinations, strict=True)), workers)
    began = time.monotonic()
    with _job_failures(spark, lane), _watched(spark, lane, hanging):
        rows = (
            spark.range(0, len(pieces), 1, len(pieces))
            .mapInArrow(read, "bucket int, chunk binary, report string")
            .repartitionById(workers.tasks, "bucket")
            .mapInArrow(apply, "result string")
            .collect()
        )
    result = _collect([json.loads(row.result) for row in rows])
    result.reads, result.seconds = len(pieces), time.monotonic() - began
    return result


def find_cursors(
    spark: SparkSession,
    plan: ReadPlan,
    destinations: Sequence[Destination],
    workers: Workers,
    *,
    lane: str,
    hanging: Callable[[], bool] = lambda: False,
) -> list[Found]:
    """Read the state from the lake of each destination, with its cursor if the cursor fits the plan."""
    parts = workers.tasks

    def find(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for part in batch["id"].to_pylist():
                with ThreadPoolExecutor(max_workers=workers.threads) as threads:
                    yield _results(asdict(f) for f in threads.map(one, destinations[part::parts]))

    def one(destination: Destination) -> Found:
        workers.progressed()
        try:
            with workers.pool().use(destination.place) as lake:
                state = read_state(lake, destination.id)
        except Exception as exc:  # noqa: BLE001 - an error of one destination must not stop the others
            return Found(destination.id, error=str(own_error(exc)))
        if state is None:
            return Found(destination.id)
        cursor = state.cursor if state.fits(destination, plan) else None
        return Found(destination.id, cursor, state.rows, state.changed_at, state.stamp)

    with _job_failures(spark, lane), _watched(spark, lane, hanging):
        rows = spark.range(0, parts, 1, parts).mapInArrow(find, "result string").collect()
    return [Found(**json.loads(row.result)) for row in rows]


def _buckets(destinations: Sequence[Destination], tasks: int) -> list[int]:
    """The bucket of each destination; destinations of one lake share a bucket, because a lake has one writer at a time."""
    places = [(d.place.catalog, d.place.metadata_schema) for d in destinations]
    numbers = {place: i % tasks for i, place in enumerate(dict.fromkeys(places))}
    return [numbers[place] for place in places]


def _reader(
    pieces: Sequence[ReadPlan],
    routes: Routes,
    workers: Workers,
    count_after: int | None,
    want_unknown: bool,
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        pool = workers.pool()
        for batch in batches:
            for part in batch["id"].to_pylist():
                began = time.monotonic()
                with workers.alive():
                    name, report = read_routed(
                        pool, pieces[part], routes, count_after=count_after, want_unknown=want_unknown
                    )
                report.seconds = time.monotonic() - began
                faults.point("fanout.read")
                for bucket in range(workers.tasks):
                    # A bucket without changes is applied too, because its cursors move.
                    yield _shuffled(bucket, report=json.dumps(asdict(report)))
                    for chunk, rows in chunks(pool, name, pieces[part], bucket):
                        workers.progressed(rows)
                        yield _shuffled(bucket, chunk=chunk)
                drop(pool, name)

    return read


def _applier(
    plan: ReadPlan, placed: Sequence[tuple[int, Destination]], workers: Workers
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    indexed = list(enumerate(placed))

    def apply(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        bucket = context.partitionId()
        mine = {index: destination for index, (b, destination) in indexed if b == bucket}
        results: list[dict[str, object]] = []
        expected: dict[int, int] = {}

        def arrived() -> Iterator[bytes]:
            for batch in batches:
                for chunk, report in zip(batch["chunk"], batch["report"], strict=True):
                    if report.is_valid:
                        seen = json.loads(report.as_py())
                        expected.update({int(index): n for index, n in seen.pop("expected").items()})
                        if bucket == 0:
                            results.append({"report": seen})
                    elif chunk.is_valid:
                        yield chunk.as_py()

        pool = workers.pool()
        before = pool.created, pool.evicted
        with workers.alive():
            done = apply_bucket(
                pool, plan, mine, arrived(), instance=workers.instance, threads=workers.threads,
                expected=expected, progressed=workers.progressed,
            )  # fmt: skip
        results += [{"applied": asdict(applied)} for applied in done]
        results.append({"pool": [pool.open, pool.created - before[0], pool.evicted - before[1]]})
        yield _results(results)

    return apply


def _shuffled(bucket: int, *, chunk: bytes | None = None, report: str | None = None) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.array([bucket], pa.int32()), pa.array([chunk], pa.binary()), pa.array([report], pa.string())],
        schema=_SHUFFLED,
    )


def _results(rows: Iterable[dict[str, object]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(map(json.dumps, rows), pa.string())], schema=_RESULT)


def _collect(rows: Iterable[dict[str, dict[str, object]]]) -> CycleResult:
    result = CycleResult([])
    for row in rows:
        if "applied" in row:
            result.applied.append(Applied(**row["applied"]))  # type: ignore[arg-type]
        elif "report" in row:
            result.report = _sum(result.report, ReadReport(**row["report"]))  # type: ignore[arg-type]
        else:
            opened, created, evicted = map(int, itertools.chain(row["pool"]))
            result.pool_open += opened
            result.pool_created += created
            result.pool_evicted += evicted
    return result


def _sum(a: ReadReport, b: ReadReport) -> ReadReport:
    return replace(
        a,
        rows=a.rows + b.rows,
        unrouted=a.unrouted + b.unrouted,
        nulls=a.nulls + b.nulls,
        moves=a.moves + b.moves,
        unknown=sorted({*a.unknown, *b.unknown}),
        seconds=a.seconds + b.seconds,
    )


@contextlib.contextmanager
def _watched(spark: SparkSession, lane: str, hanging: Callable[[], bool]) -> Iterator[None]:
    """Cancel the job and its workers if it hangs: a lake that accepts connections but never replies would block it forever."""
    done = threading.Event()
    context = spark.sparkContext
    context.setJobGroup(lane, "fan-out", interruptOnCancel=True)

    def watch() -> None:
        while not done.wait(BEAT_SECONDS):
            if hanging():
                context.cancelJobGroup(lane)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def _job_failures(spark: SparkSession, lane: str) -> Iterator[None]:
    spark.sparkContext.setLocalProperty("spark.scheduler.pool", lane)
    try:
        yield
    except (Py4JNetworkError, OSError) as exc:
        raise SparkStartError("the connection to Spark was lost", hint="restart the service") from exc
    except (PySparkException, Py4JError) as exc:
        raise AqueduckError.from_text(str(exc)) or LakeWriteError(
            f"a fan-out job failed: {type(exc).__name__}"
        ) from exc
