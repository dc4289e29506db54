"""A lake that was put back from a backup, with everything else as it was: what lies between must not go unseen."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from aqueduck.config.events import PostgresCdcConfig
from aqueduck.events.prepare import check_slot_position
from aqueduck.model.bookmarks import Bookmark
from aqueduck.model.errors import SlotLostError
from aqueduck.postgres.publications.slots import create_slot, read_server, slot_info
from aqueduck.state_files.files import Confirmation, read_confirmation
from tests.fix_postgres import Database, wait_until
from tests.whole_group import WholeGroup, whole_group

TABLES = {"t": {}, "log": {"mode": "append"}}


def back_up(directory: Path, backup: Path) -> None:
    """As docs/operations.md says: the catalog, then the files."""
    backup.mkdir()
    with (
        closing(sqlite3.connect(directory / "lake.sqlite")) as one,
        closing(sqlite3.connect(backup / "lake.sqlite")) as two,
    ):
        one.backup(two)
    shutil.copytree(directory / "data", backup / "data")


def restore(directory: Path, backup: Path) -> None:
    """The lake as it was; `state_dir` and the source stay."""
    for file in directory.glob("lake.sqlite*"):
        file.unlink()
    shutil.rmtree(directory / "data")
    shutil.copy(backup / "lake.sqlite", directory)
    shutil.copytree(backup / "data", directory / "data")


def let_the_slot_follow(group: WholeGroup) -> None:
    """Traffic of a table that is not synced moves the slot beyond the lake, and the recorded confirmation with it."""
    group.db.execute("insert into other select generate_series(1, 500)")
    target = group.runner.status.position + 1

    def followed() -> bool:
        with group.db.connect() as conn:
            info = slot_info(conn, "aqueduck_test")
        assert info is not None
        group.capture.check()
        return (info.confirmed_flush_lsn or 0) >= target

    wait_until(followed, "the slot follows the server", 60)
    assert read_confirmation(group.runner.directory / "confirmed") is not None


def test_a_restored_lake_is_found_although_state_dir_was_kept(db: Database, tmp_path: Path) -> None:
    """P-S30, P-S17: our own idle confirmation is recognized; with an older lake it does not count."""
    db.execute("create table t (id int primary key, v text); create table log (id int primary key, v text)")
    db.execute("create table other (id int); insert into t values (1, 'copied')")
    directory = tmp_path / "here"
    directory.mkdir()
    with whole_group(db, directory, TABLES) as group:
        back_up(directory, tmp_path / "backup")
        db.execute(
            "insert into t values (2, 'after the backup'); insert into log values (1, 'after the backup')"
        )
        group.apply()
        let_the_slot_follow(group)
        group.restart(TABLES)  # an idle slot beyond the lake is fine: the note says that it was us
        group.stop()
        restore(directory, tmp_path / "backup")

        for trust in (False, True):
            with pytest.raises(SlotLostError, match="restored from an older backup") as caught:
                group.start(TABLES, trust_slot=trust)
            assert "on_slot_loss: resync" in str(caught.value)
        assert newest(directory) == newest(tmp_path / "backup"), "a refused start has written"

        group.with_options(on_slot_loss="resync")
        group.start(TABLES)
        assert [c.verdict for c in group.verify()] == ["identical"] * 2
        assert group.read("select _op, id from lake.main.log order by _commit_lsn, _seq") == [("copy", 1)]
        let_the_slot_follow(group)
        group.restart(TABLES)


def newest(directory: Path) -> int:
    """The newest lake snapshot of a lake's file."""
    with closing(sqlite3.connect(directory / "lake.sqlite")) as lake:
        [[number]] = lake.execute("select max(snapshot_id) from ducklake_snapshot").fetchall()
    return int(number)


@pytest.mark.slow
def test_a_note_of_another_lake_is_no_excuse(db: Database, tmp_path: Path) -> None:
    """P-S30: a slot that advanced for one lake may have skipped changes that another lake of the same group needs."""
    db.execute("create table t (id int primary key, v text); create table other (id int)")
    directory = tmp_path / "here"
    directory.mkdir()
    with whole_group(db, directory, {"t": {}}) as group:
        let_the_slot_follow(group)
        note = read_confirmation(group.runner.directory / "confirmed")
        assert note is not None
        group.lake.execute(
            "create table lake.aqueduck.again as from lake.aqueduck.progress_test;"
            "drop table lake.aqueduck.progress_test;"
            "alter table lake.aqueduck.again rename to progress_test"
        )
        group.stop()
        with pytest.raises(SlotLostError, match="re-created or moved by another"):
            group.start({"t": {}})
        group.start({"t": {}}, trust_slot=True)


def test_an_older_bookmark_is_found_too(db: Database) -> None:
    """P-E03: a recorded confirmation explains a slot that is ahead of its own bookmark, but not of an older one."""
    source = PostgresCdcConfig(connection_url=db.dsn, slot_name="events", publication_name="p")
    with db.connect() as conn:
        server = read_server(conn)
        position = create_slot(conn, "events")
        info = slot_info(conn, "events")

    def check(bookmark: int, noted: Confirmation | None) -> None:
        check_slot_position(source, server, info, Bookmark(bookmark, server.system_identifier), noted)

    check(position, None)
    check(position - 10, Confirmation(position, position - 10))
    check(position - 5, Confirmation(position, position - 10))
    for noted, reason in (
        (None, "re-created"),
        (Confirmation(position - 1, position - 20), "re-created"),
        (Confirmation(position, position - 5), "the bookmark is an older copy"),
    ):
        with pytest.raises(SlotLostError, match=reason):
            check(position - 10, noted)
