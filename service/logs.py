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

from service.tracing import current_trace_id

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


class Seldom(logging.Filter):
    """Lets each message through some times a minute, and tells how many it kept back: for what strangers provoke.

    Args:
        most: the highest level of what is kept back.
        times: how often within the period.
        seconds: the period.
    """

    def __init__(self, most: int = logging.WARNING, times: int = 5, seconds: float = 60.0) -> None:
        super().__init__()
        self._most = most
        self._times = times
        self._seconds = seconds
        self._counts: dict[str, tuple[float, int]] = {}

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written. What is above the level always is."""
        if record.levelno > self._most:
            return True
        message = str(record.msg)
        began, count = self._counts.get(message, (record.created, 0))
        if record.created - began >= self._seconds:
            if count > self._times:
                record.msg = f"{message} (and {count - self._times} more times)"
            began, count = record.created, 0
        self._counts[message] = began, count + 1
        return count < self._times


_REPEAT_SECONDS = 60.0


class SparseLog:
    """Log repeated warnings: each text at once, and again after a minute at the earliest.

    Args:
        logger: where the warnings go.
        clock: seconds.
    """

    _MOST_TEXTS = 100

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._logged: dict[str, float] = {}

    def log(self, text: str, *values: object, exc_info: BaseException | None = None) -> None:
        """Log a warning, unless the same one was logged within the last minute."""
        whole, now = text % values, self._clock()
        if now - self._logged.get(whole, -_REPEAT_SECONDS) < _REPEAT_SECONDS:
            return
        if len(self._logged) >= self._MOST_TEXTS:
            self._logged.clear()
        self._logged[whole] = now
        self._logger.warning("%s", whole, exc_info=exc_info)


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
