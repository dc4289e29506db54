"""The capture of events: limits, tables from the stream alone, and a damaged stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest

from aqueduck.envelopes.json_events import stretch_lines
from aqueduck.model.errors import (
    AqueduckError,
    ConnectionLostError,
    ProtocolError,
    Retry,
    TransactionTooLargeError,
)
from aqueduck.model.event_parts import piece_stretches, plan_pieces
from aqueduck.postgres.capture.announced_tables import AnnouncedTables
from aqueduck.postgres.capture.capture_settings import CaptureSettings
from aqueduck.postgres.capture.events_capture import EventsSettings, EventsStage, events_capture
from aqueduck.postgres.decode.decoder import Decoder, commit_after, last_commit
from aqueduck.postgres.decode.pgoutput import Bytes
from aqueduck.postgres.publications.published import Newcomer, newcomers
from tests.fix_events import Watched
from tests.fix_postgres import Database, wait_until
from tests.pgoutput_encoder import EncodedTable, begin, commit, frame, insert, relation

TABLE = EncodedTable(7, "public", "t", "d", (("id", True, 23, -1), ("v", False, 25, -1)))


class Script:
    """A stream with scripted messages, which then ends."""

    ended = False

    def __init__(self, *frames: bytes) -> None:
        self._data = b"".join(frames)
        self._silences = 0
        self.confirmed = 0
        self.answers = False

    def read_into(self, buf: Bytes, at: int, timeout: float) -> int:
        if not self._data:
            self._silences += 1
            if self._silences > 20:
                raise ConnectionLostError("the script is over")
        n = min(len(self._data), buf.size - at)
        buf[at : at + n] = np.frombuffer(self._data[:n], np.uint8)
        self._data = self._data[n:]
        return n

    def send_status(self, *, received: int, confirmed: int, ask_reply: bool = False) -> None:
        self.confirmed = max(self.confirmed, confirmed)

    def close(self) -> None: ...


def captured(directory: Path, *frames: bytes) -> tuple[EventsStage, Script, AqueduckError]:
    """What a capture makes of the frames, and the error with which it ends."""
    capture = CaptureSettings(dsn="", slot="s", publication="p", position=1, directory=str(directory))
    stage = EventsStage(directory / "stage", segment_bytes=1 << 20, bytes_max=1 << 30, position=1)
    script = Script(*frames)
    thread = events_capture(EventsSettings(capture), stage, start=lambda _: script)
    thread.start()
    wait_until(lambda: not thread.is_alive(), "the capture ends", 60)
    with pytest.raises(AqueduckError) as error:
        thread.check()
    stage.cut()
    return stage, script, error.value


GOOD = (begin(100, 1_000_000, 7), relation(TABLE), insert(7, ["1", "a"]), commit(100, 120, 1_000_000))

DESYNCS = {
    "a commit without a begin": (commit(200, 220, 0),),
    "a second begin": (begin(200, 0, 8), begin(300, 0, 9)),
    "an unknown message": (begin(200, 0, 8), frame(b"?nonsense")),
    "an unknown relation": (begin(200, 0, 8), insert(8, ["1", "a"]), commit(200, 220, 0)),
    "a tuple of the wrong width": (begin(200, 0, 8), insert(7, ["1"]), commit(200, 220, 0)),
    "a row outside a transaction": (insert(7, ["2", "b"]),),
    "noise": (bytes(b ^ 0xA5 for b in b"".join(GOOD)),),
    "a message of no kind": (b"!" + (1000).to_bytes(4, "big"),),
    "a message without an end": (b"d" + (1 << 31).to_bytes(4, "big") + b"w",),
    "data of no kind": (b"d" + (1 << 29).to_bytes(4, "big") + b"x",),
    "garbage": (b"d" + (44).to_bytes(4, "big") + bytes(range(160, 200)),),
}


@pytest.mark.parametrize("name", DESYNCS)
def test_a_desync_fails_fast_and_keeps_what_was_whole(tmp_path: Path, name: str) -> None:
    """P-E05: a typed error that restarts from the bookmark; nothing of the broken transaction is offered or confirmed."""
    stage, script, error = captured(tmp_path, *GOOD, *DESYNCS[name])
    assert isinstance(error, ProtocolError)
    assert error.retry is Retry.AUTO
    cuts = stage.between(0, 1 << 62)
    pieces = plan_pieces(s for cut in cuts for s in cut.segments)
    texts = [
        lines.text.to_pybytes()
        for piece in pieces
        for stretch in piece_stretches(piece)
        for lines in stretch_lines(stretch, "flat")
    ]
    # Frames that were read together with the broken one may be lost with it; the slot sends them again.
    assert texts in ([], [b'{"event_type":"t.INSERT","_table":"t","_op":"INSERT","id":1,"v":"a"}\n'])
    assert script.confirmed <= 120


def test_commits_one_by_one_hold_what_commits_together_hold() -> None:
    """The decoder that a capped run needs gives the same rows, with each commit in its place."""
    frames = np.frombuffer(
        b"".join(
            [
                *GOOD,
                begin(200, 0, 8), insert(7, ["2", "b"]), insert(7, ["3", "c"]), commit(200, 220, 0),
                begin(300, 0, 9), insert(7, ["4", "d"]),
            ]
        ),
        np.uint8,
    ).copy()  # fmt: skip

    def runs(every_commit: bool) -> list[object]:
        decoder = Decoder(AnnouncedTables({}), commits=commit_after(0) if every_commit else last_commit)
        found, used, _ = decoder.decode(frames, frames.size)
        assert used == frames.size
        return [getattr(run, "position", None) or run.batch.column("n0").to_pylist() for run in found]  # type: ignore[union-attr]

    assert runs(True) == [["1"], 120, ["2", "3"], 220, ["4"]]
    assert runs(False) == [["1", "2", "3"], 220, ["4"]]


def test_a_transaction_that_is_read_in_progress_gives_the_same_events(
    db: Database, watch: Callable[..., Watched]
) -> None:
    """P-E01, P-E08: in order, at the position of its commit, without rolled-back changes; counted when it is complete."""
    db.execute(f"alter database {db.name} set logical_decoding_work_mem = '64kB'")
    db.execute("create table t (id int primary key, v text); create table nothing ()")
    watched = watch(db, segment_bytes=32 << 10, max_messages=2002, max_staged_records=2000)
    with db.connect() as conn:
        conn.execute("begin")
        conn.execute("insert into t select g, repeat('x', 100) from generate_series(1, 1999) g")
        conn.execute("savepoint a")
        conn.execute("insert into t select g, repeat('void', 25) from generate_series(2000, 4000) g")
        wait_until(lambda: watched.stage.unfinished[0] == 1, "it is staged while it is open")
        conn.execute("rollback to a")
        conn.execute("insert into nothing default values")
        db.execute("insert into t values (9001, 'between')")
        conn.execute("commit")
    early = watched.stage.limit
    assert early is None
    db.execute("insert into t values (9002, 'last'); insert into t values (9003, 'too much')")
    events = watched.events()
    assert [e["after"].get("id") for e in events[:2002]] == [9001, *range(1, 2000), None, 9002]
    assert (events[2000]["table"], events[2000]["after"]) == ("nothing", {})
    assert len({e["lsn"] for e in events[1:2001]}) == 1
    assert events[0]["lsn"] != events[1]["lsn"] != events[2001]["lsn"]
    assert watched.stage.limit is not None
    with db.connect() as conn:
        conn.execute("begin")
        conn.execute("insert into t select g, repeat('x', 100) from generate_series(10001, 12001) g")
        wait_until(lambda: watched.stage.unfinished[0] == 1, "it is staged")
        watched.capture.check()
        conn.execute("commit")
    wait_until(lambda: not watched.capture.is_alive(), "the capture ends")
    with pytest.raises(TransactionTooLargeError):
        watched.capture.check()


def test_a_transaction_larger_than_the_segments_is_spilled(
    db: Database, watch: Callable[..., Watched]
) -> None:
    """P-E08: it is staged in many files, offered only when it is whole, and comes out in order."""
    db.execute("create table t (id int primary key, v text); create table u (id int primary key)")
    watched = watch(db, segment_bytes=32 << 10)
    with db.connect() as conn:
        conn.execute("begin")
        conn.execute("insert into t select g, repeat('x', 400) from generate_series(1, 40000) g")
        conn.execute("insert into u values (1)")
        assert watched.pieces() == []
        conn.execute("commit")
    pieces = watched.pieces(piece_bytes=64 << 10)
    assert len(pieces) > 2
    stretched = [s for piece in pieces for s in piece_stretches(piece)]
    assert max(sum(x.bytes for x in s) for s in stretched) < 12 << 20
    events = b"".join(lines.text.to_pybytes() for s in stretched for lines in stretch_lines(s, "flat"))
    assert events.count(b"\n") == 40001
    ids = [int(line.split(b'"id":')[1].split(b",")[0].rstrip(b"}")) for line in events.splitlines()]
    assert ids == [*range(1, 40001), 1]


FULL = "create table {0} (v text, b int, a int, primary key (a, b)); alter table {0} replica identity full"


def keys(watched: Watched) -> list[tuple[str, str]]:
    """The key of each event, and the operation."""
    found = []
    for piece in watched.pieces():
        for stretch in piece_stretches(piece):
            for lines in stretch_lines(stretch, "flat", with_keys=True):
                assert lines.keys is not None
                text, ends = bytes(lines.keys.text), lines.keys.ends.tolist()
                ops = [json.loads(line)["_op"] for line in lines.text.to_pybytes().splitlines()]
                found += [(text[a:b].decode(), op) for a, b, op in zip([0, *ends], ends, ops, strict=False)]
    return found


def test_a_table_that_joins_with_a_full_identity_has_its_key(
    db: Database, watch: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-E10: the stream does not contain the key of such a table; the catalog is asked, once for all that joined together."""
    looks: list[Sequence[int]] = []

    def counted(
        conn: psycopg.Connection[Any], publication: str, known: Sequence[int]
    ) -> Mapping[int, Newcomer]:
        looks.append(known)
        return newcomers(conn, publication, known)

    monkeypatch.setattr("aqueduck.postgres.capture.events_capture.newcomers", counted)
    watched = watch(db)
    db.execute(";".join([*(FULL.format(f"t{n}") for n in range(5)), "create table none (v text)"]))
    db.execute("alter table none replica identity full")
    for n in range(5):
        db.execute(f"insert into t{n} values ('x', 1, {n}); update t{n} set v = 'y'; delete from t{n}")
    db.execute("insert into none values ('x'); insert into none values ('y')")
    expected = [(f'{{"b":1,"a":{n}}}', op) for n in range(5) for op in ("INSERT", "UPDATE", "DELETE")]
    assert keys(watched) == [*expected, ("", "INSERT"), ("", "INSERT")]
    assert len(looks) == 1


def test_a_table_of_an_open_transaction_has_its_key(db: Database, watch: Callable[..., Watched]) -> None:
    """P-E08, P-E10: other sessions see the table only after the commit; then its key is found, for what follows, too."""
    db.execute(f"alter database {db.name} set logical_decoding_work_mem = '64kB'")
    watched = watch(db, segment_bytes=32 << 10)
    with db.connect() as conn:
        conn.execute("begin")
        conn.execute(FULL.format("t").encode())
        conn.execute("insert into t select repeat('x', 100), 1, g from generate_series(1, 3000) g")
        wait_until(lambda: watched.stage.unfinished[0] == 1, "it is staged while it is open")
        conn.execute("commit")
    db.execute("insert into t values ('later', 2, 2)")
    wanted = [*((1, a) for a in range(1, 3001)), (2, 2)]
    assert keys(watched) == [(f'{{"b":{b},"a":{a}}}', "INSERT") for b, a in wanted]
