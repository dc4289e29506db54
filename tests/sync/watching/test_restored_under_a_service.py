"""A catalog that is put back from a backup while the service runs."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from aqueduck.model.errors import SlotLostError
from tests.fix_postgres import Database, wait_until
from tests.local_service import local_config, local_service

pytestmark = pytest.mark.usefixtures("without_spark")


def copy_catalog(source: Path, destination: Path) -> None:
    """Copy a catalog, also into one that is open."""
    with closing(sqlite3.connect(source)) as one, closing(sqlite3.connect(destination, timeout=30)) as two:
        one.backup(two)


def test_a_catalog_restored_under_a_running_service_is_found_at_the_next_write(
    db: Database, tmp_path: Path
) -> None:
    """The slot is beyond the restored position: the group is errored with a code, and nothing is written with a gap."""
    db.execute("create table t (id int primary key, v text); insert into t values (1, 'copied')")
    with local_service(db, local_config(db, tmp_path, {"test": ["public.t"]})) as service:
        service.wait_streaming("public.t")
        copy_catalog(tmp_path / "lake.sqlite", tmp_path / "backup.sqlite")
        db.execute("insert into t values (2, 'after the backup')")
        service.wait_same("t")
        position = service.service.runner("test").status.position
        confirmed = (
            "select confirmed_flush_lsn - '0/0' from pg_replication_slots where slot_name = 'aqueduck_test'"
        )
        wait_until(lambda: int(db.value(confirmed)) >= position, "the slot is confirmed", 30)
        copy_catalog(tmp_path / "backup.sqlite", tmp_path / "lake.sqlite")
        db.execute("insert into t values (3, 'the next write')")
        wait_until(lambda: service.error is not None, "the only group cannot go on", 30)
        with pytest.raises(SlotLostError, match="restored from an older backup") as found:
            service.alive()
        assert "on_slot_loss: resync" in (found.value.hint or "")
        assert service.in_lake("t") == [(1, "copied")]
