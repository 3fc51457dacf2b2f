"""Trace one workload's updates on fake tensors: the sequence of a probe, without its computations."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from batchwright.device_traits import traits_of
from batchwright.errors import BatchwrightError, EstimateError
from batchwright.estimation.attention_kernels import Attention, Kernel, choose_kernel
from batchwright.estimation.cuda_shim import Shim
from batchwright.estimation.protocol import untraceable
from batchwright.estimation.trace import COMPILED_NOTE, Category, Trace
from batchwright.estimation.tracing.dispatch_mode import OPERATOR_NOTE, Tracer
from batchwright.estimation.tracing.fake_device import (
    FakeDevice,
    answers_without_values,
    complete_cuda_kernels,
    emulate_cuda,
    grouped_scans,
    left_uncompiled,
    without_dropout_in_attention,
)
from batchwright.estimation.tracing.fake_model import apply_to_fakes, build_fake_model, deep_copy
from batchwright.estimation.tracing.kernel_workspaces.shared_kernels import Profile, SharedKernels
from batchwright.estimation.tracing.known_values import values_read_by_transformers
from batchwright.estimation.tracing.other_loops import OtherLoop
from batchwright.estimation.tracing.recurrent_layers import recurrent_layers_of_library
from batchwright.estimation.tracing.shape_cache import ShapeCache
from batchwright.estimation.tracing.torch_internals import (
    PROPAGATE,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeStore,
    FakeTensor,
    FakeTensorMode,
    ShardingPropagator,
    UnsupportedOperatorException,
    fsdp_param,
    fsdp_param_group,
)
from batchwright.schemas.estimates import Loop
from batchwright.schemas.gpus import KernelProfile
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.accumulation.collectives import ProcessGroup, Ranks
from batchwright.training.fsdp import shard
from batchwright.training.micro_batches.nested_batches import tensors_of
from batchwright.training.micro_batches.splitting import MicroBatch, sliced
from batchwright.training.update_engine import UpdateEngine
from batchwright.workloads.base import BuildsOptimizer
from batchwright.workloads.build import build_workload, count_parameters

_CUDNN_NOTE = "what cuDNN holds in recurrent layers was measured on an H100: cuDNN does not document it"
_MIOPEN_NOTE = (
    "what MIOpen keeps for the backward pass of recurrent layers follows from its source and was never measured"
)


class FakeRanks(ProcessGroup):
    """Rank 0 of several equal ranks: collectives allocate buckets but do not communicate."""

    def __init__(self, size: int) -> None:
        self.rank = 0
        self.size = size

    def gather(self, value: Any) -> list[Any]:  # noqa: ANN401 - any picklable value
        """Return this rank's value for every rank."""
        return [value] * self.size

    def _all_reduce(self, tensor: Tensor) -> None: ...

    def broadcast_(self, tensors: object) -> None:
        """Do nothing: rank 0 is the source."""

    def close(self) -> None:
        """Do nothing: there is no process group."""


def trace(  # noqa: PLR0913 - the parameters that all traces of one workload share
    spec: WorkloadSpec,
    micro_batch_size: int,
    *,
    accumulates: bool,
    profile: KernelProfile | None = None,
    shim: Shim | None = None,
    shapes: ShapeCache | None = None,
    warm_up: bool = True,
    shards: bool = True,
    loop: Loop = "batchwright",
    share: int | None = None,
) -> Trace:
    """Trace the blocks that building the workload and running its updates allocate.

    Args:
        spec: the workload.
        micro_batch_size: samples per forward and backward pass.
        accumulates: whether an update has two micro-batches of this size, or one.
        profile: the kernel profile of the GPU; None for a run on the CPU.
        shim: the stand-in for CUDA; without it operators follow the CPU's decisions, but gradient accumulation and the
            optimizer are those of the GPU.
        shapes: a cache of operators' result shapes, shared by the traces of a process.
        warm_up: whether an update precedes the measured one, as in a probe. It is a copy of the measured update, less
            the memory that libraries keep. Two updates of another loop, or of a workload's own optimizer, are traced,
            since their first step differs.
        shards: whether each rank of an ``fsdp`` workload holds its shard, or the whole model, as in a probe.
        loop: the training loop that makes the updates.
        share: samples of a rank in an update, which some loops hold on the device; None for those that are traced.

    Raises:
        SpecError, WorkloadError: when the workload cannot be built.
        EstimateError: when the workload cannot be traced.
    """
    with begin_trace(
        spec, profiles=(profile,), shim=shim, shapes=shapes, warm_up=warm_up, shards=shards, loop=loop, share=share
    ) as common:
        return common.trace_updates(micro_batch_size, accumulates=accumulates).traces[profile]


