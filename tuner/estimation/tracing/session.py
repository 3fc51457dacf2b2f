"""One workload's updates on fake tensors: the probe's own sequence, without its computations."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from tuner.errors import EstimateError
from tuner.estimation.cuda_shim import Shim
from tuner.estimation.trace import Category, Trace
from tuner.estimation.tracing.dispatch_mode import Tracer
from tuner.estimation.tracing.fake_device import (
    FakeDevice,
    answering_for_cuda,
    without_cudnn_in_recurrent_layers,
    without_dropout_in_attention,
)
from tuner.estimation.tracing.kernel_workspaces import CudaKernels, NoKernels
from tuner.estimation.tracing.shape_cache import Shapes
from tuner.estimation.tracing.torch_internals import (
    PROPAGATE,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeStore,
    FakeTensorMode,
    ShardingPropagator,
    UnsupportedOperatorException,
    fsdp_param,
    fsdp_param_group,
)
from tuner.schemas.gpus import KernelProfile
from tuner.schemas.workload import TransformersModel, WorkloadSpec
from tuner.torch_internals import apply_to_all, own_buffers, own_parameters
from tuner.training.accumulation.collectives import ProcessGroup, Ranks
from tuner.training.fsdp import shard
from tuner.training.micro_batches.splitting import MicroBatch, sliced, tensors_of
from tuner.training.update_engine import UpdateEngine
from tuner.workloads.base import Workload
from tuner.workloads.build import build_model, build_workload


class TracedRanks(ProcessGroup):
    """One of several ranks that all do the same; collectives take buckets, and nobody is waited for."""

    def __init__(self, size: int) -> None:
        self.rank = 0
        self.size = size

    def gather(self, value: Any) -> list[Any]:  # noqa: ANN401 - whatever ranks tell each other
        """The value of this rank as every rank's."""
        return [value] * self.size

    def _all_reduce(self, tensor: Tensor) -> None: ...

    def broadcast_(self, tensors: object) -> None:
        """Rank 0 keeps what it has."""

    def close(self) -> None:
        """There is no group."""


def trace(  # noqa: PLR0913 - what all traces of one workload share
    spec: WorkloadSpec,
    micro_batch_size: int,
    *,
    accumulates: bool,
    profile: KernelProfile | None = None,
    shim: Shim | None = None,
    shapes: Shapes | None = None,
    warm_up: bool = True,
    shards: bool = True,
) -> Trace:
    """The blocks that building the workload and its updates take.

    Args:
        spec: what is trained.
        micro_batch_size: samples per forward and backward pass.
        accumulates: whether an update has two micro-batches of this size, or one.
        profile: the kind of card it runs on; none for a run on the CPU.
        shim: the device that stands in for the card; without one operators take the CPU's decisions, but gradients are
            gathered, and the optimizer is the one, as on the card.
        shapes: what operators are already known to return; for several traces in one process.
        warm_up: whether an update goes before the measured one, as in a probe: the same one, as nothing but what
            libraries keep tells them apart.
        shards: whether each rank of an ``fsdp`` workload holds its shard, or the whole model, as in a probe.

    Raises:
        SpecError, WorkloadError: as building the workload.
        EstimateError: when the workload cannot be traced.
    """
    with begun(spec, profile=profile, shim=shim, shapes=shapes, warm_up=warm_up, shards=shards) as common:
        return common.updated(micro_batch_size, accumulates=accumulates).trace


@dataclass(frozen=True)
class TracedRun:
    """A trace, and what else building the model told."""

    trace: Trace
    parameters: int
    """Number of parameters."""


@contextmanager
def begun(  # noqa: PLR0913 - as trace
    spec: WorkloadSpec,
    *,
    profile: KernelProfile | None = None,
    shim: Shim | None = None,
    shapes: Shapes | None = None,
    warm_up: bool = True,
    shards: bool = True,
) -> Iterator[BegunTrace]:
    """A trace as far as it is the same for all micro-batch sizes. Arguments and errors are those of ``trace``."""
    spec = _on_card(spec) if profile is not None else _on_cpu(spec)
    device = torch.device("cpu") if profile is None or shim is None else torch.device("cuda", 0)
    kernels = CudaKernels(profile) if profile is not None else NoKernels()
    tracer = Tracer(FakeTensorMode(allow_non_fake_inputs=True), device.type, kernels, shapes or Shapes())
    if profile is not None and shim is not None:
        shim.install(profile)
    ranks = spec.parallelism.world_size
    sharded = shards and ranks > 1 and spec.parallelism.strategy == "fsdp"
    answers = nullcontext if profile is None else partial(_answers, profile, shim, tracer)
    with _group_of_nobody(ranks, tracer) if sharded else nullcontext():
        yield BegunTrace(spec, device, tracer, answers, sharded=sharded, warms_up=warm_up)


