"""Every type on both ways into a lake: copied and streamed values equal the source's, and keys are found."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fix_postgres import Database
from tests.flow import Flow
from tests.type_strategies import USER_TYPES, TypeCase, all_types

CASES = all_types()
SHARED = settings(
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.large_base_example,
    ],
)

Row = tuple[str | None, ...]
rows = st.tuples(*(st.none() | case.literals for case in CASES))


def column(expression: str, name: str) -> str:
    """An expression over x as one over the column of that name."""
    return re.sub(r"\bx\b", name, expression)


def expected(db: Database, table: str, cases: Sequence[TypeCase]) -> dict[int, list[Any]]:
    """The source's rows by id, as its own functions write them."""
    exprs = ", ".join(column(case.source, f"c{i}") for i, case in enumerate(cases))
    return _read(db.query(f"select id, {exprs} from {table}"), cases)


def found(flow: Flow, target: str, cases: Sequence[TypeCase]) -> dict[int, list[Any]]:
    """The lake's rows by id, as DuckDB's own functions write them."""
    exprs = ", ".join(column(case.lake, f"c{i}") for i, case in enumerate(cases))
    return _read(flow.read(f"select id, {exprs} from lake.{target}"), cases)


def _read(rows: Sequence[tuple[Any, ...]], cases: Sequence[TypeCase]) -> dict[int, list[Any]]:
    read = {
        id_: [None if cell is None else case.read(cell) for case, cell in zip(cases, cells, strict=True)]
        for id_, *cells in rows
    }
    assert len(read) == len(rows)
    return read


def differences(
    cases: Sequence[TypeCase], want: dict[int, list[Any]], got: dict[int, list[Any]]
) -> list[tuple[Any, ...]]:
    """Cells that differ, with their types: easier to read than two tables."""
    assert want.keys() == got.keys()
    return [
        (case.name, id_, ours, theirs)
        for id_ in want
        for case, ours, theirs in zip(cases, want[id_], got[id_], strict=True)
        if ours != theirs
    ]


@pytest.fixture
def torture(db: Database, tmp_path: Path) -> Iterator[Flow]:
    """A table with a column of every type."""
    columns = ", ".join(f"c{i} {case.name}" for i, case in enumerate(CASES))
    db.execute(f"{USER_TYPES}; set timezone = 'UTC'; create table torture (id int primary key, {columns})")
    with Flow(db, tmp_path, ["torture"]) as flow:
        yield flow


def check_torture(flow: Flow, first: list[Row], later: list[Row], tasks: bool) -> None:
    db = flow.db
    places = ", ".join(f"%s::{case.name}" for case in CASES)
    db.execute("truncate torture")
    with db.connect() as conn, conn.transaction(), conn.cursor() as cursor:
        cursor.executemany(
            f"insert into torture values (%s, {places})".encode(), [(i, *row) for i, row in enumerate(first)]
        )
    flow.catch_up(tasks=tasks)
    assert differences(CASES, expected(db, "torture", CASES), found(flow, "stream.torture", CASES)) == []
    sets = ", ".join(f"c{i} = %s::{case.name}" for i, case in enumerate(CASES))
    with db.connect() as conn, conn.transaction(), conn.cursor() as cursor:
        cursor.executemany(
            f"update torture set {sets} where id = %s".encode(), [(*row, i) for i, row in enumerate(later)]
        )
    flow.catch_up(tasks=not tasks)
    flow.copy("torture")
    want = expected(db, "torture", CASES)
    assert differences(CASES, want, found(flow, "stream.torture", CASES)) == []
    assert differences(CASES, want, found(flow, "copied.torture", CASES)) == []


@given(st.lists(rows, min_size=1, max_size=3), st.lists(rows, max_size=2), st.booleans())
@settings(SHARED, max_examples=8)
def test_random_values_of_every_type_are_the_same_by_copy_by_stream_and_at_the_source(
    torture: Flow, first: list[Row], later: list[Row], tasks: bool
) -> None:
    """P-S06, promise 7: copy = stream = source, inserted and updated, by the driver and by tasks, through files and inlined."""
    check_torture(torture, first, later, tasks)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@given(st.lists(rows, min_size=1, max_size=3), st.lists(rows, max_size=2), st.booleans())
@settings(SHARED, max_examples=300)
def test_many_random_values_of_every_type_are_the_same(
    torture: Flow, first: list[Row], later: list[Row], tasks: bool
) -> None:
    """P-S06: the same for much longer."""
    check_torture(torture, first, later, tasks)


#: Types without an order cannot be keys.
NO_KEYS = {"json", "jsonpath", "point", "line", "lseg", "box", "path", "polygon", "circle", "json[]", "box[]"}
KEY_CASES = [case for case in all_types(keys=True) if case.name not in NO_KEYS]
#: An index has at most 32 columns.
KEYED = {f"k{n}": KEY_CASES[n : n + 32] for n in range(0, len(KEY_CASES), 32)}
keyed_rows = {table: st.tuples(*(case.literals for case in cases)) for table, cases in KEYED.items()}


@pytest.fixture
def keyed(db: Database, tmp_path: Path) -> Iterator[Flow]:
    """Tables whose keys together have a column of every type that can be in one."""
    db.execute(f"{USER_TYPES}; set timezone = 'UTC'")
    for table, cases in KEYED.items():
        columns = ", ".join(f"c{i} {case.name}" for i, case in enumerate(cases))
        key = ", ".join(f"c{i}" for i in range(len(cases)))
        db.execute(
            f"create table {table} (id int not null, {columns}, c{len(cases)} int default 0, primary key ({key}))"
        )
    with Flow(db, tmp_path, list(KEYED)) as flow:
        yield flow


