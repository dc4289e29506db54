"""
How a flow uses its slot; everything else is in `capture`.

`SlotUse` is the interface.  `GroupUse` is the one of `sync`; those of events and of `postgres_cdc` are in
`events_capture` and `cdc_capture`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from aqueduck.model.errors import ConfigError, PublicationError, TableMissingError
from aqueduck.model.schema import Column, TableSchema
from aqueduck.postgres.capture.capture_settings import CaptureSettings
from aqueduck.postgres.capture.readers import Readers
from aqueduck.postgres.catalog.tables import describe_oid, has_key, resolve_type
from aqueduck.postgres.decode.decoder import Decoder
from aqueduck.postgres.decode.stream_tables import GivenTables
from aqueduck.postgres.session.connection import connect
from aqueduck.postgres.session.wire import ReplicationStream
from aqueduck.state_files.files import file_stamp, read_tables

__all__ = ["CatalogLookups", "GroupUse", "SlotUse"]


class SlotUse(Protocol):
    """How a slot is opened, which tables are decoded, and what is confirmed and reported."""

    confirms_idle: bool
    """Whether the server's own position is confirmed while no change is pending; otherwise only what is durable."""
    reports: bool
    """Whether counters are written for a driver."""
    readers: Readers
    """Which reader is used, and how the last one fared."""

    def open(self, position: int, *, in_progress: bool) -> ReplicationStream:
        """Continue reading after `position`."""

    def decoder(self, *, first_ord: int, first_version: int, in_progress: bool) -> Decoder:
        """A decoder for one session."""

    def look_at_tables(self, decoder: Decoder) -> None:
        """Before a filled buffer is decoded: give the decoder the tables that are wanted now."""


class CatalogLookups:
    """What the stream does not contain about a table; the catalog is asked when it is needed."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    def resolve(self, column: Column) -> Column:
        with connect(self._dsn) as conn:
            return resolve_type(conn, column)

    def keyed(self, table: TableSchema) -> bool:
        with connect(self._dsn) as conn:
            return has_key(conn, table.oid, table.key)

    def settle(self, table: TableSchema) -> TableSchema:
        """A version of a table with a projection, completed from the catalog if the catalog still has these columns."""
        with connect(self._dsn) as conn:
            try:
                now = describe_oid(conn, table.oid, need_key=False, projection=table.projection)
            except (TableMissingError, PublicationError, ConfigError):  # the table has changed since
                now = None
        settled = table.settled(now)
        # A publication of others may have another row filter by now.
        return settled if now is None else replace(settled, projection=now.projection)


class GroupUse:
    """The tables of a group, as the driver writes them into the file `tables`."""

    confirms_idle = True
    reports = True

    def __init__(self, settings: CaptureSettings) -> None:
        self.readers = Readers(settings)
        self._settings = settings
        self._lookups = CatalogLookups(settings.dsn)
        self._tables_mark: tuple[int, int, int] | None = None

    def open(self, position: int, *, in_progress: bool) -> ReplicationStream:
        return self.readers.open(position, in_progress=in_progress)

    def decoder(self, *, first_ord: int, first_version: int, in_progress: bool) -> Decoder:
        return Decoder(self._tables(), first_ord=first_ord, first_version=first_version, streams=in_progress)

    def look_at_tables(self, decoder: Decoder) -> None:
        """
        Follow changes of the table list while the capture reads.

        Every transaction that commits after the state file was written is decoded with the tables in it.
        The driver relies on that: it writes the file before a table is published, and before the snapshot of
        its copy is taken.  Transactions that may be decoded without them (those that had committed, and those that were streamed
        before they ended, for which such a snapshot waits) are part of the copy.
        """
        if self._tables_mark is not None and self._tables_mark != file_stamp(self._settings.tables_path):
            decoder.know(self._tables())

    def _tables(self) -> GivenTables:
        path = self._settings.tables_path
        self._tables_mark = file_stamp(path)  # first: a file that is written meanwhile is read again
        tables = {oid: schema for oid, (schema, _) in read_tables(path).items()}
        ask = self._lookups
        return GivenTables(tables, resolve=ask.resolve, keyed=ask.keyed, settle=ask.settle)
