"""
The lake tables that Aqueduck owns: targets that it created, and tables that an operator gave to it (`adopt`).

Ownership is recorded in the transaction that creates a target.  Aqueduck never fills, empties or drops another table;
otherwise a user with the right to add a table could overwrite any table of the lake.  A target is never in the schema
`aqueduck`.
"""

from __future__ import annotations

import structlog

from aqueduck.lake.session.catalog import OWN_SCHEMA, LakeSession
from aqueduck.lake.session.sql import LAKE, qualified
from aqueduck.model.errors import ForeignTargetError
from aqueduck.model.schema import TableName

__all__ = [
    "adopt_target",
    "ensure_own_targets",
    "forget_target",
    "is_own",
    "record_target",
    "refuse_foreign_target",
]

log = structlog.get_logger()

TABLE = qualified(LAKE, OWN_SCHEMA, "targets")
_IS = "lower(target_schema) = lower(?) and lower(target_table) = lower(?)"


def ensure_own_targets(session: LakeSession) -> None:
    """Create the record, inside or outside a transaction; in a lake of an earlier version, own all current targets."""
    if session.memory.knows_own_targets:
        return
    if not _exists(session, TableName(OWN_SCHEMA, "targets")):
        doing = "preparing the lake"
        session.execute(
            f"create table if not exists {TABLE} (target_schema varchar, target_table varchar, noted_at timestamptz)",
            doing=doing,
        )
        if _exists(session, TableName(OWN_SCHEMA, "tables")):
            session.execute(
                f"insert into {TABLE} select distinct target_schema, target_table, now()"
                f" from {qualified(LAKE, OWN_SCHEMA, 'tables')}",
                doing=doing,
            )
    session.memory.knows_own_targets = True


def is_own(session: LakeSession, target: TableName) -> bool:
    """Whether Aqueduck created or adopted the target."""
    if _is_reserved(target):
        return False
    if session.read_only:
        return _is_noted(session, target)
    ensure_own_targets(session)
    return bool(session.execute(f"select 1 from {TABLE} where {_IS}", [target.schema, target.name]))


def _is_noted(session: LakeSession, target: TableName) -> bool:
    """The same for read-only sessions, which cannot create the record in a lake of an earlier version."""
    for name in ("targets", "tables"):
        if _exists(session, TableName(OWN_SCHEMA, name)):
            table = qualified(LAKE, OWN_SCHEMA, name)
            return bool(session.execute(f"select 1 from {table} where {_IS}", [target.schema, target.name]))
    return False


def refuse_foreign_target(session: LakeSession, target: TableName) -> bool:
    """Raise if the target exists and Aqueduck does not own it; otherwise returns whether it exists."""
    if _is_reserved(target):
        raise ForeignTargetError(
            f"the schema {OWN_SCHEMA} of a lake is reserved for Aqueduck",
            hint="choose a target in another schema",
            table=target.qualified,
        )
    if not _exists(session, target):
        return False
    if not is_own(session, target):
        raise ForeignTargetError(
            "the lake has a table of this name that Aqueduck did not create and would overwrite",
            hint="choose another target; or, to let Aqueduck take over the table with all of its rows: adopt: true for the table,"
            " or select aqueduck.add_table(…, adopt => true), or start once with aqueduck run -c FILE --adopt",
            table=target.qualified,
        )
    return True


def record_target(session: LakeSession, target: TableName) -> None:
    """Inside the transaction that creates the target: record that Aqueduck owns it."""
    if not is_own(session, target):
        session.execute(
            f"insert into {TABLE} values (?, ?, now())",
            [target.schema, target.name],
            doing="making the target",
            table=target.qualified,
        )


def adopt_target(session: LakeSession, target: TableName) -> None:
    """Record that Aqueduck owns an existing table, because an operator asked for it."""
    if _is_reserved(target) or not _exists(session, target) or is_own(session, target):
        return
    log.warning("adopted a lake table", table=target.qualified)
    record_target(session, target)


def forget_target(session: LakeSession, target: TableName) -> None:
    """Inside the transaction that drops the target: remove its record."""
    session.execute(f"delete from {TABLE} where {_IS}", [target.schema, target.name])


def _is_reserved(target: TableName) -> bool:
    return target.schema.lower() == OWN_SCHEMA


def _exists(session: LakeSession, table: TableName) -> bool:
    found = session.execute(
        "select 1 from duckdb_tables() where database_name = ? and lower(schema_name) = lower(?)"
        " and lower(table_name) = lower(?)",
        [session.alias, table.schema, table.name],
    )
    return bool(found)
