"""Column numbers found by names: an ambiguous match is never guessed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aqueduck.model.columns.column_numbers import match_numbers

TWO = {1: "id", 2: "v"}


@pytest.mark.parametrize(
    ("version", "before", "newest", "now", "gone", "numbers"),
    [
        ("id v", TWO, 2, TWO, [], [1, 2]),
        ("id w", TWO, 2, {1: "id", 2: "w"}, [], [1, 2]),
        ("id v", TWO, 2, {1: "id", 2: "w"}, [], [1, 2]),
        ("id between", TWO, 2, {1: "id", 2: "w"}, [], [1, 2]),
        ("id", TWO, 2, {1: "id"}, [], [1]),
        ("id v", TWO, 2, {1: "id"}, [], [1, 2]),
        ("id v new", TWO, 3, {**TWO, 4: "new"}, [], [1, 2, 4]),
        ("id w v", TWO, 2, {1: "id", 2: "w", 3: "v", 4: "more"}, [], [1, 2, 3]),
        (
            "id v new",
            TWO,
            2,
            {1: "id", 3: "v"},
            [],
            [1, 2, 3],
        ),  # a column replaces another, and then has its name
        ("id b v", {1: "id", 2: "v", 3: "b"}, 3, {1: "id", 3: "b", 4: "v"}, [], [1, 3, 4]),
        ("id b a", {1: "id", 2: "a", 3: "b"}, 3, {1: "id", 2: "b", 3: "a"}, [], [1, 2, 3]),
        ("id v", TWO, 2, {1: "id", 3: "v"}, [], None),  # the old or the new one?
        ("id v new", TWO, 2, {**TWO, 4: "new"}, [3], None),
        ("id v x y", TWO, 2, TWO, [], None),
    ],
)
def test_what_follows_from_names_and_order(
    version: str,
    before: dict[int, str],
    newest: int,
    now: dict[int, str],
    gone: list[int],
    numbers: list[int] | None,
) -> None:
    """P-S12: one way or none."""
    assert match_numbers(version.split(), before, newest, now, gone) == numbers


Steps = list[tuple[str, int, str]]


@settings(max_examples=400, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "drop", "rename", "seen"]), st.integers(0, 5), st.sampled_from("abc")
        ),
        max_size=14,
    ),
    st.integers(0, 14),
)
def test_a_history_is_identified_rightly_or_not_at_all(steps: Steps, asked: int) -> None:
    """P-S12: versions arrive in order, each with the catalog of its step or of a later one; other columns may reuse names."""
    catalogs: list[tuple[dict[int, str], int]] = []
    columns, newest = {1: "id"}, 1
    seen: list[int] = []
    for kind, which, name in steps:
        others = sorted(n for n in columns if n > 1)
        if kind == "add" and name not in columns.values():
            newest += 1
            columns = {**columns, newest: name}
        elif kind == "drop" and others:
            columns = {n: v for n, v in columns.items() if n != others[which % len(others)]}
        elif kind == "rename" and others and name not in columns.values():
            columns = {**columns, others[which % len(others)]: name}
        elif kind == "seen":
            seen.append(len(catalogs))
        catalogs.append((columns, newest))
    before: tuple[dict[int, str], int] = ({1: "id"}, 1)
    for place in seen:
        version: dict[int, str] = catalogs[place][0]
        now, ever = catalogs[max(place, min(asked, len(catalogs) - 1))]
        unseen = [n for n in range(before[1] + 1, ever + 1) if n not in now]
        found: Any = match_numbers(list(version.values()), before[0], before[1], now, unseen)
        for_a_while = [
            n
            for n, name in version.items()
            if name not in {k[n] for k in (before[0], now) if n in k} and n not in unseen
        ]
        if found is not None and for_a_while and found != list(version):
            return  # a name that a column had only in between, and another one before or after
        if found is not None:
            assert found == list(version)
            before = (version, max(before[1], *found))
