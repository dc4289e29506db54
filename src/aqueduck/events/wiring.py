"""Create the objects of an events flow from its configuration: connection string, sink, bookmark store."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from psycopg.conninfo import make_conninfo

from aqueduck.config.events import (
    DuckLakeSinkConfig,
    EventsConfig,
    HttpSinkConfig,
    JsonlSinkConfig,
    KafkaSinkConfig,
    LakeStateConfig,
    PostgresCdcConfig,
    PostgresSinkConfig,
    PostgresStateConfig,
    StdoutSinkConfig,
)
from aqueduck.model.bookmarks import Bookmark, BookmarkStore
from aqueduck.model.schema import TableName, parse_table_name
from aqueduck.postgres.session.connection import connection_parameters
from aqueduck.sinks import Sink
from aqueduck.sinks.bookmark_file import FileBookmarks
from aqueduck.sinks.bookmark_lake import LakeBookmarks, read_lake_bookmark
from aqueduck.sinks.bookmark_table import PostgresBookmarks
from aqueduck.sinks.files import JsonlSink, RotatedJsonlSink
from aqueduck.sinks.kafka import KafkaSink
from aqueduck.sinks.lake_table import LakeEvents
from aqueduck.sinks.postgres_table import EventsTable, bookmarks_beside
from aqueduck.sinks.stdout import StdoutSink

__all__ = ["load_bookmark", "open_flow", "open_sink", "own_tables", "source_dsn", "table_of"]


def source_dsn(source: PostgresCdcConfig) -> str:
    """The connection string with the TLS and keepalive settings of the other keys."""
    given = connection_parameters(source.connection_url)
    keywords: dict[str, str | int] = {}
    if source.tls is not None:
        keywords["sslmode"] = source.tls.mode.replace("_", "-")
        if source.tls.ca_path:
            keywords["sslrootcert"] = source.tls.ca_path
    if source.tcp_keepalive == 0:
        keywords["keepalives"] = 0
    elif "keepalives_idle" not in given:
        keywords["keepalives_idle"] = source.tcp_keepalive
    return make_conninfo("", **{**given, **keywords})


def open_flow(
    config: EventsConfig, dsn: str, pause: Callable[[float], None] = time.sleep
) -> tuple[Sink, BookmarkStore]:
    """The sink that the file names, with `pause` as its wait between attempts, and the store of its bookmark."""
    slot, sink, state = config.source.slot_name, config.sink, config.state
    if isinstance(sink, PostgresSinkConfig | DuckLakeSinkConfig):
        table = _open_table(sink, slot, dsn)
        return table, table
    store: BookmarkStore
    if isinstance(state, PostgresStateConfig):
        store = PostgresBookmarks(state.connection_url or dsn, table_of(state), slot)
    elif isinstance(state, LakeStateConfig):
        store = LakeBookmarks(state, slot)
    else:
        store = FileBookmarks(Path(state.path), slot)
    return open_sink(sink, pause), store


def load_bookmark(config: EventsConfig, dsn: str) -> Bookmark | None:
    """The stored bookmark; nothing is created if there is none."""
    slot, sink, state = config.source.slot_name, config.sink, config.state
    if isinstance(sink, DuckLakeSinkConfig):
        return read_lake_bookmark(sink, slot)
    if isinstance(state, LakeStateConfig):
        return read_lake_bookmark(state, slot)
    store: BookmarkStore
    if isinstance(sink, PostgresSinkConfig):
        store = PostgresBookmarks(sink.connection_url or dsn, bookmarks_beside(table_of(sink)), slot)
    elif isinstance(state, PostgresStateConfig):
        store = PostgresBookmarks(state.connection_url or dsn, table_of(state), slot)
    else:
        store = FileBookmarks(Path(state.path), slot)
    with contextlib.closing(store):
        return store.load()


def _open_table(
    sink: PostgresSinkConfig | DuckLakeSinkConfig, slot: str, dsn: str
) -> EventsTable | LakeEvents:
    if isinstance(sink, PostgresSinkConfig):
        return EventsTable(sink.connection_url or dsn, table_of(sink), slot)
    return LakeEvents(sink, table_of(sink), slot)


def open_sink(
    sink: JsonlSinkConfig | StdoutSinkConfig | HttpSinkConfig | KafkaSinkConfig,
    pause: Callable[[float], None] = time.sleep,
) -> Sink:
    """A sink that keeps no bookmark."""
    if isinstance(sink, JsonlSinkConfig):
        path = Path(sink.path)
        if not sink.rotates:
            return JsonlSink(path)
        return RotatedJsonlSink(path, rotate_bytes=sink.rotate_bytes, rotate_seconds=sink.rotate_seconds)
    if isinstance(sink, HttpSinkConfig):
        from aqueduck.sinks.http import HttpSink  # it imports httpx, which only this sink needs

        return HttpSink(sink, sleep=pause)
    return KafkaSink(sink) if isinstance(sink, KafkaSinkConfig) else StdoutSink()


def table_of(section: PostgresStateConfig | PostgresSinkConfig | DuckLakeSinkConfig) -> TableName:
    """The table that a section names; its parser normalized the name."""
    return parse_table_name(section.table, default_schema="public", fold_case=False)


def own_tables(store: BookmarkStore, system_identifier: str, database: str) -> tuple[str, ...]:
    """Tables that we write in the source itself, as schema.name; their changes are not events."""
    if isinstance(store, PostgresBookmarks):
        return store.own_tables(system_identifier, database)
    return ()
