"""`sync` into a lake whose files are in S3: the files that driver and workers write there, and the files that remain."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from aqueduck.config.lake_place import LakePlace
from tests.fanout_lakes import allow, engine
from tests.fix_postgres import Database
from tests.fix_s3 import S3
from tests.fix_service import Sync

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@dataclass
class S3Sync(Sync):
    """A service whose lake is in a bucket."""

    s3: S3 = field(default_factory=lambda: S3(""))
    bucket: str = ""

    @property
    def place(self) -> LakePlace:
        return LakePlace(
            catalog=f"sqlite:{self.directory}/lake.sqlite",
            data_path=f"s3://{self.bucket}/lake",
            properties=self.s3.resolved,
        )

    def write_config(self) -> None:
        super().write_config()
        config = json.loads(self.config_file.read_text())
        config["lake"] |= {"data_path": self.place.data_path, "properties": self.s3.properties}
        self.config_file.write_text(json.dumps(config))

    def _on_lake(self, query: str, options: str) -> list[tuple[Any, ...]]:
        with engine() as con:
            allow(con, self.place)
            con.execute(f"attach 'ducklake:{self.place.catalog}' as lake ({options})")
            return con.execute(query).fetchall()


@pytest.fixture
def sync(db: Database, tmp_path: Path, s3: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Sync]:
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    made = S3Sync(db, tmp_path, ("public.a", "public.b"), copy=True, s3=s3, bucket=s3.make_bucket("sync"))
    yield made
    for process in made.processes:
        if process.poll() is None:
            made.kill(process)


def test_copy_stream_and_restart_with_every_file_in_s3(db: Database, sync: S3Sync, s3: S3) -> None:
    """The copy's and the fold's tasks write to S3, the lake has the source's rows, a killed batch leaves no orphan."""
    db.execute(
        "create table a (id int primary key, v text); create table b (id int primary key, n numeric(10, 2))"
    )
    db.execute("insert into a select g, repeat('x', 100) || g from generate_series(1, 50000) g")
    db.execute("insert into b select g, g * 1.5 from generate_series(1, 10) g")
    process = sync.started()
    sync.wait_same()
    db.execute(
        "update a set v = 'changed' where id % 3 = 0; insert into b select g, 1 from generate_series(100, 9000) g"
    )
    sync.wait_same()
    sync.stop(process)
    db.execute(
        "insert into a select g, 'more' from generate_series(60001, 90000) g; delete from a where id % 7 = 0"
    )
    assert sync.once(fault="batch.files_written") != 0
    sync.catch_up()
    known = {
        path.rpartition("/")[2]
        for (path,) in sync.lake("select path from __ducklake_metadata_lake.ducklake_data_file")
    }
    ours = {
        key.rpartition("/")[2]
        for key in s3.keys(sync.bucket)
        if "aqueduck-test-" in key and key.endswith(".parquet")
    }
    assert ours
    assert ours <= known
    assert s3.env["S3_SECRET_ACCESS_KEY"] not in sync.log()
