"""Transactions that come before they end: decoded, staged and published as if they had come at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aqueduck.model.changes import SegmentRef
from aqueduck.model.errors import ProtocolError
from aqueduck.model.schema import Column, TableSchema
from aqueduck.postgres.capture.stage import Stage
from aqueduck.postgres.decode.decoder import Commit, Decoder
from aqueduck.postgres.decode.stream_tables import GivenTables
from tests import pgoutput_encoder as encode
from tests.pgoutput_encoder import EncodedTable

T = EncodedTable(16_400, "public", "t", "d", (("id", True, 23, -1), ("v", False, 25, -1)))
U = EncodedTable(16_401, "public", "u", "d", T.columns)
UNKNOWN = EncodedTable(16_402, "public", "unknown", "d", T.columns)
TIME = 5_000_000


def described(table: EncodedTable) -> TableSchema:
    columns = tuple(Column(name, oid, typmod) for name, _, oid, typmod in table.columns)
    return TableSchema(table.oid, table.schema, table.name, columns, ("id",), table.identity)


class Staged:
    """A decoder and a stage in a row, and what comes out of them."""

    def __init__(self, directory: Path, *, segment_bytes: int = 1, **keywords: Any) -> None:
        self.decoder = Decoder(GivenTables({t.oid: described(t) for t in (T, U)}, **keywords), streams=True)
        self.stage = Stage(directory, segment_bytes=segment_bytes, bytes_max=1 << 30, position=0)
        self.directory = directory

    def take(self, *frames: bytes, piece: int = 1 << 30) -> None:
        """Feed frames, in reads of `piece` bytes."""
        raw = b"".join(frames)
        rest = b""
        for at in range(0, len(raw), piece):
            rest += raw[at : at + piece]
            runs, used, _ = self.decoder.decode(np.frombuffer(rest, np.uint8), len(rest))
            rest = rest[used:]
            for run in runs:
                self.stage.add(run)
        assert not rest

    def segments(self) -> list[SegmentRef]:
        self.stage.cut()
        return [s for cut in self.stage.between(0, 1 << 62) for s in cut.segments]

    def changes(self) -> list[tuple[Any, ...]]:
        """Everything that is offered, in order: table, lsn, time, xid, number, what."""
        found = []
        for s in self.segments():
            if s.kind == "truncate":
                found.append((s.first_ord, s.table_oid, s.commit_lsn, s.commit_ts, s.xid, s.seq, "truncate"))
                continue
            rows = pa.ipc.open_file(s.path).read_all().to_pylist()
            assert (s.rows, s.inserts, s.first_ord, s.last_ord) == (
                len(rows), sum(r["_op"] == 1 for r in rows), rows[0]["_ord"], rows[-1]["_ord"]
            )  # fmt: skip
            found += [
                (r["_ord"], s.table_oid, r["_lsn"], r["_ts"], r["_xid"], r["_seq"], r["n0"] or r["o0"])
                for r in rows
            ]
        assert len({change[0] for change in found}) == len(found), "each change has its own place"
        return [change[1:] for change in sorted(found)]


def block(xid: int, *messages: tuple[int, bytes], first: bool = False) -> bytes:
    """A block of a streamed transaction; messages with their (sub)transactions."""
    inner = b"".join(encode.in_stream(message, part) for part, message in messages)
    return encode.stream_start(xid, first=first) + inner + encode.stream_stop()


def row(key: object, table: EncodedTable = T) -> bytes:
    return encode.insert(table.oid, [str(key), "x"])


def test_a_streamed_transaction_is_published_at_its_commit(tmp_path: Path) -> None:
    """It is offered only after its commit, in commit order, with its position, time and numbers."""
    staged = Staged(tmp_path / "stage")
    staged.take(block(700, (700, encode.relation(T)), (700, row(1)), (700, row(2)), first=True))
    staged.take(
        encode.begin(100, TIME, 701), encode.relation(T), row("between"), encode.commit(100, 110, TIME)
    )
    assert [c[-1] for c in staged.changes()] == ["between"]
    assert not staged.decoder.in_transaction
    staged.take(block(700, (700, row(3))), encode.stream_commit(700, 200, 210, TIME + 1))
    assert staged.changes() == [
        (T.oid, 100, TIME, 701, 0, "between"),
        (T.oid, 200, TIME + 1, 700, 0, "1"),
        (T.oid, 200, TIME + 1, 700, 1, "2"),
        (T.oid, 200, TIME + 1, 700, 2, "3"),
    ]
    assert [cut.position for cut in staged.stage.between(0, 1 << 62)] == [110, 210]


@pytest.mark.parametrize("segment_bytes", [1, 1 << 20], ids=["on disk", "in memory"])
def test_a_rolled_back_subtransaction_takes_only_its_changes(tmp_path: Path, segment_bytes: int) -> None:
    """Rows before a savepoint and after the rollback stay, and the numbers have no gap."""
    staged = Staged(tmp_path / "stage", segment_bytes=segment_bytes)
    staged.take(
        block(700, (700, encode.relation(T)), (700, encode.relation(U)), (700, row(1)), (700, row(2, U)), first=True),
        block(700, (700, row(3)), (702, row("void", U)), (703, row("void")), (702, row("void"))),
        block(700, (702, encode.truncate([T.oid, U.oid])), (702, row("void", U))),
        encode.stream_abort(700, 703), encode.stream_abort(700, 702), encode.stream_abort(700, 704),
        block(700, (705, row(4, U)), (700, row(5))),
        encode.stream_commit(700, 200, 210, TIME),
    )  # fmt: skip
    assert [(c[0], c[4], c[5]) for c in staged.changes()] == [
        (T.oid, 0, "1"), (U.oid, 1, "2"), (T.oid, 2, "3"), (U.oid, 3, "4"), (T.oid, 4, "5")
    ]  # fmt: skip


def test_an_aborted_transaction_leaves_nothing(tmp_path: Path) -> None:
    """Neither rows nor files nor memory, and others are not touched."""
    staged = Staged(tmp_path / "stage")
    staged.take(
        block(700, (700, encode.relation(T)), (700, row(1)), first=True),
        block(800, (800, encode.relation(T)), (800, row(2)), first=True),
    )
    assert staged.stage.unfinished[0] == 2
    staged.take(encode.stream_abort(700, 700))
    assert len(list(staged.directory.iterdir())) == 1
    staged.take(encode.stream_commit(800, 200, 210, TIME))
    assert staged.stage.unfinished == (0, 0)
    assert [c[-1] for c in staged.changes()] == ["2"]


def test_unfinished_transactions_are_forgotten_with_the_connection(tmp_path: Path) -> None:
    """The server sends them again: neither their rows nor their files stay."""
    staged = Staged(tmp_path / "stage")
    staged.take(block(700, (700, encode.relation(T)), (700, row(1)), first=True))
    assert not staged.stage.pending, "the slot may move on beside it"
    staged.stage.abandon_open()
    assert not list(staged.directory.iterdir())
    assert staged.stage.unfinished == (0, 0)


def test_many_unfinished_transactions_share_the_memory(tmp_path: Path) -> None:
    """P-S20: whatever their number, no more than one segment's size waits in memory, and reading never pauses."""
    staged = Staged(tmp_path / "stage", segment_bytes=20_000)
    for turn in range(30):
        for xid in range(700, 720):
            relation = [(xid, encode.relation(T))] if turn == 0 else []
            rows = [(xid, row(f"{xid}-{turn}-{n}")) for n in range(5)]
            staged.take(block(xid, *relation, *rows, first=turn == 0))
            held = sum(b.memory_bytes for b in staged.stage._spills._held.values())
            assert held < 20_000
    assert not staged.stage.full
    for n, xid in enumerate(range(700, 720)):
        staged.take(encode.stream_commit(xid, 1000 + 10 * n, 1005 + 10 * n, TIME))
    assert [c[-1] for c in staged.changes()] == [
        f"{xid}-{turn}-{n}" for xid in range(700, 720) for turn in range(30) for n in range(5)
    ]


