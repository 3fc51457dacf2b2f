"""Which trace the present work belongs to (W3C Trace Context), and spans where OpenTelemetry is set up.

A ``traceparent`` that a request brings is kept with the work it creates, told to the log, and handed on to the
processes of its probes and jobs as the environment variable TRACEPARENT. Spans are made only with the extra ``otel``
and its ``OTEL_`` variables (see ``service.observability.opentelemetry``); without them nothing of
OpenTelemetry is imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum

from tuner.system.processes import propagate_environment

ENVIRONMENT_VARIABLE = "TRACEPARENT"
"""Where processes look for the trace they belong to, as OpenTelemetry's environment carrier names it."""

_TRACE_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_TRACE_ID = slice(3, 35)

_current: ContextVar[str | None] = ContextVar("trace_parent", default=None)

Attribute = str | int | float | bool


def parse_trace_parent(text: str | None) -> str | None:
    """A ``traceparent`` header's value, if it is one; none otherwise, as the standard asks."""
    return text if text is not None and _TRACE_PARENT.fullmatch(text) else None


def current_trace_parent() -> str | None:
    """What the present work's children should name as their parent; none outside of any trace."""
    return _current.get()


def current_trace_id() -> str | None:
    """The trace that the present work belongs to."""
    parent = _current.get()
    return None if parent is None else parent[_TRACE_ID]


@contextmanager
def within_trace(parent: str | None) -> Iterator[None]:
    """Have the block, and the processes it starts, belong to a trace."""
    token = _current.set(parent)
    try:
        with propagate_environment({} if parent is None else {ENVIRONMENT_VARIABLE: parent}):
            yield
    finally:
        _current.reset(token)


class SpanKind(Enum):
    """Whom a span serves."""

    SERVER = "server"
    """It answers a request."""
    CONSUMER = "consumer"
    """It takes work from the queue."""
    INTERNAL = "internal"
    """It is a part of the span around it."""


class Span:
    """A stretch of work that others can follow. This one tells nobody."""

    def rename(self, name: str) -> None:
        """Name it by what is only known later."""

    def set(self, name: str, value: Attribute) -> None:
        """Add what is only known later."""


class Spans:
    """Makes spans. These only keep the trace that the caller named."""

    recording: bool = False
    """Whether anybody reads them."""

    @contextmanager
    def span(
        self, name: str, kind: SpanKind = SpanKind.INTERNAL, parent: str | None = None, **attributes: Attribute
    ) -> Iterator[Span]:
        """A span around the block, which the block's own trace parent then names.

        Args:
            name: what is done, without identifiers.
            kind: whom it serves.
            parent: the ``traceparent`` it follows; the block's around it when left out.
            attributes: what is known of it.
        """
        del name, kind, attributes
        with within_trace(parent or _current.get()):
            yield Span()

    def close(self) -> None:
        """Hand over what was not sent yet."""
