"""Offsets of the stream `ducklake_changes`, without Spark: they distinguish one history of a lake from another."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StructType

from aqueduck.model.errors import SourceDivergedError
from aqueduck.spark.formats.lake_source import LakeChangesSource, LakeStreamReader
from tests.fanout_lakes import Fan


@pytest.fixture
def fan(tmp_path: Path) -> Iterator[Fan]:
    fan = Fan(tmp_path, {})
    fan.change("create table lake.t (id int, c varchar, v int)", "insert into lake.t values (1, 'a', 1)")
    yield fan
    fan.close()


class Stream:
    """A query: it keeps its offset as JSON, as a checkpoint does, and each start has a reader of its own."""

    def __init__(self, fan: Fan) -> None:
        place = fan.place("source")
        self._source = LakeChangesSource(
            {"catalog": place.catalog, "data_path": place.data_path, "table": "t"}
        )
        self.offset = ""
        self.restart()

    def restart(self) -> None:
        schema: StructType = self._source.schema()
        reader = self._source.streamReader(schema)
        assert isinstance(reader, LakeStreamReader)
        self.reader = reader

    def batch(self) -> list[int]:
        """The ids of the rows that came."""
        start = json.loads(self.offset) if self.offset else self.reader.initialOffset()
        end = self.reader.latestOffset(start, ReadAllAvailable())
        self.offset = json.dumps(end)
        if end == start:
            return []
        partitions = self.reader.partitions(start, end)
        batches = [batch for part in partitions for batch in self.reader.read(part)]
        return sorted(row["id"] for batch in batches for row in batch.to_pylist())


@pytest.mark.parametrize("restarted", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize("written", [0, 1, 2], ids=["behind", "same", "past"])
def test_a_lake_that_was_put_back_ends_the_stream(fan: Fan, restarted: bool, written: int) -> None:
    """Rows that never were would stay with the reader, and rows of the same ids of lake snapshots would not come."""
    stream = Stream(fan)
    assert stream.batch() == [1]
    kept, lake = fan.directory / "backup.sqlite", fan.directory / "source.sqlite"
    fan.let_go()
    shutil.copy(lake, kept)
    fan.change("insert into lake.t values (2, 'lost', 2)")
    assert stream.batch() == [2]
    fan.let_go()
    shutil.copy(kept, lake)
    fan.change(*(f"insert into lake.t values ({n}, 'new', 1)" for n in range(3, 3 + written)))
    if restarted:
        stream.restart()
    for _ in range(2):
        with pytest.raises(SourceDivergedError, match="was restored") as caught:
            stream.batch()
    assert str(caught.value).startswith("[lake.diverged]")
    assert "new checkpoint" in (caught.value.hint or "")


def test_an_offset_of_an_earlier_version_is_adopted(fan: Fan) -> None:
    """It has no stamp; the stream continues from it, and the next offset has one. An idle lake makes no new offset."""
    stream = Stream(fan)
    assert stream.batch() == [1]
    known: dict[str, Any] = json.loads(stream.offset)
    stream.offset = json.dumps({"lake_snapshot": known["lake_snapshot"]})
    before = stream.offset
    stream.restart()
    assert (stream.batch(), stream.offset) == ([], before)
    fan.change("insert into lake.t values (2, 'b', 2)")
    assert stream.batch() == [2]
    assert json.loads(stream.offset).keys() == known.keys() == {"lake_snapshot", "table", "stamp"}


@pytest.mark.parametrize("known", [True, False], ids=["", "earlier version"])
@pytest.mark.parametrize("how", ["create or replace table", "drop table lake.t; create table"])
def test_another_table_of_the_name_ends_the_stream(fan: Fan, how: str, known: bool) -> None:
    """The deletion of the old rows is no change of the new table, so the reader would keep them."""
    stream = Stream(fan)
    assert stream.batch() == [1]
    if not known:
        stream.offset = json.dumps({"lake_snapshot": json.loads(stream.offset)["lake_snapshot"]})
        fan.change("insert into lake.t values (2, 'b', 2)")
    fan.change(f"{how} lake.t (id int, c varchar, v int)", "insert into lake.t values (3, 'c', 3)")
    with pytest.raises(SourceDivergedError, match="created again") as caught:
        stream.batch()
    assert str(caught.value).startswith("[lake.diverged]")
    fresh = Stream(fan)
    assert fresh.batch() == [3]
