"""Have Lightning's Trainer follow a recommendation, or find the micro-batch of a LightningModule before its fit.

Read from lightning 2.6: ``trainer/trainer.py``, ``callbacks/batch_size_finder.py``, ``tuner/batch_size_scaling.py`` and
the loops.
"""

import warnings
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.parsing import lightning_hasattr, lightning_setattr
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader

from batchwright.errors import FieldProblem, SpecError, TuningFailedError
from batchwright.exports.base import ExportOptions
from batchwright.exports.frameworks.lightning import PRECISIONS, TARGET
from batchwright.exports.registry import export
from batchwright.integrations.measured import model_problems, optimizer_problem
from batchwright.integrations.memory_peaks import PeakMeter
from batchwright.integrations.training_module import TARGET as TRAINING_MODULE, largest_samples, save
from batchwright.library.tuning import tune
from batchwright.schemas.plans import UniformPlan
from batchwright.schemas.recommendation import Recommendation
from batchwright.system.temporary_folders import TemporaryFolder
from batchwright.units import counted

_SPEC_PRECISIONS = {theirs: ours for ours, theirs in PRECISIONS.items()}


class _Watching(Callback):  # type: ignore[misc] # a class of Lightning
    """Logs the peaks of a fit against the limit of its recommendation, and warns of a short last window."""

    def __init__(self) -> None:
        self.recommendation: Recommendation | None = None
        self._meter: PeakMeter | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to measure."""
        if self.recommendation is not None:
            self._meter = PeakMeter(self.recommendation, pl_module, trainer.strategy.root_device)
            _warn_of_the_tail(trainer)

    def on_train_batch_end(self, _trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        """Log the peaks, and warn once if they are above the limit."""
        if self._meter is not None:
            pl_module.log_dict(self._meter.figures(), on_step=True, on_epoch=False)
            self._meter.warn_above_limit()


def _warn_of_the_tail(trainer: Trainer) -> None:
    """Warn that Lightning divides the gradient of a short last window by the steps of a whole one."""
    steps, batches = trainer.accumulate_grad_batches, trainer.num_training_batches
    if batches == float("inf") or batches % steps == 0:
        return
    whole = int(batches) // steps * steps
    remedy = f"Set `limit_train_batches={whole}`." if whole else "Use more data, or a smaller effective batch."
    warnings.warn(
        f"the last update of each epoch has {int(batches) % steps} of {steps} micro-batches, and Lightning divides the "
        f"loss of each by {steps} all the same: too small a step. {remedy}",
        stacklevel=2,
    )


class BatchPlanCallback(_Watching):
    """Refuses a fit that contradicts a recommendation, and logs its peak memory against the limit.

    When training starts, the micro-batch of the loader, the accumulation steps, the ranks, the precision, the kind of
    device, the optimizer and the parameters of the module have to be those of the recommendation. All differences are
    named in one error. The model and the optimizer of a sharded run are not compared.

    The peaks are logged as ``memory/...`` (see ``memory_peaks``). A peak above the limit is warned of once, and so is
    an epoch whose last update has fewer micro-batches than the others: Lightning makes that step too small.

    Lightning repeats one micro-batch size: where a recommendation has uneven sizes, the plan is the uniform one of the
    export.

    Args:
        recommendation: a feasible recommendation.
        allow_inexact: whether the effective batch may change where the ranks cannot reach it with one size.

    Raises:
        ExportError: when nothing fits, or the effective batch would change and `allow_inexact` is false.
    """

    def __init__(self, recommendation: Recommendation, *, allow_inexact: bool = False) -> None:
        super().__init__()
        self.recommendation: Recommendation = recommendation
        exported = export(recommendation, TARGET.name, options=ExportOptions(allow_inexact=allow_inexact))
        self.plan = exported.plan
        self._expected: dict[str, Any] = yaml.safe_load(exported.files[0].content)["trainer"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the fit with the recommendation, and begin to measure.

        Raises:
            SpecError: when they contradict each other; it names each argument, its value and what the plan has.
        """
        problems = [*self._batch_problems(trainer), *self._memory_problems(trainer, pl_module)]
        if problems:
            raise SpecError(problems, f"Trainer for recommendation {self.recommendation.id}")
        super().on_train_start(trainer, pl_module)

    def _batch_problems(self, trainer: Trainer) -> Iterator[FieldProblem]:
        """Settings that make another effective batch, or another micro-batch."""
        steps, ranks = self.plan.gradient_accumulation_steps, self.plan.world_size
        if trainer.accumulate_grad_batches != steps:
            yield FieldProblem("accumulate_grad_batches", f"must be {steps}", str(trainer.accumulate_grad_batches))
        if trainer.world_size != ranks:
            yield FieldProblem("devices", f"must make {counted(ranks, 'rank')} over all nodes", str(trainer.world_size))
        yield from _schedulers(trainer)
        for loader in trainer.fit_loop._combined_loader.flattened:  # noqa: SLF001 - the public one has the user's nesting
            yield from self._loader_problems(loader)

    def _loader_problems(self, loader: object) -> Iterator[FieldProblem]:
        wanted, size = self.plan.micro_batch_size, _batch_size(loader)
        if size is not None and size != wanted:
            yield FieldProblem("batch_size", f"must be {wanted}, the micro-batch of each rank", str(size))
        elif _ends_short(loader, wanted * self.plan.world_size):
            message = f"must be True: {_samples(loader)} samples are not a multiple of {wanted} on every rank"
            yield FieldProblem("drop_last", f"{message}, and a short micro-batch counts as much as a full one", "False")

    def _memory_problems(self, trainer: Trainer, pl_module: LightningModule) -> Iterator[FieldProblem]:
        """Settings and parts of the Trainer that take other memory than was measured."""
        device, kind = trainer.strategy.root_device, self.recommendation.device.kind
        if trainer.precision != self._expected["precision"]:
            yield FieldProblem("precision", f"must be {self._expected['precision']}", str(trainer.precision))
        if device.type != kind:
            yield FieldProblem("accelerator", f"must be {self._expected['accelerator']}", device.type)
        if type(trainer.strategy).__name__ not in {"SingleDeviceStrategy", "DDPStrategy"}:
            return
        yield from model_problems(self.recommendation, pl_module)
        for optimizer in trainer.optimizers:
            difference = optimizer_problem(self.recommendation, optimizer, device)
            if difference is not None:
                yield FieldProblem("configure_optimizers", "must return the optimizer that was probed", difference)