@dataclass(frozen=True)
class TracedRun:
    """A run's traces, and the number of the model's parameters."""

    traces: Mapping[Profile, Trace]
    """The trace of each profile that shares the run; the first one leads it."""
    parameters: int
    """Number of parameters."""


@contextmanager
def begin_trace(  # noqa: PLR0913 - the parameters of trace
    spec: WorkloadSpec,
    *,
    profiles: Sequence[Profile] = (None,),
    shim: Shim | None = None,
    shapes: ShapeCache | None = None,
    warm_up: bool = True,
    shards: bool = True,
    loop: Loop = "batchwright",
    share: int | None = None,
) -> Iterator[UpdateTrace]:
    """Trace the part that is equal for all micro-batch sizes. Other arguments, and errors, are those of ``trace``.

    Args:
        spec: the workload.
        profiles: the kernel profiles that share the trace: all GPUs, or the CPU. The first one leads; those that decide
            otherwise get no trace.
        shim: as in ``trace``.
        shapes: as in ``trace``.
        warm_up: as in ``trace``.
        shards: as in ``trace``.
        loop: as in ``trace``.
        share: as in ``trace``.
    """
    is_gpu = profiles[0] is not None
    # The defaults of the kind of device: torch would choose others for fake parameters.
    device_kind = "cuda" if is_gpu else "cpu"
    chosen = spec.optimizer.implementation_on(device_kind)
    changes: dict[str, Any] = {"optimizer": spec.optimizer.model_copy(update={"implementation": chosen})}
    if spec.gradient_gathering == "auto":
        changes["gradient_gathering"] = traits_of(device_kind).gradient_gathering
    spec = spec.model_copy(update=changes)
    device = torch.device("cuda", 0) if is_gpu and shim is not None else torch.device("cpu")
    kernels = SharedKernels(profiles)
    # Without rules torch would run real kernels, which are not there for a GPU.
    fakes = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=device.type == "cpu")
    tracer = Tracer(fakes, device.type, kernels, shapes or ShapeCache())
    if is_gpu and shim is not None:

        def choose_attention(attention: Attention) -> Kernel:
            return kernels.agreed(lambda profile: choose_kernel(attention, profile))

        shim.install(choose_attention)
        complete_cuda_kernels()
    ranks = spec.parallelism.world_size
    sharded = shards and ranks > 1 and spec.parallelism.strategy == "fsdp"
    emulation = partial(_emulated_cuda, shim, tracer) if is_gpu else nullcontext
    with ExitStack() as stack:
        if sharded or (ranks > 1 and loop != "batchwright"):
            stack.enter_context(_fake_process_group(ranks))
        if sharded:
            stack.enter_context(_recorded_shards(tracer))
        yield UpdateTrace(spec, device, tracer, emulation, sharded=sharded, warms_up=warm_up, loop=loop, share=share)


