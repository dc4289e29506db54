"""
Spark's protocol with a source and a sink, without Spark: `python -m tests.spark.formats.micro_batches DIRECTORY DSN CAPTURE`.

An offset log before a batch, a commit log after it, and a batch that has the first and not the second is run again with the
same offsets.  The process runs until nothing more is committed in the source, or until a fault point kills it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pyspark.sql.types import StructType

from aqueduck import faults
from aqueduck.lake.writes.table_write import BatchMark
from aqueduck.spark.formats.cdc_source import CdcReader, PostgresCdcSource
from aqueduck.spark.formats.lake_writer import LakeStreamWriter, WriteOptions

QUERY = "11111111-2222-3333-4444-555555555555"


class Log:
    """One file a batch, as in a checkpoint."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory

    def last(self) -> int:
        return max((int(path.name) for path in self._directory.iterdir() if path.name.isdigit()), default=-1)

    def read(self, batch: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self._directory / str(batch)).read_text())
        return found

    def write(self, batch: int, value: dict[str, Any]) -> None:
        temporary = self._directory / f"{batch}.tmp"
        temporary.write_text(json.dumps(value))
        temporary.rename(self._directory / str(batch))


def run(directory: Path, dsn: str, capture: str) -> None:
    source = PostgresCdcSource(
        {"dsn": dsn, "slot": "s", "publication": "p", "table": "t", "create": "true", "max_rows_per_trigger": "500",
         "stage_dir": str(directory / "stage"), "capture": capture, "catchup_bytes": "1m", "poll_step_bytes": "1m"}
    )  # fmt: skip
    schema = StructType([field for field in source.schema().fields if field.name != "_commit_time"])
    reader = source.streamReader(schema)
    assert isinstance(reader, CdcReader)
    place = {
        "catalog": f"sqlite:{directory}/lake.sqlite",
        "data_path": f"{directory}/lake/",
        "table": "history",
    }
    offsets, commits = Log(directory / "offsets"), Log(directory / "commits")
    reader.prepareForTriggerAvailableNow()
    try:
        while True:
            batch = commits.last() + 1
            start = offsets.read(batch - 1) if batch else reader.initialOffset()
            if offsets.last() < batch:
                end = reader.latestOffset(start, reader.getDefaultReadLimit())
                if end == start:
                    return
                offsets.write(batch, end)
                faults.point("test.offset_logged")
                if batch:
                    reader.commit(start)
            writer = LakeStreamWriter(WriteOptions.read(place, overwrite=False), schema)
            mark = BatchMark(QUERY, batch)
            parts = reader.partitions(start, offsets.read(batch))
            messages = [writer._write(reader.read(part), mark) for part in parts]
            writer._commit(messages, mark)
            commits.write(batch, {})
            faults.point("test.commit_logged")
    finally:
        reader.stop()


if __name__ == "__main__":
    run(Path(sys.argv[1]), *sys.argv[2:4])
