"""JSON of change events against a real server: every type, every kind of change, every envelope."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from aqueduck.envelopes.json_events import EventLines
from aqueduck.model.errors import EventValueError
from aqueduck.model.schema import Column, TableSchema, parse_lsn
from aqueduck.postgres.decode.layouts import segment_schema
from tests.fix_events import Watched
from tests.fix_postgres import Database

Watch = Callable[..., Watched]

# type, an SQL literal, and the JSON value that it has to become
VALUES: list[tuple[str, str, Any]] = [
    ("boolean", "'t'", True),
    ("boolean", "'f'", False),
    ("smallint", "'-32768'", -32768),
    ("int", "'2147483647'", 2147483647),
    ("bigint", "'-9223372036854775808'", -9223372036854775808),
    ("real", "'1.5'", 1.5),
    ("real", "'1e30'", 1e30),
    ("double precision", "'-0'", -0.0),
    ("double precision", "'1e-300'", 1e-300),
    ("double precision", "'12345678901234567890'", 12345678901234567890.0),
    ("double precision", "'NaN'", "NaN"),
    ("double precision", "'Infinity'", "Infinity"),
    ("real", "'-Infinity'", "-Infinity"),
    ("numeric", "'123456789012345678901234567890.1234500'", "123456789012345678901234567890.1234500"),
    ("numeric(10,2)", "'-0.50'", "-0.50"),
    ("numeric", "'NaN'", "NaN"),
    ("numeric", "'-Infinity'", "-Infinity"),
    ("text", "''", ""),
    ("text", "E'q\"uote \\\\ back\\nnew\\ttab\\r\\b\\f\\x01\\x1f\\x7f / 🦆 ü \\u2028'", 'q"uote \\ back\nnew\ttab\r\b\f\x01\x1f\x7f / 🦆 ü \u2028'),  # noqa: E501
    ("varchar(5)", "'abc'", "abc"),
    ("char(5)", "'ab'", "ab   "),
    ("name", "'n'", "n"),
    ("\"char\"", "'x'", "x"),
    ("bytea", "'\\x'", ""),
    ("bytea", "'\\x00ff27'", base64.b64encode(b"\x00\xff\x27").decode()),
    ("bytea", "'\\x61'", "YQ=="),
    ("bytea", "'\\x6161'", "YWE="),
    ("json", "E'{\"b\" : [1,\\n 2.50, null], \"a\":\"x\\\\ny\", \"a\": 1}'", {"b": [1, 2.5, None], "a": 1}),
    ("json", "'\"a {[ \\\" b\"'", 'a {[ " b'),
    ("json", "'3'", 3),
    ("jsonb", "'{\"k\": {\"n\": 1e3}}'", {"k": {"n": 1000}}),
    ("jsonb", "'null'", None),
    ("uuid", "'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
    ("date", "'2024-02-29'", "2024-02-29"),
    ("date", "'infinity'", "infinity"),
    ("date", "'0044-03-15 BC'", "0044-03-15 BC"),
    ("time", "'24:00:00'", "24:00:00"),
    ("timetz", "'12:00:00+05:30'", "12:00:00+05:30"),
    ("timestamp", "'2024-02-29 12:34:56.789'", "2024-02-29 12:34:56.789"),
    ("timestamptz", "'2024-02-29 12:34:56.789+05'", "2024-02-29 07:34:56.789+00"),
    ("interval", "'1 year 2 days 3:04:05'", "1 year 2 days 03:04:05"),
    ("money", "'12.50'", "$12.50"),
    ("inet", "'::1'", "::1"),
    ("bit(4)", "'0101'", "0101"),
    ("point", "'(1,2)'", "(1,2)"),
    ("int4range", "'[1,5)'", "[1,5)"),
    ("mood", "'ok \"so\"'", 'ok "so"'),
    ("pair", "'(1,\"a b\")'", '(1,"a b")'),
    ("positive", "'7'", "7"),  # a domain, by its own name
    ("int[]", "'{1,NULL,-3}'", [1, None, -3]),
    ("int[]", "'{}'", []),
    ("int[]", "'[2:4]={1,2,3}'", [1, 2, 3]),
    ("int[]", "'{{1,2},{3,4}}'", "{{1,2},{3,4}}"),
    ("bigint[]", "'{9223372036854775807}'", [9223372036854775807]),
    ("boolean[]", "'{t,f,NULL}'", [True, False, None]),
    ("float8[]", "'{1.5,NaN,-Infinity}'", [1.5, "NaN", "-Infinity"]),
    ("numeric[]", "'{1.50,NULL,NaN}'", ["1.50", None, "NaN"]),
    ("text[]", "array['a', null, 'NULL', '', 'with \"q\", {b} and \\ x', 'ü🦆', E'l\\nb']", ["a", None, "NULL", "", 'with "q", {b} and \\ x', "ü🦆", "l\nb"]),  # noqa: E501
    ("text[]", "array[['a','b']]", "{{a,b}}"),
    ("varchar(3)[]", "array['abc']", ["abc"]),
    ("bytea[]", "array['\\x00ff27'::bytea, null]", ["AP8n", None]),
    ("json[]", "array['{\"a\": [1, \"x,y\"]}'::json, 'null']", [{"a": [1, "x,y"]}, None]),
    ("jsonb[]", "array['[1]'::jsonb]", [[1]]),
    ("uuid[]", "array['a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'::uuid]", ["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"]),
    ("date[]", "array['2024-02-29'::date, null]", ["2024-02-29", None]),
    ("timestamptz[]", "array['2024-02-29 00:00+00'::timestamptz]", ["2024-02-29 00:00:00+00"]),
    ("mood[]", "array['ok \"so\"'::mood]", '{"ok \\"so\\""}'),
    ("box[]", "array['(1,1),(0,0)'::box]", "{(1,1),(0,0)}"),
]  # fmt: skip

SETUP = """
create type mood as enum ('sad', 'ok "so"');
create type pair as (a int, b text);
create domain positive as int check (value > 0);
"""


def test_every_type_has_its_json(any_db: Database, watch: Watch) -> None:
    """P-E, JSON values: one column a type, through real pgoutput; NULL is null in all of them."""
    any_db.execute(SETUP)
    columns = ", ".join(f"c{i} {kind}" for i, (kind, _, _) in enumerate(VALUES))
    any_db.execute(f"create table kinds (id int primary key, {columns})")
    watched = watch(any_db)
    any_db.execute(f"insert into kinds values (1, {', '.join(literal for _, literal, _ in VALUES)})")
    any_db.execute("insert into kinds values (2)")
    first, second = watched.events()
    for i, (kind, literal, wanted) in enumerate(VALUES):
        found = first["after"][f"c{i}"]
        kinds = {type(found), type(wanted)}  # -0 and 0 are both numbers
        assert found == wanted, f"{kind} {literal}"
        assert len(kinds) == 1 or kinds == {int, float}, f"{kind} {literal}"
    assert set(second["after"].values()) == {2, None}


def test_every_kind_of_change_has_its_event(any_db: Database, watch: Watch) -> None:
    """P-E event shape: images by replica identity, the commit's LSN and time, truncates one a relation."""
    any_db.execute(
        """
        create table plain (id int primary key, v text);
        create table "Full 'one'" (id int primary key, v text);
        alter table "Full 'one'" replica identity full;
        """
    )
    watched = watch(any_db)
    full = "\"Full 'one'\""
    with any_db.connect() as conn, conn.transaction():
        conn.execute("insert into plain values (1, 'a'), (2, null)")
        conn.execute(f"insert into {full} values (1, 'a')")
        conn.execute("update plain set v = 'b' where id = 1")
        conn.execute(f"update {full} set v = 'b'")
        conn.execute("update plain set id = 3 where id = 2")
        conn.execute("delete from plain where id = 1")
        conn.execute(f"delete from {full}")
        conn.execute(f"truncate plain, {full}")
        conn.execute("insert into plain values (9, 'after')")
    now = any_db.value("select (extract(epoch from clock_timestamp()) * 1000)::float8")
    full = "Full 'one'"
    events = watched.events()
    assert [(e["op"], e["table"], e["before"], e["after"]) for e in events] == [
        ("insert", "plain", None, {"id": 1, "v": "a"}),
        ("insert", "plain", None, {"id": 2, "v": None}),
        ("insert", full, None, {"id": 1, "v": "a"}),
        ("update", "plain", None, {"id": 1, "v": "b"}),
        ("update", full, {"id": 1, "v": "a"}, {"id": 1, "v": "b"}),
        ("update", "plain", None, {"id": 3, "v": None}),
        ("delete", "plain", {"id": 1}, None),
        ("delete", full, {"id": 1, "v": "b"}, None),
        *(("truncate", t, None, None) for t in _truncated(events)),
        ("insert", "plain", None, {"id": 9, "v": "after"}),
    ]
    assert sorted(_truncated(events)) == [full, "plain"]
    assert {e["schema"] for e in events} == {"public"}
    assert len({(e["lsn"], e["ts_ms"]) for e in events}) == 1
    assert list(events[0]) == ["op", "schema", "table", "lsn", "ts_ms", "before", "after"]
    assert abs(events[0]["ts_ms"] - now) < 60_000
    assert parse_lsn(events[0]["lsn"]) < parse_lsn(any_db.value("select pg_current_wal_insert_lsn()::text"))


