"""
Batches that are written into the catalog directly, compared with the same batches written by DuckLake.

The oracle is a second lake that gets the same batches through the engine: all tables of both catalogs must be equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from psycopg.conninfo import make_conninfo

from aqueduck.config.sync import LakeConfig
from aqueduck.lake.commit.commit import BatchPlan, RunPlan, TableFailed, TablePlan, commit_batch
from aqueduck.lake.direct import batch
from aqueduck.lake.ledger.parking import ensure_parking
from aqueduck.lake.ledger.progress import Position, read_position, write_position
from aqueduck.lake.ledger.table_states import ensure_table_states
from aqueduck.lake.session.catalog import METADATA, LakeSession, open_lake
from aqueduck.lake.session.sql import ident
from aqueduck.lake.target.apply import ensure_target
from aqueduck.model.changes import OP_DELETE, OP_INSERT, OP_UPDATE
from aqueduck.model.errors import LakeBusyError, LakeFileMissingError, LakeWriteError
from aqueduck.model.schema import Column, TableName, TableSchema
from tests.lake.target.test_apply import TYPES, VALUES
from tests.strategies import TABLE, Change, State, histories, key_of, replay, split, stage

START = Position("shop", 1000, None, "7300000000000000001", 1)
FEW = settings(
    max_examples=3, phases=[Phase.generate], deadline=None, suppress_health_check=list(HealthCheck)
)
VOLATILE = {"snapshot_time", "schema_uuid", "table_uuid", "noted_at", "updated_at"}
_numbers = itertools.count(1)


@dataclass
class Pair:
    """Two lakes with the same contents: `direct` is written directly, `oracle` through the engine."""

    direct: LakeSession
    oracle: LakeSession
    directory: Path
    position: int = 1000
    checked: set[str] = field(default_factory=set)
    """Tables of inlined rows of earlier tests."""

    @property
    def lakes(self) -> tuple[LakeSession, LakeSession]:
        return self.direct, self.oracle

    def both(self, statement: str) -> None:
        for lake in self.lakes:
            lake.execute(statement)

    def target(self, schema: TableSchema) -> TableName:
        """A new table in both lakes."""
        target = TableName("main", f"t{next(_numbers)}")
        for lake in self.lakes:
            with lake.transaction():
                ensure_target(lake, target, schema)
        return target

    def commit(self, *tables: tuple[TableName, TableSchema, Sequence[Change]]) -> bool:
        """Commit one batch in both lakes; returns whether it took the direct way."""
        self.position += 10
        plans = []
        for oid, (target, schema, history) in enumerate(tables, 1):
            segments = tuple(stage(self.directory, history, 5, schema))
            runs = (RunPlan(schema, segments),) if segments else ()
            plans.append(TablePlan(oid, target, runs, 0, schema))
        end = Position("shop", self.position, 1_700_000_000_000_000 + self.position, "7300000000000000001", 1)
        plan = BatchPlan(end, tuple(plans), start=self.position - 10)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batch, "KINDS", ())
            assert commit_batch(self.oracle, plan)
        seen: list[bool] = []

        def watched(*given: Any) -> bool:
            seen.append(direct(*given))
            return seen[-1]

        direct = batch.commit_directly
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("aqueduck.lake.commit.commit.commit_directly", watched)
            assert commit_batch(self.direct, plan)
        return seen[-1]

    def check(self) -> None:
        """Both catalogs are equal, apart from times and uuids."""
        assert catalog_tables(self.direct) == catalog_tables(self.oracle)
        for table in catalog_tables(self.oracle):
            if table not in self.checked:
                assert rows_of(self.direct, table) == rows_of(self.oracle, table), table

    def done(self) -> None:
        """Later checks leave out the inlined rows of the tables so far."""
        self.checked.update(t for t in catalog_tables(self.oracle) if t.startswith("ducklake_inlined_data_"))
        self.checked.discard("ducklake_inlined_data_tables")


def catalog_tables(lake: LakeSession) -> list[str]:
    if lake.kind == "postgres":
        query = "select relname::text from pg_class where relname like ''ducklake!_%'' escape ''!'' and relkind = ''r''"
        rows = lake.execute(f"from postgres_query('{METADATA}', '{query}')")
    else:
        rows = lake.execute(
            f"from sqlite_query('{METADATA}', 'select name from sqlite_master where type = ''table''')"
        )
    return sorted(name for (name,) in rows)


def rows_of(lake: LakeSession, table: str) -> list[str]:
    """The rows of a table of the catalog, without what differs from lake to lake."""
    rows, columns = lake.query(f"select * from {METADATA}.{ident(table)}")
    keep = [i for i, name in enumerate(columns) if name not in VOLATILE]
    shown = [tuple(row[i] for i in keep) for row in rows]
    if table == "ducklake_table_column_stats":
        shown = [row for row in shown if row[0] not in own_tables(lake)]
    if table.startswith("ducklake_inlined_data_") and table != "ducklake_inlined_data_tables":
        # The engine may number the rows of one statement in another order.
        shown = [row[1:] for row in shown] + [(number,) for number, *_ in shown]
    if table == "ducklake_metadata":
        shown = [row for row in shown if row[0] == "version"]
    if table in ("ducklake_files_scheduled_for_deletion", "ducklake_data_file"):
        shown = [row[:1] if table.startswith("ducklake_files") else row[:3] for row in shown]
    if table.startswith("ducklake_inlined_delete_"):  # as does the place of a row in them
        shown = [(row[0], row[2]) for row in shown]
    if table == "ducklake_file_column_stats":
        shown = [(*row[:3], *row[4:]) for row in shown]
    if table == "ducklake_table_stats":
        shown = [row[:3] for row in shown]
    if table == "ducklake_delete_file":  # names and sizes of files differ
        shown = [(*row[:5], row[8]) for row in shown]
    return sorted(map(repr, shown))


def own_tables(lake: LakeSession) -> set[int]:
    """Our own tables, whose statistics have times of now."""
    rows = lake.execute(
        f"select table_id from {METADATA}.ducklake_table join {METADATA}.ducklake_schema using (schema_id)"
        " where schema_name = 'aqueduck'"
    )
    return {number for (number,) in rows}


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("pair")
    lakes = []
    for name in ("direct", "oracle"):
        place = directory / name
        place.mkdir()
        catalog = f"sqlite:{place}/catalog.sqlite"
        if request.param == "postgres":
            server = request.getfixturevalue("pg")
            with psycopg.connect(server.dsn, autocommit=True) as admin:
                admin.execute(f"create database {name}_lake".encode())
            catalog = "postgres:" + make_conninfo(server.dsn, dbname=f"{name}_lake")
        lake = open_lake(
            LakeConfig(catalog=catalog, data_path=str(place / "data"), inline_rows=50), threads=2
        )
        ensure_table_states(lake)
        ensure_parking(lake)
        with lake.transaction():
            write_position(lake, START)
        lakes.append(lake)
    yield Pair(lakes[0], lakes[1], directory)
    for lake in lakes:
        lake.close()


def as_state(lake: LakeSession, target: TableName) -> State:
    cells = ", ".join(f"{ident(c.name)}::varchar" for c in TABLE.columns)
    rows = lake.execute(f"select {cells} from lake.main.{ident(target.name)}")
    found = {key_of(row): row for row in rows}
    assert len(found) == len(rows), "a key is stored twice"
    return found


#: Types that `TYPES` lacks, and a key of two exact types.
MORE = TableSchema(
    2,
    "public",
    "more",
    tuple(
        Column(name, oid, typmod)
        for name, oid, typmod in [
            ("at", 1184, -1), ("price", 1700, (10 << 16 | 2) + 4), ("r", 700, -1), ("s", 21, -1), ("l", 20, -1),
            ("a", 1007, -1), ("n", 1700, -1), ("o", 16, -1), ("u", 2950, -1),
        ]
    ),
    ("at", "price"),
    "d",
)  # fmt: skip
ODD = [
    (
        "2024-02-29 12:00:00.5+00",
        "1.50",
        "NaN",
        "-32768",
        "9223372036854775807",
        "{1,NULL}",
        "1e3",
        "f",
        None,
    ),
    ("infinity", "-0.01", "0.1", "7", "-1", "{}", None, "t", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
    ("2024-02-29 12:00:00.5+00", "-7.00", "Infinity", None, None, None, "x", None, None),
]


def test_a_key_of_exact_types_is_found(pair: Pair) -> None:
    """Rows are found again by a key of a time and a decimal, and all other types are stored as DuckLake stores them."""
    target = pair.target(MORE)
    assert pair.commit((target, MORE, [Change(OP_INSERT, row) for row in ODD[:2]]))
    pair.check()
    assert pair.commit(
        (
            target,
            MORE,
            [Change(OP_INSERT, ODD[2]), Change(OP_DELETE, old_key=ODD[0][:2]), Change(OP_UPDATE, ODD[1])],
        )
    )
    pair.check()
    assert pair.direct.execute(f"select count(*) from lake.main.{target.name}") == [(2,)]


FLUSH = "call ducklake_flush_inlined_data('lake', schema_name => 'main')"


@given(data=st.data(), places=st.lists(st.integers(0, 14), min_size=1, max_size=3), flushes=st.integers(0, 2))
@FEW
def test_catalogs_equal_those_that_ducklake_writes(
    data: st.DataObject, pair: Pair, places: list[int], flushes: int
) -> None:
    """Random histories of two tables, in several batches, leave the rows of a replay and the catalog of DuckLake."""
    one, two = pair.target(TABLE), pair.target(TABLE)
    other = [replace(c, unchanged=()) for c in data.draw(histories({}))]
    stored: State = {}
    other_stored = replay({}, other)
    for history in split([replace(c, unchanged=()) for c in data.draw(histories({}, size=20))], places):
        assert pair.commit((one, TABLE, history), (two, TABLE, other))
        stored, other_stored, other = (
            replay(stored, history),
            replay({}, other) if other else other_stored,
            [],
        )
        pair.check()
        if flushes:
            flushes -= 1
            pair.both(FLUSH)
        assert as_state(pair.direct, one) == stored
        assert as_state(pair.direct, two) == other_stored
    pair.done()


def test_every_type_is_stored_as_ducklake_stores_it(pair: Pair) -> None:
    """First rows, wider statistics, NULLs and deletes of every type leave the catalog that DuckLake leaves."""
    target = pair.target(TYPES)
    rows = [(str(i), *VALUES[n]) for i, n in enumerate([1, 0, 2, 1, 0])]
    assert pair.commit((target, TYPES, [Change(OP_INSERT, rows[0])]))
    pair.check()
    assert pair.commit((target, TYPES, [Change(OP_INSERT, row) for row in rows[1:]]))
    pair.check()
    updated = (rows[1][0], *VALUES[1])
    assert pair.commit((target, TYPES, [Change(OP_UPDATE, updated), Change(OP_DELETE, old_key=("4",))]))
    pair.check()
    query = f"select * from lake.main.{target.name} order by id"
    assert str(pair.direct.execute(query)) == str(pair.oracle.execute(query))


def many(ids: range) -> list[Change]:
    return [Change(OP_INSERT, ("big", "a", "1", str(i), "x")) for i in ids]


def test_rows_of_files_are_deleted_as_ducklake_deletes_them(pair: Pair) -> None:
    """Rows that a copy or a flush wrote into files are found by their key and are deleted once."""
    one, two = pair.target(TABLE), pair.target(TABLE)
    assert not pair.commit((one, TABLE, many(range(100, 160))), (two, TABLE, many(range(3))))
    pair.both(FLUSH)
    change = [
        Change(OP_UPDATE, ("new", "a", "2", "105", "y")),
        Change(OP_DELETE, old_key=("110", "a")),
        Change(OP_INSERT, ("big", "a", "1", "1000", "x")),
    ]
    for history in (change, [change[0], Change(OP_UPDATE, ("new", "a", "2", "106", "y"))]):
        assert pair.commit(
            (one, TABLE, history), (two, TABLE, [Change(OP_DELETE, old_key=("1", "a"))][: len(history) - 2])
        )
        pair.check()
    pair.both(FLUSH)
    assert pair.commit(
        (one, TABLE, [Change(OP_DELETE, old_key=("105", "a")), Change(OP_DELETE, old_key=("1000", "a"))])
    )
    pair.check()
    assert as_state(pair.direct, one) == as_state(pair.oracle, one)
    assert len(as_state(pair.direct, one)) == 58
    pair.both("call ducklake_merge_adjacent_files('lake')")
    pair.both(f"call ducklake_rewrite_data_files('lake', '{one.name}', delete_threshold => 0)")
    assert pair.commit(
        (one, TABLE, [Change(OP_DELETE, old_key=("120", "a")), Change(OP_DELETE, old_key=("7", "a"))])
    )
    pair.check()
    assert len(as_state(pair.direct, one)) == 57


def test_a_batch_that_needs_the_engine_gets_it(pair: Pair) -> None:
    """A truncate, many rows, an unchanged value or an option of the lake lead to the ordinary way, with the same result."""
    one = pair.target(TABLE)
    assert not pair.commit((one, TABLE, many(range(51))))
    assert not pair.commit((one, TABLE, [Change(OP_UPDATE, (None, "a", "2", "5", "y"), None, (0,))]))
    pair.check()
    wider = replace(TABLE, columns=(*TABLE.columns[:4], Column("_ord", 1043, 30)))
    assert pair.commit((one, wider, many(range(60, 62))))
    pair.both(f"call lake.set_option('data_inlining_row_limit', 1, table_name => '{one.name}')")
    for lake in pair.lakes:
        lake.reopen()
    assert not pair.commit((one, TABLE, many(range(62, 64))))
    for lake in pair.lakes:
        lake.execute(f"delete from {METADATA}.ducklake_metadata where key = 'data_inlining_row_limit'")
    pair.check()


def test_a_stored_limit_for_inlined_rows_counts_in_its_scope(pair: Pair) -> None:
    """The limit of a table precedes that of its schema, which precedes that of the lake; another table's has no effect."""
    one, two = pair.target(TABLE), pair.target(TABLE)
    assert pair.commit((one, TABLE, many(range(3))), (two, TABLE, many(range(3))))
    key, ids = "call lake.set_option('data_inlining_row_limit', ", itertools.count(10, 10)

    def direct(target: TableName, rows: int) -> bool:
        for lake in pair.lakes:
            lake.reopen()
        written = pair.commit((target, TABLE, many(range(first := next(ids), first + rows))))
        pair.check()
        return written

    try:
        pair.both(f"{key}1, table_name => '{one.name}')")
        assert [direct(one, 1), direct(one, 2), direct(two, 2)] == [True, False, True]
        pair.both(f"{key}2, schema => 'main')")
        assert [direct(one, 2), direct(two, 2), direct(two, 3)] == [False, True, False]
        pair.both(f"{key}1)")
        assert [direct(one, 1), direct(two, 2), direct(two, 3)] == [True, True, False]
    finally:
        for lake in pair.lakes:
            lake.execute(f"delete from {METADATA}.ducklake_metadata where key = 'data_inlining_row_limit'")
            lake.reopen()


