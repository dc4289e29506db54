"""What one cycle does to a destination; without Spark, with real lakes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from aqueduck.config.lake_place import LakePlace
from aqueduck.lab.bench.fanout_bench import split_seconds
from aqueduck.lake.destinations.destination import STATE
from aqueduck.lake.session.pool import LakePool
from aqueduck.lake.source.lake_changes import Routes, read_routed
from aqueduck.lake.source.source_lake import SourceLake, split_plan
from aqueduck.model.errors import (
    LakeTableMissingError,
    LakeWriteError,
    ReservedColumnError,
    RoutingError,
    SourceExpiredError,
)
from aqueduck.model.routing import SourceColumn, backoff_seconds, evolution, readable_ranges
from tests.fanout_lakes import Fan, T, connect

TABLE = "create table lake.t (id int, c varchar, v int)"


@pytest.fixture
def fan(tmp_path: Path) -> Iterator[Fan]:
    fan = Fan(tmp_path, {"one": "a", "two": "b"})
    fan.change(TABLE)
    yield fan
    fan.close()


def same_after(fan: Fan, *statements: str) -> list[Any]:
    fan.change(*statements)
    done = fan.poll()
    assert [a.error for a in done if a.error] == []
    assert fan.differing() == {}
    return done


def test_insert_poll_delete_leaves_nothing(fan: Fan) -> None:
    """P-F02, hazard 6: a row that was replicated and then deleted is gone at the destination."""
    same_after(fan, "insert into lake.t values (1, 'a', 1)")
    assert fan.rows("one") == [(1, "a", 1)]
    same_after(fan, "delete from lake.t where id = 1")
    assert fan.rows("one") == []


def test_insert_and_two_updates_leave_one_row(fan: Fan) -> None:
    """P-F02: within one poll and over several, the last update wins and nothing is doubled."""
    fan.poll()
    same_after(
        fan,
        "insert into lake.t values (1, 'a', 1)",
        "update lake.t set v = 2 where id = 1",
        "update lake.t set v = 3 where id = 1",
    )
    assert fan.rows("one") == [(1, "a", 3)]


def test_a_key_change_leaves_no_old_row(fan: Fan) -> None:
    """P-F02, hazard 6: the old key is deleted, even when two keys change places."""
    same_after(fan, "insert into lake.t values (1, 'a', 1), (2, 'a', 2)")
    same_after(fan, "update lake.t set id = 9 where id = 1")
    same_after(fan, "update lake.t set id = 11 - id where id in (2, 9)")
    assert fan.rows("one") == [(2, "a", 1), (9, "a", 2)]


def test_a_tenant_move_leaves_nothing_with_the_old_tenant(fan: Fan) -> None:
    """P-F02, hazard 6: an update of the routing field is a delete here and an insert there; also to an unknown value and back."""
    same_after(fan, "insert into lake.t values (1, 'a', 1), (2, 'b', 2), (3, 'x', 3)")
    same_after(fan, "update lake.t set c = 'b' where id = 1")
    assert fan.reports[-1].moves == 1
    assert (fan.rows("one"), fan.rows("two")) == ([], [(1, "b", 1), (2, "b", 2)])
    same_after(fan, "update lake.t set c = null where id = 1", "update lake.t set c = 'a' where id = 3")
    assert (fan.rows("one"), fan.rows("two")) == ([(3, "a", 3)], [(2, "b", 2)])


def test_a_new_column_reaches_destinations(fan: Fan) -> None:
    """P-F16, hazard 6: ADD COLUMN with a default, RENAME, a wider type and DROP, with rows on both sides of each."""
    same_after(fan, "insert into lake.t values (1, 'a', 1), (2, 'b', 2)")
    same_after(fan, "alter table lake.t add column w varchar default 'it''s'")
    same_after(
        fan, "insert into lake.t values (3, 'a', 3, 'x')", "alter table lake.t rename column v to value"
    )
    same_after(
        fan, "update lake.t set value = 7 where id = 1", "alter table lake.t alter value set data type bigint"
    )
    same_after(
        fan, "insert into lake.t values (4, 'a', 5000000000, null)", "alter table lake.t drop column w"
    )
    assert fan.rows("one") == [(1, "a", 7), (3, "a", 3), (4, "a", 5000000000)]


def test_a_table_made_anew_is_seeded_again(fan: Fan) -> None:
    """P-F16: a dropped and re-created source table has another identity; nothing of the old one stays."""
    same_after(fan, "insert into lake.t values (1, 'a', 1)")
    fan.change("drop table lake.t", "create table lake.t (id int, c varchar, w double)")
    same_after(fan, "insert into lake.t values (5, 'a', 0.5)")
    assert fan.rows("one") == [(5, "a", 0.5)]


def test_null_and_odd_keys_are_found_again(fan: Fan) -> None:
    """P-F06: NULL in composite keys, '' versus NULL, odd column names, and SQL in values and names."""
    fan.keys = ('or"der; --', "part")
    fan.change(
        "drop table lake.t",
        """create table lake.t ("or""der; --" varchar, part varchar, c varchar, "sel'ect" varchar)""",
    )
    rows = [("null", "null"), ("null", "''"), ("''", "null"), ("''", "''"), ("'a; drop table t'", "'\"'")]
    fan.change(*(f"insert into lake.t values ({a}, {b}, 'a', 'v')" for a, b in rows))
    same_after(fan)
    for a, b in rows:
        same_after(
            fan,
            f"""update lake.t set "sel'ect" = 'new' where "or""der; --" is not distinct from {a}"""
            f" and part is not distinct from {b}",
        )
    same_after(fan, """delete from lake.t where "or""der; --" is null""")
    assert len(fan.rows("one")) == 3


def test_rows_are_found_by_bytes(tmp_path: Path) -> None:
    """P-F01, P-F06: routing values and keys of bytes; DuckDB's Bloom filters would hide their rows."""
    fan = Fan(tmp_path, {"one": r"\x00\xFF"})
    fan.keys = ("k", "id")
    fan.change("create table lake.t (c blob, k blob, id int, v int)")
    fan.change("insert into lake.t select unhex('00ff'), unhex('c3'), i, 0 from range(5000) r(i)")
    try:
        assert [a.error for a in fan.poll() if a.error] == []
        for change in ("update lake.t set v = 1 where id = 7", "delete from lake.t where id = 8"):
            fan.change(change)
            assert [a.error for a in fan.poll() if a.error] == []
        found = sorted((row[2], row[3]) for row in fan.rows("one"))
        assert found == [(i, int(i == 7)) for i in range(5000) if i != 8]
    finally:
        fan.close()


