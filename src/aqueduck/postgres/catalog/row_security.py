"""
Tables with row-level security: refused before anything is read, unless the role is exempt from it.

Sessions have `row_security` off (`model.connections`), so PostgreSQL refuses a query whose rows a policy
would filter. This module finds such tables early, including all partitions, with the statement that fixes it.
"""

from __future__ import annotations

from typing import Any

import psycopg

from aqueduck.model.errors import RowSecurityError
from aqueduck.model.schema import TableName, TableSchema
from aqueduck.postgres.session.connection import translate_errors
from aqueduck.postgres.session.quoting import identifier, table_identifier

__all__ = ["refuse_row_security"]


def refuse_row_security(conn: psycopg.Connection[Any], table: TableSchema) -> None:
    """Raise if a policy could hide rows of the table from the role of `conn`, even if none does at present."""
    with translate_errors(f"look for policies of {table.qualified}", table.qualified, conn=conn):
        row = conn.execute(_ACTIVE, {"oid": table.oid}).fetchone()
    if row is None:
        return
    role, schema, name, exempt_as_owner = row
    fix = f"alter role {identifier(role)} bypassrls"
    if exempt_as_owner:  # except with "force"
        fix += f"; -- or alter table {table_identifier(TableName(schema, name))} no force row level security"
    raise RowSecurityError(
        f"{schema}.{name} has row-level security, which may hide rows from the role {role}",
        hint=fix,
        table=table.qualified,
    )


_ACTIVE = """
    select current_user::text, n.nspname::text, c.relname::text, pg_has_role(c.relowner, 'usage')
    from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where (c.oid = %(oid)s or c.oid in (select relid from pg_partition_tree(%(oid)s::oid::regclass)))
        and row_security_active(c.oid)
    order by c.oid limit 1
"""
