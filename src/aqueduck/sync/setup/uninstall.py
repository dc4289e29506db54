"""
`aqueduck uninstall`: take back what a sync created at its source and, if asked, in the lake.

`removal_of` looks at everything and decides; each step that drops something has the function that does it.
Objects that Aqueduck did not create stay (ADR 63), and so do the tables with people's data, always.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from aqueduck.config.sync import GroupConfig, LakeConfig, SyncConfig
from aqueduck.lake.ledger.progress import read_position
from aqueduck.lake.ledger.removal import drop_records, forget_groups, others_in_lake, own_tables
from aqueduck.lake.session.catalog import LakeSession, open_lake
from aqueduck.postgres.publications.ownership import read_ownership
from aqueduck.postgres.publications.publications import drop_publication
from aqueduck.postgres.publications.published import publication_exists
from aqueduck.postgres.publications.slots import drop_slot, slot_info
from aqueduck.postgres.registry.registry import check_registry, exists, read_desired
from aqueduck.postgres.registry.registry_removal import (
    delete_groups,
    drop_registry,
    foreign_objects,
    groups_of_other_lakes,
    may_drop_schema,
)
from aqueduck.postgres.session.connection import connect
from aqueduck.postgres.session.group_lock import GroupLocks, group_runs
from aqueduck.service.check_lake import existing_lake
from aqueduck.sync.publishing import owned_parts

__all__ = ["Removal", "uninstall"]

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class Removal:
    """Something that Aqueduck uses: it is dropped, or stays for a reason."""

    what: str
    note: str
    """What it holds, or why it stays."""
    drop: Callable[[], None] | None = None

    @property
    def stays(self) -> bool:
        return self.drop is None


def uninstall(config: SyncConfig, *, with_lake: bool, do: bool) -> Iterator[Removal]:
    """Each step, after it was done if `do`; no service may run the groups then."""
    with connect(config.source.dsn) as conn, contextlib.ExitStack() as locked:
        registered = exists(conn)
        if registered:
            check_registry(conn)  # refuses a role that may not change it
        groups = _groups(conn, config, registered=registered)
        if do:
            locks = locked.enter_context(contextlib.closing(GroupLocks(config.source.dsn)))
            for group in groups:
                locks.take(group.name)
        with existing_lake(config.lake) as lake:
            steps = list(_steps(conn, config, groups, lake, registered=registered, with_lake=with_lake))
        for step in steps:
            if do and step.drop is not None:
                step.drop()
            yield step


def _steps(
    conn: Connection,
    config: SyncConfig,
    groups: Sequence[GroupConfig],
    lake: LakeSession | None,
    *,
    registered: bool,
    with_lake: bool,
) -> Iterator[Removal]:
    for group in groups:
        yield from _group_steps(conn, group, lake)
    if registered:
        yield from _registry_steps(conn, config.lake.data_path)
    yield from _lake_steps(config.lake, lake, [group.name for group in groups], with_lake=with_lake)
    yield Removal(f"the state directory {config.state_dir}", "delete it by hand")


def _groups(conn: Connection, config: SyncConfig, *, registered: bool) -> list[GroupConfig]:
    """The groups of the file, and those that the registry has for this lake or for none yet."""
    groups = {group.name: group for group in config.groups}
    for row in read_desired(conn, config.lake.data_path) if registered else ():
        named = {"name": row.name, "slot_name": row.slot_name, "publication": row.publication}
        by = {"publication_by": row.settings.publication_by}
        groups[row.name] = GroupConfig.model_validate({**named, **by})
    return list(groups.values())


def _group_steps(conn: Connection, group: GroupConfig, lake: LakeSession | None) -> Iterator[Removal]:
    """What becomes of a group's slot and publication."""
    if group_runs(conn, group.name):
        yield Removal(f"the group {group.name}", "a service runs it: stop that service first")
    filled = lake is not None and read_position(lake, group.name) is not None
    owned = read_ownership(conn, group.name)
    owns = owned_parts(conn, group, owned, adopt=False, filled=filled)
    foreign = "Aqueduck did not create it"
    if (info := slot_info(conn, group.slot_name)) is not None:
        what = f"the slot {group.slot_name}"
        keeps = f"it keeps {info.retained_bytes / (1 << 20):.1f} MiB of WAL"
        drop = functools.partial(drop_slot, conn, group.slot_name)
        yield Removal(what, keeps, drop) if owns.slot else Removal(what, f"{foreign}; {keeps}")
    if publication_exists(conn, group.publication):
        what = f"the publication {group.publication}"
        ours = owns.publication and not group.users_publication
        drop = functools.partial(drop_publication, conn, group.publication)
        yield Removal(what, "", drop) if ours else Removal(what, foreign)


def _registry_steps(conn: Connection, lake: str) -> Iterator[Removal]:
    what = "the registry, the schema aqueduck of the source"
    if others := groups_of_other_lakes(conn, lake):
        yield Removal(what, f"it has groups of other lakes: {', '.join(others)}")
        yield Removal(
            "the groups of this lake in the registry", "", functools.partial(delete_groups, conn, lake)
        )
        return
    foreign = foreign_objects(conn)
    whole = not foreign and may_drop_schema(conn)
    yield Removal(what, "", functools.partial(drop_registry, conn, with_schema=whole))
    if foreign:
        yield Removal("the schema aqueduck", f"Aqueduck did not create: {', '.join(foreign)}")
    elif not whole:
        yield Removal("the schema aqueduck", "it belongs to another role, and is empty then")


def _lake_steps(
    config: LakeConfig, lake: LakeSession | None, groups: Collection[str], *, with_lake: bool
) -> Iterator[Removal]:
    yield Removal(f"the lake in {config.data_path}", "other programs can read it without Aqueduck")
    if lake is None:
        return
    what = "Aqueduck's own tables in the lake"
    if not own_tables(lake, groups):
        return
    if not with_lake:
        yield Removal(what, "--lake drops them; without them, everything is re-copied")
        return
    others = others_in_lake(lake, groups)
    if others:
        yield Removal("the schema aqueduck of the lake", f"others use it: {', '.join(others)}")
        what = "the records of these groups in the lake"
    yield Removal(what, "", functools.partial(_drop_from_lake, config, groups, others))


def _drop_from_lake(config: LakeConfig, groups: Collection[str], others: Collection[str]) -> None:
    with contextlib.closing(open_lake(config)) as lake:
        forget_groups(lake, groups)
        if not others:
            drop_records(lake)
