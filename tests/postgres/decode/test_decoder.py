"""Decoding: the messages of the tests' encoder become exactly the expected columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aqueduck.model.errors import ProtocolError
from aqueduck.model.schema import Column, TableSchema
from aqueduck.postgres.decode.decoder import (
    Commit,
    Decoder,
    Rows,
    StreamItem,
    Truncate,
    commit_after,
    last_commit,
)
from aqueduck.postgres.decode.stream_tables import GivenTables
from tests import pgoutput_encoder as encode
from tests.pgoutput_encoder import UNCHANGED, EncodedTable

ORDERS = EncodedTable(
    16_400, "public", "orders", "d", (("id", True, 23, -1), ("note", False, 25, -1), ("doc", False, 25, -1))
)
ORDERS_FULL = EncodedTable(
    16_401, "public", "full", "f", tuple((n, True, o, m) for n, _, o, m in ORDERS.columns)
)


def described(table: EncodedTable, key: tuple[str, ...] = ("id",)) -> TableSchema:
    columns = tuple(Column(name, oid, typmod) for name, _, oid, typmod in table.columns)
    return TableSchema(table.oid, table.schema, table.name, columns, key, table.identity)


def new_decoder() -> Decoder:
    return Decoder(GivenTables({t.oid: described(t) for t in (ORDERS, ORDERS_FULL)}))


def decode(decoder: Decoder, *frames: bytes) -> list[StreamItem]:
    raw = b"".join(frames)
    items, used, other = decoder.decode(np.frombuffer(raw, np.uint8), len(raw))
    assert used == len(raw)
    assert not other
    return items


def rows_of(items: list[StreamItem]) -> list[dict[str, Any]]:
    return [row for item in items if isinstance(item, Rows) for row in item.batch.to_pylist()]


def transaction(*frames: bytes, lsn: int = 100, end: int = 120) -> tuple[bytes, ...]:
    return (encode.begin(lsn, 1_000_000, 7), *frames, encode.commit(lsn, end, 1_000_000))


def test_a_row_carries_its_transaction() -> None:
    """Every row knows its commit position, commit time, transaction id and place in the transaction."""
    items = decode(
        new_decoder(),
        *transaction(
            encode.relation(ORDERS),
            encode.insert(ORDERS.oid, ["1", "a", None]),
            encode.insert(ORDERS.oid, ["2", "", "x"]),
        ),
    )
    first, second = rows_of(items)
    assert (first["_lsn"], first["_ts"], first["_xid"], first["_seq"]) == (100, 1_000_000, 7, 0)
    assert second["_seq"] == 1
    assert second["_ord"] > first["_ord"]
    assert (first["n0"], first["n1"], first["n2"]) == ("1", "a", None)
    assert (second["n0"], second["n1"], second["n2"]) == ("2", "", "x")
    assert items[-1] == Commit(120, 1_000_000, 1)


def test_rows_after_the_last_commit_come_after_it() -> None:
    """A commit closes exactly the rows of whole transactions; the open tail follows it."""
    open_tail = (encode.begin(200, 2_000_000, 8), encode.insert(ORDERS.oid, ["9", "open", None]))
    items = decode(
        new_decoder(),
        *transaction(encode.relation(ORDERS), encode.insert(ORDERS.oid, ["1", "a", None])),
        *open_tail,
    )
    assert [type(r).__name__ for r in items] == ["Rows", "Commit", "Rows"]
    assert rows_of(items)[-1]["_lsn"] == 200


def test_a_transaction_may_span_buffers() -> None:
    """Rows of a transaction that began in an earlier buffer keep its position and continue counting."""
    decoder = new_decoder()
    decode(
        decoder, encode.begin(100, 5, 7), encode.relation(ORDERS), encode.insert(ORDERS.oid, ["1", "a", None])
    )
    assert decoder.in_transaction
    items = decode(decoder, encode.insert(ORDERS.oid, ["2", "b", None]), encode.commit(100, 120, 5))
    (row,) = rows_of(items)
    assert (row["_lsn"], row["_seq"], row["_xid"]) == (100, 1, 7)
    assert not decoder.in_transaction


def test_other_tables_are_wanted_on_the_way() -> None:
    """Also in the middle of a transaction, and without a new description: one comes, one goes, one stays as it was."""
    decoder = Decoder(GivenTables({ORDERS.oid: described(ORDERS)}))
    extra = EncodedTable(16_409, "public", "extra", "d", ORDERS.columns)
    one_each = [encode.insert(table.oid, ["1", "a", None]) for table in (ORDERS, ORDERS_FULL, extra)]
    relations = [encode.relation(table) for table in (ORDERS, ORDERS_FULL, extra)]
    items = decode(decoder, encode.begin(100, 5, 7), *relations, *one_each)
    assert [r.layout.table.name for r in items if isinstance(r, Rows)] == ["orders"]
    decoder.know(GivenTables({t.oid: described(t) for t in (ORDERS, ORDERS_FULL)}))
    items = decode(decoder, *one_each)
    assert [(r.layout.table.name, r.layout.version) for r in items if isinstance(r, Rows)] == [
        ("orders", 0),
        ("full", 3),
    ]
    decoder.know(GivenTables({ORDERS_FULL.oid: described(ORDERS_FULL)}))
    items = decode(decoder, *one_each, encode.commit(100, 120, 5))
    assert [r.layout.table.name for r in items if isinstance(r, Rows)] == ["full"]


def test_a_key_change_is_marked_and_keeps_the_old_key() -> None:
    """P-S08: an update with an old key image has the old key in o0 and the new one in n0."""
    items = decode(
        new_decoder(),
        *transaction(
            encode.relation(ORDERS), encode.update(ORDERS.oid, ["2", "a", UNCHANGED], old=["1", None, None])
        ),
    )
    (row,) = rows_of(items)
    assert (row["_op"], row["_kc"], row["_old"], row["o0"], row["n0"]) == (2, True, 1, "1", "2")
    assert row["_unchanged"] == [2]


def test_a_full_identity_fills_in_unchanged_values() -> None:
    """P-S10: with REPLICA IDENTITY FULL an unchanged TOAST value is taken from the old image."""
    items = decode(
        new_decoder(),
        *transaction(
            encode.relation(ORDERS_FULL),
            encode.update(ORDERS_FULL.oid, ["1", "b", UNCHANGED], old=["1", "a", "big"], old_kind=b"O"),
        ),
    )
    (row,) = rows_of(items)
    assert (row["n2"], row["_unchanged"], row["_kc"], row["o1"]) == ("big", None, False, "a")


def test_tables_in_one_transaction_keep_their_order() -> None:
    """Rows of several tables come out table by table, each in stream order, with one total order over all."""
    frames = [encode.insert(ORDERS.oid if i % 2 else ORDERS_FULL.oid, [str(i), "x", None]) for i in range(10)]
    items = decode(
        new_decoder(), *transaction(encode.relation(ORDERS), encode.relation(ORDERS_FULL), *frames)
    )
    by_ord = sorted(rows_of(items), key=lambda r: r["_ord"])
    assert [r["n0"] for r in by_ord] == [str(i) for i in range(10)]


def test_a_truncate_is_a_barrier() -> None:
    """P-S11: a truncate stands between the rows before it and after it, once for each relation."""
    items = decode(
        new_decoder(),
        *transaction(
            encode.relation(ORDERS),
            encode.insert(ORDERS.oid, ["1", "a", None]),
            encode.truncate([ORDERS.oid]),
            encode.insert(ORDERS.oid, ["2", "b", None]),
        ),
    )
    assert [type(r).__name__ for r in items] == ["Rows", "Truncate", "Rows", "Commit"]
    before, barrier, after, _ = items
    assert isinstance(before, Rows)
    assert isinstance(barrier, Truncate)
    assert isinstance(after, Rows)
    assert before.first_ord < barrier.ord < after.first_ord


def test_a_changed_relation_is_a_new_version() -> None:
    """Rows after an ALTER TABLE decode against the new description and carry a new version."""
    wider = EncodedTable(ORDERS.oid, "public", "orders", "d", (*ORDERS.columns, ("extra", False, 23, -1)))
    items = decode(
        new_decoder(),
        *transaction(
            encode.relation(ORDERS),
            encode.insert(ORDERS.oid, ["1", "a", None]),
            encode.relation(wider),
            encode.insert(ORDERS.oid, ["2", "b", None, "5"]),
        ),
    )
    first, second = (r for r in items if isinstance(r, Rows))
    assert (first.layout.version, second.layout.version) == (0, 1)
    assert second.batch.to_pylist()[0]["n3"] == "5"


@pytest.mark.parametrize(
    ("described_as", "sent", "same"),
    [
        (Column("x", 1700, 655366), (1700, 655366), True),
        (Column("x", 1700, 655366), (1700, 655368), False),
        (Column("x", 1700, 655366), (1700, -1), False),
        (Column("x", 20_001, 655366, "numeric(10,2)", True, base_oid=1700), (20_001, -1), True),
        (Column("x", 20_001, 655366, "numeric(10,2)", base_oid=1700), (20_002, -1), False),
        (Column("x", 20_001, 655366, "numeric(10,2)", base_oid=1700), (1700, 655366), False),
        (Column("x", 20_003, -1, "mood[]", element_oid=20_004), (20_003, -1), True),
        (Column("x", 20_005, 3, "vector(3)"), (20_005, 3), True),
        (Column("x", 20_005, 3, "vector(3)"), (20_005, -1), False),
    ],
)
def test_the_catalogs_type_holds_until_the_stream_describes_another(
    described_as: Column, sent: tuple[int, int], same: bool
) -> None:
    """P-S12: facts about domains and arrays survive a Relation message that agrees, and no change of a type is missed."""
    table = EncodedTable(16_402, "public", "t", "d", (("x", True, *sent),))
    decoder = Decoder(GivenTables({16_402: TableSchema(16_402, "public", "t", (described_as,), ("x",), "d")}))
    (rows,) = (
        r
        for r in decode(decoder, *transaction(encode.relation(table), encode.insert(16_402, ["1"])))
        if isinstance(r, Rows)
    )
    assert rows.layout.table.columns == (described_as if same else Column("x", *sent),)


def test_messages_that_carry_no_rows_are_passed_over() -> None:
    """Origin, Type and logical messages and unpublished tables change nothing."""
    other = EncodedTable(99, "public", "other", "d", (("id", True, 23, -1),))
    items = decode(
        new_decoder(),
        encode.logical_message("p", b"x", transactional=False),
        *transaction(
            encode.origin("o"), encode.type_message(1, "public", "mood"), encode.logical_message("p", b"x"),
            encode.relation(other), encode.insert(other.oid, ["1"]),
        ),
    )  # fmt: skip
    assert rows_of(items) == []
    assert items == [Commit(120, 1_000_000, 1)]


def test_keepalives_tell_the_position_and_ask_for_replies() -> None:
    """A keepalive moves the server's position and its request for a reply is taken once."""
    decoder = new_decoder()
    decode(decoder, encode.keepalive(500, reply=True))
    assert decoder.wal_end == 500
    assert decoder.take_reply_request()
    assert not decoder.take_reply_request()


