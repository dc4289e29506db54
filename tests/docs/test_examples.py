"""The projects in examples/ run as they are, one after the other, each as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]


def lines_of(example: str) -> list[str]:
    """What `run.py` prints; its end has to be a good one."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / example / "run.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=840,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout.splitlines()


def test_the_shop_is_synced_compared_and_asked() -> None:
    """P-S12: with a column that was added between two runs."""
    lines = lines_of("shop-sync")
    assert {line.split(",")[0] for line in lines[-4:-1]} == {
        "CH: 1633 orders",
        "FR: 1633 orders",
        "IT: 1634 orders",
    }
    assert lines[-1].startswith("1 customer is a VIP")


def test_every_tenant_gets_its_own_rows_also_after_a_move() -> None:
    """P-F01, P-F02: a lake for each tenant; one is listed, the pattern creates the others."""
    lines = lines_of("multi-tenant-fanout")
    assert lines[-3:] == [
        "quacksworth: 280 rows, 280 of them its own",
        "mallardine: 280 rows, 280 of them its own",
        "tealman: 310 rows, 310 of them its own",
    ]


def test_the_audit_log_has_every_change_in_order() -> None:
    """P-S16, and exactly the lines that its README shows."""
    shown = (ROOT / "examples" / "audit-log" / "README.md").read_text(encoding="utf-8")
    assert "\n".join(lines_of("audit-log")[-4:]) in shown


def test_the_webhook_gets_every_event() -> None:
    """P-E01: all of a transaction, in order, in requests of at most ten events."""
    lines = lines_of("events-webhook")
    assert lines[-2] == "27 events in 3 requests; the last two: ['update', 'delete']"
    assert '"op": "insert"' in lines[-1]


def test_the_job_continues_where_it_stopped() -> None:
    """P-E10: two runs, no order twice; a delete is none."""
    assert [line.split(",")[0] for line in lines_of("pyspark-job")[-3:]] == [
        "CH: 200 orders",
        "FR: 200 orders",
        "IT: 200 orders",
    ]
