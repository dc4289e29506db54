"""
Watch the source for changes that the stream does not contain: tables that are dropped or not sent, and
partitions attached or detached with rows.

`SourceWatch.look` reads the catalog and acts: a dropped table leaves the group; a table that gained or lost
rows with a partition is re-copied, unless `on_partition_change` says to keep the lake's rows. A table that
was taken out of our publication is published again, and re-copied. Its findings about publication and slot
are the proof that a group streams (`probe`).
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import structlog

from aqueduck.lake.commit.commit import transact
from aqueduck.lake.ledger.partition_marks import Marks, read_marks, write_marks
from aqueduck.model.errors import PublicationError
from aqueduck.postgres.catalog.structure import (
    Leaf,
    News,
    Structure,
    has_rows,
    has_rows_since_before,
    partition_news,
    read_horizon,
    read_structure,
)
from aqueduck.postgres.publications.slots import look_at_slot
from aqueduck.postgres.session.connection import connect
from aqueduck.postgres.session.history import KnownPast, SlotWatch
from aqueduck.postgres.session.quoting import identifier
from aqueduck.postgres.session.server import flushed_position
from aqueduck.service.probe import Probe, Reading
from aqueduck.state_files.files import NOT_SENT, Sending, read_sendings, write_sendings
from aqueduck.sync.groups.group import GroupRunner
from aqueduck.sync.groups.group_tables import leave_table
from aqueduck.sync.publishing import publish, read_sent

__all__ = ["SourceWatch"]

log = structlog.get_logger()


class SourceWatch:
    """Checks groups' tables in the source's catalog periodically."""

    def __init__(self) -> None:
        self._awaited: dict[int, int] = {}
        """
        Tables that seem to have been truncated as a whole, and the position by which the stream must have
        reported it.
        """
        self._horizons: dict[int, int] = {}
        """When tables last matched their marks: which transactions had ended by then."""
        self._slots: dict[Path, SlotWatch] = {}
        """The watch of each group's slot, by its file."""

    def look(self, runner: GroupRunner) -> None:
        """Check once; raises if the source cannot be read, or `SlotLostError` if it was restored from a backup."""
        before = _sent_before(runner)
        dsn, tables = runner.config.source.dsn, list(runner.tables)
        with connect(dsn) as conn:
            self._look_at_slot(conn, runner)  # first, so that nothing is done to a server that was put back
            horizon = read_horizon(conn)
            structure = read_structure(conn, tables)
            with runner.between_commits() as free:
                known = structure.leaves if free else {}  # otherwise the next look compares them
                marks = read_marks(runner.lake, runner.group.name) if known else {}
            news: dict[int, News] = {}
            for oid, leaves in known.items():
                if runner.book.is_ready(oid):  # otherwise its copy makes the marks
                    known_of = marks.get(oid) or marks_of(leaves, 0)
                    news[oid] = self._news(conn, oid, known_of, leaves)
            sent = read_sent(conn, runner.group)
            active, flushed = look_at_slot(conn, runner.group.slot_name)
        _take_proof(runner, Probe(time.monotonic(), active, flushed))
        _leave_dropped(runner, structure)
        for oid, found in news.items():
            if runner.book.is_ready(oid):
                self._act(runner, oid, found, marks_of(structure.leaves[oid], horizon), marks.get(oid))
        if runner.group.users_publication:
            _record_unsent(runner, before, sent)
        else:
            sent = _publish_again(runner, before, sent)
        _copy_missed(runner, before, sent)

    def _look_at_slot(self, conn: psycopg.Connection[Any], runner: GroupRunner) -> None:
        path = runner.directory / "slot"
        watch = self._slots.setdefault(path, SlotWatch(path))
        watch.look(conn, runner.group.slot_name, runner.timeline, KnownPast(runner.status.position))

    def _news(self, conn: psycopg.Connection[Any], oid: int, before: Marks, leaves: dict[int, Leaf]) -> News:
        """The relevant news: partitions attached with rows, detached, or possibly truncated."""
        found = partition_news(before.nodes, leaves, before.ties)
        horizon = max(before.horizon, self._horizons.get(oid, 0))
        filled = tuple(leaf for leaf in found.attached if has_rows(conn, leaves[leaf]))
        emptied = tuple(
            leaf for leaf in found.rewritten if not has_rows_since_before(conn, leaves[leaf], horizon)
        )
        whole = found.whole and emptied == found.rewritten
        return replace(found, attached=filled, rewritten=emptied, whole=whole)

    def _act(self, runner: GroupRunner, oid: int, news: News, now: Marks, before: Marks | None) -> None:
        group, table = runner.group, runner.tables[oid].schema.qualified
        if news.whole and not news.attached and not news.lost:
            # The stream contains a TRUNCATE of the table itself, but may not have reached it.
            position = self._awaited.setdefault(oid, flushed_position(runner.config.source.dsn))
            if runner.book.take_truncated(oid):
                news = News()
            elif not runner.has_everything_before(position):
                return
        self._awaited.pop(oid, None)
        if news.attached or news.lost or news.rewritten:
            what = _describe(news)
            if group.on_partition_change == "resync":
                log.warning("table is re-copied", group=group.name, table=table, reason=what)
                runner.resync(oid)
                return
            log.warning("the lake keeps its rows", group=group.name, table=table, reason=what)
        self._horizons[oid] = now.horizon
        if before is None or (before.nodes, before.ties) != (now.nodes, now.ties):
            with runner.commit_lock:
                transact(runner.lake, lambda: write_marks(runner.lake, group.name, oid, now))


