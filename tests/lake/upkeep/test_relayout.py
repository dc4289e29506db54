"""`aqueduck maintain --relayout`: old files get the present layout, in steps, while the stream continues."""

from __future__ import annotations

from pathlib import Path

import pytest

from aqueduck.lake.session import partition_files
from aqueduck.lake.upkeep import relayout
from aqueduck.sync.maintain import maintain_sync
from tests.fix_postgres import Database
from tests.layouts import files_of, misplaced, unsorted
from tests.whole_group import WholeGroup, whole_group


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every share is a file, and every step takes one file."""
    monkeypatch.setattr(partition_files, "SHARE_BYTES_MIN", 1)
    monkeypatch.setattr(relayout, "STEP_BYTES", 1)


def lay_out(group: WholeGroup, *changes: str) -> None:
    for change in changes:
        group.lake.execute(f"alter table lake.main.t {change}")


def old_files(group: WholeGroup, keys: int) -> list[str]:
    """Files whose partition values are not as many as there are keys."""
    return [path for path, (_, values) in files_of(group.read, "main", "t").items() if len(values) != keys]


def test_old_files_get_the_present_layout_in_steps(db: Database, tmp_path: Path) -> None:
    """Partitioned, otherwise partitioned, and plain again: rows are the same, also those of deleted and changed ones."""
    db.execute("create table t (id int primary key, tenant text, made date)")
    with whole_group(db, tmp_path, {"public.t": {}}, inline_rows=2) as group:
        for n in range(3):
            db.execute(
                f"insert into t select i, 't' || i % 3, date '2024-01-31' + i % 2 from generate_series({n * 100}, {n * 100 + 49}) i"
            )
            group.apply(tasks=True)
        db.execute("delete from t where id % 7 = 0")
        group.apply()
        before = group.read("select max(snapshot_id) from lake.snapshots()")
        for changes, keys in (
            (("set partitioned by (tenant)", "set sorted by (made, id)"), ["tenant"]),
            (("set partitioned by (year(made), month(made))",), ["year(made)", "month(made)"]),
            (("reset partitioned by",), []),
        ):
            lay_out(group, *changes)
            assert old_files(group, len(keys))
            group.stop()
            report = maintain_sync(group.config, relayout=True)
            assert report["error"] is None
            [table] = [t for t in report["tables"] if t["table"] == "main.t"]
            assert table["files_rewritten"] >= 2
            group.start({"public.t": {}})
            assert old_files(group, len(keys)) == []
            if keys:
                assert misplaced(group.read, "main", "t", keys) == []
            assert unsorted(group.read, "main", "t", "made") == []
            assert {c.verdict for c in group.verify()} == {"identical"}
        [[past]] = group.read(f"select count(*) from lake.main.t at (version => {before[0][0]})")
        [[now]] = group.read("select count(*) from lake.main.t")
        assert past == now


def test_nothing_is_rewritten_unless_asked_or_if_all_files_fit(db: Database, tmp_path: Path) -> None:
    """Maintenance on its schedule leaves old files; a second relayout finds none."""
    db.execute("create table t (id int primary key, tenant text)")
    db.execute("insert into t select i, 't' || i % 3 from generate_series(1, 60) i")
    with whole_group(db, tmp_path, {"public.t": {}}) as group:
        lay_out(group, "set partitioned by (tenant)")
        group.stop()
        for asked, rewritten in ((False, 0), (True, 1), (True, 0)):
            report = maintain_sync(group.config, relayout=asked)
            [table] = [t for t in report["tables"] if t["table"] == "main.t"]
            assert table["files_rewritten"] == rewritten
        group.start({"public.t": {}})
        assert len(files_of(group.read, "main", "t")) == 3


def test_a_query_of_a_partition_reads_only_its_files(db: Database, tmp_path: Path) -> None:
    """For a column, a transformed column and a bucket, as the plan says."""
    db.execute("create table t (id int primary key, tenant text, made date)")
    db.execute(
        "insert into t select i, 't' || i % 4, date '2024-01-15' + i % 3 * interval '1 month' from generate_series(1, 120) i"
    )
    keys = {
        "tenant": "tenant = 't1'",
        "month(made)": "made between '2024-02-01' and '2024-02-29'",
        "bucket(5, id)": "id = 7",
    }
    for number, (key, condition) in enumerate(keys.items()):
        options = {"partition_by": [key], "target": f"main.t{number}"}
        with whole_group(db, tmp_path, {"public.t": options}, name=f"g{number}") as group:
            files = files_of(group.read, "main", f"t{number}")
            assert len(files) >= 3
            [[_, plan]] = group.read(f"explain analyze select * from lake.main.t{number} where {condition}")
            assert "Total Files Read: 1 " in plan, (key, plan)