@pytest.mark.parametrize(
    ("frames", "what"),
    [
        ([encode.commit(1, 2, 0)], "COMMIT without a BEGIN"),
        ([encode.begin(1, 0, 1), encode.begin(2, 0, 2)], "second BEGIN"),
        ([encode.insert(ORDERS.oid, ["1", "a", None])], "outside a transaction"),
        ([encode.begin(1, 0, 1), encode.insert(4711, ["1"])], "before its description"),
        ([encode.begin(1, 0, 1), encode.relation(ORDERS), encode.insert(ORDERS.oid, ["1"])], "wrong width"),
        ([encode.frame(b"?xx")], "unknown pgoutput message"),
        ([encode.frame(b"S" + bytes(5))], "stream message"),
        ([encode.begin(1, 0, 1), encode.truncate([4711])], "before its description"),
    ],
    ids=[
        "lone-commit",
        "second-begin",
        "row-outside",
        "unknown-relation",
        "width",
        "unknown-kind",
        "stream",
        "truncate",
    ],
)
def test_a_desynchronised_stream_fails_fast(frames: list[bytes], what: str) -> None:
    """P-E05: a stream that makes no sense is a ProtocolError, never a silent skip."""
    with pytest.raises(ProtocolError, match=what):
        decode(new_decoder(), *frames)


