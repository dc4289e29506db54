"""
What we rely on in DuckLake, claim by claim, without any code of ours.

A new version of DuckLake that behaves otherwise fails here by name.  A claim called `…_wrongly` is a fault that we work around: when it
fails, the fault is mended, and what works around it may go (named in its docstring).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from aqueduck.lake.session.engine import load_extension
from tests.fanout_lakes import engine
from tests.fix_lake import catalog_of

MERGE = "call ducklake_merge_adjacent_files('lake')"
FLUSH = "call ducklake_flush_inlined_data('lake')"
REWRITE = "call ducklake_rewrite_data_files('lake', delete_threshold => 0)"
CATALOG = "__ducklake_metadata_lake"


class Lake:
    """A lake with a table `t (id, v)`, and what DuckLake says of it."""

    def __init__(self, directory: Path, *options: str, catalog: str = "") -> None:
        self.con = engine()
        given = [f"data_path '{directory}/data'", *options]
        place = catalog or f"{directory}/lake.ducklake"
        self.con.execute(f"attach 'ducklake:{place}' as lake ({', '.join(given)})")
        self.con.execute("create table lake.t (id int, v int)")

    def run(self, *statements: str) -> int:
        """The newest lake snapshot after them."""
        for statement in statements:
            self.con.execute(statement)
        [[snapshot]] = self.ask("from lake.current_snapshot()")
        return int(snapshot)

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        return self.con.execute(query).fetchall()

    def changed(self, kind: str, first: int, last: int, columns: str = "snapshot_id, id, v") -> list[Any]:
        rows = self.ask(f"select {columns} from ducklake_table_{kind}('lake', 'main', 't', {first}, {last})")
        return sorted(rows)

    def at(self, snapshot: int) -> list[Any]:
        return sorted(self.ask(f"select id, v from lake.t at (version => {snapshot})"))

    def done(self, snapshot: int) -> str:
        [[text]] = self.ask(
            f"select changes_made from {CATALOG}.ducklake_snapshot_changes where snapshot_id = {snapshot}"
        )
        return str(text)

    def merged(self, commits: int = 3) -> int:
        """Small commits, two rows each, that a merge makes one file: the lake snapshot of the merge."""
        for n in range(commits):
            self.run(f"insert into lake.t values ({2 * n}, 0), ({2 * n + 1}, 0)")
        return self.run(MERGE)


CATALOGS = ("duckdb", pytest.param("postgres", marks=pytest.mark.slow))


@pytest.fixture(params=CATALOGS)
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lake]:
    """A lake that inlines nothing."""
    yield from _lake(request, tmp_path, 0)


@pytest.fixture(params=CATALOGS)
def inlined(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lake]:
    """A lake that keeps small changes in its catalog."""
    yield from _lake(request, tmp_path, 1000)


def _lake(request: pytest.FixtureRequest, directory: Path, limit: int) -> Iterator[Lake]:
    catalog = catalog_of("postgres", directory, request) if request.param == "postgres" else ""
    lake = Lake(directory, f"data_inlining_row_limit {limit}", catalog=catalog)
    yield lake
    lake.con.close()


# -- ranges


def test_both_bounds_of_a_range_are_inclusive(files: Lake) -> None:
    """A range begins with its first lake snapshot and ends with its last."""
    one, two, three = (files.run(f"insert into lake.t values ({n}, 0)") for n in (1, 2, 3))
    assert files.changed("insertions", one, two) == [(one, 1, 0), (two, 2, 0)]
    assert files.changed("insertions", three, three) == [(three, 3, 0)]


def test_a_range_needs_lake_snapshots_that_exist(files: Lake) -> None:
    """A bound beyond the newest lake snapshot, or one that has expired, is an error and no empty answer."""
    last = files.run("insert into lake.t values (1, 0)")
    with pytest.raises(duckdb.Error, match="No snapshot found"):
        files.changed("insertions", last, last + 1)


def test_an_update_is_a_deletion_and_an_insertion_of_one_row_id(files: Lake) -> None:
    """The row id outlives updates, even of every column."""
    files.run("insert into lake.t values (1, 0)")
    at = files.run("update lake.t set id = 9, v = 9 where id = 1")
    assert files.changed("deletions", at, at, "rowid, id, v") == [(0, 1, 0)]
    assert files.changed("insertions", at, at, "rowid, id, v") == [(0, 9, 9)]


def test_row_ids_outlive_flushes_and_rewrites(inlined: Lake) -> None:
    """A row is the same row wherever it is stored."""
    inlined.run("insert into lake.t values (1, 0), (2, 0)", "insert into lake.t values (3, 0)")
    inlined.run("update lake.t set v = 5 where id = 2", "delete from lake.t where id = 1")
    before = sorted(inlined.ask("select rowid, id, v from lake.t"))
    for upkeep in (FLUSH, REWRITE):
        inlined.run(upkeep)
        assert sorted(inlined.ask("select rowid, id, v from lake.t")) == before


def test_a_merge_gives_updated_rows_new_row_ids_wrongly(files: Lake) -> None:
    """So row ids are compared within one read only, and `_rowid` of `ducklake_changes` is documented as that."""
    files.run("insert into lake.t values (1, 0), (2, 0), (3, 0)")
    files.run("update lake.t set v = 1 where id in (1, 3)", "insert into lake.t values (4, 0)")
    assert sorted(files.ask("select id, rowid from lake.t")) == [(1, 0), (2, 1), (3, 2), (4, 5)]
    files.run(MERGE)
    assert sorted(files.ask("select id, rowid from lake.t")) == [(1, 3), (2, 1), (3, 4), (4, 5)]


@pytest.mark.parametrize("upkeep", [MERGE, FLUSH, REWRITE])
@pytest.mark.parametrize("limit", [0, 1000])
def test_upkeep_changes_no_past_state(tmp_path: Path, upkeep: str, limit: int) -> None:
    """Time travel gives the same rows before and after it."""
    lake = Lake(tmp_path, f"data_inlining_row_limit {limit}")
    lake.run("insert into lake.t values (1, 0), (2, 0), (3, 0)", "insert into lake.t values (4, 0)")
    last = lake.run("update lake.t set v = 1 where id = 2", "delete from lake.t where id in (1, 4)")
    before = [lake.at(snapshot) for snapshot in range(1, last + 1)]
    lake.run(upkeep)
    assert [lake.at(snapshot) for snapshot in range(1, last + 1)] == before


# -- dates


def test_insertions_are_dated_after_a_merge(files: Lake) -> None:
    """Each row of a merged file has the lake snapshot that inserted it."""
    merge = files.merged()
    assert files.changed("insertions", 2, merge - 1, "snapshot_id, id") == [
        (2, 0), (2, 1), (3, 2), (3, 3), (4, 4), (4, 5),
    ]  # fmt: skip


def test_insertions_are_dated_after_a_flush(inlined: Lake) -> None:
    """Each row that was inlined has the lake snapshot that inserted it."""
    one = inlined.run("insert into lake.t values (1, 0)")
    two = inlined.run("insert into lake.t values (2, 0)")
    inlined.run(FLUSH)
    assert inlined.changed("insertions", one, two) == [(one, 1, 0), (two, 2, 0)]


def test_deletions_are_dated_where_nothing_was_merged(files: Lake) -> None:
    """One after the other from one file: each has its own lake snapshot."""
    files.run("insert into lake.t values (1, 0), (2, 0), (3, 0)")
    one, two = files.run("delete from lake.t where id = 1"), files.run("delete from lake.t where id = 2")
    assert files.changed("deletions", one, two) == [(one, 1, 0), (two, 2, 0)]


def test_the_first_deletion_from_a_merged_file_is_dated_wrongly(files: Lake) -> None:
    """By its insertion, in both functions; `lake/source/change_sides.py` works around it (ADR 51)."""
    files.merged()
    at = files.run("delete from lake.t where id in (0, 5)")
    assert files.changed("deletions", at, at) == [(2, 0, 0), (4, 5, 0)]
    changes = files.ask(
        f"select snapshot_id, id from ducklake_table_changes('lake', 'main', 't', {at}, {at})"
    )
    assert sorted(changes) == [(2, 0), (4, 5)]


def test_deletions_from_a_merged_file_are_in_the_range_in_which_they_happened(files: Lake) -> None:
    """Wrong dates or not, one lake snapshot's deletions are those, and a range has those of all of its lake snapshots."""
    files.merged()
    first = files.run("delete from lake.t where id in (0, 5)")
    files.run("insert into lake.t values (9, 0)", "update lake.t set v = 1 where id = 3")
    last = files.run("delete from lake.t where id in (1, 9)")
    each = [files.changed("deletions", s, s, "id") for s in range(first, last + 1)]
    assert each == [[(0,), (5,)], [], [(3,)], [(1,), (9,)]]
    assert files.changed("deletions", first, last, "id") == [(0,), (1,), (3,), (5,), (9,)]
    assert files.changed("deletions", first + 1, last - 1, "id") == [(3,)]


