"""
Overviews made by hand, and the in-memory twins of what the server asks: no source, no lake, no Spark.

`Stage` is both: what it shows can be replaced while a server runs, and what it is asked to do it writes down.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from aqueduck.model.errors import AqueduckError
from aqueduck.model.lifecycle import SyncState
from aqueduck.overview.values import (
    CopyOverview,
    DeliveryOverview,
    DestinationOverview,
    FanoutCounts,
    FlowOverview,
    GroupOverview,
    LakeOverview,
    LakeTable,
    Overview,
    PoolOverview,
    Problem,
    ProcessUsage,
    SeedOverview,
    TableOverview,
    VerificationOverview,
    VerifyOverview,
)

START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
MIB = 1 << 20


def table(
    source: str = "public.orders", state: SyncState = SyncState.STREAMING, **fields: Any
) -> TableOverview:
    name = source.split(".")[-1]
    defaults: dict[str, Any] = {"group": "shop", "target": f"main.{name}", "rows_synced": 1_204_331}
    return TableOverview(source=source, state=state, **{**defaults, **fields})


def group(*tables: TableOverview, name: str = "shop", **fields: Any) -> GroupOverview:
    defaults: dict[str, Any] = {
        "state": "streaming",
        "slot_name": f"aqueduck_{name}",
        "position": "0/16B3748",
        "freshness_seconds": 0.8,
    }
    return GroupOverview(name=name, tables=tuple(tables), **{**defaults, **fields})


def sync(*groups: GroupOverview, **fields: Any) -> FlowOverview:
    return FlowOverview(
        name="sync",
        kind="sync",
        source="shop",
        target="lake",
        groups=tuple(groups),
        seen_at=datetime.now(UTC),
        **fields,
    )


def events_flow(name: str = "faucet_slot", **fields: Any) -> FlowOverview:
    delivery = DeliveryOverview(
        sink="jsonl /data/changes.jsonl", events=1200, bytes=240_000, events_total=51_200
    )
    slot = group(name=name, **{"batches": 4, "delivery": delivery, **fields})
    return FlowOverview(name="events", kind="events", source="shop", target=delivery.sink, groups=(slot,))


def destination(name: str, state: Any = "live", **fields: Any) -> DestinationOverview:
    return DestinationOverview(flow="tenants", name=name, state=state, **fields)


def fanout(*destinations: DestinationOverview, **fields: Any) -> FlowOverview:
    return FlowOverview(name="tenants", kind="fanout", destinations=tuple(destinations), **fields)


def overview(*flows: FlowOverview, at: datetime | None = None, **fields: Any) -> Overview:
    return Overview(at=at or datetime.now(UTC), version="0.0.0", started_at=START, flows=flows, **fields)


FAILED = Problem(
    code="lake.value",
    message="a value of the column price does not fit into decimal(10,2)",
    hint="widen the lake column, or copy the table again",
    at=START,
    flow="sync",
    group="shop",
    table="public.prices",
)
IDENTICAL = VerifyOverview(verdict="identical", at=START, identical_at=START, deep=True)
VERIFICATION = VerificationOverview(interval_seconds=21_600, deep=True, identical=1, never=2)
COPYING = table(
    "public.items",
    SyncState.SNAPSHOT,
    copy=CopyOverview(rows=410_000, bytes=41 * MIB, bytes_total=100 * MIB, share=0.41, seconds=12.0),
    parked_rows=1200,
    parked_bytes=MIB,
    parked_since=START,
)
BROKEN = table("public.prices", SyncState.ERRORED, error=FAILED, failures=3, parked_rows=52, retry_at=START)
LAKE = LakeOverview(
    catalog="sqlite",
    snapshot_id=912,
    snapshots=900,
    oldest_snapshot_at=START,
    checked_at=START,
    tables=(LakeTable(name="main.orders", files=14, bytes=88 * MIB, delete_files=3, delete_bytes=MIB, inlined_rows=40),),
)  # fmt: skip
FULL = overview(
    sync(
        group(
            table(inserts=100, updates=20, deletes=3, verified=IDENTICAL),
            COPYING,
            BROKEN,
            lag_bytes=2048,
            batches=7,
            retained_bytes=9 * MIB,
            last_sync_at=START,
        ),
        verification=VERIFICATION,
    ),
    fanout(
        destination(
            "acme", position=90, rows_replicated=502, rows_written=500, rows_deleted=2, verified=IDENTICAL
        ),
        destination(
            "bolt", "errored", position=80, lag_snapshots=10, error=replace(FAILED, destination="bolt")
        ),
        source_snapshot=90,
        counts=FanoutCounts(polls=9, cycles=4, reads=4, rows_read=510, unrouted_rows=3, null_rows=1),
        seed=SeedOverview(destinations=1, rows=250, rows_total=1000, share=0.25, seconds=3.0),
        pool=PoolOverview(open=2, created=3, evicted=1),
        verification=VERIFICATION,
    ),
    events_flow(),
    lake=LAKE,
    errors=(FAILED,),
    processes=(ProcessUsage(name="driver", memory_bytes=300 * MIB, cpu_seconds=4.2),),
)


@dataclass
class Stage:
    """`Overviews` and `Actions` in memory."""

    now: Overview = FULL
    calls: list[tuple[str, dict[Any, Any]]] = field(default_factory=list)
    refusal: AqueduckError | Exception | None = None
    blind: Exception | None = None
    actions: Any = None
    """Who acts instead, if anybody."""
    clock: datetime | None = None
    """The time of the next overviews; `None` is now."""

    def overview(self) -> Overview:
        if self.blind is not None:
            raise self.blind
        return replace(self.now, at=self.clock or datetime.now(UTC))

    def settings(self) -> list[dict[str, Any]]:
        return [{"name": "flush_interval_ms", "value": "1000", "levels": ["global", "group"]}]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def act(*positional: Any, **keywords: Any) -> int:
            if self.refusal is not None:
                raise self.refusal
            self.calls.append((name, {**dict(enumerate(positional)), **keywords}))
            return 1

        return act


def many_destinations(count: int, tick: int = 0) -> FlowOverview:
    """A fan-out with `count` lakes; some of them move at each tick."""
    rows = []
    for i in range(count):
        busy = (i * 7 + tick) % 11 == 0
        state = "errored" if i % 397 == 5 else "seeding" if i % 211 == 9 else "live"
        rows.append(
            destination(
                f"tenant-{i:04d}",
                state,
                position=4000 + tick - (i % 3 if state == "live" else 40),
                lag_snapshots=(i % 3) if state == "live" else 40,
                lag_seconds=float(i % 3) * 1.2 if state == "live" else 320.0,
                rows_replicated=10_000 + i * 13 + (tick * 25 if busy else 0),
                rows_deleted=i,
                last_change_at=START + timedelta(seconds=i),
                error=replace(FAILED, destination=f"tenant-{i:04d}", table=None, group=None)
                if state == "errored"
                else None,
                failures=3 if state == "errored" else 0,
            )
        )
    return fanout(*rows, source_snapshot=4000 + tick, pool=PoolOverview(open=64, created=2100, evicted=2036))