def test_append_only_mode_never_doubles(tmp_path: Path) -> None:
    """P-F01: without keys rows are appended once, for any poll points; updates and deletes are left out."""
    fan = Fan(tmp_path, {"one": "a"}, keys=())
    fan.change(TABLE, "insert into lake.t values (1, 'a', 1)")
    fan.poll()
    fan.change("insert into lake.t values (1, 'a', 1), (2, 'a', 2)")
    fan.poll()
    fan.poll()
    fan.change("update lake.t set v = 9 where id = 2", "delete from lake.t where id = 1")
    fan.change("insert into lake.t values (3, 'a', 3), (4, 'x', 4)")
    fan.poll()
    assert fan.rows("one") == [(1, "a", 1), (1, "a", 1), (2, "a", 2), (3, "a", 3)]
    fan.close()


def test_cursors_advance_without_data(fan: Fan) -> None:
    """P-F04: a destination for which nothing came, and a lake snapshot without changes of the table, move cursors too."""
    fan.poll()
    fan.change("insert into lake.t values (1, 'a', 1)", "create table lake.other (x int)")
    fan.poll()
    assert fan.cursor("one") == fan.cursor("two") == fan.latest()


def test_a_repeated_cycle_changes_nothing(fan: Fan) -> None:
    """P-F05: the cursor moves only from where it was believed to be, so a stale cycle writes nothing at all."""
    fan.poll()
    fan.change("insert into lake.t values (1, 'a', 1)")
    stale = fan.destinations()
    same_after(fan)
    before = fan.snapshots()
    fan.destinations = lambda: stale  # type: ignore[method-assign]
    done = fan.poll()
    assert [(a.cursor, a.error) for a in done] == [(fan.latest(), None)] * 2
    assert fan.snapshots() == before


