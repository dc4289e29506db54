"""
The API as functions: the address, parameters, action and response of each operation.

FastAPI creates the routes, the validation of requests and the OpenAPI document from them.  An operation is one function of
the server's state (`Served`) and the checked request; refusals are `AqueduckError`s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request

from aqueduck.model.errors import NotFoundError
from aqueduck.model.lifecycle import SyncState
from aqueduck.overview.values import (
    Actions,
    DestinationOverview,
    GroupOverview,
    LakeOverview,
    Overview,
    TableOverview,
)
from aqueduck.web import answers as a
from aqueduck.web.feed import Feed
from aqueduck.web.routes import PREFIX, Operation, operation_id

__all__ = ["Now", "Served", "readiness", "router"]


@dataclass(frozen=True, slots=True)
class Served:
    """What the server has to work with."""

    feed: Feed
    wanted: Actions | None
    """Changes the desired state; None if only the file can change it."""

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


async def _served(request: Request) -> Served:
    found: Served = request.app.state.served
    return found


router = APIRouter(prefix=PREFIX, route_class=Operation, generate_unique_id_function=operation_id)

Now = Annotated[Served, Depends(_served)]
Name = Annotated[a.Name, Path()]
Source = Annotated[a.Name, Path(description=a.SOURCE)]


# -- reading


def readiness(served: Served) -> a.Readiness:
    """What `/readyz` says."""
    stalled = served.feed.stalled()
    tables = (t.source for t in served.overview.tables if t.state is SyncState.ERRORED or t.error is not None)
    destinations = (d.name for d in served.overview.destinations if d.state == "errored")
    return a.Readiness(ready=not stalled, stalled=stalled, errored=(*tables, *destinations))


@router.get("/status", summary="Everything at one moment")
def status(served: Now) -> Overview:
    return served.overview


@router.get("/flows", summary="The flows with what is in them")
def flows(served: Now) -> a.Flows:
    return a.Flows(flows=served.overview.flows)


@router.get("/groups", summary="The groups with their tables")
def groups(served: Now) -> a.Groups:
    return a.Groups(groups=served.overview.groups)


@router.get("/groups/{name}", summary="One group")
def group(served: Now, name: Name) -> GroupOverview:
    for found in served.overview.groups:
        if found.name == name:
            return found
    raise NotFoundError("no group of this name runs", hint=f"GET {PREFIX}/groups lists them")


@router.get("/tables", summary="The tables")
def tables(served: Now, query: Annotated[a.TablesQuery, Query()]) -> a.Tables:
    found = (
        t
        for t in served.overview.tables
        if query.group in (None, t.group) and query.state in (None, t.state.value)
    )
    return a.Tables(tables=tuple(found))


@router.get("/tables/{source:path}", summary="One table")
def table(served: Now, source: Source, query: Annotated[a.TableQuery, Query()]) -> TableOverview:
    for found in served.overview.tables:
        if found.source == source and query.group in (None, found.group):
            return found
    raise NotFoundError("no table of this name is synced", hint=f"GET {PREFIX}/tables lists them")


@router.get("/destinations", summary="The destinations of fan-outs")
def destinations(served: Now, query: Annotated[a.DestinationsQuery, Query()]) -> a.Destinations:
    found = tuple(
        d
        for d in served.overview.destinations
        if query.flow in (None, d.flow) and query.state in (None, d.state)
    )
    page = found[query.offset : query.offset + query.limit]
    return a.Destinations(total=len(found), destinations=page)


@router.get("/destinations/{name}", summary="One destination")
def destination(served: Now, name: Name) -> DestinationOverview:
    for found in served.overview.destinations:
        if found.name == name:
            return found
    raise NotFoundError("no destination of this id is served", hint=f"GET {PREFIX}/destinations lists them")


@router.get("/lake", summary="Files, sizes and lake snapshots")
def lake(served: Now) -> LakeOverview:
    if served.overview.lake is None:
        raise NotFoundError("nothing is known about the lake yet", hint="ask again in a minute")
    return served.overview.lake


@router.get("/errors", summary="Recent errors, newest first")
def errors(served: Now, query: Annotated[a.ErrorsQuery, Query()]) -> a.Errors:
    return a.Errors(errors=served.overview.errors[: query.limit])


@router.get("/settings", summary="All settings with their values and ranges")
def settings(served: Now) -> a.Settings:
    return a.Settings(settings=tuple(served.actions.settings()))


# -- changing


@router.post("/groups", summary="Create a group with its own slot and publication", status_code=202)
def create_group(served: Now, body: a.CreateGroup) -> a.Accepted:
    served.actions.create_group(
        body.name, publication=body.publication, slot_name=body.slot_name, capture=body.capture
    )
    return a.Accepted(message=f"the group {body.name} is created")


@router.delete("/groups/{name}", summary="Drop a group with its slot and publication", status_code=202)
def drop_group(served: Now, name: Name, query: Annotated[a.DropGroup, Query()]) -> a.Accepted:
    served.actions.drop_group(name, with_tables=query.with_tables)
    return a.Accepted(message=f"the group {name} is dropped; its lake tables stay")


@router.post("/groups/{name}/enable", summary="Run a group again", status_code=202)
def enable_group(served: Now, name: Name) -> a.Accepted:
    served.actions.enable_group(name)
    return a.Accepted(message=f"the group {name} resumes")


@router.post("/groups/{name}/disable", summary="Stop a group; the server keeps its WAL", status_code=202)
def disable_group(served: Now, name: Name) -> a.Accepted:
    served.actions.disable_group(name)
    return a.Accepted(message=f"the group {name} stops; its slot keeps the changes")


@router.post("/tables", summary="Add a table; its rows are copied beside the stream", status_code=202)
def add_table(served: Now, body: a.AddTable) -> a.Accepted:
    served.actions.add_table(
        body.source,
        target=body.target,
        group_name=body.group,
        mode=body.mode,
        copy=body.initial_copy,
        source_column=body.source_column,
        source_value=body.source_value,
        options=body.options,
    )
    return a.Accepted(message=f"{body.source} is added to the group {body.group}")


@router.delete("/tables/{source:path}", summary="Take a table out", status_code=202)
def remove_table(served: Now, source: Source, query: Annotated[a.RemoveTable, Query()]) -> a.Accepted:
    served.actions.remove_table(source, drop_target=query.drop_target, group_name=query.group)
    stays = "is dropped" if query.drop_target else "stays"
    return a.Accepted(message=f"{source} is no longer replicated; its lake table {stays}")


@router.post("/tables/{source:path}/move", summary="Move a table to another group", status_code=202)
def move_table(served: Now, source: Source, body: a.MoveTable) -> a.Accepted:
    served.actions.move_table(source, body.group, from_group=body.from_group)
    return a.Accepted(message=f"{source} moves to the group {body.group}")


@router.post("/tables/{source:path}/resync", summary="Copy a table again", status_code=202)
def resync_table(served: Now, source: Source, query: Annotated[a.TableQuery, Query()]) -> a.Accepted:
    served.actions.resync_table(source, group_name=query.group)
    return a.Accepted(message=f"{source} will be re-copied")


@router.post("/tables/{source:path}/retry", summary="Try an errored table again at once", status_code=202)
def retry_table(served: Now, source: Source, query: Annotated[a.TableQuery, Query()]) -> a.Accepted:
    served.actions.retry_table(source, group_name=query.group)
    return a.Accepted(message=f"{source} is tried again")


@router.put("/settings/{name}", summary="Set a value, or take it back with null", status_code=202)
def set_setting(served: Now, name: Name, body: a.SetSetting) -> a.Accepted:
    value = None if body.value is None else str(body.value)
    served.actions.set_setting(name, value, group_name=body.group, source=body.source)
    return a.Accepted(message=f"{name} is {'taken back' if value is None else 'set'}")
