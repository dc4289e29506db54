"""Time travel by source time: `aqueduck asof`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aqueduck.cli.commands import app
from aqueduck.lake.ledger.lineage import SourceState
from aqueduck.model.errors import ConfigError, NoSnapshotError
from aqueduck.sync.asof import find_snapshot
from tests.fix_postgres import Database
from tests.small_service import SmallService


@pytest.fixture
def service(db: Database, tmp_path: Path) -> Iterator[SmallService]:
    db.execute("create table t (id int primary key)")
    service = SmallService(db, tmp_path, "public.t")
    yield service
    service.close()


def asof(service: SmallService, **asked: str) -> SourceState:
    options: dict[str, str | None] = {"lsn": None, "time": None, **asked}
    return find_snapshot(service.config, lsn=options["lsn"], time=options["time"], group=None)


def test_a_position_and_a_time_lead_to_the_snapshot_that_shows_them(service: SmallService) -> None:
    """The lake snapshot has every commit up to the position, and no later one, even beside commits of others."""
    db, moments = service.db, []
    for i in range(1, 5):
        db.execute(f"insert into t values ({i})")
        lsn = db.value("select pg_current_wal_insert_lsn()::text")
        moments.append((i, lsn, db.value("select clock_timestamp()")))
        if i != 2:  # 2 and 3 come in one batch: as of 2, the lake has only 1
            service.apply()
        service.change_lake("create or replace table lake.main.noise as select 1")
    for i, lsn, when in moments:
        shown = i if i != 2 else 1
        for found in (asof(service, lsn=lsn), asof(service, time=when.isoformat())):
            rows, _ = service.lake.query(f"select max(id) from lake.main.t at (version => {found.snapshot})")
            assert rows == [(shown,)], i
    assert asof(service, lsn=moments[1][1]).reached
    assert not asof(service, lsn="FF/0").reached
    file = Path(service.config.state_dir).parent / "aqueduck.yaml"
    result = CliRunner().invoke(app, ["asof", "-c", str(file), "--json", "--lsn", moments[0][1]])
    assert json.loads(result.stdout)["snapshot"] == asof(service, lsn=moments[0][1]).snapshot


def test_an_unknown_group_is_answered_with_the_groups_of_the_file(service: SmallService) -> None:
    """A misspelt name is found at once."""
    with pytest.raises(NoSnapshotError) as caught:
        find_snapshot(service.config, lsn="0/1", time=None, group="nonsense")
    assert caught.value.hint == f"groups of the file: {service.config.groups[0].name}"


def test_what_cannot_be_found_is_said(service: SmallService) -> None:
    with pytest.raises(NoSnapshotError):
        asof(service, lsn="0/1")
    for asked in ({}, {"lsn": "0/1", "time": "2026-01-01"}, {"lsn": "x"}, {"time": "yesterday"}):
        with pytest.raises(ConfigError):
            asof(service, **asked)
