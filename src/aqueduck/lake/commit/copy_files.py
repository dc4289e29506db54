"""
Write the rows of one chunk of an initial copy to a Parquet file, in a Spark task.

A column arrives either as values of its lake type or as PostgreSQL's text.  Text goes through the same casts
as in the stream.  If nothing has to be cast, Arrow writes the file; otherwise DuckDB casts and writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass

import pyarrow as pa

from aqueduck.lake.commit.arrow_files import write_arrow
from aqueduck.lake.fold.fold_tasks import TASK_MEMORY, task_engine
from aqueduck.lake.fold.projected import project_rows
from aqueduck.lake.session.engine import is_remote
from aqueduck.lake.session.partition_files import write_laid_out
from aqueduck.lake.session.sql import ident
from aqueduck.model.columns.projection import copies_cells
from aqueduck.model.columns.typemap import cast_sql
from aqueduck.model.layout import PLAIN, TableLayout
from aqueduck.model.schema import TableSchema

__all__ = ["ChunkFile", "write_chunk"]


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """The files of a chunk below the lake's data path: none if the chunk had no rows, several by the table's layout."""

    chunk: int
    paths: tuple[str, ...]
    rows: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ChunkFile:
        values = json.loads(text)
        if "path" in values:  # of a journal that 0.1 wrote
            path = values.pop("path")
            values["paths"] = [] if path is None else [path]
        return cls(values["chunk"], tuple(values["paths"]), values["rows"])


def write_chunk(
    batches: Iterable[pa.RecordBatch],
    schema: TableSchema,
    *,
    data_path: str,
    directory: str,
    name: str,
    chunk: int,
    alone: AbstractContextManager[object],
    more: str = "",
    more_names: Sequence[str] = (),
    layout: TableLayout = PLAIN,
    task_memory: int = TASK_MEMORY,
) -> ChunkFile:
    """
    Cast and write the rows of one chunk, a batch at a time; `more` is SQL for additional constant columns.

    `alone` is the lock of all writers that share the task's memory: only one of them runs DuckDB at a time.
    """
    first, rest = _peek(batches)
    if first is None:
        return ChunkFile(chunk, (), 0)
    cells = [
        cast_sql(c, f"n{i}") if _is_text(first, schema, i) else f"n{i}" for i, c in enumerate(schema.columns)
    ]
    names = [c.name for c in schema.columns]
    as_it_is = cells == first.schema.names and copies_cells(schema)
    if as_it_is and not more and layout.is_plain and not is_remote(data_path):
        file = write_arrow(rest, names, directory, f"{name}.parquet", table=schema.qualified)
        return ChunkFile(chunk, (file.path,), file.rows)
    typed = ", ".join(f"{cell} as {ident(c.name)}" for cell, c in zip(cells, schema.columns, strict=True))
    with alone, task_engine(data_path, len(schema.columns), task_memory) as con:
        con.register("aqueduck_chunk", pa.RecordBatchReader.from_batches(first.schema, rest))
        query = f"select {typed}{more} from {project_rows(con, schema, 'aqueduck_chunk')}"
        files = write_laid_out(
            con, query, directory, name, layout, columns=[*names, *more_names], table=schema.qualified
        )  # none if the row filter rejected every row
    return ChunkFile(chunk, tuple(file.path for file in files), sum(file.rows for file in files))


def _is_text(batch: pa.RecordBatch, schema: TableSchema, index: int) -> bool:
    return not copies_cells(schema) or pa.types.is_string(batch.schema.field(index).type)


def _peek(batches: Iterable[pa.RecordBatch]) -> tuple[pa.RecordBatch | None, Iterator[pa.RecordBatch]]:
    iterator = iter(batches)
    first = next(iterator, None)

    def all_of_them() -> Iterator[pa.RecordBatch]:
        if first is not None:
            yield first
        yield from iterator

    return first, all_of_them()