def _sent_before(runner: GroupRunner) -> dict[int, Sending]:
    """
    How tables were sent at the last look, by the file `publication`, which outlives the service.

    Tables that left the group are forgotten: one that comes back need not have been published in between.
    """
    path = runner.directory / "publication"
    before = read_sendings(path)
    left = runner.book.take_left()
    if not left.isdisjoint(before):
        before = {oid: sending for oid, sending in before.items() if oid not in left}
        write_sendings(path, before)
    return before


def _gaps(tables: Collection[int], before: dict[int, Sending], sent: dict[int, Sending]) -> list[int]:
    """The tables that are sent, but were not for a while."""
    return [oid for oid in tables if oid in sent and not sent[oid].continues(before.get(oid, sent[oid]))]


def _publish_again(
    runner: GroupRunner, before: dict[int, Sending], sent: dict[int, Sending]
) -> dict[int, Sending]:
    """Have our publication send the group's tables and no others; returns how it sends them then."""
    tables = list(runner.tables)
    missing = [oid for oid in tables if oid not in sent]
    before |= dict.fromkeys(missing, NOT_SENT)
    # An extra one is left by a handover whose connection was lost; what was added by hand may lack our options.
    if missing or sent.keys() - set(tables) or _gaps(tables, before, sent):
        with connect(runner.config.source.dsn) as conn:
            publish(conn, runner.group, [t.schema for t in runner.tables.values()])
            return read_sent(conn, runner.group)
    return sent


def _record_unsent(runner: GroupRunner, before: dict[int, Sending], sent: Collection[int]) -> None:
    """Detect tables that a user's publication no longer sends; `_copy_missed` finds those that it sends again."""
    for oid, table in runner.tables.items():
        if oid in sent:
            continue
        before[oid] = NOT_SENT
        if oid in runner.book.unsent:
            continue
        name = runner.group.publication
        error = PublicationError(
            f"the publication {name} does not send the table any more, or not every kind of its changes",
            hint=f"alter publication {identifier(name)} add table {table.source}, or set its option publish to every kind;"
            " the table is re-copied then",
            table=table.source,
        )
        with runner.commit_lock:
            runner.book.record_unsent(oid, error)
        log.error("table is not sent", group=runner.group.name, error=str(error))


def _copy_missed(runner: GroupRunner, before: dict[int, Sending], sent: dict[int, Sending]) -> None:
    """
    Copy tables again that were not sent for a while; one that is being copied is re-copied afterwards.

    What was seen is written last, so that a gap is found again if this is interrupted.
    """
    seen = before | {oid: sent[oid] for oid in runner.tables if oid in sent}
    for oid in _gaps(list(runner.tables), before, sent):
        if runner.copier.is_copying(oid):
            seen[oid] = NOT_SENT
            continue
        ready = runner.book.is_ready(oid)
        if ready or oid in runner.book.unsent:
            with runner.commit_lock:
                runner.book.record_sent_again(oid)
        if not ready:  # its copy, or its handover, begins when it is published
            continue
        table = runner.tables[oid].schema.qualified
        log.warning("table is re-copied: it was not published", group=runner.group.name, table=table)
        runner.resync(oid)
    path = runner.directory / "publication"
    if seen != read_sendings(path):
        write_sendings(path, seen)


def _take_proof(runner: GroupRunner, probe: Probe) -> None:
    status = runner.refresh()
    waits = status.held or status.paused or status.state != "streaming" or not status.reading
    received = int(runner.report().get("received_bytes", 0))
    reading = Reading(runner.group.slot_name, status.seen, received, waits, status.reader != "stream")
    before = runner.proof.error
    runner.proof.take(probe, reading)
    if runner.proof.error is not None and before is None:
        log.error("group does not stream", group=runner.group.name, error=str(runner.proof.error))


def _leave_dropped(runner: GroupRunner, structure: Structure) -> None:
    for oid in [oid for oid in runner.tables if oid not in structure.tables]:
        table = runner.tables[oid].schema.qualified
        log.warning("table dropped at the source", group=runner.group.name, table=table)
        leave_table(runner, oid)


def marks_of(leaves: dict[int, Leaf], horizon: int) -> Marks:
    """The marks of partitions as they are now."""
    nodes = {oid: leaf.filenode for oid, leaf in leaves.items()}
    return Marks(nodes, horizon, {oid: leaf.ties for oid, leaf in leaves.items()})


def _describe(news: News) -> str:
    counted = (
        ("attached", news.attached),
        ("detached or dropped, possibly only for a while", news.lost),
        ("truncated or rewritten", news.rewritten),
    )
    parts = [f"{len(oids)} {what}" for what, oids in counted if oids]
    return "partitions: " + ", ".join(parts)
