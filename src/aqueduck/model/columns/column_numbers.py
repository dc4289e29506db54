"""
Match a version of a table's columns, known by name only, with catalog numbers.

The stream describes a table by the names and types of its columns, in the order of their numbers in the
catalog, but without the numbers. Names are not enough: a column may be renamed, and its old name given to
another column, before the catalog is read. Known are the previous version, the current catalog, and two
rules: a number is never reused, and a new column comes last. So a version's columns have ascending numbers,
and include every column that existed before and exists now. Often only one match is possible. A column that
existed in between is assumed to have its previous or its current name, unless no match remains.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["UNCLEAR", "match_numbers"]

UNCLEAR = -1
"""The number of the columns of a version for which several matches are possible."""


@dataclass(frozen=True, slots=True)
class _Number:
    value: int
    names: frozenset[str] | None
    """Its previous and current names; None if the column was added and dropped unseen."""
    new: bool
    """Whether it was added after the previous version, so that it may be missing."""
    kept: bool
    """Whether it exists now, so that it cannot have been dropped before."""


def match_numbers(
    names: Sequence[str],
    before: Mapping[int, str],
    newest: int,
    now: Mapping[int, str],
    unseen: Collection[int],
    optional: Collection[int] = (),
) -> list[int] | None:
    """
    The numbers of a version's columns `names`; None if they are ambiguous.

    `before` and `now` map numbers to names, `newest` is the highest number given out before, `unseen` are the
    numbers of columns that are in neither and may have existed in between. Columns in `optional` may be
    missing although they exist.
    """
    numbers = []
    for value in sorted({*before, *now, *unseen}):
        known = {some[value] for some in (before, now) if value in some}
        new = value > newest
        kept = value in now and (new or value in before) and value not in optional
        numbers.append(_Number(value, frozenset(known) or None, new, kept))
    ways, found = _match(names, numbers, strict=True)
    if ways == 0:  # a name that is in neither: the column was renamed twice
        ways, found = _match(names, numbers, strict=False)
    return found if ways == 1 else None


def _match(names: Sequence[str], numbers: Sequence[_Number], *, strict: bool) -> tuple[int, list[int]]:
    """The number of possible matches, at most 2, and the one with the lowest numbers."""
    many, wide = len(names), len(numbers) - len(names)
    if wide < 0:
        return 0, []
    # ways[i][skipped]: of matching names[i:] with numbers[i + skipped:]
    ways = [[0] * (wide + 2) for _ in range(many + 1)]
    for skipped in range(wide + 1):
        ways[many][skipped] = int(all(n.new or not n.kept for n in numbers[many + skipped :]))
    for i in range(many - 1, -1, -1):
        for skipped in range(wide, -1, -1):
            number = numbers[i + skipped]
            count = ways[i + 1][skipped] if _fits(number, names[i], strict) else 0
            if not number.kept and skipped < wide:
                count += ways[i][skipped + 1]
            ways[i][skipped] = min(count, 2)
    found, skipped = [], 0
    for i in range(many if ways[0][0] else 0):
        while not (_fits(numbers[i + skipped], names[i], strict) and ways[i + 1][skipped]):
            skipped += 1
        found.append(numbers[i + skipped].value)
    return ways[0][0], found


def _fits(number: _Number, name: str, strict: bool) -> bool:
    return not strict or number.names is None or name in number.names
