"""Run a script of examples/side_by_side and record its updates: side_by_side_recorder.py FOLDER SCRIPT [ARGUMENT ...].

Started by side_by_side.py. The script is not changed: hooks of torch write the weights before each update, the gradient
that the optimizer stepped with, and the samples that went through the model with gradients since the step before, to
files in FOLDER. Nothing that is recorded stays in memory.
"""

import json
import runpy
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from common_task import LENGTH, SmallGpt, samples
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from batchwright.workloads.preload import import_early

EVENTS = "events.jsonl"
LATE_IMPORTS = {"with_lightning": ("lightning.pytorch.loggers.logger",)}
"""Modules that a library imports only during a fit, where they would count against the memory limit."""


class Recorder:
    """The updates of one process, as lines of a file, with weights and gradients in files beside it.

    A line ``{"micro_batch": [3, 4]}`` has the samples of a forward pass, ``{"step": 2}`` says that the optimizer has
    stepped for the third time: ``2.weights`` and ``2.gradients`` have the tensors, one after the other, in fp32.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        dataset = samples()
        texts = [bytes(dataset[number].tolist()) for number in range(len(dataset))]
        longest = max(map(len, texts))
        self._numbers = {text: number for number, text in enumerate(texts)}
        # the model's inputs lack the last byte of a sample that is not padded
        self._numbers |= {text[:-1]: number for number, text in enumerate(texts) if len(text) in {LENGTH, longest}}
        self._steps = 0
        self._has_weights = False

    def before_forward(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Record the samples of a micro-batch, and the weights if it is the first of an update."""
        if not isinstance(module, SmallGpt) or not torch.is_grad_enabled():
            return
        texts = [bytes(row.tolist()).rstrip(b"\0") for row in inputs[0]]
        numbers = [self._numbers[text] for text in texts]
        if not self._has_weights or 0 in numbers:  # a new pass may follow a search that ended within an update
            self._write_tensors("weights", (parameter.detach() for parameter in module.parameters()))
            self._has_weights = True
        self._write_line({"micro_batch": numbers})

    def after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Record the gradient of an update."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._write_tensors("gradients", (cast("Tensor", parameter.grad) for parameter in parameters))
        self._write_line({"step": self._steps})
        self._steps += 1
        self._has_weights = False

    def _write_tensors(self, name: str, tensors: Iterable[Tensor]) -> None:
        with (self._folder / f"{self._steps}.{name}").open("wb") as stream:
            for tensor in tensors:
                tensor.numpy().tofile(stream)

    def _write_line(self, line: dict[str, object]) -> None:
        with (self._folder / EVENTS).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")


def main(folder: Path, script: Path) -> None:
    """Set the hooks, and run the script as if it were called by itself."""
    recorder = Recorder(folder)
    register_module_forward_pre_hook(recorder.before_forward)
    register_optimizer_step_post_hook(recorder.after_step)
    import_early(LATE_IMPORTS.get(script.stem, ()))
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    sys.argv[1:3], arguments = [], sys.argv[1:3]
    main(Path(arguments[0]), Path(arguments[1]))