def _truncated(events: list[dict[str, Any]]) -> list[str]:
    return [e["table"] for e in events if e["op"] == "truncate"]


def test_unchanged_toast_is_left_out_and_named(db: Database, watch: Watch) -> None:
    """P-E: a value that was not sent is never shown as null; with a full identity it is taken from the old row."""
    for name in ("d", "f"):
        db.execute(f'create table {name} (id int primary key, doc text, "big ""one""" text, n int)')
        db.execute(
            f'alter table {name} alter doc set storage external, alter "big ""one""" set storage external'
        )
        db.execute(f"insert into {name} values (1, repeat('x', 9000), repeat('y', 9000), 1)")
    db.execute("alter table f replica identity full")
    watched = watch(db)
    db.execute("update d set n = 2; update f set n = 2; update d set doc = 'short', n = null")
    first, full, last = watched.events()
    assert first["after"] == {"id": 1, "n": 2, "__unchanged_toast__": ["doc", 'big "one"']}
    assert full["after"] == {"id": 1, "doc": "x" * 9000, 'big "one"': "y" * 9000, "n": 2}
    assert full["before"]["doc"] == "x" * 9000
    assert last["after"] == {"id": 1, "doc": "short", "n": None, "__unchanged_toast__": ['big "one"']}


def test_the_flat_envelope(db: Database, watch: Watch) -> None:
    """P-E second shape: the columns beside the table and the operation; a delete has the key."""
    db.execute("create table orders (id int primary key, v text)")
    watched = watch(db)
    db.execute(
        "insert into orders values (1, 'a'); update orders set v = null; delete from orders; truncate orders"
    )
    assert watched.events("flat") == [
        {"event_type": "orders.INSERT", "_table": "orders", "_op": "INSERT", "id": 1, "v": "a"},
        {"event_type": "orders.UPDATE", "_table": "orders", "_op": "UPDATE", "id": 1, "v": None},
        {"event_type": "orders.DELETE", "_table": "orders", "_op": "DELETE", "id": 1},
        {"event_type": "orders.TRUNCATE", "_table": "orders", "_op": "TRUNCATE"},
    ]


