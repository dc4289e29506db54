"""A group's publication and slot at the source: which of them Aqueduck owns, and what the publication sends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psycopg

from aqueduck.config.sync import GroupConfig
from aqueduck.model.schema import TableSchema
from aqueduck.postgres.publications.ownership import Ownership, read_ownership, refuse_foreign_publication
from aqueduck.postgres.publications.publications import (
    drop_publication,
    ensure_publication,
    published_since,
    publishes_exactly,
)
from aqueduck.postgres.publications.published import (
    publication_exists,
    published_oids,
    refuse_narrowed,
    sendings,
)
from aqueduck.postgres.publications.slots import drop_slot, slot_info
from aqueduck.state_files.files import Sending

__all__ = ["Owned", "owned_parts", "ownership_after", "publish", "read_sent", "undo_on_failure"]


@dataclass(frozen=True, slots=True)
class Owned:
    """Whether the slot may be read and the publication changed: Aqueduck owns them, or they do not exist yet."""

    slot: bool
    publication: bool


def owned_parts(
    conn: psycopg.Connection[Any], group: GroupConfig, owned: Ownership | None, *, adopt: bool, filled: bool
) -> Owned:
    """Without a record in the registry, which may be newer than the lake, a `filled` lake shows that they were in use."""
    slot, publication = (None, None) if owned is None else (owned.slot, owned.publication)
    given = adopt or (owned is not None and owned.adopt) or (filled and slot is None)
    return Owned(
        given or slot == group.slot_name or slot_info(conn, group.slot_name) is None,
        given or publication == group.publication or not publication_exists(conn, group.publication),
    )


def ownership_after(group: GroupConfig, owned: Ownership | None, owns: Owned) -> Ownership | None:
    """The ownership to record; a publication that already fits stays with its creator."""
    if owned is None:
        return None
    made = group.publication if owns.publication and not group.users_publication else owned.publication
    return replace(owned, slot=group.slot_name, publication=made)


def publish(
    conn: psycopg.Connection[Any],
    group: GroupConfig,
    tables: Sequence[TableSchema],
    *,
    ours: bool | None = None,
) -> None:
    """Make the group's publication send these tables; refuse one of others that sends something else."""
    if group.users_publication:
        refuse_narrowed(conn, group.publication, group.plugin)
        return
    if ours is None:
        owned = read_ownership(conn, group.name)
        ours = owned is None or owned.publication == group.publication
    exists = publication_exists(conn, group.publication)
    if exists and not ours and not publishes_exactly(conn, group.publication, tables):
        refuse_foreign_publication(group.publication)
    ensure_publication(conn, group.publication, tables)


def read_sent(conn: psycopg.Connection[Any], group: GroupConfig) -> dict[int, Sending]:
    """How the group's publication sends tables, as far as it sends them whole, or as its user wants them."""
    if not group.users_publication:
        return published_since(conn, group.publication)
    listed = published_oids(conn, group.publication)
    return {oid: s for oid, s in sendings(conn, group.publication, whole=True).items() if oid in listed}


@contextlib.contextmanager
def undo_on_failure(conn: psycopg.Connection[Any], group: GroupConfig) -> Iterator[None]:
    """Drop, after a failure, what did not exist before."""
    had_slot = slot_info(conn, group.slot_name) is not None
    had_publication = publication_exists(conn, group.publication)
    try:
        yield
    except BaseException:
        if not had_slot:
            drop_slot(conn, group.slot_name)
        if not had_publication:
            drop_publication(conn, group.publication)
        raise
