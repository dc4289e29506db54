"""
Rows of a target, by mode: which rows belong to a source, which are current, and how rows end.

Conditions and the few statements that depend on the mode, for use inside an open lake transaction.  `fold_modes`
turns changes into rows; `apply` and `copy_commit` use both.
"""

from __future__ import annotations

import structlog

from aqueduck.lake.fold.fold_modes import COPIED_SEQ, RESYNC_SEQ, TIME, change_seq
from aqueduck.lake.ledger.own_targets import forget_target, is_own
from aqueduck.lake.session.catalog import LakeSession
from aqueduck.lake.session.sql import LAKE, ident, lake_table, literal
from aqueduck.lake.target.places import is_ours
from aqueduck.model.changes import SegmentRef
from aqueduck.model.modes import MODES, TableMode
from aqueduck.model.schema import TableName, TableSchema

__all__ = [
    "copied_columns",
    "current_rows",
    "end_rows",
    "has_rows",
    "log_resync",
    "own_rows",
    "present_rows",
    "remove_target",
    "source_tag",
    "truncate_target",
]

log = structlog.get_logger()

_CURRENT = {"history": "t._valid_to is null", "soft_delete": "not t._deleted"}
_END = {
    "history": "_valid_to = greatest({at}, t._valid_from)",
    "soft_delete": "_deleted = true, _deleted_at = {at}",
}


def own_rows(mode: TableMode) -> str:
    """The condition that row `t` of the target belongs to this source."""
    if mode.source_column is None or mode.source_value is None:
        return "true"
    return f"t.{ident(mode.source_column)} = {literal(mode.source_value)}"


def current_rows(mode: TableMode) -> str:
    """The condition that row `t` of the target belongs to this source and has not ended."""
    return f"{own_rows(mode)} and {_CURRENT.get(mode.name, 'true')}"


def source_tag(mode: TableMode) -> str:
    """The source column for a select list, with a leading comma; empty if the target has one source."""
    if mode.source_column is None or mode.source_value is None:
        return ""
    return f", {literal(mode.source_value)} as {ident(mode.source_column)}"


def end_rows(session: LakeSession, target: TableName, same_key: str, mode: TableMode, ends: str) -> None:
    """End the rows whose key is in `ends` (k0, …, ended_at); `same_key` is the condition that row `t` has key `k`."""
    ended = session.execute(
        f"update {lake_table(target)} as t set {_END[mode.name].format(at='k.ended_at')} from {ends} as k"
        f" where {same_key} and {current_rows(mode)}",
        doing="ending rows",
        table=target.qualified,
    )
    _count_inlined(session, target, ended[0][0])


def truncate_target(session: LakeSession, target: TableName, mode: TableMode, truncate: SegmentRef) -> None:
    """Delete or end all rows of the source, by mode; `append` writes a truncate event instead."""
    doing = {"doing": "emptying the target", "table": target.qualified}
    if mode.name == "append":
        event = ("truncate", truncate.commit_lsn, truncate.commit_ts, change_seq(str(truncate.seq)))
        _write_event(session, target, mode, *event)
    elif mode.name in _END:
        at = TIME.format(truncate.commit_ts)
        session.execute(
            f"update {lake_table(target)} as t set {_END[mode.name].format(at=at)} where {current_rows(mode)}",
            **doing,
        )
    else:
        session.execute(f"delete from {lake_table(target)} as t where {own_rows(mode)}", **doing)


def log_resync(session: LakeSession, target: TableName, mode: TableMode, position: int, time_us: int) -> None:
    """Write the `resync` event to a log: a new copy follows, and earlier events no longer describe the rows."""
    _write_event(session, target, mode, "resync", position, time_us, str(RESYNC_SEQ))


def _write_event(
    session: LakeSession, target: TableName, mode: TableMode, op: str, lsn: int, time_us: int, seq: str
) -> None:
    values = (
        f"{literal(op)} as _op, {lsn} as _commit_lsn, {TIME.format(time_us)} as _commit_time, {seq} as _seq"
    )
    session.execute(
        f"insert into {lake_table(target)} by name select {values}{source_tag(mode)}",
        doing="writing an event",
        table=target.qualified,
    )
    _count_inlined(session, target, 1)


def _count_inlined(session: LakeSession, target: TableName, rows: int) -> None:
    """Count rows that were written, if there are so few that DuckLake inlined them."""
    if rows <= session.inline_rows:
        session.memory.inlined_rows[target] = session.memory.inlined_rows.get(target, 0) + rows


def has_rows(session: LakeSession, target: TableName, mode: TableMode) -> bool:
    """Whether the target has rows of this source."""
    return bool(session.execute(f"select 1 from {lake_table(target)} as t where {own_rows(mode)} limit 1"))


def remove_target(session: LakeSession, target: TableName, mode: TableMode, uuid: str | None = None) -> None:
    """Drop the target if Aqueduck made it; if other sources fill it too, delete only the rows of this source."""
    if not is_own(session, target) or not is_ours(session, target, uuid):
        log.warning("target not dropped: Aqueduck did not make it", table=target.qualified)
        return
    if mode.source_column is None:
        session.execute(f"drop table if exists {lake_table(target)}", table=target.qualified)
        forget_target(session, target)
        return
    found = session.execute(
        "select 1 from duckdb_tables() where database_name = ? and lower(schema_name) = lower(?)"
        " and lower(table_name) = lower(?)",
        (LAKE, target.schema, target.name),
    )
    if found:
        session.execute(f"delete from {lake_table(target)} as t where {own_rows(mode)}")


def present_rows(mode: TableMode, schema: TableSchema, relation: str) -> str:
    """A query for those rows of `relation` (the target) that the source has now."""
    if mode.name != "append":
        return f"select t.* from {relation} as t where {current_rows(mode)}"
    # Of the events after the last truncate or resync, the last one of each key.
    place = "(t._commit_lsn, t._seq)"
    own = f"{relation} as t where {own_rows(mode)}"
    void = f"select max({place}) from {own} and _op in ('truncate', 'resync')"
    since = f"select t.*, {place} as place from {own} and {place} > coalesce(({void}), (-1, -1))"
    if 0 < len(schema.key) < len(schema.columns):
        keys = ", ".join(ident(name) for name in schema.key)
        return (
            f"select * from (select *, row_number() over (partition by {keys} order by place desc) as nth"
            f" from ({since})) where nth = 1 and _op <> 'delete'"
        )
    # The whole row is the key: count how many copies of each row were inserted and deleted.
    cells = ", ".join(ident(c.name) for c in schema.columns)
    signs = "sum(case _op when 'delete' then -1 when 'update' then 0 else 1 end)"
    counted = f"select {cells}, {signs} as times from ({since}) group by all"
    return f"select * from ({counted}), unnest(range(cast(greatest(times, 0) as bigint)))"


def copied_columns(mode: TableMode, position: int, time_us: int) -> str:
    """The columns of the mode for rows of a copy, as part of a select list."""
    at, never = TIME.format(time_us), "cast(null as timestamptz)"
    values = {
        "append": ["'copy'", f"{position}::bigint", at, f"{COPIED_SEQ}::bigint", "cast(null as json)"],
        "history": [at, never],
        "soft_delete": ["false", never],
    }.get(mode.name, [])
    named = zip(MODES[mode.name], values, strict=True)
    return "".join(f", {value} as {ident(name)}" for (name, _), value in named) + source_tag(mode)
