"""Aqueduck does not use, empty or drop objects that it did not create, unless a person allows it (`adopt`)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aqueduck.config.sync import SyncConfig, load_config
from aqueduck.lake.session.catalog import open_lake
from aqueduck.model.errors import ConfigError, ForeignTargetError, PublicationError, SlotConflictError
from aqueduck.postgres.registry.registry import manage_grants
from aqueduck.sync.prepare import prepare
from aqueduck.sync.service import SyncService
from tests.fix_postgres import Database

SLOTS = "select slot_name::text from pg_replication_slots where database = current_database() order by 1"


@pytest.fixture
def operator(db: Database, role: str) -> str:
    """A role with the grants that sql-api.md documents; the database has a consumer of its own, `theirs`."""
    db.execute(
        "create table public.one (id int primary key); create table public.two (id int primary key);"
        " create table public.three (id int primary key);"
        " create publication theirs for table public.two"
    )
    db.execute("select pg_create_logical_replication_slot('theirs', 'pgoutput')")
    return role


@pytest.fixture
def config(db: Database, operator: str, tmp_path: Path) -> SyncConfig:
    """One group `mine`, which is prepared; the operator has its grants."""
    made = _config(db, tmp_path, {"name": "mine", "tables": [{"source": "public.one", "copy": False}]})
    list(prepare(made))
    db.execute("; ".join(manage_grants(operator)))
    return made


def _config(db: Database, directory: Path, *groups: dict[str, Any]) -> SyncConfig:
    values = {
        "source": {"dsn": db.dsn},
        "lake": {"catalog": f"sqlite:{directory}/lake.sqlite", "data_path": f"{directory}/data"},
        "groups": groups,
        "state_dir": f"{directory}/state",
    }
    file = directory / "aqueduck.yaml"
    file.write_text(json.dumps(values))  # JSON is YAML
    return load_config(file)


@contextlib.contextmanager
def service_of(config: SyncConfig, **keywords: Any) -> Iterator[SyncService]:
    service = SyncService(config)
    try:
        service.prepare(**keywords)
        yield service
    finally:
        service.stop()


def _ask(db: Database, user: str, *statements: str) -> None:
    with db.connect(user) as conn:
        for statement in statements:
            conn.execute(statement.encode())


def test_an_operator_cannot_have_the_slot_of_another_consumer_dropped(
    db: Database, config: SyncConfig, operator: str
) -> None:
    """The grants of the registry reach no slot and no publication that the service did not make."""
    _ask(
        db,
        operator,
        "select aqueduck.create_group('g', publication => 'theirs', slot_name => 'theirs')",
        "select aqueduck.add_table('public.two', group_name => 'g')",
    )
    with service_of(config) as service:
        assert isinstance(service.errored["g"].error, SlotConflictError)
    _ask(db, operator, "select aqueduck.drop_group('g', with_tables => true)")
    with service_of(config) as service:
        assert "g" not in service.wanted
    assert db.query(SLOTS) == [("aqueduck_mine",), ("theirs",)]
    assert db.query("select tablename::text from pg_publication_tables where pubname = 'theirs'") == [
        ("two",)
    ]


def test_a_publication_of_others_is_not_changed(db: Database, config: SyncConfig, operator: str) -> None:
    """It may be used unchanged while it fits, and stays when the group is dropped."""
    _ask(db, operator, "select aqueduck.create_group('g', publication => 'theirs')")
    _ask(db, operator, "select aqueduck.add_table('public.three', group_name => 'g')")
    with service_of(config) as service:
        assert isinstance(service.errored["g"].error, PublicationError)
    assert db.query("select tablename::text from pg_publication_tables where pubname = 'theirs'") == [
        ("two",)
    ]
    _ask(db, operator, "select aqueduck.drop_group('g', with_tables => true)")
    with service_of(config):
        assert db.value("select count(*) from pg_publication where pubname = 'theirs'") == 1


def test_what_is_adopted_is_ours(db: Database, config: SyncConfig, operator: str, tmp_path: Path) -> None:
    """With `adopt`, by SQL or on the command line, a slot and a publication are used, changed and dropped."""
    wanted = {"name": "g", "slot_name": "theirs", "publication": "theirs"}
    both = _config(
        db,
        tmp_path,
        {"name": "mine", "tables": [{"source": "public.one", "copy": False}]},
        {**wanted, "tables": [{"source": "public.two", "copy": False}]},
    )
    with pytest.raises(SlotConflictError) as caught:
        list(prepare(both))
    assert "--adopt" in str(caught.value.hint)
    assert list(prepare(both, adopt=True))
    assert list(prepare(both))  # from now on without
    _config(db, tmp_path, {"name": "mine", "tables": [{"source": "public.one", "copy": False}]})
    with service_of(load_config(tmp_path / "aqueduck.yaml")):
        assert db.query(SLOTS) == [("aqueduck_mine",)]
        assert db.value("select count(*) from pg_publication where pubname = 'theirs'") == 0


def test_what_an_earlier_version_made_counts_as_ours(db: Database, config: SyncConfig) -> None:
    """A group that filled a lake before the registry noted anything goes, with all that it has."""
    db.execute(
        "alter table aqueduck.sync_groups drop made_slot, drop made_publication, drop adopt;"
        " alter table aqueduck.table_mappings drop adopt; update aqueduck.schema_version set version = 5;"
        " alter table aqueduck.settings drop constraint settings_fit;"
        " alter table aqueduck.sync_groups drop constraint sync_groups_objects;"
        " alter table aqueduck.table_mappings drop constraint table_mappings_objects,"
        " drop constraint table_mappings_numbers"
    )
    with open_lake(config.lake) as lake:
        lake.execute("drop table lake.aqueduck.targets")
    list(prepare(config))
    db.execute("select aqueduck.remove_table('public.one', drop_target => true)")
    db.execute("select aqueduck.drop_group('mine')")
    empty = config.model_copy(update={"groups": ()})
    with service_of(empty) as service:
        assert service.lake.query("from duckdb_tables() where schema_name = 'main'")[0] == []
    assert db.query(SLOTS) == [("theirs",)]
    assert db.value("select count(*) from pg_publication where pubname = 'aqueduck_mine'") == 0


def _tables(config: SyncConfig) -> list[tuple[str, int]]:
    with open_lake(config.lake) as lake:
        return [
            ("kept", len(lake.query("from lake.main.kept")[0])),
            ("tables", len(lake.query("from lake.aqueduck.tables")[0])),
        ]


@pytest.fixture
def kept(config: SyncConfig) -> str:
    """A table of another user in the lake, with a row."""
    with open_lake(config.lake) as lake:
        lake.execute("create table lake.main.kept as select 1 as id")
    return "main.kept"


def test_a_table_of_others_is_no_target(db: Database, config: SyncConfig, operator: str, kept: str) -> None:
    """Neither a copy nor changes overwrite it, and `drop_target` leaves it where it is."""
    for copy in ("true", "false"):
        _ask(db, operator, f"select aqueduck.add_table('public.two', '{kept}', 'mine', copy => {copy})")
        with service_of(config) as service:
            [refused] = service.prepared["mine"].refused.values()
            assert isinstance(refused, ForeignTargetError)
        _ask(db, operator, "select aqueduck.remove_table('public.two', drop_target => true)")
        with service_of(config):
            pass
        assert _tables(config) == [("kept", 1), ("tables", 1)]


def test_a_table_that_is_adopted_is_a_target(
    db: Database, config: SyncConfig, operator: str, kept: str
) -> None:
    """`adopt => true` allows the copy to replace the table, and may be given afterwards."""
    add = f"select aqueduck.add_table('public.two', '{kept}', 'mine'"
    _ask(db, operator, f"{add})", f"{add}, adopt => true)")
    with service_of(config) as service:
        assert service.prepared["mine"].refused == {}
    _ask(db, operator, "select aqueduck.remove_table('public.two', drop_target => true)")
    with service_of(config) as service:
        assert service.lake.query("from duckdb_tables() where table_name = 'kept'")[0] == []


def test_the_schema_of_our_own_tables_is_reserved(
    db: Database, config: SyncConfig, operator: str, tmp_path: Path
) -> None:
    """Not by SQL, not by the file, and not by a row that was written into the registry by hand."""
    with pytest.raises(Exception, match="Aqueduck's own"):
        _ask(db, operator, "select aqueduck.add_table('public.two', 'Aqueduck.tables', 'mine')")
    with pytest.raises(ConfigError, match="reserved"):
        _config(
            db, tmp_path, {"name": "x", "tables": [{"source": "public.two", "target": "aqueduck.tables"}]}
        )
    _ask(
        db,
        operator,
        "select aqueduck.add_table('public.two', 'x', 'mine')",
        "update aqueduck.table_mappings set target_schema = 'aqueduck', target_table = 'tables', removed_at = now(),"
        " drop_target = true where source_table = 'two'",
    )
    with service_of(config) as service:
        assert len(service.lake.query("from lake.aqueduck.tables")[0]) == 1
