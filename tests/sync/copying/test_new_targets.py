"""A table comes into the lake together with its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from aqueduck.config.sync import LakeConfig
from aqueduck.lake.commit.copy_files import ChunkFile
from aqueduck.lake.session.catalog import open_lake
from aqueduck.model.errors import ConnectionLostError, SchemaChangeError
from aqueduck.spark.query.copy_job import CopyJob
from tests.fix_postgres import Database
from tests.whole_group import whole_group

BeforeReads = Callable[[Callable[[], None]], None]


def tables_of(directory: Path) -> set[str]:
    """What an independent reader finds in the lake's main schema."""
    config = LakeConfig(catalog=f"sqlite:{directory}/lake.sqlite", data_path=f"{directory}/data")
    with open_lake(config, read_only=True) as session:
        rows = session.execute("select table_name from duckdb_tables() where schema_name = 'main'")
    return {name for (name,) in rows}


@pytest.fixture
def before_reads(monkeypatch: pytest.MonkeyPatch) -> BeforeReads:
    """Look at something whenever a task of a copy is about to read its chunks."""
    run = CopyJob.run

    def look_before(look: Callable[[], None]) -> None:
        def looked(job: CopyJob, numbers: Sequence[int]) -> list[ChunkFile]:
            look()
            return run(job, numbers)

        monkeypatch.setattr(CopyJob, "run", looked)

    return look_before


@pytest.mark.parametrize(
    "mode",
    ["upsert", *(pytest.param(m, marks=pytest.mark.slow) for m in ("append", "history", "soft_delete"))],
)
def test_a_table_appears_with_its_rows(
    db: Database, tmp_path: Path, mode: str, before_reads: BeforeReads
) -> None:
    """Even if its first copy is interrupted: no reader takes an empty table for the source's."""
    db.execute("create table other (id int primary key)")
    db.execute("create table t (id int primary key, v text); insert into t values (1, 'a'), (2, 'b')")
    with whole_group(db, tmp_path, {"public.other": {}}) as group:
        seen: list[set[str]] = []

        def look() -> None:
            seen.append(tables_of(tmp_path))
            if len(seen) == 1:
                raise ConnectionLostError("the server is away")

        before_reads(look)
        tables = {"public.other": {}, "public.t": {"mode": mode}}
        with pytest.raises(ConnectionLostError):
            group.restart(tables)
        group.restart(tables)
        assert seen == [{"other"}] * 2
        assert group.read("select id, v from lake.main.t order by id") == [(1, "a"), (2, "b")]
        db.execute("insert into t values (3, 'c')")
        group.apply()
        assert all(found.same for found in group.verify())


def test_a_name_whose_directory_ducklake_chooses_is_there_before(
    db: Database, tmp_path: Path, before_reads: BeforeReads
) -> None:
    """The exception that guarantees.md names: its files must have a place."""
    db.execute('create table "two words" (id int primary key); insert into "two words" values (1)')
    seen: list[set[str]] = []
    before_reads(lambda: seen.append(tables_of(tmp_path)))
    with whole_group(db, tmp_path, {'public."two words"': {}}) as group:
        assert seen == [{"two words"}]
        assert all(found.same for found in group.verify())


def test_names_that_a_lake_cannot_hold_are_reported_before_anything_is_read(
    db: Database, tmp_path: Path, before_reads: BeforeReads
) -> None:
    db.execute('create table t (id int primary key, v text, "V" text)')
    seen: list[set[str]] = []
    before_reads(lambda: seen.append(tables_of(tmp_path)))
    with (
        pytest.raises(SchemaChangeError, match="differ only in case"),
        whole_group(db, tmp_path, {"public.t": {}}),
    ):
        pass
    assert seen == []
    assert tables_of(tmp_path) == set()
