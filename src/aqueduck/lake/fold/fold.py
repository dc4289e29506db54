"""
Fold: the net effect of an ordered run of changes of one table.

Each key has a timeline.  An insert is a *fresh* appearance, an update an appearance, a delete a
disappearance.  An update of the key is a disappearance of the old key and a fresh appearance of
the new one.  Only the first and the last entry count.  The last one says whether the row exists.
A key whose first entry is fresh cannot be in the target, because the position commits together with the data.

The result is SQL over temporary tables and streams of the connection: rows to write, keys to
delete first, and *patches*: rows with unchanged TOAST cells whose values only the target has.
Keys are compared as PostgreSQL's text; only surviving rows are cast.  This module does not
touch the lake; `apply` writes the result.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import duckdb

from aqueduck.lake.fold.projected import change_view, refuse_lost_values, refuse_unknown
from aqueduck.lake.fold.segments import Scans
from aqueduck.lake.fold.small import is_small, small_effect
from aqueduck.lake.fold.unchanged import UnchangedCells, resolve_unchanged
from aqueduck.lake.session.failures import lake_errors
from aqueduck.lake.session.sql import ident
from aqueduck.model.changes import OP_DELETE, OP_INSERT, SegmentRef
from aqueduck.model.columns.projection import filters_rows
from aqueduck.model.columns.typemap import cast_sql, lake_type
from aqueduck.model.schema import TableSchema
from aqueduck.model.visibility import Visibility

__all__ = [
    "FRESH",
    "PRESENT",
    "Extra",
    "Fold",
    "Work",
    "folded",
    "net_effect",
    "timeline",
    "with_cells",
]

_numbers = itertools.count(1)

# A timeline entry is one number: (order << 2) | (fresh << 1) | present.
PRESENT, FRESH = 1, 2


class Extra(NamedTuple):
    """A column that a mode adds: its name, its type, and an expression over a change `r` and its row of `live`, `l`."""

    name: str
    kind: str
    value: str


@dataclass(frozen=True, slots=True)
class Fold:
    """The net effect of a run.  Each query can be read once, unless the fold was `small`."""

    upserts: str
    """Final rows, with the names and types of the lake's columns."""
    deletes: str | None
    """Keys to delete first, typed, as k0, k1, …; None if there are none."""
    patches: str | None
    """
    Rows that need cells of the target; None if there are none.

    Columns: v0… the row's own cells, t0… the key of the row in the target, u0… whether the cell is read from there.
    """
    upsert_rows: int | None
    """None if the number is known only after writing."""
    delete_rows: int
    patch_rows: int
    ends: str | None = None
    """Keys of target rows that end, and when: k0, k1, …, ended_at; None if no row ends."""
    small: bool = False
    """Whether its queries read a few rows in memory, so that storing their results would cost more than it saves."""


@contextlib.contextmanager
def folded(
    con: duckdb.DuckDBPyConnection,
    segments: Sequence[SegmentRef],
    schema: TableSchema,
    *,
    bucket: int = 0,
    buckets: int = 1,
    skip_before: int | Visibility = 0,
    skip_from: int | Visibility | None = None,
    own: tuple[int, int] | None = None,
    how: Callable[[Work], Fold] | None = None,
) -> Iterator[Fold]:
    """
    Fold `segments`, which are one run: in order, with the same columns, without a truncate.

    With `buckets`, only keys whose hash falls into `bucket` are folded.  With `own` as well, the rows to write are
    those of that range of `segments`, for all keys, so that wide rows are read once.  Changes committed
    before `skip_before` are part of the table's copy and are left out, as are changes from `skip_from` on.
    `how` replaces `net_effect`; see `fold_modes`.
    """
    rows = [s for s in segments if s.kind == "rows"]
    view = change_view(con, schema, rows)
    work = Work(
        con,
        Scans(con, rows, skip_before, skip_from, view),
        rows,
        schema,
        bucket,
        buckets,
        bool(skip_before) or filters_rows(schema),
    )
    if own is not None:
        work.own_scans = Scans(con, segments[slice(*own)], skip_before, skip_from, view)
    try:
        with lake_errors("folding a batch", table=schema.qualified):
            if work.unchanged and schema.source is not None:
                refuse_unknown(con, schema, work.scans.scan(["_op", "_unchanged"], as_it_is=True))
            yield (how or net_effect)(work)
    finally:
        work.close()


