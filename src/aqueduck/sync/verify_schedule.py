"""
Scheduled comparison of a running sync's tables: one at a time, beside the stream.

Spark jobs of one task read the source, a separate engine in a low-priority thread reads the lake; between any
two pieces the stream may take priority. A catalog in a DuckDB file is read on the service's own session.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aqueduck.config.sync import SyncConfig
from aqueduck.lake.compare.digest import MEMORY
from aqueduck.lake.session.catalog import LakeSession, open_lake
from aqueduck.overview.verification import Look
from aqueduck.service.verify_schedule import Verdicts, Verifier
from aqueduck.spark.query.verify_job import Gently, OnSpark, Reader
from aqueduck.sync.verify import TableComparison, verify_tables

if TYPE_CHECKING:  # the service starts the verifier
    from aqueduck.sync.service import SyncService

__all__ = ["subject", "sync_verdicts", "sync_verifier"]

FLOW = "sync"
WAIT_SECONDS = 30.0
"""How long the lake may take to reach the position of the source's snapshot."""
BEHIND = "the lake was behind the source, and differences may only be late"


def subject(group: str, source: str) -> str:
    """The name under which a table's verdict is stored."""
    return f"{group} {source}"


def sync_verdicts(config: SyncConfig) -> Verdicts:
    """The verdicts that the last service stored."""
    return Verdicts(Path(config.state_dir) / "verify.notes" / "verdicts.json")  # not a valid group name


Reads = Callable[[LakeSession], Reader]


def sync_verifier(service: SyncService, reads: Reads | None = None) -> Verifier:
    """The verifier of a sync; `reads` reads the source, by default with Spark."""
    source = reads or (lambda lake: OnSpark(service.spark, lake))
    config = service.config.verify

    def subjects() -> list[str]:
        return [
            subject(runner.group.name, str(table.source))
            for runner in service.runners()
            for table in runner.tables.values()
        ]

    def busy() -> str | None:
        for runner in service.runners():
            if runner.copier.busy:
                return "a table is being copied"
            if runner.status.state == "retrying":
                continue  # it waits for its source or its lake, and the tables of others can be compared
            if runner.status.lag_seconds > config.pause_lag_seconds:
                return f"the group {runner.group.name} is {runner.status.lag_seconds:.0f} s behind"
        return None

    verifier = Verifier(
        FLOW,
        config,
        service.verdicts,
        subjects,
        lambda names: _look(service, names, source, verifier.pause),
        busy,
    )
    return verifier


def _look(
    service: SyncService, names: Sequence[str], source: Reads, pause: Callable[[], None]
) -> Mapping[str, Look]:
    wanted = {}
    for runner in service.runners():
        for oid, table in runner.tables.items():
            name = subject(runner.group.name, str(table.source))
            if name in names and oid in runner.states:
                wanted[runner.group.name, runner.states[oid].source] = name
    if not wanted:
        return {}
    with _session(service) as session:
        results = verify_tables(
            service.config,
            session=session,
            reader=lambda lake: Gently(source(lake), lake, pause),
            tables=sorted({name for _, name in wanted}),
            wait_seconds=WAIT_SECONDS,
            deep=service.config.verify.deep,
        )
    return {wanted[r.group, r.table]: _as_look(r) for r in results if (r.group, r.table) in wanted}


@contextlib.contextmanager
def _session(service: SyncService) -> Iterator[LakeSession]:
    if service.lake.kind == "duckdb":
        yield service.lake
        return
    with open_lake(service.config.lake, threads=1, memory_limit=MEMORY, read_only=True) as session:
        yield session


def _as_look(found: TableComparison) -> Look:
    if found.verdict == "different" and found.behind and not found.findings:
        return Look(verdict="not compared", note=BEHIND)
    rows = found.differing + sum(f.rows for f in found.findings)
    return Look(verdict=found.verdict, differences=rows, note=_note(found))


def _note(found: TableComparison) -> str | None:
    """Kinds and numbers only: keys are values, which only the command line shows."""
    if found.verdict != "different":
        return found.note
    kinds: dict[str, int] = {}
    for difference in found.differences:
        kinds[difference["kind"]] = kinds.get(difference["kind"], 0) + 1
    shown = f"of the first {len(found.differences)}: " if found.differing > len(found.differences) else ""
    keys = f"{found.differing:,}{' or more' if found.more else ''} keys differ"
    listed = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    parts = [f"{keys} ({shown}{listed})"] if found.differing else []
    return "; ".join([*parts, *([found.note] if found.note else [])]) or None
