"""A bucket that is set on a target with rows: DuckLake does not find them any more."""

from __future__ import annotations

from pathlib import Path

from tests.fix_postgres import Database
from tests.sync.watching.test_targets_by_hand import by_hand, error_of, resync
from tests.whole_group import whole_group


def test_a_bucket_on_a_target_with_rows_is_refused_until_it_is_copied_again(
    db: Database, tmp_path: Path
) -> None:
    """Its deletes would have no effect; nothing is written, and a resync makes files for the bucket."""
    db.execute("create table t (id int primary key, v text)")
    db.execute("insert into t select g, 'v' || g from generate_series(1, 500) g")
    with whole_group(db, tmp_path, {"public.t": {}}) as group:
        by_hand(tmp_path, "alter table lake.main.t set partitioned by (bucket(4, id))")
        db.execute("update t set v = 'w' where id between 20 and 60; delete from t where id = 5")
        group.apply_only(tasks=True)
        assert error_of(group, "t") == "lake.partitioned"
        resync(group, "t")
        assert error_of(group, "t") is None
        db.execute("update t set v = 'x' where id between 30 and 90; delete from t where id = 7")
        group.apply()
        assert [c.verdict for c in group.verify()] == ["identical"]
