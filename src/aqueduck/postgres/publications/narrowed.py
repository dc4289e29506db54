"""
The part of a table that a user's publication sends: some of its columns, some of its rows.

The copy must read the same part, so that it equals the stream. `publications` creates and changes our own
publications; they publish whole tables.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import psycopg

from aqueduck.model.columns.projection import Projection
from aqueduck.model.errors import PublicationError
from aqueduck.model.schema import TableSchema
from aqueduck.postgres.session.connection import translate_errors
from aqueduck.postgres.session.quoting import identifier, table_identifier

__all__ = ["as_published", "publication_marks"]

Connection = psycopg.Connection[Any]


def as_published(conn: Connection, table: TableSchema, publication: str) -> TableSchema:
    """The table with the columns that `publication` sends, and its row filter; unchanged without a publication."""
    if not publication:
        return table
    names, rows, listed = _read(conn, table, publication)
    # A column that is added to a list existed before, with values that the stream did not send.
    columns = tuple(
        replace(c, computed=c.computed or listed) for c in table.columns if names is None or c.name in names
    )
    hidden = set(table.key) - {c.name for c in columns}
    if hidden:
        raise PublicationError(
            f"the publication {publication} leaves out the key of {table.qualified}: {', '.join(sorted(hidden))}",
            hint=f"list the key's columns too: alter publication {identifier(publication)} set table …",
            table=table.qualified,
        )
    wanted = Projection(publication=publication, published_where=f"({rows})" if rows else "")
    return replace(table, columns=columns, projection=wanted)


def publication_marks(conn: Connection, publication: str, oids: Collection[int]) -> dict[int, dict[int, int]]:
    """
    By table, the transactions that last changed the publication, and the table's entry in it.

    They are used with the marks of columns (`read_column_marks`), whose numbers begin with 1.
    """
    query = """
        select o.oid::int8, p.xmin::text::int8, r.xmin::text::int8
        from unnest(%s::oid[]) o (oid) join pg_publication p on p.pubname = %s
        left join pg_publication_rel r on r.prpubid = p.oid and r.prrelid = o.oid
    """
    with translate_errors(f"read the publication {publication}", conn=conn):
        rows = conn.execute(query, (list(oids), publication)).fetchall()
    return {oid: {0: whole, -1: place or 0} for oid, whole, place in rows}


def _read(conn: Connection, table: TableSchema, publication: str) -> tuple[set[str] | None, str | None, bool]:
    """
    Names of the columns (None on servers without column lists), the row filter, and whether columns are
    listed.
    """
    narrows = conn.info.server_version >= 150000
    columns = "t.attnames::text[], t.rowfilter" if narrows else "null, null"
    listed = "r.prattrs is not null" if narrows else "false"
    with translate_errors(f"read the publication {publication}", table.qualified, conn=conn):
        found = conn.execute(
            "select pubinsert and pubupdate and pubdelete and pubtruncate,"
            " (select relkind = 'p' from pg_class where oid = %s::oid) and not pubviaroot"
            " from pg_publication where pubname = %s",
            (table.oid, publication),
        ).fetchone()
        row = conn.execute(
            f"select {columns}, exists (select from pg_publication_rel r join pg_publication p on p.oid = r.prpubid"
            f" where p.pubname = t.pubname and r.prrelid = %s::oid and {listed})"
            " from pg_publication_tables t where pubname = %s and schemaname = %s and tablename = %s".encode(),
            (table.oid, publication, table.schema, table.name),
        ).fetchone()
    _refuse_unfit(table, publication, found, published=row is not None)
    assert row is not None
    names, rows, is_listed = row
    return None if names is None else set(names), rows, bool(is_listed)


def _refuse_unfit(
    table: TableSchema, publication: str, found: tuple[bool, bool] | None, *, published: bool
) -> None:
    name = identifier(publication)
    if found is None:
        raise PublicationError(
            f"the publication {publication} does not exist",
            hint=f"create publication {name} for table {table_identifier(table)}, or set publication_by: aqueduck",
        )
    everything, leaves = found
    if leaves:
        raise PublicationError(
            f"the publication {publication} sends changes of {table.qualified} in the names of its partitions",
            hint=f"alter publication {name} set (publish_via_partition_root = true)",
            table=table.qualified,
        )
    if not published:
        raise PublicationError(
            f"the publication {publication} does not publish {table.qualified}",
            hint=f"alter publication {name} add table {table_identifier(table)}",
            table=table.qualified,
        )
    if not everything:
        raise PublicationError(
            f"the publication {publication} does not send every kind of change",
            hint=f"alter publication {name} set (publish = 'insert, update, delete, truncate')",
            table=table.qualified,
        )
