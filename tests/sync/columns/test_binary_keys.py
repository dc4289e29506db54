"""P-S08: rows whose key has bytes in it are found again, in files of ours and in those that DuckLake writes."""

from __future__ import annotations

from pathlib import Path

from tests.fix_postgres import Database
from tests.whole_group import whole_group


def test_a_row_is_found_by_a_key_of_bytes(db: Database, tmp_path: Path) -> None:
    db.execute("create table t (tenant bytea, id int, v int, tags int[], primary key (tenant, id))")
    db.execute(
        "insert into t select decode(md5((g % 5)::text), 'hex'), g, g, '{1}' from generate_series(1, 50) g"
    )
    with whole_group(db, tmp_path, {"public.t": {}}) as group:

        def is_same() -> None:
            group.apply_only()
            assert [found.verdict for found in group.verify()] == ["identical"]

        db.execute("update t set v = v + 100 where id = 7")  # one key: DuckDB filters the files by it
        is_same()
        # Files that DuckLake writes on its own have Bloom filters.
        group.lake.execute("call ducklake_rewrite_data_files('lake', 't', delete_threshold => 0)")
        group.lake.execute("call ducklake_flush_inlined_data('lake')")
        group.lake.execute("call ducklake_merge_adjacent_files('lake')")
        db.execute("update t set v = v + 100 where id = 8")
        is_same()
        db.execute("delete from t where id = 9")
        is_same()
