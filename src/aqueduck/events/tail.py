"""
`aqueduck tail`: print changes as they happen, and leave nothing behind.

It uses a temporary slot, which ends with its connection, and a publication that is dropped at the end. If a
tail was killed, the next one drops its publication. Spark is not started.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psycopg
from rich.console import Console

from aqueduck.envelopes.envelope import Envelope
from aqueduck.model.errors import ConfigError, NoKeyError, PublicationError, SlotLostError
from aqueduck.model.event_parts import EventPart
from aqueduck.model.schema import TableName, TableSchema, parse_lsn, parse_table_name
from aqueduck.postgres.capture.capture_settings import CaptureSettings
from aqueduck.postgres.capture.events_capture import EventsSettings
from aqueduck.postgres.catalog.tables import describe_table
from aqueduck.postgres.publications.publications import (
    create_publication_sql,
    drop_publication,
    refuse_without_identity,
)
from aqueduck.postgres.publications.published import published_tables
from aqueduck.postgres.publications.slots import slot_info
from aqueduck.postgres.session.connection import connect, translate_errors
from aqueduck.postgres.session.group_lock import lock_group, try_lock_group, unlock_group
from aqueduck.postgres.session.server import read_server
from aqueduck.spark.query.local_events import LocalEventsQuery
from aqueduck.spark.query.part_writer import PartWriter

__all__ = ["TailOptions", "run_tail"]

PREFIX = "aqueduck_tail_"
Format = Literal["json", "flat", "pretty"]


@dataclass(frozen=True, slots=True)
class TailOptions:
    """The command's options."""

    dsn: str
    tables: tuple[str, ...] = ()
    begin: str = "now"
    """`now`, `slot` or an LSN."""
    slot: str | None = None
    publication: str | None = None
    format: Format = "json"
    count: int | None = None


def run_tail(options: TailOptions) -> None:
    """Print until ctrl-C, SIGTERM or `count` events."""
    _check_begin(options)
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    with _directory() as directory, connect(options.dsn, application_name="aqueduck tail") as conn:
        name = f"{PREFIX}{secrets.token_hex(6)}"
        _drop_left_over(conn)
        with _published(conn, options, name) as (publication, tables):
            settings = _settings(conn, options, name, publication, tables, directory)
            printer = _Printer(options, stopping)
            writer = PartWriter(str(directory / "parts"), printer.envelope, conn.info.dbname, "text")
            query = LocalEventsQuery(directory, writer, printer.deliver)
            query.start(settings)
            try:
                while query.active and not stopping.wait(0.1):
                    pass
                query.check()
            finally:
                query.stop()


class _Printer:
    """Prints lines unchanged, or formatted for people."""

    def __init__(self, options: TailOptions, stopping: threading.Event) -> None:
        self.envelope: Envelope = "flat" if options.format == "flat" else "default"
        self._pretty = Console(highlight=False) if options.format == "pretty" else None
        self._left = options.count
        self._stopping = stopping

    def deliver(self, parts: Sequence[EventPart], _position: int, _time_us: int) -> None:
        for part in parts:
            with open(part.path, "rb") as source:
                if self._pretty is None and self._left is None:
                    shutil.copyfileobj(source, sys.stdout.buffer, 1 << 20)
                    continue
                for line in source:
                    if self._left == 0:
                        break
                    self._print(line)
        sys.stdout.flush()
        if self._left == 0:
            self._stopping.set()

    def _print(self, line: bytes) -> None:
        if self._left is not None:
            self._left -= 1
        if self._pretty is None:
            sys.stdout.buffer.write(line)
        else:
            _print_pretty(self._pretty, json.loads(line))


_COLORS = {"insert": "green", "update": "yellow", "delete": "red", "truncate": "magenta"}


def _print_pretty(console: Console, event: dict[str, Any]) -> None:
    name = f"{event['schema']}.{event['table']}"
    console.print(f"[{_COLORS[event['op']]}]{event['op']:<8}[/]", end=" ")
    image = event["after"] if event["after"] is not None else event["before"]
    fields = "  ".join(
        f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in (image or {}).items()
    )
    console.print(f"{event['lsn']:<12} {name}  {fields}", markup=False, soft_wrap=True)


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="aqueduck-tail-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextlib.contextmanager
def _published(
    conn: psycopg.Connection[Any], options: TailOptions, name: str
) -> Iterator[tuple[str, tuple[TableSchema, ...]]]:
    """The publication to read: the one named in the options, or a temporary one."""
    if options.publication is not None:
        yield options.publication, published_tables(conn, options.publication)
        return
    if options.begin != "now":
        raise ConfigError(
            "earlier changes can only be read through a publication that existed then",
            hint="name it with --publication",
        )
    tables = _described(conn, options.tables)
    lock_group(conn, name)  # until the slot exists, only this lock shows that the publication is in use
    try:
        with translate_errors(f"create the publication {name}", conn=conn):
            conn.execute(create_publication_sql(name, tables).encode())
        yield name, tables
    finally:
        drop_publication(conn, name)