def test_two_writers_of_one_destination_conflict(fan: Fan) -> None:
    """P-F05: of two services that apply the same range at the same time, one succeeds and the other changes nothing."""
    same_after(fan, "insert into lake.t values (1, 'a', 1)")
    first, second = (connect(fan.place("one"), "data_inlining_row_limit 1000") for _ in range(2))
    for con in (first, second):
        con.execute("begin")
        con.execute("insert into lake.t values (2, 'a', 2)")
        con.execute(
            f"update lake.{STATE.schema}.{STATE.name} set last_snapshot_id = 99 where destination_id = 'one'"
        )
    first.execute("commit")
    with pytest.raises(duckdb.TransactionException):
        second.execute("commit")
    assert fan.rows("one") == [(1, "a", 1), (2, "a", 2)]


def test_state_is_readable_with_sql(fan: Fan) -> None:
    """P-F18: the last source snapshot, rows, and the time of the last change are a row of the destination's lake."""
    same_after(fan, "insert into lake.t values (1, 'a', 1), (2, 'a', 2)")
    same_after(fan, "delete from lake.t where id = 1")
    [(name, instance, cursor, rows, error, changed)] = fan.look(
        "one",
        "select destination_id, instance_id, last_snapshot_id, rows_replicated, last_error, last_change_at"
        f" from lake.{STATE.schema}.{STATE.name}",
    )
    assert (name, instance, cursor, rows, error) == ("one", "test", fan.latest(), 3, None)
    assert changed is not None


def test_rows_without_a_destination_are_counted(fan: Fan) -> None:
    """P-F07: values without a destination and NULLs are counted apart, once each."""
    fan.poll()
    fan.change("insert into lake.t values (1, 'x', 1), (2, null, 2), (3, 'a', 3), (4, '', 4)")
    fan.poll()
    fan.poll()
    assert [(r.unrouted, r.nulls) for r in fan.reports[1:]] == [(2, 1), (0, 0)]


def test_what_a_cycle_did_is_counted_as_it_was(fan: Fan) -> None:
    """P-F17: rows deleted, upserted, replaced, overridden and not found, including rows that came and went within the cycle."""

    def counted(*statements: str) -> dict[str, int]:
        return {kind: count for kind, count in same_after(fan, *statements)[0].rows.items() if count}

    same_after(fan, "insert into lake.t select i, 'a', i from range(6) r(i)")
    assert counted("insert into lake.t values (10, 'a', 1)") == {"upserted": 1}
    assert counted("update lake.t set v = 2 where id = 10") == {"upserted": 1, "matched": 1}
    born = "insert into lake.t values (11, 'a', 1)", "update lake.t set v = 2 where id = 11"
    assert counted(*born, "delete from lake.t where id = 0") == {"upserted": 1, "deleted": 1, "conflicts": 1}
    before = fan.look("one", f"select rows_replicated, last_change_at from lake.{STATE.schema}.{STATE.name}")
    assert counted("insert into lake.t values (12, 'a', 1)", "delete from lake.t where id = 12") == {
        "conflicts": 1
    }
    after = fan.look("one", f"select rows_replicated, last_change_at from lake.{STATE.schema}.{STATE.name}")
    assert after == before, "P-F18: nothing changed there"
    many = "insert into lake.t select i, 'a', i from range(100, 150) r(i)"
    flush = "call ducklake_flush_inlined_data('lake')"
    assert counted(many, flush, "delete from lake.t where id = 1") == {"upserted": 50, "deleted": 1}
    with connect(fan.place("one")) as con:
        con.execute("delete from lake.t where id = 2")
    assert counted("delete from lake.t where id in (2, 3)") == {"deleted": 1, "orphans": 1}


@pytest.mark.parametrize(
    ("kind", "value", "literal"),
    [
        ("varchar", "it's", "'it''s'"),
        ("integer", "007", "7"),
        ("double", "1.50", "1.5"),
        ("boolean", "TRUE", "true"),
        ("date", "2026-02-03", "date '2026-02-03'"),
        ("decimal(10,3)", "2.5", "2.500"),
        ("timestamp", "2026-02-03 04:05:06", "timestamp '2026-02-03 04:05:06'"),
        ("uuid", "A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11", "uuid 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'"),
    ],
)
def test_routing_by_every_kind_of_column(tmp_path: Path, kind: str, value: str, literal: str) -> None:
    """P-F08: values of the file are compared as values of the column's type."""
    fan = Fan(tmp_path, {"one": value})
    fan.change(
        f"create table lake.t (id int, c {kind})", f"insert into lake.t values (1, {literal}), (2, null)"
    )
    fan.poll()
    fan.change(f"insert into lake.t values (3, {literal})")
    fan.poll()
    assert [row[0] for row in fan.rows("one")] == [1, 3]
    fan.close()


