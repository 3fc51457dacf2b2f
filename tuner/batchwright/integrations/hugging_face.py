"""Have Hugging Face's Trainer follow a recommendation: its arguments, and a callback that refuses others.

Read from transformers 5.23: ``trainer.py``, ``training_args.py``, ``trainer_callback.py``.
"""

import json
import warnings
from collections.abc import Iterator, Sized
from typing import Any

import torch
import transformers
from pydantic import JsonValue
from transformers import Trainer, TrainerCallback, TrainingArguments

from batchwright.errors import FieldProblem, SpecError
from batchwright.exports.base import Export, ExportOptions
from batchwright.exports.frameworks.hugging_face import TARGET
from batchwright.exports.registry import export
from batchwright.integrations.measured import model_problems, optimizer_problem
from batchwright.integrations.memory_peaks import PeakMeter
from batchwright.schemas.recommendation import Recommendation

_COMPARED = ("bf16", "fp16", "torch_compile")
"""Arguments that determine memory, and that have the same name in all versions."""


def training_arguments(recommendation: Recommendation, *, allow_inexact: bool = False) -> dict[str, JsonValue]:
    """Keyword arguments of ``TrainingArguments`` for a recommendation, for the installed version of transformers.

    They are those of the export to `hugging-face`: batch, precision, optimizer, clipping, schedule and checkpointing.

    Args:
        recommendation: a feasible recommendation.
        allow_inexact: whether the effective batch may change where the ranks cannot reach it with one size.

    Raises:
        ExportError: when nothing fits, or the effective batch would change and `allow_inexact` is false.

    Warns:
        UserWarning: of each limitation of the export, with its remedy.
    """
    exported = _exported(recommendation, allow_inexact)
    for warning in exported.warnings:
        warnings.warn(f"{warning.code}: {warning.message}", stacklevel=2)
    return _arguments(exported)


def _arguments(exported: Export) -> dict[str, JsonValue]:
    arguments: dict[str, JsonValue] = json.loads(exported.files[0].content)
    return arguments


def _exported(recommendation: Recommendation, allow_inexact: bool) -> Export:  # noqa: FBT001 - handed on by name above
    options = ExportOptions(allow_inexact=allow_inexact)
    installed = _numbers(transformers.__version__)
    version = next((known for known in TARGET.versions if _numbers(known) <= installed), TARGET.versions[-1])
    return export(recommendation, TARGET.name, version=version, options=options)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


