"""Log to standard error: text lines, or one JSON object per line for a collector."""

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

from batchwright_service.observability.tracing import current_trace_id

_log = logging.getLogger(__name__)

_context: ContextVar[Mapping[str, str]] = ContextVar("log_context", default={})  # noqa: B039 - never changed in place
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s%(about)s"


@contextmanager
def log_context(**fields: str | None) -> Iterator[None]:
    """Add fields to every line that is logged in the block, such as the ids of request, tuning, job or device."""
    token = _context.set({**_context.get(), **{name: value for name, value in fields.items() if value is not None}})
    try:
        yield
    finally:
        _context.reset(token)


def bind_log_context(**fields: str) -> None:
    """Add fields to every line that is logged in the rest of this task or thread."""
    _context.set({**_context.get(), **fields})


def configure_logging(level: str, style: Literal["text", "json"], stream: TextIO | None = None) -> None:
    """Log to standard error in one style, and remove earlier configuration."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def announce(text: str, style: Literal["text", "json"]) -> None:
    """Print a message to standard error, or log it at `info` where the log consists of JSON objects."""
    if style == "json":
        _log.info(text)
    else:
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - the purpose of this function


class RepeatLimit(logging.Filter):
    """Limit how often each message is logged. The first message of the next period gives the number suppressed.

    Args:
        times: maximum number of records per period.
        seconds: length of a period.
        highest: highest level that is limited; records above it pass.
        key: identifies the message of a record; by default the first line of its template, without the values.
        clock: monotonic, in seconds.
    """

    _MAX_MESSAGES = 100
    """Maximum number of messages that are counted: their texts may hold values from callers."""

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
        """Return whether to log the record."""
        if record.levelno > self._highest:
            return True
        message, now = self._key(record), self._clock()
        began, count = self._counts.get(message, (now, 0))
        if now - began >= self._seconds:
            if count > self._times:
                record.msg = f"{record.msg} (and {count - self._times} more times)"
            began, count = now, 0
        if message not in self._counts and len(self._counts) >= self._MAX_MESSAGES:
            self._counts.clear()
        self._counts[message] = began, count + 1
        return count < self._times


def rate_limited_logger(logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> logging.Logger:
    """Return a child of ``logger``, with its name, that logs each text once a minute; for repeated attempts."""
    limited = logging.Logger(logger.name)  # noqa: LOG001 - one for each owner, with its lifetime
    limited.parent = logger
    limited.addFilter(RepeatLimit(times=1, key=logging.LogRecord.getMessage, clock=clock))
    return limited


class JsonFormatter(logging.Formatter):
    """Format a record as one JSON object: `time`, `level`, `logger`, `message` and the context fields."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_context_fields(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


class TextFormatter(logging.Formatter):
    """Format a record as a text line, with the context fields in brackets at its end.

    Unprintable characters are escaped, because messages quote the input of callers. Only tracebacks have several lines.
    """

    @override
    def formatMessage(self, record: logging.LogRecord) -> str:
        context = " ".join(f"{name}={value}" for name, value in _context_fields(record).items())
        record.message = _printable(record.message)
        record.about = _printable(f" [{context}]") if context else ""
        return super().formatMessage(record)

    @override
    def formatException(self, ei: Any) -> str:
        return "\n".join(_printable(line) for line in super().formatException(ei).split("\n"))


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def _context_fields(record: logging.LogRecord) -> dict[str, object]:
    """Return the context fields of the task or thread, its trace id, and the `fields` of the record."""
    fields: dict[str, object] = dict(_context.get())
    if (trace_id := current_trace_id()) is not None:
        fields["trace_id"] = trace_id
    return fields | getattr(record, "fields", {})
