"""
Publications: which part of the source is streamed.

`ensure_publication` makes a publication send exactly the given tables, and changes nothing if it already
does, so that a role without the privileges can use a publication that an administrator prepared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import psycopg
import structlog
from psycopg.rows import class_row

from aqueduck.model.errors import NoKeyError, PrivilegeError, PublicationError, TableMissingError
from aqueduck.model.schema import TableName, TableSchema
from aqueduck.postgres.catalog.tables import describe_oid
from aqueduck.postgres.session.connection import connect, translate_errors
from aqueduck.postgres.session.quoting import identifier, table_identifier
from aqueduck.state_files.files import Sending

__all__ = [
    "PublishedTables",
    "create_publication_sql",
    "drop_publication",
    "ensure_publication",
    "give_identity",
    "published_since",
    "publishes_exactly",
    "refuse_foreign",
    "refuse_without_columns",
    "refuse_without_identity",
    "refuse_without_key",
]

Connection = psycopg.Connection[Any]

log = structlog.get_logger()

LOCK_SECONDS_MAX = 5
_OPTIONS = "publish = 'insert, update, delete, truncate', publish_via_partition_root = true"


@dataclass(frozen=True, slots=True)
class _Publication:
    all_tables: bool
    options_fit: bool
    """All changes, under the name of the root of partitions, without generated columns."""
    schemas: bool
    """Whether whole schemas are published."""
    narrowed: bool
    """Whether some table has a column list or a row filter."""
    tables: list[int]


def ensure_publication(conn: Connection, name: str, tables: Sequence[TableSchema]) -> None:
    """Create the publication, or change it so that it publishes exactly these tables, whole."""
    for table in tables:
        refuse_without_identity(table)
    with translate_errors(f"set up the publication {name}", conn=conn), conn.transaction():
        found = _read(conn, name)
        tables = _as_named_now(conn, tables)
        if found is None:
            conn.execute(create_publication_sql(name, tables).encode())
            return
        if found.all_tables:
            raise PublicationError(
                f"the publication {name} is for all tables, not for those of the group",
                hint="set another publication for the group, or publication_by: user to use it as it is,"
                f" or run: drop publication {identifier(name)}",
            )
        if not found.options_fit:
            conn.execute(f"alter publication {identifier(name)} set ({_options(conn)})".encode())
        if not _has_exactly(found, tables):
            _set_tables(conn, name, found, tables)


def publishes_exactly(conn: Connection, name: str, tables: Sequence[TableSchema]) -> bool:
    """Whether the publication exists and `ensure_publication` would have nothing to do."""
    with translate_errors(f"read the publication {name}", conn=conn):
        found = _read(conn, name)
    return found is not None and not found.all_tables and found.options_fit and _has_exactly(found, tables)


def published_since(conn: Connection, name: str) -> dict[int, Sending]:
    """
    How each table is sent, by OID, that the publication names and sends whole.

    Empty if the publication does not exist, or does not send every kind of change.
    """
    with translate_errors(f"read the publication {name}", conn=conn):
        found = _read(conn, name)
        if found is None or found.all_tables or not found.options_fit or found.narrowed:
            return {}
        rows = conn.execute(
            "select r.prrelid::int8, p.oid || '/' || r.oid, p.xmin::text::int8, p.pubowner::int8"
            " from pg_publication_rel r join pg_publication p on p.oid = r.prpubid where p.pubname = %s",
            (name,),
        ).fetchall()
    return {oid: Sending((entry,), changed_by, owner) for oid, entry, changed_by, owner in rows}


def create_publication_sql(name: str, tables: Sequence[TableSchema | TableName]) -> str:
    """The statement that creates the publication."""
    published = f" for table {_list(tables)}" if tables else ""
    return f"create publication {identifier(name)}{published} with ({_OPTIONS})"


def drop_publication(conn: Connection, name: str) -> None:
    """Drop the publication; a missing one is not an error."""
    with translate_errors(f"drop the publication {name}", conn=conn):
        conn.execute(f"drop publication if exists {identifier(name)}".encode())


def refuse_without_columns(table: TableSchema) -> None:
    """
    Refuse a table without columns, or with generated ones only: its rows cannot be distinguished, and no file
    can hold them.
    """
    if not table.columns:
        raise NoKeyError(
            f"{table.qualified} has no columns that are sent",
            hint="add columns and a primary key, or leave the table out",
            table=table.qualified,
        )


def refuse_without_identity(table: TableSchema) -> None:
    """Refuse a table without identity: publishing it would make the application's updates and deletes fail."""
    if table.identity == "n" or (table.identity != "f" and not table.key):
        identity = "default" if table.key else "full"
        raise NoKeyError(
            "without a replica identity, its updates and deletes would fail once it is published",
            hint=f"alter table {table_identifier(table)} replica identity {identity}",
            table=table.qualified,
        )


def refuse_foreign(
    conn: Connection, publication: str, table: TableSchema, group: Sequence[TableName]
) -> None:
    """
    Refuse a table of another owner, because only the owner may publish it; a table that is already in the
    publication is accepted. `group` are all tables that the publication is to have.
    """
    with translate_errors(f"read the owner of {table.qualified}", table.qualified, conn=conn):
        row = conn.execute(
            "select r.rolname::text, r.rolsuper, current_user::text,"
            " exists (select from pg_publication where pubname = %(publication)s)"
            " from pg_class c join pg_roles r on r.oid = c.relowner"
            " where c.oid = %(oid)s and not pg_has_role(c.relowner, 'usage') and not exists"
            " (select from pg_publication_rel l join pg_publication p on p.oid = l.prpubid"
            " where l.prrelid = c.oid and p.pubname = %(publication)s)",
            {"oid": table.oid, "publication": publication},
        ).fetchone()
    if row is None:
        return
    owner, owner_is_superuser, role, exists = row
    # Membership leaves the table with its owner; never grant membership of a superuser.
    fix = f"grant {identifier(owner)} to {identifier(role)}"
    if owner_is_superuser:
        by_owner = (
            f"alter publication {identifier(publication)} set table {_list(group)}"
            if exists
            else create_publication_sql(publication, group)
        )
        fix = f"{by_owner}; -- as {owner}, and set publication_by: user for the group"
    raise PrivilegeError(
        f"only the owner of a table may publish it, and {table.qualified} belongs to {owner}"
        + (", a superuser" if owner_is_superuser else ""),
        hint=fix,
        table=table.qualified,
    )


