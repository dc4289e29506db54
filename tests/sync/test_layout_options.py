"""`partition_by`, `sort_by` and `target_file_size` of tables, in the file and in SQL options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aqueduck.config.layout import layout_text
from aqueduck.config.sync import GroupConfig, TableConfig
from aqueduck.config.table_options import read_options
from aqueduck.lake.session import partition_files
from aqueduck.model.errors import AqueduckError, ConfigError
from aqueduck.postgres.registry import registry
from tests.fix_postgres import Database
from tests.layouts import files_of, misplaced
from tests.sync.watching.test_targets_by_hand import by_hand, resync
from tests.whole_group import WholeGroup, whole_group

LAYOUT: dict[str, Any] = {
    "partition_by": ["tenant", "month(made)"],
    "sort_by": ["id desc"],
    "target_file_size": "16MiB",
}
KEYS = ["tenant", "month(made)"]


@pytest.fixture(autouse=True)
def _large_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_files, "SHARE_BYTES_MIN", 1)


@pytest.fixture
def tables(db: Database) -> Database:
    for name in "tu":
        db.execute(f"create table {name} (id int primary key, tenant text, made date)")
        db.execute(
            f"insert into {name} select i, 't' || i % 3, date '2024-01-31' + i % 2 from generate_series(1, 60) i"
        )
    return db


def layout_of(group: WholeGroup, table: str) -> tuple[list[str], list[str], list[str]]:
    """Partition keys, sort keys and file size that the lake has."""
    m = "__ducklake_metadata_lake"
    this = f"(select table_id from {m}.ducklake_table where table_name = '{table}' and end_snapshot is null)"
    keys = group.read(
        f"select transform || ' ' || column_name from {m}.ducklake_partition_info i"
        f" join {m}.ducklake_partition_column p using (partition_id, table_id)"
        f" join {m}.ducklake_column c using (table_id, column_id)"
        f" where i.end_snapshot is null and c.end_snapshot is null and table_id = {this} order by partition_key_index"
    )
    sort = group.read(
        f"select expression || ' ' || sort_direction from {m}.ducklake_sort_info i"
        f" join {m}.ducklake_sort_expression using (sort_id, table_id)"
        f" where i.end_snapshot is null and table_id = {this}"
    )
    size = group.read(
        f"select value from ducklake_options('lake') where option_name = 'target_file_size' and scope_entry = 'main.{table}'"
    )
    return [k for (k,) in keys], [s for (s,) in sort], [v for (v,) in size]


GIVEN = (["identity tenant", "month made"], ["id DESC"], ["16777216"])


def test_new_targets_get_the_layout_with_their_first_rows(tables: Database, tmp_path: Path) -> None:
    """In the transaction of the copy, whose files are written by partition; a restart changes nothing."""
    with whole_group(tables, tmp_path, {"public.t": LAYOUT, "public.u": {}}) as group:
        for _ in range(2):
            assert layout_of(group, "t") == GIVEN
            assert layout_of(group, "u") == ([], [], [])
            assert misplaced(group.read, "main", "t", KEYS) == []
            assert len(files_of(group.read, "main", "t")) == 6
            shown = {
                t.schema.name: group.runner.book.layout_of(oid) for oid, t in group.runner.tables.items()
            }
            assert shown == {"t": "partitioned by tenant, month(made); sorted by id desc", "u": None}
            tables.execute(
                "insert into t values (1000, 'x', '2024-05-01')" if _ else "delete from t where id = 1"
            )
            group.apply(tasks=True)
            assert {c.verdict for c in group.verify()} == {"identical"}
            version = group.lake.memory.schema_version
            group.restart({"public.t": LAYOUT, "public.u": {}})
            assert group.lake.memory.schema_version == version


def test_existing_targets_are_altered_at_the_next_start_and_silence_leaves_them_alone(
    tables: Database, tmp_path: Path
) -> None:
    """Also an empty list says something; a resync keeps the layout."""
    with whole_group(tables, tmp_path, {"public.t": {}, "public.u": {}}) as group:
        assert layout_of(group, "t") == ([], [], [])
        group.restart({"public.t": LAYOUT, "public.u": {}})
        assert layout_of(group, "t") == GIVEN
        tables.execute("insert into t select i, 'n', '2024-07-01' from generate_series(101, 140) i")
        group.apply(tasks=True)
        assert misplaced(group.read, "main", "t", KEYS) == []
        group.restart({"public.t": {}, "public.u": {}})
        assert layout_of(group, "t") == GIVEN
        for oid in group.runner.tables:
            group.runner.resync(oid)
        group.copy()
        assert layout_of(group, "t") == GIVEN
        assert misplaced(group.read, "main", "t", KEYS) == []
        group.restart({"public.t": {"partition_by": [], "sort_by": []}, "public.u": {}})
        assert layout_of(group, "t") == ([], [], ["16777216"])
        assert {c.verdict for c in group.verify()} == {"identical"}


def test_a_bucket_for_a_target_with_files_is_refused_until_the_target_is_made_anew(
    tables: Database, tmp_path: Path
) -> None:
    """DuckLake would not find the rows of the old files; the layout stays, and so does what people read."""
    bucket = {"public.t": {"partition_by": ["bucket(4, id)"]}, "public.u": {}}
    with whole_group(tables, tmp_path, {"public.t": {}, "public.u": {}}) as group:
        group.restart(bucket)
        error = group.refused["public.t"]
        assert error.code == "lake.partitioned"
        assert layout_of(group, "t") == ([], [], [])
        assert group.read("select count(*) from lake.main.t where id = 7") == [(1,)]
        group.stop()
        by_hand(tmp_path, "drop table lake.main.t")
        group.start_without_copies(bucket)
        resync(group, "t")
        group.copy()
        assert layout_of(group, "t")[0] == ["bucket(4) id"]
        tables.execute("delete from t where id = 7; update t set made = '2025-01-01' where id = 8")
        group.apply()
        assert {c.verdict for c in group.verify()} == {"identical"}


def test_a_layout_of_columns_that_the_lake_lacks_is_refused(tables: Database, tmp_path: Path) -> None:
    """With the name, before anything is made; the other tables run."""
    with whole_group(tables, tmp_path, {"public.t": {"partition_by": ["nope"]}, "public.u": {}}) as group:
        assert "nope" in str(group.refused["public.t"])
        assert {t.schema.name for t in group.runner.tables.values()} == {"u"}


@pytest.mark.parametrize(
    "options",
    [
        {"partition_by": ["week(made)"]},
        {"partition_by": ["bucket(0, id)"]},
        {"partition_by": ["id", "ID"]},
        {"partition_by": ["truncate(3, id)"]},
        {"sort_by": ["lower(tenant)"]},
        {"target_file_size": "1KiB"},
    ],
    ids=str,
)
def test_a_layout_that_cannot_be_written_is_no_option(options: dict[str, Any]) -> None:
    """Refused when it is read."""
    with pytest.raises(ValueError, match=r"."):
        TableConfig.model_validate({"source": "t", **options})


def test_a_group_gives_its_layout_to_tables_without_one() -> None:
    """A table's own keys win, also if they are none."""
    group = GroupConfig.model_validate(
        {
            "name": "g",
            "partition_by": ["tenant"],
            "tables": [
                {"source": "a"},
                {"source": "b", "partition_by": ["id"]},
                {"source": "c", "partition_by": []},
            ],
        }
    )
    assert [table.partition_by for table in group.tables] == [("tenant",), ("id",), ()]
    assert [table.options for table in group.tables] == [
        {"partition_by": ["tenant"]}, {"partition_by": ["id"]}, {"partition_by": []},
    ]  # fmt: skip


