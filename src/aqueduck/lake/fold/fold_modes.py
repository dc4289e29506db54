"""
Folds of the modes `append`, `history` and `soft_delete`; `upsert` is in `fold` and, for tables without a key, in `keyless`.

`append` writes every change and folds nothing.  `history` writes the version that each commit left of a key,
and ends the version that the target has.  `soft_delete` writes the last version of each key, deleted or not.
The SQL uses the same timelines as `fold`; this module does not touch the lake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from aqueduck.lake.fold.fold import FRESH, PRESENT, Extra, Fold, Work, net_effect, timeline, with_cells
from aqueduck.lake.fold.keyless import net_rows
from aqueduck.lake.fold.segments import Scans
from aqueduck.lake.session.sql import ident, literal
from aqueduck.model.changes import OP_DELETE, OP_INSERT, OP_UPDATE, SegmentRef
from aqueduck.model.modes import MODES, TableMode
from aqueduck.model.schema import TableSchema

__all__ = ["COPIED_SEQ", "RESYNC_SEQ", "change_seq", "fold_of", "lacks_key"]

RESYNC_SEQ, COPIED_SEQ = 0, 1
"""`_seq` of the `resync` event and of a copy's rows: both sort before changes at the same position."""
_FIRST_SEQ = 2

TIME = "make_timestamptz({})"
_NEVER = "cast(null as timestamptz)"


def fold_of(mode: TableMode) -> Callable[[Work], Fold]:
    """The function that folds runs of a table with this mode."""
    how = _FOLDS[mode.name]
    return how if mode.source_column is None else lambda work: _of_source(how(work), mode)


def lacks_key(mode: TableMode, schema: TableSchema, segments: Sequence[SegmentRef]) -> bool:
    """Whether the run updates or deletes rows, the mode or the row filter needs a key for that, and the table has none."""
    wanted = schema.streamed.projection
    needs = mode.follows_keys or (wanted is not None and bool(wanted.condition))
    return needs and not schema.key and any(s.updates or s.deletes for s in segments)


def change_seq(seq: str, *, second: bool = False) -> str:
    """The `_seq` of a change in its transaction; a change of the key takes two consecutive numbers."""
    return f"2 * {seq} + {_FIRST_SEQ + second}"


def _of_source(fold: Fold, mode: TableMode) -> Fold:
    """The same rows with the source column filled."""
    assert mode.source_column is not None
    assert mode.source_value is not None
    tag = f"{literal(mode.source_value)} as {ident(mode.source_column)}"
    return replace(fold, upserts=f"select *, {tag} from ({fold.upserts})")


def _extras(mode: str, *values: str) -> list[Extra]:
    return [Extra(name, kind, value) for (name, kind), value in zip(MODES[mode], values, strict=True)]


# -- append


def _log(work: Work) -> Fold:
    """Every change as a row; a change of the key becomes a delete and an insert."""
    extras = _log_extras(work)
    if work.own_scans is None:
        # A log is not folded by key, so each fold task takes its share of the segments instead of a bucket of keys.
        work.own_scans = work.scans.some(slice(work.bucket, None, work.buckets))
    mine = work.own_scans
    if mine.empty:
        return Fold(work.no_rows(extras), None, None, 0, 0, 0)
    queries = [_log_query(work, mine, _after(work), extras, "true")]
    if work.key_changes or _moves(work) != "r._kc":
        left = [e._replace(value=v) for e, v in zip(extras, _left_extras(), strict=True)]
        queries.append(_log_query(work, mine, _before(work), left, _moves(work)))
    return Fold(" union all ".join(queries), None, None, None, 0, 0)


def _log_query(
    work: Work, scans: Scans, cells: Sequence[str], extras: Sequence[Extra], condition: str
) -> str:
    old = [f"o{i}" for i in _old_columns(work)]
    source = scans.scan(["_op", "_lsn", "_ts", "_seq", "_kc", "_unchanged", *work.new_image(), *old])
    more = ", ".join(f"{e.value} as {ident(e.name)}" for e in extras)
    return f"select {work.typed_row(cells)}, {more} from {source} r where {condition}"


def _old_columns(work: Work) -> list[int]:
    """Indexes of the columns in the old image of a change."""
    every = range(len(work.schema.columns))
    return list(every) if work.schema.identity == "f" else sorted(work.key)


def _moves(work: Work) -> str:
    """Whether a change moves a row to another key; without a key, the whole row is the key, so every update does."""
    return "r._kc" if work.key else f"r._op = {OP_UPDATE}"


def _after(work: Work) -> list[str]:
    """The row after the change; for a delete, the columns of the old image."""
    old = set(_old_columns(work))
    deletes = any(s.deletes for s in work.segments)
    cells = []
    for i in range(len(work.schema.columns)):
        cell = f"r.n{i}"
        if work.unchanged and i in old:
            cell = f"case when list_contains(r._unchanged, {i}) then r.o{i} else {cell} end"
        if deletes:
            cell = f"case when r._op = {OP_DELETE} then {f'r.o{i}' if i in old else 'null'} else {cell} end"
        cells.append(cell)
    return cells


def _before(work: Work) -> list[str]:
    old = set(_old_columns(work))
    return [f"r.o{i}" if i in old else "null::varchar" for i in range(len(work.schema.columns))]