def test_a_value_that_is_none_of_the_type_is_a_named_error(tmp_path: Path) -> None:
    """P-F08: the same for two texts that are one value of the type; the message has no cell values."""
    for values, named in (({"one": "seven"}, "one"), ({"one": "7", "two": "07"}, "one and two")):
        fan = Fan(tmp_path / named, values)
        (tmp_path / named).mkdir()
        fan.change("create table lake.t (id int, c int)")
        with pytest.raises(RoutingError, match=named):
            fan.poll()
        fan.close()


def test_a_missing_column_stops_with_a_clear_error(fan: Fan) -> None:
    """P-F08: the routing field, or a key column, that the source does not have is named."""
    fan.routing_field = "company"
    with pytest.raises(RoutingError, match=r"routing\.field.*company"):
        fan.seed("one", at=1)
    fan.routing_field, fan.keys = "c", ("event_id",)
    with pytest.raises(RoutingError, match="event_id"):
        fan.seed("one", at=1)


def test_a_missing_table_is_a_named_error(tmp_path: Path) -> None:
    """The message names the table; nothing is created in its place."""
    fan = Fan(tmp_path, {"one": "a"})
    fan.change("create table lake.other (id int)")
    with pytest.raises(LakeTableMissingError):
        fan.poll()
    fan.close()


@pytest.mark.parametrize("name", ["snapshot_id", "RowID", "change_type"])
def test_reserved_columns_are_refused(tmp_path: Path, name: str) -> None:
    """P-F15: DuckLake's change feed would show the user's values as its own; refused by name."""
    fan = Fan(tmp_path, {"one": "a"})
    fan.change(f"create table lake.t (id int, c varchar, {name} int)")
    with pytest.raises(ReservedColumnError, match=name):
        fan.poll()
    fan.close()


@pytest.mark.parametrize("name", ["rowid", pytest.param("snapshot_id", marks=pytest.mark.slow)])
def test_what_was_changed_under_a_reserved_name_is_not_read(fan: Fan, name: str) -> None:
    """P-F15: renaming the column, as the error says, leaves changes that the feed reports wrongly; they lead to a new seed."""
    same_after(fan, "insert into lake.t values (1, 'a', 1)")
    fan.change(f"alter table lake.t add column {name} int")
    with pytest.raises(ReservedColumnError, match=name):
        fan.poll()
    fan.change("insert into lake.t values (2, 'a', 1, 7), (3, 'a', 1, 7), (4, 'b', 1, 8)")
    fan.change("update lake.t set c = 'b' where id = 2", f"alter table lake.t rename column {name} to x")
    assert all(a.seeded for a in same_after(fan))
    assert not any(a.seeded for a in same_after(fan, "update lake.t set x = 9 where id = 3"))


@pytest.mark.parametrize("inline", [0, pytest.param(100, marks=pytest.mark.slow)])
def test_columns_that_hide_where_rows_are_change_nothing(tmp_path: Path, inline: int) -> None:
    """P-F15: `filename` and `file_row_number` are the user's; updates, moves and what a transaction wrote and removed arrive."""
    fan = Fan(tmp_path, {"one": "a", "two": "b"}, inline=inline)
    fan.change("create table lake.t (id int, c varchar, v int, filename varchar, file_row_number int)")
    fan.change("insert into lake.t select i, 'a', i, 'x.parquet', 0 from range(6) r(i)")
    fan.poll()
    same_after(fan, "update lake.t set v = 9 where id < 3", "update lake.t set c = 'b' where id = 1")
    same_after(fan, "delete from lake.t where id = 2", "update lake.t set id = 20 where id = 3")
    same_after(
        fan,
        "begin; update lake.t set v = -1; update lake.t set v = -2 where id = 4;"
        "insert into lake.t values (30, 'a', 1, 'x.parquet', 0), (31, 'b', 1, 'x.parquet', 0);"
        "delete from lake.t where id = 30; commit",
    )
    assert {row[0]: row[2] for row in fan.rows("one")} == {0: -1, 4: -2, 5: -1, 20: -1}
    fan.close()


