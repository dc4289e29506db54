"""What a service says about itself in its log: where it reads and writes, and one line a minute; no secrets."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from aqueduck import __version__
from aqueduck.model.lifecycle import SyncState
from aqueduck.overview.values import (
    DeliveryOverview,
    DestinationOverview,
    FlowOverview,
    GroupOverview,
    Overview,
    Problem,
    TableOverview,
)
from aqueduck.service.summary import lake_text, source_text, summarized, summary_of
from aqueduck.sync.service import run_service
from tests.fix_postgres import Database, wait_until
from tests.local_service import local_config, without_spark

__all__ = ["without_spark"]

NOW = datetime(2026, 1, 2, tzinfo=UTC)


def overview(*flows: FlowOverview, errors: tuple[Problem, ...] = ()) -> Overview:
    return Overview(at=NOW, version="1", started_at=NOW, flows=flows, errors=errors)


def sync(*tables: TableOverview, lag: float = 0.0) -> FlowOverview:
    group = GroupOverview(name="g", state="streaming", lag_seconds=lag, tables=tables)
    return FlowOverview(name="sync", kind="sync", groups=(group,))


def table(name: str, state: SyncState = SyncState.STREAMING, inserts: int = 0) -> TableOverview:
    return TableOverview(group="g", source=name, target=name, state=state, inserts=inserts)


@pytest.mark.parametrize(
    ("dsn", "text"),
    [
        ("host=db.example port=5433 dbname=shop user=app password=hunter2", "shop on db.example:5433 as app"),
        ("postgresql://app:hunter2@db.example/shop", "shop on db.example as app"),
        ("service=shop", "the default database on shop"),
    ],
)
def test_a_source_is_named_without_its_password(dsn: str, text: str) -> None:
    """The banner is in logs that many people read."""
    assert source_text(dsn) == text


def test_a_lake_is_named_without_its_password() -> None:
    """Its catalog and its files."""
    assert lake_text("sqlite:/a/lake.sqlite", "/a/data") == "sqlite /a/lake.sqlite, files in /a/data"
    catalog = "postgres:dbname=lake host=db.example password=hunter2"
    assert lake_text(catalog, "s3://b/p") == "postgres lake on db.example, files in s3://b/p"


def test_a_minute_of_a_sync() -> None:
    """Tables by state, changes since the last line, and what is behind."""
    before = overview(sync(table("a", inserts=5), table("b")))
    problem = Problem(code="x", message="m", at=datetime(2026, 1, 3, tzinfo=UTC))
    now = overview(
        sync(table("a", inserts=12), replace(table("b", SyncState.ERRORED), parked_rows=3), lag=1.26),
        errors=(problem,),
    )
    assert summary_of(before, now) == {
        "tables": 2, "streaming": 1, "errored": 1, "changes": 7, "lag_seconds": 1.3, "parked": 3, "errors": 1,
    }  # fmt: skip


def test_a_minute_of_the_other_flows() -> None:
    """Events that were delivered; rows of destinations."""

    def events(count: int) -> Overview:
        delivery = DeliveryOverview(sink="jsonl", events=count)
        group = GroupOverview(name="slot", state="streaming", delivery=delivery)
        return overview(FlowOverview(name="events", kind="events", groups=(group,)))

    def fanout(rows: int) -> Overview:
        one = DestinationOverview(flow="f", name="a", state="live", rows_replicated=rows, lag_seconds=2.0)
        return overview(FlowOverview(name="f", kind="fanout", destinations=(one,)))

    assert summary_of(events(3), events(10)) == {"events": 7, "lag_seconds": 0.0}
    assert summary_of(fanout(5), fanout(6)) == {
        "destinations": 1,
        "live": 1,
        "changes": 1,
        "lag_seconds": 2.0,
    }


class Fixed:
    """Overviews of a service in which nothing happens."""

    def overview(self) -> Overview:
        return overview(sync(table("a")))


def test_there_is_one_line_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the page asks."""
    with capture_logs() as logs, summarized(Fixed(), served=True) as overviews:
        for _ in range(5):
            overviews.overview()
        assert logs == []
        monkeypatch.setattr("aqueduck.service.summary.SUMMARY_SECONDS", 0.0)
        overviews.overview()
    assert [line["event"] for line in logs] == ["summary"]


def test_a_service_without_a_page_says_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """`server.enabled: false` turns off the page, not the log."""
    monkeypatch.setattr("aqueduck.service.summary.SUMMARY_SECONDS", 0.01)
    with capture_logs() as logs, summarized(Fixed(), served=False):
        wait_until(lambda: len(logs) >= 2, "two lines")
    assert {line["event"] for line in logs} == {"summary"}


@pytest.mark.usefixtures("without_spark")
def test_the_banner_names_version_source_lake_and_page(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a whole service, from its start to its end by a signal."""
    monkeypatch.setattr("aqueduck.sync.service.build_session", lambda *_, **__: None)
    db.execute("create table t (id int primary key)")
    config = local_config(db, tmp_path, {"test": ["public.t"]})
    config = config.model_copy(update={"server": config.server.model_copy(update={"port": 0})})
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with capture_logs() as logs:

        def end() -> None:
            wait_until(lambda: any(line["event"] == "group started" for line in logs), "it runs")
            os.kill(os.getpid(), signal.SIGTERM)

        ending = threading.Thread(target=end)
        ending.start()
        try:
            run_service(config, once=False)
        finally:
            ending.join()
            for number, handler in handlers.items():
                signal.signal(number, handler)
    [banner] = [line for line in logs if line["event"] == f"aqueduck {__version__}"]
    [serving] = [line for line in logs if line["event"] == "serving"]
    assert banner["page"] == serving["address"]
    assert banner["source"].startswith(f"{db.name} on 127.0.0.1:")
    assert banner["target"] == f"sqlite {tmp_path}/lake.sqlite, files in {tmp_path}/data"