def test_a_merged_file_that_is_deleted_whole_is_in_the_range_in_which_it_happened(files: Lake) -> None:
    """No delete file is written then; the data file ends."""
    files.merged()
    at = files.run("delete from lake.t")
    assert files.changed("deletions", at, at, "id") == [(n,) for n in range(6)]
    assert files.ask(f"select count(*) from {CATALOG}.ducklake_delete_file") == [(0,)]


def test_deletions_of_inlined_rows_are_in_their_range_after_a_flush(inlined: Lake) -> None:
    """The flush writes files with several lake snapshots, which count as merged ones."""
    inlined.run("insert into lake.t values (1, 0), (2, 0), (3, 0)")
    one = inlined.run("update lake.t set v = 1 where id = 1")
    two = inlined.run("delete from lake.t where id = 1")
    three = inlined.run("delete from lake.t where id = 3")
    inlined.run(FLUSH)
    assert [inlined.changed("deletions", s, s, "id, v") for s in (one, two, three)] == [
        [(1, 0)], [(1, 1)], [(3, 0)],
    ]  # fmt: skip


@pytest.mark.parametrize("how", [MERGE, FLUSH])
def test_files_of_several_lake_snapshots_are_marked(tmp_path: Path, how: str) -> None:
    """`partial_max` of their row in the catalog shows where deletions cannot be dated."""
    lake = Lake(tmp_path, f"data_inlining_row_limit {0 if how == MERGE else 1000}")
    lake.run("insert into lake.t values (1, 0)", "insert into lake.t values (2, 0)")
    lake.run(how)
    assert lake.ask(f"select partial_max from {CATALOG}.ducklake_data_file where end_snapshot is null") == [
        (3,)
    ]


