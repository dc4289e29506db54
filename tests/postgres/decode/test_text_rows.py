"""Slots of test_decoding: every line becomes what pgoutput would have sent.  The server with the plugin is the machine's own."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from aqueduck.model.errors import ProtocolError
from aqueduck.model.schema import Column, TableName, TableSchema, parse_lsn
from aqueduck.postgres.decode import text_kernels as kernels
from aqueduck.postgres.decode.decoder import Commit, Decoder, Rows, Truncate
from aqueduck.postgres.decode.stream_tables import GivenTables
from aqueduck.postgres.decode.text_rows import TextRows
from tests.fix_events import Watched
from tests.fix_postgres import Database
from tests.postgres.capture.test_polling import change, make_tables

TEXT = {"capture": "poll", "plugin": "test_decoding"}

ODD = """
    create type "mood, ""odd"" [type]:" as enum ('so so', 'it''s [fine]: ''x''', 'null');
    create domain "amount of" as numeric(10, 2);
    create schema "a.b: c, d";
    create table "a.b: c, d"."T[1]: INSERT: x" (
        "id [int]:" int primary key, "order" text, "q""uote" "mood, ""odd"" [type]:", m "mood, ""odd"" [type]:"[], d "amount of",
        ts timestamp without time zone, tz timestamptz, iv interval, vc character varying(20)[], bits bit(5), vb bit varying,
        j jsonb, by bytea, f8 float8, num numeric, bo boolean, bodies boolean[], big bigint, c "char", u uuid, i inet, r int4range,
        gen int generated always as (big + 1) stored
    );
    create table "full" (a int, "b" text, gone int); alter table "full" replica identity full;
    create table parts (id int primary key, v text) partition by range (id);
    create table parts_1 partition of parts for values from (0) to (100);
    create table nokey (v text); alter table nokey replica identity nothing;
