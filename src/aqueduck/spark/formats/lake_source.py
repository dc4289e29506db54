"""
DuckLake for users' own Spark code: `ducklake` reads and writes a table, `ducklake_changes` reads its changes.

    spark.read.format("ducklake").option("catalog", …).option("table", …).load()
    spark.readStream.format("ducklake_changes").option("catalog", …).option("table", …).load()

An offset is a lake snapshot id: everything up to and including it was returned.  It has the stamp of its lake
snapshot, so that a lake that was restored and then written to is detected (ADR 53), and the uuid of the table, so that
another table of the same name is too.  docs/spark.md lists the options;
`lake.source.feed` reads, and `lake_writer` writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    Filter,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from aqueduck.config.lake_place import LakePlace
from aqueduck.lake.session.pool import LakePool
from aqueduck.lake.source.feed import Feed, FeedPart, read_part
from aqueduck.model.errors import ConfigError, LakeWriteError, SourceDivergedError
from aqueduck.model.schema import TableName, parse_table_name
from aqueduck.spark.formats.pushed_filters import lake_condition
from aqueduck.spark.formats.source_options import Options, store_properties
from aqueduck.spark.formats.spark_types import struct_of

__all__ = ["LakeChangesSource", "LakeSource", "lake_engine"]

_pool: LakePool | None = None


@dataclass(frozen=True)
class LakeOptions:
    """The options of both formats."""

    place: LakePlace
    table: TableName
    starting: str
    ending: str | None
    parts: int
    snapshots_max: int
    rows_max: int | None
    condition: str
    """A condition on the rows to read; needed because Spark pushes its own filters down to batches only."""

    @classmethod
    def read(cls, options: Mapping[str, str]) -> LakeOptions:
        if not options.get("table"):
            raise ConfigError("the option table is missing")
        place = LakePlace(
            catalog=Options("ducklake", options, options).secret("catalog"),
            data_path=options.get("data_path", ""),
            metadata_schema=options.get("metadata_schema"),
            properties=store_properties(options),
        )
        try:
            rows = options.get("max_rows_per_trigger")
            return cls(
                place,
                parse_table_name(options["table"], default_schema="main", fold_case=False),
                options.get("starting_snapshot", "earliest"),
                options.get("ending_snapshot") or options.get("snapshot"),
                int(options.get("partitions", "4")),
                int(options.get("max_snapshots_per_trigger", "1000")),
                int(rows) if rows else None,
                f"({options['where']}\n)" if options.get("where") else "true",
            )
        except ValueError as exc:
            raise ConfigError(f"an option of the lake source is invalid: {exc}") from None

    @contextlib.contextmanager
    def feed(self) -> Iterator[Feed]:
        with lake_engine().use(self.place, read_only=True) as lake:
            yield Feed(lake, self.table)

    def start(self, feed: Feed) -> int:
        """The offset before the first lake snapshot to read."""
        match self.starting:
            case "earliest":
                return feed.first()
            case "latest":
                return feed.source.latest()
            case number if number.isdigit():
                return int(number) - 1
        raise ConfigError("starting_snapshot must be earliest, latest or the id of a lake snapshot")


def lake_engine() -> LakePool:
    """The session pool of the current process."""
    global _pool
    if _pool is None:
        _pool = LakePool(max_open=8, memory_limit="1GB")
    return _pool


@dataclass
class LakePartition(InputPartition):
    """The part that one task reads."""

    part: FeedPart


class LakeSource(DataSource):
    """`spark.read.format("ducklake")`: a table now, at a lake snapshot or at a time."""

    @classmethod
    def name(cls) -> str:
        return "ducklake"

    def schema(self) -> StructType:
        options = LakeOptions.read(self.options)
        with options.feed() as feed:
            at = _at(feed, options, self.options.get("time"))
            feed.check_condition(options.condition, at, changes=False)
            return struct_of(feed.schema(at, changes=False))

    def reader(self, schema: StructType) -> DataSourceReader:
        return LakeReader(self.options, schema, changes=False)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from aqueduck.spark.formats.lake_writer import LakeWriter, WriteOptions

        return LakeWriter(WriteOptions.read(self.options, overwrite=overwrite), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from aqueduck.spark.formats.lake_writer import LakeStreamWriter, WriteOptions

        return LakeStreamWriter(WriteOptions.read(self.options, overwrite=overwrite), schema)


class LakeChangesSource(DataSource):
    """`format("ducklake_changes")`: the changes of a table, as a stream or as a batch."""

    @classmethod
    def name(cls) -> str:
        return "ducklake_changes"

    def schema(self) -> StructType:
        options = LakeOptions.read(self.options)
        with options.feed() as feed:
            at = feed.source.latest()
            feed.check_condition(options.condition, at, changes=True)
            return struct_of(feed.schema(at, changes=True))

    def reader(self, schema: StructType) -> DataSourceReader:
        return LakeReader(self.options, schema, changes=True)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return LakeStreamReader(LakeOptions.read(self.options), schema)


class LakeReader(DataSourceReader):
    """A batch; filters prune files and rows here, and Spark applies them again."""

    def __init__(self, options: Mapping[str, str], schema: StructType, *, changes: bool) -> None:
        self._options = LakeOptions.read(options)
        self._time = options.get("time")
        self._names = list(schema.fieldNames())
        self._changes = changes
        self._condition = self._options.condition

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        self._condition = f"{self._options.condition} and {lake_condition(filters)}"
        return filters

    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        with options.feed() as feed:
            end = _at(feed, options, self._time)
            if not self._changes:
                return self._partitions(feed.scan(end, self._names, options.parts))
            return self._partitions(feed.changes(options.start(feed), end, self._names, options.parts))

    def _partitions(self, parts: Iterable[FeedPart]) -> Sequence[InputPartition]:
        return [LakePartition(replace(part, condition=self._condition)) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, LakePartition)
        return read_part(lake_engine(), self._options.place, partition.part)


class LakeStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream; batches end at lake snapshots, within the limits."""

    def __init__(self, options: LakeOptions, schema: StructType) -> None:
        self._options = options
        self._names = list(schema.fieldNames())
        self._target: int | None = None

    def initialOffset(self) -> dict[str, Any]:
        with self._options.feed() as feed:
            return _offset(feed, self._options.start(feed), feed.uuid(feed.source.latest()))

    def getDefaultReadLimit(self) -> ReadLimit:
        rows = self._options.rows_max
        return ReadAllAvailable() if rows is None else ReadMaxRows(rows)

    def prepareForTriggerAvailableNow(self) -> None:
        with self._options.feed() as feed:
            self._target = feed.source.latest()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        after = int(start["lake_snapshot"])
        self._refuse_other_history(start)
        with self._options.feed() as feed:
            latest = feed.source.latest() if self._target is None else self._target
            end = min(latest, after + self._options.snapshots_max)
        if isinstance(limit, ReadMaxRows) and end > after:
            end = _within(self._rows_by_snapshot(after, end), limit.max_rows, end)
        if end <= after:
            return start  # another offset text for the same lake snapshot would cause an empty batch
        with self._options.feed() as feed:
            return _offset(feed, end, _same_table(feed, start, end, self._options.table))

    def _refuse_other_history(self, *offsets: dict[str, Any]) -> None:
        """Raise if the lake was restored; a session that saw another history raises once and is discarded."""
        try:
            with self._options.feed() as feed:
                _refuse_other_history(feed, offsets, self._options.table)
        except LakeWriteError:
            with self._options.feed() as feed:
                _refuse_other_history(feed, offsets, self._options.table)

    def _rows_by_snapshot(self, after: int, end: int) -> list[tuple[int, int]]:
        """Retried once with a new session, like `read_part`, because the first one may look for flushed inlined rows."""
        try:
            with self._options.feed() as feed:
                return feed.rows_by_snapshot(after, end)
        except LakeWriteError:
            with self._options.feed() as feed:
                return feed.rows_by_snapshot(after, end)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        self._refuse_other_history(start, end)
        with self._options.feed() as feed:
            _same_table(feed, start, int(end["lake_snapshot"]), self._options.table)
            parts = feed.changes(
                int(start["lake_snapshot"]), int(end["lake_snapshot"]), self._names, self._options.parts
            )
        return [LakePartition(replace(part, condition=self._options.condition)) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, LakePartition)
        return read_part(lake_engine(), self._options.place, partition.part)