def net_effect(work: Work) -> Fold:
    """The net effect of the changes on each key."""
    if not work.segments:
        return Fold(work.no_rows(), None, None, 0, 0, 0)
    if work.buckets == 1 and work.own_scans is None and is_small(work.segments, work.schema):
        return _fold_small(work)
    if work.insert_only:
        return _pass_inserts(work)
    return _fold_changes(work) if work.own_scans is None else _fold_piece(work)


@dataclass
class Work:
    """The state of one fold: its inputs and its temporary tables."""

    con: duckdb.DuckDBPyConnection
    scans: Scans
    segments: Sequence[SegmentRef]
    schema: TableSchema
    bucket: int
    buckets: int
    skipping: bool = False
    own_scans: Scans | None = None

    def __post_init__(self) -> None:
        self.key = self.schema.key_indexes
        self.keys = ", ".join(f"k{i}" for i in range(len(self.key)))
        self.base = self.segments[0].first_ord if self.segments else 0
        self.key_changes = sum(s.key_changes for s in self.segments)
        self.unchanged = sum(s.unchanged for s in self.segments)
        self._tables: list[str] = []

    @property
    def insert_only(self) -> bool:
        return not any(s.updates or s.deletes for s in self.segments)

    def table(self, role: str, query: str) -> str:
        """Create a temporary table from a query."""
        name = f"aqueduck_{role}_{next(_numbers)}"
        self._tables.append(name)
        self.con.execute(f"create temp table {name} as {query}")
        return name

    def value(self, query: str) -> int:
        row = self.con.execute(query).fetchone()
        return int(row[0] or 0) if row else 0

    def in_bucket(self, keys: str) -> str:
        return "true" if self.buckets == 1 else f"hash({keys}) % {self.buckets} = {self.bucket}"

    def key_of(self, image: str) -> str:
        return ", ".join(f"{image}{k} as k{i}" for i, k in enumerate(self.key))

    def typed_key(self, source: str) -> str:
        columns = self.schema.columns
        return (
            ", ".join(f"{cast_sql(columns[k], f'k{i}')} as k{i}" for i, k in enumerate(self.key))
            + f" from {source}"
        )

    def new_image(self) -> list[str]:
        return [f"n{i}" for i in range(len(self.schema.columns))]

    def typed_row(self, cells: Sequence[str]) -> str:
        """Cells (text), cast to the types of the lake's columns."""
        typed = (
            f"{cast_sql(c, cell)} as {ident(c.name)}"
            for c, cell in zip(self.schema.columns, cells, strict=True)
        )
        return ", ".join(typed)

    def no_rows(self, extras: Sequence[Extra] = ()) -> str:
        columns = [(c.name, lake_type(c)) for c in self.schema.columns] + [(e.name, e.kind) for e in extras]
        nulls = ", ".join(f"cast(null as {kind}) as {ident(name)}" for name, kind in columns)
        return f"select {nulls} where false"

    def close(self) -> None:
        self.scans.close()
        if self.own_scans is not None:
            self.own_scans.close()
        for name in self._tables:
            with contextlib.suppress(duckdb.Error):  # already dropped by a rollback or a lost connection
                self.con.execute(f"drop table if exists {name}")


def _fold_small(work: Work) -> Fold:
    effect = small_effect(work.segments, work.schema, *work.scans.range)
    rows, keys = effect.rows.num_rows, effect.keys.num_rows
    upserts = (
        f"select {work.typed_row(_cells(work))} from {work.scans.add(effect.rows)} r"
        if rows
        else work.no_rows()
    )
    deletes = f"select {work.typed_key(work.scans.add(effect.keys))}" if keys else None
    return Fold(upserts, deletes, None, rows, keys, 0, small=True)


def _pass_inserts(work: Work) -> Fold:
    """Pass inserts through: without updates and deletes, each change is a row of the lake."""
    mine = work.in_bucket(", ".join(f"r.n{k}" for k in work.key))
    rows = sum(s.rows for s in work.segments)
    source = work.scans.scan(work.new_image())
    upserts = f"select {work.typed_row(_cells(work))} from {source} r where {mine}"
    known = work.buckets == 1 and not work.skipping
    return Fold(upserts, None, None, rows if known else None, 0, 0)


