"""Events on standard output: whole lines, and after a kill the batch comes again with the positions it had."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.fix_events import Flow
from tests.fix_postgres import Database


def ids(flow: Flow) -> list[int]:
    """The rows of the events that the process printed, among the lines of its log."""
    lines = flow.log_file.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["after"]["id"] for line in lines if line.startswith("{")]


@pytest.mark.kills("events")
@pytest.mark.parametrize(
    ("point", "again"), [("events.parts_written", 0), ("sink.flushed", 50), ("bookmark.saved", 0)]
)
def test_a_kill_prints_a_batch_again_or_not_at_all(
    db: Database, flow_of: Callable[..., Flow], point: str, again: int
) -> None:
    """P-E03: at least once; printed events come again only if their bookmark was not saved."""
    db.execute("create table t (id int primary key); create publication faucet_pub for table t")
    flow = flow_of(sink={"type": "stdout"})
    assert flow.once() == 0, flow.log()
    db.execute("insert into t select g from generate_series(1, 50) g")
    assert flow.once(fault=point) == -9, flow.log()
    db.execute("insert into t select g from generate_series(51, 70) g")
    assert flow.once() == 0, flow.log()
    assert ids(flow) == [*range(1, again + 1), *range(1, 71)]
