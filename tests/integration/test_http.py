"""The page's server beside a real service: it shows what happens, from the first copy to the last change."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from aqueduck.config.sync import parse_config
from aqueduck.sync.actions import RegistryActions
from aqueduck.sync.overview import SyncOverviews
from aqueduck.sync.service import SyncService
from aqueduck.web.server import serve
from tests.fix_postgres import Database, wait_until

pytestmark = pytest.mark.spark

CONFIG = """
source: {{ dsn: "{dsn}" }}
lake: {{ catalog: "sqlite:lake.sqlite", data_path: data }}
groups:
  - name: test
    flush_interval_ms: 200
    tables: [{{ source: public.a }}, {{ source: public.b }}]
server: {{ port: 0 }}
"""


def test_status_and_metrics_follow_a_running_service(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-S27: state, rows, positions, copies and the lake's files of a service that runs, without a value of a cell."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # for the workers
    db.execute("create table a (id int primary key, v text); create table b (id int primary key)")
    db.execute("insert into a select g, 'hunter2' from generate_series(1, 1000) g")
    config = parse_config(CONFIG.format(dsn=db.dsn), base_dir=tmp_path, env={})
    service = SyncService(config)
    service.prepare()
    overviews = SyncOverviews(service)
    with contextlib.ExitStack() as stack:
        stack.callback(service.stop)
        address = stack.enter_context(serve(config.server, overviews, RegistryActions(db.dsn), interval=0.2))

        def get(path: str) -> bytes:
            with urlopen(f"{address}{path}", timeout=60) as answer:
                return bytes(answer.read())

        def tables() -> dict[str, Any]:
            found = json.loads(get("api/v1/tables"))["tables"]
            return {t["source"]: t for t in found}

        assert json.loads(get("api/v1/groups"))["groups"][0]["state"] == "starting"
        service.start()
        stopping = threading.Event()
        supervising = threading.Thread(target=service.supervise, args=(stopping,))
        supervising.start()
        stack.callback(supervising.join)
        stack.callback(stopping.set)
        wait_until(lambda: {t["state"] for t in tables().values()} == {"STREAMING"}, "both stream", 120)
        assert tables()["public.a"]["copy"]["done"]
        db.execute("insert into b select generate_series(1, 50); delete from b where id <= 10")
        wait_until(lambda: tables()["public.b"]["deletes"] == 10, "the changes are counted", 60)
        found = tables()["public.b"]
        assert (found["inserts"], found["group"], found["target"], found["error"]) == (
            50,
            "test",
            "main.b",
            None,
        )
        assert found["applied_lsn"]
        assert found["last_sync_at"]
        metrics = get("metrics").decode()
        assert (
            'aqueduck_table_changes_total{group="test",operation="delete",table="public.b"} 10.0' in metrics
        )
        assert 'aqueduck_process_memory_bytes{process="jvm"}' in metrics
        overviews._slow_at = -1e9  # look at the lake and the slot now, not in fifteen seconds
        wait_until(lambda: b'"name": "main.a"' in get("api/v1/lake"), "the lake's files are counted", 60)
        wait_until(lambda: json.loads(get("api/v1/groups"))["groups"][0]["retained_bytes"], "the slot", 60)
        everything = get("api/v1/status") + get("metrics") + get("readyz")
        assert json.loads(get("readyz"))["ready"]
        assert b"hunter2" not in everything
        assert db.dsn.encode() not in everything