def give_identity(conn: Connection, table: TableSchema) -> TableSchema:
    """
    Set the full replica identity for a table without a key, if necessary, before it is published.

    The lock is requested for a few seconds only: a long transaction may hold the table.
    """
    if table.key or table.identity == "f":
        return table
    statement = f"alter table {table_identifier(table)} replica identity full"
    what = f"set the replica identity of {table.qualified}"
    with translate_errors(what, table.qualified, conn=conn, fix=statement), conn.transaction():
        conn.execute(f"set local lock_timeout = '{LOCK_SECONDS_MAX}s'".encode())
        conn.execute(statement.encode())
    log.info("replica identity set to full", table=table.qualified)
    return replace(table, identity="f")


def refuse_without_key(table: TableSchema, mode: str) -> None:
    """Refuse a table without a key, which the mode needs to order the versions of a row."""
    if not table.key:
        raise NoKeyError(
            f"{table.qualified} has no key, which mode {mode} needs to match the versions of a row",
            hint=f"alter table {table_identifier(table)} add primary key (<columns>), or set mode: upsert or append",
            table=table.qualified,
        )


class PublishedTables:
    """The current tables of a publication by name; queried one by one, on a separate connection."""

    def __init__(self, dsn: str, publication: str) -> None:
        self._dsn = dsn
        self._publication = publication

    def __call__(self, name: TableName) -> tuple[TableSchema, bool] | None:
        """
        The table to which changes of `name` belong, and whether it is that table itself, not a partition of
        it.
        """
        with connect(self._dsn) as conn, translate_errors("look for a published table", conn=conn):
            row = conn.execute(_PUBLISHED, (self._publication, name.schema, name.name)).fetchone()
            return None if row is None else (describe_oid(conn, row[0], need_key=False), bool(row[1]))


_PUBLISHED = """
    select r.oid::int8, r.oid = c.oid
    from pg_class c join pg_namespace n on n.oid = c.relnamespace
    join pg_class r on r.oid = c.oid or r.oid in (select pg_partition_ancestors(c.oid))
    join pg_namespace s on s.oid = r.relnamespace
    join pg_publication_tables p on p.pubname = %s and (p.schemaname, p.tablename) = (s.nspname, r.relname)
    where n.nspname = %s and c.relname = %s order by 2 desc limit 1
"""


def _as_named_now(conn: Connection, tables: Sequence[TableSchema]) -> list[TableSchema]:
    """The tables under their current names: another table may have taken the name that we know."""
    rows = conn.execute(
        "select c.oid::int8, n.nspname::text, c.relname::text from pg_class c"
        " join pg_namespace n on n.oid = c.relnamespace where c.oid = any (%s::oid[])",
        ([table.oid for table in tables],),
    ).fetchall()
    names = {oid: (schema, name) for oid, schema, name in rows}
    for table in tables:
        if table.oid not in names:
            raise TableMissingError(
                f"the table {table.qualified} does not exist any more", table=table.qualified
            )
    return [replace(t, schema=names[t.oid][0], name=names[t.oid][1]) for t in tables]


def _has_exactly(found: _Publication, tables: Sequence[TableSchema]) -> bool:
    return not found.schemas and not found.narrowed and set(found.tables) == {t.oid for t in tables}


def _set_tables(conn: Connection, name: str, found: _Publication, tables: Sequence[TableSchema]) -> None:
    if tables:
        conn.execute(f"alter publication {identifier(name)} set table {_list(tables)}".encode())
        return
    # A publication cannot be set to no tables: drop them by name.
    conn.execute(f"drop publication {identifier(name)}".encode())
    conn.execute(create_publication_sql(name, ()).encode())


def _list(tables: Sequence[TableSchema | TableName]) -> str:
    # `only`: tables that inherit from ours are not ours.
    return ", ".join(f"only {table_identifier(table)}" for table in tables)


def _options(conn: Connection) -> str:
    return _OPTIONS + (", publish_generated_columns = none" if conn.info.server_version >= 180000 else "")


def _read(conn: Connection, name: str) -> _Publication | None:
    version = conn.info.server_version
    fits = "p.pubinsert and p.pubupdate and p.pubdelete and p.pubtruncate and p.pubviaroot"
    if version >= 180000:
        fits += " and p.pubgencols = 'n'"
    if version >= 150000:
        narrowed = "coalesce(bool_or(r.prattrs is not null or r.prqual is not null), false)"
        schemas = "exists (select from pg_publication_namespace n where n.pnpubid = p.oid)"
    else:
        narrowed = schemas = "false"
    query = f"""
        select p.puballtables as all_tables, {fits} as options_fit, {schemas} as schemas,
               {narrowed} as narrowed,
               coalesce(array_agg(r.prrelid::int8) filter (where r.oid is not null), '{{}}') as tables
        from pg_publication p left join pg_publication_rel r on r.prpubid = p.oid
        where p.pubname = %s group by p.oid
    """
    with conn.cursor(row_factory=class_row(_Publication)) as cursor:
        return cursor.execute(query.encode(), (name,)).fetchone()
