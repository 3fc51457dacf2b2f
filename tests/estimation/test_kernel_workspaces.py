"""Memory that CUDA kernels allocate inside: copies of arguments that they cannot read, and workspaces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.factories import python_spec
from tests.support.traced import traced_on_cuda
from tuner.estimation.trace import Bound, Category, SizedTrace, Trace
from tuner.estimation.tracing.kernel_workspaces import CudaKernels, contiguous_copies
from tuner.schemas.gpus import KernelProfile

aten = torch.ops.aten
FLOAT = 4
A100 = CudaKernels(KernelProfile(compute_capability=(8, 0), kind="cuda"))
MI250 = CudaKernels(KernelProfile(compute_capability=(9, 0), kind="rocm"))
SIZES = (4, 6, 10)
CONVOLUTION_BYTES = 16 * 16 * (4 + 8) * FLOAT
"""Of the larger convolution of ``traced_models:convolved``: images and results of a sample."""


@pytest.fixture(scope="module")
def on_cuda(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Trace]]:
    """Traces with CUDA's decisions, in one process; needs a C++ compiler."""
    cases = [
        {
            "name": name,
            "spec": python_spec(f"tests.support.traced_models:{name}").model_dump(mode="json"),
            "sizes": list(SIZES),
            "accumulates": False,
            "compute_capability": [8, 6],
        }
        for name in ("summed", "convolved", "tokens")
    ]
    return traced_on_cuda(cases, tmp_path_factory.mktemp("cache"))


def expanded(*shape: int) -> Tensor:
    """The gradient of a sum: one number, with strides of 0."""
    return torch.ones(()).expand(*shape)


@pytest.mark.parametrize(
    ("matrix", "copied"),
    [
        (torch.ones(6, 8), False),
        (torch.ones(8, 6).t(), False),
        (torch.ones(6, 20)[:, :8], False),
        (torch.ones(20, 6)[:8].t(), False),
        (torch.ones(6, 16)[:, ::2], True),
        (expanded(6, 8), True),
        (torch.ones(8).expand(6, 8), True),
        (torch.ones(6, 1).expand(6, 8), True),
    ],
    ids=["rows", "columns", "rows with gaps", "columns with gaps", "every other", "number", "one row", "one column"],
)
def test_matrices_that_cublas_cannot_read_are_copied(matrix: Tensor, *, copied: bool) -> None:
    """Copies follow ``prepare_matrix_for_cublas``."""
    nbytes = [matrix.numel() * FLOAT] * copied
    assert contiguous_copies(aten.mm.default, (torch.ones(3, 6), matrix)) == nbytes
    assert contiguous_copies(aten.mm.default, (matrix, torch.ones(8, 3))) == nbytes
    assert contiguous_copies(aten.addmm.default, (torch.ones(8), torch.ones(3, 6), matrix)) == nbytes


@pytest.mark.parametrize(
    ("batch", "copied"),
    [
        (torch.ones(2, 6, 8), False),
        (torch.ones(2, 8, 6).transpose(1, 2), False),
        (torch.ones(6, 2, 8).transpose(0, 1), False),
        (torch.ones(1, 6, 8).expand(2, 6, 8), False),
        (torch.ones(8, 2, 6).permute(1, 2, 0)[:, :, ::2].repeat(1, 1, 2), False),
        (expanded(2, 6, 8), True),
        (torch.ones(2, 1, 8).expand(2, 6, 8), True),
    ],
    ids=["rows", "columns", "heads inside", "one for all", "made", "number", "one row"],
)
def test_batches_of_matrices_that_cublas_cannot_read_are_copied(batch: Tensor, *, copied: bool) -> None:
    """Copies follow ``prepare_batch_matrix_for_cublas``: a stride of 0 between matrices is allowed, inside them not."""
    assert contiguous_copies(aten.bmm.default, (torch.ones(2, 3, 6), batch)) == [batch.numel() * FLOAT] * copied


def test_expanded_gradients_are_made_contiguous() -> None:
    """A layer norm copies the gradient of a sum, a GELU reads it as it is."""
    values, gradient = torch.ones(6, 8), expanded(6, 8)
    arguments = (gradient, values, [8], torch.ones(6, 1), torch.ones(6, 1), torch.ones(8), torch.ones(8), [True] * 3)
    assert contiguous_copies(aten.native_layer_norm_backward.default, arguments) == [values.numel() * FLOAT]
    assert contiguous_copies(aten.gelu_backward.default, (gradient, values)) == []


def inside(operator: Any, *arguments: Any, kernels: CudaKernels = A100) -> list[int]:
    """Bytes of the blocks that a kernel allocates inside."""
    blocks = kernels.temporary(operator, arguments, ())
    return [block.nbytes if isinstance(block, Bound) else block for block in blocks]


