"""
What runs and in which state, as plain values: the one picture that page, API, probes and metrics share.

    Overview ─ flows ─┬─ groups ── tables        flow `sync`, `events`
                      └─ destinations            flow `fanout`
             ├ lake ── tables
             ├ errors, newest first
             └ processes

`Overviews` is what makes the picture (`overview` of each flow), `Actions` is what changes
the desired state (`sync.actions`).

Two modules with similar names come before it.  `status` of a flow has the counters of the running service, which
stay inside the process.  `observe` of `sync` turns them into rows of the registry, which SQL shows; the tables in
the picture are these rows, so that SQL, API, page and metrics say the same.

It contains only names, counts, positions and our own messages:
never a cell value, a connection string or a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import datetime
from typing import Any, Literal, Protocol

from aqueduck.model.lifecycle import SyncState

__all__ = [
    "Actions",
    "CopyOverview",
    "DeliveryOverview",
    "DestinationOverview",
    "DestinationState",
    "FanoutCounts",
    "FlowOverview",
    "GroupOverview",
    "LakeOverview",
    "LakeTable",
    "Overview",
    "Overviews",
    "PoolOverview",
    "Problem",
    "ProcessUsage",
    "SeedOverview",
    "TableOverview",
    "VerificationOverview",
    "VerifyOverview",
    "to_plain",
]

GroupState = Literal["starting", "streaming", "retrying", "errored", "disabled"]
DestinationState = Literal["pending", "seeding", "live", "errored"]
FlowKind = Literal["sync", "fanout", "events"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An error as shown: our code, our message, the next step, and what it is about."""

    code: str
    message: str
    hint: str | None = None
    at: datetime | None = None
    flow: str | None = None
    group: str | None = None
    table: str | None = None
    destination: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOverview:
    """The initial copy of a table, during and after it."""

    rows: int = 0
    bytes: int = 0
    bytes_total: int | None = None
    share: float | None = None
    """From 0 to 1; `None` while the size is unknown."""
    seconds: float | None = None
    seconds_left: float | None = None
    done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOverview:
    """The last comparison of a table or a destination with its source."""

    verdict: Literal["never", "identical", "different"] = "never"
    at: datetime | None = None
    """When the last comparison ended."""
    identical_at: datetime | None = None
    """When source and copy were last identical."""
    differences: int = 0
    """Rows that differ, or 1 if they were not counted."""
    note: str | None = None
    deep: bool = False
    failed_at: datetime | None = None
    """When a comparison last failed, if none succeeded since."""
    failure: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOverview:
    """One synced table: the columns of P-S27, and its changes since the service started."""

    group: str
    source: str
    target: str
    state: SyncState
    mode: str = "upsert"
    source_column: str | None = None
    """In a target that several sources fill: the column that identifies the source of a row."""
    source_value: str | None = None
    layout: str | None = None
    """Partition keys and sort keys that the target has, if any."""
    enabled: bool = True
    state_since: datetime | None = None
    rows_synced: int = 0
    inserts: int = 0
    updates: int = 0
    deletes: int = 0
    truncates: int = 0
    queued_changes: int = 0
    queued_bytes: int = 0
    last_sync_at: datetime | None = None
    error: Problem | None = None
    failures: int = 0
    retry_at: datetime | None = None
    copy_lsn: str | None = None
    applied_lsn: str | None = None
    lag_bytes: int = 0
    lag_seconds: float = 0.0
    copy: CopyOverview | None = None
    parked_rows: int = 0
    parked_bytes: int = 0
    parked_since: datetime | None = None
    verified: VerifyOverview = VerifyOverview()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryOverview:
    """Where the events of a slot go, and how many were delivered."""

    sink: str
    """A description without secrets, such as `jsonl /data/changes.jsonl`."""
    events: int = 0
    bytes: int = 0
    events_total: int = 0
    """Includes earlier runs, as the bookmark counts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOverview:
    """
    Tables that share a slot and commit together; counters start with the service.

    A slot whose changes become events is also a group: values about the lake then describe its sink.
    """

    name: str
    state: GroupState
    capture: str = "stream"
    reader: str = "stream"
    """`stream`, `poll`, or `bulk` while the capture `auto` reads a backlog."""
    bulk_trouble: str | None = None
    """Why the capture `auto` only streams."""
    slot_name: str | None = None
    position: str | None = None
    """The position that the lake has reached."""
    seen: str | None = None
    """The position that the capture has decoded."""
    lag_bytes: int = 0
    lag_seconds: float = 0.0
    freshness_seconds: float | None = None
    """Time from source commit to lake commit, of the last transaction of the last batch."""
    batches: int = 0
    transactions: int = 0
    changes: int = 0
    received_bytes: int = 0
    decode_seconds: float = 0.0
    staged_bytes: int = 0
    unfinished_bytes: int = 0
    """Staged bytes of source transactions that have not ended."""
    paused: bool = False
    """Whether reading is paused until the lake catches up."""
    held: bool = False
    retained_bytes: int | None = None
    """WAL that the server retains for the slot."""
    restarts: int = 0
    last_sync_at: datetime | None = None
    error: Problem | None = None
    tables: tuple[TableOverview, ...] = ()
    delivery: DeliveryOverview | None = None
    """Only for an events flow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DestinationOverview:
    """One lake that a fan-out fills."""

    flow: str
    name: str
    state: DestinationState
    position: int | None = None
    """The source's lake snapshot up to which it is complete."""
    lag_snapshots: int = 0
    lag_seconds: float = 0.0
    rows_replicated: int = 0
    """Rows written, replaced and deleted, including earlier runs."""
    rows_written: int = 0
    rows_upserted: int = 0
    rows_deleted: int = 0
    rows_matched: int = 0
    """Rows that already existed and were replaced."""
    last_change_at: datetime | None = None
    error: Problem | None = None
    failures: int = 0
    retry_at: datetime | None = None
    verified: VerifyOverview = VerifyOverview()


