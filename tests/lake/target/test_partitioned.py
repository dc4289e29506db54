"""Partitioned tables where DuckLake writes all files itself: they are filled like others."""

from __future__ import annotations

from pathlib import Path

from tests.fanout_lakes import Fan, connect


def test_a_partitioned_destination_is_seeded_and_follows(tmp_path: Path) -> None:
    """P-L01: one destination is partitioned before its seed, the other between two cycles."""
    fan = Fan(tmp_path, {"one": "a", "two": "b"})
    fan.change(
        "create table lake.t (id int, c varchar, v int)",
        "insert into lake.t select i, (['a','b'])[1 + i % 2], i % 7 from range(6000) r(i)",
    )
    with connect(fan.place("one")) as con:
        con.execute("create table lake.t (id int, c varchar, v int)")
        con.execute("alter table lake.t set partitioned by (v)")
    fan.poll()
    with connect(fan.place("two")) as con:
        con.execute("alter table lake.t set partitioned by (v)")
    fan.change("delete from lake.t where id % 3 = 0", "update lake.t set v = 9 where id < 3000")
    fan.change("insert into lake.t select i, 'b', i % 7 from range(6000, 9000) r(i)")
    fan.poll()
    assert fan.differing() == {}
    fan.close()
