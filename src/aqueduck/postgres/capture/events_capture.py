"""
The capture of change events: what `capture`, `decoder` and `stage` do, for whatever a publication holds.

`EventsDecoder` follows tables that it is told of only by the stream, `EventsStage` counts (the limits of a
run and of a transaction), and `EventsCapture` can read a temporary slot, which lives and dies with its
connection.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from aqueduck.model.errors import TransactionTooLargeError
from aqueduck.model.schema import Column, TableSchema
from aqueduck.postgres.capture.capture import Capture
from aqueduck.postgres.capture.capture_settings import CaptureSettings, save_settings
from aqueduck.postgres.capture.readers import open_reader
from aqueduck.postgres.capture.stage import Stage
from aqueduck.postgres.decode import pgoutput as wireformat
from aqueduck.postgres.decode import pgoutput_messages as messages
from aqueduck.postgres.decode.decoder import Commit, Decoder, Place, Rows, Run, Truncate
from aqueduck.postgres.decode.streamed import Finish
from aqueduck.postgres.publications.published import Newcomer, newcomers
from aqueduck.postgres.session.connection import connect
from aqueduck.postgres.session.quoting import identifier, literal
from aqueduck.postgres.session.wire import ReplicationStream, start_stream

__all__ = ["EventsCapture", "EventsDecoder", "EventsSettings", "EventsStage", "StartStream"]

#: tells of all tables of the publication but those with these OIDs
Look = Callable[[Sequence[int]], Mapping[int, Newcomer]]

#: opens the stream at a position; the default reads a slot that exists
StartStream = Callable[[int], ReplicationStream]


@dataclass(frozen=True, slots=True)
class EventsSettings:
    """What the capture of events is told besides; travels to the planner process as a file."""

    capture: CaptureSettings
    tables: tuple[str, ...] = ()
    """What is known of the tables before the stream tells: `TableSchema` as JSON."""
    temporary: bool = False
    copy_of: str | None = None
    """The slot whose position and WAL a temporary one takes over; without, it begins now."""
    max_messages: int | None = None
    max_staged_records: int | None = None
    excluded: tuple[str, ...] = ()
    """Tables, as schema.name, whose changes are nobody's events: our own.  So are those of partitions that they get later."""

    def save(self, path: Path) -> None:
        save_settings(asdict(self), path)

    @classmethod
    def load(cls, path: Path) -> EventsSettings:
        values = json.loads(path.read_text())
        capture = values.pop("capture")
        for name in ("excluded", "tables"):
            values[name] = tuple(values[name])
        return cls(CaptureSettings(**capture), **values)


class EventsDecoder(Decoder):
    """
    A decoder that takes every table of the stream but the excluded ones.

    `look` is given the OIDs that are known and tells of the publication's other tables what the stream does not.
    With `rows_step` it tells the commit of the first transaction that ends so many rows after the last one told; with 0, of each.
    """

    def __init__(
        self,
        tables: Mapping[int, TableSchema],
        *,
        first_ord: int = 0,
        first_version: int = 0,
        excluded: tuple[str, ...] = (),
        look: Look = lambda _: {},
        rows_step: int | None = None,
        streams: bool = False,
    ) -> None:
        super().__init__(tables, first_ord=first_ord, first_version=first_version, streams=streams)
        self._excluded = excluded
        self._look = look
        self._told = frozenset(tables)
        self._seen: dict[int, Newcomer] = {}
        self._unseen: set[int] = set()
        """Tables that the catalog did not have: gone, or made by a transaction that goes on."""
        self._rows_step = rows_step

    def _learn(self, relation: messages.WireRelation) -> None:
        if self._is_excluded(relation):
            self._here[relation.oid] = None
            return
        if relation.oid not in self._known:
            self._known[relation.oid] = self._describe(relation)
        if self._stream is not None and relation.oid in self._unseen:
            self._stream.unresolved[self.next_version] = relation
        super()._learn(relation)

    def _is_excluded(self, relation: messages.WireRelation) -> bool:
        """By its name, or as a partition that an excluded table got while we read."""
        if f"{relation.schema}.{relation.name}" in self._excluded:
            return True
        if not self._excluded or relation.oid in self._told:
            return False
        return not set(self._excluded).isdisjoint(self._newcomer(relation.oid).above)

    def _describe(self, relation: messages.WireRelation) -> TableSchema:
        """A table as the stream tells it; of one with a full identity it marks every column as key, so the catalog is asked."""
        columns = tuple(Column(c.name, c.type_oid, c.typmod) for c in relation.columns)
        key = tuple(c.name for c in relation.columns if c.is_key)
        if relation.identity == "f":
            key = self._newcomer(relation.oid).key
        return TableSchema(relation.oid, relation.schema, relation.name, columns, key, relation.identity)

    def _newcomer(self, oid: int) -> Newcomer:
        """What the catalog says of it; tables that joined together are looked up together."""
        if oid not in self._seen:
            self._seen.update(self._look([*self._told, *self._seen]))
        if oid not in self._seen:
            self._unseen.add(oid)
            return Newcomer()
        self._unseen.discard(oid)
        return self._seen[oid]

    def _finish(self, end: messages.WireStreamCommit) -> Iterator[Run]:
        """With its commit, others see the tables that a transaction made."""
        relations = self._streamed(end.xid).unresolved.values()
        for oid, relation in {r.oid: r for r in relations if r.oid in self._unseen}.items():
            self._known[oid] = self._describe(relation)
        yield from super()._finish(end)

    def _whole(self, buf: wireformat.Bytes, start: Place, stop: Place) -> Iterator[Run]:
        """With `rows_step`, a commit after every so many rows, instead of one after the last whole transaction."""
        if self._rows_step is None:
            yield from super()._whole(buf, start, stop)
            return
        index = self._index
        done = np.flatnonzero(index.tx_end[start[1] : stop[1]] >= 0) + start[1]
        last = int(done[-1]) if done.size else -1
        at, _, control = start
        committed, counted = at, 0
        for tx in range(start[1], stop[1]):
            while control < stop[2] and int(index.control_tx[control]) <= tx:
                yield from self._rows(buf, at, int(index.control_rows[control]))
                at = int(index.control_rows[control])
                yield from self._control(buf, control)
                control += 1
            whole = bool(index.tx_end[tx] >= 0)
            upto = int(index.tx_rows[tx]) if whole else stop[0]
            counted += whole
            if whole and tx != last and upto - committed < self._rows_step:
                continue
            yield from self._rows(buf, at, upto)
            at = upto
            if whole:
                yield self._commit(tx, counted)
                committed, counted = upto, 0