class BatchPlanCallback(TrainerCallback):  # type: ignore[misc] # transformers is not typed
    """Refuses a run of the Trainer that contradicts a recommendation, and logs its peak memory against the limit.

    When training begins, the micro-batch, the accumulation steps, the ranks, the precision, activation checkpointing,
    compiling, the optimizer and the parameters of the model have to be those of the recommendation. All differences are
    named in one error. Learning rate, schedule and clipping are free. The model and the optimizer of a sharded run
    (FSDP, DeepSpeed) are not compared.

    The peaks are added to what the Trainer logs, as ``memory/...`` (see ``memory_peaks``), and to its log history. A
    reporter such as TensorBoard's comes before the callbacks of a user, and has written its line by then: call
    ``attach`` instead of naming the callback in `callbacks`, so that reporters have the peaks too. A peak above the
    limit is warned of once.

    The Trainer repeats one micro-batch size: where a recommendation has uneven sizes, the plan is the uniform one of
    the export. The last update of an epoch has the samples that are left.

    Args:
        recommendation: a feasible recommendation.
        allow_inexact: whether the effective batch may change where the ranks cannot reach it with one size.

    Raises:
        ExportError: when nothing fits, or the effective batch would change and `allow_inexact` is false.
    """

    def __init__(self, recommendation: Recommendation, *, allow_inexact: bool = False) -> None:
        self.recommendation = recommendation
        exported = _exported(recommendation, allow_inexact)
        self.plan, self._expected = exported.plan, _arguments(exported)
        self._meter: PeakMeter | None = None

    def attach(self, trainer: Trainer) -> None:
        """Add this callback to a Trainer, before the reporters, so that they have the peaks in what is logged."""
        trainer.callback_handler.callbacks.insert(0, self)

    def on_train_begin(self, args: TrainingArguments, *_: object, **trainer: Any) -> None:  # noqa: ANN401 - not typed
        """Compare the run with the recommendation, and begin to measure.

        Raises:
            SpecError: when they contradict each other; it names each argument, its value and what the plan has.
        """
        problems = [*self._batch_problems(args, trainer.get("train_dataloader")), *self._memory_problems(args, trainer)]
        if problems:
            raise SpecError(problems, f"TrainingArguments for recommendation {self.recommendation.id}")
        self._meter = PeakMeter(self.recommendation, trainer["model"], args.device)

    def on_step_end(self, *_: object, **__: object) -> None:
        """Warn once if the peak is above the limit."""
        if self._meter is not None:
            self._meter.warn_above_limit()

    def on_log(self, _: object, state: Any, *__: object, logs: dict[str, float], **___: object) -> None:  # noqa: ANN401 - not typed
        """Add the peaks to what is logged, and to the log history."""
        if self._meter is None:
            return
        figures = self._meter.figures()
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)

    # --- what contradicts ---

    def _batch_problems(self, args: TrainingArguments, loader: Any) -> Iterator[FieldProblem]:  # noqa: ANN401 - of torch or accelerate
        """Arguments that make another effective batch, or another micro-batch."""
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
            if getattr(args, name) != self._expected[name]:
                yield FieldProblem(name, f"must be {self._expected[name]}", str(getattr(args, name)))
        if args.world_size != self.plan.world_size:
            message = f"must be {self.plan.world_size}: start as many processes, one per device"
            yield FieldProblem("world_size", message, str(args.world_size))
        if args.n_gpu > 1:
            message = "must be 1: a process that sees several devices runs DataParallel; set CUDA_VISIBLE_DEVICES"
            yield FieldProblem("n_gpu", message, str(args.n_gpu))
        samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        if samples != self.plan.effective_batch_size:
            message = f"must be {self.plan.effective_batch_size} samples per update"
            yield FieldProblem("effective batch size", message, str(samples))
        if args.auto_find_batch_size:
            message = "must be False: it changes the micro-batch, and so the effective batch, when memory runs out"
            yield FieldProblem("auto_find_batch_size", message, "True")
        if getattr(args.accelerator_config, "split_batches", False):
            message = "must be False: it divides the micro-batch over the ranks"
            yield FieldProblem("accelerator_config.split_batches", message, "True")
        yield from self._tail_problems(args, loader)

    def _tail_problems(self, args: TrainingArguments, loader: Any) -> Iterator[FieldProblem]:  # noqa: ANN401 - of torch or accelerate
        """A short last micro-batch, where the data has one."""
        each = self.plan.micro_batch_size * self.plan.world_size
        data = getattr(loader, "dataset", None)
        length = len(data) if isinstance(data, Sized) else None
        if args.dataloader_drop_last or (length is not None and length % each == 0):
            return
        held = "data without a length" if length is None else f"{length} samples, which is not a multiple of {each},"
        message = f"must be True: {held} may end an epoch in a short micro-batch, which counts as much as a full one"
        yield FieldProblem("dataloader_drop_last", message, "False")

    def _memory_problems(self, args: TrainingArguments, trainer: dict[str, Any]) -> Iterator[FieldProblem]:
        """Arguments and parts of the Trainer that take other memory than was measured."""
        for name in _COMPARED:
            wanted = bool(self._expected.get(name, False))
            if bool(getattr(args, name)) != wanted:
                yield FieldProblem(name, f"must be {wanted}", str(getattr(args, name)))
        if args.device.type != self.recommendation.device.kind:
            kind = self.recommendation.device.kind
            wanted = not self.recommendation.device.traits.is_gpu
            yield FieldProblem("use_cpu", f"must be {wanted}: the plan was found on {kind}", str(args.use_cpu))
        name = "activation_checkpointing" if "activation_checkpointing" in self._expected else "gradient_checkpointing"
        enabled = bool(getattr(args, name) or getattr(trainer["model"], "is_gradient_checkpointing", False))
        if enabled != self._expected[name]:
            yield FieldProblem(name, f"must be {self._expected[name]}", str(enabled))
        if getattr(args, "fsdp", None) or getattr(args, "deepspeed", None):
            return
        yield from model_problems(self.recommendation, trainer["model"])
        yield from self._optimizer_problems(args, trainer.get("optimizer"))

    def _optimizer_problems(self, args: TrainingArguments, optimizer: Any) -> Iterator[FieldProblem]:  # noqa: ANN401 - of torch or accelerate
        inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        if not isinstance(inner, torch.optim.Optimizer):
            return
        difference = optimizer_problem(self.recommendation, inner, args.device)
        if difference is None:
            return
        name = str(getattr(args.optim, "value", args.optim))
        wanted = self._expected.get("optim")
        message = f"must be {wanted}" if wanted else "cannot express the measured optimizer: pass it as `optimizers`"
        yield FieldProblem("optim", f"{message}; the Trainer has {difference}", name)
