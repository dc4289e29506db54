"""A slot that changed since the capture last read it is detected before anything is written, even without a start of the service."""

from __future__ import annotations

from pathlib import Path

import pytest

from aqueduck.model.errors import SlotLostError
from tests.fix_postgres import Database, wait_until
from tests.whole_group import WholeGroup, whole_group

RECREATE = (
    "select pg_drop_replication_slot('aqueduck_test')",
    "update t set v = 7",
    "select pg_create_logical_replication_slot('aqueduck_test', 'pgoutput')",
)


@pytest.fixture
def tables(db: Database) -> dict[str, dict[str, str]]:
    db.execute("create table t (id int primary key, v int); insert into t values (1, 1), (2, 2)")
    return {"t": {}}


def free(group: WholeGroup) -> None:
    wait_until(
        lambda: group.db.value(
            "select not active from pg_replication_slots where slot_name = 'aqueduck_test'"
        ),
        "nobody reads the slot",
    )


@pytest.mark.parametrize("how", ["stream", "poll"])
def test_a_slot_that_was_made_again_while_the_connection_was_gone(
    db: Database, tmp_path: Path, tables: dict[str, dict[str, str]], how: str
) -> None:
    """P-S30, hazard 10: a restarted query would continue from the new slot, and the changes in between would be lost silently."""
    with whole_group(db, tmp_path, tables, group={"capture": how}) as group:
        db.execute("update t set v = 5")
        group.apply()
        group.capture.stop()
        free(group)
        for statement in RECREATE:
            db.execute(statement)
        group.restart_capture()
        db.execute("update t set v = 8 where id = 1")
        with pytest.raises(SlotLostError, match="re-created"):
            group.apply()
        assert group.read("select v from lake.main.t where id = 2") == [(5,)]


def test_a_server_that_is_behind_the_lake(
    db: Database, tmp_path: Path, tables: dict[str, dict[str, str]]
) -> None:
    """P-S30: after a change to a standby that lacks what the lake has, the service reconnects to another history."""
    with whole_group(db, tmp_path, tables) as group:
        group.capture.stop()
        free(group)
        ahead = group.runner.stored_position() + (1 << 30)
        group.runner.stored_position = lambda: ahead  # type: ignore[method-assign]
        group.restart_capture()
        wait_until(lambda: not group.capture.is_alive(), "the capture has ended")
        with pytest.raises(SlotLostError, match="behind"):
            group.capture.check()


def test_an_idle_slot_is_still_ours(db: Database, tmp_path: Path, tables: dict[str, dict[str, str]]) -> None:
    """P-S18: the slot moves while the table is idle, and is read again without a word."""
    db.execute("create table idle (id int)")
    with whole_group(db, tmp_path, tables) as group:
        position = group.runner.stored_position()
        db.execute("insert into idle select generate_series(1, 1000)")
        wait_until(
            lambda: db.value(
                "select confirmed_flush_lsn > %s::pg_lsn + 1000 from pg_replication_slots where slot_name = 'aqueduck_test'",
                (f"{position >> 32:X}/{position & 0xFFFFFFFF:X}",),
            ),
            "the slot moves",
        )
        for _ in range(2):
            group.restart_capture()
            db.execute("update t set v = v + 1")
            group.apply()
        assert group.read("select v from lake.main.t order by id") == [(3,), (4,)]