def test_rows_from_before_a_new_column_are_found(pair: Pair) -> None:
    """Inlined rows of an earlier version of the columns are deleted by their key; a renamed key leaves it to the engine."""
    one = pair.target(TABLE)
    assert pair.commit((one, TABLE, many(range(3))))
    pair.both(f"alter table lake.main.{one.name} add column extra varchar")
    wider = replace(TABLE, columns=(*TABLE.columns, Column("extra", 25, -1)))
    change = Change(OP_UPDATE, ("new", "a", "2", "1", "y", "more"))
    assert pair.commit((one, wider, [change]))
    pair.check()
    assert pair.commit((one, wider, [change, Change(OP_DELETE, old_key=("0", "a"))]))
    pair.check()
    pair.both(f"alter table lake.main.{one.name} rename column id to number")
    renamed = replace(
        wider,
        columns=tuple(replace(c, name={"id": "number"}.get(c.name, c.name)) for c in wider.columns),
        key=("number", "Kind of"),
    )
    assert not pair.commit((one, renamed, [Change(OP_DELETE, old_key=("2", "a"))]))
    pair.check()
    assert pair.direct.execute(f"select number, extra from lake.main.{one.name}") == [(1, "more")]


def test_the_history_of_a_table_reads_as_ducklake_would_have_written_it(pair: Pair) -> None:
    """Time travel and DuckLake's change feed show each batch."""
    one = pair.target(TABLE)
    pair.commit((one, TABLE, many(range(2))))
    pair.commit(
        (one, TABLE, [Change(OP_UPDATE, ("new", "a", "2", "1", "y")), Change(OP_DELETE, old_key=("0", "a"))])
    )
    [[newest]] = pair.direct.execute(f"select max(snapshot_id) from {METADATA}.ducklake_snapshot")
    for query in (
        f"select id, big from lake.main.{one.name} at (version => {newest - 1}) order by id",
        f"select change_type, id, big from ducklake_table_changes('lake', 'main', '{one.name}', {newest - 1}, {newest}) order by all",
        f"select changes from lake.snapshots() where snapshot_id >= {newest - 1} order by snapshot_id",
    ):
        assert pair.direct.execute(query) == pair.oracle.execute(query), query
    [[message, extra]] = pair.direct.execute(
        f"select commit_message, commit_extra_info from lake.snapshots() where snapshot_id = {newest}"
    )
    assert message.startswith("shop up to 0/")
    assert '"group": "shop"' in extra