class BegunTrace:
    """A trace whose model and optimizer are built, and which has not seen a micro-batch yet.

    Args:
        spec: what is trained.
        device: the card, or the CPU.
        tracer: what records.
        answers: what a workload asks of CUDA is answered within this context.
        sharded: whether each rank holds its shard.
        warms_up: whether an update goes before the measured one.
    """

    def __init__(  # noqa: PLR0913 - what a trace is made of
        self,
        spec: WorkloadSpec,
        device: torch.device,
        tracer: Tracer,
        answers: Callable[[], AbstractContextManager[None]],
        *,
        sharded: bool,
        warms_up: bool,
    ) -> None:
        self._spec = spec
        self._device = device
        self._tracer = tracer
        self._answers = answers
        self._warms_up = warms_up
        self._updated = False
        self._workload = build_workload(spec)
        with self._followed():
            tracer.begin("build")
            model = _built(spec, self._workload, device, tracer)
            if sharded:
                shard(model, device, spec.parallelism.world_size)
            _watch_gradients(model, tracer)
            self._engine = UpdateEngine(
                spec,
                self._workload,
                model,
                FakeDevice(device),
                ranks=_ranks(spec),
                recovers=False,
                sharded=sharded,
            )

    def updated(self, micro_batch_size: int, *, accumulates: bool) -> TracedRun:
        """The whole trace, at a size. Only once: a forked process may go on at another size.

        Raises:
            EstimateError: the second time, or when the workload cannot be traced.
            WorkloadError: when it breaks its contract.
        """
        if self._updated:
            raise EstimateError("a trace goes on at one micro-batch size only")
        self._updated = True
        tracer, engine, make = self._tracer, self._engine, self._workload.make_batch
        micro_batches = [sliced(make(micro_batch_size), micro_batch_size) for _ in range(1 + accumulates)]
        with self._followed():
            if self._device.type == "cpu":
                _take_batches(micro_batches, tracer)
            tracer.begin("measured-update")
            _update(engine, micro_batches)
            tracer.begin("end")
            tracer.recorder.stop()
            _label(tracer, engine)
        parameters = sum(it.numel() for it in engine.model.parameters())
        found = _traced(tracer, micro_batch_size, self._spec, accumulates=accumulates)
        return TracedRun(found.warmed_up() if self._warms_up else found, parameters)

    @contextmanager
    def _followed(self) -> Iterator[None]:
        tracer = self._tracer
        with _translated(), _collecting_nothing(), self._answers(), tracer.fakes, tracer, _labelling_gradients(tracer):
            yield


@contextmanager
def _answers(profile: KernelProfile, shim: Shim | None, tracer: Tracer) -> Iterator[None]:
    """What a workload asks of CUDA is answered for a card of this profile; without a shim only attention is its own."""
    if shim is None:
        with without_dropout_in_attention():
            yield
        return

    def told() -> None:
        tracer.notes.add("recurrent layers are followed without cuDNN, which reserves other memory than torch does")

    with answering_for_cuda(profile.compute_capability), without_cudnn_in_recurrent_layers(told):
        yield


@contextmanager
def _group_of_nobody(ranks: int, tracer: Tracer) -> Iterator[None]:
    """Collectives of as many ranks take their memory, and wait for nobody (torch's own fake process group)."""
    tracer.notes.add("the memory of FSDP's streams is taken for that of one: blocks are kept apart by stream in a run")
    found = getattr(ShardingPropagator, PROPAGATE)

    def unseen(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as it is
        with tracer.unseen():
            return found(*args, **kwargs)

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        with ExitStack() as stack:
            stack.enter_context(patch.object(ShardingPropagator, PROPAGATE, unseen))
            for module in (fsdp_param, fsdp_param_group):  # FSDP empties and fills storages without an operator
                stack.enter_context(patch.object(module, "alloc_storage", tracer.recorder.fill))
            stack.enter_context(patch.object(fsdp_param, "free_storage", tracer.recorder.empty))
            yield
    finally:
        dist.destroy_process_group()


def _built(spec: WorkloadSpec, workload: Workload, device: torch.device, tracer: Tracer) -> nn.Module:
    """The model on ``device``. A run builds it on the CPU and moves it to a card, where only its tensors are seen."""
    with _without_initialisation(spec), patch.object(nn.Module, "_apply", _applied):
        if device.type == "cpu":
            return build_model(spec, workload)
        with tracer.unseen(), device:
            model = build_model(spec, workload)
    _take_model(model, tracer)
    return model


def _take_model(module: nn.Module, tracer: Tracer) -> None:
    """Parameters and buffers in the order in which ``nn.Module.to`` moves them."""
    for child in module.children():
        _take_model(child, tracer)
    for tensors in (own_parameters(module), own_buffers(module)):
        tracer.recorder.see([it for it in tensors.values() if it is not None])


def _update(engine: UpdateEngine, micro_batches: list[MicroBatch]) -> None:
    if engine.update(micro_batches).skipped:
        raise EstimateError("the batches of make_batch() weigh nothing (no token or sample counts in the loss)")


def _ranks(spec: WorkloadSpec) -> Ranks:
    size = spec.parallelism.world_size
    return TracedRanks(size) if size > 1 else Ranks()


def _on_card(spec: WorkloadSpec) -> WorkloadSpec:
    """``spec`` with what is chosen on a card: torch would choose otherwise for parameters that are fake."""
    gathering = "scratch" if spec.gradient_gathering == "auto" else spec.gradient_gathering
    return _with_optimizer(spec, "foreach").model_copy(update={"gradient_gathering": gathering})


def _on_cpu(spec: WorkloadSpec) -> WorkloadSpec:
    return _with_optimizer(spec, "for-loop")


def _with_optimizer(spec: WorkloadSpec, default: str) -> WorkloadSpec:
    if spec.optimizer.implementation != "default":
        return spec
    return spec.model_copy(update={"optimizer": spec.optimizer.model_copy(update={"implementation": default})})


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
        raise EstimateError(
            f"the workload asks for values that only a run knows ({error}): it can be measured, not estimated"
        ) from error


@contextmanager
def _collecting_nothing() -> Iterator[None]:
    """Blocks go when their last reference goes, at the same place in every trace."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _without_initialisation(spec: WorkloadSpec) -> Iterator[None]:
    """Parameters have no values: ``torch.nn.init`` and what transformers makes of it return at once."""
    with ExitStack() as stack:
        for name in dir(nn.init):
            if name.endswith("_") and not name.startswith("_"):
                stack.enter_context(patch.object(nn.init, name, _returned))
        if isinstance(spec.model, TransformersModel):
            from transformers import PreTrainedModel  # noqa: PLC0415 - takes a second to import, and only this kind needs it

            stack.enter_context(patch.object(PreTrainedModel, "initialize_weights", lambda _: None))
        yield


def _returned(tensor: Tensor, *_: object, **__: object) -> Tensor:
    return tensor


def _applied(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:  # noqa: FBT001, FBT002 - as torch calls it
    """``nn.Module._apply`` for fakes, which torch's own would swap, and cannot."""
    for child in module.children() if recurse else ():
        apply_to_all(child, change)
    for parameter in own_parameters(module).values():
        if parameter is not None:
            with torch.no_grad():
                parameter.data = change(parameter)
    buffers = own_buffers(module)
    for name, buffer in buffers.items():
        if buffer is not None:
            buffers[name] = change(buffer)
    return module


def _watch_gradients(model: nn.Module, tracer: Tracer) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_labels(tracer))  # type: ignore[no-untyped-call]


