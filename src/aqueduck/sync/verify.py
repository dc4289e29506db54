"""
`aqueduck verify`: compare source and lake table by table, even while both change.

Counts and content hashes first, then the first keys that differ. A round compares all keys that did not
change (`verify_rounds`); keys that changed are compared in the next rounds, a few times. Spark reads, or this
process for callers with a small lake.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from aqueduck.config.sync import SyncConfig
from aqueduck.lake.ledger.table_states import TableState
from aqueduck.lake.session.catalog import LakeSession, open_lake
from aqueduck.lake.session.versions import current_version, tables_at
from aqueduck.lake.target.mode_checks import Finding, check_mode
from aqueduck.model.errors import AqueduckError, ConfigError, TableMissingError
from aqueduck.model.schema import TableName, lsn_text, parse_table_name
from aqueduck.postgres.catalog.tables import describe_table
from aqueduck.postgres.registry import registry
from aqueduck.postgres.registry.registry import rows_of
from aqueduck.postgres.session.connection import connect
from aqueduck.spark.query.verify_job import InProcess, OnSpark, Reader
from aqueduck.sync.comparing.verify_reads import Progress, Sides, Verdict, Work
from aqueduck.sync.comparing.verify_rounds import Round

__all__ = ["TableComparison", "verify_tables"]

ROUNDS = 5
WAIT_SECONDS = 60.0
KEYS_SHOWN = 10
_UNREADABLE = TableName("*", "*")
"""In place of the tables of a group whose rows in the registry cannot be read: there may be some that the lake lacks."""


@dataclass(frozen=True, slots=True)
class TableComparison:
    """One table's verdict: identical, different, or not compared."""

    group: str
    table: str
    target: str
    verdict: Verdict
    source_rows: int
    lake_rows: int
    position: str | None
    """The source rows in the state that was compared last."""
    lake_snapshot: int | None
    in_motion: int
    """Keys that changed in every round, and were not compared."""
    differing: int
    """Keys that differ; a lower bound if `more`."""
    more: bool
    differences: tuple[dict[str, Any], ...]
    """The first differing keys: kind and key."""
    note: str | None
    behind: bool = False
    """The lake lacked changes up to the position: differences may only be late."""
    findings: tuple[Finding, ...] = ()
    """Inconsistencies within the lake table; only for a deep comparison."""

    @property
    def same(self) -> bool:
        return self.verdict == "identical"

    def to_dict(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__slots__}
        findings = [{"rows": f.rows, "what": f.what} for f in self.findings]
        return {**fields, "differences": list(self.differences), "findings": findings, "same": self.same}


def verify_tables(
    config: SyncConfig,
    *,
    session: LakeSession | None = None,
    spark: Any = None,
    tables: Sequence[str] = (),
    wait_seconds: float = WAIT_SECONDS,
    deep: bool = False,
    reader: Callable[[LakeSession], Reader] | None = None,
    progress: Progress | None = None,
) -> list[TableComparison]:
    """
    Compare all tables of the lake, the registry or the file, or only `tables`.

    `session` is for callers whose own process holds the catalog; without `spark`, this process reads, unless
    there is a `reader`. `deep` also checks the lake tables' internal consistency.
    """
    with contextlib.ExitStack() as stack:
        lake = session or stack.enter_context(contextlib.closing(open_lake(config.lake, read_only=True)))
        conn = stack.enter_context(connect(config.source.dsn))
        reads = reader or (InProcess if spark is None else functools.partial(OnSpark, spark))
        works = _chosen(_works(config, lake, conn), tables)
        slots = _slots(config, conn, {work.group for work in works})
        say = progress or (lambda _table, _doing, _share: None)
        by_sql = any(group.capture == "poll" for group in config.groups)
        comparison = Round(
            Sides(config.source.dsn, conn, lake, reads(lake), say, by_sql), slots, wait_seconds
        )
        for _ in range(ROUNDS):
            left = [work for work in works if work.verdict is None]
            if not left:
                break
            comparison.run(left)
        if deep:
            _check_modes(lake, works)
    return [_result(work) for work in works]