@pytest.mark.slow
@pytest.mark.timeout(1200)
@given(st.data(), st.booleans())
@settings(SHARED, max_examples=6)
def test_rows_are_found_again_by_a_key_of_any_type(keyed: Flow, data: st.DataObject, tasks: bool) -> None:
    """P-S08: updates, deletes and changes of the key find their rows in the lake, for every type of key."""
    with keyed.db.connect() as conn:
        for table, cases in KEYED.items():
            conn.execute(f"truncate {table}".encode())
            rows = data.draw(st.lists(keyed_rows[table], min_size=2, max_size=4), label=table)
            places = ", ".join(f"%s::{case.name}" for case in cases)
            insert = f"insert into {table} values (%s, {places}) on conflict do nothing"
            conn.cursor().executemany(insert.encode(), [(i, *row) for i, row in enumerate(rows)])
    keyed.catch_up(tasks=tasks)
    with keyed.db.connect() as conn:
        for table, cases in KEYED.items():
            conn.execute(f"update {table} set c{len(cases)} = 1 where id % 3 = 0".encode())
            conn.execute(f"delete from {table} where id % 3 = 1".encode())
            sets = ", ".join(f"c{i} = %s::{case.name}" for i, case in enumerate(cases))
            moved = data.draw(keyed_rows[table], label=f"new key in {table}")
            conn.execute(f"update {table} set {sets} where id = 2".encode(), moved)
    keyed.catch_up(tasks=not tasks)
    for table, cases in KEYED.items():
        shown = [*cases, TypeCase("integer", st.nothing())]
        assert (
            differences(shown, expected(keyed.db, table, shown), found(keyed, f"stream.{table}", shown)) == []
        )


def both_ways(db: Database, directory: Path, values: dict[str, list[str]]) -> None:
    """Values of types that are text, by copy and by stream, alone and in arrays."""
    columns = ", ".join(f"c{i} {name}, a{i} {name}[]" for i, name in enumerate(values))
    db.execute(f"create table t (id int primary key, {columns})")
    with Flow(db, directory, ["t"]) as flow:
        for id_, row in enumerate(zip(*values.values(), strict=True)):
            cells = ", ".join(f"%(c{i})s, array[%(c{i})s::{name}, null]" for i, name in enumerate(values))
            db.execute(f"insert into t values ({id_}, {cells})", {f"c{i}": v for i, v in enumerate(row)})
        flow.catch_up(tasks=False)
        flow.copy("t")
        shown = ", ".join(f"c{i}::text, to_json(a{i}::text[])::text" for i in range(len(values)))
        read = ", ".join(f"c{i}, a{i}::varchar" for i in range(len(values)))
        want = db.query(f"select id, {shown} from t order by id")
        assert flow.read(f"select id, {read} from lake.stream.t order by id") == want
        assert flow.read(f"select id, {read} from lake.copied.t order by id") == want


def test_types_of_extensions_are_their_text(system_db: Database, tmp_path: Path) -> None:
    """hstore, citext, ltree, cube and xml arrive as the server writes them, by copy and by stream, including in arrays."""
    for extension in ("hstore", "citext", "ltree", "cube"):
        system_db.execute(f"create extension {extension}")
    values = {
        "hstore": ["", r'"a b"=>"x\"y\\z", "c"=>NULL, "d"=>"NULL"'],
        "citext": ["Straße", '{a,"b"}'],
        "ltree": ["Top.Science", "a"],
        "cube": ["(1, 2),(3, 4)", "(0)"],
        "xml": ['<a b="1">ü &amp; x</a>', "just text"],
    }
    both_ways(system_db, tmp_path, values)


def test_vectors_are_their_text(db: Database, tmp_path: Path) -> None:
    """pgvector: the modifier is part of the type, and its arrays are JSON."""
    db.execute("create extension vector")
    both_ways(db, tmp_path, {"vector(3)": ["[1,2.5,-3]", "[0,0,1e-05]"], "halfvec(2)": ["[1,2]", "[3,4]"]})


def test_keys_that_are_equal_but_written_differently(db: Database, tmp_path: Path) -> None:
    """P-S08: -0 and 0, 1.0 and 1.00, NaN and padded text find their rows, and a change of the text is a change of the row."""
    db.execute("""
        create table f (k float8 primary key, v int); create table n (k numeric primary key, v int);
        create table d (k numeric(5,1) primary key, v int); create table c (k char(5) primary key, v int)
    """)
    with Flow(db, tmp_path, ["f", "n", "d", "c"]) as flow:
        db.execute("""
            insert into f values ('-0', 1), ('NaN', 2), ('infinity', 3); insert into n values (1.0, 1), ('NaN', 2), (3, 3);
            insert into d values (1, 1), ('NaN', 2), (3, 3); insert into c values ('a', 1), ('b', 2), ('', 3)
        """)
        flow.catch_up(tasks=False)
        db.execute("""
            update f set k = '0' where v = 1; update n set k = 1.00 where v = 1; update c set k = 'A' where v = 1;
            update f set v = 20 where k = 'NaN'; update n set v = 20 where k = 'NaN'; update d set v = 20 where k = 'NaN';
            delete from f where v = 3; delete from n where v = 3; delete from d where v = 1; delete from c where v = 3
        """)
        flow.catch_up(tasks=True)
        found = {t: flow.read(f"select k::varchar, v from lake.stream.{t} order by v") for t in "fndc"}
    assert found == {
        "f": [("0.0", 1), ("nan", 20)],
        "n": [("1.00", 1), ("NaN", 20)],
        "d": [("3.0", 3), (None, 20)],
        "c": [("A    ", 1), ("b    ", 2)],
    }