def test_a_commit_of_someone_else_in_between_is_noticed(pair: Pair) -> None:
    """A writer that commits while a batch is written makes it fail and start again; no snapshot is lost."""
    one, two = pair.target(TABLE), pair.target(TABLE)
    pair.commit((one, TABLE, many(range(2))), (two, TABLE, many(range(2))))
    other = open_lake(pair.direct.config, threads=1)
    real = batch._insert
    commits: list[object] = []

    def interrupted(session: LakeSession, *given: Any) -> None:
        real(session, *given)
        if not commits:
            commits.append(other.execute(f"delete from lake.main.{two.name} where id = 0"))

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batch, "_insert", interrupted)
            assert pair.commit((one, TABLE, [Change(OP_DELETE, old_key=("0", "a"))]))
    finally:
        other.close()
    assert len(commits) == 1
    assert list(as_state(pair.direct, one)) == [("1", "a")]
    assert list(as_state(pair.direct, two)) == [("1", "a")]
    pair.oracle.execute(f"delete from lake.main.{two.name} where id = 0")
    assert read_position(pair.direct, "shop") == read_position(pair.oracle, "shop")


def test_a_position_that_moved_stops_the_batch(pair: Pair) -> None:
    """A service that was overtaken writes nothing."""
    one = pair.target(TABLE)
    segments = tuple(stage(pair.directory, many(range(2)), 5, TABLE))
    plan = BatchPlan(
        replace(START, position=pair.position + 10),
        (TablePlan(1, one, (RunPlan(TABLE, segments),), 0, TABLE),),
    )
    pair.direct.memory.positions["shop"] = pair.position - 5
    with pytest.raises(LakeBusyError):
        assert batch.commit_directly(pair.direct, plan, pair.position - 5, "", {})
    pair.direct.memory.positions.clear()
    assert as_state(pair.direct, one) == {}


