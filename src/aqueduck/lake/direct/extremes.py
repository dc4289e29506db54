"""
Widen the statistics of columns, which have values as text, by new values.

Numbers and texts are compared here, as DuckLake compares them; dates and times are compared by the engine.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeVar

from aqueduck.lake.direct.catalog_rows import ColumnStats
from aqueduck.lake.direct.cells import Slot
from aqueduck.lake.session.catalog import LakeSession
from aqueduck.lake.session.sql import literal
from aqueduck.model.columns.typemap import lake_type
from aqueduck.model.schema import Column

__all__ = ["Merge", "in_range", "merged"]

_NUMBERS = ("SMALLINT", "INTEGER", "BIGINT")
_TIMES = ("DATE", "TIME", "TIMESTAMP", "TIMESTAMP WITH TIME ZONE")

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Merge:
    """The statistics of a column, and the cells that are added to it."""

    column: Column
    known: ColumnStats
    added: Slot


def merged(session: LakeSession, merges: Mapping[Key, Merge]) -> dict[Key, ColumnStats | None]:
    """The statistics that change; None stands for those that are unknown and must be removed (ADR 66)."""
    changed: dict[Key, ColumnStats | None] = {}
    wider = _wider(session, merges)
    for key, merge in merges.items():
        known, added = merge.known, merge.added
        if known.lowest is None or known.highest is None:
            changed[key] = None
            continue
        low, high = wider[key]
        now = ColumnStats(
            known.contains_null or (added.has_null if known.contains_null is not None else None),
            added.lowest if low else known.lowest,
            added.highest if high else known.highest,
        )
        if now != known:
            changed[key] = now
    return changed


def in_range(column: Column, cells: Iterable[str], lowest: str | None, highest: str | None) -> bool:
    """Whether one of the cells, PostgreSQL's text, may be between two values of statistics; True if in doubt."""
    kind = lake_type(column)
    if kind not in _NUMBERS or lowest is None or highest is None:
        return True
    low, high = int(lowest), int(highest)
    return any(low <= int(cell) <= high for cell in cells)


def _wider(session: LakeSession, merges: Mapping[Key, Merge]) -> dict[Key, tuple[bool, bool]]:
    """Whether the added cells have a lower, and a higher value."""
    found: dict[Key, tuple[bool, bool]] = {}
    timed: dict[str, list[Key]] = {}
    for key, merge in merges.items():
        known, added, kind = merge.known, merge.added, lake_type(merge.column)
        if added.lowest is None or added.highest is None or known.lowest is None or known.highest is None:
            found[key] = (False, False)
        elif kind in _TIMES:
            timed.setdefault(kind, []).append(key)
        else:
            found[key] = (
                _order(kind, added.lowest) < _order(kind, known.lowest),
                _order(kind, added.highest) > _order(kind, known.highest),
            )
    for kind, keys in timed.items():
        pairs = ", ".join(_pair(n, merges[key]) for n, key in enumerate(keys))
        rows = session.execute(
            f"select n, cast(a as {kind}) < cast(b as {kind}), cast(c as {kind}) > cast(d as {kind})"
            f" from (values {pairs}) as t (n, a, b, c, d)",
            doing="comparing statistics",
        )
        found.update((keys[n], (low, high)) for n, low, high in rows)
    return found


def _pair(number: int, merge: Merge) -> str:
    texts = (merge.added.lowest, merge.known.lowest, merge.added.highest, merge.known.highest)
    return f"({number}, {', '.join(map(literal, texts))})"


def _order(kind: str, text: str) -> Any:
    if kind in _NUMBERS:
        return int(text)
    if kind.startswith("DECIMAL"):
        return Decimal(text)
    if kind in ("FLOAT", "DOUBLE"):
        value = float(text)
        return (math.isnan(value), 0.0 if math.isnan(value) else value)  # NaN is the greatest
    return text
