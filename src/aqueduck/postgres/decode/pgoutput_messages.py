"""The messages of pgoutput that are not rows: relations, truncates, and the ends of streamed transactions."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from aqueduck.model.errors import ProtocolError
from aqueduck.postgres.decode.pgoutput import LEFTOVER, PG_EPOCH_US, TRUNCATED, protocol_error

__all__ = [
    "WireColumn",
    "WireRelation",
    "WireStreamCommit",
    "parse_relation",
    "parse_stream_abort",
    "parse_stream_commit",
    "parse_stream_start",
    "parse_truncate",
]


@dataclass(frozen=True, slots=True)
class WireColumn:
    name: str
    is_key: bool
    type_oid: int
    typmod: int


@dataclass(frozen=True, slots=True)
class WireRelation:
    """A Relation message: the columns of the following rows of this table."""

    oid: int
    schema: str
    name: str
    identity: str
    columns: tuple[WireColumn, ...]


def _cstring(raw: bytes, at: int) -> tuple[str, int]:
    end = raw.find(b"\0", at)
    if end < 0:
        raise protocol_error(TRUNCATED, at)
    try:
        return raw[at:end].decode(), end + 1
    except UnicodeDecodeError as exc:
        raise ProtocolError(f"a name that is not UTF-8 at byte {at}", offset=at) from exc


def parse_relation(raw: bytes) -> WireRelation:
    """Read a Relation message (without its type byte)."""
    if len(raw) < 4:
        raise protocol_error(TRUNCATED, 0)
    schema, at = _cstring(raw, 4)
    name, at = _cstring(raw, at)
    if at + 3 > len(raw):
        raise protocol_error(TRUNCATED, at)
    identity = chr(raw[at])
    count = int.from_bytes(raw[at + 1 : at + 3], "big")
    at += 3
    columns = []
    for _ in range(count):
        if at >= len(raw):
            raise protocol_error(TRUNCATED, at)
        flags = raw[at]
        column, at = _cstring(raw, at + 1)
        if at + 8 > len(raw):
            raise protocol_error(TRUNCATED, at)
        oid = int.from_bytes(raw[at : at + 4], "big")
        typmod = int.from_bytes(raw[at + 4 : at + 8], "big", signed=True)
        columns.append(WireColumn(column, bool(flags & 1), oid, typmod))
        at += 8
    if at != len(raw) or identity not in "dnfi":
        raise protocol_error(LEFTOVER, at)
    return WireRelation(
        int.from_bytes(raw[:4], "big"), schema or "pg_catalog", name, identity, tuple(columns)
    )


def parse_truncate(raw: bytes) -> tuple[int, ...]:
    """Relation oids of a Truncate message (without its type byte)."""
    if len(raw) < 5:
        raise protocol_error(TRUNCATED, 0)
    count = int.from_bytes(raw[:4], "big")
    if len(raw) != 5 + 4 * count:
        raise protocol_error(TRUNCATED, len(raw))
    return tuple(int.from_bytes(raw[5 + 4 * i : 9 + 4 * i], "big") for i in range(count))


@dataclass(frozen=True, slots=True)
class WireStreamCommit:
    """The end of a streamed transaction: the information that Begin and Commit have for other transactions."""

    xid: int
    lsn: int
    position: int
    time_us: int


# The lengths of these were checked when the buffer was indexed.


def parse_stream_start(raw: bytes) -> tuple[int, bool]:
    """The transaction of the block, and whether this is its first one."""
    xid, first = struct.unpack("!I?", raw)
    return xid, first


def parse_stream_commit(raw: bytes) -> WireStreamCommit:
    xid, _, lsn, position, time_us = struct.unpack("!IBQQq", raw)
    return WireStreamCommit(xid, lsn, position, time_us + PG_EPOCH_US)


def parse_stream_abort(raw: bytes) -> tuple[int, int]:
    """The transaction, and which part of it is void: a subtransaction, or all of it if both are the same."""
    xid, part = struct.unpack("!II", raw)
    return xid, part
