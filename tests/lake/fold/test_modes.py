"""
Every mode against a model that is too simple to be wrong: random histories, cut anywhere into batches.

Transactions, truncates, unchanged cells and changes of keys reach a real lake in batches, folded by the driver
from segments or by what Spark's tasks run into files.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from aqueduck.config.sync import LakeConfig
from aqueduck.lake.commit.commit import commit_batch
from aqueduck.lake.fold.fold_tasks import FoldTaskWriter, plan_batch
from aqueduck.lake.ledger.parking import ensure_parking
from aqueduck.lake.ledger.progress import Position, write_position
from aqueduck.lake.ledger.table_states import TableState, ensure_table_states
from aqueduck.lake.session.catalog import LakeSession, open_lake
from aqueduck.lake.session.directories import table_directory
from aqueduck.lake.session.sql import ident, lake_table
from aqueduck.lake.target.apply import check_target, ensure_target
from aqueduck.lake.target.evolve import plan_changes, widen, wider_columns
from aqueduck.lake.target.kept_columns import fit_columns, keep_columns
from aqueduck.lake.target.mode_rows import present_rows
from aqueduck.model.batches import plan_fold_tasks
from aqueduck.model.changes import OP_INSERT, OP_UPDATE, SegmentRef
from aqueduck.model.errors import SchemaChangeError
from aqueduck.model.modes import TableMode
from aqueduck.model.schema import Column, TableName
from aqueduck.state_files.files import write_tables
from tests.strategies import (
    TABLE,
    Change,
    Key,
    Row,
    State,
    histories,
    key_of,
    replay,
    stage,
    time_of,
    truncate_before,
)

#: Each example is a table of a real lake: a failure is not made smaller, which would take minutes.
SOME = settings(
    max_examples=5,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
MANY = settings(SOME, max_examples=150)
MODES = ("append", "history", "soft_delete")
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Event:
    """A change, or a truncate where there is none, in its transaction."""

    commit: int
    change: Change | None


@st.composite
def events(draw: st.DrawFn) -> list[Event]:
    """A legal history with truncates, its changes in transactions."""
    found: list[Event] = []
    state: State = {}
    commit = 1
    for _ in range(draw(st.integers(1, 3))):
        for change in draw(histories(state, size=10)):
            state = replay(state, [change])
            found.append(Event(commit, change))
            commit += draw(st.integers(0, 1))
        if draw(st.booleans()):
            found.append(Event(commit, None))
            state = {}
            commit += draw(st.integers(0, 1))
    return found


@st.composite
def batches(draw: st.DrawFn) -> list[list[Event]]:
    """The same in batches, which end at commits."""
    found: list[list[Event]] = [[]]
    for _, transaction in itertools.groupby(draw(events()), key=lambda e: e.commit):
        found[-1] += list(transaction)
        if draw(st.integers(0, 2)) == 0:
            found.append([])
    return [batch for batch in found if batch]


class Target:
    """A table of a lake, filled batch by batch."""

    def __init__(
        self, session: LakeSession, directory: Path, mode: TableMode, name: str | None = None
    ) -> None:
        self.session, self.directory, self.mode = session, directory, mode
        number = next(_numbers)
        self.name = TableName("main", name or f"t{number}")
        self.group = f"g{number}"
        self.table = replace(TABLE, oid=number)
        self.position = Position(self.group, 1, None, "s", 1)
        with session.transaction():
            ensure_target(session, self.name, self.table, mode)
            write_position(session, self.position)
        self.states = {number: TableState(number, "public.t", self.name, True, 0, mode=mode)}
        place = table_directory(session, self.name)
        write_tables(directory / f"tables-{number}", [(self.table, place)], {number: mode})
        self.ord = 10
        self.seqs: dict[int, int] = {}

    def apply(self, batch: Sequence[Event], *, tasks: bool) -> None:
        segments: list[SegmentRef] = []
        for is_truncate, some in itertools.groupby(batch, key=lambda e: e.change is None):
            for event in some if is_truncate else [None]:
                if event is not None:
                    some_rows = stage(self.directory, [Change(OP_INSERT, (None,) * 5)], self.ord, self.table)
                    at = 1000 + 10 * event.commit
                    truncate = truncate_before(some_rows[0], lsn=at, time_us=time_of(event.commit))
                    segments.append(replace(truncate, seq=self._seq(event)))
                    self.ord += 10
            if not is_truncate:
                changes = [
                    replace(e.change, commit=e.commit, seq=self._seq(e)) for e in some if e.change is not None
                ]
                segments += stage(self.directory, changes, self.ord, self.table)
                self.ord += 3 * len(changes) + 10
        keep_truncated = list(self.states) if self.mode.keeps else []
        sizes = {"direct_bytes_max": -1, "task_bytes": 200} if tasks else {"direct_bytes_max": 1 << 40}
        units = plan_fold_tasks(segments, keep_truncated=keep_truncated, **sizes)
        number = self.table.oid
        writer = FoldTaskWriter(
            self.group, f"r{self.ord}", self.session.config.data_path, str(self.directory / "scratch"),
            str(self.directory / f"tables-{number}"), str(self.directory / "skips"),
        )  # fmt: skip
        files = [(task, writer.write(task)) for task in units]
        end = replace(self.position, position=1000 + 10 * batch[-1].commit + 5)
        plan = plan_batch(files, self.states, end, before=self.position.position)
        assert commit_batch(self.session, plan)
        assert not commit_batch(self.session, plan), "the same batch again changes nothing"
        self.position = end

    def _seq(self, event: Event) -> int:
        self.seqs[event.commit] = self.seqs.get(event.commit, -1) + 1
        return self.seqs[event.commit]

    def rows(self, *more: str, where: str = "true") -> list[tuple[Any, ...]]:
        """The rows as text, with the columns in `more`."""
        cells = [f"{ident(c.name)}::varchar" for c in TABLE.columns]
        query = f"select {', '.join([*cells, *more])} from {lake_table(self.name)} where {where}"
        return sorted(self.session.execute(query), key=repr)

    def present(self) -> list[tuple[Any, ...]]:
        cells = ", ".join(f"{ident(c.name)}::varchar" for c in TABLE.columns)
        query = present_rows(self.mode, TABLE, lake_table(self.name))
        return sorted(self.session.execute(f"select {cells} from ({query})"), key=repr)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LakeSession]:
    directory = tmp_path_factory.mktemp("modes")
    config = LakeConfig(
        catalog=f"sqlite:{directory}/lake.sqlite", data_path=f"{directory}/data", inline_rows=4
    )
    with open_lake(config, threads=2) as session:
        ensure_table_states(session)
        ensure_parking(session)
        yield session


def final_state(history: Sequence[Event]) -> State:
    state: State = {}
    for event in history:
        state = {} if event.change is None else replay(state, [event.change])
    return state


def expected_history(history: Sequence[Event]) -> list[tuple[Any, ...]]:
    """Versions (row, from, to): what each commit left."""
    found: list[tuple[Any, ...]] = []
    opened: dict[Key, tuple[Row, int]] = {}
    state: State = {}
    for commit, transaction in itertools.groupby(history, key=lambda e: e.commit):
        touched: set[Key] = set()
        for event in transaction:
            before = state
            state = {} if event.change is None else replay(state, [event.change])
            touched |= {key for key in before.keys() | state.keys() if before.get(key) is not state.get(key)}
            if event.change is not None and event.change.row is not None:
                touched.add(key_of(event.change.row))
        for key in touched:
            if key in opened:
                row, since = opened.pop(key)
                found.append((*row, since, commit))
            if key in state:
                opened[key] = (state[key], commit)
    return sorted([*found, *((*row, since, None) for row, since in opened.values())], key=repr)


def expected_soft(history: Sequence[Event]) -> list[tuple[Any, ...]]:
    """Rows (row, deleted, at): the last that each key was."""
    found: dict[Key, tuple[Row, int | None]] = {}
    state: State = {}
    for event in history:
        before = state
        state = {} if event.change is None else replay(state, [event.change])
        for key in before.keys() - state.keys():
            found[key] = (before[key], event.commit)
        for key in state:
            found[key] = (state[key], None)
    return sorted(((*row, at is not None, at) for row, at in found.values()), key=repr)


def expected_log(history: Sequence[Event]) -> list[tuple[Any, ...]]:
    """Every change (row, op, lsn, unchanged); cells that were not sent are NULL and named."""
    found: list[tuple[Any, ...]] = []

    def gone(key: Key) -> Row:
        places = dict(zip(TABLE.key_indexes, key, strict=True))
        return tuple(places.get(i) for i in range(len(TABLE.columns)))

    for event in history:
        lsn, change = 1000 + 10 * event.commit, event.change
        if change is None:
            found.append((*(None,) * 5, "truncate", lsn, None))
            continue
        if change.old_key is not None:
            found.append((*gone(change.old_key), "delete", lsn, None))
        if change.row is not None:
            moved = change.op == OP_UPDATE and change.old_key is not None
            names = [TABLE.columns[i].name for i in change.unchanged]
            op = "update" if change.op == OP_UPDATE and not moved else "insert"
            found.append((*change.row, op, lsn, json.dumps(names, separators=(",", ":")) if names else None))
    return sorted(found, key=repr)


EPOCH = "epoch_us({})//1000000"


def check(
    session: LakeSession, directory: Path, mode: str, history: list[list[Event]], tasks: list[bool]
) -> None:
    target = Target(session, directory, TableMode(mode))
    for batch, by_tasks in zip(history, itertools.cycle(tasks), strict=False):
        target.apply(batch, tasks=by_tasks)
    whole = [event for batch in history for event in batch]
    if mode == "history":
        # A barrier inside a transaction leaves versions that held for no time.
        held = "_valid_to is null or _valid_to > _valid_from"
        found = target.rows(EPOCH.format("_valid_from"), EPOCH.format("_valid_to"), where=held)
        assert found == expected_history(whole)
    elif mode == "soft_delete":
        assert target.rows("_deleted", EPOCH.format("_deleted_at")) == expected_soft(whole)
    elif mode == "append":
        assert target.rows("_op", "_commit_lsn", "_unchanged::varchar") == expected_log(whole)
        places = session.execute(
            f"select count(*), count(distinct (_commit_lsn, _seq)) from {lake_table(target.name)}"
        )
        assert places[0][0] == places[0][1], "each row has a place of its own"
    unchanged = any(e.change is not None and e.change.unchanged for e in whole)
    if mode != "append" or not unchanged:
        assert target.present() == sorted(final_state(whole).values(), key=repr)


@pytest.mark.parametrize("mode", MODES)
@given(history=batches(), tasks=st.lists(st.booleans(), min_size=1, max_size=3))
@SOME
def test_a_mode_keeps_what_its_model_keeps(
    session: LakeSession, tmp_path: Path, mode: str, history: list[list[Event]], tasks: list[bool]
) -> None:
    """P-S08, P-S10, P-S11, P-S16: every mode, for any batches, from segments or from files of tasks."""
    check(session, tmp_path, mode, history, tasks)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", [*MODES, "upsert"])
@given(history=batches(), tasks=st.lists(st.booleans(), min_size=1, max_size=3))
@MANY
def test_a_mode_keeps_what_its_model_keeps_in_many_histories(
    session: LakeSession, tmp_path: Path, mode: str, history: list[list[Event]], tasks: list[bool]
) -> None:
    """The same, for longer."""
    check(session, tmp_path, mode, history, tasks)


def inserted(commit: int, *ids: int) -> list[Event]:
    return [Event(commit, Change(OP_INSERT, ("big", "a", "1", str(i), "x"))) for i in ids]


def updated(commit: int, *ids: int) -> list[Event]:
    return [Event(commit, Change(OP_UPDATE, ("big", "a", "2", str(i), "x"))) for i in ids]


def test_groups_that_commit_into_one_target_at_once_both_count(
    session: LakeSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-S15: another session's commit to the same target, right before ours, makes ours run again."""
    with open_lake(session.config, threads=1) as other:
        one = Target(session, tmp_path, TableMode("upsert", "src", "one"), "both")
        two = Target(other, tmp_path, TableMode("upsert", "src", "two"), "both")
        one.apply(inserted(1, 1, 2), tasks=False)
        two.apply(inserted(1, 1, 2), tasks=False)
        calls: list[str] = []

        def point(name: str) -> None:
            calls.append(name)
            if calls == ["lake.before_commit"]:
                two.apply(updated(2, 1), tasks=False)

        monkeypatch.setattr("aqueduck.lake.commit.commit.faults.point", point)
        one.apply(updated(2, 2), tasks=False)
        assert calls.count("lake.before_commit") >= 3, "ours was tried twice"
    assert [row[2:] for row in one.rows("src")] == [
        ("1", "1", "x", "one"), ("1", "2", "x", "two"), ("2", "1", "x", "two"), ("2", "2", "x", "one"),
    ]  # fmt: skip


