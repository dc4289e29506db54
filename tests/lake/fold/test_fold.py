from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aqueduck.lake.fold import small
from aqueduck.lake.fold.fold import Fold, folded
from aqueduck.lake.fold.unchanged import last_known
from aqueduck.lake.session.engine import open_kernel
from aqueduck.model.changes import OP_DELETE, OP_INSERT, OP_UPDATE, SegmentRef
from aqueduck.model.errors import LakeWriteError, ValueCastError
from tests.strategies import (
    TABLE,
    Change,
    Key,
    Row,
    State,
    histories,
    key_of,
    replay,
    split,
    stage,
    states,
    write_segment,
)

SLOW = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

cuts = st.lists(st.integers(0, 14), max_size=3)


@pytest.fixture(scope="module")
def kernel() -> Iterator[duckdb.DuckDBPyConnection]:
    con = open_kernel("/tmp", threads=2)
    yield con
    con.close()


def as_text(row: Iterable[Any]) -> Row:
    return tuple(None if cell is None else str(cell) for cell in row)


class Target:
    """The target's twin in memory: applies a fold as `lake.target.apply` does."""

    def __init__(self, rows: State) -> None:
        self.rows = dict(rows)
        self.deletes = 0

    def apply(self, con: duckdb.DuckDBPyConnection, folds: list[Fold]) -> None:
        patched = [row for fold in folds for row in self._patches(con, fold)]
        for fold in folds:
            for key in con.execute(fold.deletes).fetchall() if fold.deletes else ():
                self.deletes += 1
                self.rows.pop(as_text(key), None)
        for row in [*patched, *(as_text(r) for fold in folds for r in con.execute(fold.upserts).fetchall())]:
            assert key_of(row) not in self.rows, "a key that is still there was not to be removed"
            self.rows[key_of(row)] = row

    def _patches(self, con: duckdb.DuckDBPyConnection, fold: Fold) -> Iterator[Row]:
        if fold.patches is None:
            return
        for patch in con.execute(fold.patches).to_arrow_table().to_pylist():
            row = as_text(patch[f"v{i}"] for i in range(len(TABLE.columns)))
            former = as_text(patch[f"t{i}"] for i in range(len(TABLE.key)))
            assert former in self.rows, "the target lacks a row that the run builds on"
            source = self.rows[former]
            yield tuple(source[i] if patch[f"u{i}"] else cell for i, cell in enumerate(row))


def apply_batch(
    con: duckdb.DuckDBPyConnection, target: Target, refs: list[SegmentRef], *, buckets: int = 1
) -> None:
    """Fold the batch, in buckets, and apply what comes out."""
    contexts = [folded(con, refs, TABLE, bucket=b, buckets=buckets) for b in range(buckets)]
    folds = [context.__enter__() for context in contexts]
    target.apply(con, folds)
    for context in contexts:
        context.__exit__(None, None, None)


@pytest.fixture(params=["small", "engine"])
def _folder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few changes are folded without the engine; switched off, they are folded like many."""
    if request.param == "engine":
        monkeypatch.setattr(small, "SMALL_ROWS", -1)


@pytest.mark.usefixtures("_folder")
@given(data=st.data())
@SLOW
def test_folding_a_batch_equals_replaying_it(
    data: st.DataObject, kernel: duckdb.DuckDBPyConnection, tmp_path: Path
) -> None:
    """Writing a batch's net effect leaves the rows that one-by-one replay leaves."""
    stored = data.draw(states())
    history = data.draw(histories(stored))
    target = Target(stored)
    apply_batch(kernel, target, stage(tmp_path, history))
    assert target.rows == replay(stored, history)


@given(data=st.data(), skip=st.one_of(st.just(0), st.integers(1000, 1016)))
@SLOW
def test_folding_few_changes_without_the_engine_changes_nothing(
    data: st.DataObject, kernel: duckdb.DuckDBPyConnection, tmp_path: Path, skip: int
) -> None:
    """Both folds write the same rows and delete the same keys, for any history and any position of the copy."""
    history = [replace(c, unchanged=()) for c in data.draw(histories(data.draw(states())))]
    refs = stage(tmp_path, history)
    found = []
    for limit in (small.SMALL_ROWS, -1):
        with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
            patch.setattr(small, "SMALL_ROWS", limit)
            fold = stack.enter_context(folded(kernel, refs, TABLE, skip_before=skip))
            assert fold.small == (limit > 0 and bool(refs))
            keys = kernel.execute(fold.deletes).fetchall() if fold.deletes else []
            found.append((sorted(keys), sorted(kernel.execute(fold.upserts).fetchall(), key=repr)))
    assert found[0] == found[1]


