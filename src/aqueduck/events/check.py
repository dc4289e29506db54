"""The preflight of an events flow, like `check` for `sync`; it does not touch the stream."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from aqueduck.config.events import (
    DuckLakeSinkConfig,
    EventsConfig,
    FileStateConfig,
    HttpSinkConfig,
    JsonlSinkConfig,
    KafkaSinkConfig,
    LakeStateConfig,
    PostgresSinkConfig,
    PostgresStateConfig,
)
from aqueduck.config.sync import LakeConfig
from aqueduck.events.prepare import refuse_lost
from aqueduck.events.status import flow_dir
from aqueduck.events.watch import EventsWatch
from aqueduck.events.wiring import load_bookmark, open_sink, source_dsn, table_of
from aqueduck.model.bookmarks import Bookmark
from aqueduck.model.errors import AqueduckError, CatalogUnreachableError, SinkPathError
from aqueduck.postgres.publications.published import check_publication, refuse_narrowed
from aqueduck.postgres.session.connection import connect
from aqueduck.postgres.session.server import ServerInfo, read_server
from aqueduck.service.check_lake import check_catalog, check_data_path, check_state_dir
from aqueduck.service.check_server import (
    CheckResult,
    Connection,
    check_pooler,
    encryption_of,
    refused,
    result_of,
    server_checks,
)
from aqueduck.service.check_spark import spark_checks
from aqueduck.sinks.bookmark_table import check_bookmark_table
from aqueduck.sinks.lake_table import check_events_lake
from aqueduck.sinks.postgres_table import check_events_table
from aqueduck.web.server import check_server

__all__ = ["run_event_checks"]


def run_event_checks(config: EventsConfig) -> list[CheckResult]:
    """Run every check that can be run; checks that depend on a failed connection are skipped."""
    results = list(_source_checks(config))
    results.append(result_of("state", _check_state, config))
    results.append(result_of("sink", _check_sink, config))
    results.append(result_of("state directory", check_state_dir, config.state_dir, [flow_dir(config)]))
    if config.server is not None:
        results.append(result_of("HTTP server", check_server, config.server, os.environ))
    return [*results, *spark_checks(config.spark)]


def _source_checks(config: EventsConfig) -> Iterator[CheckResult]:
    with contextlib.ExitStack() as stack:
        try:
            dsn = source_dsn(config.source)
            conn = stack.enter_context(connect(dsn))
            server = read_server(conn)
        except AqueduckError as exc:
            yield refused("connection", exc)
            return
        yield from server_checks(server, dsn, {config.source.capture})
        yield encryption_of(conn)
        yield result_of("pooler", check_pooler, conn, {config.source.capture})
        name = config.source.publication_name
        yield result_of(f"publication {name}", _check_publication, conn, config, dsn)
        yield result_of(f"slot {config.source.slot_name}", _check_slot, conn, server, config, dsn)


def _check_publication(conn: Connection, config: EventsConfig, dsn: str) -> str:
    source = config.source
    said = check_publication(conn, source.publication_name)
    refuse_narrowed(conn, source.publication_name, source.plugin)
    begins_anew = source.slot_type == "temporary" or _bookmark(config, dsn) is None
    if not begins_anew:
        EventsWatch(source, dsn, flow_dir(config)).refuse_gap(conn)
    return said


def _bookmark(config: EventsConfig, dsn: str) -> Bookmark | None:
    with contextlib.suppress(CatalogUnreachableError):  # another check reports that
        return load_bookmark(config, dsn)
    return None


def _check_slot(conn: Connection, server: ServerInfo, config: EventsConfig, dsn: str) -> str:
    source = config.source
    info = refuse_lost(conn, dsn, source, server, _bookmark(config, dsn), flow_dir(config) / "confirmed")
    if source.slot_type == "temporary":
        return "is made for each run"
    if info is None:
        return "will be created"
    return f"exists, keeps {info.retained_bytes / (1 << 20):.1f} MiB of WAL"


def _check_state(config: EventsConfig) -> str:
    if isinstance(config.sink, PostgresSinkConfig | DuckLakeSinkConfig):
        return f"the bookmark is in the sink; {_writable(Path(config.state_dir), 'state_dir')}"
    if isinstance(config.state, FileStateConfig):
        return _writable(Path(config.state.path), "state.config.path")
    if isinstance(config.state, LakeStateConfig) and (said := _check_lake(config.state)):
        return said
    dsn = source_dsn(config.source)
    bookmark = load_bookmark(config, dsn)
    if isinstance(config.state, PostgresStateConfig):
        with connect(config.state.connection_url or dsn) as conn:
            check_bookmark_table(conn, table_of(config.state))
    return "has a bookmark" if bookmark else "has no bookmark yet"


def _check_lake(lake: LakeConfig) -> str | None:
    """Findings about a lake that does not exist yet."""
    check_data_path(lake)
    catalog = check_catalog(lake)
    return f"the catalog {catalog}" if catalog.endswith("can be created") else None


def _check_sink(config: EventsConfig) -> str:
    sink = config.sink
    if isinstance(sink, JsonlSinkConfig):
        path = Path(sink.path)
        if path.is_dir() or (path.exists() and not os.access(path, os.W_OK)):
            raise SinkPathError(
                "sink.config.path cannot be written", hint="name a file that this user may write"
            )
        return _writable(path.parent, "sink.config.path")
    if isinstance(sink, PostgresSinkConfig):
        return check_events_table(sink.connection_url or source_dsn(config.source), table_of(sink))
    if isinstance(sink, DuckLakeSinkConfig):
        return _check_lake(sink) or check_events_lake(sink, table_of(sink))
    with contextlib.closing(open_sink(sink)):  # neither sends anything: a request would be a delivery
        if isinstance(sink, HttpSinkConfig):
            return "webhook"
        return "kafka" if isinstance(sink, KafkaSinkConfig) else "standard output"


def _writable(directory: Path, key: str) -> str:
    """Whether files can be created in a directory, or the directory itself can be created."""
    existing = next(d for d in (directory, *directory.parents) if d.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise SinkPathError(f"{key} cannot be written", hint=f"let this user write in {existing}")
    return f"{directory} can be written"
