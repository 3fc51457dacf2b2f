"""The metrics and spans of a process."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module

from batchwright_service.errors import ConfigurationError
from batchwright_service.observability.metrics import Metrics
from batchwright_service.observability.tracing import Spans

_ENABLING_VARIABLES = ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""Variables of OpenTelemetry that enable spans; the others configure them."""


@dataclass(frozen=True)
class Instruments:
    """The metrics and spans that are passed to the observed parts. The defaults are not exported."""

    metrics: Metrics = field(default_factory=Metrics)
    spans: Spans = field(default_factory=Spans)


def create_spans(version: str, environment: Mapping[str, str] = os.environ) -> Spans:
    """Create spans as the standard variables of OpenTelemetry configure them, or no-op spans without the variables.

    Raises:
        ConfigurationError: when the variables name an unknown exporter, or the extra ``otel`` is not installed.
    """
    exporter = environment.get("OTEL_TRACES_EXPORTER")
    enabled = exporter != "none" and any(environment.get(name) for name in _ENABLING_VARIABLES)
    if not enabled or environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return Spans()
    try:
        telemetry = import_module("batchwright_service.observability.opentelemetry")
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"OTEL_ variables enable spans, but `{error.name}` is not installed: pip install 'batchwright[otel]', or "
            "set OTEL_SDK_DISABLED=true"
        ) from None
    spans: Spans = telemetry.RecordedSpans(telemetry.exporter_of(environment), version)
    return spans