def test_the_debezium_envelope(db: Database, watch: Watch) -> None:
    """P-E third shape: before, after, source, op and ts_ms as existing consumers read them."""
    db.execute("create table orders (id int primary key, v text); alter table orders replica identity full")
    watched = watch(db)
    db.execute("insert into orders values (1, 'a')")
    db.execute("update orders set v = 'b'; delete from orders; truncate orders")
    events = watched.events("debezium")
    assert [(e["op"], e["before"], e["after"]) for e in events] == [
        ("c", None, {"id": 1, "v": "a"}),
        ("u", {"id": 1, "v": "a"}, {"id": 1, "v": "b"}),
        ("d", {"id": 1, "v": "b"}, None),
        ("t", None, None),
    ]
    source = events[2]["source"]
    assert (source["connector"], source["db"], source["schema"], source["table"]) == (
        "postgresql", db.name, "public", "orders",
    )  # fmt: skip
    assert source["snapshot"] == "false"
    assert isinstance(source["lsn"], int)
    assert source["ts_ms"] == events[2]["ts_ms"] == source["ts_us"] // 1000
    assert [json.loads(e["source"]["sequence"])[1] for e in events] == ["0", "0", "1", "2"]
    assert events[0]["source"]["txId"] != source["txId"]


def test_events_keep_their_order_across_tables(db: Database, watch: Watch) -> None:
    """P-E01: transactions that jump between tables come out as they were written, however they were staged."""
    db.execute(
        "create table a (id int primary key, n int, v text); create table b (id int primary key, n int, v text)"
    )
    watched = watch(db, segment_bytes=64 << 10)
    db.execute(
        """
        do $$ begin
          for i in 1 .. 3000 loop
            if i % 3 = 0 then insert into a values (i, i, repeat('a', i % 97));
            else insert into b values (i, i, repeat('b', i % 89)); end if;
            if i % 500 = 0 then truncate a; end if;
            if i % 7 = 0 then commit; end if;
          end loop;
        end $$
        """
    )
    events = watched.events(piece_bytes=100_000)
    assert [e["after"]["n"] for e in events if e["op"] == "insert"] == list(range(1, 3001))
    places = [i for i, e in enumerate(events) if e["op"] == "truncate"]
    assert [events[i - 1]["after"]["n"] for i in places] == [500, 1000, 1500, 2000, 2500, 3000]
    lsns = [parse_lsn(e["lsn"]) for e in events]
    assert lsns == sorted(lsns)