def _offset(feed: Feed, snapshot: int, uuid: str) -> dict[str, Any]:
    """An offset; it has no stamp if its lake snapshot has expired or does not exist yet."""
    stamp = feed.source.stamps([snapshot]).get(snapshot)
    known = {} if stamp is None else {"stamp": stamp}
    return {"lake_snapshot": snapshot, "table": uuid, **known}


def _same_table(feed: Feed, start: dict[str, Any], end: int, table: TableName) -> str:
    """The uuid of the table; raises if it is another one than at the offset, whose rows the target still has."""
    uuid = feed.uuid(end)
    if start.get("table") not in (None, uuid):  # an offset of an earlier version has none
        raise SourceDivergedError(
            "the table was dropped and created again after it was read",
            hint="empty the target and restart the query with a new checkpoint",
            table=table.qualified,
        )
    return uuid


def _refuse_other_history(feed: Feed, offsets: Sequence[dict[str, Any]], table: TableName) -> None:
    """Raise if the lake snapshot of an offset is newer than the lake, or is now another one."""
    latest = feed.source.latest()
    feed.source.refuse_stale_session(latest)
    seen = {int(o["lake_snapshot"]): int(o["stamp"]) for o in offsets if o.get("stamp") is not None}
    now = feed.source.stamps({latest, *seen})
    for snapshot, stamp in seen.items():
        if snapshot > latest or now.get(snapshot, stamp) != stamp:
            raise SourceDivergedError(
                f"the source lake was restored: its lake snapshot {snapshot} differs from what was read",
                hint="empty the target and restart the query with a new checkpoint",
                table=table.qualified,
            )


def _within(rows: Sequence[tuple[int, int]], rows_max: int, end: int) -> int:
    """The last lake snapshot up to which a batch has at most `rows_max` rows, but at least one with rows."""
    total = 0
    for number, (snapshot, count) in enumerate(rows):
        total += count
        if total > rows_max:
            return snapshot if number == 0 else snapshot - 1
    return end


def _known_snapshot(feed: Feed, text: str) -> int:
    if not text.isdigit():
        raise ConfigError("the option snapshot must be the id of a lake snapshot")
    latest = feed.source.latest()
    if int(text) > latest:
        raise ConfigError(f"the lake has no snapshot {text} yet", hint=f"its newest one is {latest}")
    return int(text)


def _at(feed: Feed, options: LakeOptions, time: str | None) -> int:
    """The lake snapshot that a batch reads, or at which it ends."""
    if options.ending is not None:
        return _known_snapshot(feed, options.ending)
    return feed.at_time(time) if time else feed.source.latest()