def _described(conn: psycopg.Connection[Any], names: Sequence[str]) -> tuple[TableSchema, ...]:
    """The requested tables; without a request, all tables that can be published safely."""
    if names:
        tables = tuple(describe_table(conn, name, need_key=False) for name in names)
        for table in tables:
            refuse_without_identity(table)
        return tables
    with translate_errors("list the tables", conn=conn):
        rows = conn.execute(_ALL_TABLES).fetchall()
    found, left_out = [], []
    for schema, name in rows:
        table = describe_table(conn, str(TableName(schema, name)), need_key=False)
        try:
            refuse_without_identity(table)
            found.append(table)
        except NoKeyError:
            left_out.append(table.qualified)
    if left_out:
        # Publishing them would make the application's updates fail.
        print(f"aqueduck: left out, without a replica identity: {', '.join(left_out)}", file=sys.stderr)
    if not found:
        raise PublicationError("there is no table to tail", hint="create one with a primary key")
    return tuple(found)


_ALL_TABLES = """
    select n.nspname::text, c.relname::text from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where c.relkind in ('r', 'p') and not c.relispartition and c.relpersistence = 'p' and c.oid >= 16384
        and n.nspname not in ('information_schema', 'aqueduck') and n.nspname !~ '^pg_' order by 1, 2
"""


def _settings(
    conn: psycopg.Connection[Any],
    options: TailOptions,
    name: str,
    publication: str,
    tables: tuple[TableSchema, ...],
    directory: Path,
) -> EventsSettings:
    position, copy_of = _begin(conn, options)
    wanted = {_name(t).qualified for t in options.tables}
    others = tuple(t.qualified for t in tables if wanted and t.qualified not in wanted)
    capture = CaptureSettings(
        dsn=options.dsn,
        slot=name,
        publication=publication,
        position=position,
        directory=str(directory),
        segment_bytes=4 << 20,
        stage_bytes_max=256 << 20,
        batch_bytes_max=16 << 20,
        flush_interval_seconds=0.02,
    )
    known = tuple(t.to_json() for t in tables)
    return EventsSettings(capture, tables=known, temporary=True, copy_of=copy_of, excluded=others)


def _check_begin(options: TailOptions) -> None:
    """Refuse an invalid start position before any other error is reported."""
    if options.begin == "slot" and options.slot is None:
        raise ConfigError(
            "--from slot needs the name of a slot", hint="add --slot NAME; see: aqueduck slots list"
        )
    try:
        if options.begin not in ("now", "slot"):
            parse_lsn(options.begin)
    except ValueError:
        raise ConfigError("--from must be now, slot or an LSN such as 0/16A4F88") from None


def _begin(conn: psycopg.Connection[Any], options: TailOptions) -> tuple[int, str | None]:
    """The start position, and the slot that still has the WAL from there."""
    if options.begin == "now":
        return read_server(conn).current_lsn, None
    slot = options.slot
    if options.begin == "slot":
        assert slot is not None
        info = slot_info(conn, slot)
        if info is None or info.confirmed_flush_lsn is None:
            raise SlotLostError(f"the slot {slot} does not exist", hint="see: aqueduck slots list")
        return info.confirmed_flush_lsn, slot
    position = parse_lsn(options.begin)
    with translate_errors("look for a slot", conn=conn):
        row = conn.execute(
            "select slot_name::text from pg_replication_slots where plugin = 'pgoutput' and not temporary"
            " and database = current_database() and confirmed_flush_lsn <= %s::pg_lsn and (%s::text is null or slot_name = %s)"
            " order by confirmed_flush_lsn desc limit 1",
            (options.begin, slot, slot),
        ).fetchone()
    if row is None:
        raise SlotLostError(
            f"no slot of this database still has the WAL from {options.begin}",
            hint="only a slot keeps WAL for decoding; see: aqueduck slots list",
        )
    return position, str(row[0])


def _drop_left_over(conn: psycopg.Connection[Any]) -> None:
    """
    Drop the publications of killed tails: their slots are gone, and so are the connections that locked their
    names.
    """
    with translate_errors("look for publications that a tail left", conn=conn):
        rows = conn.execute(
            "select pubname::text from pg_publication where starts_with(pubname::text, %s) and pg_has_role(pubowner, 'usage')"
            " and pubname not in (select slot_name from pg_replication_slots)",
            (PREFIX,),
        ).fetchall()
    for (name,) in rows:
        if try_lock_group(conn, name):
            drop_publication(conn, name)
            unlock_group(conn, name)


def _name(table: str) -> TableName:
    try:
        return parse_table_name(table, default_schema="public")
    except ValueError as exc:
        raise ConfigError(f"--table {exc}") from None
