"""Maintenance of a lake's files: decisions, and that nothing changes but files."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from aqueduck.config.sync import MaintenanceConfig
from aqueduck.lake.session.catalog import METADATA, LakeSession
from aqueduck.lake.session.storage import discard_file, remove_file
from aqueduck.lake.upkeep.maintenance import LakeWork, maintain
from aqueduck.lake.upkeep.orphans import remove_old_orphans
from aqueduck.lake.upkeep.statistics import statistics_of_files, widen_statistics
from aqueduck.lake.upkeep.table_upkeep import Lake as AnyLake
from aqueduck.lake.upkeep.table_upkeep import table_id
from aqueduck.model.errors import CatalogUnreachableError, DataPathError, LakeBusyError
from aqueduck.model.schema import TableName
from aqueduck.model.upkeep import FAN_IN, LEVELS, MIB, STEP_BYTES, Merge, Rewrite, TableFile, next_step
from tests.fix_lake import Lake

T = TableName("main", "t")
EAGER = MaintenanceConfig(delete_share=0.01, grace_hours=0, budget_seconds=300)


def work_on(
    session: LakeSession,
    *tables: TableName,
    keep: Callable[[], tuple[int | None, str | None]] = lambda: (None, None),
    orphans: Callable[[AnyLake, datetime], int] = lambda lake, older_than: 0,
) -> LakeWork:
    @contextlib.contextmanager
    def exclusive() -> Iterator[LakeSession]:
        with session.alone():
            yield session

    def renew() -> LakeSession:
        session.renew()
        return session

    def may_renew() -> bool:
        with session.alone() as alone:
            return alone

    return LakeWork("lake", "sync", exclusive, may_renew, renew, lambda: list(tables), keep, orphans)


def snapshot(session: LakeSession) -> int:
    return int(session.execute(f"select max(snapshot_id) from {METADATA}.ducklake_snapshot")[0][0])


def rows_at(session: LakeSession, version: int) -> list[tuple[Any, ...]]:
    return session.execute(f"select id, v, n from lake.main.t at (version => {version}) order by all")


# -- deciding


def test_a_level_is_merged_when_it_is_full() -> None:
    """P-S32: fewer than FAN_IN files of a level are left alone, as many are merged."""
    few = [TableFile(1000, 10)] * (FAN_IN - 1)
    assert next_step(few, delete_share=0.3) is None
    assert next_step([*few, TableFile(2000, 10)], delete_share=0.3) == Merge(LEVELS[0], LEVELS[1])


def test_one_step_reads_a_bounded_amount() -> None:
    """Of many files only as many are merged at once as commits can wait for."""
    many = [TableFile(3 * MIB, 10)] * 100
    step = next_step([TableFile(n.bytes + i, 10) for i, n in enumerate(many)], delete_share=0.3)
    assert isinstance(step, Merge)
    taken = [i for i in range(100) if step.at_least <= 3 * MIB + i < step.below]
    assert FAN_IN <= len(taken) <= STEP_BYTES // (3 * MIB)


def test_files_with_removed_rows_are_rewritten_when_it_is_worth_it() -> None:
    """A file is written anew when a share of its rows is gone, small ones also when there are many."""
    one = TableFile(1000, 100, 29)
    assert next_step([one], delete_share=0.3) is None
    assert next_step([one, TableFile(1000, 100, 30)], delete_share=0.3) == Rewrite(0.3)
    assert next_step([one] * FAN_IN, delete_share=0.3) == Rewrite(0.29)


def test_what_had_no_effect_is_not_tried_again() -> None:
    """A step that DuckLake declines does not keep a run busy."""
    files = [TableFile(1000, 10)] * FAN_IN
    step = next_step(files, delete_share=0.3)
    assert step is not None
    assert next_step(files, delete_share=0.3, done={step}) is None


def test_any_number_of_files_ends_up_bounded() -> None:
    """P-S32: however many files arrive, a few a level stay."""
    files: list[TableFile] = []
    for _ in range(2000):
        files.append(TableFile(100_000, 100))
        while isinstance(step := next_step(files, delete_share=0.3), Merge):
            merged = [f for f in files if step.at_least <= f.bytes < step.below]
            files = [f for f in files if f not in merged]
            files.append(TableFile(sum(f.bytes for f in merged), 100))
        assert len([f for f in files if f.bytes < LEVELS[-1]]) < FAN_IN * (len(LEVELS) - 1)
    assert sum(f.bytes for f in files) == 2000 * 100_000


# -- doing


class History:
    """A table that changes at random, and what every lake snapshot of it must show."""

    def __init__(self, session: LakeSession, seed: int) -> None:
        self.session = session
        self.random = random.Random(seed)
        self.rows: dict[int, tuple[str | None, int]] = {}
        self.past: dict[int, list[tuple[Any, ...]]] = {}
        self._next = 0
        session.execute("create table lake.main.t (id bigint, v varchar, n bigint)")

    def change(self) -> None:
        with self.session.transaction():
            for _ in range(self.random.randint(1, 3)):
                self._insert() if self.random.random() < 0.5 else self._remove()
        self.remember()

    def _insert(self) -> None:
        count = self.random.choice((1, 4, 30))
        new = {
            self._next + i: (self.random.choice(("a", "", None)), self.random.randint(-99, 99))
            for i in range(count)
        }
        self._next += count
        self._put(new)

    def _remove(self) -> None:
        keys = self.random.sample(sorted(self.rows), min(len(self.rows), self.random.choice((1, 3, 20))))
        if keys:
            self.session.execute(f"delete from lake.main.t where id in ({', '.join(map(str, keys))})")
        for key in keys:
            del self.rows[key]
        if keys and self.random.random() < 0.5:
            self._put({key: ("changed", self.random.randint(-9999, 9999)) for key in keys})

    def _put(self, new: dict[int, tuple[str | None, int]]) -> None:
        self.session.con.executemany(
            "insert into lake.main.t values (?, ?, ?)", [[k, *values] for k, values in new.items()]
        )
        self.rows.update(new)

    def remember(self) -> None:
        """Upkeep makes lake snapshots as well: they show the same rows."""
        now = sorted(((k, *values) for k, values in self.rows.items()), key=lambda row: row[0])
        for version in range(
            max(self.past, default=snapshot(self.session) - 1) + 1, snapshot(self.session) + 1
        ):
            self.past[version] = now

    def check(self) -> None:
        for version, expected in self.past.items():
            table = f"lake.main.t at (version => {version})"
            found = self.session.execute(f"select id, v, n from {table} order by id")
            assert found == expected, f"lake snapshot {version}"
            assert self.session.execute(f"select count(*), count(v) from {table}") == [
                (len(expected), sum(v is not None for _, v, _ in expected))
            ]
            for key, _, n in expected[:: max(1, len(expected) // 3)]:
                [[count]] = self.session.execute(f"select count(*) from {table} where id = {key} and n = {n}")
                assert count == 1, f"lake snapshot {version}, row {key}"


def lived_through(session: LakeSession, seed: int, steps: int) -> History:
    """A random history with maintenance in between, every lake snapshot within the retention compared."""
    history = History(session, seed)
    work = work_on(session, T)
    for _ in range(steps):
        for _ in range(history.random.randint(1, 6)):
            history.change()
        before = history.random.choice((None, max(history.past) - 5))
        work.keep = lambda before=before: (before or 0, None)  # type: ignore[misc]
        config = EAGER.model_copy(
            update={
                "retention_hours": 1e-9 if before else None,
                "delete_share": history.random.choice((0.01, 0.3)),
            }
        )
        report = maintain(work, config)
        assert report.error is None
        assert report.complete
        history.remember()
        if before:
            history.past = {v: rows for v, rows in history.past.items() if v >= before}
        history.check()
    return history


def test_maintenance_changes_neither_rows_nor_the_past(lake: Lake) -> None:
    """Random changes with flushes, merges, rewrites and expiry in between: now and every kept lake snapshot are right."""
    history = lived_through(lake.session, seed=5, steps=2)
    expected = max(history.past)
    assert [tuple(r) for r in lake.read("select id, v, n from lake.main.t order by id")] == history.past[
        expected
    ]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(12))
def test_maintenance_of_long_histories_changes_nothing(lake: Lake, seed: int) -> None:
    """The same, for longer."""
    lived_through(lake.session, seed, steps=15)


def test_a_rewrite_leaves_statistics_that_cover_the_past(lake: Lake) -> None:
    """DuckLake narrows them to the rows of now, which shows values that never were to a query of the past."""
    session = lake.session
    session.execute("create table lake.main.t (id bigint, v varchar, n bigint)")
    session.execute("insert into lake.main.t select i, 'a', i from range(100) r(i)")
    before = snapshot(session)
    session.execute("delete from lake.main.t where id < 60")
    report = maintain(work_on(session, T), EAGER)
    assert report.totals.files_rewritten
    assert rows_at(session, before) == [(i, "a", i) for i in range(100)]
    # A process that dies between the two leaves narrow ones: the next run finds them.
    number = table_id(session, T)
    assert number is not None
    session.execute(
        f"update {METADATA}.ducklake_table_column_stats set min_value = '60' where table_id = {number} and column_id = 1"
    )
    assert maintain(work_on(session, T), EAGER).error is None
    assert rows_at(session, before) == [(i, "a", i) for i in range(100)]
    assert not widen_statistics(session, number, statistics_of_files(session, number))


def test_a_table_that_was_emptied_keeps_its_past(lake: Lake) -> None:
    """Without rows there are no statistics, and the next insert must not narrow those of earlier lake snapshots."""
    session = lake.session
    session.execute("create table lake.main.t (id bigint, v varchar, n bigint)")
    session.execute("insert into lake.main.t values (1, null, -2)")
    before = snapshot(session)
    session.execute("delete from lake.main.t")
    assert maintain(work_on(session, T), EAGER).totals.files_after == 0
    session.execute("insert into lake.main.t select i, 'a', i from range(1000, 1100) r(i)")
    assert rows_at(session, before) == [(1, None, -2)]
    assert session.execute(f"select n from lake.main.t at (version => {before}) where v is null") == [(-2,)]


def test_files_and_lake_snapshots_stay_few(lake: Lake) -> None:
    """P-S32: many small commits leave a bounded number of files, and with a retention, of lake snapshots."""
    session = lake.session
    session.execute("create table lake.main.t (id bigint, v varchar, n bigint)")
    work = work_on(session, T)
    config = EAGER.model_copy(update={"retention_hours": 1e-9})
    for round_number in range(FAN_IN + 1):
        for i in range(3):
            session.execute(f"insert into lake.main.t values ({round_number * 3 + i}, 'x', 0)")
        report = maintain(work, config)
        assert report.error is None
    assert report.totals.files_after <= FAN_IN
    assert report.expiry.snapshots_after <= 3
    assert len([f for f in lake.files() if f.endswith(".parquet")]) <= FAN_IN + 1
    assert lake.read("select count(*), count(distinct id) from lake.main.t") == [(27, 27)]


def test_what_a_reader_needs_is_kept(lake: Lake) -> None:
    """Lake snapshots from a reader's cursor on stay, and all of them if it cannot be asked."""
    session = lake.session
    session.execute("create table lake.main.t (id bigint, v varchar, n bigint)")
    for i in range(6):
        session.execute(f"insert into lake.main.t values ({i}, 'x', 0)")
    cursor = snapshot(session) - 3
    config = EAGER.model_copy(update={"retention_hours": 1e-9})

    def unknown() -> tuple[int | None, str | None]:
        raise CatalogUnreachableError("the destination is out of reach")

    report = maintain(work_on(session, T, keep=unknown), config)
    assert report.expiry.snapshots_after >= report.expiry.snapshots_before
    assert "out of reach" in str(report.expiry.kept_for)
    report = maintain(work_on(session, T, keep=lambda: (cursor, "a reader")), config)
    assert report.expiry.kept_for == "a reader"
    [[oldest]] = session.execute(f"select min(snapshot_id) from {METADATA}.ducklake_snapshot")
    assert oldest == cursor
    assert len(rows_at(session, cursor)) == 3


