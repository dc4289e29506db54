from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from aqueduck import faults
from aqueduck.lake.commit import commit
from aqueduck.lake.commit.commit import BatchPlan, RunPlan, TableFailed, TablePlan, commit_batch
from aqueduck.lake.fold.fold import folded
from aqueduck.lake.ledger.parking import ensure_parking, parked_segments, parking_directory
from aqueduck.lake.ledger.progress import Position, progress_table, read_position, write_position
from aqueduck.lake.ledger.table_states import TableState, ensure_table_states, read_states
from aqueduck.lake.session.directories import table_directory
from aqueduck.lake.session.engine import open_kernel
from aqueduck.lake.session.files import file_name, write_files
from aqueduck.lake.target import inlined
from aqueduck.lake.target.apply import ensure_target
from aqueduck.lake.target.inlined import count_inlined
from aqueduck.lake.target.places import file_bytes
from aqueduck.model.changes import OP_DELETE, OP_INSERT, OP_UPDATE, SegmentRef
from aqueduck.model.errors import LakeBusyError
from aqueduck.model.schema import TableName
from aqueduck.state_files.private_files import private_directory
from tests.fix_lake import CATALOGS, Lake
from tests.strategies import TABLE, Change, stage, truncate_before

START = Position("shop", 1000, None, "7300000000000000001", 1)
END = Position("shop", 2000, 1_700_000_000_000_000, "7300000000000000001", 1)
ONE, TWO = TableName("main", "one"), TableName("main", "two")


@pytest.fixture
def shop(lake: Lake) -> Lake:
    """A lake with two target tables and the group's first position."""
    ensure_table_states(lake.session)
    ensure_parking(lake.session)
    read_position(lake.session, "shop")
    with lake.session.transaction():
        for target in (ONE, TWO):
            ensure_target(lake.session, target, TABLE)
        write_position(lake.session, START)
    return lake


def table(
    target: TableName, segments: Sequence[SegmentRef], *, truncate: bool = False, oid: int = 1
) -> TablePlan:
    first = [truncate_before(segments[0])] if truncate else []
    return TablePlan(oid, target, (RunPlan(TABLE, (*first, *segments)),))


def counts(lake: Lake) -> tuple[int, int]:
    [[one, two]] = lake.read(
        "select (select count(*) from lake.main.one), (select count(*) from lake.main.two)"
    )
    return one, two


def insert(directory: Path, *ids: int, first_ord: int = 5) -> list[SegmentRef]:
    return stage(directory, [Change(OP_INSERT, ("big", "a", "1", str(i), "x")) for i in ids], first_ord)


def test_all_tables_and_the_position_are_one_lake_snapshot(shop: Lake, tmp_path: Path) -> None:
    """Promise 2: rows of all tables, and the position, appear together, with their lineage."""
    before = shop.read("select count(*) from lake.snapshots()")[0][0]
    plan = BatchPlan(END, (table(ONE, insert(tmp_path, 1, 2)), table(TWO, insert(tmp_path, 3), oid=2)))
    assert commit_batch(shop.session, plan)
    assert counts(shop) == (2, 1)
    assert read_position(shop.session, "shop") == END
    rows = shop.read(
        "select author, commit_message, commit_extra_info from lake.snapshots() order by snapshot_id"
    )
    assert len(rows) == before + 1
    author, message, extra = rows[-1]
    assert (author, message) == ("aqueduck", "shop up to 0/7D0")
    assert json.loads(extra) == {
        "group": "shop",
        "lsn_from": "0/3E8",
        "lsn_to": "0/7D0",
        "source_commit_time_us": END.commit_time_us,
    }


def test_a_batch_is_applied_once(shop: Lake, tmp_path: Path) -> None:
    """Promise 1: a batch that the lake has, or that ends before its position, changes nothing."""
    plan = BatchPlan(END, (table(ONE, insert(tmp_path, 1)),))
    assert commit_batch(shop.session, plan)
    assert not commit_batch(shop.session, plan)
    assert not commit_batch(shop.session, replace(plan, position=replace(END, position=1500)))
    assert counts(shop) == (1, 0)


def test_a_stale_batch_is_refused(shop: Lake, tmp_path: Path) -> None:
    """Promise 1: a batch made from an older position, by a service that was overtaken, is not applied."""
    assert commit_batch(
        shop.session, BatchPlan(replace(END, position=1500), (table(ONE, insert(tmp_path, 1)),))
    )
    stale = BatchPlan(END, (table(ONE, insert(tmp_path, 1, 2)),), start=1000)
    with pytest.raises(LakeBusyError):
        commit_batch(shop.session, stale)
    assert counts(shop) == (1, 0)