def test_each_streamed_transaction_has_its_own_view_of_the_relations(tmp_path: Path) -> None:
    """A column that one transaction adds exists for others only after its commit, without a new description."""
    staged = Staged(tmp_path / "stage")
    wider = EncodedTable(T.oid, "public", "t", "d", (*T.columns, ("w", False, 23, -1)))
    staged.take(
        block(700, (700, encode.relation(T)), (700, row(1)), first=True),
        encode.begin(100, TIME, 701), encode.relation(T), row(3), encode.commit(100, 110, TIME),
        block(700, (700, encode.relation(wider)), (700, encode.insert(T.oid, ["2", "x", "5"]))),
        block(800, (800, encode.relation(U)), (800, row(6, U)), first=True),
        block(700, (700, encode.insert(T.oid, ["4", "x", "6"]))),
        encode.stream_commit(700, 200, 210, TIME),
        encode.begin(300, TIME, 702), encode.insert(T.oid, ["5", "x", "7"]), encode.commit(300, 310, TIME),
    )  # fmt: skip
    widths = {
        r["n0"]: r.get("n2")
        for s in staged.segments()
        for r in pa.ipc.open_file(s.path).read_all().to_pylist()
    }
    assert widths == {"3": None, "1": None, "2": "5", "4": "6", "5": "7"}
    assert staged.stage.unfinished[0] == 1


