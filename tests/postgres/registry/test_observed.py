"""What the service writes is read back and shown, and costs next to nothing."""

from __future__ import annotations

import re
import time
from dataclasses import fields, replace
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from aqueduck.model.errors import LakeWriteError, SourceQueryError
from aqueduck.model.lifecycle import ErrorClass, Lifecycle, SyncState, fail
from aqueduck.postgres.catalog.tables import describe_table
from aqueduck.postgres.registry import registry_install
from aqueduck.postgres.registry.registry import (
    GroupObservation,
    TableObservation,
    call,
    install,
    reconcile_file,
    rows_of,
    write_group_observed,
    write_observed,
)
from tests.fix_postgres import Database
from tests.postgres.registry.wishes import config_of, group, table

Connection = psycopg.Connection[Any]
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def full_observation(number: int, group_id: int, oid: int) -> TableObservation:
    life = fail(Lifecycle(SyncState.STREAMING, NOW), LakeWriteError("disk", hint="make room"), NOW)
    return TableObservation(
        id=number, source_oid=oid, active_group_id=group_id, resync_done=1, retry_done=2, snapshot_lsn=1 << 40,
        applied_lsn=(1 << 64) - 1, rows_synced=1 << 40, queued_changes=3, queued_bytes=4,
        last_sync_at=NOW.replace(microsecond=500000), lag_bytes=5, lag_seconds=0.125, copy_rows=6, copy_bytes=25,
        copy_bytes_total=100, copy_started_at=NOW, copy_finished_at=None, parked_rows=7, parked_bytes=8,
        parked_since=NOW, verdict="different", verified_at=NOW, identical_at=NOW, differences=9, verify_note="why",
    ).after(life)  # fmt: skip


def test_what_is_written_is_read_back(conn: Connection) -> None:
    """A service that starts again knows everything that the last one wrote."""
    added = call(conn, "add_table", source="a")
    seen = full_observation(added, group(conn).id, describe_table(conn, "a").oid)
    assert seen.error_class is ErrorClass.TRANSIENT
    assert all(
        getattr(seen, field.name) is not None for field in fields(seen) if field.name != "copy_finished_at"
    )
    assert write_observed(conn, [seen]) == 1
    assert table(conn).observed == seen
    of_group = GroupObservation(
        id=group(conn).id, confirmed_flush_lsn=17, last_sync_at=NOW, paused=True, staged_bytes=1, restarts=2,
        error_code="pg.slot_lost", error_message="gone",
    )  # fmt: skip
    assert write_group_observed(conn, [of_group]) == 1
    assert group(conn).observed == of_group


def test_the_time_of_a_state_is_when_it_began(conn: Connection) -> None:
    """P-S03: every move is visible with its time, and other writes do not touch it."""
    added = call(conn, "add_table", source="a")
    pending = table(conn).state_since
    write_observed(conn, [TableObservation(id=added, rows_synced=1)])
    assert table(conn).state_since == pending
    write_observed(conn, [TableObservation(id=added, state=SyncState.SNAPSHOT)])
    assert table(conn).state_since > pending


def test_an_idle_system_writes_nothing(any_db: Database, conn: Connection) -> None:
    """What is already there is not written again: no row version, no WAL to read back."""
    added = call(conn, "add_table", source="a")
    seen = full_observation(added, group(conn).id, describe_table(conn, "a").oid)
    of_group = GroupObservation(id=group(conn).id, confirmed_flush_lsn=17)
    write_observed(conn, [seen])
    write_group_observed(conn, [of_group])
    versions = (
        "select ctid, xmin from aqueduck.table_mappings union all select ctid, xmin from aqueduck.sync_groups"
    )
    before = any_db.query(versions)
    assert write_observed(conn, [seen]) == write_observed(conn, []) == 0
    assert write_observed(conn, [replace(seen, source_oid=None)]) == 0
    assert write_group_observed(conn, [of_group]) == 0
    assert any_db.query(versions) == before