class EventsStage(Stage):
    """A stage that knows how many events it took, and where a run that counts them has to end."""

    def __init__(
        self,
        directory: Path,
        *,
        segment_bytes: int,
        bytes_max: int,
        position: int,
        max_messages: int | None = None,
        max_staged_records: int | None = None,
    ) -> None:
        super().__init__(directory, segment_bytes=segment_bytes, bytes_max=bytes_max, position=position)
        self._max_messages = max_messages
        self._max_staged_records = max_staged_records
        self._events = 0
        self._open_events = 0
        self.limit: int | None = None
        """The first commit with which `max_messages` is reached; nothing after it is handed out."""

    def add(self, run: Run) -> None:
        with self.changed:
            super().add(run)
            if isinstance(run, Finish):
                self._count(self._open.changes, run.changes)
            elif isinstance(run, Truncate) and not run.stream:
                self._count(1, run.seq + 1)
            elif isinstance(run, Rows) and not run.stream:
                self._count(run.batch.num_rows, pc.max(run.batch.column("_seq")).as_py() + 1)
            elif isinstance(run, Commit):
                self._events += self._open_events
                self._open_events = 0
                if self.limit is None and self._is_enough():
                    self.cut()
                    self.limit = run.position

    def _is_enough(self) -> bool:
        return self._max_messages is not None and self._events >= self._max_messages

    def _count(self, events: int, of_transaction: int) -> None:
        """Events that were taken, and how many changes their transaction has so far."""
        self._open_events += events
        if self._max_staged_records is not None and of_transaction > self._max_staged_records:
            raise TransactionTooLargeError(
                f"a transaction has more than {self._max_staged_records} changes (max_staged_records)",
                hint="raise max_staged_records, or leave it out: larger transactions are spilled to disk",
            )

    def abandon_open(self) -> None:
        with self.changed:
            self._open_events = 0
            super().abandon_open()


class EventsCapture(Capture):
    """Reads a publication's changes into an `EventsStage`."""

    def __init__(
        self, settings: EventsSettings, stage: EventsStage, *, start: StartStream | None = None
    ) -> None:
        super().__init__(settings.capture, stage)
        self._events_settings = settings
        # A temporary slot goes with its connection: there is no second try.
        self._in_progress = self._in_progress and not settings.temporary
        self._start_stream = start or self._start_slot

    def _start_slot(self, position: int) -> ReplicationStream:
        s = self._settings
        before = None
        if (other := self._events_settings.copy_of) is not None:
            before = f"select pg_copy_logical_replication_slot({literal(other)}, {literal(s.slot)}, true)"
        elif self._events_settings.temporary:
            before = (
                f"CREATE_REPLICATION_SLOT {identifier(s.slot)} TEMPORARY LOGICAL pgoutput NOEXPORT_SNAPSHOT"
            )
        if before is None:
            return open_reader(s, position, in_progress=self._in_progress)
        return start_stream(
            s.dsn, s.slot, s.publication, position, in_progress=self._in_progress, before=before
        )

    def _open(self, position: int) -> ReplicationStream:
        return self._start_stream(position)

    def _new_decoder(self) -> Decoder:
        events = self._events_settings
        return EventsDecoder(
            {t.oid: t for t in map(TableSchema.from_json, events.tables)},
            first_ord=self._next_ord,
            first_version=self._next_version,
            excluded=events.excluded,
            look=self._newcomers,
            rows_step=None if events.max_messages is None else 0,
            streams=self._in_progress,
        )

    def _newcomers(self, known: Sequence[int]) -> Mapping[int, Newcomer]:
        with connect(self._settings.dsn) as conn:
            return newcomers(conn, self._settings.publication, known)