def test_an_incomplete_frame_waits_for_its_rest() -> None:
    """Bytes of a frame that is not complete are left for the next call."""
    raw = b"".join(transaction(encode.relation(ORDERS), encode.insert(ORDERS.oid, ["1", "a", None])))
    decoder = new_decoder()
    collected: list[StreamItem] = []
    buffer = b""
    for i in range(0, len(raw), 7):
        buffer += raw[i : i + 7]
        items, used, _ = decoder.decode(np.frombuffer(buffer, np.uint8), len(buffer))
        collected += items
        buffer = buffer[used:]
    assert buffer == b""
    assert [r["n1"] for r in rows_of(collected)] == ["a"]


cell = st.one_of(st.none(), st.text(max_size=20), st.just(UNCHANGED))
value = st.one_of(st.none(), st.text(max_size=20))
key = st.text(min_size=1, max_size=5)
change = st.one_of(
    st.tuples(st.just("I"), st.tuples(key, value, value)),
    st.tuples(st.just("U"), st.tuples(key, cell, cell), st.one_of(st.none(), key)),
    st.tuples(st.just("D"), key),
)


def _encode(item: tuple[Any, ...]) -> bytes:
    if item[0] == "I":
        return encode.insert(ORDERS.oid, item[1])
    if item[0] == "U":
        return encode.update(ORDERS.oid, item[1], old=None if item[2] is None else [item[2], None, None])
    return encode.delete(ORDERS.oid, [item[1], None, None])


