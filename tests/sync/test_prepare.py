"""Preparing a group: what is refused before anything is written, and what a lost slot leads to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aqueduck.config.sync import SyncConfig, parse_config
from aqueduck.lake.ledger.progress import read_position, write_position
from aqueduck.lake.ledger.table_states import read_states, write_state
from aqueduck.lake.session.catalog import open_lake
from aqueduck.lake.target.apply import ensure_target
from aqueduck.model.errors import NoKeyError, SlotLostError, TableMissingError
from aqueduck.sync.control import Wanted
from aqueduck.sync.prepare import PreparedGroup, prepare_group
from tests.fix_postgres import Database


@pytest.fixture
def ready(db: Database) -> None:
    db.execute(
        "create table a (id int primary key); create table b (id int primary key); create table nokey (v int)"
    )


def config_of(db: Database, directory: Path, tables: list[str], **options: Any) -> SyncConfig:
    group = {"name": "g", "tables": [{"source": t} for t in tables], **options}
    lake = {"catalog": f"sqlite:{directory}/lake.sqlite", "data_path": f"{directory}/data"}
    text = repr(
        {"source": {"dsn": db.dsn}, "lake": lake, "groups": [group], "state_dir": f"{directory}/state"}
    )
    return parse_config(text, base_dir=directory, env={})


def prepared(config: SyncConfig) -> PreparedGroup:
    with open_lake(config.lake) as lake:
        return prepare_group(config, Wanted(config.groups[0]), lake)


def snapshots(config: SyncConfig) -> list[tuple[Any, ...]]:
    with open_lake(config.lake, read_only=True) as lake:
        return lake.query("select max(snapshot_id) from lake.snapshots()")[0]


@pytest.mark.usefixtures("ready")
def test_a_table_that_cannot_be_prepared_does_not_stop_the_others(db: Database, tmp_path: Path) -> None:
    """P-S02, promise 5: a missing table says so, one without a key gets a hint, and the rest is prepared."""
    result = prepared(config_of(db, tmp_path, ["a", "missing", "nokey"]))
    assert [t.schema.name for t in result.tables.values()] == ["a"]
    assert {name: type(error) for name, error in result.refused.items()} == {
        "public.missing": TableMissingError,
        "public.nokey": NoKeyError,
    }
    assert "does not exist" in str(result.refused["public.missing"])
    with pytest.raises(TableMissingError):
        prepared(config_of(db, tmp_path / "other", ["missing"]))


@pytest.mark.usefixtures("ready")
def test_tables_that_left_the_group_are_forgotten(db: Database, tmp_path: Path) -> None:
    """A table that was removed while nothing ran and returns later is re-copied: its changes were not followed."""
    config = config_of(db, tmp_path, ["a", "b"])
    oids = {t.schema.name: oid for oid, t in prepared(config).tables.items()}
    with open_lake(config.lake) as lake, lake.transaction():
        for state in read_states(lake, "g").values():
            assert state.schema is not None
            ensure_target(lake, state.target, state.schema)
            write_state(lake, "g", [replace(state, ready=True)])
    journals = [tmp_path / "state" / "g" / "copies" / str(oids[name]) for name in ("a", "b")]
    for journal in journals:
        journal.mkdir(parents=True)
    prepared(config_of(db, tmp_path, ["a"]))
    prepared(config)
    assert [journal.exists() for journal in journals] == [True, False]
    with open_lake(config.lake) as lake:
        states = read_states(lake, "g")
    assert states[oids["a"]].ready
    assert not states[oids["b"]].ready


@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize("how", ["dropped", "re-created", "restored", "another cluster"])
def test_a_slot_that_does_not_fit_the_lake_is_found_before_anything_is_written(
    db: Database, tmp_path: Path, how: str
) -> None:
    """Hazard 10, P-S30: by default an error and an untouched lake; with `resync` a new beginning for all tables."""
    config = config_of(db, tmp_path, ["a", "b"])
    first = prepared(config)
    with open_lake(config.lake) as lake:
        position = read_position(lake, "g")
        assert position is not None
        with lake.transaction():
            write_state(lake, "g", [replace(s, ready=True) for s in read_states(lake, "g").values()])
            if how == "restored":
                write_position(lake, replace(position, position=position.position + (1 << 40)))
            if how == "another cluster":
                write_position(lake, replace(position, system_identifier="7"))
    if how in ("dropped", "re-created"):
        db.execute("select pg_drop_replication_slot('aqueduck_g'); insert into a values (1)")
    if how == "re-created":
        db.execute("select pg_create_logical_replication_slot('aqueduck_g', 'pgoutput')")
    journal = tmp_path / "state" / "g" / "copies" / str(next(iter(first.tables)))
    journal.mkdir(parents=True)
    (journal / "plan.json").write_text("{}")
    before = snapshots(config)
    with pytest.raises(SlotLostError):
        prepared(config)
    assert snapshots(config) == before
    again = prepared(config_of(db, tmp_path, ["a", "b"], on_slot_loss="resync"))
    assert again.tables.keys() == first.tables.keys()
    assert not journal.exists(), "a copy that continues would miss changes that were parked before"
    with open_lake(config.lake) as lake:
        now = read_position(lake, "g")
        states = read_states(lake, "g")
    assert now is not None
    assert now.position == again.position
    assert now.system_identifier == first.system_identifier
    assert not any(state.ready for state in states.values())
    assert db.query("select from pg_replication_slots where slot_name = 'aqueduck_g'")
