"""What a process is watched with: its metrics, and its spans."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module

from service.errors import ConfigurationError
from service.observability.metrics import Metrics
from service.observability.tracing import Spans

_ASKING = ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""Variables of OpenTelemetry's that ask for spans; all others only say how."""


@dataclass(frozen=True)
class Instruments:
    """Handed to whatever is worth watching. By default nobody reads them."""

    metrics: Metrics = field(default_factory=Metrics)
    spans: Spans = field(default_factory=Spans)


def open_spans(version: str, environment: Mapping[str, str] = os.environ) -> Spans:
    """Spans that go where the standard variables of OpenTelemetry say; ones that go nowhere without them.

    Raises:
        ConfigurationError: when they ask for what the extra ``otel`` does not bring, or it is not installed.
    """
    asked = any(environment.get(name) for name in _ASKING) and environment.get("OTEL_TRACES_EXPORTER") != "none"
    if not asked or environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return Spans()
    try:
        telemetry = import_module("service.observability.opentelemetry")
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"OTEL_ variables ask for spans, and `{error.name}` is not installed: pip install 'batchwright[otel]', or "
            "set OTEL_SDK_DISABLED=true"
        ) from None
    spans: Spans = telemetry.RecordedSpans(telemetry.exporter_of(environment), version)
    return spans
