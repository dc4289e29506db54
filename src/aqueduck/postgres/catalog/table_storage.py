"""
Whether a table was rewritten between two readings.

TRUNCATE and rewriting forms of ALTER TABLE remove rows from older snapshots too, and VACUUM FULL moves rows
to other pages. Each of them gives the table new files, as does a change of its partitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from aqueduck.postgres.session.connection import translate_errors

__all__ = ["read_storage"]

_QUERY = """
    select o.oid::int8, coalesce(string_agg(c.oid || ':' || pg_relation_filenode(c.oid), ' ' order by c.oid), '')
    from unnest(%s::oid[]) o (oid)
    left join lateral (
        select relid::oid as oid from pg_partition_tree(o.oid::regclass) where isleaf
        union select p.oid from pg_class p where p.oid = o.oid and p.relkind = 'r'
    ) c on true
    group by o.oid
"""


def read_storage(conn: psycopg.Connection[Any], oids: Sequence[int]) -> dict[int, str]:
    """The current files of each table, as a text that changes with them; empty for a table that does not exist."""
    with translate_errors("look at the tables' files", conn=conn):
        return dict(conn.execute(_QUERY, (list(oids),)).fetchall())
