"""
What a running service says about itself in its log: a banner at its start, and one line a minute.

The line comes from the overview that page, probes and metrics read as well.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import structlog
from psycopg.conninfo import conninfo_to_dict

from aqueduck import __version__
from aqueduck.lake.session.catalog import catalog_file, catalog_kind, catalog_settings
from aqueduck.overview.values import Overview, Overviews

__all__ = ["announce", "lake_text", "source_text", "summarized", "summary_of"]

log = structlog.get_logger()

SUMMARY_SECONDS = 60.0


def announce(*, source: str, target: str, page: str | None) -> None:
    """The banner."""
    log.info(f"aqueduck {__version__}", source=source, target=target, page=page or "none")


def source_text(dsn: str) -> str:
    """A source for people, without secrets, such as `shop on db.example:5432 as aqueduck`."""
    given = conninfo_to_dict(dsn)
    place = given.get("host") or given.get("hostaddr") or given.get("service") or "the default server"
    port = f":{given['port']}" if given.get("port") else ""
    role = f" as {given['user']}" if given.get("user") else ""
    return f"{given.get('dbname') or given.get('user') or 'the default database'} on {place}{port}{role}"


def lake_text(catalog: str, data_path: str) -> str:
    """A lake for people, without secrets: its catalog and its files."""
    file = catalog_file(catalog)
    if file is not None:
        return f"{catalog_kind(catalog)} {file}, files in {data_path}"
    given = catalog_settings(catalog)
    place = given.get("host") or given.get("hostaddr") or given.get("service") or "the default server"
    return f"postgres {given.get('dbname') or ''} on {place}, files in {data_path}"


@contextlib.contextmanager
def summarized(overviews: Overviews, *, served: bool) -> Iterator[Overviews]:
    """The same overviews, with a line in the log every minute; if no server asks for them, a thread does."""
    talking = _Summarized(overviews)
    if served:
        yield talking
        return
    stopping = threading.Event()

    def ask() -> None:
        while not stopping.wait(SUMMARY_SECONDS):
            talking.overview()

    thread = threading.Thread(target=ask, name="summary", daemon=True)
    thread.start()
    try:
        yield talking
    finally:
        stopping.set()
        thread.join(timeout=10)


class _Summarized:
    """Overviews that log a summary when a minute has passed."""

    def __init__(self, overviews: Overviews) -> None:
        self._overviews = overviews
        self._before: Overview | None = None
        self._said_at = time.monotonic()

    def overview(self) -> Overview:
        overview = self._overviews.overview()
        if self._before is None:
            self._before = overview
        # A thread that asks once a minute is never early.
        if time.monotonic() - self._said_at >= SUMMARY_SECONDS * 0.99:
            log.info("summary", **summary_of(self._before, overview))
            self._before, self._said_at = overview, time.monotonic()
        return overview


def summary_of(before: Overview, now: Overview) -> dict[str, Any]:
    """What a minute brought, and what waits."""
    fields: dict[str, Any] = {}
    for name, rows in (("tables", now.tables), ("destinations", now.destinations)):
        if rows:
            fields[name] = len(rows)
            fields |= {state.lower(): count for state, count in Counter(str(r.state) for r in rows).items()}
    done = _done(now) - _done(before)
    fields["events" if any(g.delivery for g in now.groups) else "changes"] = max(0, done)
    behind = [group.lag_seconds for group in now.groups] + [one.lag_seconds for one in now.destinations]
    fields["lag_seconds"] = round(max(behind, default=0.0), 1)
    waiting = sum(table.parked_rows for table in now.tables)
    if waiting:
        fields["parked"] = waiting
    errors = sum(error.at is not None and error.at > before.at for error in now.errors)
    if errors:
        fields["errors"] = errors
    return fields


def _done(overview: Overview) -> int:
    """Changes, events or rows since the service started; rows of destinations include earlier runs."""
    changes = sum(t.inserts + t.updates + t.deletes + t.truncates for t in overview.tables)
    events = sum(g.delivery.events for g in overview.groups if g.delivery is not None)
    return changes + events + sum(d.rows_replicated for d in overview.destinations)
