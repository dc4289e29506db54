"""From the configuration of an events flow to its objects: connection string, sink, bookmark store."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from psycopg.conninfo import make_conninfo

from aqueduck.bookmarks import BookmarkStore
from aqueduck.events_config import (
    EventsConfig,
    FileStateConfig,
    HttpSinkConfig,
    JsonlSinkConfig,
    KafkaSinkConfig,
    PostgresCdcConfig,
    PostgresStateConfig,
)
from aqueduck.lake.bookmark_lake import LakeBookmarks
from aqueduck.postgres.bookmark_table import PostgresBookmarks
from aqueduck.postgres.connection import connection_parameters
from aqueduck.schema import parse_table_name
from aqueduck.sinks import Sink
from aqueduck.sinks.bookmark_file import FileBookmarks
from aqueduck.sinks.files import JsonlSink, RotatedJsonlSink
from aqueduck.sinks.http import HttpSink
from aqueduck.sinks.kafka import KafkaSink
from aqueduck.sinks.stdout import StdoutSink

__all__ = ["open_bookmarks", "open_sink", "source_dsn"]


def source_dsn(source: PostgresCdcConfig) -> str:
    """The connection string with what the other keys say about TLS and keepalives."""
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


def open_bookmarks(config: EventsConfig, dsn: str) -> BookmarkStore:
    """The store that the file asks for."""
    state, slot = config.state, config.source.slot_name
    if isinstance(state, FileStateConfig):
        return FileBookmarks(Path(state.path), slot)
    if isinstance(state, PostgresStateConfig):
        table = parse_table_name(state.table, default_schema="public")
        return PostgresBookmarks(state.connection_url or dsn, table, slot)
    return LakeBookmarks(state, slot)


def open_sink(config: EventsConfig, pause: Callable[[float], None] = time.sleep) -> Sink:
    """The sink that the file asks for; it pauses between tries as it is told."""
    sink = config.sink
    if isinstance(sink, JsonlSinkConfig):
        path = Path(sink.path)
        if not sink.rotates:
            return JsonlSink(path)
        return RotatedJsonlSink(path, rotate_bytes=sink.rotate_bytes, rotate_seconds=sink.rotate_seconds)
    if isinstance(sink, HttpSinkConfig):
        return HttpSink(sink, sleep=pause)
    return KafkaSink(sink) if isinstance(sink, KafkaSinkConfig) else StdoutSink()