def _works(config: SyncConfig, lake: LakeSession, conn: psycopg.Connection[Any]) -> list[Work]:
    """All tables in the lake, plus those of the registry and the file that are not in the lake yet."""
    known = tables_at(lake, current_version(lake))
    works = [Work(group, state) for group, states in known.items() for state in states.values()]
    for group, source, target, note in _should_be_there(config, conn):
        # A table of the file may have been moved to another group.
        beside = [w.state for w in works if group is None or w.group == group]
        if any(state.source == source.qualified for state in beside):
            continue
        oid = _oid(conn, str(source))
        if any(state.oid == oid for state in beside):
            continue
        state = TableState(0, source.qualified, target, False, 0)
        note = note or "it is not in the lake yet"
        works.append(Work(group or "", state, verdict="not compared", note=note))
    return works


def _check_modes(lake: LakeSession, works: Sequence[Work]) -> None:
    """Check the mode columns of the targets at the compared lake snapshots."""
    for work in works:
        if work.version is None or work.verdict == "not compared":
            continue
        target = work.state.target
        states = (s for group in tables_at(lake, work.version).values() for s in group.values())
        values = {
            s.mode.source_value for s in states if s.target == target and s.mode.source_value is not None
        }
        work.findings = tuple(check_mode(lake, target, work.version, work.state.mode, values))


def _should_be_there(
    config: SyncConfig, conn: psycopg.Connection[Any]
) -> Iterator[tuple[str | None, TableName, TableName, str | None]]:
    """
    Group (of the registry), source, target and error of every table registered for this lake.

    If the role may not read an existing registry, the answer is unknown: that is an error, not an empty
    result.
    """
    if registry.exists(conn):
        for group in registry.read_desired(conn, lake=config.lake.data_path):
            if group.problem is not None and group.lake is not None and not group.removed:
                note = f"the registry's rows of the group cannot be read: {group.problem}"
                yield group.name, _UNREADABLE, _UNREADABLE, note
            for row in group.tables:
                if group.lake is not None and not group.removed and not row.removed:
                    yield group.name, row.source, row.target, row.observed.error_message
    for section in config.groups:
        for table in section.tables:
            yield None, table.source_table, table.target_table, None


def _oid(conn: psycopg.Connection[Any], source: str) -> int | None:
    try:
        return describe_table(conn, source, need_key=False).oid
    except TableMissingError:
        return None


def _chosen(works: list[Work], tables: Sequence[str]) -> list[Work]:
    if not tables:
        return works
    wanted = {name: _name(name).qualified for name in tables}
    known = {work.state.source for work in works}
    for text, name in wanted.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = (
                f"did you mean {close[0]}?" if close else f"tables of this lake: {', '.join(sorted(known))}"
            )
            raise ConfigError(f"{text} is not a table of this lake", hint=hint)
    return [work for work in works if work.state.source in wanted.values()]


def _name(text: str) -> TableName:
    try:
        return parse_table_name(text, default_schema="public")
    except ValueError as exc:
        raise ConfigError(f"{text} is not a table name: it {exc}") from None


def _slots(config: SyncConfig, conn: psycopg.Connection[Any], groups: set[str]) -> dict[str, str]:
    """The slot of each group, from the registry, otherwise from the file."""
    slots = {group: f"aqueduck_{group}" for group in groups}
    slots |= {group.name: group.slot_name for group in config.groups}
    with contextlib.suppress(AqueduckError):  # there may be no registry
        slots |= {row["name"]: row["slot_name"] for row in rows_of(conn, "groups")}
    return slots


def _result(work: Work) -> TableComparison:
    verdict, note, in_motion = work.verdict, work.note, 0
    if verdict is None and work.keys is not None and note is None:
        verdict, in_motion = "identical", len(work.keys)
        note = f"{in_motion:,} keys changed during every comparison and were not compared"
    if work.findings:
        verdict = "different"
        found = "; ".join(f"{f.rows:,} {f.what}" for f in work.findings)
        note = found if note is None else f"{note}; {found}"
    if verdict in ("identical", "different") and work.left_out:
        unsent = f"not compared: {', '.join(work.left_out)}, whose unchanged values are not in the WAL"
        note = unsent if note is None else f"{note}; {unsent}"
    return TableComparison(
        group=work.group,
        table=work.state.source,
        target=work.state.target.qualified,
        verdict=verdict or "not compared",
        source_rows=work.source_rows,
        lake_rows=work.lake_rows,
        position=None if work.position is None else lsn_text(work.position),
        lake_snapshot=work.version,
        in_motion=in_motion,
        differing=len(work.differences),
        more=work.more,
        differences=tuple(
            {"kind": d.kind, "key": dict(zip(work.key_names, d.key, strict=True))}
            for d in work.differences[:KEYS_SHOWN]
        ),
        note=note,
        behind=work.behind,
        findings=work.findings,
    )
