"""
The API as a list: each operation with its address, what it takes, what it does and what it answers.

`api` serves the list, `openapi` describes it.  What an operation does is one function of the state of the server
(`Served`) and the checked request; refusals are `AqueduckError`s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aqueduck.errors import NotFoundError
from aqueduck.lifecycle import TableState
from aqueduck.overview import (
    Actions,
    DestinationOverview,
    GroupOverview,
    LakeOverview,
    Overview,
    TableOverview,
)
from aqueduck.web import answers as a
from aqueduck.web.feed import Feed

__all__ = ["OPERATIONS", "PREFIX", "Operation", "Served", "readiness"]

PREFIX = "/api/v1"


@dataclass(frozen=True, slots=True)
class Served:
    """What the server has to work with."""

    feed: Feed
    wanted: Actions | None
    """Who can change what is wanted; nobody where the file alone says it."""

    @property
    def actions(self) -> Actions:
        if self.wanted is None:
            raise NotFoundError(
                "this service has no groups, tables and settings to change",
                hint="change its file; send a fan-out SIGHUP, start an events flow again",
            )
        return self.wanted

    @property
    def overview(self) -> Overview:
        return self.feed.overview


@dataclass(frozen=True, slots=True)
class Operation:
    """One method at one address; `params` are the parts of the address and its query."""

    method: str
    path: str
    summary: str
    run: Callable[[Served, Any, Any], Any]
    answer: Any
    params: type[a.Request] | None = None
    body: type[a.Request] | None = None

    @property
    def changes(self) -> bool:
        """Whether it changes state, and so needs the token."""
        return self.method != "GET"

    @property
    def status(self) -> int:
        return 202 if self.changes else 200


# -- reading


def readiness(served: Served) -> a.Readiness:
    """What `/readyz` says."""
    stalled = served.feed.stalled()
    tables = (
        t.source for t in served.overview.tables if t.state is TableState.ERRORED or t.error is not None
    )
    destinations = (d.name for d in served.overview.destinations if d.state == "errored")
    return a.Readiness(ready=not stalled, stalled=stalled, errored=(*tables, *destinations))


def _group(served: Served, p: a.GroupPath, _: None) -> GroupOverview:
    for group in served.overview.groups:
        if group.name == p.name:
            return group
    raise NotFoundError("no group of this name runs", hint=f"GET {PREFIX}/groups lists them")


def _tables(served: Served, p: a.TablesQuery, _: None) -> a.Tables:
    found = (
        t
        for t in served.overview.tables
        if (p.group is None or t.group == p.group) and (p.state is None or t.state.value == p.state)
    )
    return a.Tables(tables=tuple(found))


def _table(served: Served, p: a.TableQuery, _: None) -> TableOverview:
    for table in served.overview.tables:
        if table.source == p.source and p.group in (None, table.group):
            return table
    raise NotFoundError("no table of this name is synced", hint=f"GET {PREFIX}/tables lists them")


def _destinations(served: Served, p: a.DestinationsQuery, _: None) -> a.Destinations:
    found = [
        d
        for d in served.overview.destinations
        if (p.flow is None or d.flow == p.flow) and (p.state is None or d.state == p.state)
    ]
    return a.Destinations(total=len(found), destinations=tuple(found[p.offset : p.offset + p.limit]))


def _destination(served: Served, p: a.DestinationPath, _: None) -> DestinationOverview:
    for destination in served.overview.destinations:
        if destination.name == p.name:
            return destination
    raise NotFoundError("no destination of this id is served", hint=f"GET {PREFIX}/destinations lists them")


def _lake(served: Served, _p: None, _b: None) -> LakeOverview:
    lake = served.overview.lake
    if lake is None:
        raise NotFoundError("nothing is known about the lake yet", hint="ask again in a minute")
    return lake


# -- changing


def _create_group(served: Served, _: None, b: a.CreateGroup) -> a.Accepted:
    served.actions.create_group(b.name, publication=b.publication, slot_name=b.slot_name, capture=b.capture)
    return a.Accepted(message=f"the group {b.name} is created")


def _drop_group(served: Served, p: a.DropGroup, _: None) -> a.Accepted:
    served.actions.drop_group(p.name, with_tables=p.with_tables)
    return a.Accepted(message=f"the group {p.name} is dropped; its lake tables stay")


def _enable_group(served: Served, p: a.GroupPath, _: None) -> a.Accepted:
    served.actions.enable_group(p.name)
    return a.Accepted(message=f"the group {p.name} goes on")


def _disable_group(served: Served, p: a.GroupPath, _: None) -> a.Accepted:
    served.actions.disable_group(p.name)
    return a.Accepted(message=f"the group {p.name} stops; its slot keeps the changes")


def _add_table(served: Served, _: None, b: a.AddTable) -> a.Accepted:
    served.actions.add_table(
        b.source,
        target=b.target,
        group_name=b.group,
        mode=b.mode,
        copy=b.initial_copy,
        source_column=b.source_column,
        source_value=b.source_value,
        options=b.options,
    )
    return a.Accepted(message=f"{b.source} is added to the group {b.group}")


def _remove_table(served: Served, p: a.RemoveTable, _: None) -> a.Accepted:
    served.actions.remove_table(p.source, drop_target=p.drop_target, group_name=p.group)
    stays = "is dropped" if p.drop_target else "stays"
    return a.Accepted(message=f"{p.source} is no longer followed; its lake table {stays}")


def _move_table(served: Served, p: a.TablePath, b: a.MoveTable) -> a.Accepted:
    served.actions.move_table(p.source, b.group, from_group=b.from_group)
    return a.Accepted(message=f"{p.source} moves to the group {b.group}")


def _resync_table(served: Served, p: a.TableQuery, _: None) -> a.Accepted:
    served.actions.resync_table(p.source, group_name=p.group)
    return a.Accepted(message=f"{p.source} is copied again")


def _retry_table(served: Served, p: a.TableQuery, _: None) -> a.Accepted:
    served.actions.retry_table(p.source, group_name=p.group)
    return a.Accepted(message=f"{p.source} is tried again")


def _set_setting(served: Served, p: a.SettingPath, b: a.SetSetting) -> a.Accepted:
    value = None if b.value is None else str(b.value)
    served.actions.set_setting(p.name, value, group_name=b.group, source=b.source)
    return a.Accepted(message=f"{p.name} is {'taken back' if value is None else 'set'}")


OPERATIONS: tuple[Operation, ...] = (
    Operation("GET", "/status", "Everything at one moment", lambda s, _p, _b: s.overview, Overview),
    Operation("GET", "/flows", "The flows with what is in them", lambda s, _p, _b: a.Flows(flows=s.overview.flows), a.Flows),
    Operation("GET", "/groups", "The groups with their tables", lambda s, _p, _b: a.Groups(groups=s.overview.groups), a.Groups),
    Operation("POST", "/groups", "Create a group with its own slot and publication", _create_group, a.Accepted, body=a.CreateGroup),
    Operation("GET", "/groups/{name}", "One group", _group, GroupOverview, a.GroupPath),
    Operation("DELETE", "/groups/{name}", "Drop a group with its slot and publication", _drop_group, a.Accepted, a.DropGroup),
    Operation("POST", "/groups/{name}/enable", "Run a group again", _enable_group, a.Accepted, a.GroupPath),
    Operation("POST", "/groups/{name}/disable", "Stop a group; the server keeps its WAL", _disable_group, a.Accepted, a.GroupPath),
    Operation("GET", "/tables", "The tables", _tables, a.Tables, a.TablesQuery),
    Operation("POST", "/tables", "Add a table; its rows are copied beside the stream", _add_table, a.Accepted, body=a.AddTable),
    Operation("GET", "/tables/{source}", "One table", _table, TableOverview, a.TableQuery),
    Operation("DELETE", "/tables/{source}", "Take a table out", _remove_table, a.Accepted, a.RemoveTable),
    Operation("POST", "/tables/{source}/resync", "Copy a table again", _resync_table, a.Accepted, a.TableQuery),
    Operation("POST", "/tables/{source}/retry", "Try an errored table again at once", _retry_table, a.Accepted, a.TableQuery),
    Operation("POST", "/tables/{source}/move", "Move a table to another group", _move_table, a.Accepted, a.TablePath, a.MoveTable),
    Operation("GET", "/destinations", "The destinations of fan-outs", _destinations, a.Destinations, a.DestinationsQuery),
    Operation("GET", "/destinations/{name}", "One destination", _destination, DestinationOverview, a.DestinationPath),
    Operation("GET", "/lake", "Files, sizes and lake snapshots", _lake, LakeOverview),
    Operation("GET", "/errors", "Recent errors, newest first",
              lambda s, p, _b: a.Errors(errors=s.overview.errors[: p.limit]), a.Errors, a.ErrorsQuery),
    Operation("GET", "/settings", "All settings with their values and ranges",
              lambda s, _p, _b: a.Settings(settings=tuple(s.actions.settings())), a.Settings),
    Operation("PUT", "/settings/{name}", "Set a value, or take it back with null", _set_setting, a.Accepted, a.SettingPath, a.SetSetting),
)  # fmt: skip
