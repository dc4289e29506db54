"""Encrypted lakes: every file in them is encrypted, whoever wrote it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from aqueduck.config.lake_place import LakePlace
from aqueduck.config.sync import LakeConfig
from aqueduck.fanout.check import init_fanout, run_fanout_checks
from aqueduck.fanout.maintain import maintain_fanout
from aqueduck.lake.session.catalog import open_lake
from aqueduck.lake.session.pool import LakePool
from aqueduck.lake.writes.table_write import commit_parts, write_part
from aqueduck.lake.writes.write_target import WriteOrder, open_target
from aqueduck.model.bookmarks import Bookmark
from aqueduck.model.errors import EncryptedLakeError
from aqueduck.model.schema import TableName
from aqueduck.service.check_lake import check_catalog
from aqueduck.sinks.lake_table import LakeEvents
from aqueduck.sync.maintain import maintain_sync
from tests.fanout_lakes import Fan, config, connect
from tests.fix_lake import CATALOGS, catalog_of
from tests.fix_postgres import Database
from tests.sinks.test_tables import part
from tests.whole_group import WholeGroup, whole_group

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


def is_encrypted(file: Path) -> bool:
    return file.read_bytes()[-4:] == b"PARE"


def lake_files(directory: str) -> list[Path]:
    return [path for path in Path(directory).rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "enter",
    [open_lake, lambda cfg: LakeEvents(cfg, EVENTS, "slot"), check_catalog],
    ids=["sync", "events sink", "check"],
)
def test_without_the_extension_an_encrypted_lake_is_refused_before_anything_is_written(
    encrypted: LakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    enter: Callable[[LakeConfig], object],
) -> None:
    """DuckDB would refuse to encrypt at the first file; every writer raises `lake.encrypted` instead, and reading works."""
    monkeypatch.setattr("aqueduck.lake.session.encryption.can_encrypt", lambda: False)
    before = entries(tmp_path)
    with pytest.raises(EncryptedLakeError, match="httpfs"):
        enter(encrypted)
    assert entries(tmp_path) == before
    with open_lake(encrypted, read_only=True) as lake:
        assert lake.query("select count(*), sum(id) from lake.t")[0] == [(5000, 12_497_500)]


MODES = ("upsert", "append", "history", "soft_delete")


@pytest.mark.parametrize(
    "catalog", [c if c == "sqlite" else pytest.param(c, marks=pytest.mark.slow) for c in CATALOGS]
)
def test_a_sync_into_an_encrypted_lake_leaves_nothing_readable_in_it(
    db: Database, tmp_path: Path, request: pytest.FixtureRequest, catalog: str
) -> None:
    """Copies, batches of tasks and of the driver, deletes, parked changes and upkeep: source rows = lake rows, all files encrypted."""
    place = LakePlace(catalog=catalog_of(catalog, tmp_path, request), data_path=f"{tmp_path}/data/")
    connect(place, "encrypted").close()
    for mode in MODES:
        db.execute(
            f"create table {mode} (id int primary key, v text, doc text);"
            f" alter table {mode} alter doc set storage external;"
            f" insert into {mode} select g, 'legible' || g, repeat('legible ', 400) from generate_series(1, 500) g"
        )
    tables: dict[str, dict[str, Any]] = {mode: {"mode": mode} for mode in MODES}
    tables["soft_delete"]["partition_by"] = ["bucket(4, id)"]
    with whole_group(db, tmp_path, tables, catalog=place.catalog) as group:
        for mode in MODES:
            db.execute(
                f"insert into {mode} select g, 'legible' || g, 'legible' from generate_series(501, 3000) g"
            )
            db.execute(
                f"update {mode} set v = 'legible again' where id % 3 = 0; delete from {mode} where id % 7 = 0"
            )
            db.execute(f"update {mode} set id = id + 10000 where id % 11 = 0")
        group.apply(tasks=True)
        assert agree(group)
        for mode in MODES:
            db.execute(
                f"update {mode} set v = 'legible once more' where id between 20 and 60; delete from {mode} where id = 5"
            )
        group.apply()

        group.read("alter table lake.main.upsert rename to elsewhere")
        db.execute("insert into upsert select g, 'legible', 'legible' from generate_series(20001, 21000) g")
        group.apply_only(tasks=True)
        parked = [file for file in lake_files(place.data_path) if "parked" in file.parts]
        assert parked
        assert all(map(is_encrypted, parked))
        group.read("alter table lake.main.elsewhere rename to upsert")
        group.runner.copier.retry_now(
            next(s.oid for s in group.runner.states.values() if s.source == "public.upsert")
        )
        group.copy()
        assert agree(group)
        assert not any(file.exists() for file in parked)

        group.stop()
        maintain_sync(group.config)
        group.start(tables)
        assert agree(group)
        scratch = [
            p
            for p in Path(group.config.state_dir).rglob("*")
            if p.suffix == ".parquet" or "unsealed" in p.parts
        ]
        assert scratch == []
    files = lake_files(place.data_path)
    assert len(files) > len(MODES)
    assert all(map(is_encrypted, files))
    assert not any(b"legible" in file.read_bytes() for file in files)


def agree(group: WholeGroup) -> bool:
    return {c.table: c.verdict for c in group.verify()} == {f"public.{mode}": "identical" for mode in MODES}


def test_events_and_bookmarks_in_an_encrypted_lake_are_encrypted(
    encrypted: LakeConfig, tmp_path: Path
) -> None:
    """The sink and its bookmark, in files instead of the catalog."""
    config = encrypted.model_copy(update={"inline_rows": 0})
    sink = LakeEvents(config, EVENTS, "slot")
    sink.recover(sink.load())
    sink.write([part(tmp_path, 1)], 10)
    sink.save(Bookmark(10, "c"))
    sink.close()
    assert all(map(is_encrypted, lake_files(encrypted.data_path)))
    with open_lake(encrypted, read_only=True) as lake:
        assert lake.query("select count(*) from lake.log.events")[0] == [(1,)]
        files = "select count(*) from __ducklake_metadata_lake.ducklake_data_file"
        assert lake.query(files)[0] == [(3,)], "the table of the fixture, the event and the bookmark"


@pytest.mark.parametrize(
    "order",
    [WriteOrder(EVENTS, "append"), WriteOrder(EVENTS, "overwrite"), WriteOrder(EVENTS, "upsert", ("id",))],
)
def test_a_spark_write_into_an_encrypted_lake_is_encrypted(
    encrypted: LakeConfig, tmp_path: Path, order: WriteOrder
) -> None:
    """The parts of tasks, too, before the commit and if there is none."""
    pool = LakePool(max_open=2, threads=1)
    place = LakePlace(catalog=encrypted.catalog, data_path=encrypted.data_path)
    rows = pa.table({"id": pa.array(range(3000), pa.int32()), "v": pa.array(["legible"] * 3000)})
    target = open_target(pool, place, order, rows.schema)
    parts = [write_part(place, target, iter(rows.slice(n * 1500, 1500).to_batches()), None) for n in range(2)]
    written = [part for part in parts if part is not None]
    assert [is_encrypted(Path(part.path)) for part in written] == [True, True]
    assert commit_parts(pool, place, order, target, written, None)
    assert not any(Path(part.path).exists() for part in written)
    pool.close()
    with open_lake(encrypted, read_only=True) as lake:
        assert lake.query("select count(*), count(distinct id), min(v) from lake.log.events")[0] == [
            (3000, 3000, "legible")
        ]
    files = lake_files(encrypted.data_path)
    assert all(map(is_encrypted, files))
    assert not any(b"legible" in file.read_bytes() for file in files)


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
