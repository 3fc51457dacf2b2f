"""Memory that libraries keep for the backward pass of recurrent layers, and hold while they run.

cuDNN reports the sizes of its "reserve space" and of its workspace at run time alone (``cudnnGetRNNTempSpaceSizes``),
and documents neither. The formulas were fitted to measurements of cuDNN 9.19 on an H100, in fp32, fp16 and bf16
(``benchmarks/gpu_evidence_recurrent.py``). The reserve space is exact at all of them. So is the workspace of an LSTM
in one direction to 1 % from 64 samples on, that of a GRU to 6 %; plain layers of few units take up to four times as
much, by an algorithm of their own. An older report, of LSTM and GRU with four layers of 320 units on a P100
(https://github.com/pytorch/pytorch/issues/2895), has the same reserve space, and a workspace of matrices and states
alone. ``cudnn_rnn.cpp`` of the virtual card has the same formulas. MIOpen's are of its source (``GetWorkspaceSize`` and
``GetReserveSize`` in ``rnn.cpp``): a workspace of so many values, and a reserve space of twice as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from batchwright.estimation.trace import BlockBytes
from batchwright.estimation.tracing.kernel_workspaces.workspace import FLOAT_BYTES, bytes_of
from batchwright.schemas.gpus import KernelProfile

RNN_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""``cudnnRNNMode_t``, by the function of ``torch._VF``."""
_ONEDNN_BYTES = 62
_ONEDNN_TOKEN_BYTES = 64
_ONEDNN_FORWARD_ARGUMENTS = 16
_GATES = {0: 1, 1: 1, 2: 4, 3: 3}
_KEPT_VALUES = {0: 1, 1: 1, 2: 5, 3: 6}
"""Values of each unit, step and sample that a layer keeps, by mode."""
_RESERVE_HEADER_BYTES = 256
"""Bytes of cuDNN's reserve space beside the values."""
_STREAM_BYTES = 8 * 1024**2
"""Bytes of cuDNN's workspace for each layer and direction."""
_LEAST_GATES = 3
"""Gates of a layer's workspace at least: plain layers take as much as a GRU."""
_PLAIN_ERROR = 3
"""A plain layer's workspace may be so many times larger."""
_GATED_ERROR = 8
"""That of an LSTM or GRU may differ by the share of one in so many."""
_MIOPEN_VALUES = {0: 1, 1: 1, 2: 6, 3: 4}
"""Values of each unit, step, sample and layer in MIOpen's workspace, by mode (``workspaceScale`` in ``rnn.cpp``)."""
_DROPOUT_STATE_BYTES = 48
"""A generator of each thread (``curandStateXORWOW_t``), an assumption."""
_MATRIX_DIMENSIONS = 2
_INPUT_AND_HIDDEN = 2


@dataclass(frozen=True)
class RecurrentCall:
    """The arguments of ``_cudnn_rnn`` that decide its memory; a trace makes the same call where MIOpen would run.

    Attributes:
        data: the input: of ``(samples, steps, width)``, ``(steps, samples, width)``, or of all tokens if packed.
        weights: matrices and biases.
        mode: as in ``RNN_MODES``.
        units: hidden units of a layer and direction.
        layers: number of layers.
        directions: 2 if bidirectional.
        samples: samples of the batch.
        is_transposed: whether the input has samples before steps, of which the kernels take a copy.
        drops: whether values are dropped between layers.
        trains: whether anything is kept for a backward pass.
        is_miopen: whether the library is MIOpen.
    """

    data: Tensor
    weights: Sequence[Tensor]
    mode: int
    units: int
    layers: int
    directions: int
    samples: int
    is_transposed: bool
    drops: bool
    trains: bool
    is_miopen: bool = False

    @classmethod
    def of(cls, args: Sequence[Any], *, is_miopen: bool = False) -> RecurrentCall:
        """Return the call with the positional arguments of ``_cudnn_rnn``."""
        data, weights, hidden, (mode, units, _, layers) = args[0], args[1], args[4], args[6:10]
        batch_first, dropout, trains, bidirectional, batch_sizes = args[10:15]
        return cls(
            data=data,
            weights=weights,
            mode=mode,
            units=units,
            layers=layers,
            directions=1 + bidirectional,
            samples=hidden.shape[1],
            is_transposed=batch_first and not batch_sizes,
            drops=dropout > 0 and trains and layers > 1,
            trains=trains,
            is_miopen=is_miopen,
        )

    @property
    def tokens(self) -> int:
        """Steps of all samples."""
        return self.data.numel() // max(1, self.data.shape[-1])

    @property
    def reserve_bytes(self) -> int:
        """Bytes that the library keeps until the backward pass."""
        if not self.trains:
            return 0
        if self.is_miopen:
            return 2 * self._miopen_bytes
        units = self.tokens * self.units * self.directions
        between = self.layers - 1
        mask = units * between // 8 if self.drops else 0  # a bit for each value between layers
        values = units * (self.layers * _KEPT_VALUES[self.mode] + between)
        return values * self.data.element_size() + mask + _RESERVE_HEADER_BYTES

    @property
    def workspace_bytes(self) -> int:
        """Bytes that the library holds while it runs, forward or backward.

        Copies of the matrices and of states, and for the steps of one layer at a time its gates, an input and an output
        (the wider of the two); a stream's share for each layer and direction.
        """
        if self.is_miopen:
            return self._miopen_bytes
        matrices = sum(weight.numel() for weight in self.weights if weight.dim() == _MATRIX_DIMENSIONS)
        units, width = self.units * self.directions, self.data.shape[-1]
        states = self.samples * units * self.layers * (3 * _GATES[self.mode] - 1)
        gates = max(_LEAST_GATES, _GATES[self.mode]) + 2 * (self.directions - 1)
        inputs = 2 if self.layers == 1 and self.mode != RNN_MODES["lstm"] else 1
        steps = self.tokens * (gates * units + inputs * width + max(width, units))
        return (matrices + states + steps) * self.data.element_size() + _STREAM_BYTES * self.layers * self.directions

    @property
    def _miopen_bytes(self) -> int:
        values = self.tokens * self.units * self.directions * self.layers * _MIOPEN_VALUES[self.mode]
        return values * self.data.element_size()


