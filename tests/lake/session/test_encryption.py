"""Encrypted lakes: refused where we would write files, used where DuckLake writes them all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from aqueduck.config.events import parse_events
from aqueduck.config.lake_place import LakePlace
from aqueduck.config.sync import LakeConfig
from aqueduck.events.check import run_event_checks
from aqueduck.fanout.check import init_fanout, run_fanout_checks
from aqueduck.fanout.maintain import maintain_fanout
from aqueduck.lake.session.catalog import open_lake
from aqueduck.lake.session.pool import LakePool
from aqueduck.lake.writes.write_target import WriteOrder, open_target
from aqueduck.model.errors import EncryptedLakeError
from aqueduck.model.schema import TableName
from aqueduck.service.check_lake import check_catalog
from aqueduck.sinks.bookmark_lake import LakeBookmarks
from aqueduck.sinks.lake_table import LakeEvents
from tests.fanout_lakes import Fan, config, connect
from tests.fix_lake import CATALOGS, catalog_of

EVENTS = TableName("log", "events")


@pytest.fixture(params=[c if c == "sqlite" else pytest.param(c, marks=pytest.mark.slow) for c in CATALOGS])
def encrypted(request: pytest.FixtureRequest, tmp_path: Path) -> LakeConfig:
    """A lake with a table, created by another program with the option ENCRYPTED."""
    cfg = LakeConfig(catalog=catalog_of(request.param, tmp_path, request), data_path=f"{tmp_path}/data/")
    with connect(LakePlace(catalog=cfg.catalog, data_path=cfg.data_path), "encrypted") as con:
        con.execute("create table lake.t as select i::int as id from range(5000) r(i)")
    return cfg


def entries(directory: Path) -> set[str]:
    # SQLite keeps -wal and -shm beside a file that it has read; they are its own, and empty of data.
    return {str(p) for p in directory.rglob("*") if not p.name.endswith(("-wal", "-shm"))}


@pytest.mark.parametrize(
    "enter",
    [
        open_lake,
        lambda cfg: LakeEvents(cfg, EVENTS, "slot"),
        lambda cfg: LakeBookmarks(cfg, "slot"),
        check_catalog,
    ],
    ids=["sync", "events sink", "events state", "check"],
)
def test_an_encrypted_lake_is_refused_before_anything_is_written(
    encrypted: LakeConfig, tmp_path: Path, enter: Callable[[LakeConfig], object]
) -> None:
    """P-T09, P-L02: every way in that would write files says `lake.encrypted` and leaves the lake as it was; reading works."""
    before = entries(tmp_path)
    with pytest.raises(EncryptedLakeError, match="ENCRYPTED"):
        enter(encrypted)
    assert entries(tmp_path) == before
    with open_lake(encrypted, read_only=True) as lake:
        assert lake.query("select count(*), sum(id) from lake.t")[0] == [(5000, 12_497_500)]
        schemas = (
            "select count(*) from duckdb_schemas() where database_name = 'lake' and schema_name = 'aqueduck'"
        )
        assert lake.query(schemas)[0] == [(0,)]


def test_a_spark_write_into_an_encrypted_lake_is_refused(encrypted: LakeConfig, tmp_path: Path) -> None:
    """P-T09, P-L02: the writer of `format("ducklake")` says so before a task runs and before it makes the table."""
    pool = LakePool(max_open=1, threads=1)
    place = LakePlace(catalog=encrypted.catalog, data_path=encrypted.data_path)
    order = WriteOrder(TableName("main", "new"), "append")
    before = entries(tmp_path)
    with pytest.raises(EncryptedLakeError):
        open_target(pool, place, order, pa.schema([("id", pa.int32())]))
    pool.close()
    assert entries(tmp_path) == before
    with open_lake(encrypted, read_only=True) as lake:
        names = "select table_name from duckdb_tables() where database_name = 'lake'"
        assert lake.query(names)[0] == [("t",)]


def test_check_of_an_events_flow_refuses_an_encrypted_sink(tmp_path: Path) -> None:
    """P-T09, P-L02, P-T07: `check` says what `run` will say."""
    with connect(LakePlace(catalog=f"sqlite:{tmp_path}/l.sqlite", data_path=f"{tmp_path}/l/"), "encrypted"):
        pass
    values = {
        "source": {
            "type": "postgres-cdc",
            "config": {
                "connection_url": "host=127.0.0.1 port=1",
                "slot_name": "events",
                "publication_name": "events",
            },
        },
        "sink": {
            "type": "ducklake",
            "config": {
                "catalog": f"sqlite:{tmp_path}/l.sqlite",
                "data_path": f"{tmp_path}/l",
                "table": "log.e",
            },
        },
    }
    found = run_event_checks(parse_events(json.dumps(values), base_dir=tmp_path, env=dict(os.environ)))
    codes = {r.name: r.error.code for r in found if r.error is not None}
    assert codes["sink"] == "lake.encrypted"


# -- where DuckLake writes everything itself


@pytest.fixture
def fan(tmp_path: Path) -> Iterator[Fan]:
    """A source and a destination that are encrypted, and one that is not."""
    fan = Fan(tmp_path, {"one": "a", "two": "b"})
    for name in ("source", "one"):
        connect(fan.place(name), "encrypted").close()
    fan.change(
        "create table lake.t (id int, c varchar, v varchar)",
        "insert into lake.t select i, (['a','b'])[1 + i % 2], 'v' || i from range(6000) r(i)",
    )
    yield fan
    fan.close()


def is_encrypted(file: Path) -> bool:
    return file.read_bytes()[-4:] == b"PARE"


def test_a_fan_out_reads_and_fills_encrypted_lakes(fan: Fan) -> None:
    """P-T09, P-L02: an encrypted source is read, an encrypted destination gets encrypted files only, including those of upkeep."""
    assert all(r.ok for r in run_fanout_checks(config(fan), env={}))
    list(init_fanout(config(fan), env={}))
    fan.poll()
    fan.change("delete from lake.t where id % 3 = 0", "update lake.t set v = 'w' where id < 100")
    fan.change("insert into lake.t select i, 'a', 'x' from range(6000, 9000) r(i)")
    fan.poll()
    assert fan.differing() == {}
    maintain_fanout(config(fan), env={})
    assert fan.differing() == {}
    files = {name: list(Path(fan.place(name).data_path).rglob("*.parquet")) for name in ("one", "two")}
    assert len(files["one"]) > 1
    assert all(map(is_encrypted, files["one"]))
    assert not any(map(is_encrypted, files["two"]))
