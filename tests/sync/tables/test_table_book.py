"""What a group knows of its tables, tested alone."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from aqueduck.config.sync import LakeConfig
from aqueduck.lake.ledger.parking import ensure_parking
from aqueduck.lake.ledger.table_states import TableState, ensure_table_states, read_states, write_state
from aqueduck.lake.session.catalog import open_lake
from aqueduck.model.batches import plan_fold_tasks
from aqueduck.model.changes import SegmentRef
from aqueduck.model.errors import LakeWriteError, TableDisabledError, TableMissingError
from aqueduck.model.schema import Column, TableName, TableSchema
from aqueduck.sync.status import GroupStatus
from aqueduck.sync.tables.prepare_tables import PreparedTable
from aqueduck.sync.tables.table_book import TableBook

SCHEMA = TableSchema(1, "public", "t", (Column("id", 23, -1, "int4"),), ("id",), "d")
TABLE = PreparedTable(SCHEMA, TableName("main", "t"), True)
READY = TableState(1, "public.t", TableName("main", "t"), True, 100, schema=SCHEMA)


@pytest.fixture
def book(tmp_path: Path) -> Iterator[TableBook]:
    """A group with one table that is ready."""
    lake = open_lake(LakeConfig(catalog=f"sqlite:{tmp_path}/lake.sqlite", data_path=f"{tmp_path}/data"))
    ensure_table_states(lake)
    ensure_parking(lake)
    with lake.transaction():
        write_state(lake, "g", [READY])
    made = TableBook(GroupStatus("g", position=200), lake, threading.Lock(), tmp_path)
    made.begin({1: TABLE}, {"public.gone": TableMissingError("there is none")})
    yield made
    lake.close()


def segment(rows: int, *, at: int = 1) -> SegmentRef:
    return SegmentRef(
        table_oid=1, version=1, kind="rows", path=f"s{at}", rows=rows, bytes=10 * rows, inserts=rows, updates=0, deletes=0,
        key_changes=0, unchanged=0, first_ord=at, last_lsn=300, last_ts=0, schema_json=SCHEMA.to_json(),
    )  # fmt: skip


def test_a_state_is_changed_under_the_commit_lock_only(book: TableBook) -> None:
    """Without the lock, a call fails before a batch and a copy can overwrite each other's states."""
    with pytest.raises(AssertionError, match="commit lock"):
        book.await_copy(1)
    assert book.states[1] == READY


def test_a_reader_keeps_the_tables_that_it_has_got(book: TableBook) -> None:
    """Mappings are replaced: a thread that walks over them sees one state of the group."""
    tables, states = book.tables, book.states
    with book.commit_lock:
        book.forget([1])
    assert (dict(tables), dict(states)) == ({1: TABLE}, {1: READY})
    assert (dict(book.tables), dict(book.states), book.status.tables) == ({}, {}, {})
    assert book.take_left() == {1}
    assert book.take_left() == set(), "it is reported once"


def test_a_written_state_is_in_the_lake_and_in_the_tasks_note(book: TableBook) -> None:
    """From the next batch on, tasks leave the changes of a table that awaits its copy to be parked."""
    with book.commit_lock:
        book.await_copy(1)
    assert book.states[1].awaits_copy
    assert read_states(book.lake, "g")[1].awaits_copy
    assert json.loads(book.skips_path.read_text()) == {"1": None}


def test_a_batch_that_does_not_come_about_isolates_nothing(book: TableBook) -> None:
    """A table that failed in a batch which then failed as a whole is as it was before."""
    before = book.states
    with book.commit_lock:
        book.isolate(1, LakeWriteError("no"))
        assert not book.is_ready(1)
        assert book.take_back(before) == [1]
    assert book.states[1] is READY or book.states[1] == READY
    assert book.is_current(before[1])


def test_work_for_an_earlier_state_does_not_count(book: TableBook) -> None:
    """A state is known by identity: the same values may be those of a table that left and came back."""
    before = book.states[1]
    with book.commit_lock:
        book.written([replace(before)])
    assert not book.is_current(before)


def test_what_is_parked_is_counted_until_the_table_is_ready(book: TableBook) -> None:
    """`may_have_parked` holds from before the commit on, because it is unknown whether a lost commit happened."""
    assert not book.may_have_parked(1)
    book.begin_parking([segment(3)])
    assert book.may_have_parked(1)
    assert dict(book.parked) == {}
    with book.commit_lock:
        book.park([segment(3), segment(2, at=9)])
        assert (book.parked[1].rows, book.parked[1].bytes) == (5, 50)
        book.mark_ready({1: 7})
    assert not book.may_have_parked(1)
    assert dict(book.parked) == {}
    assert book.rows_synced(1, before=1000) == 1007
    assert book.counts_of(1).applied is not None


def test_a_disabled_table_stays_so_when_its_copy_comes_in(book: TableBook) -> None:
    """Changes of a disabled table are parked, whatever its state was before."""
    with book.commit_lock:
        book.disable(1)
        assert TableDisabledError.code in str(book.states[1].error)
        assert not book.unless_disabled(READY).ready
        book.enable(1)
    assert book.unless_disabled(READY) is READY


def test_a_batch_counts_each_segment_once(book: TableBook) -> None:
    """Buckets of one run name the same segments."""
    changes = [replace(segment(8), bytes=1 << 20, updates=1, unchanged=1)]
    units = plan_fold_tasks(changes, direct_bytes_max=-1, task_bytes=1 << 18)
    assert len(units) == 4
    with book.commit_lock:
        book.count(units, 300)
    counts = book.counts_of(1)
    assert (counts.changes, counts.updates) == (8, 1)
    assert counts.applied is not None
    assert counts.applied[0] == 300


def test_a_table_that_is_accepted_is_refused_no_more(book: TableBook) -> None:
    book.refuse({"public.other": TableMissingError("there is none either")})
    book.accept("public.gone")
    assert list(book.refused) == ["public.other"]


def test_a_table_that_was_not_sent_for_a_while_is_not_settled(book: TableBook) -> None:
    """Transactions may have written to it when it was not published: its copy waits for them."""
    assert book.is_settled([1])
    with book.commit_lock:
        book.record_unsent(1, TableMissingError("not sent"))
        book.record_sent_again(1)
    assert dict(book.unsent) == {}
    assert not book.is_settled([1])
    book.mark_settled([1])
    assert book.is_settled([1])
