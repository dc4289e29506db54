"""
OpenTelemetry traces of batches, sent to an OTLP endpoint over HTTP; without an endpoint nothing is imported
or done.

A batch is a trace of its own: `batch` from the source's commit to the lake's, and below it `capture` (read,
decoded, staged, planned), `fold` (the Spark job) and `commit` (the lake transaction). The times are those of
the metrics. Spans are made after the batch is committed and sent by a thread of the SDK, so that a slow or
missing collector does not delay batches. Attributes are names and numbers, never cell values.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aqueduck import __version__
from aqueduck.config.sync import TracingConfig
from aqueduck.model.errors import ConfigError

__all__ = ["BatchTimes", "Traces", "check_traces", "open_traces"]

_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTimes:
    """One batch that was committed to the lake."""

    group: str
    ended: float
    """The end of the lake's commit, in seconds since the Unix epoch."""
    fold_seconds: float
    commit_seconds: float
    source_commit: float | None
    """The source's commit time of the batch's last transaction, by the source's clock."""
    lsn_from: str
    lsn_to: str
    changes: int
    tables: int


class Traces:
    """Makes and sends spans; `close` sends the remaining ones."""

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("aqueduck", __version__)

    def batch(self, times: BatchTimes) -> None:
        from opentelemetry import trace

        commit_began = times.ended - times.commit_seconds
        fold_began = commit_began - times.fold_seconds
        captured = fold_began if times.source_commit is None else min(times.source_commit, fold_began)
        root = self._tracer.start_span(
            "batch",
            start_time=_ns(captured),
            attributes={
                "aqueduck.group": times.group,
                "aqueduck.lsn.from": times.lsn_from,
                "aqueduck.lsn.to": times.lsn_to,
                "aqueduck.changes": times.changes,
                "aqueduck.tables": times.tables,
            },
        )
        within = trace.set_span_in_context(root)
        for name, began, ended in (
            ("capture", captured, fold_began),
            ("fold", fold_began, commit_began),
            ("commit", commit_began, times.ended),
        ):
            self._tracer.start_span(name, context=within, start_time=_ns(began)).end(end_time=_ns(ended))
        root.end(end_time=_ns(times.ended))

    def close(self) -> None:
        self._provider.shutdown()


def open_traces(config: TracingConfig, env: Mapping[str, str] = os.environ) -> Traces | None:
    """
    Traces to the endpoint from the file or from OpenTelemetry's own variables; None without an endpoint.

    Headers, certificates and limits are set by the variables of the OTLP exporter.
    """
    endpoint = config.otlp_endpoint
    if endpoint is None and not any(env.get(name) for name in _VARIABLES):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as exc:
        raise ConfigError(
            "an OTLP endpoint is set, but OpenTelemetry is not installed",
            hint="pip install 'aqueduck[otel]', or unset tracing.otlp_endpoint",
        ) from exc
    exporter = (
        OTLPSpanExporter()
        if endpoint is None
        else OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
    )
    resource = Resource.create({"service.name": config.service_name, "service.version": __version__})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Traces(provider)


def check_traces(config: TracingConfig, env: Mapping[str, str] = os.environ) -> str:
    """Whether traces can be made as the configuration says; nothing is sent."""
    traces = open_traces(config, env)
    if traces is None:
        return "no endpoint is set"
    traces.close()
    return "batches are traced"


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