def _labels(tracer: Tracer) -> Callable[[Tensor], None]:
    def label(parameter: Tensor) -> None:
        if parameter.grad is not None:
            tracer.recorder.label([parameter.grad], Category.GRADIENTS)

    return label


@contextmanager
def _labelling_gradients(tracer: Tracer) -> Iterator[None]:
    """What an optimizer is given as gradients are gradients."""

    def label(optimizer: Optimizer, *_: object) -> None:
        parameters = [it for group in optimizer.param_groups for it in group["params"]]
        tracer.recorder.label([it.grad for it in parameters if it.grad is not None], Category.GRADIENTS)

    hook = register_optimizer_step_pre_hook(label)
    try:
        yield
    finally:
        hook.remove()


def _take_batches(micro_batches: list[MicroBatch], tracer: Tracer) -> None:
    """On the CPU batches are where they are used."""
    for micro_batch in micro_batches:
        seen: set[int] = set()
        for tensor in tensors_of(micro_batch.batch):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                tracer.recorder.take(storage.nbytes(), Category.ACTIVATIONS)


def _label(tracer: Tracer, engine: UpdateEngine) -> None:
    """Say what the blocks that are still held at the end hold."""
    recorder = tracer.recorder
    lasting = [
        (Category.PARAMETERS, [*engine.model.parameters(), *engine.model.buffers()]),
        (Category.OPTIMIZER_STATE, [it for state in engine.optimizer.state.values() for it in state.values()]),
        (Category.OPTIMIZER_STATE, engine.averages),
        (Category.GRADIENTS, engine.accumulation.gradients.buffers),
    ]
    for category, tensors in lasting:
        for tensor in tensors:
            block = recorder.block_of(tensor) if isinstance(tensor, Tensor) else None
            if block is not None:
                recorder.categories[block] = category


def _traced(tracer: Tracer, micro_batch_size: int, spec: WorkloadSpec, *, accumulates: bool) -> Trace:
    recorder = tracer.recorder
    return Trace(
        micro_batch_size=micro_batch_size,
        accumulates=accumulates,
        sizes=tuple(recorder.sizes),
        categories=tuple(recorder.categories.get(it, Category.TEMPORARIES) for it in range(len(recorder.sizes))),
        events=tuple(recorder.settled_events()),
        marks=tuple(recorder.marks),
        decisions="cuda" if tracer.device_type == "cuda" else "cpu",
        notes=tuple(_notes(tracer, spec)),
        bounds=recorder.bounds,
    )


def _notes(tracer: Tracer, spec: WorkloadSpec) -> Iterator[str]:
    for kind in sorted(tracer.values.guesses):
        yield f"the workload asks for {kind} that only a run knows: a stand-in was used"
    yield from sorted(tracer.notes)
    if spec.compile:
        yield "torch.compile is not followed: this is what the model takes without it"