def test_the_command_line_takes_keys_separated_by_commas() -> None:
    """Commas within parentheses and quotes belong to a key."""
    options = read_options(
        "t", None, None, [], [], None,
        partition_by='tenant, bucket(16, id), month("a,b")', sort_by="made desc nulls first, id", target_file_size="64MiB",
    )  # fmt: skip
    assert options == {
        "partition_by": ["tenant", "bucket(16, id)", 'month("a,b")'],
        "sort_by": ["made desc nulls first", "id"],
        "target_file_size": 64 << 20,
    }
    with pytest.raises(ConfigError):
        read_options("t", None, None, [], [], None, partition_by="week(made)")


def test_sql_takes_a_layout_among_the_options(tables: Database) -> None:
    """The registry keeps it as it was given; what is no layout is refused there or by the service."""
    given = {"partition_by": ["bucket(8, id)"], "sort_by": ["id"], "target_file_size": "64MiB"}
    with tables.connect() as conn:
        registry.install(conn)
        registry.call(conn, "add_table", source="public.t", options=json.dumps(given))
        [row] = conn.execute("select options from aqueduck.tables()").fetchall()
        assert row[0] == given
        assert layout_text(row[0]) == "partitioned by bucket(8, id); sorted by id"
        with pytest.raises(AqueduckError, match="wrong form"):
            registry.call(conn, "add_table", source="public.u", options='{"partition_by": "id"}')
