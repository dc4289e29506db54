"""
The contents of a user's publication: for flows that read it and never change it.

`publications` creates publications with exactly our tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg
import structlog

from aqueduck.model.errors import PublicationError, TableMissingError, UnpublishedError
from aqueduck.model.schema import TableName, TableSchema
from aqueduck.postgres.catalog.tables import describe_oid, describe_table
from aqueduck.postgres.session.connection import translate_errors
from aqueduck.postgres.session.quoting import identifier
from aqueduck.state_files.files import Sending

__all__ = [
    "Newcomer",
    "check_publication",
    "newcomers",
    "publication_exists",
    "publication_marks",
    "publication_oid",
    "published_oids",
    "published_tables",
    "refuse_narrowed",
    "refuse_unpublished",
    "sendings",
]

log = structlog.get_logger()

Connection = psycopg.Connection[Any]


def publication_exists(conn: Connection, name: str) -> bool:
    """Whether a publication of that name exists."""
    return publication_oid(conn, name) > 0


def check_publication(conn: Connection, name: str) -> str:
    """Refuse a publication that does not exist or publishes nothing; otherwise describe its contents."""
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


def publication_marks(conn: Connection, name: str) -> dict[str, str]:
    """
    The published tables by OID, each with the publication's entries that include it.  If a table was not published for
    a while, all of its entries are new.
    """
    if not publication_oid(conn, name):
        raise PublicationError(
            f"the publication {name} does not exist any more: changes since it was dropped are not sent",
            hint=f"create publication {identifier(name)} for table public.orders",
        )
    return {str(oid): ",".join(found.entries) for oid, found in sendings(conn, name).items()}


def sendings(conn: Connection, name: str, *, whole: bool = False) -> dict[int, Sending]:
    """How each table is sent, with partitions by themselves; with `whole`, none unless every kind of change is sent."""
    schemas = _BY_SCHEMA if conn.info.server_version >= 150000 else ""
    kinds = "and pubinsert and pubupdate and pubdelete and pubtruncate" if whole else ""
    with translate_errors(f"read the publication {name}", conn=conn):
        rows = conn.execute(_SENDINGS.format(kinds, schemas).encode(), (name,)).fetchall()
    return {oid: Sending(tuple(entries), changed_by, owner) for oid, entries, changed_by, owner in rows}


def publication_oid(conn: Connection, name: str) -> int:
    """Changes if the publication was dropped and re-created; 0 if there is none."""
    with translate_errors(f"read the publication {name}", conn=conn):
        row = conn.execute("select oid::int8 from pg_publication where pubname = %s", (name,)).fetchone()
    return 0 if row is None else int(row[0])


def refuse_unpublished(
    conn: Connection, name: str, before: Mapping[str, str], now: Mapping[str, str], way_out: str
) -> None:
    """Raise if anything that is published now, and was before, was not published in between."""
    missed = [
        key
        for key, mark in now.items()
        if key in before and set(mark.split(",")).isdisjoint(before[key].split(","))
    ]
    if missed:
        with translate_errors(f"read the publication {name}", conn=conn):
            rows = conn.execute(_NAMES, ([int(key) for key in missed],)).fetchall()
        what = ", ".join(name for (name,) in rows)
        raise UnpublishedError(
            f"the publication {name} did not send {what} for a while: it was dropped and created again, or they were taken"
            " out of it and put back; changes in between were not read",
            hint=way_out,
        )


_SENDINGS = """
    with published as (select *, xmin::text::int8 as changed_by from pg_publication where pubname = %s {}),
    entries as (
        select r.prrelid as relation, p.oid || '/' || r.oid as entry
        from published p join pg_publication_rel r on r.prpubid = p.oid {}
        union all
        select c.oid, p.oid || '/all' from published p join pg_class c on p.puballtables
        where c.relkind in ('r', 'p') and c.oid >= 16384
    )
    select coalesce(t.relid, e.relation)::int8, array_agg(distinct e.entry), p.changed_by, p.pubowner::int8
    from published p cross join entries e left join pg_partition_tree(e.relation) t on true
    group by 1, 3, 4
"""
_BY_SCHEMA = """
        union all
        select c.oid, p.oid || '/' || n.oid
        from published p join pg_publication_namespace n on n.pnpubid = p.oid
        join pg_class c on c.relnamespace = n.pnnspid and c.relkind in ('r', 'p')
"""
_NAMES = """
    with missed as (select unnest(%s::oid[]) as relation)
    select relation::regclass::text from missed m
    where not exists (
        select from pg_partition_ancestors(m.relation) a join missed o on o.relation = a.relid and a.relid <> m.relation
    )
    order by 1 limit 20
"""


def published_oids(conn: Connection, name: str) -> frozenset[int]:
    """The tables that any publication sends, by OID; a partitioned table is sent as itself, or leaf by leaf."""
    with translate_errors(f"read the publication {name}", conn=conn):
        rows = conn.execute(
            "select c.oid::int8 from pg_publication_tables t join pg_namespace n on n.nspname = t.schemaname"
            " join pg_class c on c.relnamespace = n.oid and c.relname = t.tablename where t.pubname = %s",
            (name,),
        ).fetchall()
    return frozenset(oid for (oid,) in rows)


def refuse_narrowed(conn: Connection, name: str, plugin: str) -> None:
    """
    Refuse a publication that does not publish whole tables, for a plugin that ignores publications.

    Only pgoutput applies column lists, row filters and kinds of change: another plugin would send data that
    should be withheld.
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
            f" which {plugin} does not apply",
            hint="name a publication that publishes its tables whole, or read it with the plugin pgoutput",
        )


def published_tables(conn: Connection, publication: str) -> tuple[TableSchema, ...]:
    """The tables of a publication, as described by the catalog."""
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
            # Dropped a moment ago, or of an unknown kind.
            log.warning("table not described, read as the stream describes it", table=f"{schema}.{name}")
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Newcomer:
    """What the stream does not send about a table that joined the publication while it is read."""

    key: tuple[str, ...] = ()
    """For a table with a full replica identity; for others, the stream sends it."""
    above: tuple[str, ...] = ()
    """The partitioned tables above a partition, as schema.name."""


def newcomers(conn: Connection, publication: str, known: Iterable[int]) -> dict[int, Newcomer]:
    """All tables of the publication, by OID, that are not known yet."""
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
