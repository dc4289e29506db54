from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aqueduck.config.sync import LakeConfig
from aqueduck.lake.commit.commit import RunPlan, apply_run
from aqueduck.lake.session.catalog import open_lake
from aqueduck.lake.session.directories import table_directory
from aqueduck.lake.session.files import write_files
from aqueduck.lake.session.sql import ident
from aqueduck.lake.target.apply import add_files, delete_keys, ensure_target
from aqueduck.lake.target.mode_rows import truncate_target
from aqueduck.model.changes import OP_DELETE, OP_INSERT, OP_UPDATE
from aqueduck.model.errors import LakeWriteError
from aqueduck.model.modes import UPSERT
from aqueduck.model.schema import Column, TableName, TableSchema
from tests.fix_lake import Lake
from tests.strategies import (
    TABLE,
    Change,
    State,
    histories,
    key_of,
    replay,
    split,
    stage,
    states,
    truncate_before,
)

TARGET = TableName("some schema", 'odd "table"')
FEW, MANY = 3, 50  # the fixture's lake inlines up to ten rows

#: One column of each lake type, with text as PostgreSQL prints it.
TYPES = TableSchema(
    1,
    "public",
    "types",
    tuple(
        Column(name, oid, typmod)
        for name, oid, typmod in [
            ("id", 23, -1), ("b", 16, -1), ("f", 701, -1), ("n", 1700, (38 << 16 | 10) + 4), ("x", 17, -1), ("d", 1082, -1),
            ("t", 1083, -1), ("ts", 1114, -1), ("tz", 1184, -1), ("u", 2950, -1), ("j", 3802, -1), ("v", 25, -1),
        ]
    ),
    ("id",),
    "d",
)  # fmt: skip
VALUES = [
    ("t", "NaN", "-1234567890123456789012345678.0123456789", r"\x00ff", "infinity", "24:00:00", "0044-03-15 12:00:00 BC",
     "294276-12-31 00:00:00+00", "ffffffff-ffff-ffff-ffff-ffffffffffff", '{"a": "é"}', "it's\n\\N"),
    ("f", "-Infinity", "0.0000000001", r"\x", "0044-03-15 BC", "23:59:59.999999", "-infinity", "2024-01-01 00:00:00.000001+00",
     "00000000-0000-0000-0000-000000000000", "null", ""),
    (None,) * 11,
]  # fmt: skip
PRINTED = [
    ("true", "nan", "-1234567890123456789012345678.0123456789", r"\x00\xFF", "infinity", "24:00:00", "0044-03-15 (BC) 12:00:00",
     "infinity", "ffffffff-ffff-ffff-ffff-ffffffffffff", '{"a": "é"}', "it's\n\\N"),
    ("false", "-inf", "0.0000000001", "", "0044-03-15 (BC)", "23:59:59.999999", "-infinity", "2024-01-01 00:00:00.000001+00",
     "00000000-0000-0000-0000-000000000000", "null", ""),
    (None,) * 11,
]  # fmt: skip


def insert_history(rows: int, table_values: Sequence[tuple[str | None, ...]]) -> list[Change]:
    return [Change(OP_INSERT, (str(i), *table_values[i % len(table_values)])) for i in range(rows)]


def test_every_type_survives_the_catalog_and_files_alike(lake: Lake, tmp_path: Path) -> None:
    """P-S06: rows inlined in the catalog, rows in a file and rows flushed to one read back the same, on each catalog."""
    for rows, name in ((FEW, "few"), (MANY, "many")):
        target = TableName("main", name)
        with lake.session.transaction():
            ensure_target(lake.session, target, TYPES)
            segments = tuple(stage(tmp_path, insert_history(rows, VALUES), 5, TYPES))
            apply_run(lake.session, target, RunPlan(TYPES, segments))
    lake.session.execute("create table lake.main.flushed as from lake.main.few limit 0")
    lake.session.execute("insert into lake.main.flushed from lake.main.few")
    lake.session.execute("call ducklake_flush_inlined_data('lake', table_name => 'flushed')")
    columns = ", ".join(f"{ident(c.name)}::varchar" for c in TYPES.columns[1:])
    for name in ("few", "many", "flushed"):
        lake.session.execute("set TimeZone = 'UTC'")
        assert lake.read(f"select {columns} from lake.main.{name} where id < 3 order by id") == PRINTED, name


def test_a_target_with_odd_names_is_made_once(lake: Lake) -> None:
    """Names with quotes and spaces work, columns keep their order, and making it again changes nothing."""
    for _ in range(2):
        with lake.session.transaction():
            ensure_target(lake.session, TARGET, TABLE)
    rows = lake.read('select column_name, column_type from (describe lake."some schema"."odd ""table""")')
    assert rows == [
        ("big", "VARCHAR"),
        ("Kind of", "VARCHAR"),
        ("n0", "INTEGER"),
        ("id", "INTEGER"),
        ("_ord", "VARCHAR"),
    ]


def test_files_in_the_tables_directory_become_rows(lake: Lake) -> None:
    """A file that `write_files` put beside DuckLake's own is added unchanged, next to inlined rows."""
    with lake.session.transaction():
        ensure_target(lake.session, TARGET, TABLE)
    directory = table_directory(lake.session, TARGET)
    assert Path(directory).is_relative_to(lake.data_path)
    query = "select null::varchar as big, 'a' as \"Kind of\", i::integer as n0, i::integer as id, 'x' as _ord from range(50) t(i)"
    [file] = write_files(lake.session.con, query, directory, "aqueduck-g-1-1-0.parquet")
    assert (file.rows, file.bytes) == (50, Path(file.path).stat().st_size)
    with lake.session.transaction():
        lake.session.execute(
            'insert into lake."some schema"."odd ""table""" values (null, \'a\', 1, 1000, null)'
        )
        add_files(lake.session, TARGET, [file.path])
    assert lake.read('select count(*), sum(id) from lake."some schema"."odd ""table"""') == [
        (51, 1000 + 49 * 25)
    ]


