"""Observe the service: logs, metrics and spans.

- ``logging`` writes lines for people, or one JSON object per line, with the ids of request, work and trace.
- ``metrics`` has every Prometheus metric of a process; the API serves them at `/metrics`, workers on a port of their
  own.
- ``tracing`` knows the present trace (W3C Trace Context) and has spans that do nothing; ``opentelemetry`` records
  spans, and is imported only if the `OTEL_` variables ask for that.
- ``instruments`` bundles metrics and spans for whatever is handed them.

The pipeline: ``service.bootstrap`` builds the instruments; ``service.api.middleware.observability`` and the workers
call them; ``service.api.routes.health`` exposes them.

Where a new thing goes: a metric, ``metrics`` (base units in the name, never an identifier as a label); a field of log
lines, ``logging``; a span, where the work is, through ``instruments``.

The package may import ``service.store.interface`` (for the depth of the queue), ``service.errors`` and
``service.domain``; not ``auth``, which stands beside it.
"""