def test_a_later_description_outlives_an_earlier_streamed_one(tmp_path: Path) -> None:
    """What the server told last about a relation holds, even when an older streamed transaction commits after it."""
    staged = Staged(tmp_path / "stage")
    narrow = EncodedTable(T.oid, "public", "t", "d", T.columns[:1])
    staged.take(
        block(700, (700, encode.relation(T)), (700, row(1)), first=True),
        encode.begin(100, TIME, 701), encode.relation(narrow), encode.insert(T.oid, ["2"]),
        encode.commit(100, 110, TIME),
        encode.stream_commit(700, 200, 210, TIME),
        encode.begin(300, TIME, 702), encode.insert(T.oid, ["3"]), encode.commit(300, 310, TIME),
    )  # fmt: skip
    assert [c[-1] for c in staged.changes()] == ["2", "1", "3"]


@pytest.mark.parametrize("added", ["before its commit", "after its commit"])
def test_a_table_is_known_that_only_a_streamed_transaction_described(tmp_path: Path, added: str) -> None:
    """The server does not describe it again; an older description, of a transaction that ends later, does not count."""
    staged = Staged(tmp_path / "stage")
    narrow = EncodedTable(UNKNOWN.oid, "public", "unknown", "d", T.columns[:1])
    staged.take(
        block(600, (600, encode.relation(narrow)), (600, encode.insert(UNKNOWN.oid, ["no"])), first=True),
        block(700, (700, encode.relation(UNKNOWN)), (700, row("no", UNKNOWN)), first=True),
    )
    known = {t.oid: described(t) for t in (T, U, UNKNOWN)}
    if "before" in added:
        staged.decoder.know(GivenTables(known))
    staged.take(encode.stream_commit(700, 200, 210, TIME), encode.stream_commit(600, 220, 230, TIME))
    if "after" in added:
        staged.decoder.know(GivenTables(known))
    staged.take(encode.begin(300, TIME, 702), row(1, UNKNOWN), encode.commit(300, 310, TIME))
    assert [c[-1] for c in staged.changes()] == ["1"]


def test_a_table_goes_while_a_transaction_streams_it(tmp_path: Path) -> None:
    """Its later changes of that table are skipped; those of other tables are kept."""
    staged = Staged(tmp_path / "stage")
    own_type = EncodedTable(T.oid, "public", "t", "d", (*T.columns, ("m", False, 90_000, -1)))
    brought = encode.insert(T.oid, ["1", "x", "y"])
    staged.take(block(700, (700, encode.relation(own_type)), (700, brought), first=True))
    staged.decoder.know(GivenTables({U.oid: described(U)}))
    staged.take(
        block(700, (700, brought), (700, encode.relation(U)), (700, row(2, U))),
        encode.stream_commit(700, 200, 210, TIME),
    )
    assert [(c[0], c[-1]) for c in staged.changes()] == [(T.oid, "1"), (U.oid, "2")]


