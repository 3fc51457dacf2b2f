"""Observe the service by logs, metrics and spans.

- ``logging`` writes text lines, or one JSON object per line, with the ids of request, work and trace.
- ``metrics`` defines every Prometheus metric of a process. The API serves them at `/metrics`, and workers on a separate
  port. ``collectors`` has those that are read from the store, or from a disk, at each scrape.
- ``tracing`` holds the current trace (W3C Trace Context) and no-op spans. ``opentelemetry`` records spans, and is
  imported only if the `OTEL_` variables enable it.
- ``instruments`` bundles the metrics and spans that are passed to other parts.

The pipeline: ``batchwright_service.bootstrap`` builds the instruments;
``batchwright_service.api.middleware.observability`` and the workers call them;
``batchwright_service.api.routes.health`` exposes them.

Where a new thing goes: a metric, ``metrics``, or ``collectors`` if it is read (base units in the name, never an
identifier as a label); a field of log lines, ``logging``; a span, where the work is done, through ``instruments``.

The package may import ``batchwright_service.store.models`` (for the queue and the devices),
``batchwright_service.errors`` and ``batchwright_service.domain``; not ``auth``, which is on the same level.
"""
