"""
Whether a group's slot and publication are ours: the service created them, or the user handed them over
(`adopt`).

The registry records this before they are created, so that a crash leaves nothing of ours behind that is never
dropped. A registry operator can name any slot and publication of the database, with the service's rights:
those of others are neither read, changed nor dropped. Without a registry, only the file names them, and the
slot and publication that filled the lake count as ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import psycopg

from aqueduck.model.errors import PublicationError, SlotConflictError
from aqueduck.postgres.registry.registry_install import may_use_groups, registry_errors
from aqueduck.postgres.session.quoting import identifier, literal

__all__ = ["Ownership", "noting", "read_ownership", "refuse_foreign_publication", "refuse_foreign_slot"]

Connection = psycopg.Connection[Any]

_ADOPT = "if it is for this group and nothing else needs it, start once with: aqueduck run -c FILE --adopt"


@dataclass(frozen=True, slots=True)
class Ownership:
    """Which of a group's objects are ours; `None` without a registry."""

    slot: str | None
    publication: str | None
    adopt: bool = False


def read_ownership(conn: Connection, group: str) -> Ownership | None:
    """Nothing for a group that is not in the registry, or if the role may not read it."""
    with registry_errors(f"look for the group {group}", conn):
        if not may_use_groups(conn, "update"):
            return None
        row = conn.execute(
            "select made_slot, made_publication, adopt from aqueduck.sync_groups where name = %s", (group,)
        ).fetchone()
    return None if row is None else Ownership(*row)


@contextlib.contextmanager
def noting(conn: Connection, group: str, before: Ownership | None, after: Ownership | None) -> Iterator[None]:
    """Record `after` before the objects are created inside the block; restore `before` on a failure."""
    if before is None or after is None:
        yield
        return
    _record(conn, group, after)
    try:
        yield
    except BaseException:
        _record(conn, group, before)
        raise


def _record(conn: Connection, group: str, now: Ownership) -> None:
    with registry_errors(f"record what belongs to the group {group}", conn):
        conn.execute(
            "update aqueduck.sync_groups set made_slot = %(slot)s, made_publication = %(publication)s where name = %(group)s"
            " and (made_slot, made_publication) is distinct from (%(slot)s, %(publication)s)",
            {"slot": now.slot, "publication": now.publication, "group": group},
        )


def refuse_foreign_slot(slot: str) -> NoReturn:
    raise SlotConflictError(
        f"the slot {slot} exists already, and Aqueduck did not make it: reading it would take changes from its consumer",
        hint=f"set another slot_name for the group; {_ADOPT}; if nothing needs it: select pg_drop_replication_slot({literal(slot)})",
    )


def refuse_foreign_publication(publication: str) -> NoReturn:
    raise PublicationError(
        f"the publication {publication} has other tables or options, and Aqueduck did not make it:"
        " changing it would change what others get",
        hint=f"set another publication for the group, or publication_by: user to use it as it is; {_ADOPT};"
        f" if nothing needs it: drop publication {identifier(publication)}",
    )
