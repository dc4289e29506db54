"""Traces of batches, as an OTLP receiver gets them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from aqueduck.config.sync import TracingConfig
from aqueduck.model.errors import ConfigError
from aqueduck.service.tracing import BatchTimes, open_traces

TIMES = BatchTimes(
    group="shop", ended=1000.0, fold_seconds=0.25, commit_seconds=0.5, source_commit=998.0,
    lsn_from="0/10", lsn_to="0/20", changes=7, tables=2,
)  # fmt: skip


def test_a_batch_is_a_trace_of_capture_fold_and_commit() -> None:
    """The spans cover the time from the source's commit to the lake's, one after the other."""
    pytest.importorskip("opentelemetry.sdk")
    from tests.otlp_receiver import otlp_receiver

    with otlp_receiver() as received:
        traces = open_traces(TracingConfig(otlp_endpoint=received.endpoint), env={})
        assert traces is not None
        traces.batch(TIMES)
        traces.close()
    assert received.paths == {"/v1/traces"}
    spans = {span.name: span for span in received.spans()}
    root = spans.pop("batch")
    assert root.parent_span_id == b""
    assert {(s.trace_id, s.parent_span_id) for s in spans.values()} == {(root.trace_id, root.span_id)}
    times = {name: (s.start_time_unix_nano / 1e9, s.end_time_unix_nano / 1e9) for name, s in spans.items()}
    assert times == {"capture": (998.0, 999.25), "fold": (999.25, 999.5), "commit": (999.5, 1000.0)}
    values = {a.key: a.value.string_value or a.value.int_value for a in root.attributes}
    assert values["aqueduck.group"] == "shop"
    assert (values["aqueduck.lsn.to"], values["aqueduck.changes"], values["aqueduck.tables"]) == (
        "0/20",
        7,
        2,
    )
    [resource] = {r.resource.attributes[i].value.string_value for r in received.requests[0].resource_spans
                  for i in range(len(r.resource.attributes)) if r.resource.attributes[i].key == "service.name"}  # fmt: skip
    assert resource == "aqueduck"


def test_a_clock_that_is_ahead_makes_no_span_that_ends_before_it_begins() -> None:
    """The source's clock may differ from ours."""
    pytest.importorskip("opentelemetry.sdk")
    from dataclasses import replace

    from tests.otlp_receiver import otlp_receiver

    with otlp_receiver() as received:
        traces = open_traces(TracingConfig(), env={"OTEL_EXPORTER_OTLP_ENDPOINT": received.endpoint})
        assert traces is not None
        traces.close()
        traces = open_traces(TracingConfig(otlp_endpoint=received.endpoint), env={})
        assert traces is not None
        traces.batch(replace(TIMES, source_commit=2000.0))
        traces.close()
    assert all(s.start_time_unix_nano <= s.end_time_unix_nano for s in received.spans())


def test_without_an_endpoint_nothing_is_imported() -> None:
    """Traces cost nothing when they are off."""
    assert open_traces(TracingConfig(), env={}) is None
    code = (
        "import sys, aqueduck.sync.service; print([m for m in sys.modules if m.startswith('opentelemetry')])"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def test_an_endpoint_without_the_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"aqueduck\[otel\]"):
        open_traces(TracingConfig(otlp_endpoint="http://127.0.0.1:4318"), env={})