def column(name: str, oid: int, number: int, missing: str | None = None) -> Column:
    return Column(name, oid, -1, number=number, missing=missing)


def test_columns_of_a_log_are_kept(session: LakeSession) -> None:
    """P-S12: a dropped column stays, a name that is used again sets the old column aside, a rename keeps the values."""
    mode, target = TableMode("append"), TableName("main", "columns_of_a_log")
    key = column("id", 23, 1)
    old = replace(TABLE, columns=(key, column("a", 25, 2), column("b", 25, 3)), key=("id",))
    new = replace(TABLE, columns=(key, column("c", 25, 2), column("b", 25, 4, "dflt")), key=("id",))
    with session.transaction():
        ensure_target(session, target, old, mode)
    session.execute(
        "insert into lake.main.columns_of_a_log by name select 1 as id, 'x' as a, 'y' as b, 'insert' as _op"
    )
    with session.transaction():
        keep_columns(session, target, plan_changes(old, new), mode)
    check_target(session, target, new, mode)
    assert session.execute("select id, c, b, b_1 from lake.main.columns_of_a_log") == [(1, "x", "dflt", "y")]
    other = replace(TABLE, columns=(key, column("c", 23, 5), column("b", 25, 4)), key=("id",))
    with pytest.raises(SchemaChangeError):
        check_target(session, target, other, mode)
    with session.transaction():
        fit_columns(session, target, other, mode)
    check_target(session, target, other, mode)
    assert session.execute("select c, c_1, b, b_1 from lake.main.columns_of_a_log") == [
        (None, "x", "dflt", "y")
    ]


