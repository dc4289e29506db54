"""`check` of an events file reports what a start would report, by the same code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from aqueduck.events.check import run_event_checks
from aqueduck.model.errors import AqueduckError
from tests.fix_events import Flow
from tests.fix_postgres import Database

SINKS: dict[str, dict[str, Any]] = {
    "an authority that is not there": {
        "type": "http",
        "config": {"url": "https://127.0.0.1:1/", "ca_path": "./none.pem"},
    },
    "an option that Kafka does not have": {
        "type": "kafka",
        "config": {"brokers": "127.0.0.1:1", "topic": "t", "options": {"no.such.option": "1"}},
    },
    "a package that is not installed": {"type": "kafka", "config": {"brokers": "127.0.0.1:1", "topic": "t"}},
    "a link in the place of the stage": {"type": "stdout"},
}


def checked(flow: Flow) -> set[str]:
    return {r.error.code for r in run_event_checks(flow.service().config) if r.error is not None}


def started(flow: Flow) -> set[str]:
    service = flow.service()
    try:
        service.prepare()
    except AqueduckError as exc:
        return {exc.code}
    finally:
        service.stop()
    return set()


@pytest.mark.parametrize("what", SINKS)
def test_check_says_what_a_start_says_of_the_sink_and_the_stage(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """P-T07: a start creates the sink and its own directory; a check finds what would prevent that, and creates nothing."""
    if what != "a package that is not installed":
        pytest.importorskip("confluent_kafka")
    db.execute("create table o (id int primary key); create publication faucet_pub for table o")
    flow = Flow(db, tmp_path, sink={"type": "stdout", "config": {}})
    assert checked(flow) == set()
    flow.sink = {"config": {}, **SINKS[what]}
    if what == "a package that is not installed":
        monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    if what == "a link in the place of the stage":
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "state").mkdir()
        (tmp_path / "state" / "faucet_slot").symlink_to(tmp_path / "elsewhere")
    assert checked(flow) == {"config.invalid"}
    assert started(flow) == {"config.invalid"}
    assert not db.query("select from pg_replication_slots where slot_name = 'faucet_slot'")
