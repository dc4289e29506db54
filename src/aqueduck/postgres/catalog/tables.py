"""
The source tables: columns, types and the key that identifies rows.

Reads the server's catalog with one statement per table, so that a table is never seen halfway through a
change. `decoder` reads the same information from the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import psycopg
from psycopg.rows import dict_row

from aqueduck.model.columns.projection import Projection, bind
from aqueduck.model.errors import NoKeyError, PublicationError, TableMissingError
from aqueduck.model.schema import Column, TableName, TableSchema, parse_table_name
from aqueduck.postgres.catalog.user_tables import nearest_table
from aqueduck.postgres.publications.narrowed import as_published
from aqueduck.postgres.session.connection import translate_errors
from aqueduck.postgres.session.quoting import identifier, table_identifier

__all__ = ["describe_oid", "describe_table", "has_key", "resolve_type"]

Connection = psycopg.Connection[Any]

_KINDS = {
    "v": "a view",
    "m": "a materialized view",
    "f": "a foreign table",
    "S": "a sequence",
    "i": "an index",
    "I": "an index",
    "c": "a type",
}

_FIRST_OWN_OID = 16384
"""Tables with lower OIDs belong to the server, and cannot be published."""


def describe_table(
    conn: Connection, source: str, *, need_key: bool = True, publication: str = ""
) -> TableSchema:
    """
    Describe `schema.table`; either part may be quoted, and the schema is `public` by default.

    Without a key it raises `NoKeyError`, or returns an empty key if none is needed. With a `publication` of
    the user's, only the columns that it publishes.
    """
    name = _parse(source)
    with translate_errors(f"describe {name.qualified}", name.qualified, conn=conn):
        row = _find(conn, "n.nspname = %(schema)s and c.relname = %(name)s", _names(name))
    if row is None:
        raise _missing(conn, name)
    return as_published(
        conn, _described(row, need_key, generated=_may_send_generated(conn, publication)), publication
    )


def describe_oid(
    conn: Connection, oid: int, *, need_key: bool = True, projection: Projection | None = None
) -> TableSchema:
    """
    Describe the table with this OID, under its current name.

    A projection that was bound to it earlier is applied again.
    """
    with translate_errors(f"describe the table with OID {oid}", conn=conn):
        row = _find(conn, "c.oid = %(oid)s", {"oid": oid})
    if row is None:
        raise TableMissingError(
            f"the table with OID {oid} does not exist", hint="remove it from the configuration"
        )
    if projection is None:
        return _described(row, need_key)
    table = _described(row, need_key, generated=_may_send_generated(conn, projection.publication))
    found = as_published(conn, table, projection.publication)
    published = found.projection.published_where if found.projection is not None else ""
    return bind(found, replace(projection, published_where=published), projection)


def dropped_columns(conn: Connection, oid: int) -> set[int]:
    """The numbers of the table's dropped columns."""
    with translate_errors(f"describe the table with OID {oid}", conn=conn):
        rows = conn.execute(
            b"select attnum from pg_attribute where attrelid = %s and attnum > 0 and attisdropped", (oid,)
        )
        return {int(number) for (number,) in rows}


def has_key(conn: Connection, oid: int, key: Sequence[str]) -> bool:
    """Whether a unique index guarantees at every moment that no two rows agree in these columns."""
    with translate_errors(f"look for the key of the table with OID {oid}", conn=conn):
        return bool(conn.execute(_KEY_QUERY, {"oid": oid, "key": list(key)}).fetchall())


def resolve_type(conn: Connection, column: Column) -> Column:
    """
    A column that the stream announced, completed with the catalog's facts about its type, if the type still
    exists.
    """
    given = {"oid": column.type_oid, "typmod": column.typmod}
    with (
        translate_errors("look up a type", conn=conn),
        conn.cursor(row_factory=dict_row) as cursor,
    ):
        row = cursor.execute(_COLUMN_QUERY.encode(), given).fetchone()
    return column if row is None else replace(column, **row)


def _may_send_generated(conn: Connection, publication: str) -> bool:
    """
    Whether the publication may send stored generated columns: only a user's publication, from PostgreSQL 18
    on.
    """
    return bool(publication) and conn.info.server_version >= 180000