# -- what lake snapshots say they did


def test_a_lake_snapshot_says_what_it_did(files: Lake) -> None:
    """The words by which we distinguish changes from upkeep."""
    assert files.done(files.run("insert into lake.t values (1, 0), (2, 0)")) == "inserted_into_table:1"
    assert files.done(files.run("delete from lake.t where id = 1")) == "deleted_from_table:1"
    files.run("insert into lake.t values (3, 0)")
    assert files.done(files.run(REWRITE)) == "rewrite_delete:1"
    assert files.done(files.run("insert into lake.t values (4, 0)", MERGE)) == "merge_adjacent:1"


def test_a_lake_snapshot_says_what_it_inlined(inlined: Lake) -> None:
    """Inlined changes and their flush have words of their own."""
    assert inlined.done(inlined.run("insert into lake.t values (1, 0), (2, 0)")) == "inlined_insert:1"
    assert inlined.done(inlined.run("delete from lake.t where id = 1")) == "inlined_delete:1"
    assert "inline_flush:1" in inlined.done(inlined.run(FLUSH))


def test_rows_that_a_transaction_wrote_and_removed_are_reported_wrongly(files: Lake) -> None:
    """On both sides, at one place in a file; the summary mentions the insert only. `sides` in `lake.source.change_sides` cancels them."""
    at = files.run("begin; insert into lake.t values (1, 0), (2, 0); delete from lake.t where id = 1; commit")
    place = "filename, file_row_number, id"
    both = set(files.changed("insertions", at, at, place)) & set(files.changed("deletions", at, at, place))
    assert [row[2] for row in both] == [1]
    assert files.done(at) == "inserted_into_table:1"