def _fold_changes(work: Work) -> Fold:
    # After a change of the key, the value of an unchanged cell may belong to a key of another bucket.
    follow = work.unchanged > 0
    whole = follow and work.key_changes > 0
    all_of_them = timeline(work, filtered=not whole, with_links=follow)
    entries = work.table("entries", all_of_them) if follow else f"({all_of_them})"
    net = work.table(
        "net",
        f"select {work.keys}, max(e) as last, min(e) as first from {entries}"
        f" where {work.in_bucket(work.keys) if whole else 'true'} group by {work.keys}",
    )
    alive = f"select (last >> 2) + {work.base} as ord from {net} where last & {PRESENT} = {PRESENT}"
    gone = f"{net} where first & {FRESH} = 0"
    delete_rows = work.value(f"select count(*) from {gone}")
    deletes = f"select {work.typed_key(gone)}" if delete_rows else None
    live = work.table("live", alive)
    return Fold(deletes=deletes, delete_rows=delete_rows, **with_cells(work, entries, live))


class _Rows(TypedDict):
    upserts: str
    upsert_rows: int
    patches: str | None
    patch_rows: int


def with_cells(work: Work, entries: str, live: str, extras: Sequence[Extra] = ()) -> _Rows:
    """The rows of `live` (ord, …) with all their cells; rows that need cells of the target become patches."""
    cells = _unchanged_cells(work, entries, live) if work.unchanged else None
    patch_rows = 0
    patches = None
    if cells is not None:
        patch_rows = work.value(f"select count(*) from {cells.table} where patch")
        if patch_rows:
            if filters_rows(work.schema):
                refuse_lost_values(work.con, work.schema, entries, cells.table, PRESENT)
            patches = _patch_query(work, cells, live, extras)
            live = work.table(
                "live", f"from {live} where ord not in (select ord from {cells.table} where patch)"
            )
    upsert_rows = work.value(f"select count(*) from {live}")
    upserts = _upsert_query(work, live, cells, extras) if upsert_rows else work.no_rows(extras)
    return {
        "upserts": upserts,
        "upsert_rows": upsert_rows,
        "patches": patches,
        "patch_rows": patch_rows,
    }


def _fold_piece(work: Work) -> Fold:
    """
    Fold one piece of a run: read the keys of all segments, but write only the rows of the piece's own segments.

    A key whose only entry is a fresh appearance needs no timeline; in most runs, most rows have such keys.
    """
    assert work.own_scans is not None
    assert not work.unchanged
    fresh = PRESENT | FRESH
    busy = work.table(
        "busy",
        f"select distinct {work.keys} from ({timeline(work, filtered=False, with_links=False)}) where e & {fresh} <> {fresh}",
    )
    net = work.table(
        "net",
        f"select {work.keys}, max(e) as last, min(e) as first from ({timeline(work, filtered=False, with_links=False)})"
        f" where ({work.keys}) in (from {busy}) group by {work.keys}",
    )
    live = work.table(
        "live", f"select (last >> 2) + {work.base} as ord from {net} where last & {PRESENT} = {PRESENT}"
    )
    gone = f"{net} where first & {FRESH} = 0 and {work.in_bucket(work.keys)}"
    delete_rows = work.value(f"select count(*) from {gone}")
    source = work.own_scans.scan(["_op", "_ord", "_kc", *work.new_image()])
    new_key = ", ".join(f"n{k}" for k in work.key)
    upserts = (
        f"select {work.typed_row(work.new_image())} from {source} where _ord in (from {live})"
        f" or ((_op = {OP_INSERT} or _kc) and ({new_key}) not in (from {busy}))"
    )
    deletes = f"select {work.typed_key(gone)}" if delete_rows else None
    return Fold(upserts, deletes, None, None, delete_rows, 0)


