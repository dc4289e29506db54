"""What people read: sizes, times, states, and what is wrong below the table."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rich.console import Console

from aqueduck.cli.show import show_groups, show_status, size, span, verify_progress

NOW = datetime(2026, 1, 2, tzinfo=UTC)


def printed(show: Any, rows: list[dict[str, Any]], **keywords: Any) -> str:
    out = Console(file=io.StringIO(), width=200)
    show(out, rows, **keywords)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


@pytest.mark.parametrize(
    ("bytes_", "text"),
    [
        (None, "–"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (300 << 20, "300 MiB"),
        (5 << 40, "5.0 TiB"),
    ],
)
def test_sizes_are_as_people_say_them(bytes_: int | None, text: str) -> None:
    """Three digits and a unit."""
    assert size(bytes_) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0.25, "0.2 s"),
        (42, "42 s"),
        (61, "1 min 1 s"),
        (3600, "1 h 0 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_times_are_as_people_say_them(seconds: float | None, text: str) -> None:
    """The two largest units."""
    assert span(seconds) == text


def status_row(**changes: Any) -> dict[str, Any]:
    empty = dict.fromkeys(
        (
            "state_since", "rows_synced", "lag_bytes", "lag_seconds", "last_sync_at", "error_message", "error_code",
            "retry_at", "copy_share", "copy_seconds_left", "parked_rows", "parked_bytes", "queued_changes",
            "queued_bytes", "source_column", "source_value",
        )
    )  # fmt: skip
    names = {"group_name": "g", "source": "public.t", "target": "main.t", "state": "STREAMING"}
    return {**empty, **names, "enabled": True, "running": True, **changes}


def test_status_shows_lag_age_and_progress() -> None:
    """P-S27: how far behind, since when, how much of the copy is done, and what is parked."""
    text = printed(
        show_status,
        [
            status_row(rows_synced=1234567, lag_bytes=3 << 20, lag_seconds=1.5, state_since=NOW - timedelta(hours=2)),
            status_row(source="public.u", state="SNAPSHOT", copy_share=0.25, copy_seconds_left=90, parked_rows=1000,
                       parked_bytes=2048),
        ],
        now=NOW,
    )  # fmt: skip
    shared = status_row(source="eu.t", target="main.sales", source_column="region", source_value="eu")
    assert "eu.t → main.sales (region = eu)" in printed(show_status, [shared], now=NOW)
    for part in (
        "1,234,567",
        "3.0 MiB",
        "1.5 s",
        "2 h 0 min",
        "copy 25%, 1 min 30 s left",
        "1,000 parked (2.0 KiB)",
    ):
        assert part in text
    assert "no service" not in text


def test_status_shows_errors_in_full_and_names_with_brackets() -> None:
    """The message and the time of the next try are below the table; names are never taken for markup."""
    row = status_row(
        source="public.[red]", state="ERRORED", error_code="lake.write", error_message="[lake.write] disk full. Fix: make room",
        retry_at=NOW + timedelta(seconds=30), running=False, enabled=False,
    )  # fmt: skip
    text = printed(show_status, [row], now=NOW)
    assert "public.[red] (again in 30 s): [lake.write] disk full. Fix: make room" in text
    assert "(disabled)" in text
    assert "no service is running" in text


def test_groups_show_the_wal_that_they_keep() -> None:
    """P-S18: the retained WAL of an unused slot is reported in words."""
    row = {
        "name": "g", "running": False, "enabled": True, "tables": 0, "tables_errored": 0, "slot_name": "aqueduck_g",
        "publication": "aqueduck_g", "retained_bytes": 64 << 20, "staged_bytes": None, "restarts": 0,
        "note": "has no tables, but its slot keeps 64 MB of WAL", "error_message": None,
    }  # fmt: skip
    text = printed(show_groups, [row])
    assert "64.0 MiB" in text
    assert "g: has no tables, but its slot keeps 64 MB of WAL" in text


def test_nothing_yet_says_what_to_do() -> None:
    """An empty table is no answer."""
    assert "aqueduck tables add" in printed(show_status, [])


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_a_bar_for_each_table_on_a_terminal(terminal: bool) -> None:
    """A terminal shows the progress of each table; a file or a pipe gets nothing."""
    out = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    with verify_progress(out) as report:
        report("public.t", "waits for a snapshot of the source", 0.0)
        report("public.t", "compares", 0.5)
        report("public.u", "compares", 1.0)
    assert isinstance(out.file, io.StringIO)
    text = out.file.getvalue()
    assert [word in text for word in ("public.t", "public.u", "compares")] == [terminal] * 3
    assert terminal or text == ""
