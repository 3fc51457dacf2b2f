"""Identify, trace, measure and log every request."""

from __future__ import annotations

import logging
import os
import re
import time
from itertools import count
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchwright_service.api.problems import PROBLEM_MEDIA_TYPE
from batchwright_service.observability.logging import bind_log_context
from batchwright_service.observability.metrics import Metrics
from batchwright_service.observability.tracing import SpanKind, Spans, parse_trace_parent
from batchwright_service.problem_mapping import problem_of

_log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,64}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_QUIET_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_UNMATCHED = "unmatched"
"""The route label of a request that matches no route; its path would be an unbounded label."""
_LOWEST_FAILURE = 500


class ObservabilityMiddleware:
    """The outermost middleware of the API's own; Starlette's handler of server errors stands around it.

    - The `X-Request-ID` of a request is adopted if it is well formed, and generated otherwise. The response carries it.
    - An unhandled error is logged with its traceback. The caller gets a problem with status 500 that names the request
      id, by which an operator finds the log line.
    - Requests that change something are logged at `info`, reads at `debug`, and failures at `error`.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, spans: Spans) -> None:
        self._app = app
        self._metrics = metrics
        self._spans = spans
        self._process = os.urandom(6).hex()
        self._numbers = count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Identify, trace, measure and log a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id, trace_parent = self._identify(scope)
        exchange = _Exchange(scope, send, request_id)
        bind_log_context(request_id=request_id)  # a request has a context of its own: no reset needed
        if trace_parent is None and not self._spans.recording:
            await self._respond(exchange, receive)
            return
        with self._spans.span(exchange.method, SpanKind.SERVER, trace_parent) as span:
            await self._respond(exchange, receive)
            span.rename(f"{exchange.method} {exchange.route}")
            span.set("status", exchange.status)

    def _identify(self, scope: Scope) -> tuple[str, str | None]:
        """Return the request id, and the parent of the request's trace."""
        request_id, trace_parent = b"", None
        for name, value in scope["headers"]:
            if name == b"x-request-id":
                request_id = value
            elif name == b"traceparent":
                trace_parent = parse_trace_parent(value.decode("latin-1"))
        if request_id and _REQUEST_ID.fullmatch(request_id):
            return request_id.decode(), trace_parent
        return f"{self._process}-{next(self._numbers):x}", trace_parent

    async def _respond(self, exchange: _Exchange, receive: Receive) -> None:
        try:
            await self._app(exchange.scope, receive, exchange.send)
        except Exception as error:
            _log.exception("%s %s failed", exchange.method, exchange.path)
            if exchange.status:
                raise  # a part of the response was sent: the server has to close the connection
            # The problem names the request id, by which the log has the details.
            problem = problem_of(error)
            detail = f"{problem.detail} (request {exchange.request_id})"
            body = problem.model_copy(update={"detail": detail}).model_dump_json(exclude_none=True).encode()
            headers = [(b"content-type", PROBLEM_MEDIA_TYPE.encode()), (b"content-length", str(len(body)).encode())]
            await exchange.send({"type": "http.response.start", "status": problem.status or 500, "headers": headers})
            await exchange.send({"type": "http.response.body", "body": body})
        method, route, status = exchange.method, exchange.route, exchange.status
        self._metrics.observe_request(method, route, status, exchange.seconds)
        quietest = logging.DEBUG if method in _QUIET_METHODS else logging.INFO
        level = logging.ERROR if status >= _LOWEST_FAILURE else quietest
        if _log.isEnabledFor(level):
            fields = {"method": method, "route": route, "status": status, "seconds": round(exchange.seconds, 6)}
            _log.log(level, "%s %s: %d", method, exchange.path, status, extra={"fields": fields})


class _Exchange:
    """A request and the start of its response."""

    def __init__(self, scope: Scope, send: Send, request_id: str) -> None:
        self.scope = scope
        self.request_id = request_id
        self.status = 0
        self.seconds = 0.0
        self._send = send
        self._began = time.perf_counter()

    async def send(self, message: Message) -> None:
        """Send a message; record the status of the first one, and add the request id to its headers."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.seconds = time.perf_counter() - self._began
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self.request_id.encode("ascii"))]
        await self._send(message)

    @property
    def method(self) -> str:
        """The method if it is a standard one, else `other`."""
        method: str = self.scope["method"]
        return method if method in _METHODS else "other"

    @property
    def path(self) -> str:
        """The path, quoted, so that control characters cannot forge log lines or control a terminal."""
        return quote(self.scope["path"])

    @property
    def route(self) -> str:
        """The template of the matched route, with `?wait` for long polls."""
        path = getattr(self.scope.get("route"), "path", _UNMATCHED)
        return f"{path}?wait" if b"wait=" in self.scope.get("query_string", b"") else path