def test_without_a_retention_nothing_expires(lake: Lake) -> None:
    """The default forgets no lake snapshot."""
    session = lake.session
    session.execute("create table lake.main.t (id bigint, v varchar, n bigint)")
    session.execute("insert into lake.main.t values (1, 'x', 0)")
    report = maintain(work_on(session, T), MaintenanceConfig())
    assert report.expiry.snapshots_after >= report.expiry.snapshots_before > 1


def test_orphans_are_removed_by_age_and_name_only(lake: Lake) -> None:
    """A file stays if it is young, wanted, known or another program's."""
    session = lake.session
    session.execute("create table lake.main.t (id bigint, v varchar, n bigint)")
    session.execute("insert into lake.main.t select i, 'a', i from range(2000) r(i)")
    directory = lake.data_path / "main" / "t"
    [known] = lake.files()
    for name in (
        "ducklake-old.parquet",
        "aqueduck-g-1-old.parquet",
        "aqueduck-g-2-copy.parquet",
        "mine.parquet",
    ):
        (directory / name).touch()
        os.utime(directory / name, (time.time() - 7200,) * 2)
    os.utime(directory / known, (time.time() - 7200,) * 2)
    (directory / "ducklake-young.parquet").touch()
    removed = remove_old_orphans(
        session, [T, TableName("main", "none")], older_than=datetime.now(UTC) - timedelta(hours=1), groups=["g"],
        keep=lambda name: name.endswith("-copy.parquet"),
    )  # fmt: skip
    assert removed == 2
    assert lake.files() == {known, "aqueduck-g-2-copy.parquet", "mine.parquet", "ducklake-young.parquet"}


