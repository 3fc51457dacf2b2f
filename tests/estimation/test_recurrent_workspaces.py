"""Memory of recurrent layers with cuDNN: the published report, and what follows from the arguments of a call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from batchwright.estimation.tracing.kernel_workspaces.device_kernels import CpuKernels, CudaKernels
from batchwright.estimation.tracing.kernel_workspaces.recurrent_workspaces import (
    RNN_MODES,
    RecurrentCall,
    recurrent_forward_steps,
)
from batchwright.schemas.gpus import KernelProfile

aten = torch.ops.aten
A100 = CudaKernels(KernelProfile(compute_capability=(8, 0), kind="cuda", resident_threads=108 * 2048))
MI300X = CudaKernels(KernelProfile(compute_capability=(9, 4), kind="rocm"))
FLOAT = 4
MIB = 1024**2


def call(layer: nn.RNNBase, samples: int, steps: int, **changes: Any) -> list[Any]:
    """Positional arguments of ``_cudnn_rnn`` for a layer."""
    shape = (samples, steps) if layer.batch_first else (steps, samples)
    directions = 1 + layer.bidirectional
    state = torch.empty(layer.num_layers * directions, samples, layer.hidden_size, device="meta")
    arguments = {
        "input": torch.empty(*shape, layer.input_size, device="meta"),
        "weight": list(layer.parameters()),
        "weight_stride0": 4,
        "weight_buf": None,
        "hx": state,
        "cx": state if layer.mode == "LSTM" else None,
        "mode": RNN_MODES[layer.mode.lower()],
        "hidden_size": layer.hidden_size,
        "proj_size": 0,
        "num_layers": layer.num_layers,
        "batch_first": layer.batch_first,
        "dropout": layer.dropout,
        "train": True,
        "bidirectional": layer.bidirectional,
        "batch_sizes": [],
        "dropout_state": None,
    }
    return list((arguments | changes).values())


@pytest.mark.parametrize(
    ("kind", "dtype", "steps", "samples", "width", "units", "layers", "directions", "reserve_bytes", "workspace_bytes"),
    [
        (nn.LSTM, torch.float32, 256, 379, 512, 512, 2, 1, 2_185_756_928, 1_241_513_984),
        (nn.LSTM, torch.float16, 256, 379, 512, 512, 2, 1, 1_092_878_592, 629_145_600),
        (nn.LSTM, torch.float32, 128, 512, 1024, 1024, 1, 1, 1_342_177_536, 1_675_629_056),
        (nn.LSTM, torch.float32, 250, 100, 123, 320, 4, 1, 736_000_256, 223_074_304),
        (nn.LSTM, torch.bfloat16, 128, 32, 256, 256, 2, 2, 46_137_600, 71_303_168),
        (nn.GRU, torch.float32, 256, 379, 512, 512, 2, 1, 2_583_167_232, 1_049_280_000),
        (nn.GRU, torch.float16, 256, 100, 512, 512, 2, 1, 340_787_456, 157_623_808),
        (nn.GRU, torch.bfloat16, 128, 512, 1024, 1024, 1, 1, 805_306_624, 832_569_344),
        (nn.GRU, torch.float32, 128, 32, 256, 256, 1, 2, 50_331_904, 75_497_472),
        (nn.RNN, torch.float32, 256, 379, 512, 512, 2, 1, 596_115_712, 1_040_891_392),
    ],
)
def test_the_memory_is_that_of_an_h100(  # noqa: PLR0913, PLR0917 - the columns of a table
    kind: Callable[..., nn.RNNBase],
    dtype: torch.dtype,
    steps: int,
    samples: int,
    width: int,
    units: int,
    layers: int,
    directions: int,
    reserve_bytes: int,
    workspace_bytes: int,
) -> None:
    """Measured with torch 2.11 and cuDNN 9.19; the caching allocator's rounding, up to 2 MiB, is in the workspace."""
    layer = kind(width, units, layers, bidirectional=directions == 2, device="meta", dtype=dtype)
    found = RecurrentCall.of(
        call(layer, samples, steps, input=torch.empty(steps, samples, width, dtype=dtype, device="meta"))
    )
    assert found.reserve_bytes == reserve_bytes
    assert found.workspace_bytes == pytest.approx(workspace_bytes, rel=0.06, abs=2 * MIB)