def test_a_file_that_is_emptied_in_two_steps_is_reported_twice_wrongly(files: Lake) -> None:
    """By its delete file and by its end; `ONCE` in `lake/source/change_sides.py` takes each place once."""
    files.run("insert into lake.t values (1, 0), (2, 0)")
    at = files.run("begin; delete from lake.t where id = 1; update lake.t set v = 1 where id = 2; commit")
    assert files.changed("deletions", at, at, "id") == [(1,), (1,), (2,)]


def test_a_rewrite_reports_rows_that_did_not_change_wrongly(files: Lake) -> None:
    """Lake snapshots that compact are left out, and no range crosses one (`readable_ranges`)."""
    files.run("insert into lake.t values (1, 0), (2, 0)", "delete from lake.t where id = 1")
    at = files.run(REWRITE)
    assert files.changed("insertions", at, at, "id") == [(2,)]


def test_a_flush_after_a_rewrite_shows_removed_rows_again_wrongly(files: Lake) -> None:
    """
    Only past lake snapshots show them, some rows twice.  Our maintenance flushes a table before it rewrites it (ADR 32).

    Others may not: a destination whose cursor is there is found to differ and seeded again.
    """
    files.run("insert into lake.t values (0, 0), (1, 0), (2, 0), (3, 0)", "delete from lake.t where id = 0")
    files.run("call lake.set_option('data_inlining_row_limit', 1000)")
    past = files.run("delete from lake.t where id = 1")
    rewritten = files.run(REWRITE)
    assert files.at(past) == files.at(rewritten) == [(2, 0), (3, 0)]
    flushed = files.run(FLUSH)
    assert files.at(past) == [(0, 0), (1, 0), (2, 0), (2, 0), (3, 0), (3, 0)]
    assert files.at(rewritten) == files.at(flushed) == [(2, 0), (3, 0)]


# -- other things


def test_a_filter_misses_rows_after_a_file_of_nulls_wrongly(files: Lake) -> None:
    """One transaction writes a file of NULLs, then one of values: the table's statistics forget the values with the next insert."""
    files.run("begin; insert into lake.t values (1, null); insert into lake.t values (2, 7); commit")
    assert files.ask("select id from lake.t where v = 7") == [(2,)]
    files.run("insert into lake.t values (3, 1)")
    assert files.ask("select id from lake.t where v = 7") == []
    assert sorted(files.ask("select id from lake.t where concat(v, '') = '7'")) == [(2,)]


def test_counts_are_those_of_the_rows(files: Lake) -> None:
    """`count(*)` at any lake snapshot is right after deletes, a merge and a rewrite: destinations are checked by it."""
    files.merged()
    last = files.run("delete from lake.t where id = 0", "insert into lake.t values (7, 0)", REWRITE)
    for snapshot in range(1, last + 1):
        counted = files.ask(f"select count(*) from lake.t at (version => {snapshot})")
        assert counted == [(len(files.at(snapshot)),)]


def test_expired_lake_snapshots_leave_the_catalog(files: Lake) -> None:
    """A gap is found by looking for them there."""
    last = files.run("insert into lake.t values (1, 0)", "insert into lake.t values (2, 0)")
    files.run("call ducklake_expire_snapshots('lake', older_than => now())")
    assert files.ask(f"select snapshot_id from {CATALOG}.ducklake_snapshot") == [(last,)]


def test_changes_of_a_partitioned_table_are_complete(files: Lake) -> None:
    """A commit writes a file for each partition; a range has them all, even after a merge."""
    files.run("alter table lake.t set partitioned by (v)")
    first = files.run("insert into lake.t values (1, 1), (2, 2)")
    files.run("insert into lake.t values (3, 1), (4, 2)", MERGE)
    last = files.run("delete from lake.t where id in (1, 4)")
    assert files.changed("deletions", last, last, "id") == [(1,), (4,)]
    assert files.changed("insertions", first, first + 1, "snapshot_id, id") == [
        (first, 1), (first, 2), (first + 1, 3), (first + 1, 4),
    ]  # fmt: skip