def test_the_time_of_a_run_is_limited(lake: Lake) -> None:
    """A run that has no time left says so, and the next one continues with the tables that it left out."""
    session = lake.session
    names = [TableName("main", name) for name in ("t", "u", "w")]
    for name in names:
        session.execute(f"create table lake.main.{name.name} (id bigint)")
        session.execute(f"insert into lake.main.{name.name} values (1)")
    work = work_on(session, *names)
    short = EAGER.model_copy(update={"budget_seconds": 1e-9})
    assert not maintain(work, short).complete
    work.progress.next_table = 2
    assert [t.table for t in maintain(work, EAGER).tables] == ["main.w", "main.t", "main.u"]


def test_a_session_that_is_read_is_not_opened_anew(lake: Lake) -> None:
    """A rewrite waits for the next run while the session is being read."""
    session = lake.session
    session.execute("create table lake.main.t (id bigint, v varchar, n bigint)")
    session.execute("insert into lake.main.t select i, 'a', i from range(2000) r(i)")
    session.execute("delete from lake.main.t where id < 1500")
    with session.reading() as con:
        assert maintain(work_on(session, T), EAGER).totals.files_rewritten == 0
        assert con.execute("select count(*) from lake.main.t").fetchall() == [(500,)]
    assert maintain(work_on(session, T), EAGER).totals.files_rewritten == 1


