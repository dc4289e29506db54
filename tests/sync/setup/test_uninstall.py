"""`aqueduck uninstall` takes back what Aqueduck created, and nothing else (ADR 63)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aqueduck.config.sync import SyncConfig, load_config
from aqueduck.lake.session.catalog import open_lake
from aqueduck.model.errors import ServiceLockedError, SourceQueryError
from aqueduck.postgres.session.connection import connect
from aqueduck.postgres.session.group_lock import lock_group
from aqueduck.sync.prepare import prepare
from aqueduck.sync.setup.uninstall import uninstall
from tests.cli.conftest import Cli, run  # noqa: F401 - a fixture
from tests.fix_postgres import Database


@pytest.fixture
def config(db: Database, run: Cli) -> SyncConfig:  # noqa: F811
    """A prepared sync of the table `t`, in the group `test`."""
    db.execute("create table t (id int primary key); insert into t values (1)")
    made = load_config(run.config(db.dsn, "public.t"))
    assert list(prepare(made))
    return made


def left(db: Database) -> set[str]:
    """Slots, publications and the registry that the source has."""
    rows = db.query(
        "select 'slot ' || slot_name from pg_replication_slots where database = current_database()"
        " union all select 'publication ' || pubname from pg_publication"
        " union all select 'schema ' || nspname from pg_namespace where nspname = 'aqueduck'"
    )
    return {text for (text,) in rows}


def own_tables(config: SyncConfig) -> list[str]:
    with open_lake(config.lake, read_only=True) as lake:
        rows = lake.execute(
            "select table_name from duckdb_tables() where database_name = 'lake' and schema_name = 'aqueduck'"
        )
    return sorted(name for (name,) in rows)


def done(config: SyncConfig, *, with_lake: bool = False) -> dict[str, bool]:
    """What was there, and whether it was dropped."""
    return {step.what: not step.stays for step in uninstall(config, with_lake=with_lake, do=True)}


EVERYTHING = {"slot aqueduck_test", "publication aqueduck_test", "schema aqueduck"}


def test_a_dry_run_says_what_it_would_do_and_does_nothing(db: Database, config: SyncConfig, run: Cli) -> None:  # noqa: F811
    """Without --yes."""
    assert left(db) == EVERYTHING
    before = own_tables(config)
    code, out, _ = run("uninstall", "--lake", "-c", run.directory / "aqueduck.yaml")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("would drop: the slot aqueduck_test (it keeps ")
    assert lines[1:4] == [
        "would drop: the publication aqueduck_test",
        "would drop: the registry, the schema aqueduck of the source",
        f"stays: the lake in {config.lake.data_path}: other programs can read it without Aqueduck",
    ]
    assert lines[4] == "would drop: Aqueduck's own tables in the lake"
    assert lines[-1] == "nothing was dropped; to drop it, add --yes"
    assert (left(db), own_tables(config)) == (EVERYTHING, before)


def test_everything_of_ours_is_taken_back(db: Database, config: SyncConfig, run: Cli) -> None:  # noqa: F811
    """With --yes and --lake nothing of Aqueduck is left; a second time there is nothing to do."""
    code, out, _ = run("uninstall", "--lake", "--yes", "--json", "-c", run.directory / "aqueduck.yaml")
    assert code == 0
    steps: list[dict[str, Any]] = json.loads(out)
    assert [step["object"] for step in steps if step["dropped"]] == [
        "the slot aqueduck_test",
        "the publication aqueduck_test",
        "the registry, the schema aqueduck of the source",
        "Aqueduck's own tables in the lake",
    ]
    assert left(db) == set()
    assert own_tables(config) == []
    assert not any(done(config, with_lake=True).values())


def test_the_records_in_the_lake_stay_unless_asked_for(db: Database, config: SyncConfig) -> None:
    """Without them, everything would be copied again."""
    before = own_tables(config)
    assert done(config)["Aqueduck's own tables in the lake"] is False
    assert (left(db), own_tables(config)) == (set(), before)


def test_what_aqueduck_did_not_create_stays(db: Database, tmp_path: Path, run: Cli) -> None:  # noqa: F811
    """A publication of the user's, and a slot of another consumer with the name in the file."""
    db.execute("create table t (id int primary key); create publication aqueduck_test for table t")
    groups = [{"name": "test", "publication_by": "user", "tables": [{"source": "public.t"}]}]
    config = load_config(run.config(db.dsn, groups=groups))
    assert list(prepare(config))
    db.execute("select pg_drop_replication_slot('aqueduck_test')")
    db.execute("update aqueduck.sync_groups set made_slot = 'another'")
    db.execute("select pg_create_logical_replication_slot('aqueduck_test', 'pgoutput')")
    assert done(config)["the slot aqueduck_test"] is False
    assert left(db) == {"slot aqueduck_test", "publication aqueduck_test"}