def recurrent_error(args: Sequence[Any], *, is_miopen: bool) -> tuple[int, int]:
    """Return by how many bytes a recurrent layer's memory may be smaller, and larger.

    Of cuDNN the workspace is uncertain; of MIOpen, which was measured on no card, the reserve space: assumptions, half
    and as much again.
    """
    call = RecurrentCall.of(args, is_miopen=is_miopen)
    if is_miopen:
        return call.reserve_bytes // 2, call.reserve_bytes
    if call.mode in {RNN_MODES["lstm"], RNN_MODES["gru"]}:
        return call.workspace_bytes // _GATED_ERROR, call.workspace_bytes // _GATED_ERROR
    return 0, call.workspace_bytes * _PLAIN_ERROR


def dropout_state_bytes(args: Sequence[Any], threads: int) -> int:
    """Return the bytes of the generators that a process keeps once a recurrent layer has dropped values."""
    return threads * _DROPOUT_STATE_BYTES if RecurrentCall.of(args).drops else 0


def recurrent_forward_steps(
    args: Sequence[Any], outputs: Sequence[Tensor], *, is_miopen: bool = False
) -> list[BlockBytes | Tensor]:
    """Return what ``_cudnn_rnn`` (``cudnn/RNN.cpp``) allocates, in order: bytes of workspaces, and results.

    The workspaces are the input by steps, and that of the library.
    """
    call = RecurrentCall.of(args, is_miopen=is_miopen)
    *states, reserve, _ = outputs
    return [bytes_of(call.data) if call.is_transposed else 0, *states, call.workspace_bytes, reserve]


def recurrent_backward_steps(
    args: Sequence[Any], outputs: Sequence[Tensor], *, is_miopen: bool = False
) -> tuple[list[BlockBytes | Tensor], list[BlockBytes | Tensor]]:
    """Return what the two kernels of ``_cudnn_rnn_backward`` allocate, in order, the second after the first has ended.

    The first computes the gradients of input and states. It holds zeros for gradients of states that nothing depends
    on, and input and gradient by steps. The second computes the gradients of the weights, and holds the input again.
    """
    gradient, (of_hidden, of_cell) = args[7], args[8:10]
    call = RecurrentCall.of((*args[:6], *args[10:]), is_miopen=is_miopen)
    zeros = [args[at] for at, given in ((4, of_hidden), (5, of_cell)) if given is None and args[at] is not None]
    is_copied = call.is_transposed and gradient is not None and not gradient.transpose(0, 1).is_contiguous()
    by_steps = bytes_of(call.data) if call.is_transposed else 0
    copies = [*map(bytes_of, zeros), by_steps, bytes_of(gradient) if is_copied else 0]
    count = _INPUT_AND_HIDDEN + (args[5] is not None)
    of_inputs, of_weights = outputs[:count], outputs[count:]
    return [*copies, *of_inputs, call.workspace_bytes], [by_steps, *of_weights, call.workspace_bytes]


def packed_steps(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> list[int]:
    """Return the copies of steps that ``_pack_padded_sequence`` joins (``PackedSequence.cpp``), as one block.

    There is one for each of the different lengths, of which larger micro-batches have more.
    """
    del args, profile
    return [bytes_of(outputs[0])]


def onednn_scratchpad(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile | None) -> list[int]:
    """Return what ``mkldnn_rnn_layer`` holds while it runs, and as much backward: the gates of all steps, and states.

    Measured with LSTMs of 64 to 256 units, 48 to 128 steps and 4 to 64 samples, to 1 %: a KiB or so is left out.
    """
    del profile
    steps, samples, _ = args[0].shape
    units = outputs[0].shape[-1] if len(args) <= _ONEDNN_FORWARD_ARGUMENTS else args[7].shape[-1]
    gates = _GATES[RNN_MODES["lstm"]] * units * FLOAT_BYTES
    return [samples * (steps * (gates + _ONEDNN_TOKEN_BYTES) + 2 * units * FLOAT_BYTES)]


def onednn_recurrent_workspace_bytes(args: Sequence[Any]) -> int:
    """Return the bytes that ``mkldnn_rnn_layer`` keeps for its backward pass, by the operator's arguments.

    oneDNN reports the size only at run time: 61 to 66 bytes for each hidden unit, step and sample, measured with LSTMs
    of 64 and 128 units over 64 to 128 steps.
    """
    steps, samples, _ = args[0].shape
    return int(steps * samples * args[10] * _ONEDNN_BYTES)