def test_added_files_are_refused_on_a_partitioned_table(files: Lake, tmp_path: Path) -> None:
    """Unless their rows contain the partition; the copy of a partitioned target needs it."""
    files.run("alter table lake.t set partitioned by (v)")
    files.con.execute(f"copy (select 1 as id, 1 as v union all select 2, 2) to '{tmp_path}/x.parquet'")
    with pytest.raises(duckdb.Error):
        files.run(f"call ducklake_add_data_files('lake', 't', '{tmp_path}/x.parquet')")


def test_a_plain_file_added_to_an_encrypted_lake_is_taken_wrongly(tmp_path: Path) -> None:
    """And cannot be read afterwards; the driver therefore inserts the rows."""
    lake = Lake(tmp_path, "data_inlining_row_limit 0", "encrypted")
    lake.con.execute(f"copy (select 1 as id, 1 as v) to '{tmp_path}/x.parquet'")
    lake.run(f"call ducklake_add_data_files('lake', 't', '{tmp_path}/x.parquet')")
    with pytest.raises(duckdb.Error):
        lake.ask("select id, v from lake.t")


def test_an_encrypted_file_cannot_be_added(tmp_path: Path) -> None:
    """The function has no place for a key, and a key that the engine knows is not used."""
    lake = Lake(tmp_path, "data_inlining_row_limit 0", "encrypted")
    load_extension(lake.con, "httpfs")
    key = "0123456789abcdef0123456789abcdef"
    lake.con.execute(f"pragma add_parquet_key('known', '{key}')")
    for number, how in enumerate((f"footer_key_value: '{key}'", "footer_key: 'known'")):
        file = f"{tmp_path}/x{number}.parquet"
        lake.con.execute(f"copy (select 1 as id, 1 as v) to '{file}' (encryption_config {{{how}}})")
        with pytest.raises(duckdb.InvalidInputException, match="is encrypted, but"):
            lake.run(f"call ducklake_add_data_files('lake', 't', '{file}')")


def test_a_bucket_hides_the_rows_of_files_from_before_wrongly(files: Lake) -> None:
    """Also from deletes and updates; batches of such a target are refused (`refuse_hidden_rows`)."""
    files.run("insert into lake.t select i, 0 from range(100) r(i)")
    files.run("alter table lake.t set partitioned by (bucket(4, id))")
    assert files.ask("select count(*) from lake.t") == [(100,)]
    assert files.ask("select count(*) from lake.t where id = 5") == [(0,)]
    files.run("alter table lake.t reset partitioned by")
    assert files.ask("select count(*) from lake.t where id = 5") == [(1,)]


def test_changes_of_an_encrypted_lake_are_read(tmp_path: Path) -> None:
    """Deletions from merged files there are in their range, too."""
    lake = Lake(tmp_path, "data_inlining_row_limit 0", "encrypted")
    lake.merged()
    at = lake.run("delete from lake.t where id in (0, 5)")
    assert lake.changed("deletions", at, at, "id") == [(0,), (5,)]


def test_an_added_file_is_an_insertion(files: Lake, tmp_path: Path) -> None:
    """Rows that came with a file are dated by the transaction that added it, and deleted like others."""
    files.con.execute(f"copy (select i::int as id, 0::int as v from range(3) r(i)) to '{tmp_path}/x.parquet'")
    at = files.run(f"call ducklake_add_data_files('lake', 't', '{tmp_path}/x.parquet')")
    assert files.changed("insertions", at, at) == [(at, 0, 0), (at, 1, 0), (at, 2, 0)]
    gone = files.run("delete from lake.t where id = 1")
    assert files.changed("deletions", gone, gone) == [(gone, 1, 0)]