def test_without_a_registry_the_lake_shows_what_is_ours(db: Database, config: SyncConfig) -> None:
    """The slot and the publication from which the lake was filled."""
    db.execute("drop schema aqueduck cascade")
    assert done(config)["the slot aqueduck_test"] is True
    assert left(db) == set()


def test_a_group_that_runs_is_refused(db: Database, config: SyncConfig) -> None:
    """Nothing is dropped under a service; the dry run says so."""
    with connect(db.dsn) as service:
        lock_group(service, "test")
        steps = list(uninstall(config, with_lake=False, do=False))
        assert (steps[0].what, steps[0].stays) == ("the group test", True)
        with pytest.raises(ServiceLockedError):
            done(config)
    assert left(db) == EVERYTHING


def test_groups_of_another_lake_keep_the_registry(db: Database, config: SyncConfig) -> None:
    """Only the groups of this lake leave it."""
    db.execute("select aqueduck.create_group('other', lake => '/elsewhere')")
    steps = done(config)
    assert steps["the registry, the schema aqueduck of the source"] is False
    assert steps["the groups of this lake in the registry"] is True
    assert db.query("select name from aqueduck.groups()") == [("other",)]


def test_groups_of_another_source_keep_the_records_in_the_lake(db: Database, config: SyncConfig) -> None:
    """Two sources may fill one lake."""
    with open_lake(config.lake) as lake:
        lake.execute("create table lake.aqueduck.progress_other (i int)")
    steps = done(config, with_lake=True)
    assert steps["the schema aqueduck of the lake"] is False
    assert "progress_other" in own_tables(config)
    assert "progress_test" not in own_tables(config)


def test_objects_of_people_in_the_schema_stay(db: Database, config: SyncConfig) -> None:
    """What they made beside the registry is kept, with the schema."""
    db.execute("create table aqueduck.notes (i int)")
    assert done(config)["the schema aqueduck"] is False
    assert db.query("select relname::text from pg_class where relnamespace = 'aqueduck'::regnamespace") == [
        ("notes",)
    ]


def test_a_view_of_the_registry_is_not_dropped_with_it(db: Database, config: SyncConfig) -> None:
    """The server refuses, and nothing of the registry is gone."""
    db.execute("create view public.dashboard as select * from aqueduck.table_mappings")
    with pytest.raises(SourceQueryError):
        done(config)
    assert db.query("select source from aqueduck.tables()") == [("public.t",)]


@pytest.mark.parametrize("flow", ["events", "fanout"])
def test_files_of_other_flows_are_refused(run: Cli, tmp_path: Path, flow: str) -> None:  # noqa: F811
    """With what to do instead."""
    files: dict[str, dict[str, Any]] = {
        "events": {
            "source": {"type": "postgres-cdc", "config": {"connection_url": "host=127.0.0.1", "slot_name": "s", "publication_name": "p"}},
            "sink": {"type": "stdout"},
        },
        "fanout": {
            "source": {"catalog": "sqlite:a.sqlite", "data_path": "a", "table": "t"},
            "routing": {"field": "f", "key_columns": ["id"]},
            "destinations": [{"id": "a", "routing_value": "a", "catalog": "sqlite:b.sqlite", "data_path": "b"}],
        },
    }  # fmt: skip
    (tmp_path / "other.yaml").write_text(json.dumps(files[flow]))
    code, error = run.fails("uninstall", "-c", tmp_path / "other.yaml")
    assert (code, "uninstall is for files with groups" in error) == (2, True)
