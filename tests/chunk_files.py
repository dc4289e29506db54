from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from aqueduck.lake.arrow_files import WriteBehind
from aqueduck.lake.copy_files import ChunkFile, write_chunk
from aqueduck.schema import TableSchema


def written_chunk(batches: Iterable[pa.RecordBatch], schema: TableSchema, **options: Any) -> ChunkFile:
    """One chunk, written to its end."""
    with WriteBehind() as behind:
        return behind.submit(
            write_chunk(batches, schema, behind=behind, alone=threading.Lock(), **options)
        ).result()