def _log_extras(work: Work) -> list[Extra]:
    moves = _moves(work)
    ops = f"case when r._op = {OP_DELETE} then 'delete' when r._op = {OP_INSERT} or {moves} then 'insert' else 'update' end"
    names = ", ".join(literal(c.name) for c in work.schema.columns)
    # With REPLICA IDENTITY FULL, the old row has the values that the new one omits.
    sent = work.schema.identity == "f" or not work.unchanged
    unchanged = f"case when len(r._unchanged) > 0 then to_json([[{names}][i + 1] for i in r._unchanged]) end"
    return _extras(
        "append",
        ops,
        "r._lsn",
        TIME.format("r._ts"),
        f"case when {moves} then {change_seq('r._seq', second=True)} else {change_seq('r._seq')} end",
        "cast(null as json)" if sent else unchanged,
    )


def _left_extras() -> list[str]:
    return ["'delete'", "r._lsn", TIME.format("r._ts"), change_seq("r._seq"), "cast(null as json)"]


# -- history


def _versions(work: Work) -> Fold:
    """The version that each commit leaves of a key; the target's current version of the key ends."""
    extras = _extras("history", TIME.format("r._ts"), _NEVER)
    if not work.segments:
        return Fold(work.no_rows(extras), None, None, 0, 0, 0)
    if work.insert_only:
        return _inserts(work, extras)
    entries = _entries(work, "_lsn", "_ts")
    mine = work.in_bucket(work.keys)
    commits = work.table(
        "commits",
        f"select {work.keys}, max(e) as last, min(e) as first, max(_ts) as ts from {entries}"
        f" where {mine} group by {work.keys}, _lsn",
    )
    ended = work.table(
        "ended",
        f"select {work.keys}, {TIME.format('arg_min(ts, first)')} as ended_at from {commits} group by {work.keys}"
        f" having min(first) & {FRESH} = 0",
    )
    live = work.table(
        "live",
        f"select (last >> 2) + {work.base} as ord, until from (select last, lead(ts) over"
        f" (partition by {work.keys} order by last) as until from {commits}) where last & {PRESENT} = {PRESENT}",
    )
    # The source's clock may be set back, but a version must not end before it begins.
    until = f"{TIME.format('greatest(l.until, r._ts)')}"
    extras = _extras(
        "history", TIME.format("r._ts"), f"case when l.until is null then {_NEVER} else {until} end"
    )
    return Fold(
        deletes=None, delete_rows=0, ends=_ends(work, ended), **with_cells(work, entries, live, extras)
    )


# -- soft_delete


def _marked(work: Work) -> Fold:
    """The last version of each key; it replaces the target's row, which may be marked as deleted."""
    extras = _extras("soft_delete", "false", _NEVER)
    if not work.segments:
        return Fold(work.no_rows(extras), None, None, 0, 0, 0)
    if work.insert_only:
        return _inserts(work, extras, replaces=True)
    entries = _entries(work, "_ts")
    net = work.table(
        "net",
        f"select {work.keys}, max(e) as last, max(e) filter (where e & {PRESENT} = {PRESENT}) as shown,"
        f" arg_max(_ts, e) as ts from {entries} where {work.in_bucket(work.keys)} group by {work.keys}",
    )
    live = work.table(
        "live",
        f"select (shown >> 2) + {work.base} as ord, case when last & {PRESENT} = 0 then ts end as gone"
        f" from {net} where shown is not null",
    )
    ended = work.table(
        "ended", f"select {work.keys}, {TIME.format('ts')} as ended_at from {net} where shown is null"
    )
    gone_at = f"case when l.gone is null then {_NEVER} else {TIME.format('l.gone')} end"
    extras = _extras("soft_delete", "l.gone is not null", gone_at)
    return Fold(
        deletes=f"select {work.typed_key(f'{net} where shown is not null')}",
        delete_rows=work.value(f"select count(*) from {live}"),
        ends=_ends(work, ended),
        **with_cells(work, entries, live, extras),
    )


# -- shared by history and soft_delete


def _entries(work: Work, *also: str) -> str:
    # After a change of the key, the value of an unchanged cell may belong to a key of another bucket.
    whole = work.unchanged > 0 and work.key_changes > 0
    return work.table("entries", timeline(work, filtered=not whole, with_links=True, also=also))


def _inserts(work: Work, extras: Sequence[Extra], *, replaces: bool = False) -> Fold:
    """Pass inserts through: without updates and deletes, each change is a row of the lake."""
    mine = work.in_bucket(", ".join(f"r.n{k}" for k in work.key))
    source = work.scans.scan(["_ts", *work.new_image()])
    cells = [f"r.{name}" for name in work.new_image()]
    more = ", ".join(f"{e.value} as {ident(e.name)}" for e in extras)
    upserts = f"select {work.typed_row(cells)}, {more} from {source} r where {mine}"
    if not replaces:
        return Fold(upserts, None, None, None, 0, 0)
    keys = work.scans.scan([f"n{k}" for k in work.key])
    touched = work.table("keys", f"select {work.key_of('n')} from {keys} r where {mine}")
    return Fold(
        upserts,
        f"select {work.typed_key(touched)}",
        None,
        None,
        work.value(f"select count(*) from {touched}"),
        0,
    )


def _ends(work: Work, ended: str) -> str | None:
    if not work.value(f"select count(*) from {ended}"):
        return None
    return f"select ended_at, {work.typed_key(ended)}"


def _net(work: Work) -> Fold:
    return net_effect(work) if work.key or work.insert_only else net_rows(work)


_FOLDS: dict[str, Callable[[Work], Fold]] = {
    "upsert": _net,
    "append": _log,
    "history": _versions,
    "soft_delete": _marked,
}
