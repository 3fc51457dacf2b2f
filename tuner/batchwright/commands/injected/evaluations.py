"""Tell whether a program has evaluated in a probe, and else where it may do so later, with more memory."""

from __future__ import annotations

import gc
import os
import re
import sys
from contextlib import suppress
from functools import wraps
from importlib import import_module
from typing import Any, Callable

from .oom_watch import is_of_program

_EVALUATES = r"\.eval\(|\b(?:validation_step|eval_dataset|eval_strategy|val_dataloaders?)\b(?! *= *None)"
_IN_TEXT = re.compile(_EVALUATES)
_WITHOUT_GRADIENTS = re.compile(_EVALUATES + r"|(?P<block>\b(?:no_grad|inference_mode)\()")
_ENTERS_FOR_DECORATED = "decorate_context"
"""The function of `torch.utils._contextlib` that enters a mode for a function that it decorates."""


class Evaluations:
    """The evaluations of a process.

    Attributes:
        ran_without_gradients: true once a model was called without gradients.
    """

    def __init__(self) -> None:
        self._calls = 0
        self.ran_without_gradients = False
        self._entered: set[tuple[str, int]] = set()
        """The places, by file and line, where gradients were turned off."""

    def watch(self, torch: Any) -> None:
        """Note where gradients are turned off. Until a model is called without them, no such place evaluates."""
        for mode in (torch.no_grad, torch.inference_mode):
            mode.__enter__ = self._noting(mode.__enter__)

    def _noting(self, enter: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @wraps(enter)
        def entered(mode: Any) -> Any:
            if not self.ran_without_gradients:
                frame = sys._getframe(1)  # noqa: SLF001 - of the `with`, or of what torch wraps around a function
                place = (frame.f_code.co_filename, frame.f_lineno)
                if frame.f_code.co_name == _ENTERS_FOR_DECORATED:
                    code = getattr(frame.f_locals.get("func"), "__code__", frame.f_code)
                    place = (code.co_filename, code.co_firstlineno)
                self._entered.add(place)
            return enter(mode)

        return entered

    def saw(self, *, in_training_mode: bool, has_trained: bool) -> None:
        """Take a call of a model without gradients.

        It is of an evaluation in the mode of evaluation, or before any training; a critic calls its generator so too.
        """
        self._calls += not in_training_mode or not has_trained
        self.ran_without_gradients = True

    def later(self, data_sets: set[int]) -> str | None:
        """Name where the program, which read ``data_sets``, may evaluate; None if it has, or nothing shows it."""
        if self._calls > 1:  # one alone may count operations, or infer the shape of an output
            return None
        kind = import_module("torch.utils.data").DataLoader
        for each in gc.get_objects():
            if issubclass(type(each), kind) and id(getattr(each, "dataset", None)) not in data_sets:
                return "a data loader that the probe did not read"
        folders = tuple(
            os.path.join(folder, "") for folder in (os.path.dirname(os.path.realpath(sys.argv[0])), os.getcwd())
        )
        entered = {(os.path.realpath(name), number) for name, number in self._entered}
        pattern = _IN_TEXT if self.ran_without_gradients else _WITHOUT_GRADIENTS
        for module in list(sys.modules.values()):
            file = os.path.realpath(getattr(module, "__file__", None) or "")
            if file.endswith(".py") and file.startswith(folders) and is_of_program(file):
                with suppress(OSError), open(file, encoding="utf-8", errors="replace") as stream:
                    for number, line in enumerate(stream, 1):
                        found = pattern.search(line.partition("#")[0])
                        if found and not (found.lastgroup and (file, number) in entered):
                            return os.path.basename(file) + ":" + str(number)
        return None