def timeline(work: Work, *, filtered: bool, with_links: bool, also: Sequence[str] = ()) -> str:
    """
    A query for the timeline entries (k0, …, e) of all keys, with the segment columns in `also`.

    With links it also has (ord, link): `link` marks the entry whose key finds the row's previous version.
    """
    more = "".join(f", {name}" for name in also)
    place = f"((_ord - {work.base}) << 2)"
    link = (", _ord as ord, {} as link").format
    if work.key_changes == 0:
        # An update without an old image has its key in the new image; a delete has it in the old one.
        cells = [f"case when _op = {OP_DELETE} then o{k} else n{k} end" for k in work.key]
        keys = ", ".join(f"{cell} as k{i}" for i, cell in enumerate(cells))
        code = f"case when _op = {OP_INSERT} then {PRESENT | FRESH} when _op = {OP_DELETE} then 0 else {PRESENT} end"
        extra = link(f"_op not in ({OP_INSERT}, {OP_DELETE})") if with_links else ""
        columns = ["_op", "_ord", *also, *(f"{image}{k}" for k in work.key for image in "no")]
        query = f"select {keys}, {place} | {code} as e{extra}{more} from {work.scans.scan(columns)}"
    else:
        after = work.scans.scan(["_op", "_ord", "_kc", *also, *(f"n{k}" for k in work.key)])
        before = work.scans.scan(["_op", "_ord", "_kc", *also, *(f"o{k}" for k in work.key)])
        code = f"case when _op = {OP_INSERT} or _kc then {PRESENT | FRESH} else {PRESENT} end"
        updated = link(f"_op <> {OP_INSERT} and not _kc") if with_links else ""
        moved = link("_kc") if with_links else ""
        query = (
            f"select {work.key_of('n')}, {place} | {code} as e{updated}{more} from {after} where _op <> {OP_DELETE}"
            f" union all select {work.key_of('o')}, {place} as e{moved}{more} from {before} where _op = {OP_DELETE} or _kc"
        )
    return f"select * from ({query}) where {work.in_bucket(work.keys)}" if filtered else query


def _unchanged_cells(work: Work, entries: str, live: str) -> UnchangedCells | None:
    keys = [f"k{i}" for i in range(len(work.key))]
    nodes = f"select ord, link, e & {PRESENT} = {PRESENT} as present, {work.keys} from {entries}"
    return resolve_unchanged(work.con, work.scans, work.table, nodes, live, keys)


def _upsert_query(work: Work, live: str, cells: UnchangedCells | None, extras: Sequence[Extra] = ()) -> str:
    if cells is None and not extras:
        source = work.scans.scan(["_ord", *work.new_image()])
        return (
            f"select {work.typed_row(_cells(work))} from {source} r where r._ord in (select ord from {live})"
        )
    source = work.scans.scan(["_ord", *(["_ts"] if extras else []), *work.new_image()])
    filled = _cells(work) if cells is None else _filled_cells(work, cells)
    more = "".join(f", {e.value} as {ident(e.name)}" for e in extras)
    fillings = "" if cells is None else f" left join {cells.table} f on f.ord = r._ord"
    return f"select {work.typed_row(filled)}{more} from {source} r join {live} l on l.ord = r._ord{fillings}"


def _patch_query(work: Work, cells: UnchangedCells, live: str, extras: Sequence[Extra]) -> str:
    source = work.scans.scan(["_ord", *(["_ts"] if extras else []), *work.new_image()])
    columns = work.schema.columns
    filled = _filled_cells(work, cells)
    values = [f"{cast_sql(c, cell)} as v{i}" for i, (c, cell) in enumerate(zip(columns, filled, strict=True))]
    keys = [f"{cast_sql(columns[k], f'f.t{i}')} as t{i}" for i, k in enumerate(work.key)]
    missing = [f"{f'f.u{i}' if i in cells.columns else 'false'} as u{i}" for i in range(len(columns))]
    more = [f"{e.value} as {ident(e.name)}" for e in extras]
    rows = f" join {live} l on l.ord = r._ord" if extras else ""
    return (
        f"select {', '.join([*values, *keys, *missing, *more])} from {source} r"
        f" join {cells.table} f on f.ord = r._ord{rows} where f.patch"
    )


def _cells(work: Work) -> list[str]:
    """A row's cells as text, qualified because columns of the lake may have the same names."""
    return [f"r.{name}" for name in work.new_image()]


def _filled_cells(work: Work, cells: UnchangedCells) -> list[str]:
    """A row's cells; an unchanged cell gets the last value that the run has for it."""
    return [
        f"case when f.d{i} then f.v{i} else {cell} end" if i in cells.columns else cell
        for i, cell in enumerate(_cells(work))
    ]