def test_columns_of_a_shared_target_follow_each_source(session: LakeSession) -> None:
    """P-S12, P-S15: an ADD, a RENAME and a wider type of one source leave the values of the others alone."""
    target = TableName("main", "columns_of_two")
    one, two = TableMode("upsert", "src", "one"), TableMode("upsert", "src", "two")
    key = column("id", 23, 1)
    old = replace(TABLE, columns=(key, column("a", 25, 2), column("n", 23, 3)), key=("id",))
    new = replace(
        TABLE, columns=(key, column("z", 25, 2), column("n", 20, 3), column("d", 25, 4, "dflt")), key=("id",)
    )
    with session.transaction():
        ensure_target(session, target, old, one)
        ensure_target(session, target, old, two)
    for source in ("one", "two"):
        session.execute(
            f"insert into lake.main.columns_of_two by name select 1 as id, 'a' as a, 5 as n, '{source}' as src"
        )
    wider, [version] = wider_columns(old, [new])
    with session.transaction():
        widen(session, target, old, wider)
    with session.transaction():
        keep_columns(session, target, plan_changes(wider, version), one)
    check_target(session, target, new, one)
    check_target(session, target, old, two)
    query = "select a, z, n, d from lake.main.columns_of_two order by src"
    assert session.execute(query) == [(None, "a", 5, "dflt"), ("a", None, 5, None)]
    with session.transaction():
        widen(session, target, old, wider)  # the other source follows
        keep_columns(session, target, plan_changes(wider, version), two)
    assert session.execute(query) == [(None, "a", 5, "dflt"), (None, "a", 5, "dflt")]
    text = replace(TABLE, columns=(key, column("n", 25, 3)), key=("id",))
    with pytest.raises(SchemaChangeError, match="other sources"), session.transaction():
        fit_columns(session, target, text, two)
