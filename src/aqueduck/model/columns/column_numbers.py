"""
Which columns of a table a version of it has, told by names alone.

The stream describes a table by the names and types of its columns, in the order of their numbers in the catalog, and does not
tell the numbers.  Names do not do: a column may get another name, and its old one may be given to another column, before anybody asks
the catalog.  What is known is the version before it, the catalog of now, and two laws: a number is never given
twice, and a new column comes last.  So a version's columns are a row of ascending numbers, in which no column
is missing that was there before and is there now.  Often that leaves one way only.  A column's name in between
is taken to be that of before or of now, unless that leaves no way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["UNCLEAR", "match_numbers"]

UNCLEAR = -1
"""The number of columns of a version for which there is more than one way."""


@dataclass(frozen=True, slots=True)
class _Number:
    value: int
    names: frozenset[str] | None
    """Names that it had before and has now; None if it came and went unseen."""
    new: bool
    """Whether it came after the version before, so that it may not be there yet."""
    kept: bool
    """Whether it is there now, so that it cannot have gone before."""


def match_numbers(
    names: Sequence[str],
    before: Mapping[int, str],
    newest: int,
    now: Mapping[int, str],
    unseen: Collection[int],
    optional: Collection[int] = (),
) -> list[int] | None:
    """
    The numbers of a version's columns `names`; None if that is not clear.

    `before` and `now` are numbers with their names, `newest` the highest number that was given before, `unseen` are those of columns
    that are in neither and may have been there in between.  Those in `optional` may be left out although they are there.
    """
    numbers = []
    for value in sorted({*before, *now, *unseen}):
        known = {some[value] for some in (before, now) if value in some}
        new = value > newest
        kept = value in now and (new or value in before) and value not in optional
        numbers.append(_Number(value, frozenset(known) or None, new, kept))
    ways, found = _match(names, numbers, strict=True)
    if ways == 0:  # a name that neither of them has: it was changed twice
        ways, found = _match(names, numbers, strict=False)
    return found if ways == 1 else None


def _match(names: Sequence[str], numbers: Sequence[_Number], *, strict: bool) -> tuple[int, list[int]]:
    """How many ways there are, at most 2, and the one that takes the lowest numbers."""
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
