"""Every metric that is listed can be scraped, and nothing is scraped that is not listed (P-F17)."""

from __future__ import annotations

import re
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from aqueduck.overview import metrics
from aqueduck.overview.metrics import METRICS
from tests.web.made_up import FULL, destination, fanout, group, overview, sync, table

P_F17 = (
    "fanout_polls_total", "fanout_read_seconds", "fanout_read_rows_total", "fanout_batch_rows",
    "fanout_source_snapshot", "destination_write_seconds", "destination_rows_written_total",
    "destination_rows_deleted_total", "destination_rows_upserted_total", "destination_rows_matched_total",
    "destination_snapshot", "destination_lag_snapshots", "fanout_unrouted_rows_total", "fanout_pool_open",
    "fanout_pool_opened_total", "fanout_pool_evicted_total", "fanout_routing_moves_total",
    "fanout_conflicts_resolved_total", "fanout_orphaned_preimages_total", "destination_errors_total",
)  # fmt: skip


def observe_everything() -> None:
    metrics.observe_batch(
        "shop", phase_seconds={"fold": 0.2}, commit_seconds=0.1, changes=7, freshness_seconds=0.4
    )
    metrics.count_error("lake.value", flow="sync", group="shop")
    metrics.count_retry(flow="sync", group="shop")
    metrics.observe_read("tenants", rows=10, seconds=0.3)
    metrics.observe_destination("tenants", "acme", write_seconds=0.1)
    metrics.count_destination_error("tenants", "acme", "lake.write")


def scraped(view: Any = FULL, *, ready: bool = True) -> dict[str, Any]:
    text, _ = metrics.scrape(view, ready=ready)
    return {family.name: family for family in parse(text.decode())}


def value(name: str, view: Any = FULL, **labels: str) -> float | None:
    for family in scraped(view).values():
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return float(sample.value)
    return None


def test_what_is_scraped_is_what_is_listed() -> None:
    """Name, kind, labels and help of every family are those of the list, and the list is whole."""
    observe_everything()
    found = scraped()
    made = {name for name in found if not name.endswith("_created")}
    assert made == {spec.name.removesuffix("_total") for spec in METRICS}
    for spec in METRICS:
        family = found[spec.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (spec.kind, spec.help), spec.name
        for sample in family.samples:
            assert set(sample.labels) - {"le", "quantile"} == set(spec.labels), spec.name


def test_names_say_their_unit() -> None:
    """Prometheus' rules: base units, `_total` for counters and for nothing else."""
    for spec in METRICS:
        assert re.fullmatch(r"aqueduck_[a-z_]+", spec.name)
        assert spec.name.endswith("_total") == (spec.kind == "counter"), spec.name
        assert spec.help.endswith("."), spec.name
        assert not re.search(r"_(ms|kb|mb|minutes)(_|$)", spec.name)
    assert len({spec.name for spec in METRICS}) == len(METRICS)


@pytest.mark.parametrize("name", P_F17)
def test_the_promised_metrics_of_a_fan_out_are_there(name: str) -> None:
    """P-F17: each thing that was promised has its metric."""
    assert f"aqueduck_{name}" in {spec.name for spec in METRICS}


def test_gauges_are_what_the_overview_says() -> None:
    """States are one-hot, copies and parked rows are those of their table."""
    assert value("aqueduck_table_state", group="shop", table="public.items", state="SNAPSHOT") == 1
    assert value("aqueduck_table_state", group="shop", table="public.items", state="STREAMING") == 0
    assert value("aqueduck_copy_ratio", group="shop", table="public.items") == 0.41
    assert value("aqueduck_table_parked_rows", group="shop", table="public.prices") == 52
    assert value("aqueduck_lag_bytes", group="shop") == 2048
    assert (
        value("aqueduck_table_changes_total", group="shop", table="public.orders", operation="update") == 20
    )
    assert value("aqueduck_destination_state", flow="tenants", state="errored") == 1
    assert value("aqueduck_lake_files", table="main.orders", kind="delete") == 3
    assert value("aqueduck_process_memory_bytes", process="driver") == 300 << 20


def test_what_is_not_known_is_left_out() -> None:
    """No value is better than a wrong one: a slot that was not looked at retains nothing we know of."""
    assert value("aqueduck_slot_retained_bytes", overview(sync(group())), group="shop") is None
    known = overview(sync(group(retained_bytes=5)))
    assert value("aqueduck_slot_retained_bytes", known, group="shop") == 5


def test_observations_add_up() -> None:
    """Two reports are counted as two, under their own labels."""
    for _ in range(2):
        metrics.count_error("pg.unreachable", flow="sync", group="twice")
        metrics.observe_batch(
            "twice", phase_seconds={"plan": 1.0}, commit_seconds=0.5, changes=3, freshness_seconds=None
        )
    assert value("aqueduck_errors_total", code="pg.unreachable", flow="sync", group="twice") == 2
    assert value("aqueduck_batch_seconds_sum", group="twice", phase="plan") == 2
    assert value("aqueduck_batch_changes_count", group="twice") == 2
    assert value("aqueduck_freshness_seconds_count", group="twice") is None


def test_a_scraper_may_ask_for_openmetrics() -> None:
    """Both formats that Prometheus reads are spoken, and odd names survive."""
    odd = table('public."we""ird\\n"', group="shop")
    text, kind = metrics.scrape(
        overview(sync(group(odd))), ready=False, accept="application/openmetrics-text; version=1.0.0"
    )
    assert kind.startswith("application/openmetrics-text")
    families = parse_openmetrics(text.decode())  # type: ignore[no-untyped-call]
    labels = {s.labels.get("table") for f in families for s in f.samples}
    assert odd.source in labels


def test_two_thousand_destinations_are_scraped_quickly() -> None:
    """A scrape of a large fan-out stays far below Prometheus' time-out of ten seconds."""
    many = overview(fanout(*(destination(f"tenant-{i}") for i in range(2000))))
    text, _ = metrics.scrape(many, ready=True)
    assert text.count(b"aqueduck_destination_lag_snapshots{") == 2000
