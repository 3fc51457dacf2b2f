"""Memory that libraries keep for the backward pass of recurrent layers, and hold while they run.

cuDNN reports the sizes of its "reserve space" and of its workspace at run time alone (``cudnnGetRNNTempSpaceSizes``),
and documents neither. The formulas are those of one published report of both: LSTM and GRU with four layers of 320
units on a P100, in fp32 (https://github.com/pytorch/pytorch/issues/2895). 736,000,000 and 864,000,000 bytes of reserve
space are 5 and 6 values for each of 25,000 tokens, units and layers, and one between layers. 17,730,560 and 13,169,920
bytes of workspace are the matrices, and 11 and 8 values for each of 100 samples, units and layers. The report names
parameters and bytes; units and layers follow from the former, tokens and samples were found as the round numbers that
give all four figures. ``cudnn_rnn.cpp`` of the virtual card has the same formulas. Other versions and algorithms of
cuDNN may keep more or less: see ``reserve_error``. MIOpen's are of its source (``GetWorkspaceSize`` and
``GetReserveSize`` in ``rnn.cpp``): a workspace of so many values, and a reserve space of twice as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tuner.estimation.trace import Bound
from tuner.estimation.tracing.kernel_workspaces.workspace import FLOAT_BYTES, bytes_of
from tuner.schemas.gpus import KernelProfile

RNN_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""``cudnnRNNMode_t``, by the function of ``torch._VF``."""
_ONEDNN_BYTES = 62
_ONEDNN_TOKEN_BYTES = 64
_ONEDNN_FORWARD_ARGUMENTS = 16
_GATES = {0: 1, 1: 1, 2: 4, 3: 3}
_KEPT_VALUES = {0: 1, 1: 1, 2: 5, 3: 6}
"""Values of each unit, step and sample that a layer keeps, by mode; of the modes without gates an assumption."""
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
        if self.is_miopen:
            return 2 * self._miopen_bytes if self.trains else 0
        values = self.layers * _KEPT_VALUES[self.mode] + self.layers - 1
        kept = self.tokens * self.units * self.directions * values * self.data.element_size()
        return kept if self.trains else 0

    @property
    def workspace_bytes(self) -> int:
        """Bytes that the library holds while it runs, forward or backward."""
        if self.is_miopen:
            return self._miopen_bytes
        matrices = sum(weight.numel() for weight in self.weights if weight.dim() == _MATRIX_DIMENSIONS)
        states = self.samples * self.units * self.directions * self.layers * (3 * _GATES[self.mode] - 1)
        return (matrices + states) * self.data.element_size()

    @property
    def _miopen_bytes(self) -> int:
        values = self.tokens * self.units * self.directions * self.layers * _MIOPEN_VALUES[self.mode]
        return values * self.data.element_size()


def reserve_error(args: Sequence[Any], *, is_miopen: bool) -> tuple[int, int]:
    """Return by how many bytes the reserve space may be smaller, and larger: assumptions, half and as much again."""
    reserve_bytes = RecurrentCall.of(args, is_miopen=is_miopen).reserve_bytes
    return reserve_bytes // 2, reserve_bytes


def dropout_state_bytes(args: Sequence[Any], threads: int) -> int:
    """Return the bytes of the generators that a process keeps once a recurrent layer has dropped values."""
    return threads * _DROPOUT_STATE_BYTES if RecurrentCall.of(args).drops else 0


def recurrent_forward_steps(
    args: Sequence[Any], outputs: Sequence[Tensor], *, is_miopen: bool = False
) -> list[int | Bound | Tensor]:
    """Return what ``_cudnn_rnn`` (``cudnn/RNN.cpp``) allocates, in order: bytes of workspaces, and results.

    The workspaces are the input by steps, and that of the library.
    """
    call = RecurrentCall.of(args, is_miopen=is_miopen)
    *states, reserve, _ = outputs
    return [bytes_of(call.data) if call.is_transposed else 0, *states, call.workspace_bytes, reserve]


def recurrent_backward_steps(
    args: Sequence[Any], outputs: Sequence[Tensor], *, is_miopen: bool = False
) -> tuple[list[int | Bound | Tensor], list[int | Bound | Tensor]]:
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