class ExactBatchSize(_Watching):
    """Finds the largest micro-batch of a LightningModule before its fit, and accumulates to the effective batch.

    Lightning's ``BatchSizeFinder`` changes the effective batch, and tries sizes in the process that trains. Here each
    size is probed in a process of its own, with two updates of the module's own ``training_step`` and optimizer on the
    largest of 256 samples of the training data, under the memory limit. The fit then has that batch size (the attribute
    of module or data module, as for ``BatchSizeFinder``) and ``accumulate_grad_batches``, so that an update has exactly
    ``effective_batch_size`` samples; loaders, optimizers and learning-rate schedules are made again for it. Peaks are
    logged as ``memory/...`` (see ``memory_peaks``), and a peak above the limit is warned of once.

    The training step has to return the mean over the samples. In probes it has a Trainer that only knows the optimizers
    and the schedulers of learning rates; ``self.log`` does nothing there. A loss that couples samples (BatchNorm, a
    mean over tokens) ends the fit, as no accumulation is exact for it; with ``allow_batch_coupling=True`` it is
    accumulated all the same.

    On CUDA the module leaves the device while the probes run, and the context of this process stays: without a
    ``memory_limit``, the probes have less by that context, a few hundred MiB.

    Where Lightning cannot be exact:

    - Micro-batches have one size. Where only uneven ones would make the fewest steps, the size is the largest divisor
      of the effective batch that fits, with more steps; a warning says so, and names batches nearby that need fewer.
    - The last update of an epoch may have fewer micro-batches, whose gradient Lightning divides by the steps of a whole
      one. A warning says so, and names the ``limit_train_batches`` that leaves this update out.
    - A short last micro-batch counts as much as a full one; a warning asks for ``drop_last``.

    Args:
        effective_batch_size: samples of one optimizer update.
        memory_limit: bytes, or a size such as ``"24GiB"``; the memory of the device when left out.
        batch_arg_name: the attribute that the training loader's batch size comes from.
        progress: whether to show the probes as they end, on standard error.
        fields: further fields of ``TuningRequest``, such as ``memory_margin``.

    Attributes:
        recommendation: what was found; None before the fit.
        plan: the plan of the fit; None before it.
    """

    def __init__(
        self,
        effective_batch_size: int,
        memory_limit: int | str | None = None,
        *,
        batch_arg_name: str = "batch_size",
        progress: bool = True,
        **fields: Any,  # noqa: ANN401 - tune checks them
    ) -> None:
        super().__init__()
        self.plan: UniformPlan | None = None
        self._effective_batch_size = effective_batch_size
        self._batch_arg_name = batch_arg_name
        self._options = {"memory_limit": memory_limit, "progress": progress, **fields}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a fit for which no batch size can be found.

        Raises:
            SpecError: naming every reason.
        """
        problems = [*self._problems(trainer, pl_module)] if stage == "fit" else []
        if problems:
            raise SpecError(problems, "Trainer for ExactBatchSize")

    def _problems(self, trainer: Trainer, pl_module: LightningModule) -> Iterator[FieldProblem]:
        if trainer.world_size != 1:
            message = "must be 1: tune with `batchwright tune --world-size`, and use BatchPlanCallback"
            yield FieldProblem("devices", message, str(trainer.world_size))
        if not pl_module.automatic_optimization:
            yield FieldProblem(
                "automatic_optimization",
                "must be True: Lightning only accumulates with automatic optimization",
                "False",
            )
        if trainer.accumulate_grad_batches not in {1, self.plan.gradient_accumulation_steps if self.plan else 1}:
            message = "must be left out: it follows from the micro-batch that fits"
            yield FieldProblem("accumulate_grad_batches", message, str(trainer.accumulate_grad_batches))
        yield from _schedulers(trainer)
        if trainer.precision not in _SPEC_PRECISIONS:
            yield FieldProblem("precision", f"must be one of {', '.join(_SPEC_PRECISIONS)}", str(trainer.precision))
        if not lightning_hasattr(pl_module, self._batch_arg_name):
            message = "must be an attribute of the module, its hparams or the data module, for the training loader"
            yield FieldProblem(self._batch_arg_name, message)
        if not trainer.fit_loop._data_source.is_module():  # noqa: SLF001 - as Lightning's own finder asks
            message = (
                "must come from `train_dataloader` of the module or data module: one passed to `fit` keeps its size"
            )
            yield FieldProblem("train_dataloaders", message)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the batch size at the first fit, and set it at each.

        Raises:
            SpecError: when the data or an argument is wrong.
            TuningFailedError: when nothing fits, the training step raised, or the loss couples samples.
        """
        if trainer.fast_dev_run:
            warnings.warn("fast_dev_run finds no batch size: ExactBatchSize does nothing", stacklevel=2)
            return
        if self.recommendation is None or self.plan is None:
            self.recommendation = self._found(trainer, pl_module)
            self.plan = self.recommendation.uniform
            if self.plan is None:
                reason = self.recommendation.infeasible_reason or "no micro-batch fits"
                raise TuningFailedError("infeasible", f"Lightning's fit cannot begin: {reason}")
            _warn_of_more_steps(self.recommendation, self.plan)
        self._apply(trainer, pl_module, self.plan)

    def _found(self, trainer: Trainer, pl_module: LightningModule) -> Recommendation:
        """Tune with the module, while it is not on the device."""
        device = trainer.strategy.root_device
        with isolate_rng():
            loader = _training_loader(trainer)
            samples = largest_samples(loader)
        if not samples:
            raise SpecError([FieldProblem("train_dataloader", "has no samples")], "data")
        bounds = {"max_micro_batch_size": length} if (length := _samples(loader)) else {}
        with TemporaryFolder() as folder, _on_the_cpu(pl_module, device):
            file = folder / "module.pickle"
            unknown = save(file, pl_module, trainer.optimizers[0], samples, loader.collate_fn)
            # the workload of the saved module, with the Trainer's precision and clipping
            clips = trainer.gradient_clip_val if trainer.gradient_clip_algorithm in {None, "norm"} else None
            spec = {
                "model": {"kind": "python", "target": TRAINING_MODULE, "arguments": {"file": str(file)}},
                "precision": _SPEC_PRECISIONS[trainer.precision],
                "gradient_clipping": clips or None,
            }
            found = tune(
                spec,
                self._effective_batch_size,
                **{"device": str(device), "uniform": True, **bounds, **self._options},
            )
        return found.model_copy(update={"warnings": (*found.warnings, *unknown)})

    def _apply(self, trainer: Trainer, pl_module: LightningModule, plan: UniformPlan) -> None:
        """Set both figures, and make everything again that was made with others."""
        lightning_setattr(pl_module, self._batch_arg_name, plan.micro_batch_size)
        trainer.accumulate_grad_batches = plan.gradient_accumulation_steps
        loop = trainer.fit_loop
        loop._combined_loader = None  # noqa: SLF001 - as Lightning's own finder resets the loaders
        loop.epoch_loop.val_loop._combined_loader = None  # noqa: SLF001 - as above
        if trainer.lr_scheduler_configs:  # they may have counted the updates of an epoch
            trainer.strategy.setup_optimizers(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that the loader has the batch size, and begin to measure.

        Raises:
            SpecError: when the loader does not follow the attribute.
        """
        for loader in trainer.fit_loop._combined_loader.flattened if self.plan else ():  # noqa: SLF001 - see above
            self._check_loader(loader)
        super().on_train_start(trainer, pl_module)

    def _check_loader(self, loader: object) -> None:
        wanted = self.plan.micro_batch_size if self.plan else 0
        size = _batch_size(loader)
        if size is not None and size != wanted:
            message = f"must pass `{self._batch_arg_name}` on to the DataLoader, which has to have {wanted}"
            raise SpecError([FieldProblem("train_dataloader", message, str(size))], "data")
        if _ends_short(loader, wanted):
            warnings.warn(
                f"{_samples(loader)} samples are not a multiple of the micro-batch of {wanted}: the last one "
                "of an epoch is short and counts as much as a full one. Set `drop_last=True`.",
                stacklevel=2,
            )


# --- parts of both ---


def _schedulers(trainer: Trainer) -> Iterator[FieldProblem]:
    kinds = [kind for callback in trainer.callbacks for kind in type(callback).__mro__]
    if any(kind.__name__ == "GradientAccumulationScheduler" for kind in kinds):  # of `pytorch_lightning` too
        message = "must not have a GradientAccumulationScheduler, which changes the effective batch between epochs"
        yield FieldProblem("callbacks", message)


def _batch_size(loader: object) -> int | None:
    """Samples of a loader's batches; None where they are not known."""
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def _samples(loader: object) -> int | None:
    dataset = getattr(loader, "dataset", None)
    return len(dataset) if isinstance(dataset, Sized) else None


def _ends_short(loader: object, samples_at_once: int) -> bool:
    """Return whether an epoch is known to end in a short micro-batch."""
    samples = _samples(loader)
    return samples is not None and samples % samples_at_once != 0 and not getattr(loader, "drop_last", True)


def _training_loader(trainer: Trainer) -> DataLoader[Any]:
    """The loader of module or data module, as the user makes it."""
    loader = trainer.fit_loop._data_source.dataloader()  # noqa: SLF001 - as the loop itself calls it
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        message = "must return one DataLoader of samples, with a batch size"
        raise SpecError([FieldProblem("train_dataloader", message, type(loader).__name__)], "data")
    return loader


@contextmanager
def _on_the_cpu(pl_module: LightningModule, device: torch.device) -> Iterator[None]:
    """Free the device of the module for the time of the probes."""
    pl_module.cpu()
    torch.cuda.empty_cache()
    try:
        yield
    finally:
        pl_module.to(device)


def _warn_of_more_steps(recommendation: Recommendation, plan: UniformPlan) -> None:
    fewest = recommendation.plan.gradient_accumulation_steps if recommendation.plan else 0
    if plan.gradient_accumulation_steps <= fewest:
        return
    near = ", ".join(
        f"{batch.effective_batch_size} ({batch.gradient_accumulation_steps} x {batch.micro_batch_size})"
        for batch in plan.nearest
    )
    remedy = f" Effective batches nearby that need fewer: {near}." if near else ""
    warnings.warn(f"Lightning repeats one micro-batch size: {plan.change}{remedy}", stacklevel=2)
