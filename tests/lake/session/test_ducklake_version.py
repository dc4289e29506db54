"""Catalogs of other versions: refused with both versions and a way out, before anything happens; and what we rely on in DuckLake."""

from __future__ import annotations

import base64
import contextlib
import re
import sqlite3
import zlib
from collections.abc import Callable
from pathlib import Path

import duckdb
import psycopg
import pyarrow as pa
import pytest

import aqueduck
from aqueduck.config.lake_place import LakePlace
from aqueduck.config.sync import LakeConfig
from aqueduck.fanout.check import init_fanout, run_fanout_checks
from aqueduck.lake.session.catalog import open_lake
from aqueduck.lake.session.ducklake_version import CATALOG_TABLES, FORMAT, FUNCTIONS, WORKAROUNDS
from aqueduck.lake.session.pool import LakePool
from aqueduck.lake.writes.write_target import WriteOrder, open_target
from aqueduck.model.errors import AqueduckError, LakeVersionError
from aqueduck.model.schema import TableName
from aqueduck.service.check_lake import check_catalog
from aqueduck.sinks.lake_table import LakeEvents
from aqueduck.sync.check import run_checks
from aqueduck.sync.prepare import prepare
from tests.fanout_lakes import Fan, config
from tests.fix_lake import CATALOGS, catalog_of
from tests.fix_postgres import Database
from tests.small_service import small_config

T = TableName("main", "t")

HEADER_OF_DUCKDB_2 = zlib.decompress(
    base64.b85decode(
        "c-l)>Tf6Rxw#XcpP-pMw%nU?<G9x_$Jp<hGDW)dLNlB^3DQWo4F~0hc_g281AFbgj*A-fF3K>ShC>RB!U=)mkQ7{Td!6+C7qhJ(_f>A&d001k)60Z"
    )
)
"""The first block of an empty database that DuckDB 2.0.0 made."""


def as_version(catalog: str, version: str) -> None:
    """What another DuckLake would have written."""
    statement = "update ducklake_metadata set value = {} where key = 'version'"
    if catalog.startswith("sqlite:"):
        with contextlib.closing(sqlite3.connect(catalog.removeprefix("sqlite:"))) as file:
            file.execute(statement.format("?"), [version])
            file.commit()
    elif catalog.startswith("postgres:"):
        with psycopg.connect(catalog.removeprefix("postgres:")) as conn:
            conn.execute(statement.format("%s"), [version])
    else:
        with duckdb.connect(catalog) as con:
            con.execute(statement.format("?"), [version])


@pytest.fixture(params=CATALOGS)
def lake_of_1_1(request: pytest.FixtureRequest, tmp_path: Path) -> LakeConfig:
    """A catalog copy in which the version was edited."""
    cfg = LakeConfig(catalog=catalog_of(request.param, tmp_path, request), data_path=f"{tmp_path}/data/")
    open_lake(cfg).close()
    as_version(cfg.catalog, "1.1")
    return cfg


def test_a_new_catalog_has_the_supported_version(tmp_path: Path) -> None:
    """Otherwise the table of supported versions is wrong."""
    with open_lake(LakeConfig(catalog=f"sqlite:{tmp_path}/c.sqlite", data_path=f"{tmp_path}/data")) as lake:
        found = lake.query(
            "select value from __ducklake_metadata_lake.ducklake_metadata where key = 'version'"
        )
    assert found[0] == [(FORMAT,)]


WAYS_IN: dict[str, Callable[[LakeConfig], object]] = {
    "write": open_lake,
    "read": lambda cfg: open_lake(cfg, read_only=True),
    "check": check_catalog,
    "events": lambda cfg: LakeEvents(cfg, TableName("log", "events"), "slot"),
    "spark": lambda cfg: open_target(
        LakePool(max_open=1, threads=1),
        LakePlace(catalog=cfg.catalog, data_path=cfg.data_path),
        WriteOrder(T, "append"),
        pa.schema([("id", pa.int32())]),
    ),
}


def test_every_way_in_names_both_versions_and_the_way_out(lake_of_1_1: LakeConfig, tmp_path: Path) -> None:
    """On all catalogs; no file and no directory is added."""
    before = {p for p in tmp_path.rglob("*") if not p.name.endswith(("-wal", "-shm"))}
    for name, enter in WAYS_IN.items():
        with pytest.raises(
            LakeVersionError, match=f"DuckLake version 1.1, but this is DuckLake {FORMAT}"
        ) as found:
            enter(lake_of_1_1)
        assert found.value.code == "lake.version", name
        assert "install an Aqueduck that supports" in (found.value.hint or ""), name
    assert {p for p in tmp_path.rglob("*") if not p.name.endswith(("-wal", "-shm"))} == before