def test_a_transaction_left_open_does_not_hold_up_the_service(
    any_db: Database, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open transaction on one table's row delays the state of that table, and nothing else."""
    monkeypatch.setattr(registry_install, "LOCK_SECONDS_MAX", 1)
    ids = [call(conn, "add_table", source=name) for name in ("a", "b")]
    seen = [TableObservation(id=number, rows_synced=1) for number in ids]
    with any_db.connect() as other, other.transaction():
        call(other, "disable_table", source="a")
        call(other, "add_table", source="a")
        assert not install(conn)
        assert write_observed(conn, seen) == 1
        assert write_group_observed(conn, [GroupObservation(id=group(conn).id, restarts=1)]) == 1
        assert [table(conn, name).observed.rows_synced for name in ("a", "b")] == [0, 1]
        with pytest.raises(SourceQueryError, match="has been open for long"):
            reconcile_file(conn, config_of({"name": "g", "names": []}))
    assert write_observed(conn, seen) == 1
    assert not table(conn).enabled


def test_observations_of_a_deleted_table_are_dropped(conn: Connection) -> None:
    """A table that is removed while it is written is no error."""
    assert write_observed(conn, [TableObservation(id=4711)]) == 0


def test_a_thousand_tables_are_written_at_once(any_db: Database, conn: Connection) -> None:
    """All of them, changed each second, cost a small part of it; so does reading them."""
    statements = any_db.value(
        "select string_agg(format('create table t%s (id int primary key)', n), ';') from generate_series(1, 1000) n"
    )
    any_db.execute(statements)
    config = config_of({"name": "g", "names": [f"t{n}" for n in range(1, 1001)]})
    seconds = {}
    start = time.perf_counter()
    reconcile_file(conn, config)
    seconds["file"] = time.perf_counter() - start
    start = time.perf_counter()
    reconcile_file(conn, config)
    seconds["same file"] = time.perf_counter() - start
    start = time.perf_counter()
    rows = group(conn, "g").tables
    seconds["read"] = time.perf_counter() - start
    for rounds in range(3):
        changed = [replace(row.observed, rows_synced=rounds + 1, applied_lsn=rounds + 1) for row in rows]
        start = time.perf_counter()
        assert write_observed(conn, changed) == 1000
        seconds[f"write {rounds}"] = time.perf_counter() - start
    start = time.perf_counter()
    assert write_observed(conn, changed) == 0
    seconds["idle"] = time.perf_counter() - start
    start = time.perf_counter()
    assert len(rows_of(conn, "status")) == 1000
    seconds["status"] = time.perf_counter() - start
    print({what: round(value, 3) for what, value in seconds.items()})
    # The promise is a second; a machine that others use as well may take a few.
    assert max(value for what, value in seconds.items() if what.startswith(("write", "idle", "read"))) < 5


STATUS_COLUMNS = {
    "group_name",
    "source",
    "target",
    "state",
    "enabled",
    "rows_synced",
    "queued_changes",
    "queued_bytes",
    "last_sync_at",
    "error_message",
    "consecutive_failures",
    "retry_at",
    "applied_lsn",
    "lag_bytes",
    "lag_seconds",
    "copy_share",
    "copy_seconds",
}


def test_status_shows_what_people_ask_for(conn: Connection) -> None:
    """P-S27: one row a table, with progress, lag, error, and the copy's share and time left."""
    added = call(conn, "add_table", source="a", target="Shop.A")
    seen = full_observation(added, group(conn).id, describe_table(conn, "a").oid)
    write_observed(conn, [seen])
    conn.execute("update aqueduck.table_mappings set copy_started_at = now() - interval '30 s'")
    [row] = rows_of(conn, "status")
    assert row.keys() >= STATUS_COLUMNS
    assert (row["source"], row["target"], row["state"]) == ("public.a", '"Shop"."A"', "ERRORED")
    assert row["error_message"] == "[lake.write] disk. Fix: make room"
    assert (row["copy_share"], row["rows_synced"]) == (0.25, 1 << 40)
    assert row["copy_seconds"] == pytest.approx(30, abs=5)
    assert row["copy_seconds_left"] == pytest.approx(90, abs=15)
    write_observed(conn, [replace(seen, copy_bytes=300)])
    assert [row["copy_share"] for row in rows_of(conn, "status")] == [1.0]
    write_observed(conn, [TableObservation(id=added)])
    [row] = rows_of(conn, "status")
    assert (row["copy_share"], row["copy_seconds"], row["copy_seconds_left"]) == (None, None, None)


def test_groups_show_their_slots_without_a_service(any_db: Database, conn: Connection) -> None:
    """P-S18: an empty group that still pins WAL says so."""
    call(conn, "create_group", name="g")
    [row] = rows_of(conn, "groups")
    assert (row["slot_active"], row["retained_bytes"], row["note"]) == (None, None, "no service runs it")
    any_db.execute("select pg_create_logical_replication_slot('aqueduck_g', 'pgoutput')")
    [row] = rows_of(conn, "groups")
    assert row["slot_active"] is False
    assert row["retained_bytes"] > 0
    assert row["confirmed_flush_lsn"] is not None
    assert re.fullmatch(r"has no tables, but its slot keeps \d+ \w+ of WAL: .*", row["note"])
    call(conn, "add_table", source="a", group_name="g")
    assert rows_of(conn, "groups")[0]["note"].startswith("no service runs it: its slot keeps")
    call(conn, "disable_group", name="g")
    assert rows_of(conn, "groups")[0]["note"].startswith("disabled: its slot keeps")


@pytest.mark.parametrize("value", ["infinity", "-infinity", "294000-01-01"])
def test_times_that_no_program_reads_do_not_hide_the_other_tables(conn: Connection, value: str) -> None:
    """The attack: an operator could make the status of all tables fail, by SQL and in every program."""
    for name in "ab":
        call(conn, "add_table", source=name)
    times = (
        "state_since",
        "last_sync_at",
        "retry_at",
        "copy_started_at",
        "copy_finished_at",
        "parked_since",
        "verified_at",
    )
    changes = ", ".join(f"{column} = '{value}'" for column in (*times, "identical_at", "created_at"))
    conn.execute(f"update aqueduck.table_mappings set {changes} where source_table = 'a'")
    conn.execute(f"update aqueduck.sync_groups set last_sync_at = '{value}'")
    assert [row["source"] for row in rows_of(conn, "status")] == ["public.a", "public.b"]
    assert len(rows_of(conn, "tables")) == 2
    assert len(rows_of(conn, "groups")) == 1
