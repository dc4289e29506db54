"""
What a publication of somebody's has: for flows that read one as it is, and change nothing about it.

Making one that has exactly our tables is in `publications`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psycopg
import structlog

from aqueduck.errors import PublicationError, TableMissingError
from aqueduck.postgres.connection import translate_errors
from aqueduck.postgres.quoting import identifier
from aqueduck.postgres.tables import describe_oid, describe_table
from aqueduck.schema import TableName, TableSchema

__all__ = [
    "Newcomer",
    "check_publication",
    "newcomers",
    "publication_exists",
    "published_tables",
    "refuse_narrowed",
]

log = structlog.get_logger()

Connection = psycopg.Connection[Any]


def publication_exists(conn: Connection, name: str) -> bool:
    """Whether there is one of that name."""
    with translate_errors(f"read the publication {name}", conn=conn):
        return bool(conn.execute("select 1 from pg_publication where pubname = %s", (name,)).fetchall())


def check_publication(conn: Connection, name: str) -> str:
    """Refuse a publication that does not exist or publishes nothing; otherwise say what it has."""
    with translate_errors(f"read the publication {name}", conn=conn):
        row = conn.execute(
            "select puballtables, (select count(*) from pg_publication_tables t where t.pubname = p.pubname)"
            " from pg_publication p where pubname = %s",
            (name,),
        ).fetchone()
    quoted = identifier(name)
    if row is None:
        raise PublicationError(
            f"the publication {name} does not exist",
            hint=f"create publication {quoted} for table public.orders",
        )
    if not row[0] and not row[1]:
        raise PublicationError(
            f"the publication {name} has no tables",
            hint=f"alter publication {quoted} add table public.orders",
        )
    return f"{row[1]} tables"


def refuse_narrowed(conn: Connection, name: str, plugin: str) -> None:
    """
    Refuse a publication of which the plugin knows nothing, and which does not publish its tables whole.

    Only pgoutput keeps to column lists, row filters and kinds of change: another plugin would send what somebody wanted kept back.
    """
    if plugin == "pgoutput":
        return
    version = conn.info.server_version
    narrowed = "not (p.pubinsert and p.pubupdate and p.pubdelete and p.pubtruncate)"
    if version >= 150000:
        narrowed += (
            " or exists (select from pg_publication_rel r where r.prpubid = p.oid"
            " and (r.prattrs is not null or r.prqual is not null))"
        )
    with translate_errors(f"read the publication {name}", conn=conn):
        row = conn.execute(
            f"select {narrowed} from pg_publication p where pubname = %s".encode(), (name,)
        ).fetchone()
    if row is not None and row[0]:
        raise PublicationError(
            f"the publication {name} has column lists, row filters, or not every kind of change,"
            f" of which {plugin} knows nothing",
            hint="name a publication that publishes its tables whole, or read it with the plugin pgoutput",
        )


def published_tables(conn: Connection, publication: str) -> tuple[TableSchema, ...]:
    """The tables of a publication, as the catalog describes them."""
    check_publication(conn, publication)
    with translate_errors(f"read the publication {publication}", conn=conn):
        rows = conn.execute(
            "select schemaname::text, tablename::text from pg_publication_tables where pubname = %s",
            (publication,),
        ).fetchall()
    found = []
    for schema, name in rows:
        try:
            found.append(describe_table(conn, str(TableName(schema, name)), need_key=False))
        except (TableMissingError, PublicationError):
            # Dropped a moment ago, or of a kind that we do not know.
            log.warning("table not described, taken as the stream tells it", table=f"{schema}.{name}")
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Newcomer:
    """What the stream does not tell of a table that joined the publication while it is read."""

    key: tuple[str, ...] = ()
    """Of a table with a full replica identity; of others, the stream tells it."""
    above: tuple[str, ...] = ()
    """The partitioned tables, as schema.name, whose partition it is."""


def newcomers(conn: Connection, publication: str, known: Iterable[int]) -> dict[int, Newcomer]:
    """All tables of the publication, by OID, that are not among the known ones."""
    with translate_errors(f"read the publication {publication}", conn=conn):
        rows = conn.execute(_NEWCOMERS, (publication, list(known))).fetchall()
    return {oid: Newcomer(_key(conn, oid) if full else (), tuple(above)) for oid, full, above in rows}


_NEWCOMERS = """
    select c.oid::int8, c.relreplident = 'f', array(
               select s.nspname || '.' || a.relname from pg_partition_ancestors(c.oid) p
               join pg_class a on a.oid = p.relid join pg_namespace s on s.oid = a.relnamespace
           )
    from pg_publication_tables t
    join pg_namespace n on n.nspname = t.schemaname join pg_class c on c.relnamespace = n.oid and c.relname = t.tablename
    where t.pubname = %s and not c.oid::int8 = any (%s::int8[])
"""


def _key(conn: Connection, oid: int) -> tuple[str, ...]:
    try:
        return describe_oid(conn, oid, need_key=False).key
    except (TableMissingError, PublicationError):  # dropped a moment ago
        return ()
