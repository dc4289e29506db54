"""The example of docs/events.md does what the document says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.fix_events import Flow
from tests.fix_postgres import Database

DOCUMENT = (Path(__file__).parents[2] / "docs" / "events.md").read_text(encoding="utf-8")
URL = "postgres://user:pass@localhost:5432/appdb"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT, re.DOTALL)


class Documented(Flow):
    """A flow whose file is the document's, with the test's database."""

    def write_config(self) -> None:
        text = blocks("yaml")[0]
        assert URL in text
        self.config_file.write_text(text.replace(URL, f'"{self.db.dsn}"'))


def steady(line: str) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(line)
    assert re.fullmatch(r"[0-9A-F]+/[0-9A-F]+", event["lsn"])
    assert event["ts_ms"] > 1_700_000_000_000
    return {**event, "lsn": "", "ts_ms": 0}


def test_the_example_gives_the_events_that_the_document_shows(db: Database, tmp_path: Path) -> None:
    """Its statements, its file, its output, line for line but for positions and times."""
    setup, changes = blocks("sql")
    db.execute(setup)
    flow = Documented(db, tmp_path)
    try:
        assert flow.once() == 0, flow.log()
        db.execute(changes)
        assert flow.once() == 0, flow.log()
    finally:
        flow.wait_free()
        db.execute("select pg_drop_replication_slot('faucet_slot')")
    [shown] = blocks("json")
    written = (tmp_path / "changes.jsonl").read_text(encoding="utf-8")
    assert [steady(line) for line in written.splitlines()] == [steady(line) for line in shown.splitlines()]
    assert [list(json.loads(line)) for line in written.splitlines()] == [
        list(json.loads(line)) for line in shown.splitlines()
    ]
