"""Recurrent layers on a card in a trace: the calls of cuDNN that torch would make, and their results."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from batchwright.estimation.tracing.kernel_workspaces.recurrent_workspaces import RNN_MODES, RecurrentCall
from batchwright.estimation.tracing.torch_internals import CUDNN_RNN_FUNCTION, VARIABLE_FUNCTIONS, FakeTensorMode

_WEIGHTS_OF_A_LAYER, _WEIGHTS_WITHOUT_BIASES = 4, 2
_PACKED_WEIGHTS_AT = 3
"""Position of the weights among the arguments of a layer whose input is packed; else they come one before."""


@contextmanager
def recurrent_layers_of_library(on_layer: Callable[[], None]) -> Iterator[None]:
    """Make recurrent layers call cuDNN during the block, as ``RNN.cpp`` of torch 2.13 does on a card.

    With ROCm this call stands for MIOpen's, which is made alike (``RNN_miopen.cpp``). ``fake_model`` has moved the
    weights of a layer to one buffer.

    Args:
        on_layer: called for every layer that runs.
    """
    with (
        patch.object(torch.nn.modules.rnn, "_VF", _CudnnFunctions(on_layer)),
        patch.object(torch.nn.utils.rnn, "_VF", _PaddingFunctions("_VF")),
        patch.object(nn.RNNBase, "flatten_parameters", lambda _: None),
    ):
        yield


class _CudnnFunctions(ModuleType):
    """The functions of ``torch._VF``, of which those of recurrent layers call cuDNN."""

    def __init__(self, on_layer: Callable[[], None]) -> None:
        super().__init__("_VF")
        self._on_layer = on_layer

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any function
        if name not in RNN_MODES:
            return getattr(VARIABLE_FUNCTIONS, name)

        def run(*args: Any) -> tuple[Tensor, ...]:  # noqa: ANN401 - the signature of the original
            self._on_layer()
            return _run_layer(RNN_MODES[name], *args)

        return run


class _PaddingFunctions(ModuleType):
    """The functions of ``torch._VF``, of which the one that pads packed sequences is ours."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any function
        return _pad_packed_sequence if name == "_pad_packed_sequence" else getattr(VARIABLE_FUNCTIONS, name)


def _pad_packed_sequence(
    data: Tensor,
    batch_sizes: Tensor,
    batch_first: bool,  # noqa: FBT001 - as torch passes it
    padding_value: float,
    total_length: int,
) -> tuple[Tensor, Tensor]:
    """Return padded sequences and their lengths, as ``PackedSequence.cpp``, which writes lengths to a tensor in C++."""
    sizes: list[int] = batch_sizes.tolist()
    output = data.new_full((max(total_length, len(sizes)), sizes[0], *data.shape[1:]), padding_value)
    step = offset = 0
    for samples, equal in groupby(sizes):
        steps = len(list(equal))
        part = data[offset : offset + steps * samples]
        output[step : step + steps, :samples].copy_(part.view(steps, samples, *data.shape[1:]))
        step, offset = step + steps, offset + steps * samples
    lengths = torch.tensor([sum(samples > number for samples in sizes) for number in range(sizes[0])])
    return output.transpose(0, 1) if batch_first else output, lengths


def _run_layer(mode: int, *args: Any) -> tuple[Tensor, ...]:  # noqa: ANN401 - the signatures of ``torch._VF``
    """Call cuDNN with the arguments of ``torch._VF.lstm`` and the like; the input may be packed."""
    if isinstance(args[_PACKED_WEIGHTS_AT], list | tuple):
        data, sizes, state, weights, has_biases, layers, dropout, train, bidirectional = args
        batch_first, batch_sizes = False, sizes.tolist()
    else:
        data, state, weights, has_biases, layers, dropout, train, bidirectional, batch_first = args
        batch_sizes = []
    hidden, cell = state if isinstance(state, list | tuple) else (state, None)
    units = hidden.shape[2] if cell is None else cell.shape[2]
    projected = 0 if units == hidden.shape[2] else hidden.shape[2]
    if torch.is_autocast_enabled("cuda"):  # which runs cuDNN in float16 whatever its own type is (``AutocastRNN.cpp``)
        data, hidden, cell, *weights = (
            each.to(torch.float16) if each is not None and each.is_floating_point() else each
            for each in (data, hidden, cell, *weights)
        )
    per_layer = (_WEIGHTS_OF_A_LAYER if has_biases else _WEIGHTS_WITHOUT_BIASES) + bool(projected)
    output, last_hidden, last_cell, _, _ = CUDNN_RNN_FUNCTION(
        data,
        weights,
        per_layer,
        data.new_empty(0),  # the buffer that holds the weights already
        hidden,
        cell,
        mode,
        units,
        projected,
        layers,
        batch_first,
        dropout,
        train,
        bidirectional,
        batch_sizes,
        None,
    )
    return (output, last_hidden) if cell is None else (output, last_hidden, last_cell)


def forward_results(fakes: FakeTensorMode, args: Sequence[Any], *, is_miopen: bool) -> tuple[Tensor, ...]:
    """Make the results of ``_cudnn_rnn``: output, last states, reserve space, and the buffer of weights.

    The output has steps before samples in memory, whatever its shape is.
    """
    call, projected = RecurrentCall.of(args, is_miopen=is_miopen), args[8]
    width = (projected or call.units) * call.directions
    states = call.layers * call.directions
    with fakes:
        if call.data.dim() == _WEIGHTS_WITHOUT_BIASES:
            output = call.data.new_empty(call.data.shape[0], width)
        else:
            steps = call.tokens // max(1, call.samples)
            output = call.data.new_empty(steps, call.samples, width)
            if call.is_transposed:
                output = call.data.new_empty_strided((call.samples, steps, width), (width, call.samples * width, 1))
        hidden = args[4].new_empty(states, call.samples, projected or call.units)
        cell = args[4].new_empty(0) if args[5] is None else args[5].new_empty(states, call.samples, call.units)
        reserve = call.data.new_empty(call.reserve_bytes, dtype=torch.uint8)
        return output, hidden, cell, reserve, args[3]


def backward_results(fakes: FakeTensorMode, args: Sequence[Any]) -> tuple[Any, ...]:
    """Make the results of ``_cudnn_rnn_backward``: gradients of input and states, and of weights in one buffer."""
    data, weights, hidden, cell = args[0], args[1], args[4], args[5]
    wanted = args[-1]
    call = RecurrentCall.of((*args[:6], *args[10:]))
    with fakes:
        of_data = torch.empty_like(data, memory_format=torch.contiguous_format)
        if call.is_transposed:
            samples, steps, width = data.shape
            of_data = data.new_empty_strided((samples, steps, width), (width, samples * width, 1))
        states = [None if state is None else torch.empty_like(state) for state in (hidden, cell)]
        of_weights: list[Tensor] = []
        if wanted[3]:
            buffer = weights[0].new_empty(sum(weight.numel() for weight in weights))
            parts = buffer.split([weight.numel() for weight in weights])
            of_weights = [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]
        return of_data, *states, of_weights
