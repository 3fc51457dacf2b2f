"""Recurrent networks of a virtual card: cuDNN's, and the fused cells that torch runs without cuDNN."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

_LSTM, _GRU = 2, 3
_FUNCTIONS: dict[int, Callable[..., tuple[Tensor, ...]]] = {
    0: torch.rnn_relu,
    1: torch.rnn_tanh,
    _LSTM: torch.lstm,
    _GRU: torch.gru,
}
"""By ``cudnnRNNMode_t``."""


def lstm_cell(
    from_input: Tensor,
    from_hidden: Tensor,
    cell: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``_thnn_fused_lstm_cell``: the hidden state, the cell state and the four gates."""
    sums = from_input + from_hidden
    if input_bias is not None and hidden_bias is not None:
        sums = sums + input_bias + hidden_bias
    enter, forget, new, leave = sums.chunk(4, 1)
    gates = [enter.sigmoid(), forget.sigmoid(), new.tanh(), leave.sigmoid()]
    next_cell = gates[1] * cell + gates[0] * gates[2]
    return gates[3] * next_cell.tanh(), next_cell, torch.cat(gates, 1)


def lstm_cell_backward(
    of_hidden: Tensor | None,
    of_next_cell: Tensor | None,
    cell: Tensor,
    next_cell: Tensor,
    gates: Tensor,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute ``_thnn_fused_lstm_cell_backward_impl``: the gradients of the gates, the cell state and the biases."""
    enter, forget, new, leave = gates.chunk(4, 1)
    of_hidden = torch.zeros_like(cell) if of_hidden is None else of_hidden
    squashed = next_cell.tanh()
    of_cell = of_hidden * leave * (1 - squashed**2)
    if of_next_cell is not None:
        of_cell = of_cell + of_next_cell
    of_gates = torch.cat(
        [
            of_cell * new * enter * (1 - enter),
            of_cell * cell * forget * (1 - forget),
            of_cell * enter * (1 - new**2),
            of_hidden * squashed * leave * (1 - leave),
        ],
        1,
    )
    return of_gates, of_cell * forget, of_gates.sum(0) if has_bias else None


def cudnn_forward(
    data: Tensor,
    weights: list[Tensor],
    weights_per_layer: int,
    _weight_buffer: Tensor | None,
    hidden: Tensor,
    cell: Tensor | None,
    mode: int,
    _hidden_size: int,
    _projection_size: int,
    layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: list[int],
    _dropout_state: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Compute ``_cudnn_rnn``: the output and the last states.

    Raises:
        NotImplementedError: with dropout between layers, whose mask only cuDNN knows.
    """
    if dropout > 0 and train and layers > 1:
        raise NotImplementedError("dropout between the layers of a recurrent network")
    states = [hidden] if cell is None else [hidden, cell]
    has_biases = weights_per_layer >= 4  # noqa: PLR2004 - two weights and two biases, and perhaps a projection
    options = (has_biases, layers, 0.0, train, bidirectional)
    state = states if mode == _LSTM else hidden
    if batch_sizes:
        sizes = torch.tensor(batch_sizes, device="cpu")
        results = _FUNCTIONS[mode](data, sizes, state, weights, *options)
    else:
        results = _FUNCTIONS[mode](data, state, weights, *options, batch_first)
    return (*results, None)[:3]


def cudnn_backward(
    data: Tensor,
    weights: list[Tensor],
    weights_per_layer: int,
    weight_buffer: Tensor,
    hidden: Tensor,
    cell: Tensor | None,
    _output: Tensor,
    of_output: Tensor | None,
    of_hidden: Tensor | None,
    of_cell: Tensor | None,
    *options: object,
) -> tuple[Tensor | list[Tensor] | None, ...]:
    """Compute ``_cudnn_rnn_backward``: the gradients of the input, the states and the weights, by running it again."""
    forward_options = options[:-2]

    def differentiate() -> tuple[Tensor, ...]:
        leaves = [part.clone().requires_grad_() for part in (data, hidden, *([] if cell is None else [cell]), *weights)]
        inputs, states, parameters = leaves[0], leaves[1 : len(leaves) - len(weights)], leaves[-len(weights) :]
        states_given = (states[0], states[1] if cell is not None else None)
        results = cudnn_forward(inputs, parameters, weights_per_layer, weight_buffer, *states_given, *forward_options)  # type: ignore[arg-type]
        pairs = [
            (result, gradient)
            for result, gradient in zip(results, (of_output, of_hidden, of_cell), strict=True)
            if result is not None and gradient is not None
        ]
        return torch.autograd.grad([pair[0] for pair in pairs], leaves, [pair[1] for pair in pairs], allow_unused=True)

    with ThreadPoolExecutor(max_workers=1) as executor:  # kernels run below autograd, which a new thread has again
        gradients = executor.submit(differentiate).result()
    first, rest = gradients[: len(gradients) - len(weights)], gradients[-len(weights) :]
    return first[0], first[1], first[2] if cell is not None else None, list(rest)
