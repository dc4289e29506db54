"""Partitioned tables where DuckLake writes all files itself: they are filled like others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aqueduck.config.fanout import parse_fanout
from aqueduck.lake.session.pool import LakePool
from aqueduck.model.layout import AS_IT_IS, WantedLayout, parse_partition_key, parse_sort_key
from tests.fanout_lakes import Fan, connect
from tests.layouts import files_of, misplaced


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


def test_a_destination_gets_the_layout_of_the_file(tmp_path: Path) -> None:
    """Before its seed, or with its next changes; what the file does not mention stays."""
    fan = Fan(tmp_path, {"one": "a"}, inline=0)
    fan.change(
        "create table lake.t (id int, c varchar, v int)",
        "insert into lake.t select i, 'a', i % 3 from range(6000) r(i)",
    )

    def read(query: str) -> list[Any]:
        return fan.look("one", query)

    for keys, sql in (("v", ["v"]), ("bucket(2, id)", ["(murmur3_32(id) & 2147483647) % 2"])):
        fan.layout = WantedLayout((parse_partition_key(keys),), (parse_sort_key("id"),), 16 << 20)
        before = {path.rsplit("/", 1)[-1] for path in files_of(read, "main", "t")} if keys != "v" else set()
        for cycle in range(2):  # the worker notices another layout in a new session
            fan.change(
                f"insert into lake.t select i + {len(keys)} * 10000 * (1 + {cycle}), 'a', i % 3 from range(5000) r(i)"
            )
            fan.change("delete from lake.t where id % 7 = 0")
            fan.pool.close()
            fan.pool = LakePool(threads=1)
            fan.poll()
        assert fan.differing() == {}

        assert [name for name, *_ in misplaced(read, "main", "t", sql) if name not in before] == []
        assert {len(values) for _, values in files_of(read, "main", "t").values()} == {1}
        [[size]] = read("select value from ducklake_options('lake') where option_name = 'target_file_size'")
        assert size == str(16 << 20)
    fan.close()


def test_a_destination_whose_rows_a_bucket_hides_is_not_written(tmp_path: Path) -> None:
    """Its deletes would have no effect; it keeps its cursor, and continues when the layout is reset."""
    fan = Fan(tmp_path, {"one": "a"}, inline=0)
    fan.change(
        "create table lake.t (id int, c varchar)", "insert into lake.t select i, 'a' from range(6000) r(i)"
    )
    fan.poll()
    with connect(fan.place("one")) as con:
        con.execute("alter table lake.t set partitioned by (bucket(4, id))")
    fan.change("delete from lake.t where id between 20 and 60")
    before = fan.cursor("one")
    [applied] = fan.poll()
    assert applied.error is not None
    assert "[lake.partitioned]" in applied.error
    assert fan.cursor("one") == before
    [seeded] = fan.seed("one")
    assert "[lake.partitioned]" in (seeded.error or "")
    with connect(fan.place("one")) as con:
        con.execute("alter table lake.t reset partitioned by")
    assert [a.error for a in fan.poll()] == [None]
    assert fan.differing() == {}
    fan.close()


def test_a_sorted_destination_follows_a_dropped_column(tmp_path: Path) -> None:
    """It loses that sort key and no other."""
    layout = WantedLayout(sort=(parse_sort_key("v"), parse_sort_key("id")))
    fan = Fan(tmp_path, {"one": "a"}, inline=0, layout=layout)
    fan.change("create table lake.t (id int, c varchar, v int)")
    fan.change("insert into lake.t select i, 'a', -i from range(100) r(i)")
    fan.poll()
    fan.layout = AS_IT_IS
    fan.change("alter table lake.t drop v", "insert into lake.t values (1000, 'a')")
    assert [a.error for a in fan.poll()] == [None]
    assert fan.differing() == {}
    with connect(fan.place("one")) as con:
        m = "__ducklake_metadata_lake"
        keys = con.execute(
            f"select expression from {m}.ducklake_sort_info join {m}.ducklake_sort_expression using (sort_id)"
            " where end_snapshot is null"
        ).fetchall()
        assert keys == [("id",)]
    fan.close()


def test_a_type_with_other_hashes_does_not_reach_a_destination_with_a_bucket_of_the_column(
    tmp_path: Path,
) -> None:
    """DuckLake would not find the rows of old files by the new hash; it continues when the layout is reset."""
    layout = WantedLayout(partition=(parse_partition_key("bucket(8, id)"),))
    fan = Fan(tmp_path, {"one": "a"}, inline=0, layout=layout)
    fan.change(
        "create table lake.t (id decimal(9, 0), c varchar)",
        "insert into lake.t select i, 'a' from range(100) r(i)",
    )
    fan.poll()
    fan.change("alter table lake.t alter id set data type decimal(18, 0)", "delete from lake.t where id = 7")
    assert [a.error for a in fan.poll()] == [None]
    fan.change("alter table lake.t alter id set data type decimal(30, 0)", "delete from lake.t where id = 8")
    [applied] = fan.poll()
    assert "[lake.partitioned]" in (applied.error or "")
    fan.layout = AS_IT_IS
    with connect(fan.place("one")) as con:
        con.execute("alter table lake.t reset partitioned by")
    assert [a.error for a in fan.poll()] == [None]
    assert fan.differing() == {}
    fan.close()


def test_destinations_inherit_the_layout_of_the_defaults() -> None:
    """A destination's own keys win, also if they are none."""
    config = parse_fanout(
        """
        source: { catalog: "sqlite:s.sqlite", data_path: ./s, table: t }
        routing: { field: c, key_columns: [id] }
        defaults: { partition_by: [v], sort_by: [id] }
        destinations:
          - { id: one, routing_value: a, catalog: "sqlite:a.sqlite", data_path: ./a }
          - { id: two, routing_value: b, catalog: "sqlite:b.sqlite", data_path: ./b, partition_by: [] }
        """,
        base_dir=Path.cwd(),
        env={},
    )
    layouts = [config.layout_of(each) for each in config.destinations]
    assert [layout.partition for layout in layouts] == [(parse_partition_key("v"),), ()]
    assert [layout.sort for layout in layouts] == [(parse_sort_key("id"),)] * 2
