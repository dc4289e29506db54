"""
Unchanged TOAST cells: find their values in the run, or else in the target.

PostgreSQL does not send a large value that an update left unchanged.  The cell has the value of the
row's previous version, which may be unchanged too.  The chain leads back through the run, also across
changes of the key, and then to the target, under the key that the row had when the run began.  SQL links
each version to the previous one, pointer jumping in numpy follows the links, and one more pass over
the segments reads the values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from aqueduck.lake.fold.segments import Scans

__all__ = ["UnchangedCells", "last_known", "resolve_unchanged"]

Longs = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
MakeTable = Callable[[str, str], str]


@dataclass(frozen=True, slots=True)
class UnchangedCells:
    """
    The values of unchanged cells in surviving rows.

    `table` has one row per surviving row (ord).  For each column c of `columns` it has: d{c}, whether the run
    has the value; v{c}, the value as text; u{c}, whether the value is in the target.  `patch` says whether
    the row needs the target at all, and t0, … are its key there as text.
    """

    table: str
    columns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Versions:
    """All versions of rows in a run, ordered by `ord`; `before[i]` is the index of the previous version of i, or -1."""

    ord: Longs
    before: Longs

    def places(self, ords: Longs) -> Longs:
        return np.searchsorted(self.ord, ords).astype(np.int64)


def last_known(known: Bools, before: Longs) -> Longs:
    """For each version, the latest one up to and including itself whose value is known, or else the oldest one."""
    here = np.arange(known.size, dtype=np.int64)
    back = np.where(known | (before < 0), here, before)
    while True:
        further = back[back]
        if np.array_equal(further, back):
            return back
        back = further


def resolve_unchanged(
    con: duckdb.DuckDBPyConnection, scans: Scans, table: MakeTable, nodes: str, live: str, keys: Sequence[str]
) -> UnchangedCells | None:
    """
    Find the values of unchanged cells of the rows in `live`; None if no cell is unchanged.

    `nodes` is a query for (ord, link, present, *keys), with one row for each timeline entry.
    """
    scan = scans.scan(["_ord", "_unchanged"])
    cells = table(
        "cells", f"select _ord as ord, unnest(_unchanged)::integer as c from {scan} where len(_unchanged) > 0"
    )
    wanted = con.execute(
        f"select ord, c from {cells} where ord in (select ord from {live}) order by ord, c"
    ).fetchnumpy()
    if wanted["ord"].size == 0:
        return None
    versions = _versions(con, nodes, keys)
    found = _follow(con, versions, cells, wanted)
    con.register("aqueduck_found", found)
    try:
        sources = table("sources", "from aqueduck_found")
    finally:
        con.unregister("aqueduck_found")
    columns = tuple(int(c) for c in np.unique(wanted["c"]))
    return UnchangedCells(_filled(scans, table, nodes, sources, columns, keys), columns)


def _versions(con: duckdb.DuckDBPyConnection, nodes: str, keys: Sequence[str]) -> _Versions:
    by_key = f"partition by {', '.join(keys)} order by ord"
    linked = f"select *, lag(case when present then ord end) over ({by_key}) as back from ({nodes})"
    rows = con.execute(
        "select ord, max(case when link then coalesce(back, -1) else -1 end) as back"
        f" from ({linked}) group by ord having bool_or(present) order by ord"
    ).fetchnumpy()
    ords = np.asarray(rows["ord"], dtype=np.int64)
    back = np.asarray(rows["back"], dtype=np.int64)
    before = np.where(back < 0, -1, np.searchsorted(ords, back)).astype(np.int64)
    return _Versions(ords, before)


def _follow(
    con: duckdb.DuckDBPyConnection, versions: _Versions, cells: str, wanted: dict[str, Any]
) -> pa.Table:
    """Rows (ord, c, source, root): `source` is the version with the value; `root` the oldest version if the target has it."""
    parts = []
    for c in np.unique(wanted["c"]):
        unknown = con.execute(f"select ord from {cells} where c = {int(c)} order by ord").fetchnumpy()["ord"]
        known = np.ones(versions.ord.size, dtype=np.bool_)
        known[_member_places(versions, np.asarray(unknown, dtype=np.int64))] = False
        rows = np.asarray(wanted["ord"][wanted["c"] == c], dtype=np.int64)
        ends = last_known(known, versions.before)[versions.places(rows)]
        has = known[ends]
        at = versions.ord[ends]
        parts.append(
            pa.table(
                {
                    "ord": rows,
                    "c": np.full(rows.size, c, dtype=np.int32),
                    "source": pa.array(at, mask=~has),
                    "root": pa.array(at, mask=has),
                }
            )
        )
    return pa.concat_tables(parts)


def _member_places(versions: _Versions, ords: Longs) -> Longs:
    """Indexes of the ords that are among the versions; with buckets, some are not."""
    places = versions.places(ords)
    inside = places < versions.ord.size
    places, ords = places[inside], ords[inside]
    member: Longs = places[versions.ord[places] == ords]
    return member


def _filled(
    scans: Scans, table: MakeTable, nodes: str, sources: str, columns: tuple[int, ...], keys: Sequence[str]
) -> str:
    cells = [f"n{c}" for c in columns]
    donors = table(
        "donors",
        f"select _ord as ord, {', '.join(cells)} from {scans.scan(['_ord', *cells])}"
        f" where _ord in (select source from {sources} where source is not null)",
    )
    found = [f"max(source) filter (where c = {c}) as s{c}" for c in columns]
    lacking = [f"coalesce(bool_or(root is not null) filter (where c = {c}), false) as u{c}" for c in columns]
    rows = f"select ord, max(root) as root, {', '.join(found + lacking)} from {sources} group by ord"
    values = ", ".join(f"f.s{c} is not null as d{c}, d{c}.n{c} as v{c}, f.u{c} as u{c}" for c in columns)
    joins = " ".join(f"left join {donors} d{c} on d{c}.ord = f.s{c}" for c in columns)
    target_key = ", ".join(f"t.{key} as t{i}" for i, key in enumerate(keys))
    return table(
        "filled",
        f"select f.ord, f.root is not null as patch, {target_key}, {values} from ({rows}) f {joins}"
        f" left join (select * from ({nodes}) where link) t on t.ord = f.root",
    )
