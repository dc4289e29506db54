"""
`df.write.format("ducklake")` and `writeStream.format("ducklake")`: write the rows of a user's query to a lake table.

Tasks write Parquet files directly into the table's directory.  The driver makes them visible in one lake transaction,
together with a mark of the query and the batch, so that a batch which Spark repeats is written once.
`lake.writes.table_write` does the work; docs/spark.md lists the options.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from aqueduck import faults
from aqueduck.config.lake_place import LakePlace
from aqueduck.config.sections import RESERVED_SCHEMA
from aqueduck.lake.writes.table_write import (
    BatchMark,
    PartFile,
    check_mark,
    commit_parts,
    drop_parts,
    write_part,
)
from aqueduck.lake.writes.write_target import WriteMode, WriteOrder, WriteTarget, open_target
from aqueduck.model.errors import AqueduckError, ConfigError, LakeError
from aqueduck.spark.formats.lake_source import lake_engine
from aqueduck.spark.formats.source_options import Options, store_properties
from aqueduck.spark.formats.spark_types import arrow_of, refuse_unwritable

__all__ = ["WRITE_OPTIONS", "LakeStreamWriter", "LakeWriter"]

WRITE_OPTIONS = (
    "catalog", "catalog_env", "catalog_file", "data_path", "metadata_schema", "table", "mode", "keys", "order", "op",
    "unchanged", "query_id", "batch_id",
)  # fmt: skip
_SPARKS_OWN = ("checkpointLocation", "path", "queryName", "outputMode")


@dataclass
class PartMessage(WriterCommitMessage):
    """A task's message to the driver."""

    path: str | None
    rows: int
    query: str | None
    key: str | None = None


@dataclass(frozen=True)
class WriteOptions:
    """The target and the options of a write."""

    place: LakePlace
    order: WriteOrder
    mark: BatchMark | None

    @classmethod
    def read(cls, given: Mapping[str, str], *, overwrite: bool) -> WriteOptions:
        store = [name for name in given if name.lower().startswith("s3_")]
        options = Options("ducklake", given, (*WRITE_OPTIONS, *_SPARKS_OWN, *store))
        place = LakePlace(
            catalog=options.secret("catalog"),
            data_path=options.text("data_path") or "",
            metadata_schema=options.text("metadata_schema"),
            properties=store_properties(given),
        )
        keys = options.names("keys")
        modes: tuple[WriteMode, ...] = ("append", "upsert")
        mode = options.choice("mode", modes) or ("upsert" if keys else "append")
        if mode == "upsert" and not keys:
            raise ConfigError("ducklake: the mode upsert requires the option keys")
        table = options.table("table", default_schema="main", fold_case=False)
        if table.schema.lower() == RESERVED_SCHEMA:
            raise ConfigError(
                f"ducklake: the schema {RESERVED_SCHEMA} is reserved",
                hint="write to another schema",
                table=table.qualified,
            )
        order = WriteOrder(
            table,
            "overwrite" if overwrite else mode,
            keys,
            options.names("order"),
            options.text("op"),
            options.text("unchanged"),
        )
        mark = check_mark(options.text("query_id"), options.number("batch_id", least=0))
        return cls(place, order, mark)


class _Writer:
    """The common part of both writers; it opens the target before any task runs."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        self._options = options
        refuse_unwritable(schema, options.order.table.qualified)
        self._target: WriteTarget = open_target(lake_engine(), options.place, options.order, arrow_of(schema))

    def _write(self, batches: Iterator[pa.RecordBatch], mark: BatchMark | None) -> PartMessage:
        part = write_part(self._options.place, self._target, batches, mark)
        faults.point("write.part_written")
        query = None if mark is None else mark.query
        return (
            PartMessage(None, 0, query)
            if part is None
            else PartMessage(part.path, part.rows, query, part.key)
        )

    def _commit(self, messages: Sequence[WriterCommitMessage | None], mark: BatchMark | None) -> None:
        parts = [PartFile(m.path, m.rows, m.key) for m in _told(messages) if m.path is not None]
        commit_parts(lake_engine(), self._options.place, self._options.order, self._target, parts, mark)

    def _abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        paths = [m.path for m in _told(messages) if m.path is not None]
        # Without the catalog it is unknown whether the files were committed: leave them to the lake's maintenance.
        with contextlib.suppress(LakeError):
            drop_parts(lake_engine(), self._options.place, self._target, paths)


def _told(messages: Sequence[WriterCommitMessage | None]) -> list[PartMessage]:
    return [message for message in messages if isinstance(message, PartMessage)]


class LakeWriter(_Writer, DataSourceArrowWriter):
    """A batch: append, overwrite, or upsert by keys."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._write(iterator, self._options.mark)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._commit(messages, self._options.mark)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._abort(messages)


class LakeStreamWriter(_Writer, DataSourceStreamArrowWriter):
    """A stream: each batch of a query is written once."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        query, batch = _local_property("sql.streaming.queryId"), _local_property("streaming.sql.batchId")
        if query is None or batch is None:
            raise AqueduckError("Spark did not pass the id of the query and the batch")
        return self._write(iterator, BatchMark(query, int(batch)))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._commit(messages, self._mark(messages, batchId))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._abort(messages)

    def _mark(self, messages: Sequence[WriterCommitMessage | None], batch: int) -> BatchMark | None:
        """The mark with the query id that the tasks report, which the checkpoint keeps across restarts."""
        queries = {m.query for m in _told(messages) if m.query is not None}
        return BatchMark(queries.pop(), batch) if queries else None


def _local_property(name: str) -> str | None:
    context: Any = TaskContext.get()
    value: str | None = None if context is None else context.getLocalProperty(name)
    return value
