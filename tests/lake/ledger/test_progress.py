from __future__ import annotations

from dataclasses import replace

import pytest

from aqueduck.lake.ledger.progress import (
    Position,
    forget_position,
    lake_mark,
    move_position,
    read_position,
    write_position,
)
from aqueduck.model.errors import LakeBusyError
from tests.fix_lake import Lake

HERE = Position("orders", 0x16A4F88, 1_700_000_000_123_456, "7300000000000000001", 1)


def test_a_group_without_a_position_has_none(lake: Lake) -> None:
    """Before the first write there is nothing to read, and asking makes no error."""
    assert read_position(lake.session, "orders") is None


def test_a_position_reads_back_as_written(lake: Lake) -> None:
    """Position, commit time to the microsecond, cluster and timeline survive, including the largest LSN of 63 bits."""
    for position in (HERE, replace(HERE, position=(1 << 63) - 1, commit_time_us=None, timeline=9)):
        with lake.session.transaction():
            write_position(lake.session, position)
        assert read_position(lake.session, "orders") == position


def test_groups_have_their_own_positions(lake: Lake) -> None:
    """Writing one group's position leaves the others' alone."""
    other = replace(HERE, group="users", position=5)
    for position in (HERE, other, replace(HERE, position=HERE.position + 1)):
        with lake.session.transaction():
            write_position(lake.session, position)
    assert read_position(lake.session, "users") == other


def test_a_lake_has_a_mark_as_long_as_the_group_is_in_it(lake: Lake) -> None:
    """P-S30: it stays while the position moves and the lake is opened again; a group that begins anew has another."""
    assert lake_mark(lake.session, "orders") == ""
    marks = []
    for position in (HERE, replace(HERE, position=HERE.position + 1)):
        with lake.session.transaction():
            write_position(lake.session, position)
        lake.session.reopen()
        marks.append(lake_mark(lake.session, "orders"))
    with lake.session.transaction():
        forget_position(lake.session, "orders")
    with lake.session.transaction():
        write_position(lake.session, HERE)
    assert marks[0] == marks[1] != ""
    assert lake_mark(lake.session, "orders") != marks[0]


def test_a_position_that_is_rolled_back_was_never_there(lake: Lake) -> None:
    """The position is part of its transaction."""
    with lake.session.transaction():
        write_position(lake.session, HERE)
    with pytest.raises(ZeroDivisionError), lake.session.transaction():  # noqa: PT012 - the transaction is what fails
        write_position(lake.session, replace(HERE, position=HERE.position + 1))
        raise ZeroDivisionError
    assert read_position(lake.session, "orders") == HERE


def test_only_one_of_two_services_can_move_a_position(lake: Lake) -> None:
    """Two transactions that move the same group's position conflict: the later one fails, its rows with it."""
    if lake.kind == "duckdb":
        pytest.skip("a DuckDB file has one process and one session")
    lake.session.execute("create table lake.main.t (x integer)")
    with lake.session.transaction():
        write_position(lake.session, HERE)
    with lake.second_session() as other, pytest.raises(LakeBusyError), other.transaction():  # noqa: PT012 - as above
        other.execute("insert into lake.main.t values (1)")
        write_position(other, replace(HERE, position=HERE.position + 1))
        with lake.session.transaction():
            lake.session.execute("insert into lake.main.t values (2)")
            write_position(lake.session, replace(HERE, position=HERE.position + 2))
    assert lake.read("select x from lake.main.t") == [(2,)]


def test_a_position_moves_only_from_where_the_batch_begins(lake: Lake) -> None:
    """A batch that was made for another start changes nothing: its rows would come twice."""
    with lake.session.transaction():
        write_position(lake.session, HERE)
    with lake.session.transaction():
        assert not move_position(
            lake.session, replace(HERE, position=HERE.position + 9), start=HERE.position - 1
        )
    assert read_position(lake.session, "orders") == HERE
    with lake.session.transaction():
        assert move_position(lake.session, replace(HERE, position=HERE.position + 9), start=HERE.position)
    assert read_position(lake.session, "orders") == replace(HERE, position=HERE.position + 9)
