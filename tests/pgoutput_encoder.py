"""The other end of the wire: writes pgoutput frames as a walsender does, one message at a time."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from aqueduck.postgres.decode.pgoutput import PG_EPOCH_US

UNCHANGED = object()
Cell = str | None | object


@dataclass(frozen=True)
class EncodedTable:
    oid: int
    schema: str
    name: str
    identity: str
    columns: tuple[tuple[str, bool, int, int], ...]  # name, is key, type oid, typmod


def frame(payload: bytes, *, lsn: int = 0) -> bytes:
    """XLogData in CopyData."""
    body = b"w" + struct.pack("!QQq", lsn, lsn, 0) + payload
    return b"d" + struct.pack("!I", len(body) + 4) + body


def keepalive(wal_end: int, *, reply: bool = False) -> bytes:
    body = b"k" + struct.pack("!QqB", wal_end, 0, int(reply))
    return b"d" + struct.pack("!I", len(body) + 4) + body


def begin(final_lsn: int, time_us: int, xid: int) -> bytes:
    return frame(b"B" + struct.pack("!QqI", final_lsn, time_us - PG_EPOCH_US, xid), lsn=final_lsn)


def commit(commit_lsn: int, end_lsn: int, time_us: int) -> bytes:
    return frame(b"C" + struct.pack("!BQQq", 0, commit_lsn, end_lsn, time_us - PG_EPOCH_US), lsn=end_lsn)


def relation(table: EncodedTable) -> bytes:
    out = b"R" + struct.pack("!I", table.oid) + table.schema.encode() + b"\0" + table.name.encode() + b"\0"
    out += table.identity.encode() + struct.pack("!H", len(table.columns))
    for name, is_key, oid, typmod in table.columns:
        out += struct.pack("!B", int(is_key)) + name.encode() + b"\0" + struct.pack("!Ii", oid, typmod)
    return frame(out)


def _tuple(cells: Sequence[Cell]) -> bytes:
    out = struct.pack("!H", len(cells))
    for cell in cells:
        if cell is None:
            out += b"n"
        elif cell is UNCHANGED:
            out += b"u"
        else:
            raw = str(cell).encode()
            out += b"t" + struct.pack("!I", len(raw)) + raw
    return out


def insert(oid: int, new: Sequence[Cell]) -> bytes:
    return frame(b"I" + struct.pack("!I", oid) + b"N" + _tuple(new))


def update(
    oid: int, new: Sequence[Cell], *, old: Sequence[Cell] | None = None, old_kind: bytes = b"K"
) -> bytes:
    image = b"" if old is None else old_kind + _tuple(old)
    return frame(b"U" + struct.pack("!I", oid) + image + b"N" + _tuple(new))


def delete(oid: int, old: Sequence[Cell], *, old_kind: bytes = b"K") -> bytes:
    return frame(b"D" + struct.pack("!I", oid) + old_kind + _tuple(old))


def truncate(oids: Sequence[int], flags: int = 0) -> bytes:
    return frame(b"T" + struct.pack("!IB", len(oids), flags) + b"".join(struct.pack("!I", o) for o in oids))


def origin(name: str) -> bytes:
    return frame(b"O" + struct.pack("!Q", 0) + name.encode() + b"\0")


def type_message(oid: int, schema: str, name: str) -> bytes:
    return frame(b"Y" + struct.pack("!I", oid) + schema.encode() + b"\0" + name.encode() + b"\0")


def logical_message(prefix: str, content: bytes, *, transactional: bool = True) -> bytes:
    out = b"M" + struct.pack("!BQ", int(transactional), 0) + prefix.encode() + b"\0"
    return frame(out + struct.pack("!I", len(content)) + content)


# -- Transactions that are streamed before they end (protocol version 2)


def in_stream(message: bytes, xid: int) -> bytes:
    """A row, relation or truncate message as it is in a block: after its kind comes the (sub)transaction."""
    payload = message[5 + 25 :]
    return frame(payload[:1] + struct.pack("!I", xid) + payload[1:])


def stream_start(xid: int, *, first: bool) -> bytes:
    return frame(b"S" + struct.pack("!I?", xid, first))


def stream_stop() -> bytes:
    return frame(b"E")


def stream_commit(xid: int, commit_lsn: int, end_lsn: int, time_us: int) -> bytes:
    return frame(
        b"c" + struct.pack("!IBQQq", xid, 0, commit_lsn, end_lsn, time_us - PG_EPOCH_US), lsn=end_lsn
    )


def stream_abort(xid: int, part: int) -> bytes:
    return frame(b"A" + struct.pack("!II", xid, part))
