"""Copies that CUDA kernels make of arguments whose strides they cannot read."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from batchwright.estimation.tracing.kernel_workspaces.workspace import IMAGE_DIMENSIONS, bytes_of
from batchwright.estimation.tracing.torch_internals import (
    ADAPTIVE_AVERAGES,
    ADDMM_ACTIVATION,
    LOG_SOFTMAX,
    LOG_SOFTMAX_BACKWARD,
    RMS_NORM,
    RMS_NORM_BACKWARD,
    SOFTMAX,
    OpOverload,
    memory_format_of,
)

_aten = torch.ops.aten


_MATRICES: Mapping[OpOverload, tuple[int, ...]] = {
    _aten.mm.default: (0, 1),
    _aten.bmm.default: (0, 1),
    _aten.addmm.default: (1, 2),
    _aten.baddbmm.default: (1, 2),
    _aten.addbmm.default: (1, 2),
    ADDMM_ACTIVATION: (1, 2),
}
"""Positions of the matrices among the arguments of matrix products."""

_MADE_CONTIGUOUS: Mapping[OpOverload, tuple[int, ...]] = {
    SOFTMAX: (0,),
    LOG_SOFTMAX: (0,),
    LOG_SOFTMAX_BACKWARD: (0, 1),
    RMS_NORM: (0,),
    **dict.fromkeys(RMS_NORM_BACKWARD, (0, 1)),
    _aten.native_layer_norm.default: (0,),
    _aten.native_layer_norm_backward.default: (0, 1),
    _aten.native_group_norm.default: (0,),
    _aten.native_group_norm_backward.default: (0, 1),
    _aten.embedding_dense_backward.default: (0,),
    _aten.index_put.default: (2,),
    _aten.index_put_.default: (2,),
    _aten.max_pool2d_with_indices.default: (0,),
    _aten.max_pool2d_with_indices_backward.default: (0, 1),
    _aten.avg_pool2d.default: (0,),
    _aten.avg_pool2d_backward.default: (0, 1),
    _aten.upsample_bilinear2d_backward.default: (0,),
    _aten.upsample_nearest2d_backward.default: (0,),
    _aten.reflection_pad2d_backward.default: (0,),
    _aten.max_pool3d_with_indices.default: (0,),
    _aten.max_pool3d_with_indices_backward.default: (0,),
    _aten.avg_pool3d.default: (0,),
    _aten.avg_pool3d_backward.default: (0,),
    **dict.fromkeys(ADAPTIVE_AVERAGES, (0,)),
    _aten.adaptive_max_pool2d.default: (0,),
    _aten.adaptive_max_pool2d_backward.default: (0,),
    _aten.upsample_bicubic2d_backward.default: (0,),
    _aten.upsample_trilinear3d_backward.default: (0,),
    _aten.upsample_nearest3d_backward.default: (0,),
    _aten.reflection_pad3d.default: (0,),
    _aten.reflection_pad3d_backward.default: (0,),
    _aten.cumsum.default: (0,),
    _aten.roll.default: (0,),
}
"""Positions of the arguments that a kernel makes contiguous. Images may be in the format of channels last, too."""


_UNFOLDING = frozenset({_aten.im2col.default, _aten.col2im.default})
"""Operators that copy images in the format of channels last, too."""

_CONVOLUTIONS: Mapping[OpOverload, int] = {_aten.convolution.default: 0, _aten.convolution_backward.default: 1}
"""Position of the images among the arguments of convolutions. The weight is next, a gradient before."""


def contiguous_copies(func: OpOverload, args: Sequence[Any]) -> list[int]:
    """Return the bytes of the copies that a CUDA kernel makes of arguments whose strides it cannot read.

    The gradient of a sum is the usual case: it is one number, expanded to a shape with strides of 0.
    """
    matrices = _MATRICES.get(func)
    if matrices is not None:
        return [bytes_of(args[index]) for index in matrices if not _is_matrix_of_blas(args[index])]
    if func in _CONVOLUTIONS:
        return _copies_of_convolution(args[: _CONVOLUTIONS[func] + 2])
    if func in _UNFOLDING:
        return [] if args[0].is_contiguous() else [bytes_of(args[0])]
    made_contiguous = (args[index] for index in _MADE_CONTIGUOUS.get(func, ()) if index < len(args))
    return [bytes_of(tensor) for tensor in made_contiguous if isinstance(tensor, Tensor) and not _is_dense(tensor)]


def _copies_of_convolution(tensors: Sequence[Tensor]) -> list[int]:
    """Return the bytes of the tensors that are not in the format of channels last, if the images or the weight are.

    Else of those that are not contiguous (``cudnn_conv_suggest_memory_format`` in ``ConvUtils.h``).
    """
    formats = [memory_format_of(tensor) for tensor in tensors[-2:]]
    used = next((found for found in formats if found is not torch.contiguous_format), torch.contiguous_format)
    return [bytes_of(tensor) for tensor in tensors if not tensor.is_contiguous(memory_format=used)]


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor is contiguous, or consists of images in the format of channels last."""
    is_image = tensor.dim() == IMAGE_DIMENSIONS
    return tensor.is_contiguous() or (is_image and tensor.is_contiguous(memory_format=torch.channels_last))


def _is_matrix_of_blas(matrix: Tensor) -> bool:
    """Return whether cuBLAS reads a matrix, or a batch of matrices, in place (``cuda/Blas.cpp``).

    The elements of a row or of a column must be neighbours, and rows (columns) must not overlap.
    """
    (rows, columns), (row_stride, column_stride) = matrix.shape[-2:], matrix.stride()[-2:]
    if matrix.is_contiguous() and 0 not in matrix.stride()[-2:]:
        return True
    by_row = (column_stride == 1 or columns == 1) and (row_stride >= max(1, columns) or rows == 1)
    by_column = (row_stride == 1 or rows == 1) and (column_stride >= max(1, rows) or columns == 1)
    return by_row or by_column