def _expected(item: tuple[Any, ...]) -> tuple[Any, ...]:
    """(op, new image, unchanged, old key, key changed) as the segment should hold them."""
    if item[0] == "D":
        return (3, (None, None, None), None, item[1], False)
    new = tuple(None if v is UNCHANGED else v for v in item[1])
    unchanged = [i for i, v in enumerate(item[1]) if v is UNCHANGED] or None
    if item[0] == "I":
        return (1, new, None, None, False)
    return (2, new, unchanged, item[2], item[2] is not None and item[2] != item[1][0])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(change, max_size=6), max_size=5), st.integers(1, 200))
def test_decoding_what_was_encoded_gives_it_back(
    transactions: list[list[tuple[Any, ...]]], piece: int
) -> None:
    """Decode ∘ encode = identity, for any history and any way the bytes are cut into reads."""
    raw = b""
    for n, changes in enumerate(transactions):
        head = encode.relation(ORDERS) if n == 0 else b""
        raw += b"".join(transaction(head, *map(_encode, changes), lsn=100 * n + 100, end=100 * n + 150))
    decoder, items, buffer = new_decoder(), [], b""
    for i in range(0, len(raw), piece):
        buffer += raw[i : i + piece]
        got, used, _ = decoder.decode(np.frombuffer(buffer, np.uint8), len(buffer))
        items += got
        buffer = buffer[used:]
    rows = sorted(rows_of(items), key=lambda r: r["_ord"])
    seen = [(r["_op"], (r["n0"], r["n1"], r["n2"]), r["_unchanged"], r["o0"], r["_kc"]) for r in rows]
    assert seen == [_expected(item) for changes in transactions for item in changes]
    commits = [r.position for r in items if isinstance(r, Commit)]
    assert commits == sorted(commits)
    assert not transactions or commits[-1] == 100 * len(transactions) + 50


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_mutated_stream_only_ever_raises_protocol_error(data: st.DataObject) -> None:
    """Any damage to the bytes either decodes to something or raises ProtocolError; nothing else escapes."""
    raw = bytearray(
        b"".join(
            transaction(
                encode.relation(ORDERS), encode.insert(ORDERS.oid, ["1", "a", None]),
                encode.update(ORDERS.oid, ["2", UNCHANGED, "x"], old=["1", None, None]),
                encode.delete(ORDERS.oid, ["2", None, None]), encode.truncate([ORDERS.oid]),
            )
        )
    )  # fmt: skip
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    decoder = new_decoder()
    try:
        items, used, _ = decoder.decode(np.frombuffer(bytes(raw), np.uint8), cut)
    except ProtocolError:
        return
    assert 0 <= used <= cut
    for item in items:
        if isinstance(item, Rows):
            assert isinstance(item.batch, pa.RecordBatch)
            item.batch.validate()


@pytest.mark.parametrize(
    ("step", "chosen"),
    [(None, [4]), (0, [0, 1, 2, 3, 4]), (1, [0, 2, 3, 4]), (4, [2, 4]), (5, [3, 4]), (100, [4])],
)
def test_commits_are_reported_after_so_many_rows_and_at_the_end(step: int | None, chosen: list[int]) -> None:
    """A decoder that cuts at commits returns one as soon as there are `step` rows, and always the last."""
    choice = last_commit if step is None else commit_after(step)
    rows = np.array(
        [12, 12, 14, 15, 15]
    )  # before the end of each of five transactions, the first of which begins at 10
    assert list(choice(rows, 10)) == chosen
    assert list(choice(rows[:0], 10)) == []
