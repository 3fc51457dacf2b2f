"""Memory that CUDA kernels allocate inside: copies of arguments that they cannot read, and workspaces."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batchwright.estimation.allocator.config import rounded_up
from batchwright.estimation.trace import Category, RowSums, SizedTrace, Trace
from batchwright.estimation.tracing.kernel_workspaces.contiguous_copies import contiguous_copies
from batchwright.estimation.tracing.kernel_workspaces.device_kernels import (
    CudaKernels,
    in_order_of_allocation,
    representative,
)
from batchwright.estimation.tracing.kernel_workspaces.kept_storages import in_kept_storage
from batchwright.estimation.tracing.kernel_workspaces.library_calls import library_call
from batchwright.estimation.tracing.torch_internals import (
    EFFICIENT_ATTENTION_BACKWARD,
    FLASH_ATTENTION_BACKWARD,
    FOURIER_TRANSFORMS,
    OpOverload,
)
from batchwright.hardware.gpu_lookup import find_gpu
from batchwright.hardware.workspace_tables import VARIABLE, MeasuredWorkspaces
from batchwright.schemas.gpus import KernelProfile, MeasuredWorkspace, WorkspaceFile, WorkspaceTable
from batchwright.torch_internals import TorchDispatchMode
from tests.support.factories import python_spec, transformers_spec
from tests.support.traced import traced_on_cuda

aten = torch.ops.aten
FLOAT = 4
A100_PROFILE = KernelProfile(compute_capability=(8, 0), kind="cuda")
A100 = CudaKernels(A100_PROFILE)
MI250 = CudaKernels(KernelProfile(compute_capability=(9, 0), kind="rocm"))
SIZES = (4, 6, 10)
CONVOLUTION_BYTES = 16 * 16 * (4 + 8) * FLOAT
"""Of the larger convolution of ``traced_models:convolved``: images and results of a sample."""


@pytest.fixture(scope="module")
def on_cuda() -> dict[str, list[Trace]]:
    """Traces with CUDA's decisions, in one process; needs a C++ compiler."""
    cases = [
        {
            "name": name,
            "spec": python_spec(f"tests.support.traced_models:{name}").model_dump(mode="json"),
            "sizes": list(SIZES),
            "accumulates": False,
            "compute_capability": [8, 6],
        }
        for name in ("summed", "convolved", "tokens", "taught", "untaught")
    ]
    patches = {"model_type": "vit", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    spec = transformers_spec("image-classification", patches, batch={"image_size": 224})
    cases.append({**cases[0], "name": "patches", "spec": spec.model_dump(mode="json")})
    return traced_on_cuda(cases)


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
    return [block if isinstance(block, int) else block.nbytes for block in blocks if block]


@pytest.mark.parametrize(
    ("transform", "signals", "copies"),
    [
        (torch.fft.rfft, torch.ones(4, 6, 8), []),
        (torch.fft.rfft2, torch.ones(4, 6, 8, 8), []),
        (torch.fft.irfft, torch.ones(4, 6, 5, dtype=torch.complex64), [4 * 6 * 5]),
        (torch.fft.fft, torch.ones(4, 6, 8, dtype=torch.complex64), []),
        (partial(torch.fft.fft, dim=1), torch.ones(4, 6, 8, dtype=torch.complex64), [4 * 6 * 8]),
        (partial(torch.fft.fftn, dim=(1, 2, 3, 4)), torch.ones(2, 3, 4, 5, 6, dtype=torch.complex64), [720]),
    ],
    ids=["real", "images", "to real", "complex", "inner", "four dimensions"],
)
def test_fourier_transforms_copy_and_have_a_work_area(
    transform: Callable[[Tensor], Tensor], signals: Tensor, copies: list[int]
) -> None:
    """Copies in complex elements, then a work area of one element for each of the signals, of at most eight."""
    calls = []

    class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's types
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            calls.append((func, args, [result]))
            return result

    with Calls():  # type: ignore[no-untyped-call] # torch's types
        transform(signals)
    ((func, args, results),) = (call for call in calls if call[0] in FOURIER_TRANSFORMS)
    area = max(args[0].numel(), results[0].numel()) * 2 * FLOAT
    assert list(A100.temporary(func, args, results)) == [*(2 * FLOAT * elements for elements in copies), area]
    assert A100.error(func, args, results) == (area, 7 * area)
    ordered = in_order_of_allocation(func, ["workspace"] * (1 + len(copies)), results)
    assert ordered[0] is results[0]


@pytest.mark.parametrize(
    ("rows", "columns", "nbytes"),
    [
        (512, 1024, 0),
        (1020, 1024, 0),
        (1021, 1024, 8_388_608),
        (5000, 30, 0),
        (8000, 64, 1_032_192),
        (100_000, 7, 5488),
        (200_000, 768, 113_246_208),
        (300_000, 1024, 153_616_384),
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


@pytest.mark.parametrize(
    ("shape", "dimension", "nbytes"),
    [
        ((4, 3136, 48), 1, 4_816_896),
        ((16, 3136, 64), -2, 25_690_112),
        ((8, 2, 5000, 32), 2, 20_709_376),
        ((2, 5000, 4, 32), 1, 10_354_688),
        ((3, 2000, 30), 1, 0),
        ((600, 2048, 512), 1, 0),
    ],
)
@pytest.mark.parametrize("operator", [aten.sum.dim_IntList, aten.mean.dim])
def test_sums_over_a_dimension_between_others_hold_partial_sums(
    shape: tuple[int, ...], dimension: int, nbytes: int, operator: Any
) -> None:
    """Sizes are those that torch 2.13 allocated on a virtual A10G, without the semaphores of a few bytes."""
    values = torch.empty(shape, device="meta")
    assert inside(operator, values, [dimension], kernels=CudaKernels(find_gpu("A10G").profile)) == [nbytes]


def test_a_matrix_of_two_gibibytes_is_summed_in_halves() -> None:
    """As torch 2.13 did on a virtual A100, less the semaphores."""
    gradient = torch.empty(10**6, 768, device="meta")
    assert inside(aten.sum.dim_IntList, gradient, [0]) == [192_282_624]


def test_partial_sums_are_those_of_the_card() -> None:
    """A card with fewer threads holds fewer of them, down to none, and one that is not known those of the largest."""
    rows = torch.empty(18_432, 768, device="meta")
    held = {
        name: inside(aten.sum.dim_IntList, rows, [0], kernels=CudaKernels(representative(find_gpu(name).profile)))
        for name in ("T4", "V100-16GB", "A100-80GB", "A30", "48GiB", "A16")
    }
    assert held["A100-80GB"] == held["48GiB"] == [113_246_208]
    assert held["V100-16GB"] == [214 * 393_216]  # 1,280 blocks, six of which share the columns
    assert held["T4"] == [54 * 393_216]  # 320 blocks
    assert held["A16"][0] < held["T4"][0] < held["A30"][0] < held["V100-16GB"][0]
    wide = torch.empty(18_432, 60_000, device="meta")
    assert inside(aten.sum.dim_IntList, wide, [0], kernels=CudaKernels(find_gpu("A16").profile)) == [0]


def test_a_trace_takes_the_partial_sums_of_each_card(on_cuda: dict[str, list[Trace]]) -> None:
    """The blocks that depend on a card's threads are those of the card, at every size, and no other block changes."""
    sized = SizedTrace.of([trace.on_card(84 * 1536) for trace in on_cuda["tokens"]])
    depends = {block for block, sums in sized.trace.bounds.items() if isinstance(sums, RowSums)}
    assert depends
    assert all(sized.at(4).sizes[block] == 0 < sized.at(4000).sizes[block] for block in depends)
    trace = on_cuda["tokens"][-1].changed(
        {block: RowSums(rows=18_432, columns=64, width=64, element_bytes=4, threads=2048) for block in depends}
    )
    small, large = trace.on_card(2048), trace.on_card(84 * 1536)
    for block, (least, most) in enumerate(zip(small.sizes, large.sizes, strict=True)):
        assert least < most if block in depends else least == most
    assert (small.events, small.categories) == (trace.events, trace.categories)
    assert small == trace


def test_small_integers_are_summed_in_64_bits() -> None:
    """Masks are counted so."""
    assert inside(aten.sum.default, torch.ones(6, 8, dtype=torch.bool)) == [6 * 8 * 8]
    assert inside(aten.sum.dim_IntList, torch.ones(6, 8, dtype=torch.int32), [0]) == [6 * 8 * 8]
    assert inside(aten.sum.default, torch.ones(6, 8, dtype=torch.int64)) == []


@pytest.mark.parametrize(
    ("dtype", "length", "width", "workspaces"),
    [
        (torch.float16, 256, 32, [6144, 393_600]),
        (torch.float16, 200, 96, [4800, 786_624]),
        (torch.float16, 1024, 128, [24_576, 3_146_496]),
        (torch.float16, 200, 192, [4800, 4_325_952]),
        (torch.float16, 512, 256, [12_288, 9_438_720]),
        (torch.float32, 256, 32, [6144, 393_600]),
        (torch.float32, 200, 96, [4800, 786_816]),
        (torch.float32, 200, 192, [4800, 1_180_224]),
        (torch.float32, 256, 64, [393_216, 6144, 6144]),
        (torch.float32, 1024, 128, [3_145_728, 24_576, 24_576]),
        (torch.float32, 512, 256, [3_145_728, 12_288, 12_288]),
    ],
)
def test_efficient_attention_sums_gradients_in_tiles(
    dtype: torch.dtype, length: int, width: int, workspaces: list[int]
) -> None:
    """Blocks are those that torch 2.13 allocated on a virtual A100 for 2 samples with 3 heads.

    In fp32 a product, its sum and a copy of that come before the sums, which are held after them.
    """
    heads = torch.empty(2, length, 3, width, dtype=dtype, device="meta").transpose(1, 2)
    arguments = (heads, heads, heads, heads, None, heads)
    operator = aten._scaled_dot_product_efficient_attention_backward.default
    assert inside(operator, *arguments) == workspaces
    copied = inside(operator, heads.contiguous(), *arguments[1:])
    assert copied == [heads.numel() * heads.element_size(), *workspaces]


@pytest.mark.parametrize(
    ("card", "dtype", "width", "workspaces"),
    [
        ("A10G", torch.float16, 96, [1176, 393_408]),
        ("A10G", torch.float16, 128, [1176, 1_376_448]),
        ("RTX 5090", torch.float16, 96, [1176, 1_376_448]),
        ("A10G", torch.float32, 96, [1176, 196_800]),
        ("H100-80GB", torch.float32, 96, [1176, 393_408]),
        ("T4", torch.float16, 128, [1176, 393_408]),
        ("P100-16GB", torch.float16, 128, [1176, 590_016]),
        ("P100-16GB", torch.float32, 32, [37_632, 1176, 1176]),
    ],
)
def test_the_tiles_of_efficient_attention_depend_on_the_card(
    card: str, dtype: torch.dtype, width: int, workspaces: list[int]
) -> None:
    """And whether it sums the gradients of keys and values: as virtual cards do for 49 queries and 140 keys."""
    queries = torch.empty(2, 49, 3, width, dtype=dtype, device="meta").transpose(1, 2)
    keys = torch.empty(2, 140, 3, width, dtype=dtype, device="meta").transpose(1, 2)
    kernels = CudaKernels(representative(find_gpu(card).profile))
    taken = kernels.temporary(EFFICIENT_ATTENTION_BACKWARD, (queries, queries, keys, keys, None, queries), [])
    assert [each for each in taken if each] == workspaces


def test_the_keys_of_many_heads_are_not_divided() -> None:
    """Of more than 100 heads of all samples, the sums are those of 64 keys."""
    heads = torch.empty(101, 140, 1, 256, dtype=torch.float16, device="meta").transpose(1, 2)
    tiles = 2 * 4 * (128 * 64 * FLOAT + 16)
    *_, sums, _ = A100.temporary(EFFICIENT_ATTENTION_BACKWARD, (heads,) * 4, [])
    assert sums == 101 * (tiles + 64 * 2 * 256 * FLOAT)


def test_flash_attention_copies_gradients_whose_heads_are_apart() -> None:
    """And results; the kernel reads tokens with their heads side by side."""
    heads = torch.empty(2, 128, 3, 64, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    operator = aten._scaled_dot_product_flash_attention_backward.default
    sums = [2 * 3 * 128 * FLOAT, 2 * 3 * 128 * 64 * FLOAT]
    assert inside(operator, heads, heads, heads, heads, heads) == sums
    assert inside(operator, heads.contiguous(), heads, heads, heads, heads) == [heads.numel() * 2, *sums]


def test_softmax_multiplies_its_gradient_by_its_result() -> None:
    """A whole tensor of weights, also where the gradient is of a half type and the result is not."""
    weights = torch.empty(2, 3, 6, 6, device="meta")
    assert inside(aten._softmax_backward_data.default, weights, weights, -1, torch.float32) == [weights.numel() * FLOAT]


@pytest.mark.parametrize(("mode", "is_summed"), [("sum", True), ("mean", True), ("max", False)])
def test_the_gradient_of_an_embedding_bag_is_summed_by_segment(mode: str, *, is_summed: bool) -> None:
    """As that of an embedding, for sums and means of rows; maxima are written into the gradient."""
    bags, indices, rows = torch.empty(8, 64, device="meta"), torch.empty(80, dtype=torch.int64, device="meta"), 1000
    arguments = (bags, *[indices] * 5, rows, False, ("sum", "mean", "max").index(mode), False, None)
    of_embedding = inside(aten.embedding_dense_backward.default, bags, indices, rows, -1, False)
    assert inside(aten._embedding_bag_backward.default, *arguments) == of_embedding * is_summed
    assert max(of_embedding) > 80 * 64 * FLOAT


def test_other_kernels_hold_a_copy_of_their_input() -> None:
    """Losses and rolls that are several kernels."""
    values = torch.empty(6, 8, device="meta")
    whole = values.numel() * FLOAT
    for loss in (aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss):
        assert inside(loss.default, values, values) == [whole]
        assert inside(loss.default, values, values, 0) == []
    assert inside(aten.soft_margin_loss_backward.default, torch.ones(()), values, values) == [whole, whole]
    assert inside(aten.logsumexp.default, values, [1]) == [whole]
    assert inside(aten.im2col.default, values) == [whole]
    assert inside(aten.roll.default, values, [1], [0]) == []
    assert inside(aten.roll.default, values, [1, 1], [0, 1]) == [whole]


def test_a_loss_keeps_the_storage_of_its_terms() -> None:
    """Until the loss itself is freed; so do the gradients of ``unfold``, whose patches overlap."""
    values, patches = torch.ones(6, 8), torch.ones(2, 27, 16)
    for loss, *options in ((aten.mse_loss,), (aten.smooth_l1_loss,), (aten.binary_cross_entropy, None)):
        for reduction, elements in ((0, 1), (1, 48), (2, 48)):
            number = torch.ones(())
            kept = in_kept_storage(loss.default, (values, values, *options, reduction), number)
            assert (kept.shape, kept.untyped_storage().nbytes()) == (number.shape, elements * FLOAT)
    images = in_kept_storage(aten.col2im.default, (patches, [4, 4]), torch.ones(2, 3, 4, 4))
    assert (images.shape, images.stride()) == ((2, 3, 4, 4), (48, 16, 4, 1))
    assert images.untyped_storage().nbytes() == patches.numel() * FLOAT


def test_unfolded_images_are_contiguous() -> None:
    """The kernel copies images in channels last, whose strides torch's rule for fake tensors keeps."""
    images = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    patches = in_kept_storage(aten.im2col.default, (images,), torch.ones(2, 16, 27).transpose(1, 2))
    assert patches.is_contiguous()
    assert contiguous_copies(aten.im2col.default, (images,)) == [images.numel() * FLOAT]


def test_gradients_of_distances_hold_those_of_all_pairs() -> None:
    """A gradient for each pair of rows, as wide as a row."""
    rows, others = torch.empty(2, 5, 3, device="meta"), torch.empty(2, 7, 3, device="meta")
    gradient = torch.empty(2, 5, 7, device="meta")
    assert inside(aten._cdist_backward.default, gradient, rows, others, 1.0, gradient) == [2 * 5 * 7 * 3 * FLOAT]
    assert inside(aten._pdist_backward.default, rows[0, :, 0], rows[0], 2.0, rows) == [4 * 5 * 3 * FLOAT]


@pytest.mark.parametrize(
    ("shape", "dimension", "bytes_of_a_value"),
    [((5000,), 0, 8 + 12), ((64, 5000), 1, 8 + 12 + 12), ((128, 5000), 1, 8 + 12), ((5000, 64), 0, 32 + 4 + 12)],
    ids=["one row", "few rows", "many rows", "columns"],
)
def test_long_rows_are_sorted_by_cub(shape: tuple[int, ...], dimension: int, bytes_of_a_value: int) -> None:
    """As measured on virtual cards. Shorter rows are sorted in place."""
    values = torch.empty(shape, device="meta")
    assert inside(aten.sort.default, values, dimension) == [values.numel() * bytes_of_a_value]
    assert inside(aten.sort.default, torch.empty(64, 4096, device="meta")) == [4096 * 8]


def test_values_are_converted_before_they_are_added() -> None:
    """Booleans to 64 bits; what is real of complex numbers is computed as complex numbers."""
    values = torch.empty(6, 8, device="meta")
    assert inside(aten.cumsum.default, values, 1) == []
    assert inside(aten.cumsum.default, values > 0, 1) == [values.numel() * 8]
    assert inside(aten.abs.default, values) == []
    assert inside(aten.abs.default, torch.complex(values, values)) == [values.numel() * 2 * FLOAT]


def test_means_by_index_count_their_terms() -> None:
    """As many as there are sums, ones as many as terms, and a byte for each sum."""
    sums, terms = torch.empty(6, 8, device="meta"), torch.empty(9, 8, device="meta")
    scatter = aten.scatter_reduce.two
    assert inside(scatter, sums, 0, terms.long(), terms, "mean") == [48 * FLOAT, 72 * FLOAT, 48]
    assert inside(scatter, sums, 0, terms.long(), terms, "amax") == []


def test_convolutions_copy_into_the_format_of_images_or_weight() -> None:
    """All in channels last, if the images or the weight are; one channel has both formats, but not by its strides."""
    images, weight = torch.ones(2, 8, 4, 4), torch.ones(16, 8, 3, 3)
    gradient = torch.ones(2, 16, 2, 2)
    last = [each.contiguous(memory_format=torch.channels_last) for each in (gradient, images, weight)]
    backward = aten.convolution_backward.default
    nbytes = [each.numel() * FLOAT for each in (gradient, images, weight)]
    assert contiguous_copies(backward, (gradient, images, weight)) == []
    assert contiguous_copies(backward, last) == []
    assert contiguous_copies(backward, (gradient, last[1], weight)) == [nbytes[0], nbytes[2]]
    assert contiguous_copies(backward, (gradient, images, last[2])) == nbytes[:2]
    depthwise = torch.ones(8, 1, 3, 3)
    convolution = aten.convolution.default
    assert contiguous_copies(convolution, (images, depthwise)) == []
    assert contiguous_copies(convolution, (images, depthwise.to(memory_format=torch.channels_last))) == [nbytes[1]]


def test_what_a_pass_changes_is_copied(on_cuda: dict[str, list[Trace]]) -> None:
    """A teacher's weight and bias are; those of a teacher that stays are not."""
    for taught, untaught in zip(on_cuda["taught"], on_cuda["untaught"], strict=True):
        for nbytes in (8 * 32 * FLOAT, 32 * FLOAT):
            assert taught.sizes.count(nbytes) > untaught.sizes.count(nbytes)


def test_a_tensor_that_is_no_buffer_stays_on_the_host_until_it_is_moved(on_cuda: dict[str, list[Trace]]) -> None:
    """The first pass moves the table: a block for it and, from the next pass on, a copy."""
    for trace in on_cuda["untaught"]:
        began = trace.position("first-update")
        table = [block for block, nbytes in enumerate(trace.sizes) if nbytes == 5000 * FLOAT]
        assert table
        assert not set(table) & set(trace.events[:began])


def test_distances_are_made_of_products(on_cuda: dict[str, list[Trace]]) -> None:
    """Both sides with two more columns, for norms and ones (``_euclidean_dist``)."""
    for trace, size in zip(on_cuda["untaught"], SIZES, strict=True):
        updates = 2
        assert trace.sizes.count(size * (32 + 2) * FLOAT) == 2 * updates


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


def test_the_error_of_convolutions_is_known_at_every_size(on_cuda: dict[str, list[Trace]]) -> None:
    """Images and results of the largest convolution downwards, twice as much upwards, where none was measured."""
    traces = on_cuda["convolved"]
    errors = [(size * CONVOLUTION_BYTES, 2 * size * CONVOLUTION_BYTES) for size in SIZES]
    assert [trace.workspace_error for trace in traces] == errors
    assert SizedTrace.of(traces).at(33).workspace_error == (33 * CONVOLUTION_BYTES, 66 * CONVOLUTION_BYTES)
    assert on_cuda["summed"][0].workspace_error == (0, 0)


def measured(kind: str, *shares: int, blas_workspace_bytes: int | None = None) -> CudaKernels:
    """Kernels with workspaces that this test has made up: multiples of the bytes of the tensors."""
    rows = tuple(
        MeasuredWorkspace(kind=kind, shape="of a test", operand_bytes=1, workspace_bytes=share) for share in shares
    )
    table = WorkspaceTable(
        compute_capability=(8, 0),
        gpu="A card",
        date="2026-01-31",
        torch="2.13",
        cudnn="9",
        driver="580",
        blas_workspace_bytes=blas_workspace_bytes,
        workspaces=rows,
    )
    return CudaKernels(A100_PROFILE, MeasuredWorkspaces(table))


def convolution(dtype: torch.dtype = torch.float32, *, layout: torch.memory_format, groups: int = 1) -> tuple[Any, ...]:
    """Arguments and results of a convolution of 8 channels: 2 x 8 x 16 x 16 images and results, 8 filters of 3 x 3."""
    images = torch.empty(2, 8, 16, 16, dtype=dtype, device="meta").contiguous(memory_format=layout)
    weight = torch.empty(8, 8 // groups, 3, 3, dtype=dtype, device="meta")
    return (images, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], groups), (torch.empty_like(images),)


IMAGES, WEIGHT = 2 * 8 * 16 * 16, 8 * 8 * 3 * 3
PLAIN, LAST = torch.contiguous_format, torch.channels_last


def test_the_gradient_of_a_convolutions_bias_is_a_sum_of_rows(on_cuda: dict[str, list[Trace]]) -> None:
    """Of images whose channels are neighbours, such as a transformer's patches."""
    for size, taken in zip(SIZES, on_cuda["patches"], strict=True):
        sums = [bound for bound in taken.bounds.values() if isinstance(bound, RowSums)]
        assert (size * 14 * 14, 64) in [(each.rows, each.columns) for each in sums]


@pytest.mark.parametrize("kernel", [FLASH_ATTENTION_BACKWARD, EFFICIENT_ATTENTION_BACKWARD])
@pytest.mark.parametrize("is_dense", [True, False])
def test_attention_makes_its_gradients_between_copies_and_workspaces(kernel: OpOverload, *, is_dense: bool) -> None:
    """The order in which ``mha_bwd`` and ``_efficient_attention_backward`` allocate."""
    heads = torch.empty(2, 128, 4, 64, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    gradient = heads if is_dense else heads.contiguous()
    results = [heads] * 3
    steps = in_order_of_allocation(
        kernel, A100.temporary(kernel, (gradient, heads, heads, heads, heads), results), results
    )
    at = next(index for index, step in enumerate(steps) if step is heads)
    assert at == (not is_dense)
    assert all(step is heads for step in steps[at : at + 3])


def test_a_measured_workspace_replaces_the_assumed_one() -> None:
    """The median share of all tensors; the error is the range of images and results."""
    operator = aten.convolution.default
    arguments, results = convolution(layout=PLAIN)
    kernels = measured("convolution fp32 contiguous", 0, 2, 5)
    assert kernels.temporary(operator, arguments, results) == (2 * (2 * IMAGES + WEIGHT) * FLOAT,)
    assert kernels.error(operator, arguments, results) == (2 * 2 * IMAGES * FLOAT, 3 * 2 * IMAGES * FLOAT)
    assert A100.temporary(operator, arguments, results) == ((2 * IMAGES + WEIGHT) * FLOAT,)
    assert A100.error(operator, arguments, results) == (2 * IMAGES * FLOAT, 2 * 2 * IMAGES * FLOAT)


@pytest.mark.parametrize(
    ("kind", "dtype", "layout", "groups"),
    [
        ("convolution fp32 contiguous", torch.float32, PLAIN, 1),
        ("convolution fp32 channels-last", torch.float32, LAST, 1),
        ("convolution half contiguous", torch.float16, PLAIN, 1),
        ("convolution half contiguous", torch.bfloat16, PLAIN, 1),
        ("convolution half grouped", torch.bfloat16, LAST, 8),
    ],
)
def test_a_measured_workspace_is_that_of_its_kind(
    kind: str, dtype: torch.dtype, layout: torch.memory_format, groups: int
) -> None:
    """The operator, the type, the layout and grouping choose the share; other kinds of call keep the assumed one."""
    arguments, results = convolution(dtype, layout=layout, groups=groups)
    call = library_call(aten.convolution.default, arguments, results)
    assert call is not None
    assert call.kind == kind
    found = measured(kind, 3).temporary(aten.convolution.default, arguments, results)
    copies = contiguous_copies(aten.convolution.default, arguments)
    assert found == (*copies, 3 * call.operand_bytes)
    other = measured("convolution fp64 contiguous", 3).temporary(aten.convolution.default, arguments, results)
    assert list(other) == list(A100.temporary(aten.convolution.default, arguments, results))


def test_a_backward_call_of_a_library_is_a_kind_of_its_own() -> None:
    """A kernel of torch's own is none, and of attention the workspaces are known."""
    arguments, (results,) = convolution(torch.bfloat16, layout=LAST)
    backward = (results, *arguments[:2], None, *arguments[3:9], [True, True, False])
    call = library_call(aten.convolution_backward.default, backward, arguments[:2])
    assert call is not None
    assert (call.kind, call.operand_bytes) == ("convolution-backward half channels-last", (2 * IMAGES + WEIGHT) * 2)
    heads = torch.empty(2, 128, 3, 64, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    for attention in (
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention.default,
    ):
        assert library_call(attention, (heads, heads, heads), (heads,)) is None


def test_cudnn_attention_takes_what_it_took_on_a_card() -> None:
    """Measured on an H100 with cuDNN 9.19: shapes of queries, heads of keys, and bytes."""
    backward = aten._scaled_dot_product_cudnn_attention_backward.default
    for shape, key_heads, nbytes in (
        ((8, 12, 1024, 64), 12, 25_559_552),
        ((2, 16, 2048, 128), 16, 33_817_088),
        ((8, 8, 512, 96), 8, 12_714_496),
        ((16, 12, 1024, 64), 12, 51_118_592),
        ((16, 16, 1024, 64), 4, 135_266_816),
    ):
        query = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        key = torch.empty(shape[0], key_heads, *shape[2:], dtype=torch.bfloat16, device="meta")
        (taken,) = A100.temporary(backward, (query, query, key, key, query), ())
        assert isinstance(taken, int)
        assert rounded_up(taken, 512) == nbytes


def test_a_measured_workspace_of_cublas_replaces_the_one_of_torch() -> None:
    """The workspace is kept for each handle."""
    assert measured("none", blas_workspace_bytes=4096).persistent(aten.mm.default, ()) == (("cublas", 4096),)
    assert measured("none").persistent(aten.mm.default, ()) == A100.persistent(aten.mm.default, ())


def test_profiles_with_measured_workspaces_have_traces_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card reads the table of its own compute capability alone."""
    profiles = [KernelProfile(compute_capability=(8, minor), kind="cuda") for minor in (0, 6, 9)]
    assert [representative(profile).compute_capability for profile in profiles] == [(8, 0), (8, 6), (8, 6)]
    table = WorkspaceTable(
        compute_capability=(8, 6), gpu="A card", date="", torch="", cudnn="", driver="", workspaces=()
    )
    path = tmp_path / "own.json"
    path.write_text(WorkspaceFile(tables=(table,)).model_dump_json())
    monkeypatch.setenv(VARIABLE, str(path))
    assert [representative(profile).compute_capability for profile in profiles] == [(8, 0), (8, 6), (8, 9)]


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
