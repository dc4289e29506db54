"""
Changes of tables that are not row changes: dropped, or a partition attached, detached or truncated.

The stream contains none of them (only a truncate of the whole table). `read_structure` reads the current
catalog; `partition_news` derives what the difference to an earlier reading means for the rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import psycopg

from aqueduck.postgres.session.connection import translate_errors

__all__ = [
    "Leaf",
    "News",
    "Structure",
    "has_rows",
    "has_rows_since_before",
    "partition_news",
    "read_horizon",
    "read_structure",
]

PAGES_MAX = 16384
_LEAVES = """
    with recursive tree(root, relation, born_here, ties) as (
        select oid, oid, true, '' from pg_class where oid = any(%s::oid[]) and relkind = 'p'
        union all
        select t.root, i.inhrelid, t.born_here and i.xmin = coalesce(
            (select y.xmin from pg_type y where y.typrelid = i.inhrelid), '0'::xid), t.ties || '/' || i.xmin::text
        from tree t join pg_inherits i on i.inhparent = t.relation
    )
    select t.root::int8, c.oid::int8, coalesce(pg_relation_filenode(c.oid), 0)::int8, c.xmin::text::int8,
           t.born_here, format('%%I.%%I', n.nspname, c.relname), t.ties
    from tree t join pg_class c on c.oid = t.relation join pg_namespace n on n.oid = c.relnamespace
    where c.relkind <> 'p'
"""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A partition that holds rows."""

    filenode: int
    """
    Changes with a truncate, and with a rewrite such as VACUUM FULL: `has_rows_since_before` can distinguish
    them.
    """
    changed_by: int
    """The transaction that last changed it in the catalog."""
    born_here: bool
    """Created as a partition, so without rows; otherwise it was attached."""
    name: str
    ties: str = ""
    """The transactions that made it a partition, on every level: if they changed, it was detached in between."""


@dataclass(frozen=True, slots=True)
class Structure:
    """Which tables exist, and the leaves of those that are partitioned."""

    tables: frozenset[int]
    leaves: dict[int, dict[int, Leaf]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class News:
    """The changes: none that affects rows, the whole table truncated, or partitions that removed or added rows."""

    attached: tuple[int, ...] = ()
    """May have had rows when they were attached."""
    lost: tuple[int, ...] = ()
    """Detached or dropped; or detached for a while, during which their changes were not sent."""
    rewritten: tuple[int, ...] = ()
    whole: bool = False
    """One transaction rewrote all partitions, as TRUNCATE of the table does."""


def read_structure(conn: psycopg.Connection[Any], oids: Collection[int]) -> Structure:
    with translate_errors("look at the tables", conn=conn):
        found = conn.execute("select oid::int8 from pg_class where oid = any(%s::oid[])", (list(oids),))
        tables = frozenset(row[0] for row in found.fetchall())
        partitioned = conn.execute(
            "select oid::int8 from pg_class where oid = any(%s::oid[]) and relkind = 'p'", (list(oids),)
        ).fetchall()
        leaves: dict[int, dict[int, Leaf]] = {row[0]: {} for row in partitioned}
        if leaves:
            for root, oid, *leaf in conn.execute(_LEAVES.encode(), (list(leaves),)).fetchall():
                leaves[root][oid] = Leaf(*leaf)
    return Structure(tables, leaves)


def read_horizon(conn: psycopg.Connection[Any]) -> int:
    """
    Every transaction with a lower id has ended; when reading several things from the catalog, read this
    first.
    """
    with translate_errors("look at the tables", conn=conn):
        row = conn.execute(b"select pg_snapshot_xmin(pg_current_snapshot())::text::int8").fetchone()
    assert row is not None
    return int(row[0])


def has_rows(conn: psycopg.Connection[Any], leaf: Leaf) -> bool:
    with translate_errors("look at a partition", conn=conn):
        return conn.execute(f"select exists (select from only {leaf.name})".encode()).fetchone() != (False,)


def has_rows_since_before(conn: psycopg.Connection[Any], leaf: Leaf, horizon: int) -> bool:
    """
    Whether a row was written by a transaction below the horizon: then the partition was not truncated since.

    VACUUM FULL, CLUSTER and a move to another tablespace keep the id of the transaction that wrote a row,
    even of frozen rows. Rows written after a truncate have ids from the horizon on. The table stores only the
    lower half of an id, so a wrapped one counts as recent; and only the first pages are read, to be quick. So
    rows may be missed, but never invented.
    """
    query = (
        "select exists (select from (select pg_snapshot_xmax(pg_current_snapshot())::text::int8 as next offset 0) s"
        f" cross join only {leaf.name} t where t.ctid < '({PAGES_MAX},0)'"
        " and mod(s.next - t.xmin::text::int8, 4294967296) > s.next - %s)"
    )
    with translate_errors("look at a partition", conn=conn):
        return conn.execute(query.encode(), (horizon,)).fetchone() == (True,)


def partition_news(before: Mapping[int, int], now: Mapping[int, Leaf], ties: Mapping[int, str]) -> News:
    """The difference between recorded file nodes and ties by leaf, and the current leaves."""
    rewritten = tuple(oid for oid, node in before.items() if oid in now and now[oid].filenode != node)
    return News(
        attached=tuple(oid for oid, leaf in now.items() if oid not in before and not leaf.born_here),
        lost=tuple(oid for oid in before if oid not in now or ties.get(oid, now[oid].ties) != now[oid].ties),
        rewritten=rewritten,
        whole=len(rewritten) == len(before) > 0 and len({now[oid].changed_by for oid in rewritten}) == 1,
    )