def test_expired_lake_snapshots_lead_to_a_reseed(fan: Fan) -> None:
    """P-F16: lake snapshots that expired unread are no silent gap."""
    same_after(fan, "insert into lake.t values (1, 'a', 1), (2, 'b', 1), (3, 'a', 3)")
    fan.change("delete from lake.t where id = 1", "insert into lake.t values (4, 'a', 4)")
    fan.change("call ducklake_expire_snapshots('lake', older_than => now())")
    with fan.pool.use(fan.place("source"), read_only=True) as lake:
        source = SourceLake(lake, T)
        with pytest.raises(SourceExpiredError):
            source.plan("c", ["id"], fan.cursor("one") or 0, source.latest())
        assert source.readable_from(source.latest()) == source.latest()
    done = fan.poll()
    assert all(a.seeded for a in done)
    assert fan.differing() == {}


def test_one_failing_destination_leaves_the_others_alone(fan: Fan) -> None:
    """P-F09: the error is its own, without secrets; later it catches up from its own cursor."""
    fan.poll()
    good = fan.place("two")
    fan.places["two"] = LakePlace(
        catalog="postgres:host=127.0.0.1 port=1 dbname=x user=u password=geheim", data_path=good.data_path
    )
    stale = {"one": fan.cursor("one"), "two": fan.cursor("one")}
    fan.cursor = lambda destination: stale[destination]  # type: ignore[method-assign]
    fan.change("insert into lake.t values (1, 'a', 1), (2, 'b', 2)")
    one, two = sorted(fan.poll(), key=lambda a: a.id)
    assert (one.error, one.cursor) == (None, fan.latest())
    assert two.cursor == stale["two"]
    assert two.error is not None
    assert two.error.startswith("[lake.catalog]")
    assert "geheim" not in two.error
    del fan.cursor
    fan.places["two"] = good
    same_after(fan, "insert into lake.t values (3, 'a', 1)")


def test_a_destination_that_holds_other_rows_keeps_them(fan: Fan) -> None:
    """A seed replaces the rows of its own routing value; rows that another user put into the table stay."""
    with connect(fan.place("one"), "data_inlining_row_limit 0") as con:
        con.execute("create table lake.t (id int, c varchar, v int)")
        con.execute("insert into lake.t values (1, 'a', 999), (100, 'mine', 1)")
    fan.change("insert into lake.t values (1, 'a', 1)")
    fan.poll()
    assert fan.rows("one") == [(1, "a", 1), (100, "mine", 1)]


def test_a_seed_reads_its_pinned_lake_snapshot(fan: Fan) -> None:
    """P-F10: rows that come while a seed runs are not in it, and come once with the next cycle."""
    fan.change("insert into lake.t values (1, 'a', 1)")
    pinned = fan.latest()
    fan.change("insert into lake.t values (2, 'a', 2)", "delete from lake.t where id = 1")
    fan.seed("one", at=pinned)
    assert fan.rows("one") == [(1, "a", 1)]
    fan.poll()
    assert fan.differing() == {}


