"""
Consistency checks of a lake table on its own, for errors that a comparison of present rows cannot find.

A log has each change once.  A version ends after it begins.  A deleted row has the time of its deletion.  In a target
with several sources, each row belongs to one of them.  A finding has a number of rows and a fixed text, never values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from aqueduck.lake.session.catalog import LakeSession
from aqueduck.lake.session.failures import lake_errors
from aqueduck.lake.session.sql import ident, lake_table, string_list
from aqueduck.lake.target.mode_rows import own_rows
from aqueduck.model.modes import TableMode
from aqueduck.model.schema import TableName

__all__ = ["Finding", "check_mode"]

_COUNTS = {
    "append": (
        "changes that are in the log more than once",
        "select coalesce(sum(n - 1), 0) from (select count(*) as n from {rows} and _op not in ('copy', 'resync')"
        " group by _commit_lsn, _seq having count(*) > 1)",
    ),
    "history": (
        "versions that end before they begin",
        "select count(*) from {rows} and _valid_to < _valid_from",
    ),
    "soft_delete": (
        "rows whose _deleted and _deleted_at contradict each other",
        "select count(*) from {rows} and _deleted <> (_deleted_at is not null)",
    ),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """A violated rule and the number of rows that violate it."""

    rows: int
    what: str


def check_mode(
    session: LakeSession, target: TableName, version: int, mode: TableMode, sources: Collection[str]
) -> list[Finding]:
    """Check a table at a lake snapshot; `sources` are the valid values of the source column."""
    table = f"(from {lake_table(target)} at (version => {int(version)})) as t"
    found = []
    with session.reading() as con, lake_errors("checking the target", table=target.qualified):
        for what, query in _queries(table, mode, sources):
            [[rows]] = con.execute(query).fetchall()
            found += [Finding(int(rows), what)] if rows else []
    return found


def _queries(table: str, mode: TableMode, sources: Collection[str]) -> Iterator[tuple[str, str]]:
    if mode.name in _COUNTS:
        what, query = _COUNTS[mode.name]
        yield what, query.format(rows=f"{table} where {own_rows(mode)}")
    if mode.source_column is not None:
        known = f"list_contains({string_list(sources)}, t.{ident(mode.source_column)})"
        yield "rows of no source", f"select count(*) from {table} where not coalesce({known}, false)"