def _described(row: dict[str, Any], need_key: bool, *, generated: bool = False) -> TableSchema:
    """With `generated`, include stored generated columns, which a user's publication may send."""
    columns = [c for c in row["columns"] if not c.pop("generated") or generated]
    table = TableSchema(
        oid=row["oid"],
        schema=row["schema"],
        name=row["name"],
        columns=tuple(Column(**column) for column in columns),
        key=tuple(row["key"]),
        identity=row["identity"],
        newest=row["newest"],
    )
    if row["kind"] not in ("r", "p"):
        kind = _KINDS.get(row["kind"], "no table")
        raise TableMissingError(
            f"{table.qualified} is {kind}: only ordinary and partitioned tables have changes to replicate",
            hint="name a table instead",
            table=table.qualified,
        )
    if table.oid < _FIRST_OWN_OID or table.schema == "aqueduck":
        whose = (
            "PostgreSQL itself" if table.oid < _FIRST_OWN_OID else "Aqueduck, which changes it all the time"
        )
        raise TableMissingError(
            f"{table.qualified} belongs to {whose}",
            hint="name a table of yours instead",
            table=table.qualified,
        )
    if row["persistence"] != "p":
        raise PublicationError(
            f"{table.qualified} is unlogged or temporary: its changes are not in WAL",
            hint=f"alter table {table_identifier(table)} set logged",
            table=table.qualified,
        )
    unsent = set(table.key) - {c.name for c in table.columns}
    if unsent and not need_key:
        return replace(table, key=())
    if unsent:
        raise NoKeyError(
            f"the key of {table.qualified} has a generated column, which is not published: {', '.join(sorted(unsent))}",
            hint="choose another replica identity index, or on PostgreSQL 18 publish it yourself"
            " (publish_generated_columns = stored) and set publication_by: user",
            table=table.qualified,
        )
    if need_key and not table.key and table.identity != "f":
        raise _no_key(table, row["unique_index"], deferrable=row["deferrable"])
    return table


def _no_key(table: TableSchema, unique_index: str | None, *, deferrable: bool) -> NoKeyError:
    name = table_identifier(table)
    index = identifier(unique_index) if unique_index else "<unique index on not-null columns>"
    by_index = f"alter table {name} replica identity using index {index}"
    problem = f"{table.qualified} has neither a primary key nor a replica identity"
    ways = [f"alter table {name} add primary key (<columns>)", by_index]
    # PostgreSQL does not accept it as an identity, and the table can have no other primary key
    if deferrable:
        problem = f"the primary key of {table.qualified} is deferrable: two rows may have the same within a transaction"
        ways = [by_index]
    elif unique_index:  # the statement that works as it is comes first
        ways.reverse()
    ways.append(f"alter table {name} replica identity full")
    return NoKeyError(
        problem, hint=f"{'; -- or '.join(ways)}; -- or set mode: append for the table", table=table.qualified
    )


def _missing(conn: Connection, name: TableName) -> TableMissingError:
    near = nearest_table(conn, name)
    fix = "correct the name under tables, or create the table" if near is None else f"did you mean {near}?"
    return TableMissingError(
        f"the table {name.qualified} does not exist in the database {conn.info.dbname}",
        hint=f"{fix}; names with capitals need double quotes",
        table=name.qualified,
    )


def _parse(source: str) -> TableName:
    try:
        return parse_table_name(source, default_schema="public")
    except ValueError as exc:
        raise TableMissingError(f"{source!r} is not a table name: it {exc}") from None


def _names(name: TableName) -> dict[str, str]:
    return {"schema": name.schema, "name": name.name}


def _find(conn: Connection, condition: str, parameters: dict[str, Any]) -> dict[str, Any] | None:
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(
            _QUERY.format(condition=condition, type_facts=_TYPE_FACTS).encode(), parameters
        ).fetchone()


# What lies below a type `given` (oid, typmod): a domain's base type, and the elements of an array that is
# not built in; what the built-in ones consist of is known without asking.
_TYPE_FACTS = """
    cross join lateral (
        with recursive below (oid, typmod, kind, parent, parent_typmod, not_null, depth) as (
            select y.oid, given.typmod, y.typtype, y.typbasetype, y.typtypmod, y.typnotnull, 0
            from pg_type y where y.oid = given.oid
            union all
            select y.oid, b.parent_typmod, y.typtype, y.typbasetype, y.typtypmod, b.not_null or y.typnotnull, b.depth + 1
            from below b join pg_type y on y.oid = b.parent and b.kind = 'd'
        )
        select oid, typmod, not_null, case when depth > 0 then oid::int8 else 0 end as base_oid
        from below order by depth desc limit 1
    ) base
    cross join lateral (
        with recursive below (oid, delimiter, kind, parent, depth) as (
            select y.oid, y.typdelim, y.typtype, y.typbasetype, 0
            from pg_type y where y.typarray = base.oid and base.oid >= 16384
            union all
            select y.oid, b.delimiter, y.typtype, y.typbasetype, b.depth + 1
            from below b join pg_type y on y.oid = b.parent and b.kind = 'd'
        )
        select coalesce(max(oid::int8), 0) as oid, coalesce(max(delimiter::text), ',') as delimiter
        from (select oid, delimiter from below order by depth desc limit 1) deepest
    ) element
"""

