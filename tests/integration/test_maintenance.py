"""A service that maintains its lake while it streams, and says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.fix_postgres import Database, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def test_a_running_service_maintains_its_lake_and_traces_its_batches(db: Database, sync_of: Any) -> None:
    """P-S32: on its schedule, and when `aqueduck maintain` asks; every batch is a trace, every log line JSON."""
    pytest.importorskip("opentelemetry.sdk")
    from tests.otlp_receiver import otlp_receiver

    db.execute("create table t (id int primary key, v text)")
    sync = sync_of("public.t")
    sync.options = {
        "maintenance": {
            "interval_seconds": 1,
            "delete_share": 0.05,
            "retention_hours": 0.0001,
            "grace_hours": 0,
        }
    }
    with otlp_receiver() as received:
        sync.options["tracing"] = {"otlp_endpoint": received.endpoint}
        sync.arguments = ("--log-format", "json")
        process = sync.started()
        for i in range(12):
            db.execute(
                "insert into t select n, 'a' from generate_series(%s::int, %s::int) n",
                (i * 100, i * 100 + 99),
            )
            db.execute("update t set v = v || 'b' where id %% 3 = %s", (i % 3,))
            db.execute("delete from t where id < %s", (i * 40,))
        sync.wait_same()
        report = maintain(sync)
        assert report["error"] is None
        assert {t["table"] for t in report["tables"]} >= {"main.t", "aqueduck.progress_test"}
        wait_until(lambda: events(sync, "lake maintained"), "it is maintained on schedule", 60, log=sync.log)
        db.execute("update t set v = 'end' where id % 2 = 0")
        sync.wait_same()
        sync.stop(process)
    [[files]] = sync.lake(
        "select count(*) from __ducklake_metadata_lake.ducklake_data_file where end_snapshot is null"
    )
    assert files <= 20
    assert events(sync, "group started")[0]["group"] == "test"
    spans = received.spans()
    roots = [span for span in spans if span.name == "batch"]
    assert roots
    assert {span.name for span in spans} == {"batch", "capture", "fold", "commit"}
    changes = [a.value.int_value for span in roots for a in span.attributes if a.key == "aqueduck.changes"]
    assert sum(changes) >= 1200


def maintain(sync: Any) -> Any:
    command = [sys.executable, "-m", "aqueduck.cli", "maintain", "-c", str(sync.config_file), "--json"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr + sync.log()
    assert "it was asked" in done.stderr
    [report] = json.loads(done.stdout)
    return report


def events(sync: Any, name: str) -> list[dict[str, Any]]:
    found = []
    for line in (sync.directory / "log.txt").read_text(errors="replace").splitlines():
        if line.startswith("{"):
            event = json.loads(line)
            if event["event"] == name:
                found.append(event)
    return found
