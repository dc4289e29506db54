"""
The tables of a database that can be replicated, as far as their kind and place show, for people who choose
among them.

Whether one can really be replicated, with its key and rights, is decided where it is described (`tables`).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.rows import class_row

from aqueduck.model.schema import TableName
from aqueduck.postgres.session.connection import translate_errors

__all__ = ["UserTable", "nearest_table", "user_tables"]

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class UserTable:
    """A table, and its size as the server last estimated it."""

    schema: str
    name: str
    rows: int | None
    """None if the table was never analyzed."""
    bytes: int

    @property
    def table(self) -> TableName:
        return TableName(self.schema, self.name)


def user_tables(conn: Connection) -> list[UserTable]:
    """
    Ordinary and partitioned tables by name: no partitions, which come with their parent, no temporary tables,
    none of the system, of an extension or of Aqueduck.
    """
    with (
        translate_errors("list the tables", conn=conn),
        conn.cursor(row_factory=class_row(UserTable)) as cursor,
    ):
        return cursor.execute(_QUERY.encode()).fetchall()


def nearest_table(conn: Connection, name: TableName) -> TableName | None:
    """A table that a misspelled name may mean: one of the same name elsewhere, or the most similar one."""
    known = [one.table for one in user_tables(conn)]
    known.sort(key=lambda one: one.schema != name.schema)  # the same schema first
    close = difflib.get_close_matches(name.name.lower(), {one.name.lower() for one in known}, n=1, cutoff=0.7)
    return next((one for one in known if [one.name.lower()] == close), None)


_QUERY = """
    select n.nspname::text as schema, c.relname::text as name,
           case when t.rows >= 0 then t.rows end as rows, t.bytes
    from pg_class c join pg_namespace n on n.oid = c.relnamespace
    cross join lateral (
        select sum(l.reltuples)::int8 as rows, coalesce(sum(pg_relation_size(l.oid)), 0)::int8 as bytes
        from (select c.oid where c.relkind = 'r'
              union all select relid from pg_partition_tree(c.oid) where c.relkind = 'p' and isleaf) leaf
        join pg_class l on l.oid = leaf.oid) t
    where c.relkind in ('r', 'p') and not c.relispartition and c.relpersistence <> 't'
        and n.nspname not in ('aqueduck', 'information_schema') and n.nspname !~ '^pg_'
        and not exists (select from pg_depend d where d.classid = 'pg_class'::regclass and d.objid = c.oid
                        and d.deptype = 'e')
    order by n.nspname, c.relname
"""
