"""A slot that moved back reveals a restored server: a service that watches stops its group, or copies it again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from aqueduck.model.errors import SlotLostError
from aqueduck.state_files.files import SlotMark, read_slot, write_slot
from tests.fix_postgres import Database, wait_until
from tests.local_service import LocalService, local_config, local_service

pytestmark = pytest.mark.usefixtures("without_spark")


@pytest.fixture(autouse=True)
def _watches_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aqueduck.sync.service.WATCH_SECONDS", 0.1)


def put_back(service: LocalService, directory: Path, until: Callable[[], bool]) -> SlotMark:
    """The server seems to be a copy from before the mark."""
    path = directory / "state" / "test" / "slot"
    wait_until(lambda: read_slot(path) is not None, "the slot's position is noted")
    mark = SlotMark(1, 1 << 60, "aqueduck_test")
    write_slot(path, mark)
    wait_until(until, "the service has noticed", log=lambda: str(service.error))
    return mark


def test_a_group_stops_when_its_slot_moves_back(db: Database, tmp_path: Path) -> None:
    """P-T05: the watch does not adapt its mark to the server; the next start is refused, too."""
    db.execute("create table t (id int primary key)")
    config = local_config(db, tmp_path, {"test": ["public.t"]})
    with local_service(db, config) as service:
        service.wait_streaming("public.t")
        mark = put_back(service, tmp_path, lambda: service.error is not None)
        assert isinstance(service.error, SlotLostError)
        assert "restored from an older backup" in str(service.error)
        assert "on_slot_loss: resync" in str(service.error.hint)
    assert read_slot(tmp_path / "state" / "test" / "slot") == mark
    again = LocalService(db, config)
    with pytest.raises(SlotLostError, match="restored from an older backup"):
        again.start()
    again.stop()


def test_a_group_whose_slot_moves_back_is_copied_again(db: Database, tmp_path: Path) -> None:
    """P-T05: with `on_slot_loss: resync`, once; then the mark is that of the new slot."""
    db.execute("create table t (id int primary key); insert into t values (1)")
    config = local_config(db, tmp_path, {"test": ["public.t"]}, on_slot_loss="resync")
    with local_service(db, config) as service:
        service.wait_streaming("public.t")
        before = service.copies()
        mark = put_back(service, tmp_path, lambda: service.copies() > before)
        db.execute("insert into t values (2)")
        service.wait_same("t")
        service.wait_streaming("public.t")
        path = tmp_path / "state" / "test" / "slot"
        wait_until(lambda: read_slot(path) not in (None, mark), "the new slot's position is noted")
        assert service.copies() == before + 1