@pytest.mark.parametrize("segment_bytes", [1, 1 << 20], ids=["on disk", "in memory"])
def test_a_key_is_looked_for_when_its_transaction_has_committed(tmp_path: Path, segment_bytes: int) -> None:
    """P-S08: a transaction may drop the key of a full table itself; its rows and those that follow are then taken whole."""
    asked: list[str] = []

    def keyed(table: TableSchema) -> bool:
        asked.append(table.name)
        return False

    full = EncodedTable(T.oid, "public", "t", "f", tuple((n, True, o, m) for n, _, o, m in T.columns))
    staged = Staged(tmp_path / "stage", segment_bytes=segment_bytes, keyed=keyed)
    staged.take(block(700, (700, encode.relation(full)), (700, row(1)), first=True))
    assert asked == []
    staged.take(encode.stream_commit(700, 200, 210, TIME))
    staged.take(encode.begin(300, TIME, 702), row(2), encode.commit(300, 310, TIME))
    assert asked == ["t"]
    assert [TableSchema.from_json(s.schema_json).key for s in staged.segments()] == [()] * len(
        staged.segments()
    )
    assert [c[-1] for c in staged.changes()] == ["1", "2"]


def test_types_are_looked_up_when_their_transaction_has_committed(tmp_path: Path) -> None:
    """P-S12: a type that the transaction made itself cannot be seen before; segments that are written already get it too."""
    asked: list[str] = []

    def resolve(column: Column) -> Column:
        asked.append(column.name)
        return Column(column.name, column.type_oid, column.typmod, "mood[]", element_oid=90_001)

    wider = EncodedTable(T.oid, "public", "t", "d", (*T.columns, ("m", False, 90_000, -1)))
    for segment_bytes in (1, 1 << 20):
        asked.clear()
        staged = Staged(tmp_path / str(segment_bytes), segment_bytes=segment_bytes, resolve=resolve)
        made = encode.insert(T.oid, ["1", "x", "{ok}"])
        staged.take(block(700, (700, encode.relation(wider)), (700, made), first=True))
        assert asked == []
        staged.take(encode.stream_commit(700, 200, 210, TIME))
        staged.take(
            encode.begin(300, TIME, 702),
            encode.insert(T.oid, ["2", "x", "{}"]),
            encode.commit(300, 310, TIME),
        )
        found = [TableSchema.from_json(s.schema_json).columns[2].element_oid for s in staged.segments()]
        assert set(found) == {90_001}
        assert asked == ["m"]


@pytest.mark.parametrize(
    ("frames", "what"),
    [
        ([encode.stream_start(700, first=False)], "without its beginning"),
        ([encode.stream_commit(700, 1, 2, TIME)], "without its beginning"),
        ([encode.stream_stop()], "out of place"),
        ([encode.stream_start(700, first=True), encode.stream_start(701, first=True)], "out of place"),
        ([encode.stream_start(700, first=True), encode.begin(1, TIME, 1)], "second BEGIN"),
        ([encode.stream_start(700, first=True), encode.stream_commit(700, 1, 2, TIME)], "out of place"),
        ([encode.begin(1, TIME, 1), encode.stream_start(700, first=True)], "out of place"),
        ([block(700, (700, row(1)), first=True)], "before its description"),
        ([encode.frame(b"S" + bytes(4))], "truncated"),
        ([encode.frame(b"A" + bytes(24))], "truncated"),
        ([encode.frame(b"b" + bytes(30))], "prepared transaction"),
        ([encode.frame(b"K" + bytes(30))], "prepared transaction"),
    ],
)
def test_a_desynchronised_stream_of_blocks_fails_fast(tmp_path: Path, frames: list[bytes], what: str) -> None:
    """P-E05: blocks that make no sense are a ProtocolError, never a silent skip."""
    with pytest.raises(ProtocolError, match=what):
        Staged(tmp_path / "stage").take(*frames)