def test_an_older_catalog_can_be_migrated(tmp_path: Path) -> None:
    """The hint names the option; Aqueduck never migrates a lake that others read."""
    cfg = LakeConfig(catalog=f"sqlite:{tmp_path}/c.sqlite", data_path=f"{tmp_path}/data")
    open_lake(cfg).close()
    as_version(cfg.catalog, "0.3")
    with pytest.raises(LakeVersionError, match=r"DuckLake version 0\.3") as found:
        open_lake(cfg)
    assert "automatic_migration" in (found.value.hint or "")


def test_a_catalog_in_a_file_of_duckdb_2_is_refused(tmp_path: Path) -> None:
    """DuckDB cannot open the file at all, so the version of its storage is named."""
    file = tmp_path / "lake.ducklake"
    file.write_bytes(HEADER_OF_DUCKDB_2.ljust(3 * 4096, b"\0"))
    before = file.read_bytes()
    for enter in (WAYS_IN["write"], WAYS_IN["check"], WAYS_IN["spark"]):
        with pytest.raises(LakeVersionError, match=rf"storage version 999, but DuckDB {duckdb.__version__}"):
            enter(LakeConfig(catalog=str(file), data_path=f"{tmp_path}/data/"))
    assert file.read_bytes() == before


def test_a_sync_does_nothing_to_the_source_either(db: Database, tmp_path: Path) -> None:
    """`check` says it, and `init` makes no registry, no publication and no slot."""
    db.execute("create table t (id int primary key)")
    cfg = small_config(db, tmp_path, "public.t")
    open_lake(cfg.lake).close()
    as_version(cfg.lake.catalog, "1.1")
    assert [r.error.code for r in run_checks(cfg) if r.error is not None and r.name == "catalog"] == [
        "lake.version"
    ]
    with pytest.raises(LakeVersionError):
        list(prepare(cfg))
    made = "select count(*) from pg_namespace where nspname = 'aqueduck'"
    assert db.query(made) == [(0,)]
    assert db.query("select count(*) from pg_publication") == [(0,)]
    assert db.query("select count(*) from pg_replication_slots where slot_name like 'aqueduck%'") == [(0,)]


@pytest.mark.parametrize("name", ["source", "one"])
def test_a_fan_out_names_the_lake_and_leaves_all_of_them(tmp_path: Path, name: str) -> None:
    """The source's version is refused, and a destination's."""
    fan = Fan(tmp_path, {"one": "a"})
    fan.change("create table lake.t (id int, c varchar)")
    fan.poll()
    fan.close()
    as_version(fan.place(name).catalog, "1.1")
    found = [r.error.code for r in run_fanout_checks(config(fan), env={}) if r.error is not None]
    assert found == ["lake.version"]
    with pytest.raises(AqueduckError, match=r"\[lake.version\] .* version 1\.1"):
        list(init_fanout(config(fan), env={}))


# -- the checklist for the next version

SOURCES = {
    path: path.read_text()
    for path in Path(aqueduck.__file__).parent.rglob("*.py")
    if path.name != "ducklake_version.py"
}


def test_everything_that_is_used_of_ducklake_is_listed() -> None:
    """One module has what to look at when DuckLake changes; nothing in it is out of date."""
    text = "\n".join(SOURCES.values())
    catalog = set(re.findall(r"\bducklake_\w+", text)) & CATALOG_TABLES
    queried = set(re.findall(r"\.(ducklake_[a-z_]+)", text)) - {"ducklake_version"}
    called = set(re.findall(r"\b(ducklake_[a-z_]+[a-z])\(", text)) - set(re.findall(r"def (\w+)", text))
    assert queried <= CATALOG_TABLES
    assert catalog == CATALOG_TABLES
    assert called <= FUNCTIONS
    assert (
        called | {"ducklake_table_insertions", "ducklake_table_deletions"} == FUNCTIONS
    )  # these two by a variable


def test_every_workaround_has_its_code_and_the_test_that_ends_it() -> None:
    """A test of DuckLake's behaviour fails when the workaround may go."""
    tests = (Path(__file__).parents[1] / "conformance" / "test_ducklake.py").read_text()
    modules = {".".join(p.relative_to(Path(aqueduck.__file__).parent).with_suffix("").parts) for p in SOURCES}
    for workaround in WORKAROUNDS:
        assert workaround.module in modules
        assert f"def {workaround.test}(" in tests
