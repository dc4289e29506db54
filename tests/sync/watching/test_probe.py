"""STREAMING is proven: by the publication, the slot and the position."""

from __future__ import annotations

from pathlib import Path

import pytest

from aqueduck.model.lifecycle import SyncState
from aqueduck.service.probe import STILL_SECONDS
from aqueduck.sync.groups.group import GroupRunner
from aqueduck.sync.observe import table_state
from aqueduck.sync.watching.source_watch import SourceWatch
from tests.fix_postgres import Database, wait_until
from tests.local_service import local_config, local_service
from tests.whole_group import whole_group

LATE = STILL_SECONDS + 1


def state(runner: GroupRunner, oid: int) -> SyncState:
    runner.refresh()
    return table_state(runner, oid)


def test_a_group_that_is_not_proven_is_not_shown_as_streaming(db: Database, tmp_path: Path) -> None:
    """P-T01: until a probe finds it well again."""
    db.execute("create table t (id int primary key)")
    watch = SourceWatch()
    with whole_group(db, tmp_path, {"public.t": {}}) as group:
        runner = group.runner
        runner.status.state = "streaming"
        [oid] = runner.tables
        watch.look(runner)
        wait_until(lambda: state(runner, oid) is SyncState.STREAMING, "it streams")
        group.capture.stop()
        active = "select active from pg_replication_slots where slot_name = 'aqueduck_test'"
        wait_until(lambda: not db.value(active), "the slot is free")
        watch.look(runner)
        runner.proof._read_at -= LATE
        watch.look(runner)
        assert state(runner, oid) is SyncState.ERRORED
        group.restart_capture()
        wait_until(lambda: db.value(active), "the slot is read")
        watch.look(runner)
        wait_until(lambda: state(runner, oid) is SyncState.STREAMING, "it streams again")


@pytest.mark.usefixtures("without_spark")
def test_a_table_that_a_publication_of_others_drops_is_errored_and_comes_back(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-T01, P-S30: its changes are not sent, so it does not stream; once they are sent again, it is re-copied."""
    monkeypatch.setattr("aqueduck.sync.service.WATCH_SECONDS", 0.1)
    db.execute("create table t (id int primary key, v int); create table u (id int primary key)")
    db.execute("insert into t values (1, 1); create publication ours for table t, u")
    config = local_config(
        db, tmp_path, {"test": ["public.t", "public.u"]}, publication="ours", publication_by="user"
    )
    with local_service(db, config) as service:
        service.wait_streaming("public.t", "public.u")
        db.execute("alter publication ours drop table t; update t set v = 2")
        service.wait_state("public.t", "ERRORED")
        assert (
            db.value("select error_code from aqueduck.status() where source = 'public.t'") == "pg.publication"
        )
        db.execute("insert into u values (7)")
        service.wait_same("u")
        db.execute("alter publication ours add table t")
        service.wait_streaming("public.t")
        service.wait_same("t")
