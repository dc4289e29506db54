"""An outage of the source is two lines in the log, however many parts of the service notice it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
import pytest
from structlog.testing import capture_logs

from aqueduck.lab.embedded import EmbeddedPostgres
from aqueduck.model.errors import ConnectionLostError, NoKeyError, SourceUnreachableError
from aqueduck.service.outage import Outage
from tests.fix_postgres import Database, wait_until
from tests.local_service import local_config, local_service, without_spark

__all__ = ["without_spark"]


def test_only_the_first_error_is_logged() -> None:
    """The others say the same in other words."""
    outage = Outage()
    with capture_logs() as logs:
        assert outage.covers(ConnectionLostError("it broke"))
        assert outage.covers(SourceUnreachableError("it is starting up"))
        assert not outage.covers(NoKeyError("another problem"))
    assert [(line["log_level"], line["error"]) for line in logs] == [
        ("warning", "[pg.connection_lost] it broke")
    ]


def test_it_ends_when_the_source_was_seen_after_the_last_error() -> None:
    """What was seen before does not count; the next outage is logged again."""
    outage = Outage()
    outage.covers(ConnectionLostError("it broke"))
    with capture_logs() as logs:
        shown = []
        for seconds in (-5, 1, 1):
            outage.end_if_seen(datetime.now(UTC) + timedelta(seconds=seconds))
            shown.append(outage.is_on)
        assert shown == [True, False, False]
        outage.covers(ConnectionLostError("it broke again"))
    assert [line["event"] for line in logs] == ["back again", "connection lost: waiting and trying again"]


@pytest.mark.usefixtures("without_spark")
def test_a_restart_of_the_server_is_one_warning_and_one_line(
    new_server: Callable[..., EmbeddedPostgres], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups, the registry and the watches lose their connections; every change arrives afterwards."""
    monkeypatch.setattr("aqueduck.sync.service.WATCH_SECONDS", 0.2)
    server = new_server()
    db = Database(server, "postgres")
    db.execute("create table a (id int primary key); create table b (id int primary key)")
    config = local_config(db, tmp_path, {"one": ["public.a"], "two": ["public.b"]})
    with local_service(db, config) as service:
        service.wait_streaming("public.a", "public.b")
        outage = service.service.outage
        with capture_logs() as logs:
            server.stop("immediate")
            looks = service.looks
            wait_until(lambda: outage.is_on and service.looks > looks + 20, "the outage is noticed by all")
            server.start()
            db.observer = psycopg.connect(db.dsn, autocommit=True)
            wait_until(lambda: not outage.is_on, "it is over", 60)
        db.execute("insert into a values (1); insert into b values (2)")
        service.wait_same("a", "b")
    lines = [(line["log_level"], line["event"]) for line in logs]
    assert lines == [("warning", "connection lost: waiting and trying again"), ("info", "back again")]