@pytest.mark.parametrize("how", ["inserted", "added"])
def test_a_new_column_shows_values_of_one_that_was_added_and_dropped_wrongly(
    files: Lake, tmp_path: Path, how: str
) -> None:
    """Both get the same id if the first one lived in one transaction only; so `evolve` asks for another copy."""
    files.run("begin", "alter table lake.t add column a int")
    if how == "inserted":
        files.run("insert into lake.t values (1, 1, 77)")
    else:
        file = f"{tmp_path}/added.parquet"
        files.run(
            f"copy (select 1 as id, 1 as v, 77 as a) to '{file}'",
            f"call ducklake_add_data_files('lake', 't', '{file}')",
        )
    files.run("alter table lake.t drop column a", "commit", "alter table lake.t add column b int default 5")
    assert files.ask("from lake.t") == [(1, 1, 77)]


def test_a_new_column_has_its_own_values_after_others_were_dropped(files: Lake) -> None:
    """Dropped before, dropped in the same transaction, or created and dropped with the table."""
    files.run("insert into lake.t values (1, 1)", "alter table lake.t add column a int default 77")
    files.run(
        "begin", "alter table lake.t drop column a", "alter table lake.t add column b int default 5", "commit"
    )
    assert files.ask("from lake.t") == [(1, 1, 5)]
    files.run(
        "begin",
        "create table lake.u (id int, a int)",
        "insert into lake.u values (1, 77)",
        "alter table lake.u drop column a",
        "commit",
        "alter table lake.u add column b int default 5",
    )
    assert files.ask("from lake.u") == [(1, 5)]


# -- partitions


class Parted:
    """Tables with a layout, and what the catalog says of their files."""

    def __init__(self, lake: Lake, directory: Path) -> None:
        self.lake, self.directory = lake, directory

    def make(self, columns: str, keys: str) -> None:
        self.lake.run("drop table if exists lake.p", f"create table lake.p ({columns})")
        self.lake.run(f"alter table lake.p set partitioned by ({keys})")

    def add(self, query: str, place: str, options: str = "") -> None:
        """Add a file with these rows, in this directory."""
        directory = self.directory / place
        directory.mkdir(parents=True, exist_ok=True)
        number = len(list(directory.iterdir()))
        self.lake.run(f"copy ({query}) to '{directory}/{number}.parquet'")
        self.lake.run(f"call ducklake_add_data_files('lake', 'p', ['{directory}/{number}.parquet']{options})")

    def values(self) -> list[tuple[int, str | None]]:
        """Key index and value of each file's partition values."""
        return self.lake.ask(
            f"select partition_key_index, partition_value from {CATALOG}.ducklake_file_partition_value"
            f" join {CATALOG}.ducklake_data_file using (data_file_id) join {CATALOG}.ducklake_table t"
            " on t.table_id = ducklake_data_file.table_id where t.table_name = 'p' and t.end_snapshot is null"
            " order by data_file_id, partition_key_index, partition_value"
        )


@pytest.fixture
def parted(files: Lake, tmp_path: Path) -> Parted:
    return Parted(files, tmp_path / "data" / "main" / "p")


def test_an_added_file_has_the_partition_of_its_path(parted: Parted) -> None:
    """Directories are named as DuckLake's own insert names them; their texts are percent-encoded."""
    parted.make("id int, v varchar, d date", "v, month(d), bucket(4, id)")
    parted.add("select 0 as id, 'a/b=%' as v, date '2024-03-01' as d", "v=a%2Fb%3D%25/month=3/bucket=0")
    assert parted.values() == [(0, "a/b=%"), (1, "3"), (2, "0")]
    assert parted.lake.ask("from lake.p where v = 'a/b=%'") == parted.lake.ask("from lake.p where id = 0")


def test_a_file_without_a_partition_in_its_path_is_refused(parted: Parted) -> None:
    """So files that tasks wrote without one are inserted."""
    parted.make("id int, v varchar", "v")
    with pytest.raises(duckdb.Error, match="invalid partition value"):
        parted.add("select 1 as id, 'a' as v", "plain")


def test_any_directory_gives_a_column_its_values_wrongly(parted: Parted) -> None:
    """Also one above the table's, and also without partitions; so `add_files` sets `hive_partitioning` to false."""
    parted.make("id int, v varchar", "v")
    parted.lake.run("alter table lake.p reset partitioned by")
    parted.add("select 1 as id, 'own' as v", "v=path")
    parted.add("select 2 as id, 'own' as v", "v=path", ", hive_partitioning => false")
    assert parted.lake.ask("select id, v from lake.p order by id") == [(1, "path"), (2, "own")]


