"""
Removing the registry: only what its statements created, and nothing with `cascade` (ADR 63).

Objects of others in the schema `aqueduck`, and those that depend on ours, keep what they need.
"""

from __future__ import annotations

import re
from typing import Any

import psycopg

from aqueduck.postgres.registry.registry_install import change, registry_errors, statements
from aqueduck.postgres.session.quoting import identifier

__all__ = ["delete_groups", "drop_registry", "foreign_objects", "groups_of_other_lakes", "may_drop_schema"]

Connection = psycopg.Connection[Any]

_TABLES = ("table_mappings", "sync_groups", "settings", "schema_version")


def groups_of_other_lakes(conn: Connection, lake: str) -> list[str]:
    """Groups in the registry that a service of another lake has taken."""
    with registry_errors("read the groups", conn):
        rows = conn.execute(
            "select name from aqueduck.sync_groups where lake <> %s order by name", (lake,)
        ).fetchall()
    return [name for (name,) in rows]


def delete_groups(conn: Connection, lake: str) -> None:
    """Delete the groups of a lake with their tables."""
    with change("delete the groups", conn):
        conn.execute(
            "delete from aqueduck.table_mappings m using aqueduck.sync_groups g"
            " where g.id = m.group_id and g.lake = %s",
            (lake,),
        )
        conn.execute("delete from aqueduck.sync_groups where lake = %s", (lake,))


def foreign_objects(conn: Connection) -> list[str]:
    """What the schema `aqueduck` has that Aqueduck did not create, in the server's words."""
    with registry_errors("look at the schema aqueduck", conn):
        rows = conn.execute(_FOREIGN, {"tables": list(_TABLES), "functions": sorted(_functions())}).fetchall()
    return [text for (text,) in rows]


def may_drop_schema(conn: Connection) -> bool:
    """Whether the role owns the schema; another role may have made it for the registry."""
    with registry_errors("look at the schema aqueduck", conn):
        row = conn.execute(
            "select pg_has_role(nspowner, 'usage') from pg_namespace where nspname = 'aqueduck'"
        ).fetchone()
    return row == (True,)


def drop_registry(conn: Connection, *, with_schema: bool) -> None:
    """Drop the registry's functions and tables, and the schema if nothing else is in it."""
    with change("drop the registry", conn):
        ours = {"tables": list(_TABLES), "functions": sorted(_functions())}
        for table, constraint in conn.execute(_CHECKS, ours).fetchall():  # they use the functions
            conn.execute(
                f"alter table {identifier('aqueduck', table)} drop constraint {identifier(constraint)}".encode()
            )
        [[functions]] = conn.execute(_SIGNATURES, ours).fetchall()
        if functions:
            conn.execute(f"drop function {functions}".encode())
        conn.execute(f"drop table {', '.join(identifier('aqueduck', name) for name in _TABLES)}".encode())
        if with_schema:
            conn.execute("drop schema aqueduck")


def _functions() -> set[str]:
    """The names of all functions that any version of the statements creates."""
    return set(re.findall(r"create or replace function aqueduck\.(\w+)", statements()))


_CHECKS = """
    select r.relname::text, c.conname::text from pg_constraint c join pg_class r on r.oid = c.conrelid
    where c.contype = 'c' and r.relnamespace = 'aqueduck'::regnamespace and r.relname = any (%(tables)s)
"""
_SIGNATURES = """
    select string_agg(p.oid::regprocedure::text, ', ') from pg_proc p
    where p.pronamespace = 'aqueduck'::regnamespace and p.proname = any (%(functions)s)
"""
_FOREIGN = """
    select pg_describe_object('pg_class'::regclass, c.oid, 0) from pg_class c
    where c.relnamespace = 'aqueduck'::regnamespace and c.relkind in ('r', 'p', 'v', 'm', 'f', 'S', 'c')
        and c.relname <> all (%(tables)s) and not exists (
            select from pg_depend d join pg_class t on t.oid = d.refobjid
            where d.classid = 'pg_class'::regclass and d.objid = c.oid and d.deptype in ('a', 'i')
                and t.relnamespace = c.relnamespace and t.relname = any (%(tables)s))
    union all
    select pg_describe_object('pg_proc'::regclass, p.oid, 0) from pg_proc p
    where p.pronamespace = 'aqueduck'::regnamespace and p.proname <> all (%(functions)s)
    union all
    select pg_describe_object('pg_type'::regclass, t.oid, 0) from pg_type t
    where t.typnamespace = 'aqueduck'::regnamespace and t.typtype in ('d', 'e', 'r')
    order by 1
"""