@pytest.mark.parametrize(
    ("kind", "parameters", "reserve_bytes"), [(nn.LSTM, 3_034_880, 736_000_000), (nn.GRU, 2_276_160, 864_000_000)]
)
def test_the_report_of_a_p100(kind: Callable[..., nn.RNNBase], parameters: int, reserve_bytes: int) -> None:
    """https://github.com/pytorch/pytorch/issues/2895, whose parameters include a head of 320 x 10 and its bias."""
    layer = kind(123, 320, 4, device="meta")
    assert sum(parameter.numel() for parameter in layer.parameters()) == parameters
    assert RecurrentCall.of(call(layer, 100, 250)).reserve_bytes == pytest.approx(reserve_bytes, abs=256)


def test_a_bit_is_kept_of_each_value_that_may_be_dropped() -> None:
    """Between layers; an H100 keeps an eighth of a byte for each."""
    kept, dropped = (
        RecurrentCall.of(call(nn.LSTM(8, 16, 3, dropout=share, device="meta"), 4, 6)) for share in (0, 0.1)
    )
    assert dropped.reserve_bytes - kept.reserve_bytes == 4 * 6 * 16 * 2 // 8


@pytest.mark.parametrize(("kind", "values"), [(nn.LSTM, 6), (nn.GRU, 4), (nn.RNN, 1)])
def test_miopen_keeps_twice_its_workspace(kind: Callable[..., nn.RNNBase], values: int) -> None:
    """Values of 16 units in 2 layers and directions, for 24 tokens (``workspaceScale`` in MIOpen's ``rnn.cpp``)."""
    layer = kind(8, 16, 2, bidirectional=True, device="meta")
    arguments = call(layer, 4, 6)
    found = RecurrentCall.of(arguments, is_miopen=True)
    assert found.workspace_bytes == values * 24 * 16 * 2 * 2 * FLOAT
    assert found.reserve_bytes == 2 * found.workspace_bytes
    assert MI300X.error(aten._cudnn_rnn.default, arguments, ()) == (found.workspace_bytes, found.reserve_bytes)


@pytest.mark.parametrize(
    ("samples", "steps", "width", "units", "nbytes"),
    [
        (16, 64, 32, 64, 1_126_968),
        (32, 64, 64, 64, 2_249_272),
        (16, 64, 64, 128, 2_183_736),
        (4, 96, 256, 256, 1_618_488),
        (64, 48, 256, 256, 12_923_448),
    ],
)
def test_onednn_holds_the_gates_of_all_steps(samples: int, steps: int, width: int, units: int, nbytes: int) -> None:
    """Bytes are those that torch's profiler saw in both passes of an LSTM, with torch 2.13 on x86-64."""
    data, output = torch.empty(steps, samples, width), torch.empty(steps, samples, units)
    forward, backward = aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default
    (held,) = CpuKernels().temporary(forward, [data] + [None] * 15, (output,))
    assert held == pytest.approx(nbytes, rel=0.01)
    assert CpuKernels().temporary(backward, [data, *[None] * 6, output, *[None] * 15], ()) == [held]
    assert CpuKernels().temporary(aten.mm.default, (data, data), (output,)) == ()


def test_nothing_is_kept_without_a_backward_pass() -> None:
    """A model in eval mode."""
    layer = nn.LSTM(8, 16, device="meta")
    assert RecurrentCall.of(call(layer, 4, 6, train=False)).reserve_bytes == 0


def test_both_directions_keep_values() -> None:
    """Twice those of one direction, and twice those between layers."""
    one, two = (nn.GRU(8, 16, 2, bidirectional=both, device="meta") for both in (False, True))
    kept = [RecurrentCall.of(call(layer, 4, 6)).reserve_bytes for layer in (one, two)]
    assert kept[1] - 256 == 2 * (kept[0] - 256)


def test_an_input_with_samples_first_is_copied() -> None:
    """The kernels read steps first; the copy is the first block."""
    plain, first = (nn.LSTM(8, 16, batch_first=first, device="meta") for first in (False, True))
    results = [torch.empty(1, device="meta")] * 5
    copies = [recurrent_forward_steps(call(layer, 4, 6), results)[0] for layer in (plain, first)]
    assert copies == [0, 4 * 6 * 8 * FLOAT]


def test_generators_are_kept_where_values_are_dropped_between_layers() -> None:
    """One for each thread of the card, once."""
    operator = aten._cudnn_rnn.default
    assert A100.persistent(operator, call(nn.LSTM(8, 16, 2, device="meta"), 4, 6)) == ()
    ((_, nbytes),) = A100.persistent(operator, call(nn.LSTM(8, 16, 2, dropout=0.1, device="meta"), 4, 6))
    assert nbytes == 48 * 108 * 2048
