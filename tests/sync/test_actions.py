"""What the HTTP API asks for arrives in the registry, as if SQL had asked."""

from __future__ import annotations

import pytest

from aqueduck.model.errors import ConfigError, TableMissingError
from aqueduck.postgres.registry.registry import install, rows_of
from aqueduck.postgres.session.connection import connect
from aqueduck.sync.actions import RegistryActions
from tests.fix_postgres import Database


@pytest.fixture
def actions(db: Database) -> RegistryActions:
    db.execute("create table a (id int primary key)")
    with connect(db.dsn) as conn:
        install(conn)
    return RegistryActions(db.dsn)


def wanted(db: Database, function: str) -> list[dict[str, object]]:
    with connect(db.dsn) as conn:
        return rows_of(conn, function)


def test_tables_and_groups_come_move_and_go(db: Database, actions: RegistryActions) -> None:
    """P-S19: each action has the effect of the SQL function of its name."""
    actions.create_group("fast", capture="stream")
    actions.add_table("public.a", group_name="fast", copy=False)
    assert [(t["source"], t["group_name"], t["copy"]) for t in wanted(db, "tables")] == [
        ("public.a", "fast", False)
    ]
    actions.create_group("slow")
    actions.move_table("public.a", "slow")
    actions.resync_table("public.a")
    actions.retry_table("public.a")
    assert [t["group_name"] for t in wanted(db, "tables")] == ["slow"]
    assert db.value("select resync_requested from aqueduck.table_mappings where removed_at is null") >= 1
    actions.disable_group("fast")
    assert {g["name"]: g["enabled"] for g in wanted(db, "groups")} == {"fast": False, "slow": True}
    actions.enable_group("fast")
    actions.remove_table("public.a")
    actions.drop_group("fast")
    assert wanted(db, "tables") == []
    assert [g["name"] for g in wanted(db, "groups")] == ["slow"]


def test_settings_are_set_and_taken_back(actions: RegistryActions) -> None:
    """Numbers, sizes and null go through the checks of the registry."""

    def value(name: str) -> object:
        return {s["name"]: s["value"] for s in actions.settings()}[name]

    actions.set_setting("flush_interval_ms", "500")
    actions.set_setting("segment_bytes", "64 MiB")
    assert (value("flush_interval_ms"), value("segment_bytes")) == ("500", str(64 << 20))
    actions.set_setting("flush_interval_ms", None)
    assert value("flush_interval_ms") == "1000"


def test_refusals_come_with_their_hints(actions: RegistryActions) -> None:
    """What makes no sense is refused by the registry, in its words."""
    with pytest.raises(TableMissingError, match=r"public\.nobody"):
        actions.add_table("public.nobody")
    with pytest.raises(ConfigError, match="unknown setting") as caught:
        actions.set_setting("nonsense", "1")
    assert "known settings" in str(caught.value)


def test_the_connection_string_is_not_shown(actions: RegistryActions) -> None:
    """It may hold a password."""
    assert actions.dsn not in repr(actions)