def test_no_rows_make_no_file(lake: Lake) -> None:
    """An empty result leaves nothing in the data path."""
    assert write_files(lake.session.con, "select 1 as x where false", str(lake.data_path), "x.parquet") == []
    assert lake.files() == set()


def test_inserts_do_not_read_the_target(lake: Lake, tmp_path: Path) -> None:
    """P-S09: batch after batch of inserts passes while the target's file is away; an update needs it."""

    def apply(*changes: Change) -> None:
        with lake.session.transaction():
            apply_run(lake.session, TARGET, RunPlan(TABLE, tuple(stage(tmp_path, changes))))

    def inserted(first: int, rows: int) -> list[Change]:
        return [Change(OP_INSERT, ("b", "a", "1", str(first + i), None)) for i in range(rows)]

    with lake.session.transaction():
        ensure_target(lake.session, TARGET, TABLE)
    apply(*inserted(0, MANY))
    [file] = lake.data_path.rglob("*.parquet")
    away = file.rename(tmp_path / "away")
    apply(*inserted(1000, FEW))
    apply(*inserted(2000, MANY))
    with pytest.raises(LakeWriteError):
        apply(Change(OP_UPDATE, ("b", "a", "2", "0", None)))
    away.rename(file)
    assert lake.read('select count(*) from lake."some schema"."odd ""table"""') == [(2 * MANY + FEW,)]


def test_deletes_and_truncates_reach_rows_wherever_they_are(lake: Lake, tmp_path: Path) -> None:
    """Inlined rows, rows in files, and both within the transaction that wrote them can be removed."""
    session = lake.session
    with session.transaction():
        ensure_target(session, TARGET, TABLE)
        history = [Change(OP_INSERT, ("b", "a", "1", str(i), None)) for i in range(MANY + FEW)]
        apply_run(session, TARGET, RunPlan(TABLE, tuple(stage(tmp_path, history[:MANY]))))
        apply_run(session, TARGET, RunPlan(TABLE, tuple(stage(tmp_path, history[MANY:]))))
        delete_keys(session, TARGET, TABLE, "(select unnest([1, 1, 51, 777]) as k0, 'a' as k1)")
    name = 'lake."some schema"."odd ""table"""'
    assert lake.read(f"select count(*) from {name}") == [(MANY + FEW - 2,)]
    delete = [Change(OP_DELETE, old_key=(str(i), "a")) for i in (0, 2, 50)]
    with session.transaction():
        apply_run(session, TARGET, RunPlan(TABLE, tuple(stage(tmp_path, delete))))
    assert lake.read(f"select count(*) from {name}") == [(MANY + FEW - 5,)]
    with session.transaction():
        truncate_target(session, TARGET, UPSERT, truncate_before(stage(tmp_path, delete)[0]))
    assert lake.read(f"select count(*) from {name}") == [(0,)]


def test_an_update_that_only_toasts_keeps_what_the_lake_has(lake: Lake, tmp_path: Path) -> None:
    """P-S10: the value comes from the target, under the key that the row had there."""
    with lake.session.transaction():
        ensure_target(lake.session, TARGET, TABLE)
        first = [Change(OP_INSERT, ("huge", "a", "1", "1", "other"))]
        apply_run(lake.session, TARGET, RunPlan(TABLE, tuple(stage(tmp_path, first))))
    moved = [Change(OP_UPDATE, (None, "a", "2", "9", None), old_key=("1", "a"), unchanged=(0, 4))]
    with lake.session.transaction():
        apply_run(lake.session, TARGET, RunPlan(TABLE, tuple(stage(tmp_path, moved))))
    assert lake.read('from lake."some schema"."odd ""table"""') == [("huge", "a", 2, 9, "other")]


@given(
    data=st.data(), places=st.lists(st.integers(0, 14), max_size=3), inline_rows=st.sampled_from([0, 3, 100])
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_batches_applied_to_a_lake_equal_replay(
    data: st.DataObject, places: list[int], inline_rows: int, tmp_path: Path
) -> None:
    """After folding and applying batch after batch, a real lake has the rows that replay gives."""
    directory = tmp_path / f"lake{len(list(tmp_path.iterdir()))}"
    directory.mkdir()
    stored: State = data.draw(states())
    history = data.draw(histories(stored))
    batches = [[Change(OP_INSERT, row) for row in stored.values()], *split(history, places)]
    config = LakeConfig(
        catalog=f"sqlite:{directory}/c.sqlite", data_path=str(directory / "data"), inline_rows=inline_rows
    )
    with open_lake(config, threads=1) as session:
        with session.transaction():
            ensure_target(session, TARGET, TABLE)
        for batch in filter(None, batches):
            with session.transaction():
                apply_run(session, TARGET, RunPlan(TABLE, tuple(stage(directory, batch))))
        rows, _ = session.query('from lake."some schema"."odd ""table"""')
    found = [tuple(None if cell is None else str(cell) for cell in row) for row in rows]
    assert len(found) == len({key_of(row) for row in found})
    assert {key_of(row): row for row in found} == replay(stored, history)
