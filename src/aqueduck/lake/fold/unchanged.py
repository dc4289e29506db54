"""
Unchanged TOAST cells: where in a run, or else in the target, their values are.

PostgreSQL does not send a large value that an update left alone.  Its value is that of the
row's version before, and so on back: within the run as far as it goes, also through changes of
the key, and then in the target under the key that the row had when the run began.  Links
between versions come from SQL, the way back is pointer jumping in numpy, and values are read
in one more pass over the segments.
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
    What surviving rows with unchanged cells get.

    `table` has, by row (ord): for each column c of `columns` whether a value was found in the run
    (d{c}), the value as text (v{c}), whether the target has it (u{c}); whether the target is
    needed at all (patch), and then the key there as text (t0, …).
    """

    table: str
    columns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Versions:
    """All versions of rows in a run, by order: `before[i]` is the place of i's version before, or -1."""

    ord: Longs
    before: Longs

    def places(self, ords: Longs) -> Longs:
        return np.searchsorted(self.ord, ords).astype(np.int64)


def last_known(known: Bools, before: Longs) -> Longs:
    """For each version the nearest one back, itself included, whose value is known, or the oldest."""
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
    Find the values of unchanged cells of the rows in `live`; None if these have none.

    `nodes` is a query for (ord, link, present, *keys), one row for each entry of a timeline.
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
    """Rows (ord, c, source, root): the version that has the value, or the oldest one if only the target has it."""
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
    """Places of those ords that are among the versions; with buckets not all are."""
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
