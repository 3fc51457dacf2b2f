"""What is written on standard error: lines for people, or one JSON object per line for a collector."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from typing_extensions import override

from service.observability.tracing import current_trace_id

_log = logging.getLogger(__name__)

_context: ContextVar[Mapping[str, str]] = ContextVar("log_context", default={})  # noqa: B039 - never changed in place
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s%(about)s"


@contextmanager
def logging_about(**fields: str | None) -> Iterator[None]:
    """Have every line that is logged in the block say what it is about: request, tuning, job, device."""
    token = _context.set({**_context.get(), **{name: value for name, value in fields.items() if value is not None}})
    try:
        yield
    finally:
        _context.reset(token)


def log_about(**fields: str) -> None:
    """The same for the rest of this task or thread, where it ends with what the lines are about."""
    _context.set({**_context.get(), **fields})


def configure_logging(level: str, style: Literal["text", "json"], stream: TextIO | None = None) -> None:
    """Log to standard error, in one style, whatever was configured before."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def say(text: str, style: Literal["text", "json"]) -> None:
    """Tell whoever started this process something; whoever collects objects gets one, at `info`."""
    if style == "json":
        _log.info(text)
    else:
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - as the docstring says


class RepeatLimit(logging.Filter):
    """Pass each message some times a period; the first one of the next period tells how many were held back.

    Args:
        times: how often within the period.
        seconds: the period.
        highest: the highest level that is held back; what is above passes.
        key: what makes two records the same message: the template by default, without the values in it.
        clock: seconds.
    """

    _MOST_MESSAGES = 100
    """Messages that are remembered: values may come from peers."""

    def __init__(
        self,
        times: int = 5,
        seconds: float = 60.0,
        highest: int = logging.WARNING,
        key: Callable[[logging.LogRecord], str] = lambda record: str(record.msg).partition("\n")[0],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._times = times
        self._seconds = seconds
        self._highest = highest
        self._key = key
        self._clock = clock
        self._counts: dict[str, tuple[float, int]] = {}

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether to write the record."""
        if record.levelno > self._highest:
            return True
        message, now = self._key(record), self._clock()
        began, count = self._counts.get(message, (now, 0))
        if now - began >= self._seconds:
            if count > self._times:
                record.msg = f"{record.msg} (and {count - self._times} more times)"
            began, count = now, 0
        if message not in self._counts and len(self._counts) >= self._MOST_MESSAGES:
            self._counts.clear()
        self._counts[message] = began, count + 1
        return count < self._times


def sparse_logger(logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> logging.Logger:
    """A logger below ``logger``, with its name, for what is tried again and again: each text once a minute."""
    made = logging.Logger(logger.name)  # noqa: LOG001 - one for each owner, gone with it
    made.parent = logger
    made.addFilter(RepeatLimit(times=1, key=logging.LogRecord.getMessage, clock=clock))
    return made


class JsonFormatter(logging.Formatter):
    """One object per line: `time`, `level`, `logger`, `message`, and what the line is about."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_about(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


class TextFormatter(logging.Formatter):
    """A line for people; what it is about stands at its end, in brackets.

    What cannot be printed is escaped: messages quote what strangers have sent. Only tracebacks have several lines.
    """

    @override
    def formatMessage(self, record: logging.LogRecord) -> str:
        about = " ".join(f"{name}={value}" for name, value in _about(record).items())
        record.message = _printable(record.message)
        record.about = _printable(f" [{about}]") if about else ""
        return super().formatMessage(record)

    @override
    def formatException(self, ei: Any) -> str:
        return "\n".join(_printable(line) for line in super().formatException(ei).split("\n"))


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(it if it.isprintable() else it.encode("unicode_escape").decode() for it in text)


def _about(record: logging.LogRecord) -> dict[str, object]:
    """The context of the thread or task that logs, its trace, and the `fields` that the line itself was given."""
    found: dict[str, object] = dict(_context.get())
    if (trace_id := current_trace_id()) is not None:
        found["trace_id"] = trace_id
    return found | getattr(record, "fields", {})
