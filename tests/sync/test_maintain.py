"""`aqueduck maintain`: a sync's lake, the lakes of a fan-out, and what their readers need."""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from aqueduck.cli.commands import app
from aqueduck.config.fanout import FanoutConfig, load_fanout, parse_fanout
from aqueduck.config.lake_place import LakePlace
from aqueduck.config.sync import MaintenanceConfig
from aqueduck.fanout.maintain import (
    DestinationUpkeep,
    maintain_fanout,
    only_instance,
    shares_directory,
)
from aqueduck.lake.session.catalog import METADATA, open_lake
from aqueduck.lake.upkeep.lake_readers import oldest_cursor
from aqueduck.lake.upkeep.maintenance import maintain
from aqueduck.model.errors import ConfigError, MaintenanceError, ServiceLockedError
from aqueduck.state_files.files import replace_file
from aqueduck.sync import maintain as maintenance_sync
from aqueduck.sync.maintain import maintain_sync
from aqueduck.sync.service import SyncService
from tests.fanout_lakes import Fan, T, document
from tests.fix_postgres import Database, wait_until
from tests.small_service import SmallService, small_config, small_service

EAGER = MaintenanceConfig(delete_share=0.05, grace_hours=0, budget_seconds=60)


def source_and_lake(service: SmallService) -> tuple[list[object], list[object]]:
    source = service.db.query("select id, v from public.t order by id")
    lake = service.lake.execute("select id, v from lake.main.t order by id")
    return list(source), list(lake)


def at_random(db: Database, rnd: random.Random) -> None:
    """One source transaction."""
    low = rnd.randint(0, 400)
    statement = rnd.choice(
        (
            f"insert into public.t select n, 'a' from generate_series({low}, {low + rnd.choice((2, 90))}) n"
            " on conflict (id) do update set v = excluded.v || 'b'",
            f"update public.t set v = v || 'u' where id % {rnd.randint(2, 9)} = 0",
            f"delete from public.t where id between {low} and {low + 60}",
            f"update public.t set id = id + 1000 where id between {low} and {low + 3}",
        )
    )
    db.execute(statement)


@pytest.mark.slow
def test_the_lake_equals_the_source_with_maintenance_in_between(db: Database, tmp_path: Path) -> None:
    """P-S32: batches, and maintenance between them on the committer's own session."""
    db.execute("create table public.t (id int primary key, v text)")
    rnd = random.Random(3)
    with small_service(db, tmp_path, "public.t") as service:
        work = maintenance_sync._session_work(
            service.lake,
            contextlib.nullcontext(),
            lambda: maintenance_sync._tables_of(service.lake, ["test"]),
            lambda: (None, None),
            lambda lake, older_than: 0,
        )
        for _ in range(3):
            for _ in range(2):
                at_random(db, rnd)
                service.apply()
            report = maintain(work, EAGER.model_copy(update={"retention_hours": 1e-9}))
            assert report.error is None
            source, lake = source_and_lake(service)
            assert lake == source
        assert report.totals.files_after <= 20
        assert report.expiry.snapshots_after < 10


def test_the_command_works_alone_where_no_service_runs(db: Database, tmp_path: Path) -> None:
    """It holds the groups' locks, reports before and after, and changes no row."""
    db.execute("create table public.t (id int primary key, v text)")
    with small_service(db, tmp_path, "public.t") as service:
        db.execute("insert into public.t select n, 'a' from generate_series(1, 500) n")
        service.apply()
        db.execute("delete from public.t where id > 100")
        service.apply()
        service.stop()
        service.lake.close()
        done = CliRunner().invoke(app, ["maintain", "-c", str(tmp_path / "aqueduck.yaml"), "--json"])
        assert done.exit_code == 0, done.output
        [report] = json.loads(done.stdout.strip().splitlines()[-1])
        tables = {table["table"]: table for table in report["tables"]}
        assert tables["main.t"]["files_before"] == 0
        assert tables["main.t"]["files_after"] == 1
        assert "aqueduck.progress_test" in tables
        assert report["complete"]
        service.lake.reopen()
        source, lake = source_and_lake(service)
        assert lake == source
        assert len(source) == 100
        shown = CliRunner().invoke(app, ["maintain", "-c", str(tmp_path / "aqueduck.yaml")])
        assert "lake snapshots" in shown.output


