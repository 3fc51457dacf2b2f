"""Private names of torch that traces of fake tensors use, with the reason why no public name suffices.

Tested with torch 2.13.0 (CPU build). See ``batchwright.torch_internals`` for the names that training uses too.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator as HigherOrderOperator, OpOverload as OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException as DataDependentOutputException,
    DynamicOutputShapeException as DynamicOutputShapeException,
    FakeTensor as FakeTensor,
    FakeTensorMode as FakeTensorMode,
    UnsupportedOperatorException as UnsupportedOperatorException,
    unset_fake_temporarily as unset_fake_temporarily,
)
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.tensor._sharding_prop import ShardingPropagator as ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore

from batchwright.torch_internals import is_dense

# OpOverload: the class of operators as a dispatch mode sees them, for annotations; torch.ops publishes only instances.
# HigherOrderOperator: the class of operators that take functions, such as flex_attention.
# FakeTensor, FakeTensorMode, unset_fake_temporarily and the three exceptions: torch.compile's own tensors without
#   values; no public API traces an eager program, its backward pass and its optimizer on them.
# torch._C._storage_Use_Count: what autograd's engine asks in C++ before it adds in place.
# fsdp_param, fsdp_param_group: FSDP resizes storages in functions of these modules, without an operator.
# ShardingPropagator: DTensor runs operators on its own fake tensors there, which a trace must not count.
# FakeStore: creates the process group whose collectives do nothing; torch has it for its own tests.

fsdp_param, fsdp_param_group = _fsdp_param, _fsdp_param_group

PROPAGATE = "_propagate_tensor_meta_non_cached"
"""The method of ``ShardingPropagator`` that runs an operator; its public methods cache, and so do not always run it."""

VERIFY_SHAPES = "torch.nn.parallel.distributed._verify_param_shape_across_processes"
"""The function by which DDP compares shapes over ranks, reading values; nothing public leaves out that alone."""

backward_task: Callable[[], int] = torch._C._current_graph_task_id  # noqa: SLF001
"""The number of the backward pass that runs on this thread, or -1; autograd has no public function for it."""

without_dispatch: Callable[[], Any] = torch._C._DisableTorchDispatch  # noqa: SLF001
"""Context without dispatch modes, in which torch creates its own fake tensors; public modes cannot be left."""

storage_key: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""Identity of a live storage, as in torch's memory tracker; a fake storage has no address to compare."""

memory_format_of: Callable[[Tensor], torch.memory_format] = torch._prims_common.suggest_memory_format  # noqa: SLF001
"""The format that kernels choose by strides; ``is_contiguous`` does not tell formats of one channel apart."""


def run_kernel_of_cpu(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401 - an operator's results
    """Run the CPU's kernel of an operator, written in Python, on fake tensors; ``func`` itself would run its rule."""
    return func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)  # noqa: SLF001


