"""Spans recorded by OpenTelemetry. Imported only if its standard variables enable spans; needs the extra ``otel``."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from typing_extensions import override

from batchwright_service.errors import ConfigurationError
from batchwright_service.observability.tracing import (
    Attribute,
    Span,
    SpanKind,
    Spans,
    current_trace_parent,
    within_trace,
)

_KINDS = {
    SpanKind.SERVER: trace.SpanKind.SERVER,
    SpanKind.CONSUMER: trace.SpanKind.CONSUMER,
    SpanKind.INTERNAL: trace.SpanKind.INTERNAL,
}
_PROPAGATOR = TraceContextTextMapPropagator()


class RecordedSpan(Span):
    """A span that OpenTelemetry records."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @override
    def rename(self, name: str) -> None:
        self._span.update_name(name)

    @override
    def set(self, name: str, value: Attribute) -> None:
        self._span.set_attribute(f"batchwright.{name}", value)


class RecordedSpans(Spans):
    """Record spans, and pass them to an exporter from a background thread."""

    recording = True

    def __init__(self, exporter: SpanExporter, version: str) -> None:
        self._closed = False
        named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "batchwright"}
        self._provider = TracerProvider(resource=Resource.create({**named, "service.version": version}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("batchwright", version)

    @contextmanager
    @override
    def span(
        self, name: str, kind: SpanKind = SpanKind.INTERNAL, parent: str | None = None, **attributes: Attribute
    ) -> Iterator[Span]:
        """Record the block as a span, with the error that ended it."""
        followed = parent or current_trace_parent()
        context = _PROPAGATOR.extract({} if followed is None else {"traceparent": followed})
        given = {f"batchwright.{key}": value for key, value in attributes.items()}
        with self._tracer.start_as_current_span(name, context, _KINDS[kind], given) as span:
            carrier: dict[str, str] = {}
            _PROPAGATOR.inject(carrier)
            with within_trace(carrier.get("traceparent")):
                yield RecordedSpan(span)

    @override
    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._provider.shutdown()


def exporter_of(environment: Mapping[str, str]) -> SpanExporter:
    """Return the exporter that OTEL_TRACES_EXPORTER names. The exporter reads its own variables.

    Raises:
        ConfigurationError: when the extra ``otel`` has no such exporter.
    """
    name = environment.get("OTEL_TRACES_EXPORTER", "otlp")
    if name == "otlp":
        return OTLPSpanExporter()
    if name == "console":
        return ConsoleSpanExporter()
    raise ConfigurationError(f"OTEL_TRACES_EXPORTER is {name!r}; use otlp, console or none")
