"""Lakes whose files are in an object store: real DuckLake and httpfs against a local S3 server."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from aqueduck.config.lake_place import LakePlace
from aqueduck.config.sync import LakeConfig
from aqueduck.lake.ledger.parking import (
    copy_to_parking,
    ensure_parking,
    remove_parking_orphans,
    sealing,
    unsealed,
)
from aqueduck.lake.session.catalog import open_lake
from aqueduck.lake.session.engine import open_kernel
from aqueduck.lake.session.files import write_files
from aqueduck.lake.session.object_stores import know_store
from aqueduck.lake.session.pool import LakePool
from aqueduck.lake.session.storage import list_files, open_input, remove_file
from aqueduck.lake.target.apply import add_files
from aqueduck.lake.upkeep.orphans import remove_orphans
from aqueduck.model.errors import AqueduckError, DataPathError
from aqueduck.model.schema import TableName
from tests.fanout_lakes import Fan, connect
from tests.fix_s3 import S3
from tests.model.test_batches import segment


@pytest.fixture
def fan(s3: S3, tmp_path: Path) -> Iterator[Fan]:
    """The source in one bucket, each destination in its own."""
    names = ("source", "one", "two")
    places = {
        name: LakePlace(
            catalog=f"sqlite:{tmp_path}/{name}.sqlite",
            data_path=f"s3://{s3.make_bucket(name)}/data/",
            properties=s3.resolved,
        )
        for name in names
    }
    fan = Fan(tmp_path, {"one": "a", "two": "b"}, places=places, inline=0)
    fan.change("create table lake.t (id int, c varchar, v int)")
    yield fan
    fan.close()


def test_a_fan_out_between_buckets(fan: Fan, s3: S3) -> None:
    """P-F01, P-F02: seed, inserts, updates, moves and deletes, with every file of every lake in S3."""
    fan.change("insert into lake.t select i, (['a','b','x'])[1 + i % 3], i from range(6000) r(i)")
    fan.poll()
    assert fan.differing() == {}
    fan.change(
        "update lake.t set c = 'b', v = -v where id % 7 = 0",
        "delete from lake.t where id % 11 = 0",
        "insert into lake.t select i + 9000, 'a', i from range(3000) r(i)",
    )
    fan.poll()
    assert fan.differing() == {}
    for name in ("source", "one", "two"):
        assert s3.keys(fan.place(name).data_path.split("/")[2], "data/main/t/")


@pytest.mark.slow
def test_a_large_file_goes_up_in_parts(fan: Fan, s3: S3) -> None:
    """A file of many megabytes is uploaded in parts, each small enough for the memory of a task."""
    before = s3.asked.copy()
    fan.change("insert into lake.t select i, 'a', hash(i) % 2000000000 from range(1500000) r(i)")
    fan.poll()
    asked = s3.asked - before
    assert asked["POST uploads"] >= 1
    assert asked["PUT part"] >= 2
    assert fan.look("one", "select count(*), sum(v) from lake.t") == fan.look(
        "source", "select count(*), sum(v) from lake.t"
    )


def test_lost_credentials_are_an_error_without_secrets(fan: Fan, s3: S3) -> None:
    """P-F09: a destination that S3 refuses fails alone; its error is ours and shows no key."""
    fan.poll()
    wrong = tuple((k, "geheim" if "secret" in k or "key" in k else v) for k, v in fan.place("two").properties)
    good = fan.places["two"]
    fan.places["two"] = good.model_copy(update={"properties": wrong})
    fan.change("insert into lake.t select i, (['a','b'])[1 + i % 2], i from range(4000) r(i)")
    one, two = sorted(fan.poll(), key=lambda a: a.id)
    assert one.error is None
    assert two.error is not None
    assert two.error.startswith("[lake.")
    assert "geheim" not in two.error
    fan.places["two"] = good
    fan.poll()
    assert fan.differing() == {}


@pytest.fixture
def config(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LakeConfig:
    """A lake of the flow `sync` in S3, with credentials in variables."""
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    return LakeConfig(
        catalog=f"sqlite:{tmp_path}/lake.sqlite",
        data_path=f"s3://{s3.make_bucket('sync')}/data",
        properties=s3.properties,
    )


def test_what_tasks_write_is_added_and_orphans_go(config: LakeConfig, s3: S3) -> None:
    """A file that a task wrote to S3 becomes rows of the lake; one that a dead batch left is removed."""
    target = TableName("main", "t")
    with open_lake(config) as session:
        session.execute("create table lake.main.t (id int)")
        know_store(config.data_path, config.properties)
        kernel = open_kernel(config.data_path, threads=1, memory_limit="160MB")
        directory = f"{config.data_path}/main/t"
        [kept] = write_files(
            kernel, "select i::int as id from range(5000) r(i)", directory, "aqueduck-g-r1-1.parquet"
        )
        write_files(kernel, "select 1 as id", directory, "aqueduck-g-r1-2.parquet")
        session.execute(f"call ducklake_add_data_files('lake', 't', '{kept.path}')")
        assert session.execute("select count(*) from lake.main.t") == [(5000,)]
        removed = remove_orphans(session, "g", [target])
        assert [path.rpartition("/")[2] for path in removed] == ["aqueduck-g-r1-2.parquet"]
        left = s3.keys(config.data_path.split("/")[2], "data/main/t/")
        assert [key for key in left if key.endswith(".parquet")] == ["data/main/t/aqueduck-g-r1-1.parquet"]
        assert session.execute("select count(*) from lake.main.t") == [(5000,)]
        kernel.close()


def test_parked_segments_are_in_the_bucket(config: LakeConfig, s3: S3, tmp_path: Path) -> None:
    """Changes of a table that is not ready are copied to S3 and read from there; orphans among them go."""
    staged = tmp_path / "segment.arrow"
    staged.write_bytes(b"columns")
    with open_lake(config) as session:
        ensure_parking(session)
        [parked] = copy_to_parking(
            config.data_path, "g", "r1", [dataclasses.replace(segment(1), path=str(staged))]
        )
        with open_input(parked.path) as file:
            assert file.read() == b"columns"
        assert len(remove_parking_orphans(session, "g")) == 1
        assert list(list_files(parked.path.rpartition("/")[0], "")) == []


def test_an_encrypted_lake_in_a_bucket_has_nothing_readable(
    config: LakeConfig, s3: S3, tmp_path: Path
) -> None:
    """Rows that tasks prepared on local scratch, and parked segments, which are decrypted to scratch for a replay."""
    bucket = config.data_path.split("/")[2]
    place = LakePlace(catalog=config.catalog, data_path=f"{config.data_path}/", properties=s3.resolved)
    connect(place, "encrypted").close()
    staged, prepared = tmp_path / "segment.arrow", tmp_path / "rows.parquet"
    staged.write_bytes(b"legible columns")
    with open_lake(config) as session:
        ensure_parking(session)
        session.execute("create table lake.main.t (id int, v varchar)")
        session.execute(f"copy (select i::int as id, 'legible' as v from range(5000) r(i)) to '{prepared}'")
        with session.transaction():
            add_files(session, TableName("main", "t"), [str(prepared)])
        assert session.execute("select count(*), min(v) from lake.main.t") == [(5000, "legible")]
        [parked] = copy_to_parking(
            config.data_path,
            "g",
            "r1",
            [dataclasses.replace(segment(1), path=str(staged))],
            seal=sealing(session),
        )
        with unsealed(session, {1: [parked]}, tmp_path / "unsealed") as readable:
            file = Path(readable[1][0].path)
            assert file.read_bytes() == b"legible columns"
            assert file.parent.stat().st_mode & 0o077 == 0
        assert not file.parent.exists()
    keys = [key for key in s3.keys(bucket, "data/") if not key.endswith("/")]
    assert len(keys) == 2
    for key in keys:
        content = s3.client.get_object(Bucket=bucket, Key=key)["Body"].read()
        assert content.endswith(b"PARE")
        assert b"legible" not in content


def test_a_bucket_that_is_not_there_is_an_error_of_ours(s3: S3, tmp_path: Path) -> None:
    """The message names no address and no key."""
    place = LakePlace(
        catalog=f"sqlite:{tmp_path}/x.sqlite", data_path="s3://no-such-bucket/x/", properties=s3.resolved
    )
    pool = LakePool(threads=1)
    with pytest.raises(AqueduckError) as caught, pool.use(place) as lake:
        lake.execute(f"create table {lake.alias}.t as select i from range(5000) r(i)")
    assert s3.address not in str(caught.value)
    pool.close()


def test_a_store_that_refuses_is_an_error_of_ours(s3: S3) -> None:
    """Errors of listing and removing have the store's answer, but neither its address nor a key."""
    path = f"s3://{s3.make_bucket('refusing')}/data"
    know_store(path, {**dict(s3.resolved), "s3_access_key_id": "geheim"})
    for doing in (lambda: list(list_files(path, "")), lambda: remove_file(f"{path}/x.parquet")):
        with pytest.raises(DataPathError, match="ACCESS_DENIED") as caught:
            doing()
        assert s3.address not in str(caught.value)
        assert "geheim" not in str(caught.value)
