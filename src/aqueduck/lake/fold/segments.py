"""
Read staged segments into DuckDB, a batch of rows at a time.

A segment is an Arrow IPC file that `postgres.capture.stage` writes.  `scan` gives DuckDB a stream over
several segments that reads only the requested columns and holds one batch in memory.
A stream can be read once.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc

from aqueduck.lake.fold.projected import ChangeView
from aqueduck.lake.session.storage import open_input
from aqueduck.model.changes import SegmentRef
from aqueduck.model.errors import LakeWriteError
from aqueduck.model.schema import TableSchema
from aqueduck.model.visibility import Visibility, visibility_of

__all__ = ["Scans", "columns_of", "read_batches"]

_numbers = itertools.count(1)


def columns_of(segment: SegmentRef) -> TableSchema:
    """The lake's columns for the version of the table in a segment."""
    return TableSchema.from_json(segment.schema_json).in_lake


class Scans:
    """Streams over the same segments, registered under names for SQL; each name can be read once."""

    def __init__(
        self,
        con: duckdb.DuckDBPyConnection,
        segments: Sequence[SegmentRef],
        skip_before: int | Visibility = 0,
        skip_from: int | Visibility | None = None,
        view: ChangeView | None = None,
    ) -> None:
        """With a `view`, scans return the changes as the view presents them."""
        self._con = con
        self._view = view
        self._segments = segments
        self.range = (skip_before, skip_from)
        self._paths = tuple(s.path for s in segments if s.kind == "rows")
        self._names: list[str] = []

    def scan(self, columns: Sequence[str], *, as_it_is: bool = False) -> str:
        """A new stream with these columns, as SQL for a `from` clause; `as_it_is` bypasses the view."""
        name = f"aqueduck_scan_{next(_numbers)}"
        view = None if as_it_is else self._view
        read = columns if view is None else view.columns(columns)
        self._con.register(name, read_batches(self._paths, read, *self.range))
        self._names.append(name)
        return name if view is None else view.query(columns, name)

    def add(self, table: pa.Table) -> str:
        """Give rows in memory a name for SQL; they can be read several times."""
        name = f"aqueduck_scan_{next(_numbers)}"
        self._con.register(name, table)
        self._names.append(name)
        return name

    @property
    def empty(self) -> bool:
        return not self._paths

    def some(self, part: slice) -> Scans:
        """Streams over some of the segments."""
        return Scans(self._con, self._segments[part], *self.range, self._view)

    def close(self) -> None:
        """Unregister the streams."""
        for name in self._names:
            with contextlib.suppress(duckdb.Error):  # already removed by a rollback or a lost connection
                self._con.unregister(name)
        self._names.clear()


def read_batches(
    paths: Sequence[str],
    columns: Sequence[str],
    skip_before: int | Visibility = 0,
    skip_from: int | Visibility | None = None,
) -> pa.RecordBatchReader:
    """
    One stream over the files, which are opened one after another.

    Changes that committed before the position `skip_before`, or that the visibility `skip_before` shows, are left
    out because the table's copy has them.  With `skip_from`, changes from there on are left out as well.
    """
    if not paths:
        raise ValueError("a run must have at least one segment")
    with _opened(paths[0]) as file:
        schema = pa.schema([pa.ipc.open_file(file).schema.field(name) for name in columns])
    return pa.RecordBatchReader.from_batches(schema, _batches(paths, columns, skip_before, skip_from))


def _batches(
    paths: Sequence[str],
    columns: Sequence[str],
    skip_before: int | Visibility,
    skip_from: int | Visibility | None,
) -> Iterator[pa.RecordBatch]:
    positions = ["_lsn", "_xid"] if skip_before or skip_from is not None else []
    for path in paths:
        with _opened(path) as file:
            schema = pa.ipc.open_file(file).schema
            fields = [schema.get_field_index(name) for name in {*columns, *positions}]
            file.seek(0)
            reader = pa.ipc.open_file(
                file, options=pa.ipc.IpcReadOptions(included_fields=sorted(fields), use_threads=False)
            )
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                if skip_before:
                    batch = batch.filter(pc.invert(visibility_of(skip_before).mask(batch)))
                if skip_from is not None:
                    batch = batch.filter(visibility_of(skip_from).mask(batch))
                yield batch.select(list(columns))


@contextlib.contextmanager
def _opened(path: str) -> Iterator[pa.NativeFile]:
    try:
        file = open_input(path)
    except OSError as exc:
        raise LakeWriteError("a staged segment is missing") from exc
    with file:
        yield file