def _deletion(pair: Pair, *targets: TableName) -> BatchPlan:
    """A batch after the pair's position that deletes a row of each target, by the number of the table."""
    segments = tuple(stage(pair.directory, [Change(OP_DELETE, old_key=("101", "a"))], 5, TABLE))
    plans = tuple(
        TablePlan(oid, target, (RunPlan(TABLE, segments),), 0, TABLE) for oid, target in enumerate(targets, 1)
    )
    return BatchPlan(replace(START, position=pair.position + 10), plans, start=pair.position)


def _both_went_on(pair: Pair) -> None:
    """The oracle gets the position of the other lake, so that later tests can use both."""
    pair.position += 10
    for lake in pair.lakes:
        with lake.transaction():
            write_position(lake, replace(START, position=pair.position))
        lake.memory.positions.clear()


def test_a_table_whose_file_is_lost_is_named(pair: Pair) -> None:
    """Promise 5: what one table lacks fails that table only; without it, the same batch is written."""
    good, bad = pair.target(TABLE), pair.target(TABLE)
    pair.commit((good, TABLE, many(range(100, 160))), (bad, TABLE, many(range(100, 160))))
    pair.direct.execute(f"call ducklake_flush_inlined_data('lake', table_name => '{bad.name}')")
    [[file]] = pair.direct.execute(f"select data_file from ducklake_list_files('lake', '{bad.name}')")
    Path(file).unlink()
    plan = _deletion(pair, good, bad)
    with pytest.raises(TableFailed) as failure:
        commit_batch(pair.direct, plan)
    assert failure.value.oid == 2
    assert isinstance(failure.value.error, LakeFileMissingError)
    assert commit_batch(pair.direct, replace(plan, tables=plan.tables[:1]))
    assert ("101", "a") not in as_state(pair.direct, good)
    pair.both(f"drop table lake.main.{bad.name}")
    _both_went_on(pair)


@pytest.mark.parametrize("after_commit", [False, True])
def test_a_batch_that_cannot_be_written_directly_is_written_once(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, after_commit: bool
) -> None:
    """An error of the direct way leads to the engine's, also if its commit took effect and only the reply was lost."""
    one = pair.target(TABLE)
    pair.commit((one, TABLE, many(range(100, 103))))
    real = batch.commit_directly

    def failing(*given: Any) -> bool:
        if after_commit:
            assert real(*given)
        raise LakeWriteError("writing the catalog failed")

    monkeypatch.setattr("aqueduck.lake.commit.commit.commit_directly", failing)
    [[before]] = pair.direct.execute("from lake.current_snapshot()")
    assert commit_batch(pair.direct, _deletion(pair, one))
    [[now]] = pair.direct.execute("from lake.current_snapshot()")
    assert now == before + 1
    assert list(as_state(pair.direct, one)) == [("100", "a"), ("102", "a")]
    _both_went_on(pair)