@pytest.mark.slow
@given(data=st.data(), buckets=st.integers(2, 4), places=cuts)
@SLOW
def test_buckets_and_batches_do_not_change_the_result(
    data: st.DataObject, kernel: duckdb.DuckDBPyConnection, tmp_path: Path, buckets: int, places: list[int]
) -> None:
    """A history cut anywhere into batches, each folded in any number of buckets, ends in the same rows."""
    stored = data.draw(states())
    history = data.draw(histories(stored))
    target = Target(stored)
    for batch in split(history, places):
        apply_batch(kernel, target, stage(tmp_path, batch), buckets=buckets)
    assert target.rows == replay(stored, history)


@pytest.mark.slow
@given(data=st.data(), pieces=st.integers(1, 5))
@SLOW
def test_pieces_of_a_run_together_are_the_whole_run(
    data: st.DataObject, kernel: duckdb.DuckDBPyConnection, tmp_path: Path, pieces: int
) -> None:
    """Fold tasks that each write the rows of their own segments end in the rows that replay leaves."""
    stored = data.draw(states())
    history = [replace(c, unchanged=()) for c in data.draw(histories(stored))]
    segments = stage(tmp_path, history, pieces=pieces)
    if not segments:
        return
    target = Target(stored)
    number = len(segments)
    contexts = [
        folded(kernel, segments, TABLE, bucket=b, buckets=number, own=(b, b + 1)) for b in range(number)
    ]
    folds = [context.__enter__() for context in contexts]
    target.apply(kernel, folds)
    for context in contexts:
        context.__exit__(None, None, None)
    assert target.rows == replay(stored, history)


@given(data=st.data())
@settings(max_examples=200)
def test_the_way_back_to_a_known_value_equals_walking_it(data: st.DataObject) -> None:
    """Pointer jumping ends where following the links one by one ends."""
    size = data.draw(st.integers(0, 40))
    known = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)), dtype=np.bool_)
    before = np.array([data.draw(st.integers(-1, i - 1)) for i in range(size)], dtype=np.int64)

    def walk(i: int) -> int:
        return i if known[i] or before[i] < 0 else walk(before[i])

    assert list(last_known(known, before)) == [walk(i) for i in range(size)]


def row(key: Key, big: str | None = "B", number: str = "1", other: str | None = "o") -> Row:
    return (big, key[1], number, key[0], other)


A, B, C = ("1", "a"), ("2", "a"), ("3", "a")


