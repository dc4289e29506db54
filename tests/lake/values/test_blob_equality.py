"""Rows are found by a BLOB, even if a file's Bloom filter excludes it."""

from __future__ import annotations

from pathlib import Path

from aqueduck.lake.session.engine import new_connection
from aqueduck.lake.session.files import write_files
from aqueduck.lake.session.sql import equal

ROWS = "select unhex('00ff') as b, i from range(120) t(i)"


def test_duckdb_does_not_find_a_blob_by_a_bloom_filter(tmp_path: Path) -> None:
    """If this fails, DuckDB is mended: `equal` and `write_bloom_filter false` may go."""
    con = new_connection()
    con.execute(f"copy ({ROWS}) to '{tmp_path}/a.parquet'")
    count = f"select count(*) from '{tmp_path}/a.parquet' t, (select unhex('00ff') as b) k where"
    assert con.execute(f"{count} t.b = k.b").fetchone() == (0,)
    assert con.execute(f"{count} {equal('BLOB', 't.b', 'k.b')}").fetchone() == (120,)


def test_our_files_have_none(tmp_path: Path) -> None:
    con = new_connection()
    [file] = write_files(con, ROWS, str(tmp_path), "a.parquet", columns=2)
    assert con.execute(f"select count(*) from '{file.path}' where b = unhex('00ff')").fetchone() == (120,)
    assert con.execute(
        f"select distinct bloom_filter_offset from parquet_metadata('{file.path}')"
    ).fetchall() == [(None,)]
