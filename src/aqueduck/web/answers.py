"""
Request and response models: they validate requests and define the OpenAPI document.

A request with an unknown field is refused. Responses are mostly the values of `overview`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StringConstraints
from pydantic.json_schema import SkipJsonSchema

from aqueduck.overview.readiness import Stalled
from aqueduck.overview.values import DestinationOverview, FlowOverview, GroupOverview, Problem, TableOverview

__all__ = [
    "SOURCE",
    "Accepted",
    "AddTable",
    "CreateGroup",
    "Destinations",
    "DestinationsQuery",
    "DropGroup",
    "ErrorAnswer",
    "ErrorBody",
    "Errors",
    "ErrorsQuery",
    "Flows",
    "Groups",
    "Health",
    "MoveTable",
    "Name",
    "Readiness",
    "RemoveTable",
    "SetSetting",
    "Settings",
    "TableQuery",
    "Tables",
    "TablesQuery",
]

# No control characters: no name contains them, and PostgreSQL does not accept NUL.
Name = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
NotNull = Name | SkipJsonSchema[None]
"""A name that may be missing; a query has no null."""

SOURCE = "The source table, written as in SQL, such as public.orders."


class Request(BaseModel):
    """What requests share: no unknown fields, and no values in errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


# -- queries


class DropGroup(Request):
    with_tables: bool = Field(default=False, description="Remove its tables as well; lake tables are kept.")


class TableQuery(Request):
    group: NotNull = Field(default=None, description="Needed only if the table is in several groups.")


class RemoveTable(TableQuery):
    drop_target: bool = Field(default=False, description="Drop the lake table as well.")


class TablesQuery(Request):
    group: NotNull = None
    state: Literal["PENDING", "SNAPSHOT", "CATCHUP", "STREAMING", "ERRORED"] | SkipJsonSchema[None] = None


class DestinationsQuery(Request):
    flow: NotNull = None
    state: Literal["pending", "seeding", "live", "errored"] | SkipJsonSchema[None] = None
    limit: int = Field(default=10_000, ge=1, le=10_000)
    offset: int = Field(default=0, ge=0, le=10_000_000)


class ErrorsQuery(Request):
    limit: int = Field(default=100, ge=1, le=1000)


# -- bodies


class CreateGroup(Request):
    name: Name
    publication: Name | None = None
    slot_name: Name | None = None
    capture: Literal["stream", "poll", "auto"] | None = None


class AddTable(Request):
    source: Name = Field(description=SOURCE)
    target: Name | None = Field(
        default=None, description="The lake table; by default the same name in the schema main."
    )
    group: Name = "default"
    mode: Literal["upsert", "append", "history", "soft_delete"] = "upsert"
    source_column: Name | None = Field(
        default=None,
        description="The column of the lake table that says from which of several sources a row comes.",
    )
    source_value: str | None = Field(
        default=None, description="This source's value in that column; by default its name."
    )
    initial_copy: StrictBool = Field(default=True, alias="copy", description="Copy the existing rows.")
    options: dict[str, Any] = Field(
        default_factory=dict, description="Its columns, masks and row filter, as in docs/columns.md."
    )


class MoveTable(Request):
    group: Name = Field(description="The group to move the table to.")
    from_group: Name | None = None


class SetSetting(Request):
    value: Name | StrictInt | None = Field(description="The value; null resets it.")
    group: Name | None = None
    source: Name | None = None


# -- answers


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBody:
    code: str
    message: str
    hint: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorAnswer:
    error: ErrorBody


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """`stuck` names flows that have stopped polling for work."""

    status: Literal["ok", "stuck"]
    version: str
    stuck: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """
    `stalled` names work that makes no progress; `errored` are tables and destinations that failed while the
    others continue.
    """

    ready: bool
    stalled: tuple[Stalled, ...]
    errored: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The request is recorded; a running service acts within a second."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Flows:
    flows: tuple[FlowOverview, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    groups: tuple[GroupOverview, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    tables: tuple[TableOverview, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Destinations:
    total: int
    destinations: tuple[DestinationOverview, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    errors: tuple[Problem, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The result of `aqueduck.list_settings()`."""

    settings: tuple[dict[str, Any], ...]
