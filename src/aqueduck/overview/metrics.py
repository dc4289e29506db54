"""
Every metric: name, unit, labels, meaning, and the source of its value.

`METRICS` is the list; docs/metrics.md, the Grafana boards and the alert rules are checked against it. Metrics
have two sources. Code that handles an event (a batch, a poll, an error) records it with the functions
`observe_…` and `count_…`. Current state is read from the `Overview` at each scrape: `scrape` returns both,
for `web.api`. Labels are names of groups, tables and destinations, never cell values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from aqueduck.model.lifecycle import SyncState
from aqueduck.overview.values import (
    FlowOverview,
    GroupOverview,
    LakeOverview,
    Overview,
    TableOverview,
    VerifyOverview,
)

__all__ = [
    "METRICS",
    "MetricSpec",
    "count_destination_error",
    "count_error",
    "count_fold_task",
    "count_retry",
    "forget_destination",
    "observe_batch",
    "observe_destination",
    "observe_hold",
    "observe_maintenance",
    "observe_read",
    "observe_verify",
    "scrape",
]

Kind = Literal["counter", "gauge", "histogram", "summary"]

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_ROWS = (1.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6, 1e7)
_GROUP_STATES = ("starting", "streaming", "retrying", "errored", "disabled")
_DESTINATION_STATES = ("pending", "seeding", "live", "errored")


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric as it is scraped; a counter's name ends in `_total`."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    from_overview: bool = True
    buckets: tuple[float, ...] = _SECONDS


def _observed(
    name: str, kind: Kind, labels: tuple[str, ...], text: str, buckets: tuple[float, ...] = _SECONDS
) -> MetricSpec:
    return MetricSpec(name, kind, labels, text, from_overview=False, buckets=buckets)


_G, _T, _F, _D = ("group",), ("group", "table"), ("flow",), ("flow", "destination")

METRICS: tuple[MetricSpec, ...] = (
    # -- the service
    MetricSpec("aqueduck_build_info", "gauge", ("version",), "Always 1; the label is the version that runs."),
    MetricSpec("aqueduck_start_time_seconds", "gauge", (), "When the service started, in seconds since 1970."),
    MetricSpec("aqueduck_ready", "gauge", (), "1 while everything that has work moves, as /readyz says."),
    MetricSpec("aqueduck_process_memory_bytes", "gauge", ("process",), "Resident memory of the driver, the JVM and the workers."),
    MetricSpec("aqueduck_process_cpu_seconds_total", "counter", ("process",), "Processor time of the same."),
    MetricSpec("aqueduck_source_seen_timestamp_seconds", "gauge", ("flow",), "When a sync or events flow last read its source's catalog."),
    _observed("aqueduck_errors_total", "counter", ("code", "flow", "group"), "Errors by code; docs/errors.md explains each code."),
    _observed("aqueduck_retries_total", "counter", ("flow", "group"), "Retries after an error that may be temporary."),
    # -- capture
    MetricSpec("aqueduck_capture_received_bytes_total", "counter", _G, "Bytes received from the slot."),
    MetricSpec("aqueduck_capture_changes_total", "counter", _G, "Row changes decoded."),
    MetricSpec("aqueduck_capture_transactions_total", "counter", _G, "Source transactions decoded."),
    MetricSpec("aqueduck_capture_decode_seconds_total", "counter", _G, "Time spent decoding."),
    MetricSpec("aqueduck_capture_paused", "gauge", _G, "1 while a full stage pauses reading: backpressure."),
    MetricSpec("aqueduck_stage_bytes", "gauge", _G, "Bytes on disk between the source and the lake."),
    MetricSpec("aqueduck_unfinished_bytes", "gauge", _G, "Bytes staged of source transactions that have not ended."),
    MetricSpec("aqueduck_slot_retained_bytes", "gauge", _G, "WAL that the source keeps for the slot."),
    # -- batches
    MetricSpec("aqueduck_group_state", "gauge", ("group", "state"), "1 for the state that the group is in, 0 for the others."),
    MetricSpec("aqueduck_group_restarts_total", "counter", _G, "How often the group's query was started again after a failure."),
    MetricSpec("aqueduck_batches_total", "counter", _G, "Batches committed to the lake."),
    _observed("aqueduck_batch_seconds", "histogram", ("group", "phase"), "Time of a batch by phase: fold, commit; for events deliver."),
    _observed("aqueduck_commit_seconds", "histogram", _G, "Time of the lake transaction of a batch."),
    _observed("aqueduck_fold_tasks_total", "counter", ("group", "outcome"), "Fold tasks: files, or why the driver folds them."),
    _observed("aqueduck_batch_changes", "histogram", _G, "Row changes in a batch.", _ROWS),
    _observed("aqueduck_freshness_seconds", "histogram", _G, "Source commit to lake commit, of the last transaction of each batch."),
    MetricSpec("aqueduck_last_freshness_seconds", "gauge", _G, "The same, of the last batch only."),
    MetricSpec("aqueduck_lag_bytes", "gauge", _G, "WAL between what the capture has decoded and what the lake has."),
    MetricSpec("aqueduck_lag_seconds", "gauge", _G, "Age of the oldest change that is known and not yet in the lake."),
    MetricSpec("aqueduck_last_sync_timestamp_seconds", "gauge", _G, "When the last batch was committed, in seconds since 1970."),
    # -- tables
    MetricSpec("aqueduck_table_state", "gauge", ("group", "table", "state"), "1 for the state that the table is in, 0 for the others."),
    MetricSpec("aqueduck_table_changes_total", "counter", ("group", "table", "operation"), "Changes applied, by kind: insert to truncate."),
    MetricSpec("aqueduck_table_rows_synced_total", "counter", _T, "Rows copied and changes applied, including those before this start."),
    MetricSpec("aqueduck_table_lag_bytes", "gauge", _T, "How far the lake table is behind the changes that were read, in bytes of WAL."),
    MetricSpec("aqueduck_table_lag_seconds", "gauge", _T, "How far the lake table is behind the changes that were read, in seconds."),
    MetricSpec("aqueduck_table_queued_changes", "gauge", _T, "Changes that are read but not yet in the lake."),
    MetricSpec("aqueduck_table_failures", "gauge", _T, "Failures in a row."),
    MetricSpec("aqueduck_table_parked_rows", "gauge", _T, "Changes that wait in the lake until the table is ready."),
    MetricSpec("aqueduck_table_parked_bytes", "gauge", _T, "Size of those changes."),
    MetricSpec("aqueduck_copy_rows", "gauge", _T, "Rows that the last copy has read."),
    MetricSpec("aqueduck_copy_bytes", "gauge", _T, "Bytes of the source table that the last copy has read."),
    MetricSpec("aqueduck_copy_ratio", "gauge", _T, "Share of the copy that is done, from 0 to 1."),
    # -- events
    MetricSpec("aqueduck_events_delivered_total", "counter", _G, "Change events that the sink has taken."),
    MetricSpec("aqueduck_events_delivered_bytes_total", "counter", _G, "Size of those events, as they were handed to the sink."),
    # -- the lake
    MetricSpec("aqueduck_lake_snapshot_id", "gauge", (), "The newest lake snapshot."),
    MetricSpec("aqueduck_lake_snapshots", "gauge", (), "Lake snapshots that are kept."),
    MetricSpec("aqueduck_lake_files", "gauge", ("table", "kind"), "Files of a lake table: data or delete."),
    MetricSpec("aqueduck_lake_bytes", "gauge", ("table", "kind"), "Size of those files."),
    MetricSpec("aqueduck_lake_inlined_rows", "gauge", ("table",), "Rows that the catalog itself holds."),
    # -- maintenance
    _observed("aqueduck_maintenance_runs_total", "counter", ("flow", "outcome"), "Runs: complete, partial (out of time) or failed."),
    _observed("aqueduck_maintenance_seconds", "histogram", _F, "Time of a run of maintenance."),
    _observed("aqueduck_maintenance_hold_seconds", "histogram", _F, "How long commits had to wait for one step of maintenance."),
    _observed("aqueduck_maintenance_files_total", "counter", ("flow", "what"), "Files that were merged, rewritten, removed or orphaned."),
    _observed("aqueduck_maintenance_rows_flushed_total", "counter", _F, "Inlined rows that were moved into files."),
    _observed("aqueduck_maintenance_snapshots_expired_total", "counter", _F, "Lake snapshots that were forgotten."),
    # -- verification
    _observed("aqueduck_verify_looks_total", "counter", ("flow", "verdict"), "Comparisons: identical, different or not compared."),
    _observed("aqueduck_verify_seconds_total", "counter", _F, "Time that the service spent comparing."),
    MetricSpec("aqueduck_verify_interval_seconds", "gauge", _F, "How often the service compares everything; absent if it does not."),
    MetricSpec("aqueduck_verify_last_success_timestamp_seconds", "gauge", _T, "When the table was last found identical; 0 if never."),
    MetricSpec("aqueduck_verify_differences", "gauge", _T, "Rows that differ by the last verdict; absent before the first."),
    MetricSpec("aqueduck_destination_verify_last_success_timestamp_seconds", "gauge", _D, "When it was last found identical; 0 if never."),
    MetricSpec("aqueduck_destination_verify_differences", "gauge", _D, "Rows that differ by the last verdict; absent before the first."),
    # -- fan-out
    MetricSpec("aqueduck_fanout_polls_total", "counter", _F, "Looks at the source lake for new lake snapshots."),
    MetricSpec("aqueduck_fanout_cycles_total", "counter", _F, "Cycles that brought changes or a seed to destinations."),
    MetricSpec("aqueduck_fanout_reads_total", "counter", _F, "Reads of the source lake, each for all destinations of a cycle."),
    MetricSpec("aqueduck_fanout_read_rows_total", "counter", _F, "Changes read from the source lake."),
    _observed("aqueduck_fanout_read_seconds", "histogram", _F, "Time to read the changes of a cycle from the source lake."),
    _observed("aqueduck_fanout_batch_rows", "histogram", _F, "Changes in a cycle.", _ROWS),
    MetricSpec("aqueduck_fanout_source_snapshot", "gauge", _F, "The newest lake snapshot of the source."),
    MetricSpec("aqueduck_fanout_unrouted_rows_total", "counter", _F, "Rows whose value belongs to no destination."),
    MetricSpec("aqueduck_fanout_null_rows_total", "counter", _F, "Rows without a routing value."),
    MetricSpec("aqueduck_fanout_routing_moves_total", "counter", _F, "Updates that moved a row from one destination to another."),
    MetricSpec("aqueduck_fanout_conflicts_resolved_total", "counter", _F, "Changes that a later one of the same key and cycle overrode."),
    MetricSpec("aqueduck_fanout_orphaned_preimages_total", "counter", _F, "Keys to remove that the destination did not have."),
    MetricSpec("aqueduck_fanout_reseeds_total", "counter", _F, "Destinations that had to be seeded again."),
    MetricSpec("aqueduck_fanout_miscounts_total", "counter", _F, "Of those, destinations that had another number of rows than the source."),
    MetricSpec("aqueduck_fanout_seed_ratio", "gauge", _F, "Share of the running seed that is done, from 0 to 1."),
    MetricSpec("aqueduck_fanout_seed_rows", "gauge", _F, "Rows that the running seed has read, plus those it has written."),
    MetricSpec("aqueduck_fanout_pool_open", "gauge", _F, "Sessions with destinations that are open."),
    MetricSpec("aqueduck_fanout_pool_opened_total", "counter", _F, "Sessions with destinations that were opened."),
    MetricSpec("aqueduck_fanout_pool_evicted_total", "counter", _F, "Sessions that were closed to make room or after an error."),
    _observed("aqueduck_destination_write_seconds", "summary", _D, "Time of the transactions in a destination."),
    _observed("aqueduck_destination_errors_total", "counter", ("flow", "destination", "code"), "Errors of a destination by code."),
    MetricSpec("aqueduck_destination_state", "gauge", ("flow", "state"), "How many destinations are in each state."),
    MetricSpec("aqueduck_destination_rows_written_total", "counter", _D, "Rows written to a destination."),
    MetricSpec("aqueduck_destination_rows_upserted_total", "counter", _D, "Rows that replaced or added a key there."),
    MetricSpec("aqueduck_destination_rows_deleted_total", "counter", _D, "Rows deleted there."),
    MetricSpec("aqueduck_destination_rows_matched_total", "counter", _D, "Rows that were there already and were replaced."),
    MetricSpec("aqueduck_destination_snapshot", "gauge", _D, "The source's lake snapshot up to which it has everything."),
    MetricSpec("aqueduck_destination_lag_snapshots", "gauge", _D, "How many lake snapshots of the source it is behind."),
    MetricSpec("aqueduck_destination_lag_seconds", "gauge", _D, "How old the oldest of those is."),
)  # fmt: skip

_BY_NAME = {spec.name: spec for spec in METRICS}
_REGISTRY = CollectorRegistry()


def _make(spec: MetricSpec) -> Any:
    if spec.kind == "counter":
        return Counter(spec.name.removesuffix("_total"), spec.help, spec.labels, registry=_REGISTRY)
    if spec.kind == "summary":
        return Summary(spec.name, spec.help, spec.labels, registry=_REGISTRY)
    return Histogram(spec.name, spec.help, spec.labels, buckets=spec.buckets, registry=_REGISTRY)


_INSTRUMENTS: dict[str, Any] = {spec.name: _make(spec) for spec in METRICS if not spec.from_overview}


# -- Recorded where it happens


def observe_batch(
    group: str,
    *,
    phase_seconds: Mapping[str, float],
    commit_seconds: float,
    changes: int,
    freshness_seconds: float | None,
) -> None:
    """One batch of a group was committed to the lake."""
    for phase, seconds in phase_seconds.items():
        _INSTRUMENTS["aqueduck_batch_seconds"].labels(group, phase).observe(seconds)
    _INSTRUMENTS["aqueduck_commit_seconds"].labels(group).observe(commit_seconds)
    _INSTRUMENTS["aqueduck_batch_changes"].labels(group).observe(changes)
    if freshness_seconds is not None:
        _INSTRUMENTS["aqueduck_freshness_seconds"].labels(group).observe(freshness_seconds)


def count_fold_task(group: str, outcome: str) -> None:
    """One fold task of a batch is in the lake: its files were used, or the driver folded it for this reason."""
    _INSTRUMENTS["aqueduck_fold_tasks_total"].labels(group, outcome).inc()


def count_error(code: str, *, flow: str, group: str = "") -> None:
    """An error occurred; `count_retry` counts the retry that may follow."""
    _INSTRUMENTS["aqueduck_errors_total"].labels(code, flow, group).inc()


def count_retry(*, flow: str, group: str = "") -> None:
    """A failed operation is being retried."""
    _INSTRUMENTS["aqueduck_retries_total"].labels(flow, group).inc()


def observe_read(flow: str, *, rows: int, seconds: float) -> None:
    """A fan-out read its source, once for all destinations of a cycle."""
    _INSTRUMENTS["aqueduck_fanout_read_seconds"].labels(flow).observe(seconds)
    _INSTRUMENTS["aqueduck_fanout_batch_rows"].labels(flow).observe(rows)


def observe_destination(flow: str, destination: str, *, write_seconds: float) -> None:
    """One transaction was committed in a destination."""
    _INSTRUMENTS["aqueduck_destination_write_seconds"].labels(flow, destination).observe(write_seconds)


def count_destination_error(flow: str, destination: str, code: str) -> None:
    """A destination failed."""
    _INSTRUMENTS["aqueduck_destination_errors_total"].labels(flow, destination, code).inc()


def forget_destination(flow: str, destination: str) -> None:
    """A destination is no longer served: its series end."""
    for name in ("aqueduck_destination_write_seconds", "aqueduck_destination_errors_total"):
        _INSTRUMENTS[name].remove_by_labels({"flow": flow, "destination": destination})


def observe_maintenance(
    flow: str,
    *,
    seconds: float,
    outcome: str,
    files: Mapping[str, int],
    rows_flushed: int,
    snapshots_expired: int,
) -> None:
    """One maintenance run ended."""
    _INSTRUMENTS["aqueduck_maintenance_runs_total"].labels(flow, outcome).inc()
    _INSTRUMENTS["aqueduck_maintenance_seconds"].labels(flow).observe(seconds)
    for what, count in files.items():
        _INSTRUMENTS["aqueduck_maintenance_files_total"].labels(flow, what).inc(count)
    _INSTRUMENTS["aqueduck_maintenance_rows_flushed_total"].labels(flow).inc(rows_flushed)
    _INSTRUMENTS["aqueduck_maintenance_snapshots_expired_total"].labels(flow).inc(max(0, snapshots_expired))


def observe_verify(flow: str, *, seconds: float, verdicts: Sequence[str]) -> None:
    """The service compared some tables or destinations."""
    _INSTRUMENTS["aqueduck_verify_seconds_total"].labels(flow).inc(seconds)
    for verdict in verdicts:
        _INSTRUMENTS["aqueduck_verify_looks_total"].labels(flow, verdict).inc()


def observe_hold(flow: str, seconds: float) -> None:
    """One maintenance step delayed commits."""
    _INSTRUMENTS["aqueduck_maintenance_hold_seconds"].labels(flow).observe(seconds)


# -- Read from the overview at each scrape


def scrape(overview: Overview, *, ready: bool, accept: str = "") -> tuple[bytes, str]:
    """All metrics in the format that `accept` requests, and the content type."""
    encode, content_type = choose_encoder(accept)
    return encode(_Both(overview, ready)), content_type


@dataclass(frozen=True, slots=True)
class _Both:
    """Combines recorded metrics and current state behind the interface of a registry."""

    overview: Overview
    ready: bool

    def collect(self) -> Iterator[Metric]:
        yield from _REGISTRY.collect()
        found: dict[str, Metric] = {}
        for name, labels, value in _samples(self.overview, self.ready):
            if value is not None:
                family = found.get(name) or found.setdefault(name, _family(_BY_NAME[name]))
                family.add_metric(labels, float(value))  # type: ignore[attr-defined]
        yield from found.values()


def _family(spec: MetricSpec) -> Metric:
    make = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    return make(spec.name.removesuffix("_total"), spec.help, labels=spec.labels)


Sample = tuple[str, tuple[str, ...], float | int | None]


def _samples(overview: Overview, ready: bool) -> Iterator[Sample]:
    yield "aqueduck_build_info", (overview.version,), 1
    yield "aqueduck_start_time_seconds", (), overview.started_at.timestamp()
    yield "aqueduck_ready", (), int(ready)
    for process in overview.processes:
        yield "aqueduck_process_memory_bytes", (process.name,), process.memory_bytes
        yield "aqueduck_process_cpu_seconds_total", (process.name,), process.cpu_seconds
    for flow in overview.flows:
        if flow.verification is not None:
            yield "aqueduck_verify_interval_seconds", (flow.name,), flow.verification.interval_seconds
        if flow.seen_at is not None:
            yield "aqueduck_source_seen_timestamp_seconds", (flow.name,), flow.seen_at.timestamp()
        for group in flow.groups:
            yield from _of_group(group)
            if flow.verification is not None:
                for table in group.tables:
                    yield from _of_verified("aqueduck_verify", (table.group, table.source), table.verified)
        if flow.kind == "fanout":
            yield from _of_fanout(flow)
    if overview.lake is not None:
        yield from _of_lake(overview.lake)


def _of_group(group: GroupOverview) -> Iterator[Sample]:
    g = (group.name,)
    yield "aqueduck_capture_received_bytes_total", g, group.received_bytes
    yield "aqueduck_capture_changes_total", g, group.changes
    yield "aqueduck_capture_transactions_total", g, group.transactions
    yield "aqueduck_capture_decode_seconds_total", g, group.decode_seconds
    yield "aqueduck_capture_paused", g, int(group.paused)
    yield "aqueduck_stage_bytes", g, group.staged_bytes
    yield "aqueduck_unfinished_bytes", g, group.unfinished_bytes
    yield "aqueduck_slot_retained_bytes", g, group.retained_bytes
    for state in _GROUP_STATES:
        yield "aqueduck_group_state", (group.name, state), int(group.state == state)
    yield "aqueduck_group_restarts_total", g, group.restarts
    yield "aqueduck_batches_total", g, group.batches
    yield "aqueduck_last_freshness_seconds", g, group.freshness_seconds
    yield "aqueduck_lag_bytes", g, group.lag_bytes
    yield "aqueduck_lag_seconds", g, group.lag_seconds
    last = group.last_sync_at
    yield "aqueduck_last_sync_timestamp_seconds", g, None if last is None else last.timestamp()
    if group.delivery is not None:
        yield "aqueduck_events_delivered_total", g, group.delivery.events
        yield "aqueduck_events_delivered_bytes_total", g, group.delivery.bytes
    for table in group.tables:
        yield from _of_table(table)


def _of_table(table: TableOverview) -> Iterator[Sample]:
    t = (table.group, table.source)
    for state in SyncState:
        yield "aqueduck_table_state", (*t, state.value), int(table.state is state)
    for operation in ("insert", "update", "delete", "truncate"):
        yield "aqueduck_table_changes_total", (*t, operation), getattr(table, f"{operation}s")
    yield "aqueduck_table_rows_synced_total", t, table.rows_synced
    yield "aqueduck_table_lag_bytes", t, table.lag_bytes
    yield "aqueduck_table_lag_seconds", t, table.lag_seconds
    yield "aqueduck_table_queued_changes", t, table.queued_changes
    yield "aqueduck_table_failures", t, table.failures
    yield "aqueduck_table_parked_rows", t, table.parked_rows
    yield "aqueduck_table_parked_bytes", t, table.parked_bytes
    if table.copy is not None:
        yield "aqueduck_copy_rows", t, table.copy.rows
        yield "aqueduck_copy_bytes", t, table.copy.bytes
        yield "aqueduck_copy_ratio", t, table.copy.share


def _of_fanout(flow: FlowOverview) -> Iterator[Sample]:
    name = (flow.name,)
    yield "aqueduck_fanout_source_snapshot", name, flow.source_snapshot
    counts = flow.counts
    yield "aqueduck_fanout_polls_total", name, counts.polls
    yield "aqueduck_fanout_cycles_total", name, counts.cycles
    yield "aqueduck_fanout_reads_total", name, counts.reads
    yield "aqueduck_fanout_read_rows_total", name, counts.rows_read
    yield "aqueduck_fanout_unrouted_rows_total", name, counts.unrouted_rows
    yield "aqueduck_fanout_null_rows_total", name, counts.null_rows
    yield "aqueduck_fanout_routing_moves_total", name, counts.routing_moves
    yield "aqueduck_fanout_conflicts_resolved_total", name, counts.conflicts
    yield "aqueduck_fanout_orphaned_preimages_total", name, counts.orphaned_preimages
    yield "aqueduck_fanout_reseeds_total", name, counts.reseeds
    yield "aqueduck_fanout_miscounts_total", name, counts.miscounts
    if flow.seed is not None:
        yield "aqueduck_fanout_seed_rows", name, flow.seed.rows
        yield "aqueduck_fanout_seed_ratio", name, flow.seed.share
    if flow.pool is not None:
        yield "aqueduck_fanout_pool_open", (flow.name,), flow.pool.open
        yield "aqueduck_fanout_pool_opened_total", (flow.name,), flow.pool.created
        yield "aqueduck_fanout_pool_evicted_total", (flow.name,), flow.pool.evicted
    for state in _DESTINATION_STATES:
        count = sum(d.state == state for d in flow.destinations)
        yield "aqueduck_destination_state", (flow.name, state), count
    for d in flow.destinations:
        labels = (flow.name, d.name)
        for what in ("written", "upserted", "deleted", "matched"):
            yield f"aqueduck_destination_rows_{what}_total", labels, getattr(d, f"rows_{what}")
        yield "aqueduck_destination_snapshot", labels, d.position
        yield "aqueduck_destination_lag_snapshots", labels, d.lag_snapshots
        yield "aqueduck_destination_lag_seconds", labels, d.lag_seconds
        if flow.verification is not None:
            yield from _of_verified("aqueduck_destination_verify", labels, d.verified)


def _of_verified(name: str, labels: tuple[str, ...], verified: VerifyOverview) -> Iterator[Sample]:
    last = verified.identical_at
    yield f"{name}_last_success_timestamp_seconds", labels, 0 if last is None else last.timestamp()
    yield f"{name}_differences", labels, None if verified.verdict == "never" else verified.differences


def _of_lake(lake: LakeOverview) -> Iterator[Sample]:
    yield "aqueduck_lake_snapshot_id", (), lake.snapshot_id
    yield "aqueduck_lake_snapshots", (), lake.snapshots
    for table in lake.tables:
        yield "aqueduck_lake_files", (table.name, "data"), table.files
        yield "aqueduck_lake_files", (table.name, "delete"), table.delete_files
        yield "aqueduck_lake_bytes", (table.name, "data"), table.bytes
        yield "aqueduck_lake_bytes", (table.name, "delete"), table.delete_bytes
        yield "aqueduck_lake_inlined_rows", (table.name,), table.inlined_rows
