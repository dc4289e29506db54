from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from aqueduck.lake.commit.copy_files import ChunkFile, write_chunk
from aqueduck.model.schema import TableSchema


def written_chunk(batches: Iterable[pa.RecordBatch], schema: TableSchema, **options: Any) -> ChunkFile:
    """One chunk, written to its end."""
    return write_chunk(batches, schema, alone=threading.Lock(), **options)