def test_values_of_every_type_arrive_unchanged(tmp_path: Path) -> None:
    """P-F06: types that neither Spark nor plain Arrow knows, NULLs, infinities and nesting; by seed and by change."""
    fan = Fan(tmp_path, {"one": "a"}, inline=0)
    columns = {
        "h": ("hugeint", "-12345"), "u": ("uuid", "uuid()"),
        "d": ("decimal(38,10)", "12345678901234567890.0123456789"), "b": ("blob", "'\\x00\\xff'::blob"),
        "t": ("time", "time '23:59:59.999999'"), "z": ("timestamptz", "timestamptz '2026-01-01 00:00:00.000001+02'"),
        "f": ("double", "'nan'::double"), "g": ("float", "'-inf'::float"), "i": ("interval", "interval '1 month 2 days'"),
        "s": ("struct(a int, b varchar[])", "{'a': 1, 'b': ['x', null, '']}"), "n": ("timestamp_ns", "'2026-01-01 00:00:00.123456789'"),
        "m": ("map(varchar, int)", "map {'k': 1}"), "j": ("json", "'{\"a\": [1, null]}'"), "x": ("ubigint", "18446744073709551615"),
        "y": ("date", "'infinity'::date"), "l": ("int[][]", "[[1], [], null]"),
    }  # fmt: skip
    declared = ", ".join(f"{name} {kind}" for name, (kind, _) in columns.items())
    values = ", ".join(value for _, value in columns.values())
    nulls = ", ".join("null" for _ in columns)
    fan.change(
        f"create table lake.t (id int, c varchar, {declared})", f"insert into lake.t select 1, 'a', {values}"
    )
    fan.poll()
    fan.change(f"insert into lake.t select 2, 'a', {values}", f"insert into lake.t select 3, 'a', {nulls}")
    fan.change("update lake.t set i = interval '3 hours' where id = 1")
    fan.poll()
    texts = ", ".join(f"{name}::varchar" for name in columns)
    query = f"select id, {texts} from lake.t order by id"
    assert fan.look("one", query) == fan.source.execute(query).fetchall()
    assert fan.look("one", "select column_name, column_type from (describe lake.t)") == (
        fan.source.execute("select column_name, column_type from (describe lake.t)").fetchall()
    )
    fan.close()


HOLD = """
import sys, time
from tests.fanout_lakes import connect
from aqueduck.config.lake_place import LakePlace
con = connect(LakePlace(catalog=sys.argv[1], data_path=sys.argv[2]), "data_inlining_row_limit 5")
con.execute("insert into lake.t values (50, 'a', 50)")
print("held", flush=True)
time.sleep(2)
"""


@pytest.mark.slow
def test_duckdb_files_as_catalogs_are_taken_turns_with(tmp_path: Path) -> None:
    """Source and destinations with DuckDB files: they are let go after each use, and waited for while others write."""
    places = {
        name: LakePlace(catalog=f"{tmp_path}/{name}.ducklake", data_path=f"{tmp_path}/{name}/")
        for name in ("source", "one", "two")
    }
    fan = Fan(tmp_path, {"one": "a", "two": "b"}, places=places)

    def change(*statements: str) -> None:
        with connect(places["source"], "data_inlining_row_limit 5") as con:
            for statement in statements:
                con.execute(statement)

    change(TABLE, "insert into lake.t select i, (['a','b','x'])[1 + i % 3], i from range(30) r(i)")
    fan.poll()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", HOLD, places["source"].catalog, places["source"].data_path]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert [a.error for a in fan.poll()] == [None, None]
        assert holder.wait(60) == 0
    for name, value in fan.values.items():
        with connect(places["source"]) as con:
            expected = con.execute(f"from lake.t where c = '{value}' order by id").fetchall()
        assert sorted(fan.rows(name)) == expected
    assert (50, "a", 50) in fan.rows("one")
    fan.close()


def test_the_pool_keeps_the_recently_used(tmp_path: Path) -> None:
    """P-F11: lazily opened, at most `max_open`, the least recently used goes first, a failed one at once."""
    pool = LakePool(max_open=2)
    places = [LakePlace(catalog=f"sqlite:{tmp_path}/{i}.db", data_path=f"{tmp_path}/{i}/") for i in range(3)]

    def touch(*numbers: int) -> None:
        for number in numbers:
            with pool.use(places[number]) as lake:
                lake.execute("select 1")

    assert (pool.open, pool.created) == (0, 0)
    touch(0, 1, 0, 1)
    assert (pool.open, pool.created, pool.evicted) == (2, 2, 0)
    touch(0, 2, 0)
    assert (pool.open, pool.created, pool.evicted) == (2, 3, 1)
    with pytest.raises(LakeWriteError), pool.use(places[0]) as lake:
        lake.execute("select nothing")
    assert pool.open == 1
    pool.close()


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("inserted_into_table:1", [(5, 5, False)]),
        ("inlined_insert:1,inlined_delete:1", [(5, 5, True)]),
        ("inserted_into_table:12", []),
        ("rewrite_delete:1", []),
        ("inlined_insert:1,inline_flush:1", [(5, 5, False)]),
        ('created_table:"main"."x,rewrite_delete:1",inlined_insert:1', [(5, 5, False)]),
        ('created_table:"main"."a"",inserted_into_table:1"', []),
    ],
)
def test_what_a_lake_snapshot_did_is_read_with_its_quotes(
    text: str, runs: list[tuple[int, int, bool]]
) -> None:
    """P-F06: a table whose name looks like a kind of change is read as a name; compactions are skipped."""
    assert [(r.first, r.last, r.removes) for r in readable_ranges([(5, text)], 1)] == runs