@pytest.mark.parametrize(
    ("rows", "columns", "nbytes"),
    [
        (2048, 4000, 65_536_000),
        (2048, 768, 12_582_912),
        (25_088, 384, 77_070_336),
        (2048, 256, 4_194_304),
        (2048, 221_185, 0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_rows_hold_partial_sums(rows: int, columns: int, nbytes: int, dtype: torch.dtype) -> None:
    """Sizes are those that torch 2.13 allocated on a virtual A100, without the semaphores of a few bytes."""
    gradient = torch.empty(rows, columns, dtype=dtype, device="meta")
    assert sum(inside(aten.sum.dim_IntList, gradient, [0], True)) == nbytes
    assert inside(aten.sum.dim_IntList, gradient, [1]) == []
    assert inside(aten.sum.default, gradient) == []
    assert inside(aten.sum.dim_IntList, gradient, [0], kernels=MI250) == []


def test_partial_sums_of_rows_are_bounded_at_every_size() -> None:
    """The bound, the blocks that fill a card, does not depend on the rows, and what it bounds grows with them."""
    blocks = [
        A100.temporary(aten.sum.dim_IntList, (torch.empty(rows, 768, device="meta"), [0]), ()) for rows in (4, 8, 10**6)
    ]
    bounds = [block for (block,) in blocks if isinstance(block, Bound)]
    assert len({bound.max_bytes for bound in bounds}) == 1
    assert 2 * bounds[0].unbounded_bytes == bounds[1].unbounded_bytes
    assert bounds[2].nbytes == bounds[2].max_bytes == 113_246_208


def test_small_integers_are_summed_in_64_bits() -> None:
    """Masks are counted so."""
    assert inside(aten.sum.default, torch.ones(6, 8, dtype=torch.bool)) == [6 * 8 * 8]
    assert inside(aten.sum.dim_IntList, torch.ones(6, 8, dtype=torch.int32), [0]) == [6 * 8 * 8]
    assert inside(aten.sum.default, torch.ones(6, 8, dtype=torch.int64)) == []


@pytest.mark.parametrize(
    ("dtype", "length", "width", "nbytes"),
    [
        (torch.bfloat16, 49, 16, 64 * 64 * FLOAT),
        (torch.bfloat16, 256, 64, 256 * 64 * FLOAT),
        (torch.bfloat16, 200, 96, 256 * 128 * FLOAT),
        (torch.float32, 49, 16, 64 * 64 * FLOAT),
        (torch.float32, 256, 64, 256 * 65 * FLOAT),
    ],
)
def test_efficient_attention_sums_gradients_in_blocks(dtype: torch.dtype, length: int, width: int, nbytes: int) -> None:
    """Beside a number for each row; in fp32 the product of gradient and result was there before, and may be larger."""
    heads = torch.empty(2, length, 3, width, dtype=dtype, device="meta").transpose(1, 2)
    arguments = (heads, heads, heads, heads, None, heads)
    operator = aten._scaled_dot_product_efficient_attention_backward.default
    assert inside(operator, *arguments) == [2 * 3 * length * FLOAT, 2 * 3 * nbytes]
    copied = inside(operator, heads.contiguous(), *arguments[1:])
    assert copied == [2 * 3 * length * FLOAT, 2 * 3 * nbytes, heads.numel() * heads.element_size()]


def test_flash_attention_copies_gradients_whose_heads_are_apart() -> None:
    """And results; the kernel reads tokens with their heads side by side."""
    heads = torch.empty(2, 128, 3, 64, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    operator = aten._scaled_dot_product_flash_attention_backward.default
    sums = [2 * 3 * 128 * 64 * FLOAT, 2 * 3 * 128 * FLOAT]
    assert inside(operator, heads, heads, heads, heads, heads) == sums
    assert inside(operator, heads.contiguous(), heads, heads, heads, heads) == [*sums, heads.numel() * 2]


def test_softmax_multiplies_its_gradient_by_its_result() -> None:
    """A whole tensor of weights, also where the gradient is of a half type and the result is not."""
    weights = torch.empty(2, 3, 6, 6, device="meta")
    assert inside(aten._softmax_backward_data.default, weights, weights, -1, torch.float32) == [weights.numel() * FLOAT]


def test_other_kernels_hold_a_copy_of_their_input() -> None:
    """Losses and rolls that are several kernels."""
    values = torch.empty(6, 8, device="meta")
    whole = values.numel() * FLOAT
    assert inside(aten.mse_loss.default, values, values) == [whole]
    assert inside(aten.binary_cross_entropy_with_logits.default, values, values) == [whole, whole]
    assert inside(aten.logsumexp.default, values, [1]) == [whole]
    assert inside(aten.roll.default, values, [1], [0]) == []
    assert inside(aten.roll.default, values, [1, 1], [0, 1]) == [whole]


def test_the_gradient_of_summed_logits_is_copied_once(on_cuda: dict[str, list[Trace]]) -> None:
    """Each of the two products of the head's backward pass holds a copy of the logits, one after the other."""
    for trace, size in zip(on_cuda["summed"], SIZES, strict=True):
        logits_bytes = size * 6 * 5000 * FLOAT
        copies = [
            block for block, nbytes in enumerate(trace.sizes) if nbytes == logits_bytes and _is_copy(trace, block)
        ]
        updates = 2  # the measured one, and its copy as a warm-up
        assert len(copies) == 2 * updates
        assert _most_held(trace, copies) == logits_bytes


def test_the_largest_convolution_is_known_at_every_size(on_cuda: dict[str, list[Trace]]) -> None:
    """The sum of its images and its results."""
    traces = on_cuda["convolved"]
    assert [trace.largest_convolution_bytes for trace in traces] == [size * CONVOLUTION_BYTES for size in SIZES]
    assert SizedTrace.of(traces).at(33).largest_convolution_bytes == 33 * CONVOLUTION_BYTES
    assert on_cuda["tokens"][0].largest_convolution_bytes == 0


def _is_copy(trace: Trace, block: int) -> bool:
    return trace.categories[block] is Category.WORKSPACE


def _most_held(trace: Trace, blocks: list[int]) -> int:
    held = most = 0
    for event in trace.events:
        block: Any = event if event >= 0 else ~event
        if block in blocks:
            held += trace.sizes[block] if event >= 0 else -trace.sizes[block]
            most = max(most, held)
    return most