class History:
    """Random transactions as a server would stream them, and the expected result."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.frames: list[bytes] = []
        self.expected: list[tuple[int, int, str]] = []  # (xid, number, key) in commit order
        self.unfinished: dict[int, dict[str, Any]] = {}
        self.next_xid, self.position, self.next_key = 700, 1000, 0
        self.described = False

    def change(self) -> tuple[str, bytes]:
        self.next_key += 1
        table = self.draw(st.sampled_from((T, U, UNKNOWN)))
        name = f"{self.next_key}" if table is not UNKNOWN else ""
        return name, row(self.next_key, table)

    def take_xid(self) -> int:
        self.next_xid += 1
        return self.next_xid

    def small(self) -> None:
        xid, end = self.take_xid(), self.end()
        changes = [self.change() for _ in range(self.draw(st.integers(0, 3)))]
        head = [] if self.described else [encode.relation(t) for t in (T, U, UNKNOWN)]
        self.described = True
        self.frames += [encode.begin(end - 5, TIME, xid), *head, *(m for _, m in changes)]
        self.frames.append(encode.commit(end - 5, end, TIME))
        self.expected += [(xid, n, name) for n, (name, _) in enumerate(changes) if name]

    def end(self) -> int:
        self.position += 10
        return self.position

    def block(self) -> None:
        """A new or an unfinished transaction writes, in nested subtransactions that come and go."""
        xid = self.draw(st.sampled_from([0, *self.unfinished]))
        first = xid == 0
        messages: list[tuple[int, bytes]] = []
        if first:
            xid = self.take_xid()
            self.unfinished[xid] = {"stack": [xid], "done": {}, "changes": []}
            messages += [(xid, encode.relation(t)) for t in (T, U, UNKNOWN)]
        one = self.unfinished[xid]
        for step in self.draw(
            st.lists(st.sampled_from(["change"] * 4 + ["savepoint", "release"]), max_size=8)
        ):
            if step == "change":
                name, message = self.change()
                messages.append((one["stack"][-1], message))
                one["changes"].append((one["stack"][-1], name))
            elif step == "savepoint":
                one["stack"].append(self.take_xid())
            elif len(one["stack"]) > 1:
                child = one["stack"].pop()
                one["done"].setdefault(one["stack"][-1], []).extend([*one["done"].pop(child, []), child])
        self.frames.append(block(xid, *messages, first=first))

    def roll_back(self) -> None:
        """Back to a savepoint: the server names every subtransaction inside of it, then itself."""
        nested = [xid for xid, one in self.unfinished.items() if len(one["stack"]) > 1]
        if not nested:
            return
        xid = self.draw(st.sampled_from(nested))
        one = self.unfinished[xid]
        depth = self.draw(st.integers(1, len(one["stack"]) - 1))
        while len(one["stack"]) > depth:
            part = one["stack"].pop()
            void = {*one["done"].pop(part, []), part}
            self.frames += [encode.stream_abort(xid, v) for v in sorted(void)]
            one["changes"] = [c for c in one["changes"] if c[0] not in void]

    def finish(self) -> None:
        if not self.unfinished:
            return
        xid = self.draw(st.sampled_from([*self.unfinished]))
        one = self.unfinished.pop(xid)
        if self.draw(st.booleans()):
            self.frames.append(encode.stream_abort(xid, xid))
            return
        end = self.end()
        self.described = True
        self.frames.append(encode.stream_commit(xid, end - 5, end, TIME))
        self.expected += [(xid, n, name) for n, (_, name) in enumerate(one["changes"]) if name]


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_streamed_histories_come_out_as_their_commits(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """P-S29: with savepoints, rollbacks and interleaving, exactly the committed changes are offered, in commit order, densely numbered."""
    history = History(data.draw)
    for step in data.draw(
        st.lists(st.sampled_from(["small", "block", "block", "roll_back", "finish"]), max_size=25)
    ):
        getattr(history, step)()
    staged = Staged(
        tmp_path_factory.mktemp("staged") / "stage",
        segment_bytes=data.draw(st.sampled_from([1, 3_000, 1 << 20])),
    )
    staged.take(*history.frames, piece=data.draw(st.sampled_from([37, 500, 1 << 30])))
    assert [(c[3], c[4], c[5]) for c in staged.changes()] == history.expected
    assert staged.stage.unfinished[0] <= len(history.unfinished)
    staged.stage.abandon_open()
    kept = {Path(s.path) for s in staged.segments() if s.path}
    assert set(staged.directory.iterdir()) == kept


def test_commits_of_streamed_transactions_are_counted(tmp_path: Path) -> None:
    """Status counts transactions, including those that came in blocks."""
    staged = Staged(tmp_path / "stage")
    staged.take(
        block(700, (700, encode.relation(T)), first=True), encode.stream_commit(700, 200, 210, TIME),
        encode.begin(300, TIME, 702), encode.commit(300, 310, TIME),
    )  # fmt: skip
    assert staged.stage.transactions == 2
    runs, _, _ = staged.decoder.decode(np.frombuffer(encode.keepalive(400), np.uint8), 22)
    assert not [r for r in runs if isinstance(r, Commit)]