def test_columns_that_change_on_the_way(db: Database, watch: Watch) -> None:
    """Rows before and after an ALTER TABLE carry the columns that they had; a new table is followed at once."""
    db.execute("create table t (id int primary key, v int)")
    watched = watch(db)
    with db.connect() as conn, conn.transaction():
        conn.execute("insert into t values (1, 1)")
        conn.execute("alter table t add w text; alter table t alter v type text")
        conn.execute("insert into t values (2, '2', 'w')")
        conn.execute("create table later (k int primary key)")
        conn.execute("insert into later values (5)")
        conn.execute("alter table t drop v")
        conn.execute("insert into t values (3, 'x')")
    assert [e["after"] for e in watched.events()] == [
        {"id": 1, "v": 1}, {"id": 2, "v": "2", "w": "w"}, {"k": 5}, {"id": 3, "w": "x"},
    ]  # fmt: skip


def test_a_table_without_columns_has_empty_images(db: Database, watch: Watch) -> None:
    """A row without columns is still an event."""
    db.execute("create table nothing ()")
    watched = watch(db)
    db.execute("insert into nothing default values")
    assert [e["after"] for e in watched.events()] == [{}]
    db.execute("insert into nothing default values")
    assert [e["event_type"] for e in watched.events("flat")] == ["nothing.INSERT"]


BAD_TEXTS = [
    (16, "x"), (16, "true"), (23, "1a"), (23, ""), (23, "-"), (701, "1."), (701, "0x1"), (1700, "1,5"), (17, "\\x0"),
    (17, "abc"), (17, "\\xzz"), (3802, '{"a": 1'), (114, '"open'), (114, ""), (1007, "1,2"), (1007, "{1,}"), (1007, "{1"),
    (1007, "{a}"), (1009, '{"open}'), (1000, "{x}"),
]  # fmt: skip


@pytest.mark.parametrize(("oid", "text"), BAD_TEXTS)
def test_bad_text_for_a_type_is_a_typed_error_without_the_value(oid: int, text: str) -> None:
    """P-E05: text that PostgreSQL never writes for a type is refused, and the error shows the column only."""
    table = TableSchema(1, "public", "t", (Column("the_column", oid, -1),), (), "d")
    values: dict[str, list[Any]] = {
        "_op": [1], "_ord": [0], "_lsn": [0], "_seq": [0], "_ts": [0], "_xid": [0], "_kc": [False], "_old": [0],
        "_unchanged": [None], "n0": [text],
    }  # fmt: skip
    batch = pa.RecordBatch.from_pydict(values, schema=segment_schema(table, ()))
    with pytest.raises(EventValueError, match="the_column") as error:
        list(EventLines(table, "default").lines(batch))
    assert len(text) < 2 or text not in str(error.value)