def test_a_compaction_ends_a_run() -> None:
    """A range is never read across a rewrite of files."""
    changes = [
        (3, "inserted_into_table:1"),
        (4, "inlined_insert:1"),
        (5, "rewrite_delete:1"),
        (6, "inlined_delete:1"),
    ]
    assert [(r.first, r.last) for r in readable_ranges(changes, 1)] == [(3, 4), (6, 6)]


def test_a_split_plan_reads_every_lake_snapshot_once(fan: Fan) -> None:
    """Parts for several tasks cover the range without overlap."""
    for number in range(7):
        fan.change(f"insert into lake.t values ({number}, 'a', 1)")
    with fan.pool.use(fan.place("source"), read_only=True) as lake:
        plan = SourceLake(lake, T).plan("c", ["id"], 1, fan.latest())
    for parts in (1, 2, 3, 20):
        pieces = split_plan(plan, parts)
        covered = [s for p in pieces for r in p.reads for s in range(r.span.first, r.span.last + 1)]
        assert sorted(covered) == list(range(2, fan.latest() + 1))
        assert len(pieces) == min(parts, 7)


def test_a_range_in_which_columns_changed_can_be_split(fan: Fan) -> None:
    """P-F16: each task uses the names of its own range; together they read what a single task reads."""
    for number, change in enumerate(
        [
            "add column w int default 5",
            "rename column v to n",
            "alter n set data type bigint",
            "drop column w",
        ]
    ):
        fan.change(*(f"insert into lake.t (id, c) values ({number * 10 + i}, 'a')" for i in range(3)))
        fan.change("update lake.t set c = 'a' where id % 10 = 1", f"alter table lake.t {change}")
    fan.change("insert into lake.t values (100, 'a', 5000000000)")
    with fan.pool.use(fan.place("source"), read_only=True) as lake:
        plan = SourceLake(lake, T).plan("c", ["id"], 1, fan.latest())

    def read(parts: int) -> list[Any]:
        names = [read_routed(fan.pool, p, Routes(("a",), (1,), (0,)))[0] for p in split_plan(plan, parts)]
        return sorted(row for n in names for row in fan.pool.con.execute(f"from {n}").fetchall())

    assert len(read(1)) == 3 * 4 + 2 * (1 + 2 + 3 + 4) + 1
    assert read(4) == read(20) == read(1)


@pytest.mark.parametrize(
    ("rows", "destinations"),
    [(50_000, 1_000), pytest.param(1_000_000, 10_000, marks=pytest.mark.slow)],
)
def test_a_split_takes_seconds(rows: int, destinations: int) -> None:
    """P-F19: a million rows for ten thousand destinations are read, routed and cut apart in seconds."""
    seconds = split_seconds(rows, destinations)
    assert seconds < 20, f"{seconds:.1f} s"


def test_swapped_names_need_a_new_table() -> None:
    """Renames that collide are not guessed at: the destination is seeded again."""
    a, b = SourceColumn(1, "a", "INTEGER"), SourceColumn(2, "b", "INTEGER")
    assert evolution([a, b], [SourceColumn(1, "b", "INTEGER"), SourceColumn(2, "a", "INTEGER")]) is None
    assert evolution([a], [a, b]) is not None
    assert evolution([a], [SourceColumn(3, "a", "INTEGER")]) is None


def test_three_quick_tries_then_longer_rests() -> None:
    """P-F09: 1 s, 2 s, then half a minute that doubles up to half an hour."""
    assert [backoff_seconds(n) for n in (1, 2, 3, 4, 20)] == [1, 2, 30, 60, 1800]
