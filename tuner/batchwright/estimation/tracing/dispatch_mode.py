"""The dispatch mode of a trace: operators run on fake tensors, and their memory is recorded."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from batchwright.errors import EstimateError
from batchwright.estimation.allocator.config import rounded_up
from batchwright.estimation.trace import BlockBytes, Category
from batchwright.estimation.tracing.kernel_workspaces.composed_kernels import is_made_of_operators, run_in_operators
from batchwright.estimation.tracing.kernel_workspaces.device_kernels import in_order_of_allocation
from batchwright.estimation.tracing.kernel_workspaces.kept_storages import in_kept_storage
from batchwright.estimation.tracing.kernel_workspaces.recurrent_workspaces import (
    onednn_recurrent_workspace_bytes,
    recurrent_backward_steps,
    recurrent_forward_steps,
)
from batchwright.estimation.tracing.kernel_workspaces.shared_kernels import SharedBytes, SharedKernels
from batchwright.estimation.tracing.known_values import KnownValues, map_tensors, tensors_in
from batchwright.estimation.tracing.recorder import Recorder
from batchwright.estimation.tracing.recurrent_layers import backward_results, forward_results
from batchwright.estimation.tracing.shape_cache import ShapeCache
from batchwright.estimation.tracing.torch_internals import (
    CTC_LOSS,
    CTC_LOSS_BACKWARD,
    CTC_LOSS_IS_OF_LIBRARY,
    CUDNN_RNN,
    CUDNN_RNN_BACKWARD,
    GROUPED_MM,
    GRU_CELL,
    GRU_CELL_BACKWARD,
    LOCAL_SCALAR_DENSE,
    PACK_SEQUENCES,
    PIN_MEMORY,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    OpOverload,
    backward_task,
    operator_in_place,
    unset_fake_temporarily,
)
from batchwright.torch_internals import TorchDispatchMode

_aten = torch.ops.aten
_ONEDNN_RECURRENT = _aten.mkldnn_rnn_layer.default
_EQUAL = _aten.equal.default
_ITEM = LOCAL_SCALAR_DENSE
_DEVICE = torch.ops.prim.device.default
_LIFT_FRESH = _aten.lift_fresh.default
"""Receives the result of ``torch.tensor``: memory that the trace allocates, although it is a real tensor."""
_ZERO = _aten._efficientzerotensor.default  # noqa: SLF001 - an operator
"""Makes a tangent of forward-mode differentiation that takes no memory."""
_SUM = _aten.sum.dim_IntList
_CONVOLUTION_BACKWARD = _aten.convolution_backward.default
_CONVOLUTION_MASK_AT = 10
"""Position of ``output_mask`` among the arguments: whether images, weight and bias have gradients."""
_INDEXED = {_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default}
_GROUPED_TYPES = {torch.float32, torch.float16, torch.bfloat16}
"""Types that the kernels of ``_grouped_mm`` take; torch's rule for fake tensors takes bf16 only."""
_GROUPED_ROW_BYTES = 16
"""Rows of the operands and of the result of ``_grouped_mm`` begin at multiples of this."""
_GRU_GATES, _GRU_WORKSPACE = 3, 5
"""Gates of a GRU, and values that a step keeps for its backward pass (`GRU_WORKSPACE_MULTIPLIER`), per hidden unit."""
_RESERVE_AT = 3
"""Position of the reserve space among the results of ``_cudnn_rnn``."""
OPERATOR_NOTE = "while tracing the operator "
"""Begin of a note on an error that an operator raised."""


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's own initialisation of subclasses
    """Runs operators on fake tensors and records the storages of one device. Enter it inside of ``fakes``.

    Real tensors (a batch) are converted to fake CPU tensors with known values.

    Args:
        fakes: the mode that creates results.
        device_type: the device whose storages are recorded.
        kernels: its kernels: those of all profiles that share the trace.
        shapes: the cache of operators' result shapes.
    """

    supports_higher_order_operators = True
    """Such operators reach this mode, which refuses them."""

    def __init__(self, fakes: FakeTensorMode, device_type: str, kernels: SharedKernels, shapes: ShapeCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fakes = fakes
        self.recorder = Recorder()
        self.values = KnownValues()
        self.device_type = device_type
        self.kernels = kernels
        self._shapes = shapes
        self.notes: set[str] = set()
        self._rules: dict[OpOverload, Callable[..., Any]] = {
            CUDNN_RNN: lambda *args: forward_results(fakes, args, is_miopen=kernels.has_miopen),
            CUDNN_RNN_BACKWARD: lambda *args: backward_results(fakes, args),
            GRU_CELL: self._gru_cell,
            GRU_CELL_BACKWARD: self._gru_cell_backward,
            PACK_SEQUENCES: self._packed_sequences,
            PIN_MEMORY: lambda tensor, *_: tensor,
            **dict.fromkeys(CTC_LOSS, self._ctc_loss),
            **dict.fromkeys(CTC_LOSS_BACKWARD, self._ctc_loss_backward),
        }
        """Rules of ours for results, where torch has none for tensors without values."""
        self._persistent: set[str] = set()
        self._backward_task = -1
        self._section_start = 0
        self._is_recording = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, and torch's wrapper would cost a tenth of the time."""
        return False

    @contextmanager
    def without_recording(self) -> Iterator[None]:
        """Disable recording during the block. Tensors may be passed to the recorder later."""
        self._is_recording = False
        try:
            yield
        finally:
            self._is_recording = True

    def begin_section(self, name: str) -> None:
        """Begin a section of the trace."""
        self.recorder.mark(name)
        self._section_start = len(self.recorder.sizes)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - an operator's results
        """Run ``func`` on fake tensors; record its memory and the known values of its results.

        Raises:
            EstimateError: for an operator that takes functions, which torch compiles into kernels.
        """
        if DTensor in types:
            return NotImplemented  # DTensor's own dispatch calls again with the local tensors
        kwargs = kwargs or {}
        if func is _DEVICE:  # C++ code queries it for every other operator: most calls are these
            return args[0].device
        if func is _ITEM:
            return self.values.scalar(args[0])
        if func is _EQUAL:
            return self.values.are_equal(args[0], args[1])
        if func in CTC_LOSS_IS_OF_LIBRARY:
            return False  # transformers turns cuDNN off, and cuDNN takes no labels of 64 bits
        if isinstance(func, HigherOrderOperator):
            raise EstimateError(
                f"the workload calls {func}, which torch compiles into a kernel of its own: it can be measured, "
                "or run on a virtual card (`batchwright estimate --engine virtual`), not traced"
            )
        self._label_activations()
        if func is not _LIFT_FRESH:
            args = tuple(map_tensors(argument, self._to_fake) for argument in args)
        kwargs = {name: map_tensors(argument, self._to_fake) for name, argument in kwargs.items()}
        func = operator_in_place(func, args, kwargs, sys._getframe().f_back)  # noqa: SLF001 - C++ code calls this
        try:
            outputs = self._run(func, args, kwargs)
        except Exception as error:
            error.add_note(f"{OPERATOR_NOTE}{func}")
            raise
        self.values.propagate(func, args, kwargs, outputs)
        return outputs

    def _run(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401 - see above
        if func in _INDEXED:
            args = (args[0], self._masks_to_indices(args[1]), *args[2:])
        outputs: Any
        try:
            outputs = self._results(func, args, kwargs)
        except DynamicOutputShapeException:
            outputs = self._run_on_known_values(func, args, kwargs)
        if func is _ONEDNN_RECURRENT:  # the fake workspace, kept for the backward pass, is empty
            workspace = torch.empty(onednn_recurrent_workspace_bytes(args), dtype=torch.uint8)
            outputs = (*outputs[:3], self._fake_with_values(workspace, outputs[0].device))
        if not self._is_recording:
            return outputs
        if func is _ZERO:
            self.recorder.ignore(outputs)
            return outputs
        on_device = [tensor for tensor in tensors_in((outputs,)) if tensor.device.type == self.device_type]
        if any(tensor.layout is not torch.strided for tensor in on_device):
            raise EstimateError(f"the workload creates a sparse tensor ({func}): it can be measured, not estimated")
        if on_device:
            for steps in self._steps(func, args, on_device):
                self._record_kernel(func, args, steps)
            kept = self.recorder.block_of(on_device[_RESERVE_AT]) if func is CUDNN_RNN else None
            self.kernels.note_error(func, args, on_device, kept=kept, live=self.recorder.live.values)
        return outputs

    def _results(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401 - see above
        """Make the results of an operator by torch's rule for fake tensors, or by one of ours where torch has none."""
        if func is GROUPED_MM and args[0].dtype in _GROUPED_TYPES:
            return self._grouped_product(*args, **kwargs)
        if is_made_of_operators(func, args, self.device_type):
            with self:
                return run_in_operators(func, args, kwargs)
        rule = self._rules.get(func)
        if rule is not None:
            return rule(*args)
        outputs = self._shapes.run(self.fakes, func, args, kwargs)
        with self.fakes:
            return in_kept_storage(func, args, outputs)

    def _steps(
        self, func: OpOverload, args: tuple[Any, ...], on_device: list[Tensor]
    ) -> tuple[Sequence[BlockBytes | SharedBytes | Tensor], ...]:
        """Return what each kernel of an operator allocates, in order: workspaces, and results."""
        if func is CUDNN_RNN:
            return (recurrent_forward_steps(args, on_device, is_miopen=self.kernels.has_miopen),)
        if func is CUDNN_RNN_BACKWARD:
            return recurrent_backward_steps(args, on_device, is_miopen=self.kernels.has_miopen)
        temporary = self.kernels.temporary(func, args, on_device)
        if func is _CONVOLUTION_BACKWARD and args[_CONVOLUTION_MASK_AT][2]:  # a sum for the bias follows
            *gradients, of_bias = on_device
            with self.fakes:
                by_channel = args[0].movedim(1, -1)
            sums = self.kernels.temporary(_SUM, (by_channel, range(by_channel.dim() - 1)), [of_bias])
            return in_order_of_allocation(func, temporary, gradients), (of_bias, *sums)
        return (in_order_of_allocation(func, temporary, on_device),)

    def _record_kernel(
        self, func: OpOverload, args: tuple[Any, ...], steps: Sequence[BlockBytes | SharedBytes | Tensor]
    ) -> None:
        """Record the results of a kernel, its workspaces, and what libraries keep from here on."""
        blocks = []
        for step in steps:
            if isinstance(step, Tensor):
                self.recorder.record([step])
            elif step:
                blocks.append(self.recorder.allocate(step, Category.WORKSPACE))
        for name, nbytes in self.kernels.persistent(func, args):  # a product is allocated before cuBLAS is called
            if name not in self._persistent:
                self._persistent.add(name)
                self.recorder.allocate(nbytes, Category.WORKSPACE)
        for block in blocks:
            self.recorder.free(block)

    def _grouped_product(
        self,
        left: Tensor,
        right: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Make the result of ``_grouped_mm``: the product of each group is written into it, without other memory.

        After ``create_grouped_gemm_output_tensor`` and ``_grouped_mm_fallback`` of ``GroupedMMUtils.h`` in torch 2.13.
        Operands of two dimensions hold the groups one after the other, and ``offs`` has the end of each.

        Raises:
            EstimateError: when the kernels would refuse the operands, a bias or another type of the result.
        """
        if bias is not None or out_dtype not in {None, left.dtype}:
            raise EstimateError(f"{GROUPED_MM} takes no bias, and its result has the type of its operands")
        if right.dtype != left.dtype or right.shape[-2] != left.shape[-1]:
            raise EstimateError(
                f"{GROUPED_MM} cannot multiply {tuple(left.shape)} in {left.dtype} by {tuple(right.shape)} in "
                f"{right.dtype}"
            )
        for matrix in (left, right):
            if max(matrix.stride()[-2:]) * matrix.element_size() % _GROUPED_ROW_BYTES:
                raise EstimateError(
                    f"{GROUPED_MM} takes rows of a multiple of {_GROUPED_ROW_BYTES} bytes, not {tuple(matrix.shape)} "
                    f"in {matrix.dtype}"
                )
        rows, columns = left.shape[-2], right.shape[-1]
        width = rounded_up(columns, _GROUPED_ROW_BYTES // left.element_size())
        shape: tuple[int, ...] = (rows, columns)
        if left.dim() == right.dim():
            shape = (left.shape[0] if offs is None else offs.shape[0], *shape)
        stride = (rows * width, width, 1)[-len(shape) :]
        with self.fakes:
            return torch.empty_strided(shape, stride, dtype=left.dtype, device=left.device)

    def _gru_cell(
        self, _of_input: Tensor, _of_state: Tensor, hidden: Tensor, *_biases: object
    ) -> tuple[Tensor, Tensor]:
        """Make the new state of a GRU and its workspace, as ``_thnn_fused_gru_cell`` (``RNN.cu`` of torch 2.13)."""
        with self.fakes:
            return torch.empty_like(hidden), hidden.new_empty(hidden.shape[0], _GRU_WORKSPACE * hidden.shape[1])

    def _gru_cell_backward(
        self,
        gradient: Tensor,
        workspace: Tensor,
        has_bias: bool,  # noqa: FBT001 - as torch passes it
    ) -> tuple[Tensor | None, ...]:
        """Make the gradients of a GRU's gates, state and biases, as ``_thnn_fused_gru_cell_backward``."""
        gates = (workspace.shape[0], workspace.shape[1] // _GRU_WORKSPACE * _GRU_GATES)
        with self.fakes:
            of_gates = [workspace.new_empty(gates) for _ in range(2)]
            of_state = torch.empty_like(gradient, memory_format=torch.contiguous_format)
            of_biases = [workspace.new_empty(gates[1]) if has_bias else None for _ in range(2)]
        return (*of_gates, of_state, *of_biases)

    def _ctc_loss(
        self,
        log_probs: Tensor,
        _targets: Tensor,
        _input_lengths: object,
        target_lengths: Tensor | Sequence[int],
        *_options: object,
    ) -> tuple[Tensor, Tensor]:
        """Make the losses and the forward variables of CTC, as ``LossCTC.cu`` of torch 2.13 allocates them.

        Raises:
            EstimateError: when the numbers of labels are not known.
        """
        longest = self.values.largest(target_lengths) if isinstance(target_lengths, Tensor) else max(target_lengths)
        if longest is None:
            raise EstimateError("the numbers of labels of a CTC loss must follow from the batch")
        frames, samples, _ = log_probs.shape
        with self.fakes:
            losses, alphas = log_probs.new_empty(samples), log_probs.new_empty(samples, frames, 2 * longest + 1)
        return losses, alphas

    def _ctc_loss_backward(self, _gradient: Tensor, log_probs: Tensor, *_args: object) -> Tensor:
        """Make the gradient of the logarithms of probabilities."""
        with self.fakes:
            return torch.empty_like(log_probs, memory_format=torch.contiguous_format)

    def _packed_sequences(self, data: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001 - as torch passes it
        """Make the steps of all sequences one after the other, and the number of sequences that have each step.

        The numbers are a tensor with values, since torch's functions of packed sequences read them in C++.

        Raises:
            EstimateError: when the lengths are not known.
        """
        del batch_first
        known = self.values.value_of(lengths)
        if known is None:
            raise _of_unknown_shape(PACK_SEQUENCES)
        with unset_fake_temporarily():
            steps = torch.arange(int(known.max()))
            sequences = (known > steps[:, None]).sum(1)
            total = int(known.sum())
        with self.fakes:
            return data.new_empty(total, *data.shape[2:]), sequences

    def _to_fake(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        fake = self.fakes.from_tensor(tensor)
        self.recorder.ignore(fake)
        self.values.set_value(fake, tensor)
        return fake

    def _masks_to_indices(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Convert masks to indices, as indexing does."""
        positions: list[Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype in {torch.bool, torch.uint8}:
                found = _aten.nonzero.default
                positions += self._run_on_known_values(found, (index,), {}).unbind(1)
            else:
                positions.append(index)
        return positions

    def _run_on_known_values(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401 - see above
        """Run ``func``, whose result shapes depend on values, on known values.

        Raises:
            EstimateError: when the values are unknown.
        """
        inputs = list(tensors_in((*args, *kwargs.values())))
        if any(self.values.value_of(tensor) is None for tensor in inputs):
            raise _of_unknown_shape(func)
        device = inputs[0].device
        return map_tensors(self.values.compute(func, args, kwargs), lambda value: self._fake_with_values(value, device))

    def _fake_with_values(self, value: Tensor, device: torch.device) -> Tensor:
        with self.fakes:
            fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        self.values.set_value(fake, value)
        return fake

    def _label_activations(self) -> None:
        """When a backward pass begins, label the live blocks of the forward pass as activations."""
        task = backward_task()
        if task >= 0 and task != self._backward_task:
            self._backward_task = task
            for block in self.recorder.live.values():
                if block >= self._section_start:
                    self.recorder.categories.setdefault(block, Category.ACTIVATIONS)


def _of_unknown_shape(func: OpOverload) -> EstimateError:
    """Return the error of an operator whose result has a shape that a trace cannot know."""
    return EstimateError(
        f"the workload creates a tensor whose shape depends on values known only at run time ({func}): it can be "
        "measured, not estimated"
    )