class UpdateTrace:
    """A trace whose model and optimizer are built, and which has not run an update yet.

    Args:
        spec: the workload.
        device: the GPU, or the CPU.
        tracer: the dispatch mode that records.
        emulation: a context in which queries of CUDA are emulated.
        sharded: whether each rank holds its shard.
        warms_up: whether an update precedes the measured one.
        loop: the training loop that makes the updates.
        share: as in ``trace``.
    """

    def __init__(  # noqa: PLR0913 - the parts of a trace
        self,
        spec: WorkloadSpec,
        device: torch.device,
        tracer: Tracer,
        emulation: Callable[[], AbstractContextManager[None]],
        *,
        sharded: bool,
        warms_up: bool,
        loop: Loop,
        share: int | None,
    ) -> None:
        self._spec = spec
        self._device = device
        self._tracer = tracer
        self._emulated_cuda = emulation
        self._warms_up = warms_up
        self._has_updates = False
        self._workload = build_workload(spec)
        self._has_first_step_of_its_own = loop != "batchwright" or isinstance(self._workload, BuildsOptimizer)
        with self._tracing():
            tracer.begin_section("build")
            model = build_fake_model(spec, self._workload, device, tracer)
            if sharded:
                shard(model, device, spec.parallelism.world_size)

            def label(parameter: Tensor) -> None:
                if parameter.grad is not None:
                    tracer.recorder.label([parameter.grad], Category.GRADIENTS)

            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(label)  # type: ignore[no-untyped-call]
            self._engine: UpdateEngine | OtherLoop
            if loop != "batchwright":
                self._engine = OtherLoop(
                    loop, spec, self._workload, model, device, recorder=tracer.recorder, share=share
                )
                return
            self._engine = UpdateEngine(
                spec,
                self._workload,
                model,
                FakeDevice(device),
                ranks=FakeRanks(spec.parallelism.world_size) if spec.parallelism.world_size > 1 else Ranks(),
                recovers=False,
                sharded=sharded,
            )

    def trace_updates(self, micro_batch_size: int, *, accumulates: bool) -> TracedRun:
        """Complete the trace with an update of two equal micro-batches, or of one, as ``trace_window``.

        Raises:
            EstimateError, WorkloadError: as ``trace_window``.
        """
        return self.trace_window((micro_batch_size,) * (1 + accumulates))

    def trace_window(self, sizes: Sequence[int]) -> TracedRun:
        """Complete the trace with an update of micro-batches of these sizes, the largest first.

        May be called once; forked processes may complete the trace with other updates.

        Raises:
            EstimateError: on a second call, or when the workload cannot be traced.
            WorkloadError: when the workload breaks its contract.
        """
        if self._has_updates:
            raise EstimateError("a trace is completed with one update only")
        self._has_updates = True
        tracer, engine, make = self._tracer, self._engine, self._workload.make_batch
        micro_batches = [sliced(make(size), size) for size in sizes]
        with self._tracing():
            if traits_of(self._device.type).counts_host_memory:
                # On the CPU the batches are in the memory of the device.
                for micro_batch in micro_batches:
                    recorded: set[int] = set()
                    for tensor in tensors_of(micro_batch.batch):
                        storage = tensor.untyped_storage()
                        if storage.data_ptr() not in recorded:
                            recorded.add(storage.data_ptr())
                            tracer.recorder.allocate(storage.nbytes(), Category.ACTIVATIONS)
            if self._has_first_step_of_its_own:
                tracer.begin_section("first-update")
                engine.update(micro_batches)
            tracer.begin_section("measured-update")
            report = engine.update(micro_batches)
            if report is not None and report.skipped:
                raise EstimateError(
                    "the batches of make_batch() have no weight (no token or sample counts in the loss)"
                )
            if self._warms_up and not self._has_first_step_of_its_own:
                self._repeat_if_state_changed(micro_batches)
            tracer.begin_section("end")
            tracer.recorder.stop()
            label_live_blocks(tracer, engine)
        parameters = count_parameters(engine.model)
        found = _build_trace(tracer, sizes[0], self._spec, accumulates=len(sizes) > 1)
        copies = self._warms_up and all(mark.name != "first-update" for mark in found.marks)
        traces = {}
        for profile in tracer.kernels.profiles:
            own = found.changed({block: nbytes.of(profile) for block, nbytes in tracer.recorder.differing.items()})
            own = own.model_copy(update={"workspace_error": tracer.kernels.errors[profile]})
            traces[profile] = own.with_warm_up_update() if copies else own
        return TracedRun(traces, parameters)

    def _repeat_if_state_changed(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Measure a second update if a pass has changed the model: from then on the engine copies what they change."""
        engine, recorder = self._engine, self._tracer.recorder
        snapshot = engine.accumulation.snapshot if isinstance(engine, UpdateEngine) else None
        if snapshot is not None and snapshot.has_changing_state:
            recorder.marks[-1] = recorder.marks[-1].model_copy(update={"name": "first-update"})
            self._tracer.begin_section("measured-update")
            engine.update(micro_batches)

    @contextmanager
    def _tracing(self) -> Iterator[None]:
        tracer = self._tracer
        with (
            _translate_errors(),
            _without_garbage_collection(),
            values_read_by_transformers(),
            grouped_scans(tracer.recorder),
            answers_without_values(tracer.values),
            self._emulated_cuda(),
            patch.object(torch, "compile", partial(left_uncompiled, tracer.notes)),
            patch.object(nn.Module, "_apply", apply_to_fakes),
            patch.object(Tensor, "__deepcopy__", deep_copy),
            patch.object(FakeTensorMode, "avoid_device_init", True),  # though CUDA seems available
            patch.object(FakeTensor, "numpy", lambda tensor, *, force=False: tracer.values.array(tensor, force=force)),
            # fused layers, of less memory, take no fake tensors
            patch.object(torch.backends.mha, "get_fastpath_enabled", lambda: False),
            tracer.fakes,
            tracer,
            optimizer_gradients_labelled(tracer),
        ):
            yield


@contextmanager
def _emulated_cuda(shim: Shim | None, tracer: Tracer) -> Iterator[None]:
    """Emulate a GPU for the workload; without a shim only attention differs from the CPU's."""
    if shim is None:
        with without_dropout_in_attention():
            yield
        return

    def note_recurrent_layer() -> None:
        tracer.notes.add(_MIOPEN_NOTE if tracer.kernels.has_miopen else _CUDNN_NOTE)

    def compute_capability() -> tuple[int, int]:
        agreed: tuple[int, int] = tracer.kernels.agreed(attrgetter("compute_capability"))
        return agreed

    with emulate_cuda(compute_capability), recurrent_layers_of_library(note_recurrent_layer):
        yield


@contextmanager
def _fake_process_group(ranks: int) -> Iterator[None]:
    """Install a fake process group, so that collectives allocate memory but do not communicate."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _recorded_shards(tracer: Tracer) -> Iterator[None]:
    """Record the storages that FSDP resizes without an operator."""
    tracer.notes.add("FSDP's streams are estimated as one stream: in a run the allocator separates blocks by stream")
    propagate = getattr(ShardingPropagator, PROPAGATE)

    def propagate_unrecorded(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the signature of the original
        with tracer.without_recording():
            return propagate(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(patch.object(ShardingPropagator, PROPAGATE, propagate_unrecorded))
        for module in (fsdp_param, fsdp_param_group):
            stack.enter_context(patch.object(module, "alloc_storage", tracer.recorder.resize_to_shape))
        stack.enter_context(patch.object(fsdp_param, "free_storage", tracer.recorder.empty))
        yield


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Raise an ``EstimateError`` for errors of the workload and of torch, with the operator that raised them."""
    try:
        yield
    except BatchwrightError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise EstimateError(
            f"the workload reads values known only at run time ({error}): it can be measured, not estimated"
        ) from error
    except UnsupportedOperatorException as error:
        raise EstimateError(
            f"the workload runs an operator that has no rule for tensors without values ({error}): it can be measured, "
            "not estimated"
        ) from error
    except Exception as error:
        where = "".join(f" ({note})" for note in getattr(error, "__notes__", ()) if note.startswith(OPERATOR_NOTE))
        raise untraceable(error, where) from error


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection, so that blocks are freed at the same position in every trace."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _build_trace(tracer: Tracer, micro_batch_size: int, spec: WorkloadSpec, *, accumulates: bool) -> Trace:
    recorder = tracer.recorder
    return Trace(
        micro_batch_size=micro_batch_size,
        accumulates=accumulates,
        sizes=tuple(recorder.sizes),
        categories=tuple(recorder.categories.get(block, Category.TEMPORARIES) for block in range(len(recorder.sizes))),
        events=tuple(recorder.ordered_events()),
        marks=tuple(recorder.marks),
        decisions="cuda" if tracer.device_type == "cuda" else "cpu",
        notes=tuple(_notes(tracer, spec)),
        bounds=recorder.bounds,
        parts=recorder.parts,
    )


def _notes(tracer: Tracer, spec: WorkloadSpec) -> Iterator[str]:
    for kind in sorted(tracer.values.stand_ins):
        yield f"the workload reads {kind} known only at run time: a stand-in was used"
    yield from sorted(tracer.notes | ({COMPILED_NOTE} if spec.compile else set()))


@contextmanager
def optimizer_gradients_labelled(tracer: Tracer) -> Iterator[None]:
    """Label the gradients that an optimizer receives during the block."""

    def label(optimizer: Optimizer, *_: object) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        tracer.recorder.label(
            [parameter.grad for parameter in parameters if parameter.grad is not None], Category.GRADIENTS
        )

    hook = register_optimizer_step_pre_hook(label)
    try:
        yield
    finally:
        hook.remove()


def label_live_blocks(tracer: Tracer, engine: UpdateEngine | OtherLoop) -> None:
    """Set the categories of the blocks that are live at the end."""
    recorder = tracer.recorder
    persistent = [
        (Category.PARAMETERS, [*engine.model.parameters(), *engine.model.buffers()]),
        (Category.OPTIMIZER_STATE, [value for state in engine.optimizer.state.values() for value in state.values()]),
        (Category.OPTIMIZER_STATE, engine.averages),
        (
            Category.GRADIENTS,
            engine.accumulation.gradients.buffers if isinstance(engine, UpdateEngine) else engine.buckets,
        ),
    ]
    for category, tensors in persistent:
        for tensor in tensors:
            block = recorder.block_of(tensor) if isinstance(tensor, Tensor) else None
            if block is not None:
                recorder.categories[block] = category
