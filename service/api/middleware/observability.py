"""Sees every request from outside: gives it an identifier, a trace and a measurement, and logs how it ended."""

from __future__ import annotations

import logging
import os
import re
import time
from itertools import count
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.problems import PROBLEM_MEDIA_TYPE
from service.observability.logging import log_about
from service.observability.metrics import Metrics
from service.observability.tracing import SpanKind, Spans, parse_trace_parent
from service.problem_mapping import problem_of

_log = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-ID"
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,64}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_QUIET_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_UNMATCHED = "unmatched"
"""The route of a request that none of ours takes: its path is the caller's invention."""
_LOWEST_FAILURE = 500
_SUBMITTING = "/v1/tunings"
_STORED_ANSWER = {200: True, 202: False}
"""What the status of a submitted tuning says of the store: it had the answer, or not."""


class Observed:
    """An ASGI middleware, meant to be the outermost.

    - `X-Request-ID` of the request is taken if it is well formed, else one is made; the response carries it.
    - An error that nothing has turned into a problem ends here: it is logged with its traceback, and the caller gets a
      problem with status 500 that names the request, so that an operator finds the line.
    - What changes something is logged at `info`, what only reads at `debug`, what failed at `error`.

    Args:
        app: what it wraps.
        metrics: where the time to the start of the response is counted.
        spans: where requests become spans, if anybody reads those.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, spans: Spans) -> None:
        self._app = app
        self._metrics = metrics
        self._spans = spans
        self._process = os.urandom(6).hex()
        self._numbers = count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Observe a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id, trace_parent = self._identify(scope)
        exchange = _Exchange(scope, send, request_id)
        log_about(request_id=request_id)  # a request has a task, and so a context, of its own: no need to undo this
        if trace_parent is None and not self._spans.recording:
            await self._answer(exchange, receive)
            return
        with self._spans.span(exchange.method, SpanKind.SERVER, trace_parent) as span:
            await self._answer(exchange, receive)
            span.rename(f"{exchange.method} {exchange.route}")
            span.set("status", exchange.status)

    def _identify(self, scope: Scope) -> tuple[str, str | None]:
        """The request's identifier, and the trace it belongs to."""
        request_id, trace_parent = b"", None
        for name, value in scope["headers"]:
            if name == b"x-request-id":
                request_id = value
            elif name == b"traceparent":
                trace_parent = parse_trace_parent(value.decode("latin-1"))
        if request_id and _REQUEST_ID.fullmatch(request_id):
            return request_id.decode(), trace_parent
        return f"{self._process}-{next(self._numbers):x}", trace_parent

    async def _answer(self, exchange: _Exchange, receive: Receive) -> None:
        try:
            await self._app(exchange.scope, receive, exchange.send)
        except Exception as error:
            _log.exception("%s %s failed", exchange.method, exchange.path)
            if exchange.status:
                raise  # a part of the answer is gone already: the server has to cut the connection
            await _send_failure(error, exchange)
        method, route, status = exchange.method, exchange.route, exchange.status
        self._metrics.requested(method, route, status, exchange.seconds)
        if method == "POST" and route == _SUBMITTING and status in _STORED_ANSWER and not exchange.replayed:
            self._metrics.answered(hit=_STORED_ANSWER[status])
        level = _level_of(method, status)
        if _log.isEnabledFor(level):
            fields = {"method": method, "route": route, "status": status, "seconds": round(exchange.seconds, 6)}
            _log.log(level, "%s %s: %d", method, exchange.path, status, extra={"fields": fields})


class _Exchange:
    """A request and the beginning of its response."""

    def __init__(self, scope: Scope, send: Send, request_id: str) -> None:
        self.scope = scope
        self.request_id = request_id
        self.status = 0
        self.seconds = 0.0
        self.replayed = False
        """Whether it repeats the first answer to an idempotency key."""
        self._send = send
        self._began = time.perf_counter()

    async def send(self, message: Message) -> None:
        """Pass a message on; the first one tells the status, and gets the identifier."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.seconds = time.perf_counter() - self._began
            headers = message.get("headers", ())
            self.replayed = any(name == b"idempotency-replayed" for name, _ in headers)
            message["headers"] = [*headers, (b"x-request-id", self.request_id.encode("ascii"))]
        await self._send(message)

    @property
    def method(self) -> str:
        """The method, where it is one of the standard's."""
        method: str = self.scope["method"]
        return method if method in _METHODS else "other"

    @property
    def path(self) -> str:
        """The path as it was sent, without what would forge lines or move a terminal's cursor."""
        return quote(self.scope["path"])

    @property
    def route(self) -> str:
        """The template of the route that took it, and whether it was asked to wait."""
        path = getattr(self.scope.get("route"), "path", _UNMATCHED)
        return f"{path}?wait" if b"wait=" in self.scope.get("query_string", b"") else path


def _level_of(method: str, status: int) -> int:
    if status >= _LOWEST_FAILURE:
        return logging.ERROR
    return logging.DEBUG if method in _QUIET_METHODS else logging.INFO


async def _send_failure(error: Exception, exchange: _Exchange) -> None:
    """A problem that names the request under which the log has the details."""
    problem = problem_of(error)
    detail = f"{problem.detail} (request {exchange.request_id})"
    body = problem.model_copy(update={"detail": detail}).model_dump_json(exclude_none=True).encode()
    headers = [(b"content-type", PROBLEM_MEDIA_TYPE.encode()), (b"content-length", str(len(body)).encode())]
    await exchange.send({"type": "http.response.start", "status": problem.status or 500, "headers": headers})
    await exchange.send({"type": "http.response.body", "body": body})
