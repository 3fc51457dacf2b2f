"""Observe every OOM of this process, also one that the program catches.

On a card the allocator reports them itself. On the CPU they are exceptions: those that pass a hooked function of torch
(``torch_hooks``), those that no code catches, and every exception that is raised in the program's own code: by
`sys.monitoring` from Python 3.12, before by a trace function without line events. A debugger's or a coverage tool's own
trace function is left alone.
"""

from __future__ import annotations

import os
import sys
import threading
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, Callable

from .torch_internals import observe_card_ooms

_LONGEST_MESSAGE = 2000
_MONITORING_TOOL = 4
"""A number that no tool of the standard library uses (`sys.monitoring` reserves 0 to 2 and 5)."""
_LIBRARIES = ("site-packages", "dist-packages", os.path.dirname(os.__file__), "<frozen")


class OomWatch:
    """Recognises exceptions that may be an OOM, and passes each to ``report``, once.

    Args:
        texts: parts of messages that mean or suggest an OOM (`batchwright.hardware.failures`); the supervisor decides.
        report: takes the class, the message and the place of an OOM.
    """

    def __init__(self, texts: list[str], report: Callable[[str, str, str], None]) -> None:
        self._texts = [text.lower() for text in texts]
        self._report = report
        self._last: int | None = None

    def saw(self, error: BaseException | None, where: str) -> bool:
        """Report an exception if it may be an OOM, and return whether it may."""
        if error is None or not self._is_candidate(error):
            return False
        # One exception passes several hooks on its way up. Only its identity is kept: its frames hold tensors.
        if id(error) != self._last:
            self._last = id(error)
            kind = type(error)
            self._report(f"{kind.__module__}.{kind.__qualname__}", str(error)[:_LONGEST_MESSAGE], where)
        return True

    def _is_candidate(self, error: BaseException) -> bool:
        if isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
            return True
        if not isinstance(error, (RuntimeError, OSError)):
            return False
        message = str(error).lower()
        return any(text in message for text in self._texts)

    def watch_uncaught(self) -> None:
        """Look at exceptions that nothing catches, before the program's own hook."""
        inner = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            self.saw(error, "uncaught")
            inner(kind, error, trace)

        sys.excepthook = hook

    def watch_card(self, torch: Any) -> None:
        """Have the caching allocator report each request that failed after it had emptied its cache."""
        observe_card_ooms(torch, self._on_card)

    def _on_card(self, device: int, requested: int, in_use: int, free: int) -> None:
        message = (
            f"CUDA out of memory. Tried to allocate {requested} bytes on card {device}, with {in_use} bytes in use and "
            f"{free} bytes free"
        )
        self._report("torch.OutOfMemoryError", message, "allocator")

    def watch_own_code(self) -> None:
        """Look at every exception that is raised in, or passes, a function of the program itself."""
        monitoring = getattr(sys, "monitoring", None)
        if monitoring is not None:
            if monitoring.get_tool(_MONITORING_TOOL) is None:
                monitoring.use_tool_id(_MONITORING_TOOL, "batchwright")
                monitoring.register_callback(_MONITORING_TOOL, monitoring.events.RAISE, self._on_raise)
                monitoring.set_events(_MONITORING_TOOL, monitoring.events.RAISE)
        elif sys.gettrace() is None:
            self._trace_own_code()

    def _on_raise(self, code: CodeType, _offset: int, error: BaseException) -> None:
        if is_of_program(code.co_filename):
            self.saw(error, "raised")

    def _trace_own_code(self) -> None:
        libraries = set()
        """Files of libraries. Every call in the process asks for its own, hence the short way."""

        def in_frame(_frame: FrameType, event: str, argument: Any) -> Any:
            if event == "exception":
                self.saw(argument[1], "raised")
            return in_frame

        def on_call(frame: FrameType, _event: str, _argument: object) -> Any:
            file = frame.f_code.co_filename
            if file in libraries:
                return None
            if not is_of_program(file):
                libraries.add(file)
                return None
            frame.f_trace_lines = False
            return in_frame

        threading.settrace(on_call)
        sys.settrace(on_call)
        frame: FrameType | None = sys._getframe()  # noqa: SLF001 - the functions that run already
        while frame is not None:
            if on_call(frame, "call", None) is not None:
                frame.f_trace = in_frame
            frame = frame.f_back


@lru_cache(maxsize=None)
def is_of_program(file: str) -> bool:
    """Return whether a file of code belongs to the program, and neither to a library nor to this package."""
    return not any(part in file for part in (*_LIBRARIES, os.path.dirname(__file__)))