_COLUMN_QUERY = f"""
    select base.typmod, format_type(base.oid, base.typmod) as type_name, base.base_oid,
           element.oid as element_oid, element.delimiter
    from (select %(oid)s::oid as oid, %(typmod)s::int as typmod) given {_TYPE_FACTS}
"""

_KEY_QUERY = b"""
    select from pg_index i
    where i.indrelid = %(oid)s and i.indisunique and i.indimmediate and i.indisvalid and i.indislive
      and i.indpred is null and i.indexprs is null and not exists (
          select from pg_attribute a where a.attrelid = i.indrelid
          and a.attnum = any ((i.indkey::int2[])[0:i.indnkeyatts - 1])
          and not (a.attnotnull and a.attname::text = any (%(key)s::text[]))
      )
"""

# A domain's columns have the domain's OID, as in the stream, but the name and modifier of the
# type below it.  Generated columns are not published, unless the publication is not ours.
#
# The key has to be in the old image of updates and deletes.  With the identity USING INDEX only
# that index's columns are, not those of another primary key; with FULL any unique index over not-null
# columns will do.  A deferrable one counts for nothing: within a transaction two rows may have the same key.
#
# Rows that are older than a column have its missing value, or NULL if there is none.  Their values cannot be known if the column
# has a default but no missing value.  A partitioned table itself has no missing values, but its partitions do.  A rewrite of the
# table removes missing values; afterwards, a column that is not null must have had a default.
_QUERY = """
    with target as (
        select c.oid, n.nspname, c.relname, c.relkind, c.relpersistence, c.relreplident, c.relnatts,
               c.relfilenode not in (0, c.oid) as rewritten
        from pg_class c join pg_namespace n on n.oid = c.relnamespace
        where {condition}
    ), indexes as (
        select i.*, x.relname::text as index_name, x.oid as index_oid, array(
                   select a.attname::text from unnest(i.indkey::int2[]) with ordinality k (attnum, place)
                   join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum
                   where k.place <= i.indnkeyatts order by k.place
               ) as names,
               i.indisunique and i.indpred is null and i.indexprs is null and not exists (
                   select from pg_attribute a where a.attrelid = i.indrelid and not a.attnotnull
                   and a.attnum = any ((i.indkey::int2[])[0:i.indnkeyatts - 1])
               ) as identifies
        from target t join pg_index i on i.indrelid = t.oid join pg_class x on x.oid = i.indexrelid
        where i.indisvalid and i.indislive
    )
    select t.oid::int8 as oid, t.nspname::text as schema, t.relname::text as name, t.relkind::text as kind,
           t.relpersistence::text as persistence, t.relreplident::text as identity,
           t.relnatts::int as newest,
           array(
               select json_build_object(
                   'name', a.attname, 'type_oid', a.atttypid::int8, 'typmod', base.typmod,
                   'type_name', format_type(base.oid, base.typmod), 'not_null', a.attnotnull or base.not_null,
                   'base_oid', base.base_oid, 'element_oid', element.oid, 'delimiter', element.delimiter,
                   'number', a.attnum, 'missing', (a.attmissingval::text::text[])[1],
                   'computed', not a.atthasmissing and (a.atthasdef or a.attidentity <> ''
                       or t.rewritten and (a.attnotnull or base.not_null) or exists (
                           select from pg_partition_tree(t.oid) p join pg_attribute l on l.attrelid = p.relid
                           where t.relkind = 'p' and l.attname = a.attname and l.atthasmissing)),
                   'generated', a.attgenerated <> '')
               from pg_attribute a
               cross join lateral (select a.atttypid as oid, a.atttypmod as typmod) given
               {type_facts}
               where a.attrelid = t.oid and a.attnum > 0 and not a.attisdropped and a.attgenerated <> 'v'
               order by a.attnum
           ) as columns,
           coalesce((
               select names from indexes i where case t.relreplident
                   when 'i' then i.indisreplident
                   when 'f' then i.identifies and i.indimmediate
                   else i.indisprimary and i.indimmediate end
               order by i.indisprimary desc, i.index_oid limit 1
           ), array[]::text[]) as key,
           (select index_name from indexes where identifies and indimmediate order by index_oid limit 1)
               as unique_index,
           exists (select from indexes where indisprimary and not indimmediate) as deferrable
    from target t
"""
