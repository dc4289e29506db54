"""The configuration that users of DuckLake fan-out know, unchanged: PostgreSQL catalogs and S3."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from aqueduck.config.lake_place import LakePlace
from aqueduck.lab.embedded import EmbeddedPostgres
from tests.config.test_fanout import REFERENCE
from tests.fanout_lakes import connect
from tests.fix_s3 import S3

BUCKETS = {
    "source": "source-bucket/data",
    "quacksworth": "quacksworth-data/",
    "mallardine": "mallardine-data/",
}


@pytest.mark.slow
@pytest.mark.spark
def test_the_reference_file_runs_as_it_is(pg: EmbeddedPostgres, s3: S3, tmp_path: Path) -> None:
    """Only the address of the object store is another: seed, changes, a move and deletes reach both lakes; verify agrees."""
    file = tmp_path / "viaduck.yaml"
    file.write_text(REFERENCE.replace("minio:9000", s3.address))
    places, env = {}, {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **s3.env}
    with psycopg.connect(pg.dsn, autocommit=True) as admin:
        for name, path in BUCKETS.items():
            admin.execute(f"drop database if exists viaduck_{name} with (force)".encode())
            admin.execute(f"create database viaduck_{name}".encode())
            s3.client.create_bucket(Bucket=path.split("/")[0])
            uri = pg.dsn_for(f"viaduck_{name}")
            env["SOURCE_POSTGRES_URI" if name == "source" else f"DEST_{name.upper()}_POSTGRES_URI"] = uri
            places[name] = LakePlace(
                catalog=f"postgres:{uri}", data_path=f"s3://{path}".rstrip("/") + "/", properties=s3.resolved
            )

    def aqueduck(*arguments: str) -> str:
        command = [sys.executable, "-m", "aqueduck.cli", *arguments, "-c", str(file)]
        done = subprocess.run(
            command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    with connect(places["source"], "data_inlining_row_limit 5") as con:
        con.execute("create table lake.events (event_id bigint, company varchar, amount double)")
        con.execute(
            "insert into lake.events select i, (['quacksworth','mallardine','nobody'])[1 + i % 3], i / 4 from range(9000) r(i)"
        )
    aqueduck("check")
    aqueduck("run", "--once")
    with connect(places["source"], "data_inlining_row_limit 5") as con:
        con.execute("update lake.events set company = 'mallardine', amount = -1 where event_id % 30 = 0")
        con.execute("delete from lake.events where event_id % 7 = 0")
    aqueduck("run", "--once")
    aqueduck("verify")
    query = "from lake.events where company = '{0}' order by event_id"
    for name in ("quacksworth", "mallardine"):
        with connect(places["source"], "read_only") as con:
            expected = con.execute(query.format(name)).fetchall()
        with connect(places[name], "read_only") as con:
            assert con.execute("from lake.events order by event_id").fetchall() == expected
        assert s3.keys(BUCKETS[name].split("/")[0])
    assert "live" in aqueduck("status")