@dataclass(frozen=True, slots=True, kw_only=True)
class FanoutCounts:
    """What a fan-out has done since the service started."""

    polls: int = 0
    cycles: int = 0
    reads: int = 0
    """Reads of the source, each for all destinations of a cycle."""
    rows_read: int = 0
    unrouted_rows: int = 0
    """Rows whose routing value belongs to no destination."""
    null_rows: int = 0
    """Rows without a routing value."""
    routing_moves: int = 0
    conflicts: int = 0
    orphaned_preimages: int = 0
    reseeds: int = 0
    miscounts: int = 0
    """Of those, destinations whose row count differed from the source's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedOverview:
    """A running seed: one read of the source for several destinations."""

    destinations: int
    destinations_done: int = 0
    rows: int = 0
    """Rows read from the source, plus rows written."""
    rows_total: int = 0
    """The number of rows in the source table."""
    share: float = 0.0
    """From 0 to 1."""
    seconds: float = 0.0
    moved_at: datetime | None = None
    """When a task last made progress on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOverview:
    """The sessions with destinations that a fan-out keeps open."""

    open: int = 0
    created: int = 0
    evicted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationOverview:
    """All tables or destinations of a flow, by their last verdicts."""

    interval_seconds: float
    deep: bool
    identical: int = 0
    different: int = 0
    never: int = 0
    """Not compared yet."""
    oldest_at: datetime | None = None
    """When the subject that waits longest was last identical; `None` if one never was."""
    doing: tuple[str, ...] = ()
    """What is being compared now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowOverview:
    """One flow of the service, with its groups or its destinations."""

    name: str
    kind: FlowKind
    source: str = ""
    """The source without secrets, such as the name of the database."""
    target: str = ""
    groups: tuple[GroupOverview, ...] = ()
    destinations: tuple[DestinationOverview, ...] = ()
    source_snapshot: int | None = None
    counts: FanoutCounts = FanoutCounts()
    seed: SeedOverview | None = None
    pool: PoolOverview | None = None
    error: Problem | None = None
    """Why the source, or the registry in it, cannot be read."""
    seen_at: datetime | None = None
    """
    When a sync flow last had complete information from the source: the registry was read and its groups
    stream.
    """
    moved_at: datetime | None = None
    """When the flow last did anything, including polls without changes; `None` if it does not report that."""
    verification: VerificationOverview | None = None
    """The result of the service's own comparisons; `None` if only people compare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeTable:
    """The files and rows of a lake table."""

    name: str
    files: int = 0
    bytes: int = 0
    delete_files: int = 0
    delete_bytes: int = 0
    inlined_rows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeOverview:
    """The lake's condition: many small files and many lake snapshots call for maintenance."""

    catalog: str
    """The kind of catalog: postgres, sqlite or duckdb."""
    snapshot_id: int | None = None
    snapshots: int | None = None
    oldest_snapshot_at: datetime | None = None
    checked_at: datetime | None = None
    tables: tuple[LakeTable, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUsage:
    """The resources of one kind of process: `driver`, `jvm` or `workers`."""

    name: str
    memory_bytes: int
    cpu_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """Everything at one moment."""

    at: datetime
    version: str
    started_at: datetime
    flows: tuple[FlowOverview, ...] = ()
    lake: LakeOverview | None = None
    errors: tuple[Problem, ...] = ()
    processes: tuple[ProcessUsage, ...] = field(default=())

    @property
    def groups(self) -> tuple[GroupOverview, ...]:
        return tuple(group for flow in self.flows for group in flow.groups)

    @property
    def tables(self) -> tuple[TableOverview, ...]:
        return tuple(table for group in self.groups for table in group.tables)

    @property
    def destinations(self) -> tuple[DestinationOverview, ...]:
        return tuple(destination for flow in self.flows for destination in flow.destinations)


class Overviews(Protocol):
    """Makes the current overview; called about once a second, so it must be quick."""

    def overview(self) -> Overview: ...


class Actions(Protocol):
    """
    Changes the registered configuration; refusals are `AqueduckError`s with their hints.

    The names and arguments are those of docs/sql-api.md.
    """

    def settings(self) -> Sequence[dict[str, Any]]: ...

    def set_setting(
        self, name: str, value: str | None, *, group_name: str | None = None, source: str | None = None
    ) -> None: ...

    def create_group(
        self,
        name: str,
        *,
        publication: str | None = None,
        slot_name: str | None = None,
        capture: str | None = None,
    ) -> int: ...

    def drop_group(self, name: str, *, with_tables: bool = False) -> None: ...

    def enable_group(self, name: str) -> None: ...

    def disable_group(self, name: str) -> None: ...

    def add_table(
        self,
        source: str,
        *,
        target: str | None = None,
        group_name: str = "default",
        mode: str = "upsert",
        copy: bool = True,
        source_column: str | None = None,
        source_value: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> int: ...

    def remove_table(
        self, source: str, *, drop_target: bool = False, group_name: str | None = None
    ) -> None: ...

    def move_table(self, source: str, group_name: str, *, from_group: str | None = None) -> None: ...

    def resync_table(self, source: str, *, group_name: str | None = None) -> None: ...

    def retry_table(self, source: str, *, group_name: str | None = None) -> None: ...


def to_plain(value: Any, *, without: frozenset[str] = frozenset()) -> Any:
    """A value of this module as JSON-compatible data; `without` omits fields of the top-level value."""
    if is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value) if f.name not in without}
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    return value.isoformat() if isinstance(value, datetime) else value