def test_a_service_that_does_not_answer_is_an_error(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a service has the groups, no other process touches its tables."""
    db.execute("create table public.t (id int primary key, v text)")
    monkeypatch.setattr(maintenance_sync, "ANSWER_SECONDS", 0.2)
    with small_service(db, tmp_path, "public.t") as service:
        short = service.config.maintenance.model_copy(update={"budget_seconds": 0.1})
        with pytest.raises(MaintenanceError, match="did not answer"):
            maintain_sync(service.config.model_copy(update={"maintenance": short}))
        assert not list(Path(service.config.state_dir).rglob("request"))


def test_a_report_that_cannot_be_written_does_not_end_maintenance(db: Database, tmp_path: Path) -> None:
    """The thread lives as long as the service: after a full or broken disk, the next request is served."""
    service = SyncService(small_config(db, tmp_path, "public.t"))
    notes = Path(service.config.state_dir) / "maintenance.notes"
    (notes / "report.json").mkdir(parents=True)
    with open_lake(service.config.lake) as session:
        service._lake = session
        maintainer = maintenance_sync.Maintainer(service)
        maintainer.start()
        for number in range(2):
            replace_file(notes / "request", f"request {number}")
            wait_until(lambda: not (notes / "request").exists(), f"request {number} is served", 10)
        maintainer.stop()


# -- fan-out


@pytest.fixture
def fan(tmp_path: Path) -> Iterator[Fan]:
    fan = Fan(tmp_path, {"one": "a", "two": "b"})
    fan.change(
        "create table lake.t (id bigint, c varchar, n bigint)",
        "insert into lake.t select i, case when i % 2 = 0 then 'a' else 'b' end, i from range(20) r(i)",
    )
    yield fan
    fan.close()


def config_of(fan: Fan) -> FanoutConfig:
    values = {
        "source": {"catalog": str(fan.place("source").catalog), "data_path": fan.place("source").data_path, "table": "t"},
        "routing": {"field": "c", "key_columns": ["id"]},
        "destinations": [
            {"id": i, "routing_value": v, "catalog": str(fan.place(i).catalog), "data_path": fan.place(i).data_path}
            for i, v in fan.values.items()
        ],
        "state_dir": str(fan.directory / "state"),
        "maintenance": {"delete_share": 0.05, "grace_hours": 0, "interval_seconds": 1},
    }  # fmt: skip
    file = fan.directory / "fanout.yaml"
    file.write_text(yaml.safe_dump(values))
    return load_fanout(file)


def test_the_oldest_cursor_of_a_readers_destinations_is_found(fan: Fan) -> None:
    """A destination that is behind keeps unread lake snapshots; a destination without a cursor keeps none."""
    config_of(fan)
    files, catalog = [str(fan.directory / "fanout.yaml")], fan.place("source").catalog
    assert oldest_cursor(files, catalog, {}) == (None, None)
    fan.poll()
    behind = fan.latest()
    fan.change("update lake.t set n = n + 1")
    fan.poll("one")
    assert oldest_cursor(files, catalog, {}) == (behind, "the destination two")
    fan.poll()
    assert oldest_cursor(files, catalog, {})[0] == fan.latest()
    with pytest.raises(ConfigError, match="another lake"):
        oldest_cursor(files, "sqlite:/nowhere/else.sqlite", {})


@pytest.mark.slow
def test_a_destination_that_cannot_be_asked_is_an_error(fan: Fan) -> None:
    fan.poll()
    fan.places["two"] = fan.place("two").model_copy(
        update={"catalog": "postgres:host=127.0.0.1 port=1 dbname=none"}
    )
    config_of(fan)
    with pytest.raises(MaintenanceError, match="two"):
        oldest_cursor([str(fan.directory / "fanout.yaml")], fan.place("source").catalog, {})


def test_destinations_are_maintained_and_stay_right(fan: Fan) -> None:
    """P-F16: polls with maintenance of every destination in between leave what the source has."""
    config = config_of(fan)
    rnd = random.Random(1)
    for i in range(2):
        low = rnd.randint(0, 20)
        fan.change(
            f"delete from lake.t where id between {low} and {low + 3}",
            f"insert into lake.t select {100 * (i + 1)} + i, 'b', i from range(30) r(i)",
            f"update lake.t set c = case when c = 'a' then 'b' else 'a' end, n = {i} where id % 5 = 0",
        )
        fan.poll()
        fan.pool.forget(fan.place("one"))
        reports = maintain_fanout(config, {})
        assert [(r["lake"], r["error"]) for r in reports] == [("one", None), ("two", None)]
        assert fan.differing() == {}
    assert sum(t["files_after"] for r in reports for t in r["tables"] if t["table"] == T.qualified) <= 16


def test_the_service_and_the_command_exclude_each_other(fan: Fan) -> None:
    """The running service has the instance's lock."""
    config = config_of(fan)
    with only_instance(config), pytest.raises(ServiceLockedError):
        maintain_fanout(config, {})


@pytest.mark.slow
def test_destinations_take_turns(fan: Fan) -> None:
    """Each is maintained once an interval, a few at a time."""
    config = config_of(fan)
    fan.poll()
    targets = [(d.id, d.place, d.target) for d in fan.destinations().values()]
    upkeep = DestinationUpkeep(config.maintenance.model_copy(update={"interval_seconds": 0.0}))
    first = upkeep.some(targets, [], seconds=0.0)
    second = upkeep.some(targets, [], seconds=0.0)
    assert [r.lake for r in (*first, *second)] == ["one", "two"]
    assert DestinationUpkeep(config.maintenance).some(targets, []) == []  # an interval has to pass first


@pytest.mark.slow
def test_a_fan_out_continues_after_maintenance_of_its_source(fan: Fan, tmp_path: Path) -> None:
    """P-F16: flushes, merges, rewrites and expiry up to the oldest cursor lead to no gap and to no new seed."""
    from aqueduck.config.sync import LakeConfig
    from aqueduck.lake.session.catalog import open_lake
    from tests.lake.upkeep.test_maintenance import work_on

    config_of(fan)
    fan.poll()
    place = fan.place("source")
    seeds = 0
    for i in range(2):
        fan.change(
            f"insert into lake.t select {1000 * (i + 1)} + i, 'a', i from range(20) r(i)",
            f"delete from lake.t where id % 7 = {i}",
            f"update lake.t set n = n + 1, c = 'b' where id % 3 = {i % 3}",
        )
        if i % 2:
            fan.poll("one")
        with open_lake(
            LakeConfig(catalog=place.catalog, data_path=place.data_path, inline_rows=5)
        ) as session:
            keep = oldest_cursor([str(tmp_path / "fanout.yaml")], place.catalog, {})
            report = maintain(
                work_on(session, T, keep=lambda keep=keep: keep),  # type: ignore[misc]
                EAGER.model_copy(update={"retention_hours": 1e-9}),
            )
            assert report.error is None
            [[oldest]] = session.execute(f"select min(snapshot_id) from {METADATA}.ducklake_snapshot")
            assert oldest == keep[0]
        seeds += sum(applied.seeded for applied in fan.poll())
        assert fan.differing() == {}
    assert seeds == 0


def test_lakes_that_share_a_directory_keep_each_others_files(tmp_path: Path) -> None:
    """P-T11: a file that one catalog does not know may belong to another lake; orphans are removed only if a lake is alone."""

    def place(name: str, path: str) -> LakePlace:
        return LakePlace(catalog=f"sqlite:{tmp_path}/{name}.sqlite", data_path=path)

    mine = place("mine", f"{tmp_path}/data/")
    for path in (f"{tmp_path}/data", f"{tmp_path}/data/below/", f"{tmp_path}", f"{tmp_path}/x/../data/"):
        assert shares_directory(mine, [mine, place("other", path)]), path
    for path in (f"{tmp_path}/data2/", f"{tmp_path}/other/data", "s3://bucket/data"):
        assert not shares_directory(mine, [mine, place("other", path)]), path


def test_maintenance_removes_no_file_of_a_lake_beside_it(tmp_path: Path) -> None:
    """P-T11: two destinations with one data path; an old file of one survives the upkeep of the other."""
    places = {
        name: LakePlace(catalog=f"sqlite:{tmp_path}/{name}.sqlite", data_path=f"{tmp_path}/shared/")
        for name in ("one", "two")
    }
    fan = Fan(tmp_path, {"one": "a", "two": "b"}, inline=0, places=places)
    fan.change("create table lake.t (id int, c varchar, v int)")
    fan.change("insert into lake.t select i, ['a', 'b'][1 + i % 2], i from range(3000) r(i)")
    fan.poll()
    for file in (tmp_path / "shared").rglob("*.parquet"):
        os.utime(file, (0, 0))
    values = document(fan, state_dir=str(tmp_path / "state"))
    maintain_fanout(parse_fanout(json.dumps(values), base_dir=tmp_path, env={}), env={})
    assert fan.differing() == {}
    fan.close()