def test_a_step_that_loses_a_race_gives_way(lake: Lake) -> None:
    """Upkeep of a table that another writer got ahead of is left for the next run; the other tables have their turn."""
    session = lake.session
    names = [TableName("main", name) for name in ("t", "u")]
    for name in names:
        session.execute(f"create table lake.main.{name.name} (id bigint)")
        session.execute(f"insert into lake.main.{name.name} values (1)")
    work, races = work_on(session, *names), iter([True])
    take = work.exclusive

    @contextlib.contextmanager
    def racing() -> Iterator[AnyLake]:
        with take() as found:
            if next(races, False):
                raise LakeBusyError("another writer was faster")
            yield found

    work.exclusive = racing
    report = maintain(work, EAGER)
    assert report.error is None
    assert [t.table for t in report.tables] == ["main.u"]
    assert [t.rows_flushed for t in maintain(work, EAGER).tables] == [1, 0]


def test_one_table_that_fails_does_not_keep_the_others(lake: Lake) -> None:
    """Its error is reported, and the run continues."""
    session = lake.session
    session.execute("create table lake.main.t (id bigint)")
    session.execute("insert into lake.main.t select i from range(2000) r(i)")
    session.execute("delete from lake.main.t where id < 1500")
    session.execute("create table lake.main.u (id bigint)")
    session.execute("insert into lake.main.u values (1)")
    for path in lake.data_path.rglob("*.parquet"):
        path.unlink()
    report = maintain(work_on(session, T, TableName("main", "u")), EAGER)
    assert "rewriting files" in str(report.error)
    assert [(t.table, t.rows_flushed) for t in report.tables] == [("main.u", 1)]


def test_a_run_survives_whatever_happens(lake: Lake) -> None:
    """An unknown error is reported like any other, and the next run still happens."""
    session = lake.session
    for name in ("t", "u"):
        session.execute(f"create table lake.main.{name} (id bigint)")
        session.execute(f"insert into lake.main.{name} values (1)")

    def fails(found: AnyLake, older_than: datetime) -> int:
        raise KeyError("a cell value")

    work, stale = work_on(session, T, TableName("main", "u"), orphans=fails), iter([True])
    take = work.exclusive

    @contextlib.contextmanager
    def failing() -> Iterator[AnyLake]:
        if next(stale, False):
            raise OSError(116, "Stale file handle")
        with take() as found:
            yield found

    work.exclusive = failing
    report = maintain(work, EAGER)
    assert [t.table for t in report.tables] == ["main.u"], "the other table had its turn"
    assert str(report.error).startswith("[aqueduck.error] stale file handle: OSError in failing")
    report = maintain(work, EAGER)
    assert "KeyError in fails" in str(report.error)
    assert "cell" not in str(report.error)


def test_a_storage_that_fails_is_an_error_of_ours(lake: Lake) -> None:
    """Neither a file in place of the directory nor one that cannot be removed escapes as a bare OSError."""
    session = lake.session
    session.execute("create table lake.main.t (id bigint)")
    directory = lake.data_path / "main" / "t"
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.touch()
    work = work_on(
        session, orphans=lambda found, older_than: remove_old_orphans(found, [T], older_than=older_than)
    )
    assert str(maintain(work, EAGER).error).startswith("[lake.data_path] listing files of the lake failed: ")
    with pytest.raises(DataPathError, match="removing a file of the lake failed"):
        remove_file(str(directory.parent))
    discard_file(str(directory.parent))
    assert directory.parent.is_dir()