def run_composition(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401 - an operator's results
    """Run the composition of an operator, whose own operators a dispatch mode sees; ``func`` itself would be one."""
    return func._op_dk(COMPOSED[func], *args, **kwargs)  # noqa: SLF001


def fake_of(plain: Tensor, device: torch.device) -> FakeTensor:
    """Create a fake tensor as ``FakeTensor.__new__`` does, without the slow ``__init__``.

    Reading the values of the result raises, as with any fake tensor. The caller must set its attributes.
    """
    fake: FakeTensor = Tensor._make_subclass(  # noqa: SLF001
        FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=device
    )
    torch._C._set_throw_on_mutable_data_ptr(fake)  # noqa: SLF001
    return fake


# Operators whose names begin with an underscore: decompositions call them, and there are no public equivalents.
_aten = torch.ops.aten
_COMPOSITION = torch._C.DispatchKey.CompositeExplicitAutograd  # noqa: SLF001
COMPOSED: Mapping[OpOverload, Any] = {
    _aten._euclidean_dist.default: _COMPOSITION,  # noqa: SLF001
    _aten._safe_softmax.default: _COMPOSITION,  # noqa: SLF001
    _aten._trilinear.default: torch._C.DispatchKey.CompositeExplicitAutogradNonFunctional,  # noqa: SLF001
    _aten.affine_grid_generator.default: _COMPOSITION,
    _aten.binary_cross_entropy_with_logits.default: _COMPOSITION,
}
"""Operators that are made of others on every device, with the dispatch key of the composition."""
ADAPTIVE_AVERAGES: frozenset[OpOverload] = frozenset(
    {
        _aten._adaptive_avg_pool2d.default,  # noqa: SLF001
        _aten._adaptive_avg_pool2d_backward.default,  # noqa: SLF001
        _aten._adaptive_avg_pool3d.default,  # noqa: SLF001
        _aten._adaptive_avg_pool3d_backward.default,  # noqa: SLF001
    }
)
ADDMM_ACTIVATION: OpOverload = _aten._addmm_activation.default  # noqa: SLF001
CDIST_BACKWARD: OpOverload = _aten._cdist_backward.default  # noqa: SLF001
CHECK_AND_UNSCALE: OpOverload = _aten._amp_foreach_non_finite_check_and_unscale_.default
CUDNN_ATTENTION_BACKWARD: OpOverload = _aten._scaled_dot_product_cudnn_attention_backward.default  # noqa: SLF001
EFFICIENT_ATTENTION_BACKWARD: OpOverload = _aten._scaled_dot_product_efficient_attention_backward.default  # noqa: SLF001
EMBEDDING_BAG: OpOverload = _aten._embedding_bag.default  # noqa: SLF001
EMBEDDING_BAG_BACKWARD: OpOverload = _aten._embedding_bag_backward.default  # noqa: SLF001
FLASH_ATTENTION_BACKWARD: OpOverload = _aten._scaled_dot_product_flash_attention_backward.default  # noqa: SLF001
FOREACH_NORM: OpOverload = _aten._foreach_norm.Scalar  # noqa: SLF001
FOURIER_TRANSFORMS: frozenset[OpOverload] = frozenset(
    {_aten._fft_c2c.default, _aten._fft_c2r.default, _aten._fft_r2c.default}  # noqa: SLF001
)
GROUPED_MM: OpOverload = _aten._grouped_mm.default  # noqa: SLF001
LOCAL_SCALAR_DENSE: OpOverload = _aten._local_scalar_dense.default  # noqa: SLF001
LOG_SOFTMAX: OpOverload = _aten._log_softmax.default  # noqa: SLF001
LOG_SOFTMAX_BACKWARD: OpOverload = _aten._log_softmax_backward_data.default  # noqa: SLF001
PDIST_BACKWARD: OpOverload = _aten._pdist_backward.default  # noqa: SLF001
PIN_MEMORY: OpOverload = _aten._pin_memory.default  # noqa: SLF001
RMS_NORM: OpOverload = _aten._fused_rms_norm.default  # noqa: SLF001
RMS_NORM_BACKWARD: frozenset[OpOverload] = frozenset(
    operator.default
    for operator in (getattr(_aten, "_fused_rms_norm_backward", None),)  # not in torch 2.8
    if operator is not None
)
SOFTMAX: OpOverload = _aten._softmax.default  # noqa: SLF001
SOFTMAX_BACKWARD: OpOverload = _aten._softmax_backward_data.default  # noqa: SLF001
GRU_CELL: OpOverload = _aten._thnn_fused_gru_cell.default  # noqa: SLF001
GRU_CELL_BACKWARD: OpOverload = _aten._thnn_fused_gru_cell_backward.default  # noqa: SLF001
"""A step of a GRU without cuDNN; torch has no rule of either for tensors without values."""
CUDNN_RNN: OpOverload = _aten._cudnn_rnn.default  # noqa: SLF001
CUDNN_RNN_BACKWARD: OpOverload = _aten._cudnn_rnn_backward.default  # noqa: SLF001
"""A recurrent layer with cuDNN. Torch's rule for tensors without values has no reserve space; backward it has none."""
CUDNN_RNN_FUNCTION: Callable[..., tuple[Tensor, ...]] = torch._cudnn_rnn  # noqa: SLF001
"""The function that torch's own recurrent layers reach with cuDNN, with the rule of autograd."""
PACK_SEQUENCES: OpOverload = _aten._pack_padded_sequence.default  # noqa: SLF001
"""Reads the lengths of sequences in C++, so that torch has no rule of it for tensors without values."""
VARIABLE_FUNCTIONS: Any = torch._VF  # noqa: SLF001
"""The functions that recurrent layers call with all their weights; a trace replaces them there."""
CTC_LOSS: frozenset[OpOverload] = frozenset({_aten._ctc_loss.default, _aten._ctc_loss.Tensor})  # noqa: SLF001
CTC_LOSS_IS_OF_LIBRARY: frozenset[OpOverload] = frozenset(
    getattr(operator, overload)
    for operator in (getattr(_aten, f"_use_{it}_ctc_loss", None) for it in ("cudnn", "miopen"))
    if operator is not None
    for overload in operator.overloads()
    if overload in {"default", "Tensor"}
)
"""Operators that ask whether cuDNN or MIOpen computes a CTC loss; torch 2.8 has no operator for MIOpen."""
CTC_LOSS_BACKWARD: frozenset[OpOverload] = frozenset(
    {_aten._ctc_loss_backward.default, _aten._ctc_loss_backward.Tensor}  # noqa: SLF001
)


_ENGINE = "_engine_run_backward"
"""The Python function of autograd that calls its engine: the innermost one while C++ code runs a backward pass."""
_ADD = torch.ops.aten.add.Tensor
_ADDENDS = 2
_INTO_ZEROS: Mapping[OpOverload, OpOverload] = {
    _aten.scatter.src: _aten.scatter_.src,  # of maxima, medians and sorted values
    _aten.scatter_add.default: _aten.scatter_add_.default,  # of gathered values
    _aten.index_add.default: _aten.index_add_.default,  # of selected rows
    _aten.index_put.default: _aten.index_put_.default,  # of indexed values
    _aten.masked_scatter.default: _aten.masked_scatter_.default,  # of values at a mask
    _aten.put.default: _aten.put_.default,  # of values at flat positions
}
"""Operators by which backward functions write a gradient into zeros, and what a device runs in their places."""


def operator_in_place(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], caller: FrameType | None
) -> OpOverload:
    """Return the operator that a device runs in the place of ``func``: one in place if nobody else holds the tensor.

    Autograd's engine adds a gradient to another one that it alone holds in place, and backward functions write into
    zeros that they have made, but neither does while a dispatch mode is active (``can_accumulate_inplace`` in
    `input_buffer.cpp`, ``areAnyTensorSubclassLike`` in `FunctionsManual.cpp`): a trace sees ``add`` where a device runs
    ``add_``. An addition in the formula of a backward function, which is rare, looks the same. Python code that adds,
    as in a function of the user, is ``caller``.
    """
    in_place = _aten.add_.Tensor if func is _ADD else _INTO_ZEROS.get(func)
    if in_place is None or backward_task() < 0 or torch.is_grad_enabled():
        return func
    if caller is not None and caller.f_code.co_name != _ENGINE:
        return func
    first = args[0]
    if func is _ADD and not (
        len(args) == _ADDENDS
        and not kwargs
        and isinstance(args[1], Tensor)
        and (first.shape, first.dtype) == (args[1].shape, args[1].dtype)
    ):
        return func
    storage = first.untyped_storage()  # holds the storage too
    is_held_once = torch._C._storage_Use_Count(storage._cdata) == 2  # noqa: PLR2004, SLF001 - see above
    return in_place if is_held_once and is_dense(first) else func