def test_inserts_alone_ask_for_no_delete(kernel: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    """P-S09: an insert-only run passes through, without keys to look up in the target."""
    history = [Change(OP_INSERT, row((str(i), "a"))) for i in range(20)]
    with folded(kernel, stage(tmp_path, history), TABLE) as fold:
        assert (fold.deletes, fold.patches, fold.upsert_rows) == (None, None, 20)
        assert len(kernel.execute(fold.upserts).fetchall()) == 20


def test_only_keys_that_may_be_in_the_target_are_deleted(
    kernel: duckdb.DuckDBPyConnection, tmp_path: Path
) -> None:
    """A key that the run itself brings in is not looked up, however often it changes."""
    history = [
        Change(OP_INSERT, row(A)),
        Change(OP_UPDATE, row(A, number="2")),
        Change(OP_UPDATE, row(B, number="2")),
        Change(OP_INSERT, row(C)),
        Change(OP_DELETE, old_key=C),
    ]
    with folded(kernel, stage(tmp_path, history), TABLE) as fold:
        assert kernel.execute(str(fold.deletes)).fetchall() == [(2, "a")]
        assert (fold.upsert_rows, fold.delete_rows, fold.patch_rows) == (2, 1, 0)


def test_an_unchanged_value_follows_its_row_through_changes_of_the_key(
    kernel: duckdb.DuckDBPyConnection, tmp_path: Path
) -> None:
    """P-S10: insert, move, update that only toasts: the inserted value arrives under the new key."""
    history = [
        Change(OP_INSERT, row(A, big="huge")),
        Change(OP_UPDATE, row(B, big=None), old_key=A, unchanged=(0,)),
        Change(OP_UPDATE, row(B, big=None, number="9"), unchanged=(0,)),
    ]
    with folded(kernel, stage(tmp_path, history, pieces=3), TABLE) as fold:
        assert fold.patches is None
        assert kernel.execute(fold.upserts).fetchall() == [("huge", "a", 9, 2, "o")]


def test_a_patch_names_the_row_that_has_the_value(kernel: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    """P-S10: a value that is never sent in the run is read from the key that the row had before the run."""
    history = [
        Change(OP_UPDATE, row(B, big=None, other=None), old_key=A, unchanged=(0, 4)),
        Change(OP_UPDATE, row(C, big=None, other="seen"), old_key=B, unchanged=(0,)),
    ]
    with folded(kernel, stage(tmp_path, history), TABLE) as fold:
        assert fold.patches is not None
        assert fold.upsert_rows == 0
        [patch] = kernel.execute(fold.patches).to_arrow_table().to_pylist()
    assert (patch["t0"], patch["t1"]) == (1, "a")
    assert [patch[f"u{i}"] for i in range(5)] == [True, False, False, False, False]
    assert (patch["v3"], patch["v4"]) == (3, "seen")


def test_a_key_deleted_and_inserted_again_takes_nothing_from_its_former_life(
    kernel: duckdb.DuckDBPyConnection, tmp_path: Path
) -> None:
    """The value of an unchanged cell is looked up as far as the insert of its own row, not further."""
    history = [
        Change(OP_DELETE, old_key=A),
        Change(OP_INSERT, row(A, big=None)),
        Change(OP_UPDATE, row(A, big=None, number="5"), unchanged=(0,)),
    ]
    target = Target({A: row(A, big="former")})
    apply_batch(kernel, target, stage(tmp_path, history))
    assert target.rows == {A: row(A, big=None, number="5")}


def test_buckets_are_a_partition_of_the_rows(kernel: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    """Each key is in exactly one bucket."""
    refs = stage(tmp_path, [Change(OP_INSERT, row((str(i), "a"))) for i in range(100)])
    seen = []
    for bucket in range(5):
        with folded(kernel, refs, TABLE, bucket=bucket, buckets=5) as fold:
            seen += [r[3] for r in kernel.execute(fold.upserts).fetchall()]
    assert sorted(seen) == list(range(100))


def test_a_fold_leaves_nothing_in_its_connection(kernel: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    """Temporary tables and streams are gone afterwards, even after an error."""
    history = [Change(OP_UPDATE, row(A, big=None), unchanged=(0,)), Change(OP_DELETE, old_key=B)]
    with folded(kernel, stage(tmp_path, history), TABLE):
        pass
    with pytest.raises(KeyError), folded(kernel, stage(tmp_path, history), TABLE):
        raise KeyError
    assert kernel.execute("select table_name from duckdb_tables()").fetchall() == []
    assert kernel.execute("select view_name from duckdb_views() where not internal").fetchall() == []


def test_text_that_is_no_value_of_its_type_is_a_named_error_without_the_value(
    kernel: duckdb.DuckDBPyConnection, tmp_path: Path
) -> None:
    """Bad text raises `ValueCastError` with the table and never the text."""
    refs = stage(tmp_path, [Change(OP_INSERT, row(A, number="secret"))])
    with pytest.raises(ValueCastError) as failure, folded(kernel, refs, TABLE) as fold:
        kernel.execute(fold.upserts).fetchall()
    assert "public.things" in str(failure.value)
    assert "secret" not in str(failure.value)
    assert failure.value.__cause__ is None


def test_a_segment_that_is_gone_is_a_lake_error(kernel: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    """A missing file fails the batch; it is captured again."""
    refs = stage(tmp_path, [Change(OP_INSERT, row(A))])
    Path(refs[0].path).unlink()
    with pytest.raises(LakeWriteError), folded(kernel, refs, TABLE):
        pass


def test_memory_does_not_grow_with_the_number_of_segments(tmp_path: Path) -> None:
    """Inserts stream: forty segments of 1 MB pass through an engine that may use 16 MB, without spilling."""
    con = open_kernel(str(tmp_path), threads=1, memory_limit="16MB")
    con.execute("set temp_directory = ''")
    history = [Change(OP_INSERT, row((str(i), "a"), big="x" * 1000)) for i in range(1000)]
    ref = write_segment(tmp_path, history, 5, batch_rows=200)
    with folded(con, list(itertools.repeat(ref, 40)), TABLE) as fold:
        con.execute(f"copy ({fold.upserts}) to '{tmp_path}/out.parquet' (row_group_size 2048)")
    assert con.execute(f"select count(*) from '{tmp_path}/out.parquet'").fetchone() == (40_000,)
    con.close()