def test_inlined_rows_are_flushed_beyond_the_limit(
    shop: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-S32: few rows stay inlined in the catalog; the rows stay the same."""
    monkeypatch.setattr(inlined, "ROWS_MAX", 5)
    for i in range(4):
        plan = BatchPlan(replace(END, position=1100 + i), (table(ONE, insert(tmp_path, 2 * i, 2 * i + 1)),))
        assert commit_batch(shop.session, plan)
    assert counts(shop) == (8, 0)
    assert any(name.endswith(".parquet") for name in shop.files())


def test_old_positions_are_flushed_although_connections_fail(
    shop: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog does not grow with each batch, not even if the session has to be opened anew all the time."""
    monkeypatch.setattr(inlined, "ROWS_MAX", 5)
    for i in range(8):
        plan = BatchPlan(replace(END, position=1100 + i), (table(ONE, insert(tmp_path, i)),))
        assert commit_batch(shop.session, plan)
        shop.session.reopen()
    assert counts(shop) == (8, 0)
    count_inlined(shop.session, [progress_table("shop")])
    assert shop.session.memory.inlined_rows[progress_table("shop")] <= 5


def test_a_batch_of_many_tables_uses_one_thread_and_gives_the_others_back(
    shop: Lake, tmp_path: Path, arm: Callable[[str], None]
) -> None:
    """A large table among small ones, and a failure, leave the session with all of its threads."""
    targets = [TableName("main", f"many{i}") for i in range(9)]
    with shop.session.transaction():
        for target in targets:
            ensure_target(shop.session, target, TABLE)
        shop.session.execute(
            "insert into lake.main.many0 select 'big', 'a', 1, i, 'x' from range(100, 200) t(i)"
        )
    assert file_bytes(shop.session, targets).keys() == {targets[0]}
    plan = BatchPlan(
        END, tuple(table(t, insert(tmp_path, 1, 2, first_ord=5 + i), oid=i) for i, t in enumerate(targets))
    )
    arm("lake.before_commit:raise")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "SMALL_BYTES", 1)
        with pytest.raises(Exception, match=r"\[lake.write\]"):
            commit_batch(shop.session, plan)
        assert shop.session.execute("select current_setting('threads')") == [(2,)]
        assert commit_batch(shop.session, plan)
    assert shop.session.execute("select current_setting('threads')") == [(2,)]
    total = " union all ".join(f"select count(*) n from lake.main.many{i}" for i in range(9))
    assert shop.read(f"select sum(n) from ({total})") == [(118,)]


def test_a_failure_before_the_commit_leaves_nothing(
    shop: Lake, tmp_path: Path, arm: Callable[[str], None]
) -> None:
    """P-S17: a transient failure takes everything back, and the same batch succeeds the next time."""
    plan = BatchPlan(END, (table(ONE, insert(tmp_path, 1)),))
    arm("lake.before_commit:raise")
    with pytest.raises(Exception, match=r"\[lake.write\]"):
        commit_batch(shop.session, plan)
    assert counts(shop) == (0, 0)
    assert read_position(shop.session, "shop") == START
    assert commit_batch(shop.session, plan)
    assert counts(shop) == (1, 0)


def test_a_commit_whose_answer_was_lost_counts(
    shop: Lake, tmp_path: Path, arm: Callable[[str], None]
) -> None:
    """Hazard 3: a failure after the write is found to be a success, and nothing is written twice."""
    arm("lake.after_commit:raise")
    assert commit_batch(shop.session, BatchPlan(END, (table(ONE, insert(tmp_path, 1)),)))
    assert counts(shop) == (1, 0)
    assert read_position(shop.session, "shop") == END


def test_files_of_tasks_and_segments_commit_together(shop: Lake, tmp_path: Path) -> None:
    """One transaction deletes by a task's keys, patches from the target, adds its file, and applies a small run."""
    commit_batch(
        shop.session, BatchPlan(replace(END, position=1500), (table(ONE, insert(tmp_path, *range(60))),))
    )
    history = [
        Change(OP_UPDATE, (None, "a", "7", "1", "new"), unchanged=(0,)),
        Change(OP_DELETE, old_key=("2", "a")),
        Change(OP_UPDATE, ("B", "a", "8", "100", "x"), old_key=("3", "a")),
        Change(OP_INSERT, ("C", "a", "9", "200", "x")),
    ]
    kernel = open_kernel(str(tmp_path), threads=1)
    directory = table_directory(shop.session, ONE)
    with folded(kernel, stage(tmp_path, history), TABLE) as fold:
        [data] = write_files(kernel, fold.upserts, directory, file_name("shop", "r", 1, 0))
        [deletes] = write_files(kernel, str(fold.deletes), str(tmp_path), "deletes.parquet")
        [patches] = write_files(kernel, str(fold.patches), str(tmp_path), "patches.parquet")
    kernel.close()
    run = RunPlan(TABLE, (), (data.path,), (deletes.path,), (patches.path,))
    plan = BatchPlan(END, (TablePlan(1, ONE, (run,)), table(TWO, insert(tmp_path, 5), oid=2)))
    assert commit_batch(shop.session, plan)
    assert counts(shop) == (60 - 2 + 2, 1)
    rows = shop.read(
        "select big, n0, id, _ord from lake.main.one where id in (1, 2, 3, 100, 200) order by id"
    )
    assert rows == [("big", 7, 1, "new"), ("B", 8, 100, "x"), ("C", 9, 200, "x")]