@pytest.mark.parametrize("text", ["null", "NULL", "__HIVE_DEFAULT_PARTITION__"])
def test_some_texts_in_a_path_are_null_wrongly(parted: Parted, text: str) -> None:
    """Rows with these values are inserted: see `goes_into_path`."""
    parted.make("id int, v varchar", "v")
    parted.add(f"select 1 as id, '{text}' as v", f"v={text}")
    assert parted.lake.ask("from lake.p") == [(1, None)]
    parted.lake.run(f"insert into lake.p values (2, '{text}')")
    assert parted.lake.ask("select v from lake.p where id = 2") == [(text,)]


def test_several_keys_of_one_column_are_stored_as_the_last_wrongly(parted: Parted) -> None:
    """`mend_partition_values` corrects them after the commit, because a merge goes by them; no query does."""
    parted.make("id int, d date", "year(d), month(d)")
    parted.add("select 1 as id, date '2024-03-01' as d", "year=2024/month=3")
    assert parted.values() == [(1, "2024"), (1, "3")]
    for condition in ("year(d) = 2024", "month(d) = 3", "d = '2024-03-01'", "d >= '2024-02-01'"):
        assert parted.lake.ask(f"select id from lake.p where {condition}") == [(1,)], condition


def test_bucket_values_decide_which_files_a_query_reads(parted: Parted) -> None:
    """A file in the wrong bucket loses its rows, so buckets are computed with DuckLake's own function."""
    parted.make("id int", "bucket(4, id)")
    [[bucket]] = parted.lake.ask("select (murmur3_32(1::int) & 2147483647) % 4")
    parted.add("select 1 as id", f"bucket={bucket}")
    assert parted.lake.ask("from lake.p where id = 1") == [(1,)]
    parted.make("id int", "bucket(4, id)")
    parted.add("select 1 as id", f"bucket={(bucket + 1) % 4}")
    assert parted.lake.ask("from lake.p where id = 1") == []


def test_upkeep_keeps_partitions_apart(inlined: Lake, tmp_path: Path) -> None:
    """Flush, merge and rewrite, of files that were inserted and files that were added."""
    parted = Parted(inlined, tmp_path / "data" / "main" / "p")
    parted.make("id int, v varchar", "v")
    for n in range(3):
        parted.add(f"select {n} as id, 'a' as v", "v=a")
        parted.add(f"select {n + 10} as id, null::varchar as v", "v=__HIVE_DEFAULT_PARTITION__")
        inlined.run(f"insert into lake.p values ({n + 20}, 'b'), ({n + 30}, null)")
        before = sorted(inlined.ask("select id, v from lake.p"), key=str)
        for upkeep in (FLUSH, MERGE, REWRITE):
            inlined.run(upkeep)
            assert sorted(inlined.ask("select id, v from lake.p"), key=str) == before
            mixed = "select filename from lake.p group by 1 having count(distinct coalesce(v, 'null')) > 1"
            assert inlined.ask(mixed) == []


def test_files_in_and_out_of_directories_of_partitions_are_not_merged_wrongly(parted: Parted) -> None:
    """So tasks leave a table with `hive_file_pattern => false` to DuckLake, and nobody is told to set it on a full one."""
    parted.make("id int, v varchar", "v")
    parted.add("select 1 as id, 'a' as v", "v=a")
    parted.lake.run("call lake.set_option('hive_file_pattern', false)", "insert into lake.p values (2, 'a')")
    with pytest.raises(duckdb.Error, match="different hive partition path"):
        parted.lake.run(MERGE)


def test_repeated_keys_cannot_be_written_wrongly(parted: Parted) -> None:
    """DuckLake accepts them and then fails; such targets are refused with `lake.partitioned`."""
    parted.make("id int, v varchar", "v, v")
    with pytest.raises(duckdb.Error):
        parted.lake.run("insert into lake.p values (1, 'a')")
