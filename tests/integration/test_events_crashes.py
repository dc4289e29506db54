"""P-E01 to P-E03, hazard 8: kill -9 at every durable step of an events flow, start again, compare every event."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fix_events import Flow
from tests.fix_postgres import Database

FlowOf = Callable[..., Flow]

POINTS = (
    "capture.staged",
    "events.parts_written",
    "sink.written",
    "sink.flushed",
    "bookmark.saved:2",  # the first one is saved before anything is delivered
    "batch.committed",
    "capture.before_confirm",
)
FILE_POINTS = ("bookmark.before_rename:2",)
ROTATED_POINTS = ("sink.renamed",)
POLL_POINTS = ("poll.before_advance", "poll.advanced")
POLLED_IN_SHORT = (("sink.flushed", False), ("poll.advanced", True))

SETUP = """
create table a (id int primary key, n int, v text);
create table b (id int primary key, n int, v text);
create publication faucet_pub for table a, b;
"""


def load(db: Database, first: int, n: int = 600) -> None:
    """Transactions that jump between tables; `n` counts all changes in the order in which they are made."""
    db.execute(
        f"""
        do $$ begin
          for i in {first} .. {first + n - 1} loop
            if i % 3 = 0 then insert into a values (i, i, repeat('a', 500)); else insert into b values (i, i, 'b'); end if;
            if i % 10 = 0 then commit; end if;
          end loop;
        end $$
        """
    )


def assert_complete(events: list[dict[str, Any]], last: int) -> None:
    """Every change, once, in order; a transaction's events are together."""
    assert [e["after"]["n"] for e in events] == list(range(1, last + 1))
    lsns = [e["lsn"] for e in events]
    assert len({lsn for i, lsn in enumerate(lsns) if i == 0 or lsns[i - 1] != lsn}) == len(set(lsns))


def crash(flow: Flow, db: Database, point: str) -> None:
    """Die at the point, then catch up."""
    db.execute(SETUP)
    assert flow.once() == 0, flow.log()
    load(db, 1)
    code = flow.once(fault=point)
    assert code == -9, f"{code}\n{flow.log()}"
    assert "passed the fault point" in flow.log()
    load(db, 601, 50)
    assert flow.once() == 0, flow.log()


@pytest.mark.kills("events")
@pytest.mark.parametrize("point", [*POINTS, *FILE_POINTS])
def test_a_kill_loses_and_doubles_nothing_in_a_file(db: Database, flow_of: FlowOf, point: str) -> None:
    """P-E03: one file, with the bookmark in a file: exactly once after each crash."""
    flow = flow_of(more={"segment_bytes": "64KiB", "batch_bytes_max": "64KiB"})
    crash(flow, db, point)
    assert_complete(flow.lines(), 650)


@pytest.mark.kills("events")
@pytest.mark.parametrize(
    ("point", "pooled"),
    [
        *POLLED_IN_SHORT,
        *(
            pytest.param(point, pooled, marks=pytest.mark.faults)
            for point in ("capture.staged", "sink.flushed", "batch.committed", *POLL_POINTS)
            for pooled in (False, True)
            if (point, pooled) not in POLLED_IN_SHORT
        ),
    ],
)
def test_a_kill_while_polling_loses_and_doubles_nothing(
    db: Database, flow_of: FlowOf, pooler: Callable[..., str], point: str, pooled: bool
) -> None:
    """P-E09: peeked, delivered, then advanced; after a crash in between, the bookmark decides what comes next."""
    way = {"connection_url": pooler()} if pooled else {}
    flow = flow_of(
        source={"capture": "poll", "poll_step_bytes": "64KiB", **way},
        more={"segment_bytes": "64KiB", "batch_bytes_max": "64KiB"},
    )
    crash(flow, db, point)
    assert_complete(flow.lines(), 650)


@pytest.mark.kills("events")
@pytest.mark.parametrize("point", ["sink.flushed", "bookmark.saved:2"])
@pytest.mark.parametrize("store", ["postgres", "lake"])
def test_the_other_stores_are_as_exact(
    db: Database, flow_of: FlowOf, store: str, point: str, tmp_path: Path
) -> None:
    """P-E03: a PostgreSQL table or a lake holds the bookmark; the file is exactly once as well."""
    configs = {
        "postgres": {"table": "state.marks"},
        "lake": {"catalog": "sqlite:./marks.sqlite", "data_path": "./marks"},
    }
    db.execute("create schema state")
    flow = flow_of(
        state={"type": store, "config": configs[store]},
        more={"segment_bytes": "64KiB", "batch_bytes_max": "64KiB"},
    )
    crash(flow, db, point)
    assert_complete(flow.lines(), 650)


@pytest.mark.kills("events")
@pytest.mark.parametrize(
    "point", [*(pytest.param(p, marks=pytest.mark.faults) for p in POINTS), *ROTATED_POINTS]
)
def test_rotated_files_are_whole_and_exact(db: Database, flow_of: FlowOf, point: str) -> None:
    """P-E10: a visible file has whole transactions and never changes; together they have every event once."""
    sink = {"type": "jsonl", "config": {"path": "./changes.jsonl", "rotate_bytes": "16KiB"}}
    flow = flow_of(sink=sink)
    db.execute(SETUP)
    assert flow.once() == 0, flow.log()
    load(db, 1)
    assert flow.once(fault=point) == -9, flow.log()
    seen = {path: path.read_bytes() for path in flow.directory.glob("changes-*.jsonl")}
    for path in seen:
        transactions = [e["lsn"] for e in flow.lines(path.name)]
        assert all(transactions.count(lsn) == 10 for lsn in transactions), "a file of half a transaction"
    taken = [e for path in sorted(seen) for e in flow.lines(path.name)]
    for path in sorted(seen)[:-1]:
        path.unlink()  # the consumer of the files may remove them
    load(db, 601, 200)
    assert flow.once() == 0, flow.log()
    rest = [
        e for p in sorted(flow.directory.glob("changes-*.jsonl")) if p not in seen for e in flow.lines(p.name)
    ]
    assert_complete([*taken, *rest], 800)
    for path, content in seen.items():
        assert not path.exists() or path.read_bytes() == content


def test_without_a_bookmark_everything_comes_again(db: Database, flow_of: FlowOf) -> None:
    """P-E02, P-E03: the slot stays at the bookmark's position; after the bookmark is removed, all events of the slot come again."""
    flow = flow_of()
    db.execute(SETUP)
    assert flow.once() == 0
    load(db, 1, 20)
    assert flow.once(fault="sink.flushed") == -9
    for file in (flow.directory / "state").glob("*.json"):
        file.unlink()
    assert flow.once() == 0, flow.log()
    assert [e["after"]["n"] for e in flow.lines()] == [*range(1, 21), *range(1, 21)]
    assert flow.once() == 0
    assert len(flow.lines()) == 40, "a restart skips what was delivered"
