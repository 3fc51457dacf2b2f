"""Memory of cuDNN's recurrent layers on a card: the reserve space and the workspaces of single calls.

gpu_evidence_parts.py runs this. The formulas of `recurrent_workspaces.py` were fitted to these figures, and are shown
beside them. A workspace is the peak of the allocated bytes during a call less the bytes allocated after it, so that it
has the caching allocator's rounding, up to 2 MiB.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from batchwright.estimation.tracing.kernel_workspaces.recurrent_workspaces import RNN_MODES, RecurrentCall

Row = dict[str, Any]
_LAYERS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN}


@dataclass(frozen=True)
class Shape:
    """The sizes of one call."""

    steps: int
    samples: int
    width: int
    units: int
    layers: int
    directions: int = 1


SHAPES = (
    *(Shape(128, 32, 256, 256, layers) for layers in (1, 2, 3)),
    *(Shape(128, 32, width, 256, 2) for width in (64, 512)),
    *(Shape(128, samples, 256, 256, layers, 2) for samples in (32, 256) for layers in (1, 2)),
    Shape(128, 32, 256, 512, 1),
    Shape(64, 7, 100, 80, 2),
    Shape(16, 512, 256, 256, 2),
    Shape(512, 16, 256, 256, 2),
    *(Shape(256, samples, 512, 512, 2) for samples in (64, 100, 379)),
    Shape(250, 100, 123, 320, 4),
    Shape(128, 512, 1024, 1024, 1),
    Shape(20, 64, 1024, 2048, 1),
)


def measure(device: torch.device) -> Iterator[Row]:
    """Yield the bytes of each call, in fp32 and bf16."""
    for dtype in (torch.float32, torch.bfloat16):
        for kind in _LAYERS:
            for shape in SHAPES:
                row = {"kind": kind, "dtype": str(dtype).removeprefix("torch."), **asdict(shape)}
                try:
                    yield {**row, **_measured(kind, shape, dtype, device)}
                except RuntimeError as error:  # a card may lack a kernel, or the memory
                    yield {**row, "failed": str(error)[:200]}
                torch.cuda.empty_cache()


def _measured(kind: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> Row:
    layer = _LAYERS[kind](shape.width, shape.units, shape.layers, bidirectional=shape.directions == 2)
    layer = layer.to(device, dtype)
    data = torch.randn(shape.steps, shape.samples, shape.width, device=device, dtype=dtype)
    state = torch.zeros(shape.layers * shape.directions, shape.samples, shape.units, device=device, dtype=dtype)
    cell = state.clone() if kind == "lstm" else None
    weights = [weight.detach() for weight in layer.parameters()]
    options: tuple[Any, ...] = (
        RNN_MODES[kind],
        shape.units,
        0,
        shape.layers,
        False,
        0.0,
        True,
        shape.directions == 2,
        [],
        None,
    )
    arguments = (data, weights, 4, None, state, cell, *options)
    forward = torch.ops.aten._cudnn_rnn  # noqa: SLF001 - the call that nn.LSTM makes
    output, _, _, reserve, buffer = forward(*arguments)
    workspace = _beside(lambda: forward(*arguments))

    def backward() -> tuple[Tensor | None, ...]:
        found: tuple[Tensor | None, ...] = torch.ops.aten._cudnn_rnn_backward(  # noqa: SLF001 - as above
            data,
            weights,
            4,
            buffer,
            state,
            cell,
            output,
            output,
            None,
            None,
            *options,
            reserve,
            [True, True, kind == "lstm", True],
        )
        return found

    call = RecurrentCall.of(arguments)
    return {
        "reserve_bytes": reserve.nbytes,
        "workspace_bytes": workspace,
        "backward_workspace_bytes": _beside(backward),
        "assumed_reserve_bytes": call.reserve_bytes,
        "assumed_workspace_bytes": call.workspace_bytes,
    }


def _beside(call: Callable[[], object]) -> int:
    """Return the most bytes that a call holds beside what it leaves, from its second time on."""
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        found = call()
        torch.cuda.synchronize()
        beside = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        del found
    return beside