def test_a_truncate_comes_before_what_follows_it(shop: Lake, tmp_path: Path) -> None:
    """P-S11: the rows before are gone, the rows after are there, in one lake snapshot."""
    commit_batch(
        shop.session, BatchPlan(replace(END, position=1500), (table(ONE, insert(tmp_path, *range(40))),))
    )
    commit_batch(shop.session, BatchPlan(END, (table(ONE, insert(tmp_path, 1, 2), truncate=True),)))
    assert shop.read("select id from lake.main.one order by id") == [(1,), (2,)]


def test_a_table_that_cannot_be_written_is_named_and_nothing_is_written(shop: Lake, tmp_path: Path) -> None:
    """Promise 5: the failure says which table it was; without it, the same batch goes through."""
    shop.session.execute("alter table lake.main.two drop column big")
    good, bad = table(ONE, insert(tmp_path, 1), oid=11), table(TWO, insert(tmp_path, 1), oid=22)
    with pytest.raises(TableFailed) as failure:
        commit_batch(shop.session, BatchPlan(END, (good, bad)))
    assert failure.value.oid == 22
    assert counts(shop) == (0, 0)
    assert read_position(shop.session, "shop") == START
    failed = TableState(22, "public.two", TWO, False, 0, str(failure.value.error))
    parked = insert(private_directory(Path(parking_directory(shop.session.config.data_path, "shop"))), 1)
    assert commit_batch(shop.session, BatchPlan(END, (good,), tuple(parked), (failed,)))
    assert counts(shop) == (1, 0)
    assert read_states(shop.session, "shop") == {22: failed}
    assert parked_segments(shop.session, "shop", [parked[0].table_oid]) == {parked[0].table_oid: parked}


def test_a_value_that_does_not_fit_is_the_tables_failure(shop: Lake, tmp_path: Path) -> None:
    """Bad text of one table names that table and does not show the text."""
    bad = stage(tmp_path, [Change(OP_INSERT, ("big", "a", "secret", "1", "x"))])
    with pytest.raises(TableFailed) as failure:
        commit_batch(shop.session, BatchPlan(END, (table(ONE, bad, oid=7),)))
    assert failure.value.oid == 7
    assert "secret" not in str(failure.value.error)
    assert counts(shop) == (0, 0)


def test_changes_that_the_copy_has_are_left_out(shop: Lake, tmp_path: Path) -> None:
    """P-S07: changes that committed before the copy's position are not applied again."""
    history = [
        Change(OP_INSERT, ("big", "a", "1", str(i), "x")) for i in range(10)
    ]  # at positions 1000, 1001, …
    refs = stage(tmp_path, history, pieces=1)
    plan = TablePlan(1, ONE, (RunPlan(TABLE, tuple(refs)),), skip_before=1006)
    assert commit_batch(shop.session, BatchPlan(END, (plan,)))
    assert shop.read("select id from lake.main.one order by id") == [(6,), (7,), (8,), (9,)]


KILLED = """
import sys
from aqueduck.config.sync import LakeConfig
from aqueduck.lake.session.catalog import open_lake
from aqueduck.lake.commit.commit import BatchPlan, RunPlan, TablePlan, commit_batch
from aqueduck.lake.ledger.progress import Position
from aqueduck.model.changes import SegmentRef
from aqueduck.model.schema import TableName, TableSchema
import json
given = json.loads(sys.argv[1])
schema = TableSchema.from_json(given["schema"])
segments = tuple(SegmentRef.from_dict(s) for s in given["segments"])
plan = TablePlan(1, TableName("main", "one"), (RunPlan(schema, segments),))
end = Position("shop", 2000, 1_700_000_000_000_000, "7300000000000000001", 1)
commit_batch(open_lake(LakeConfig(**given["config"])), BatchPlan(end, (plan,)))
"""


@pytest.mark.parametrize(
    "lake_config",
    [CATALOGS[0], *(pytest.param(c, marks=pytest.mark.faults) for c in CATALOGS[1:])],
    indirect=True,
)
@pytest.mark.kills("sync")
@pytest.mark.parametrize(("point", "committed"), [("lake.before_commit", False), ("lake.after_commit", True)])
def test_kill_9_around_the_commit_neither_loses_nor_doubles(
    shop: Lake, tmp_path: Path, point: str, committed: bool
) -> None:
    """Hazard 8: after SIGKILL before or after the commit, the next try ends in the same rows."""
    segments = insert(tmp_path, *range(30))
    config = {**shop.config.model_dump(), "catalog": shop.config.catalog}
    given = json.dumps(
        {"schema": TABLE.to_json(), "segments": [s.to_dict() for s in segments], "config": config}
    )
    shop.session.close()  # a DuckDB file is for one process at a time
    child = subprocess.run(
        [sys.executable, "-c", KILLED, given],
        env={"AQUEDUCK_FAULT": point, "PYTHONPATH": str(Path(faults.__file__).parents[1])},
        capture_output=True,
        timeout=60,
    )
    assert child.returncode == -9, child.stderr.decode()
    shop.session.reopen()
    assert read_position(shop.session, "shop") == (END if committed else START)
    assert commit_batch(shop.session, BatchPlan(END, (table(ONE, segments),))) is not committed
    assert counts(shop) == (30, 0)