"""


@pytest.mark.slow
def test_odd_names_types_and_values_are_those_of_pgoutput(
    system_db: Database, watch: Callable[..., Watched]
) -> None:
    """P-E09: quotes, brackets and colons in names, types and values; arrays, old keys, nulls, no tuple at all, truncate."""
    db = system_db
    db.execute(ODD)
    streamed = watch(db, slot="streamed")
    texts = watch(db, slot="texts", settings=TEXT)
    t = '"a.b: c, d"."T[1]: INSERT: x"'
    db.execute(f"""
        insert into {t} values (1, E'line\\nbreak ''quoted'' \\\\ new-tuple: x[y]:z', 'it''s [fine]: ''x''',
            array['null', null]::"mood, ""odd"" [type]:"[], 1.5, '2020-01-01', '2020-01-01 12:00+05', '1 day',
            array['a,b', 'c"d', null, 'e''f'], '10101', '1',
            '{{"a": "it''s"}}', '\\x00ff',
            'NaN', 'NaN', true, array[true, null], 1 << 30, 'x', gen_random_uuid(), '::1', '[1,5)');
        insert into {t} ("id [int]:") values (2);
        update {t} set "order" = '' where "id [int]:" = 2;
        update {t} set "id [int]:" = 3, bo = false, f8 = '-Infinity' where "id [int]:" = 2;
        delete from {t} where "id [int]:" = 3;
        insert into "full" values (1, null, 5), (2, 'null', null); update "full" set b = 'true' where a = 1; delete from "full" where a = 2;
        insert into parts values (1, 'part'); update parts set v = v || '!'; delete from parts;
        insert into nokey values ('only inserts')
    """)
    db.execute('truncate "full", nokey')
    expected = positionless(streamed)
    assert len(expected) == 15
    assert positionless(texts) == expected  # before the catalog says something else
    db.execute('alter table "full" drop gone; alter table "full" add more int default 7')
    db.execute(
        """insert into "full" values (3, 'after'); select pg_logical_emit_message(true, 'x', 'table t: INSERT: ')"""
    )
    expected = positionless(streamed)
    assert len(expected) == 1
    assert positionless(texts) == expected


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 9))])
def test_random_histories_are_those_of_pgoutput(
    system_db: Database, watch: Callable[..., Watched], seed: int
) -> None:
    """P-E09, P-S12: event by event, including with large values that stay, and columns that come and go."""
    db = system_db
    make_tables(db)
    streamed = watch(db, slot="streamed")
    texts = watch(db, slot="texts", settings={**TEXT, "poll_step_bytes": 64 << 10})
    dice = random.Random(seed)
    counted = 0
    for n in range(60 if seed else 16):
        change(db, dice)
        if n % 4 == 3:
            expected = positionless(streamed)
            assert positionless(texts) == expected
            counted += len(expected)
    assert counted > 50


def positionless(watched: Watched) -> list[str]:
    """Lines of events, which transactions they are of instead of where those are: test_decoding tells where commits end."""
    texts = watched.texts()
    lsns = [re.findall('"lsn":"([^"]*)"', text)[0] for text in texts]
    assert lsns == sorted(lsns, key=parse_lsn)
    numbers = {lsn: str(n) for n, lsn in enumerate(dict.fromkeys(lsns))}
    return [text.replace(lsn, numbers[lsn], 1) for text, lsn in zip(texts, lsns, strict=True)]


TABLE = TableSchema(
    7, "public", "t", (Column("id", 23, -1), Column("order", 25, -1), Column("doc", 25, -1)), ("id", "order"), "d"
)  # fmt: skip


def rows_of(lines: list[str], first: int = 100) -> np.ndarray:
    """What COPY sends of such lines."""
    raw = b""
    for n, line in enumerate(lines):
        data = line.encode()
        row = (
            b"\0\2"
            + (8).to_bytes(4, "big")
            + (first + n).to_bytes(8, "big")
            + len(data).to_bytes(4, "big")
            + data
        )
        head = b"PGCOPY\n\xff\r\n\0" + bytes(8) if n == 0 else b""
        raw += b"d" + (len(head + row) + 4).to_bytes(4, "big") + head + row
    return np.frombuffer(raw + b"d" + (6).to_bytes(4, "big") + b"\xff\xff", np.uint8)


def test_lines_become_messages_that_the_decoder_reads(tmp_path: object) -> None:
    """Positions, numbers and times of transactions, quoted keywords, old keys, values that stay, a truncate first."""

    def published(name: TableName) -> tuple[TableSchema, bool] | None:
        return (TABLE, True) if name == TableName("public", "t") else None

    rows = TextRows(0, published, tmp_path)  # type: ignore[arg-type]
    rows.begin({}, 0)
    raw = rows_of(
        [
            "BEGIN 7",
            "table public.t, public.other: TRUNCATE: restart_seqs",
            "COMMIT 7 (at 2000-01-01 00:00:01+00)",
            "BEGIN 8",
            "table public.t: DELETE: id[integer]:1 \"order\"[text]:'it''s'",
            "table public.other: INSERT: x[integer]:1",
            "table public.t: DELETE: (no-tuple-data)",
            "table public.t: INSERT: id[integer]:2 \"order\"[text]:'' doc[text]:null",
            "table public.t: UPDATE: old-key: id[integer]:2 \"order\"[text]:'' new-tuple:"
            " id[integer]:3 \"order\"[text]:'x' doc[text]:unchanged-toast-datum",
            "message: transactional: 1 prefix: x, sz: 1 content:y",
            "COMMIT 8 (at 2024-02-29 23:59:59.5+00)",
        ]
    )
    used, found, other = rows.convert(raw, 0, raw.size)
    assert (used, found, other) == (raw.size, [], False)
    stream = np.concatenate(list(rows.end(1000)))
    assert rows.position == 1000
    runs = Decoder(GivenTables({7: TABLE})).decode(stream.copy(), stream.size)[0]
    batches = [run.batch for run in runs if isinstance(run, Rows)]
    got = [
        row
        for batch in batches
        for row in batch.select(["_op", "_lsn", "_xid", "n0", "n1", "n2", "o0", "o1"]).to_pylist()
    ]
    assert [tuple(row.values()) for row in got] == [
        (3, 109, 8, None, None, None, "1", "it's"),
        (1, 109, 8, "2", "", None, None, None),
        (2, 109, 8, "3", "x", None, "2", ""),
    ]
    [truncate] = [run for run in runs if isinstance(run, Truncate)]
    assert (truncate.lsn, truncate.xid, truncate.time_us) == (101, 7, 946_684_801_000_000)
    last = runs[-1]
    assert isinstance(last, Commit)
    assert (last.position, last.time_us) == (110, 1_709_251_199_500_000)


def test_the_parts_of_lines_are_found_whatever_they_hold() -> None:
    """Names and types with quotes, brackets and colons end where the server ends them."""
    line = b'table "a: b"."c, d": INSERT: "x [y]:""z"["my ""type""[]"[]]:\'[1]:\'\'\' plain[character varying[]]:null'
    name, types, columns = kernels.parse_line(line)
    assert name == b'"a: b"."c, d"'
    assert columns == ['x [y]:"z', "plain"]
    assert types
    assert kernels.parse_truncate(b'table "a, b".c, d."e: f": TRUNCATE: (no-flags)') == [
        b'"a, b".c',
        b'd."e: f"',
    ]


def test_tables_are_distinguished_by_every_byte(tmp_path: Path) -> None:
    """The attack: tables were distinguished by a hash of 64 bits, for which a collision is found within seconds."""
    names = ["t1", "t2", '"T1"', '"t1 "']
    oids = {name.strip('"'): oid for oid, name in enumerate(names, 1)}

    def published(name: TableName) -> tuple[TableSchema, bool]:
        column = Column("id", 23, -1)
        return TableSchema(oids[name.name], "public", name.name, (column,), ("id",), "d"), True

    rows = TextRows(0, published, tmp_path)
    rows.begin({}, 0)
    lines = [f"table public.{name}: INSERT: id[integer]:1" for name in names * 2]
    raw = rows_of(["BEGIN 1", *lines, "COMMIT 1 (at 2000-01-01 00:00:01+00)"])
    rows.convert(raw, 0, raw.size)
    inserts = [frame for frame in single_frames(rows) if frame[30] == ord("I")]
    assert [int.from_bytes(frame[31:35], "big") for frame in inserts] == [1, 2, 3, 4] * 2


def single_frames(rows: TextRows) -> Iterator[bytes]:
    """The messages of a step, one by one."""
    for piece in rows.end(1 << 40):
        data, at = piece.tobytes(), 0
        while at < len(data):
            size = 1 + int.from_bytes(data[at + 1 : at + 5], "big")
            yield data[at : at + size]
            at += size


LINES = [
    "BEGIN 7",
    "table public.t, public.other: TRUNCATE: restart_seqs",
    "table public.t: DELETE: id[integer]:1 \"order\"[text]:'it''s'",
    "table public.other: INSERT: x[integer]:1",
    "table public.t: DELETE: (no-tuple-data)",
    "table public.t: INSERT: id[integer]:2 \"order\"[text]:'' doc[text]:null",
    "table public.t: UPDATE: old-key: id[integer]:2 \"order\"[text]:'' new-tuple:"
    " id[integer]:3 \"order\"[text]:'x' doc[text]:unchanged-toast-datum",
    "message: transactional: 1 prefix: x, sz: 1 content:y",
    "COMMIT 7 (at 2024-02-29 23:59:59.5+00)",
    "BEGIN 8",
    "table public.t: INSERT: id[integer]:4 \"order\"[text]:'a' doc[text]:'b'",
    "COMMIT 8 (at 2024-02-29 23:59:59.5+00)",
]


def read_mutated(seed: int, count: int) -> int:
    """Read that many steps with random mistakes; how many of them were refused."""
    dice, refused = random.Random(seed), 0
    valid = rows_of(LINES).tobytes()
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(count):
            data = bytearray(valid)
            for _ in range(dice.choice((1, 1, 2, 8))):
                at = dice.randrange(len(data))
                match dice.randrange(4):
                    case 0:
                        data[at] = dice.randrange(256)
                    case 1:
                        data[at] = dice.choice(b"\"'[]:, \0\xffTBCIUDn(")
                    case 2:
                        del data[at + 30 : at + 30 + dice.randrange(1, 20)]
                    case _:
                        data = data[: max(at, 30)]
            rows = TextRows(0, lambda name: (TABLE, True) if name.name == "t" else None, Path(directory))
            rows.begin({}, 0)
            raw = np.frombuffer(bytes(data), np.uint8)
            try:
                rows.convert(raw, 0, raw.size)
                list(rows.end(1 << 40))
            except ProtocolError:
                refused += 1
    return refused


def test_mutated_lines_are_refused_or_read() -> None:
    """The attack: a line that the plugin never writes made the kernel read beyond its memory."""
    assert read_mutated(1, 3000) > 300


def test_mutated_lines_are_read_within_bounds(tmp_path: Path) -> None:
    """The same with kernels that check every index."""
    code = "from tests.postgres.decode.test_text_rows import read_mutated; read_mutated(2, 3000)"
    checked = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **checked}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
