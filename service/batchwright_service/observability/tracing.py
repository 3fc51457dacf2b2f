"""The current trace (W3C Trace Context), and the interface of spans.

The ``traceparent`` header of a request is stored with the work that the request creates, added to log lines, and passed
to the processes of probes and jobs in the environment variable TRACEPARENT. Spans are recorded only with the extra
``otel`` and the ``OTEL_`` variables (see ``batchwright_service.observability.opentelemetry``). Otherwise OpenTelemetry
is not imported.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum

from batchwright.system.processes import propagate_environment

ENVIRONMENT_VARIABLE = "TRACEPARENT"
"""The environment variable with the trace of a process, as OpenTelemetry's environment carrier names it."""

_TRACE_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_TRACE_ID = slice(3, 35)

_current: ContextVar[str | None] = ContextVar("trace_parent", default=None)

Attribute = str | int | float | bool


def parse_trace_parent(text: str | None) -> str | None:
    """Return the value of a ``traceparent`` header if it is valid, else None, as the standard requires."""
    return text if text is not None and _TRACE_PARENT.fullmatch(text) else None


def current_trace_parent() -> str | None:
    """Return the ``traceparent`` for children of the current work, or None outside of a trace."""
    return _current.get()


def current_trace_id() -> str | None:
    """Return the trace id of the current work, or None outside of a trace."""
    parent = _current.get()
    return None if parent is None else parent[_TRACE_ID]


@contextmanager
def within_trace(parent: str | None) -> Iterator[None]:
    """Make the block, and the processes that it starts, part of a trace."""
    token = _current.set(parent)
    try:
        with propagate_environment({} if parent is None else {ENVIRONMENT_VARIABLE: parent}):
            yield
    finally:
        _current.reset(token)


class SpanKind(Enum):
    """The role of a span, after OpenTelemetry."""

    SERVER = "server"
    """The handling of a request."""
    CONSUMER = "consumer"
    """The processing of work from the queue."""
    INTERNAL = "internal"
    """A part of the enclosing span."""


class Span:
    """No-op span, used when OpenTelemetry is not configured."""

    def rename(self, name: str) -> None:
        """Rename the span."""

    def set(self, name: str, value: Attribute) -> None:
        """Set an attribute of the span."""


class Spans:
    """Factory of no-op spans, which only propagate the trace of their caller."""

    recording: bool = False
    """Whether the spans are recorded."""

    @contextmanager
    def span(
        self, name: str, kind: SpanKind = SpanKind.INTERNAL, parent: str | None = None, **attributes: Attribute
    ) -> Iterator[Span]:
        """Make the block a span, which is the parent of traces in the block.

        Args:
            name: name of the operation, without identifiers.
            kind: role of the span.
            parent: ``traceparent`` of the parent; that of the enclosing block when omitted.
            attributes: attributes of the span.
        """
        del name, kind, attributes
        with within_trace(parent or _current.get()):
            yield Span()

    def close(self) -> None:
        """Flush the spans that were not exported."""
