"""
Functions that PostgreSQL may run as the reader of a table, because the table's indexes, statistics or partition keys call them.

Planning a query evaluates immutable functions of constants in these expressions (ADR 62).  So the owner of such a
function can have it run as the service.
"""

from __future__ import annotations

from typing import Any

import psycopg

from aqueduck.model.schema import TableSchema
from aqueduck.postgres.session.connection import translate_errors

__all__ = ["foreign_functions"]


def foreign_functions(conn: psycopg.Connection[Any], table: TableSchema) -> list[str]:
    """Those that belong neither to a superuser nor to the role of `conn`, with their owners."""
    with translate_errors(f"look for functions of {table.qualified}", table.qualified, conn=conn):
        rows = conn.execute(_FUNCTIONS, {"oid": table.oid}).fetchall()
    return [f"{schema}.{name} of {owner}" for schema, name, owner in rows]


_FUNCTIONS = """
    with tables as (
        select %(oid)s::oid as oid union select relid from pg_partition_tree(%(oid)s::oid::regclass)
    ), objects as (
        select 'pg_class'::regclass::oid as classid, oid as objid from tables
        union select 'pg_class'::regclass, indexrelid from pg_index where indrelid in (select oid from tables)
        union select 'pg_statistic_ext'::regclass, oid from pg_statistic_ext where stxrelid in (select oid from tables)
    ), used as (
        select d.refclassid, d.refobjid from pg_depend d join objects o on d.classid = o.classid and d.objid = o.objid
    ), functions as (
        select refobjid as oid from used where refclassid = 'pg_proc'::regclass
        union select o.oprcode from used join pg_operator o on o.oid = refobjid where refclassid = 'pg_operator'::regclass
    )
    select n.nspname::text, p.proname::text, r.rolname::text from functions f join pg_proc p on p.oid = f.oid
    join pg_namespace n on n.oid = p.pronamespace join pg_roles r on r.oid = p.proowner
    where not r.rolsuper and r.rolname <> current_user order by 1, 2 limit 5
"""
