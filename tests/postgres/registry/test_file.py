"""The configuration file is declarative for what it names, and for nothing else."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from aqueduck.config.sync import SyncConfig
from aqueduck.model.errors import (
    ConfigError,
)
from aqueduck.model.schema import TableName
from aqueduck.postgres.catalog.tables import describe_table
from aqueduck.postgres.registry.registry import (
    Settings,
    call,
    claim_group,
    listen,
    read_desired,
    reconcile_file,
    rows_of,
    wait_for_notice,
)
from tests.fix_postgres import Database
from tests.postgres.registry.wishes import config_of, group, refused, synced, table

Connection = psycopg.Connection[Any]


def test_a_file_is_written_into_the_registry_once(any_db: Database, conn: Connection) -> None:
    """The same file again changes nothing and sends no notice."""
    config = config_of(
        {"name": "g", "names": ["a"], "flush_interval_ms": 200, "slot_name": "s", "publication": "p"},
        {"name": "h", "tables": [{"source": "b", "target": "Shop.B", "copy": False}]},
        inline_rows=7,
    )
    listen(conn)
    assert reconcile_file(conn, config)
    assert wait_for_notice(conn, 5)
    before = any_db.query("select g.ctid, m.ctid, * from aqueduck.sync_groups g, aqueduck.table_mappings m")
    assert not reconcile_file(conn, config)
    assert before == any_db.query(
        "select g.ctid, m.ctid, * from aqueduck.sync_groups g, aqueduck.table_mappings m"
    )
    assert not wait_for_notice(conn, 0.1)
    first = group(conn, "g")
    assert (first.slot_name, first.publication, first.lake, first.created_by_file) == (
        "s",
        "p",
        "/lake",
        True,
    )
    assert first.settings == Settings(flush_interval_ms=200, inline_rows=7)
    row = table(conn, "b")
    assert (row.target, row.copy, row.created_by_file) == (TableName("Shop", "B"), False, True)


def test_what_leaves_the_file_is_removed_and_the_rest_stays(conn: Connection) -> None:
    """The file is declarative for its own groups and tables, and does not affect those that SQL created."""
    call(conn, "create_group", name="by_sql")
    reconcile_file(conn, config_of({"name": "g", "names": ["a"]}, {"name": "h", "names": []}))
    call(conn, "add_table", source="b", group_name="g")
    assert reconcile_file(conn, config_of({"name": "g", "names": []}))
    assert synced(conn) == {("g", "public.b")}
    assert {row.name: row.removed for row in read_desired(conn)} == {"by_sql": False, "g": False, "h": True}


def test_a_group_of_the_file_with_tables_of_others_is_kept(conn: Connection) -> None:
    """Tables that were added by SQL do not vanish because their group left the file."""
    reconcile_file(conn, config_of({"name": "g", "names": ["a"]}))
    call(conn, "add_table", source="b", group_name="g")
    reconcile_file(conn, config_of({"name": "h", "names": []}))
    assert synced(conn) == {("g", "public.b")}
    assert not group(conn, "g").created_by_file
    assert not reconcile_file(conn, config_of({"name": "h", "names": []}))


def test_the_file_wins_for_what_it_names(conn: Connection) -> None:
    """The next start undoes changes by SQL, except for keys that the file does not set."""
    config = config_of({"name": "g", "names": ["a"], "flush_interval_ms": 200}, {"name": "h"})
    reconcile_file(conn, config)
    call(conn, "move_table", source="a", group_name="h")
    call(conn, "set_setting", name="flush_interval_ms", value="5", group_name="g")
    call(conn, "set_setting", name="segment_bytes", value="5", group_name="g")
    call(conn, "disable_group", name="g")
    assert reconcile_file(conn, config)
    assert synced(conn) == {("g", "public.a")}
    kept = group(conn, "g")
    assert kept.settings == Settings(flush_interval_ms=200, segment_bytes=5)
    assert not kept.enabled
    reconcile_file(conn, config_of({"name": "g", "names": ["a"]}, {"name": "h"}))
    assert group(conn, "g").settings == Settings(segment_bytes=5)


def test_the_caller_learns_that_the_file_will_win(any_db: Database, conn: Connection) -> None:
    """Nobody wonders the next day why a removed table is back."""
    reconcile_file(conn, config_of({"name": "g", "names": ["a"]}))
    with any_db.connect() as other:
        said: list[str] = []
        other.add_notice_handler(lambda notice: said.append(notice.message_primary or ""))
        call(other, "remove_table", source="a")
    assert said == ["a is in the configuration file: change that too, or the next start undoes this"]
    reconcile_file(conn, config_of({"name": "g", "names": ["a"]}))
    assert synced(conn) == {("g", "public.a")}


def test_a_table_that_moves_in_the_file_moves(conn: Connection) -> None:
    """Another group is a move, another target a new table with a copy of its own."""
    reconcile_file(conn, config_of({"name": "g", "names": ["a"]}, {"name": "h"}))
    first = table(conn).id
    reconcile_file(conn, config_of({"name": "g"}, {"name": "h", "names": ["a"]}))
    assert (table(conn).id, synced(conn)) == (first, {("h", "public.a")})
    reconcile_file(conn, config_of({"name": "h", "tables": [{"source": "a", "target": "z"}]}))
    assert table(conn).id != first
    assert [row.removed for row in group(conn, "h").tables] == [True, False]


def test_targets_can_be_exchanged_in_the_file(conn: Connection) -> None:
    """A target is free when the table that filled it gives it up in the same file."""

    def file(of_a: str, of_b: str) -> SyncConfig:
        tables = [{"source": "a", "target": of_a}, {"source": "b", "target": of_b}]
        return config_of({"name": "g", "tables": tables})

    reconcile_file(conn, file("x", "y"))
    reconcile_file(conn, file("y", "x"))
    assert {row["source"]: row["target"] for row in rows_of(conn, "tables")} == {
        "public.a": "main.y",
        "public.b": "main.x",
    }


def test_one_bad_table_in_the_file_does_not_hurt_the_others(any_db: Database, conn: Connection) -> None:
    """The service shows the table as errored; when it is created, the mapping finds it."""
    config = config_of({"name": "g", "names": ["a", "missing"]})
    reconcile_file(conn, config)
    row = table(conn, "missing")
    assert row.observed.source_oid is None
    any_db.execute("create table missing (id int primary key)")
    assert reconcile_file(conn, config)
    assert table(conn, "missing").observed.source_oid == describe_table(conn, "missing").oid
    assert not table(conn, "missing").resync_wanted


def test_two_lakes_share_a_database(conn: Connection) -> None:
    """Each file has a say about its own lake only, even for the same table."""
    one, two = (
        config_of({"name": "one", "names": ["a"]}),
        config_of({"name": "two", "names": ["a"]}, data_path="/2"),
    )
    reconcile_file(conn, one)
    reconcile_file(conn, two)
    assert not reconcile_file(conn, one)
    assert synced(conn) == {("one", "public.a"), ("two", "public.a")}
    assert [row.name for row in read_desired(conn, "/2")] == ["two"]
    assert "in the groups one, two" in refused(conn, "resync_table", source="a").message
    call(conn, "resync_table", source="a", group_name="two")
    assert (
        "another lake" in refused(conn, "move_table", source="a", group_name="one", from_group="two").message
    )


def test_a_group_is_never_taken_from_another_lake(conn: Connection) -> None:
    """The slot is at the position of the other lake: changes would be lost."""
    reconcile_file(conn, config_of({"name": "g", "names": ["a"]}))
    moved = config_of({"name": "g", "names": ["a"]}, data_path="/moved")
    with pytest.raises(ConfigError, match="fills another lake, /lake") as caught:
        reconcile_file(conn, moved)
    assert not claim_group(conn, "g", "/moved")
    assert "select aqueduck.release_group('g')" in str(caught.value.hint)
    call(conn, "release_group", name="g")
    assert reconcile_file(conn, moved)
    assert group(conn, "g").lake == "/moved"


def test_the_first_service_claims_a_group_made_by_sql(conn: Connection) -> None:
    """Until then every service sees it."""
    call(conn, "create_group", name="g")
    assert [row.name for row in read_desired(conn, "/2")] == ["g"]
    assert claim_group(conn, "g", "/1")
    assert claim_group(conn, "g", "/1")
    assert not claim_group(conn, "g", "/2")
    assert read_desired(conn, "/2") == ()
    assert not claim_group(conn, "nowhere", "/1")


def test_slots_of_other_groups_are_refused_in_the_file(conn: Connection) -> None:
    """Two groups never read one slot."""
    call(conn, "create_group", name="mine")
    with pytest.raises(ConfigError, match="slot aqueduck_mine belongs to the group mine"):
        reconcile_file(conn, config_of({"name": "g", "slot_name": "aqueduck_mine"}))
    assert [row.name for row in read_desired(conn)] == ["mine"]
