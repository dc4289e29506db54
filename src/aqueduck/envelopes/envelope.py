"""
The envelopes: the JSON form of an event for each kind of change.

An envelope is a template for each kind of change: fixed text and placeholders.  `envelopes.json_events` compiles it
and renders whole columns at a time.  docs/events.md explains the values to users.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from aqueduck.model.schema import TableSchema, lsn_text

__all__ = [
    "ENVELOPES",
    "Envelope",
    "EventKind",
    "Placeholder",
    "TemplatePart",
    "envelope_template",
    "truncate_event",
]

Envelope = Literal["default", "flat", "debezium"]
ENVELOPES: tuple[Envelope, ...] = ("default", "flat", "debezium")


class EventKind(enum.IntEnum):
    """The kind of a change; the first three are the values of a segment's `_op`."""

    INSERT = 1
    UPDATE = 2
    DELETE = 3
    UPDATE_FULL = 4
    """An update with the whole old row."""


class Placeholder(enum.Enum):
    """What varies between the events of one template."""

    LSN = "lsn"
    LSN_NUMBER = "lsn_number"
    TIME_MS = "time_ms"
    TIME_US = "time_us"
    XID = "xid"
    SEQ = "seq"
    AFTER = "after"
    BEFORE = "before"
    AFTER_FIELDS = "after_fields"
    BEFORE_FIELDS = "before_fields"


TemplatePart = str | Placeholder


@dataclass(frozen=True, slots=True)
class _Words:
    """An envelope's names for the kinds of change."""

    insert: str
    update: str
    delete: str
    truncate: str

    def of(self, kind: EventKind) -> str:
        if kind is EventKind.INSERT:
            return self.insert
        return self.delete if kind is EventKind.DELETE else self.update


_WORDS = _Words("insert", "update", "delete", "truncate")
_LETTERS = _Words("c", "u", "d", "t")


def envelope_template(
    envelope: Envelope, table: TableSchema, kind: EventKind, *, database: str
) -> list[TemplatePart]:
    """The template of an event for a change of this kind."""
    return _TEMPLATES[envelope](table, kind, database)


def truncate_event(
    envelope: Envelope, table: TableSchema, *, lsn: int, time_us: int, xid: int, seq: int, database: str
) -> str:
    """The event of a truncate, built one by one because truncates are rare."""
    values = {
        Placeholder.LSN: lsn_text(lsn),
        Placeholder.LSN_NUMBER: str(lsn),
        Placeholder.TIME_MS: str(time_us // 1000),
        Placeholder.TIME_US: str(time_us),
        Placeholder.XID: str(xid),
        Placeholder.SEQ: str(seq),
    }
    template = _TEMPLATES[envelope](table, None, database)
    return "".join(values[s] if isinstance(s, Placeholder) else s for s in template)


def _default(table: TableSchema, kind: EventKind | None, _database: str) -> list[TemplatePart]:
    word = _WORDS.truncate if kind is None else _WORDS.of(kind)
    head = f'{{"op":"{word}","schema":{_json(table.schema)},"table":{_json(table.name)},"lsn":"'
    return [
        head, Placeholder.LSN, '","ts_ms":', Placeholder.TIME_MS,
        ',"before":', _before(kind), ',"after":', _after(kind), "}",
    ]  # fmt: skip


def _flat(table: TableSchema, kind: EventKind | None, _database: str) -> list[TemplatePart]:
    word = (_WORDS.truncate if kind is None else _WORDS.of(kind)).upper()
    head = f'{{"event_type":{_json(f"{table.name}.{word}")},"_table":{_json(table.name)},"_op":"{word}"'
    fields = Placeholder.BEFORE_FIELDS if kind is EventKind.DELETE else Placeholder.AFTER_FIELDS
    if kind is None or not table.columns:
        return [head, "}"]
    return [f"{head},", fields, "}"]


def _debezium(table: TableSchema, kind: EventKind | None, database: str) -> list[TemplatePart]:
    letter = _LETTERS.truncate if kind is None else _LETTERS.of(kind)
    source = (
        f',"source":{{"version":"aqueduck","connector":"postgresql","name":{_json(database)},"snapshot":"false"'
        f',"db":{_json(database)},"schema":{_json(table.schema)},"table":{_json(table.name)},"ts_ms":'
    )
    return [
        '{"before":', _before(kind), ',"after":', _after(kind), source, Placeholder.TIME_MS, ',"ts_us":', Placeholder.TIME_US,
        ',"txId":', Placeholder.XID, ',"lsn":', Placeholder.LSN_NUMBER, ',"sequence":"[\\"', Placeholder.LSN_NUMBER, '\\",\\"',
        Placeholder.SEQ, f'\\"]"}},"op":"{letter}","ts_ms":', Placeholder.TIME_MS, "}",
    ]  # fmt: skip


def _before(kind: EventKind | None) -> TemplatePart:
    return Placeholder.BEFORE if kind in (EventKind.DELETE, EventKind.UPDATE_FULL) else "null"


def _after(kind: EventKind | None) -> TemplatePart:
    return "null" if kind in (EventKind.DELETE, None) else Placeholder.AFTER


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_TEMPLATES: dict[Envelope, Callable[[TableSchema, EventKind | None, str], list[TemplatePart]]] = {
    "default": _default,
    "flat": _flat,
    "debezium": _debezium,
}
