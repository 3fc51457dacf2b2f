"""Updates traced on fake tensors: bytes by hand, every kind of model, sizes, the shim, the process around it."""

import importlib.metadata
import os
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import grouped_mm
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig

from batchwright.errors import EstimateCancelledError, EstimateError, EstimateTimedOutError, SpecError
from batchwright.estimation import attention_kernels
from batchwright.estimation.allocator.replay import replay
from batchwright.estimation.attention_kernels import Attention, Kernel, choose_kernel
from batchwright.estimation.client import estimate
from batchwright.estimation.cuda_shim import NoCompilerError, _digest, _torch_folder, compile_cached
from batchwright.estimation.trace import COMPILED_NOTE, Bound, Category, SizedTrace, Trace
from batchwright.estimation.tracing.dispatch_mode import Tracer
from batchwright.estimation.tracing.kernel_workspaces.shared_kernels import SharedKernels
from batchwright.estimation.tracing.runs import TracedRuns
from batchwright.estimation.tracing.session import trace
from batchwright.estimation.tracing.shape_cache import ShapeCache
from batchwright.estimation.tracing.sized_workload import SizedWorkload, _scaled
from batchwright.estimation.tracing.torch_internals import FakeTensorMode
from batchwright.schemas.dataset.preference_spec import PreferenceSpec
from batchwright.schemas.estimates import Estimate, EstimateRequest, Loop, Verdict
from batchwright.schemas.gpus import KernelProfile
from batchwright.schemas.workload import ParallelismSpec, WorkloadSpec
from tests.support.factories import gpt_spec, mlp_spec, python_spec, resnet_spec, transformers_spec
from tests.support.forked import real_starts
from tests.support.traced import held_bytes, most_bytes, traced_on_cuda

pytestmark = pytest.mark.usefixtures("tracing")

MIB = 1024**2
FLOAT = 4
RESERVE_HEADER = 256
"""Bytes of cuDNN's reserve space beside the values."""
INDEX = 8
MLP_PARAMETERS = (32 * 32 + 32 + 32 * 32 + 32 + 32 * 4 + 4) * FLOAT
"""Parameters of ``mlp_spec``: two hidden layers of 32, four classes."""
SIZES = (4, 6, 10)
CHECKED_SIZE = 17
TEXT = {"sequence_length": 16}
TINY = {"layers": 1, "heads": 2, "width": 32}
SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
EXPERTS = {**SMALL, "num_key_value_heads": 2, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DROPPING_OUT = transformers_spec(
    "causal-lm",
    {
        "model_type": "gpt2",
        "n_layer": 2,
        "n_embd": 64,
        "n_head": 4,
        "vocab_size": 500,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    batch={"sequence_length": 512},
    precision="bf16-mixed",
)
"""GPT-2 with its default dropout of a tenth, attention included."""
KINDS: dict[str, WorkloadSpec] = {
    "mlp": mlp_spec(),
    "gpt, fp16 with a scaler": gpt_spec(precision="fp16-mixed", gradient_clipping=1.0),
    "gpt, bf16, two ranks": gpt_spec(precision="bf16", parallelism={"world_size": 2}),
    "gpt, recomputed, averaged": gpt_spec(activation_checkpointing=True, ema_decay=0.99, precision="bf16-mixed"),
    "gpt, smoothed labels": gpt_spec(label_smoothing=0.1),
    "gpt, fused": gpt_spec(optimizer={"name": "adamw", "implementation": "fused"}),
    "gpt, every row of its vocabulary": gpt_spec(
        model={"kind": "reference", "architecture": {"name": "gpt", **TINY, "vocabulary_size": 16_000}},
        batch={"sequence_length": 1024},
        precision="bf16-mixed",
    ),
    "resnet": resnet_spec(optimizer={"name": "sgd", "momentum": 0.9}),
    "gpt2": transformers_spec("causal-lm", {"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2}, batch=TEXT),
    "bert": transformers_spec("masked-lm", {"model_type": "bert", **SMALL}, batch=TEXT, precision="bf16-mixed"),
    "bert, with an adapter": transformers_spec(
        "sequence-classification",
        {"model_type": "bert", **SMALL},
        batch=TEXT,
        adapter={"kind": "lora", "rank": 8, "target_modules": ["query", "value"]},
    ),
    "llama": transformers_spec("causal-lm", {"model_type": "llama", **SMALL}, batch=TEXT, precision="bf16"),
    "llama, preference pairs": transformers_spec(
        "causal-lm",
        {"model_type": "llama", **SMALL},
        batch=TEXT,
        precision="bf16-mixed",
        preference={"kind": "dpo"},
    ),
    "gpt2, preference pairs, with an adapter": transformers_spec(
        "causal-lm",
        {"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2},
        batch=TEXT,
        preference={"kind": "dpo", "loss": "ipo"},
        adapter={"kind": "lora"},
    ),
    "vit": transformers_spec("image-classification", {"model_type": "vit", "image_size": 32, "patch_size": 8, **SMALL}),
    "t5": transformers_spec(
        "seq2seq-lm",
        {"model_type": "t5", "num_layers": 1, "d_model": 32, "num_heads": 2, "d_kv": 16, "decoder_start_token_id": 0},
        batch=TEXT,
    ),
    "hf-resnet": transformers_spec(
        "image-classification",
        {"model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16], "depths": [1]},
        batch={"image_size": 32},
    ),
    "convnext": transformers_spec(
        "image-classification",
        {"model_type": "convnext", "hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2},
        batch={"image_size": 32},
    ),
    "lstm": python_spec("tests.support.traced_models:tokens"),
    "gru": python_spec("tests.support.traced_models:gated"),
    "model of a run": python_spec("tests.support.traced_models:fresh"),
    "model made before": python_spec("tests.support.traced_models:existing"),
    "mixtral": transformers_spec("causal-lm", {"model_type": "mixtral", **EXPERTS, "num_local_experts": 4}, batch=TEXT),
    "olmoe": transformers_spec(
        "causal-lm",
        {"model_type": "olmoe", **EXPERTS, "num_experts": 4, "num_experts_per_tok": 2},
        batch=TEXT,
        precision="bf16-mixed",
    ),
}


LONG = {
    "gpt, smoothed labels",
    "gpt, fused",
    "gpt2, preference pairs, with an adapter",
    "t5",
    "bert",
    "llama",
    "vit",
    "hf-resnet",
    "convnext",
    "olmoe",
}
"""Kinds beside which another that is traced by the same operators is always tried."""
LAYERS: dict[str, dict[str, Any]] = {
    "GELU": {},
    "SiLU": {},
    "Mish": {},
    "LayerNorm": {"normalized_shape": 64, "bias": False},
    "RMSNorm": {"normalized_shape": 64},
}
"""Layers that are one kernel on a card in each pass, also where torch's build for the CPU decomposes them."""
kinds = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough if name in LONG else ()) for name in KINDS]
)


@pytest.fixture(scope="module")
def long_on_cuda() -> dict[str, list[Trace]]:
    """The kinds of ``LONG`` traced with CUDA's decisions, in one process."""
    return traced_on_cuda([_case(name, KINDS[name], (*SIZES, CHECKED_SIZE)) for name in sorted(LONG)])


@pytest.fixture
def traces(name: str, request: pytest.FixtureRequest) -> list[Trace]:
    """A kind of model traced with CUDA's decisions at each size."""
    found: dict[str, list[Trace]] = request.getfixturevalue("long_on_cuda" if name in LONG else "on_cuda")
    return found[name]


@pytest.fixture(scope="module")
def on_cuda() -> dict[str, list[Trace]]:
    """The other kinds of models traced with CUDA's decisions, in one process; needs a C++ compiler."""
    cases: list[dict[str, Any]] = [
        _case(name, spec, (*SIZES, CHECKED_SIZE)) for name, spec in KINDS.items() if name not in LONG
    ]
    published = python_spec("tests.support.traced_models:plain").model_copy(update={"gradient_gathering": "in-place"})
    cases += [
        _case(precision, published.model_copy(update={"precision": precision}), [8], accumulates=False)
        for precision in ("fp32", "bf16-mixed")
    ]
    cases += [
        _case(layer, python_spec("tests.support.traced_models:layered", layer=layer, **arguments), [4])
        for layer, arguments in LAYERS.items()
    ]
    cases.append(_case("gpt2, dropout", DROPPING_OUT, [4]))
    cases.append(_case("lstm, packed", python_spec("tests.support.traced_models:packed"), SIZES[:1]))
    cases.append(_case("gpt2, side by side", KINDS["gpt2"], SIZES) | {"forked": len(SIZES)})
    cases.append(_case("lstm, forks die", python_spec("tests.support.traced_models:homesick"), SIZES) | {"forked": 0})
    cases.append(
        _case("lstm, with a thread", python_spec("tests.support.traced_models:threaded"), SIZES) | {"forked": 0}
    )
    return traced_on_cuda(cases)


def _case(name: str, spec: WorkloadSpec, sizes: Any, *, accumulates: bool = True) -> dict[str, Any]:
    return {
        "name": name,
        "spec": spec.model_dump(mode="json"),
        "sizes": list(sizes),
        "accumulates": accumulates,
        "compute_capability": [8, 6],
    }


def _mlp(size: int, *, accumulates: bool = True, **changes: Any) -> Trace:
    return trace(mlp_spec(**changes), size, accumulates=accumulates)


@kinds
def test_updates_differ_only_in_sizes(traces: list[Trace]) -> None:
    """Traces at three sizes have equal events, and predict a fourth size."""
    sized = SizedTrace.of(traces[:-1])
    assert sized.exact
    expected = traces[-1].model_copy(update={"bounds": {}})
    assert sized.at(CHECKED_SIZE) == expected
    pair = SizedTrace.of([traces[0], traces[2]])
    assert not pair.proportional or pair.at(CHECKED_SIZE) == expected
    assert traces[0].decisions == "cuda"


@kinds
def test_blocks_are_allocated_once_and_freed_once(traces: list[Trace]) -> None:
    """No block is freed before its allocation, or twice; an update holds equal memory before and after."""
    taken = traces[0]
    held: set[int] = set()
    for event in taken.events:
        if event >= 0:
            assert event not in held
            held.add(event)
        else:
            held.remove(~event)
    state = (Category.PARAMETERS, Category.OPTIMIZER_STATE)
    for category in state:
        assert held_bytes(taken, "end", category) == held_bytes(taken, "first-update", category) > 0


def test_an_adapter_trains_a_copy_of_the_head(on_cuda: dict[str, list[Trace]]) -> None:
    """Two matrices of rank 8 beside those of queries and values, and a head of two labels, of which peft keeps both."""
    matrices, head = 2 * 2 * 8 * 32, 2 * 32 + 2
    taken = on_cuda["bert, with an adapter"][0]
    assert held_bytes(taken, "first-update", Category.OPTIMIZER_STATE) == 2 * (matrices + head) * FLOAT
    config = BertConfig(**SMALL)
    base = sum(map(torch.numel, BertForSequenceClassification(config).parameters()))
    buffers = 2 * config.max_position_embeddings * INDEX  # positions, and types of tokens
    assert held_bytes(taken, "first-update", Category.PARAMETERS) == (base + matrices + head) * FLOAT + buffers


@pytest.mark.parametrize("adapter", [None, {"kind": "lora"}], ids=["copy", "adapter"])
def test_the_reference_of_preference_pairs_has_weights_alone(adapter: dict[str, Any] | None) -> None:
    """A frozen copy, or the model below the adapter: no gradients, optimizer state or activations of its own."""
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 64}
    texts = transformers_spec("causal-lm", config, batch={"sequence_length": 64}, adapter=adapter)
    pairs = texts.model_copy(update={"preference": PreferenceSpec(kind="dpo")})
    plain, found = trace(texts, 8, accumulates=True), trace(pairs, 4, accumulates=True)
    weights, state = (
        [held_bytes(taken, "end", category) for taken in (plain, found)]
        for category in (Category.PARAMETERS, Category.OPTIMIZER_STATE)
    )
    assert weights[1] == pytest.approx(weights[0] * (1 if adapter else 2), rel=0.01)
    assert state[0] == state[1]
    most = [most_bytes(taken, Category.ACTIVATIONS) for taken in (plain, found)]
    assert most[1] == pytest.approx(most[0], rel=0.1)


def test_parallel_traces_equal_sequential_ones(on_cuda: dict[str, list[Trace]]) -> None:
    """Forked processes return the same traces as one process."""
    assert on_cuda["gpt2, side by side"] == on_cuda["gpt2"][:-1]


def test_traces_of_dead_processes_are_traced_again(on_cuda: dict[str, list[Trace]]) -> None:
    """The traces are complete even if every forked process is killed."""
    assert on_cuda["lstm, forks die"] == on_cuda["lstm"][:-1]


def test_a_workload_with_threads_is_not_forked(on_cuda: dict[str, list[Trace]]) -> None:
    """The sizes are traced one by one, since a forked process would lack the threads."""
    assert on_cuda["lstm, with a thread"] == on_cuda["lstm"][:-1]


def test_published_peak_in_fp32(on_cuda: dict[str, list[Trace]]) -> None:
    """GPT-2 124M, batch 8, fp32, no accumulation: 10,799 MiB were traced before, without cuBLAS's 16 MiB."""
    assert most_bytes(on_cuda["fp32"][0]) / MIB == pytest.approx(10_799 + 16, rel=0.005)


def test_published_peak_in_bf16(on_cuda: dict[str, list[Trace]]) -> None:
    """GPT-2 124M under bf16 autocast with FlashAttention: 8,235 MiB were traced before."""
    assert most_bytes(on_cuda["bf16-mixed"][0]) / MIB == pytest.approx(8_235 + 16, rel=0.005)


def test_attention_with_dropout_takes_no_matrix_of_all_tokens(on_cuda: dict[str, list[Trace]]) -> None:
    """Without the stand-in for CUDA, attention uses the CPU's kernel without dropout, whose memory is that of a GPU's.

    What differs are the other dropouts: a card keeps a byte for each element, the CPU a number.
    """
    without_shim = trace(
        DROPPING_OUT, 4, accumulates=True, profile=KernelProfile(compute_capability=(8, 6), kind="cuda")
    )
    assert without_shim.decisions == "cpu"
    assert most_bytes(without_shim) == pytest.approx(most_bytes(on_cuda["gpt2, dropout"][0]), rel=0.15)


def bytes_of_sums(tokens: int) -> int:
    """A row of 32 fp32 sums for each token, at most for the vocabulary of 16,000, and a tenth of a row for each."""
    return min(tokens, 16_000) * 32 * FLOAT + tokens * 13


def test_embeddings_are_summed_by_segment(on_cuda: dict[str, list[Trace]]) -> None:
    """Sums of the rows that occur, and of every ten tokens, are one block."""
    for found in on_cuda["gpt, every row of its vocabulary"]:
        tokens = 1024 * found.micro_batch_size
        assert bytes_of_sums(tokens) in {found.sizes[block] for block in found.bounds}


def test_the_gradient_of_an_embedding_is_allocated_before_its_sums(on_cuda: dict[str, list[Trace]]) -> None:
    """Sorted indices, the gradient, then four blocks for 4,096 tokens, the last of which has the sums."""
    taken = on_cuda["gpt, every row of its vocabulary"][0]
    sums = next(block for block in taken.bounds if taken.sizes[block] == bytes_of_sums(4096))
    assert taken.sizes[sums - 4] == 16_000 * 32 * FLOAT


def test_cublas_is_counted_for_both_threads(on_cuda: dict[str, list[Trace]]) -> None:
    """Forward and backward passes have a handle each: 8,519,680 bytes before Hopper."""
    assert held_bytes(on_cuda["mlp"][0], "end", Category.WORKSPACE) == 2 * 8_519_680


def allocated_bytes(taken: Trace) -> list[int]:
    """The bytes of each allocation, in order."""
    return [taken.sizes[event] for event in taken.events if event >= 0]


def test_a_product_is_allocated_before_the_workspace_of_cublas(on_cuda: dict[str, list[Trace]]) -> None:
    """The first layer's result of 32 values a sample, then the workspace, as torch calls cuBLAS with the result."""
    allocated = allocated_bytes(on_cuda["mlp"][0])
    assert allocated[allocated.index(8_519_680) - 1] == SIZES[0] * 32 * FLOAT


@pytest.mark.parametrize("layer", ["SiLU", "Mish"])
def test_an_activation_is_one_kernel_in_each_pass(layer: str, on_cuda: dict[str, list[Trace]]) -> None:
    """All activations allocate the same: one tensor forward and one backward."""
    assert allocated_bytes(on_cuda[layer][0]) == allocated_bytes(on_cuda["GELU"][0])


def test_an_rms_norm_keeps_one_number_for_each_row(on_cuda: dict[str, list[Trace]]) -> None:
    """The deviation: a LayerNorm keeps the mean too, for 4 rows in 2 layers, 2 micro-batches and 2 updates."""
    rms, layer = (sorted(allocated_bytes(on_cuda[name][0])) for name in ("RMSNorm", "LayerNorm"))
    assert sorted([*rms, *[4 * FLOAT] * 8]) == layer


def test_dropout_allocates_its_mask_first(on_cuda: dict[str, list[Trace]]) -> None:
    """A mask of a byte for each value, then the result in bf16: twice in 2 layers, 2 micro-batches and 2 updates."""
    mask = 4 * 512 * 64
    pairs = list(pairwise(allocated_bytes(on_cuda["gpt2, dropout"][0])))
    assert pairs.count((mask, 2 * mask)) == 2 * 2 * 2 * 2


@pytest.mark.parametrize(("name", "kept_values"), [("lstm", 5), ("gru", 6)])
def test_a_recurrent_layer_keeps_one_reserve_space(
    on_cuda: dict[str, list[Trace]], name: str, kept_values: int
) -> None:
    """Values of each of 32 units and 6 steps in 2 layers, and one between them, in each of 2 x 2 micro-batches."""
    taken = on_cuda[name][0]
    reserve_bytes = SIZES[0] * 6 * 32 * (2 * kept_values + 1) * FLOAT + RESERVE_HEADER
    kept = [size for size, category in zip(taken.sizes, taken.categories, strict=True) if category == "activations"]
    assert kept.count(reserve_bytes) == 2 * 2
    fewer, more = taken.workspace_error
    assert fewer == more > 2 * 8 * 1024**2 // 8  # of the workspace, which has 8 MiB for each layer
    assert any("cuDNN does not document" in note for note in taken.notes)


def test_packed_sequences_keep_values_of_their_own_steps(on_cuda: dict[str, list[Trace]]) -> None:
    """Sequences of 6, 5, 4 and 6 steps; the copy of their inputs is held beside them, and states are padded."""
    taken = on_cuda["lstm, packed"][0]
    sizes = list(taken.sizes)
    steps, micro_batches = 6 + 5 + 4 + 6, 2 * 2
    assert sizes.count(steps * 32 * (2 * 5 + 1) * FLOAT + RESERVE_HEADER) == micro_batches
    assert list(pairwise(sizes)).count((steps * 16 * FLOAT,) * 2) == micro_batches
    assert SIZES[0] * 6 * 32 * FLOAT in sizes


def test_a_model_that_was_made_before_is_traced_as_a_new_one(on_cuda: dict[str, list[Trace]]) -> None:
    """Buffers are moved as parameters are, and again in the next trace of the process."""
    assert on_cuda["model made before"] == on_cuda["model of a run"]


def test_scratch_gradients_are_held_beside_the_sums(on_cuda: dict[str, list[Trace]]) -> None:
    """On a GPU the second micro-batch's gradients are kept until its backward pass has ended."""
    assert most_bytes(on_cuda["mlp"][0], Category.GRADIENTS) == 2 * MLP_PARAMETERS


def test_in_place_gradients_by_hand() -> None:
    """On the CPU gradients are accumulated in place, so that at most one set is held."""
    assert most_bytes(_mlp(4), Category.GRADIENTS, "measured-update") == MLP_PARAMETERS


@pytest.mark.parametrize(
    ("optimizer", "state"),
    [
        ({"name": "sgd"}, 0),
        ({"name": "sgd", "momentum": 0.9}, MLP_PARAMETERS),
        ({}, 2 * MLP_PARAMETERS + 6 * FLOAT),
        ({"name": "lion"}, MLP_PARAMETERS),
        ({"name": "muon", "momentum": 0.9}, MLP_PARAMETERS + (32 + 32 + 32 * 4 + 4 + 4) * FLOAT),
    ],
)
def test_lasting_bytes_by_hand(optimizer: dict[str, Any], state: int) -> None:
    """Between updates only parameters, the optimizer's state (AdamW with step counts) and batches are held."""
    batches = 2 * 4 * (32 * FLOAT + INDEX)
    taken = _mlp(4, optimizer=optimizer)
    assert held_bytes(taken, "end", Category.OPTIMIZER_STATE) == state
    assert held_bytes(taken, "end", Category.PARAMETERS) == MLP_PARAMETERS
    assert held_bytes(taken, "end") == held_bytes(taken, "first-update") == MLP_PARAMETERS + state + batches


def test_peak_is_affine_in_the_batch() -> None:
    """Every sample adds equal bytes to a large enough micro-batch."""
    peaks = [most_bytes(_mlp(size, optimizer={"name": "sgd"})) for size in (1000, 2000, 3000)]
    assert peaks[2] - peaks[1] == peaks[1] - peaks[0] > 0


def test_a_single_micro_batch_holds_one_set_of_gradients() -> None:
    """An update of one micro-batch holds one set even with separate gradients."""
    taken = _mlp(4, accumulates=False, gradient_gathering="scratch")
    assert most_bytes(taken, Category.GRADIENTS, "measured-update") == MLP_PARAMETERS


def test_values_of_the_batch_are_known() -> None:
    """Weights that are counted on the device are known, so no stand-in is used."""
    taken = trace(KINDS["bert"], 3, accumulates=True)
    assert taken.notes == ()


def test_shapes_that_depend_on_values_are_refused() -> None:
    """A model whose tensor shapes depend on values raises an error."""
    with pytest.raises(EstimateError, match="shape depends on values"):
        trace(python_spec("tests.support.traced_models:branches"), 2, accumulates=True)


def test_an_error_of_the_workload_is_named() -> None:
    """The error of the workload's own code becomes an error of the estimate."""
    with pytest.raises(EstimateError, match=r"cannot be traced: ValueError: labels must be below 10") as raised:
        trace(python_spec("tests.support.misbehaving:build", way="raises"), 2, accumulates=True)
    assert isinstance(raised.value.__cause__, ValueError)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("mismatched", r"cannot be traced: RuntimeError: .* \(while tracing the operator aten\.mm\.default\)$"),
        ("sparse", r"creates a sparse tensor \(aten\.\w+\.default\): it can be measured, not estimated"),
        ("unknown_operator", r"no fake impl registered .* \(while tracing the operator tests\.nameless\.default\)$"),
        (
            "flexible",
            r"calls flex_attention, which torch compiles .*: it can be measured, or run on a virtual card .*$",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_an_operator_that_cannot_be_traced_is_named(target: str, message: str) -> None:
    """An operator that refuses its arguments, a sparse result, one without a rule for fake tensors, a compiled one."""
    with pytest.raises(EstimateError, match=message):
        trace(python_spec(f"tests.support.traced_models:{target}"), 2, accumulates=True)


def test_a_compiled_model_is_traced_as_it_is_written() -> None:
    """Whether the spec or the workload compiles it: the same blocks, with a note."""
    own = python_spec("tests.support.traced_models:fresh")
    compiled = (python_spec("tests.support.traced_models:compiled"), own.model_copy(update={"compile": True}))
    plain = trace(own, 2, accumulates=True)
    assert plain.notes == ()
    for spec in compiled:
        found = trace(spec, 2, accumulates=True)
        assert found.notes == (COMPILED_NOTE,)
        assert (found.sizes, found.events) == (plain.sizes, plain.events)


@pytest.mark.parametrize("loop", ["hugging-face", "lightning", "plain"])
def test_the_updates_of_other_loops_are_traced(loop: Loop) -> None:
    """The first step allocates the optimizer's state; Lightning keeps gradients, and a plain loop keeps logits."""
    taken = trace(KINDS["llama"], 4, accumulates=True, loop=loop)
    parameters = held_bytes(taken, "first-update", Category.PARAMETERS)
    assert held_bytes(taken, "first-update", Category.OPTIMIZER_STATE) == 0
    assert held_bytes(taken, "end", Category.OPTIMIZER_STATE) == pytest.approx(2 * parameters, rel=0.01)
    kept = held_bytes(taken, "end") - held_bytes(taken, "end", Category.OPTIMIZER_STATE) - parameters
    logits = 4 * 16 * LlamaConfig().vocab_size * 2
    least = {"hugging-face": 0, "lightning": 0.99 * parameters, "plain": logits}[loop]
    assert least <= kept <= least + 0.02 * logits


@pytest.mark.parametrize("loop", ["hugging-face", "plain"])
def test_other_loops_over_ranks_have_the_buckets_of_ddp(loop: Loop) -> None:
    """Buckets hold a second copy of all gradients, for any number of ranks."""
    alone, two, four = (
        trace(
            KINDS["llama"].model_copy(update={"parallelism": ParallelismSpec(world_size=ranks)}),
            4,
            accumulates=True,
            loop=loop,
        )
        for ranks in (1, 2, 4)
    )
    parameters = held_bytes(alone, "first-update", Category.PARAMETERS)
    more = held_bytes(two, "end", Category.GRADIENTS) - held_bytes(alone, "end", Category.GRADIENTS)
    assert more == pytest.approx(parameters, rel=0.01)
    assert most_bytes(two) - most_bytes(alone) == pytest.approx(parameters, rel=0.01)
    assert four.sizes == two.sizes


@pytest.mark.parametrize("loop", ["batchwright", "hugging-face", "lightning", "plain"])
def test_a_loop_takes_a_loss_in_any_form(loop: Loop) -> None:
    """The mean over the samples alone takes what a sum with its weight takes, but for single numbers."""
    summed, averaged = (
        trace(python_spec(f"tests.support.traced_models:{form}", layer="GELU"), 512, accumulates=True, loop=loop)
        for form in ("layered", "averaged")
    )
    assert most_bytes(averaged) == pytest.approx(most_bytes(summed), abs=16 * 512)


KEPT: dict[tuple[Loop, int | None], list[int]] = {
    ("plain", None): [4001],
    ("lightning", None): [4001],
    ("hugging-face", None): [4001, 4001],
    ("hugging-face", 20_002): [10_001, 10_001],  # the two that are traced stand for all
}
"""The samples of batches on the device at the peak, by loop and by the samples of an update."""


@pytest.fixture(scope="module")
def kept() -> dict[str, list[Trace]]:
    """The traces of these loops on a card."""
    spec = python_spec("tests.support.traced_models:layered", layer="GELU")
    case = _case("kept", spec.model_copy(update={"precision": "bf16-mixed"}), (4001,))
    return traced_on_cuda([{**case, "name": str(at), "loop": at[0], "share": at[1]} for at in KEPT])


@pytest.mark.parametrize("at", KEPT)
def test_other_loops_keep_their_batches_on_the_device(
    at: tuple[Loop, int | None], kept: dict[str, list[Trace]]
) -> None:
    """The Trainer has all samples of an update there, and the others those that they train on."""
    (taken,) = kept[str(at)]
    peak = replay(taken.events, taken.sizes).peak_position
    events = Counter(event if event >= 0 else ~event for event in taken.events[: peak + 1])
    live = [taken.sizes[block] for block, count in events.items() if count == 1]
    assert [size // 32 for size in live if size in {4001 * 32, 10_001 * 32}] == KEPT[at]


def test_a_norm_over_ranks_is_named() -> None:
    """Torch has no rule for its operators without tensors."""
    spec = python_spec("tests.support.traced_models:layered", layer="SyncBatchNorm", num_features=64)
    spec = spec.model_copy(update={"parallelism": ParallelismSpec(world_size=2)})
    with pytest.raises(EstimateError, match=r"^the model's `1` is a SyncBatchNorm, which cannot be traced over ranks$"):
        trace(spec, 4, accumulates=True, loop="plain")


def test_other_loops_convert_the_inputs_of_a_model_in_bf16() -> None:
    """As those who train such a model must."""
    spec = python_spec("tests.support.traced_models:layered", layer="GELU").model_copy(update={"precision": "bf16"})
    assert held_bytes(trace(spec, 4, accumulates=True, loop="lightning"), "end", Category.GRADIENTS) > 0


ENDS = torch.tensor([3, 5, 8], dtype=torch.int32)
"""Ends of three groups of 3, 2 and 3 rows."""
GROUPED = {
    "tokens by experts": ((8, 8), (3, 10, 8), ENDS),
    "gradient of experts": ((16, 8), (10, 8), ENDS),
    "experts by tokens": ((3, 16, 8), (8, 8), ENDS),
    "one group each": ((3, 16, 8), (3, 10, 8), None),
}
"""Shapes of the left operand and of the transposed right one."""


def traced_grouped_mm(
    left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor | None, **options: Any
) -> torch.Tensor:
    """The grouped product as a fake tensor."""
    tracer = Tracer(FakeTensorMode(allow_non_fake_inputs=True), "cpu", SharedKernels([None]), ShapeCache())
    with tracer.fakes, tracer:
        return grouped_mm(left, right, offs=offs, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shapes", GROUPED)
def test_grouped_products_are_traced_as_the_kernel_makes_them(dtype: torch.dtype, shapes: str) -> None:
    """The experts of transformers, in every precision, with the padding of the result's rows."""
    left_shape, right_shape, ends = GROUPED[shapes]
    left, right = torch.ones(left_shape, dtype=dtype), torch.ones(right_shape, dtype=dtype).mT
    made, traced = grouped_mm(left, right, offs=ends), traced_grouped_mm(left, right, ends)
    assert (traced.shape, traced.stride(), traced.dtype) == (made.shape, made.stride(), made.dtype)


def test_grouped_products_that_the_kernel_refuses_are_refused() -> None:
    """Rows of 5 values in fp32 do not begin at multiples of 16 bytes."""
    left, right = torch.ones(8, 5), torch.ones(3, 8, 5).mT
    with pytest.raises(RuntimeError, match="16 bytes"):
        grouped_mm(left, right, offs=ENDS)
    with pytest.raises(EstimateError, match=r"rows of a multiple of 16 bytes, not \(8, 5\) in"):
        traced_grouped_mm(left, right, ENDS)


def test_a_grouped_product_may_name_the_type_of_its_result() -> None:
    """The type of the operands, which is the only one that the kernels have."""
    left, right = torch.ones(8, 8), torch.ones(3, 10, 8).mT
    made = grouped_mm(left, right, offs=ENDS, out_dtype=torch.float32)
    traced = traced_grouped_mm(left, right, ENDS, out_dtype=torch.float32)
    assert (traced.shape, traced.stride(), traced.dtype) == (made.shape, made.stride(), made.dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out_dtype": torch.float64}, "has the type of its operands"),
        ({"bias": torch.ones(10)}, "takes no bias"),
        ({"right": torch.ones(3, 10, 8, dtype=torch.float64).mT}, "cannot multiply"),
        ({"right": torch.ones(3, 10, 16).mT}, "cannot multiply"),
    ],
    ids=["type", "bias", "types", "shapes"],
)
def test_arguments_that_the_grouped_kernel_refuses_are_refused(changes: dict[str, Any], message: str) -> None:
    """By the kernel and by the trace."""
    arguments = {"left": torch.ones(8, 8), "right": torch.ones(3, 10, 8).mT, "offs": ENDS} | changes
    with pytest.raises(EstimateError, match=message):
        traced_grouped_mm(**arguments)
    left, right = arguments.pop("left"), arguments.pop("right")
    with pytest.raises(RuntimeError):
        grouped_mm(left, right, **arguments)


LATE = """
from tests.support.traced_models import Tokens

class Late(Tokens):
    def build_model(self):
        import library_of_a_test
        return super().build_model()
"""


def test_a_library_imported_during_a_trace_keeps_the_initialisers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library keeps functions of ``torch.nn.init`` when it is first imported, and they still work."""
    (tmp_path / "workload_of_a_test.py").write_text(LATE)
    (tmp_path / "library_of_a_test.py").write_text("from torch.nn.init import kaiming_uniform_, normal_, zeros_\n")
    monkeypatch.syspath_prepend(tmp_path)
    trace(python_spec("workload_of_a_test:Late"), 2, accumulates=True)
    for initialise in ("kaiming_uniform_", "normal_", "zeros_"):
        values = torch.full((8, 8), torch.nan)
        getattr(sys.modules["library_of_a_test"], initialise)(values)
        assert values.isfinite().all()


@pytest.mark.thorough
def test_transformers_imported_during_a_trace_initialises_models_afterwards() -> None:
    """The functions of ``torch.nn.init`` are kept by transformers when it is first imported."""
    code = """
import sys, torch
from tests.support.factories import transformers_spec
from batchwright.estimation.tracing.session import trace
from batchwright.workloads.build import build_workload

assert "transformers" not in sys.modules
config = {"model_type": "mixtral", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
config |= {"intermediate_size": 32, "num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": 256}
spec = transformers_spec("causal-lm", config, precision="bf16", batch={"sequence_length": 8})
trace(spec, 2, accumulates=True)
torch.use_deterministic_algorithms(True)  # memory that is not initialised is NaN
model = build_workload(spec).build_model()
wrong = [name for name, values in model.named_parameters() if not values.isfinite().all()]
assert not wrong, wrong
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_module_may_be_cast_in_a_forward_pass() -> None:
    """Parameters of the same type stay where they are."""
    plain, cast = (
        trace(python_spec(f"tests.support.traced_models:{name}"), 4, accumulates=True) for name in ("tokens", "casting")
    )
    assert (cast.sizes, most_bytes(cast)) == (plain.sizes, most_bytes(plain))


def test_workloads_that_differ_between_sizes_are_scaled() -> None:
    """An estimate notes that traces at different sizes differ in more than sizes."""
    workload = SizedWorkload(TracedRuns(python_spec("tests.support.traced_models:conditional")), None)
    assert most_bytes(workload.trace_at(64, accumulates=True)) > most_bytes(workload.trace_at(32, accumulates=True))
    assert not workload.exact_sizes
    assert workload.notes


@pytest.mark.parametrize(
    ("size", "expected"),
    [(32, (10, 200, 200, 200, 100, 120)), (4, (10, 25, 100, 100, 100, 100)), (16, (10, 100, 100, 100, 100, 100))],
)
def test_scaling_shrinks_only_activations(size: int, expected: tuple[int, ...]) -> None:
    """Parameters and persistent workspaces stay; temporaries grow with the micro-batch size, up to a known bound."""
    kinds = ("PARAMETERS", "ACTIVATIONS", "TEMPORARIES", "WORKSPACE", "WORKSPACE", "TEMPORARIES")
    once = Trace(
        micro_batch_size=16,
        accumulates=True,
        sizes=(10, 100, 100, 100, 100, 100),
        categories=tuple(Category[kind] for kind in kinds),
        events=(0, 1, 2, 3, ~3, 4, 5, ~5, ~2, ~1),
        marks=(),
        decisions="cuda",
        bounds={5: Bound(unbounded_bytes=100, max_bytes=120)},
    )
    assert _scaled(once, size).sizes == expected


def test_compiling_is_done_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process loads the library of the first, and starts no compiler."""
    log = tmp_path / "log"
    monkeypatch.setenv(
        "CXX", str(_compiler(tmp_path, f'echo run >> {log}; while [ "$1" != -o ]; do shift; done; : > "$2"'))
    )
    assert compile_cached(tmp_path / "cache") == compile_cached(tmp_path / "cache")
    assert log.read_text().splitlines() == ["run"]


def test_errors_of_compilers_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the compiler's message, and no library is left in the cache."""
    monkeypatch.setenv("CXX", str(_compiler(tmp_path, "echo no such header >&2; exit 1")))
    with pytest.raises(NoCompilerError, match="no such header"):
        compile_cached(tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.so"))


LOADING = """
import sys
from pathlib import Path
from batchwright.estimation.cuda_shim import load_shim
shim = load_shim()
print(shim.is_cached, shim.uncached_reason, shim.library._name)
"""


def _loading(folder: Path, **environment: str) -> str:
    """Load the library of a fake compiler, which copies an existing library, and return the process's output."""
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    script = f'echo run >> {folder}/log; while [ "$1" != -o ]; do shift; done; cp {library} "$2"'
    command = [sys.executable, "-c", LOADING]
    done = subprocess.run(
        command,
        env={**os.environ, "CXX": str(_compiler(folder, script)), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_library_that_does_not_load_is_compiled_again(tmp_path: Path) -> None:
    """The library is compiled once more, and replaced."""
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert _loading(tmp_path, **cache).startswith("True")
    (kept,) = (tmp_path / "cache" / "batchwright").glob("*.so")
    kept.write_bytes(b"half of a library")
    assert str(kept) in _loading(tmp_path, **cache)
    assert str(kept) in _loading(tmp_path, **cache)
    assert (tmp_path / "log").read_text().splitlines() == ["run", "run"]


@pytest.mark.parametrize("home", ["/dev/null/cache", ""])
def test_without_a_cache_folder_the_library_is_compiled_for_one_process(tmp_path: Path, home: str) -> None:
    """A read-only folder or a user without a home is reported as the reason, and no file is left."""
    (tmp_path / "tmp").mkdir()
    nobody = tmp_path / "sitecustomize.py"
    nobody.write_text("import pathlib\ndef home(): raise RuntimeError('nobody')\npathlib.Path.home = home\n")
    output = _loading(tmp_path, XDG_CACHE_HOME=home, TMPDIR=str(tmp_path / "tmp"), PYTHONPATH=str(tmp_path))
    assert output.startswith("False")
    assert "set XDG_CACHE_HOME" in output
    assert not list((tmp_path / "tmp").iterdir())


def test_a_torch_without_package_metadata_has_a_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch built in place has no metadata; its version file identifies it."""

    def unknown(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    named = _digest(_torch_folder())
    monkeypatch.setattr(importlib.metadata, "version", unknown)
    assert _digest(_torch_folder()).startswith("unpackaged-")
    assert named.startswith(torch.__version__)


def _compiler(folder: Path, script: str) -> Path:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_estimates_work_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's decisions are traced instead, and a note says so."""
    monkeypatch.setenv("CXX", str(_compiler(tmp_path, "exit 1")))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    estimated = estimate(_request(mlp_spec()))
    assert estimated.decisions == "cpu"
    assert any("CUDA's decisions cannot be traced" in note for note in estimated.notes)


def _request(spec: WorkloadSpec, **changes: Any) -> EstimateRequest:
    return EstimateRequest(spec=spec, gpus=("A10G",), **changes)


@pytest.fixture(scope="module")
def really_started() -> Estimate:
    """An estimate of a process that is not forked: an interpreter that imports torch after the stand-in for CUDA."""
    with real_starts():
        return estimate(_request(mlp_spec()))


def test_a_process_of_its_own_traces_the_decisions_of_cuda(really_started: Estimate) -> None:
    """The stand-in for CUDA is compiled, and loaded before torch."""
    assert really_started.decisions == "cuda"
    assert really_started.gpus[0].peak is not None


@pytest.fixture
def workloads_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the compiler, which would take time."""
    monkeypatch.setenv("CXX", "/bin/false")
    monkeypatch.setenv("XDG_CACHE_HOME", "/nonexistent")


@pytest.mark.usefixtures("workloads_of_the_tests")
def test_estimates_end_at_their_timeout() -> None:
    """The process is killed, and the error names the field that raises the timeout."""
    with pytest.raises(EstimateTimedOutError, match=r"longer than 3 s.*timeout_seconds"):
        estimate(_request(python_spec("tests.support.traced_models:slow"), timeout_seconds=3.0))


@pytest.mark.usefixtures("workloads_of_the_tests")
def test_estimates_can_be_cancelled() -> None:
    """A caller can cancel an estimate."""
    with pytest.raises(EstimateCancelledError, match="stopped"):
        estimate(_request(python_spec("tests.support.traced_models:slow")), should_stop=lambda: True)


@pytest.mark.usefixtures("workloads_of_the_tests")
def test_estimates_stay_within_their_memory() -> None:
    """A workload that allocates real memory fails with an error about its limit."""
    with pytest.raises(EstimateError, match="host memory"):
        estimate(_request(python_spec("tests.support.traced_models:huge")), memory_bytes=4 * 1024**3)


@pytest.mark.usefixtures("workloads_of_the_tests")
def test_a_failing_card_does_not_affect_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A workload that fails with the kernels of one GPU is estimated on the other, whose library is another."""
    monkeypatch.setenv("BUILT", str(tmp_path / "built"))
    request = EstimateRequest(spec=python_spec("tests.support.traced_models:unique"), gpus=("A10G", "MI300X"))
    unknown, known = sorted(estimate(request).gpus, key=lambda gpu: gpu.peak is not None)
    assert known.peak is not None
    assert (unknown.feasible, unknown.peak) == (Verdict.UNCERTAIN, None)
    assert any("RuntimeError: built a second time" in note for note in unknown.notes)


@pytest.mark.usefixtures("workloads_of_the_tests")
def test_estimates_cannot_fill_the_disk() -> None:
    """A workload that writes without end fails at the file size limit."""
    with pytest.raises(EstimateError, match="File too large"):
        estimate(_request(python_spec("tests.support.traced_models:spilling")))


@pytest.mark.parametrize("missing", ["executable", "folder"])
def test_processes_that_cannot_be_started_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """A missing interpreter, or a disk without space for the request, is an error."""
    if missing == "executable":
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    else:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with real_starts(), pytest.raises(EstimateError, match="tracing process cannot be started"):
        estimate(_request(mlp_spec()))


def test_a_tighter_limit_of_the_host_stays() -> None:
    """A tighter hard limit is kept without an error; a looser one is lowered."""
    code = (
        "import resource as r; from batchwright.system.processes import tighten_limit as t\n"
        "hard = r.getrlimit(r.RLIMIT_DATA)[1]; r.setrlimit(r.RLIMIT_DATA, (hard, hard))\n"
        "print(t(r.RLIMIT_DATA, 2**33), *r.getrlimit(r.RLIMIT_DATA))\n"
        "r.setrlimit(r.RLIMIT_DATA, (2**32, 2**32))\n"
        "print(t(r.RLIMIT_DATA, 2**33), *r.getrlimit(r.RLIMIT_DATA))"
    )
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{2**33} {2**33} {hard}", f"{2**32} {2**32} {2**32}"]


@pytest.mark.usefixtures("workloads_of_the_tests")
def test_invalid_fields_are_reported_as_fields() -> None:
    """A field whose error only building the model shows is reported across processes."""
    with pytest.raises(SpecError) as raised:
        estimate(_request(transformers_spec("causal-lm", {"model_type": "gpt3"}, batch=TEXT)))
    assert [problem.field for problem in raised.value.problems] == ["model.config.model_type"]


def test_the_client_needs_no_torch() -> None:
    """The service requests estimates, and never imports torch."""
    code = "import sys, batchwright.estimation.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, env={**os.environ}).returncode == 0


def _attention(**changes: Any) -> Attention:
    shape = dict.fromkeys(("query_heads", "key_heads", "value_heads"), 8) | {"query_length": 64, "key_length": 64}
    widths = dict.fromkeys(("query_width", "key_width", "value_width"), 64)
    flags = {"masked": 0, "mask_requires_grad": 0, "causal": 1, "grouped": 0, "state": 3}
    return Attention(**{"dtype": 15, "batch": 2, **shape, **widths, **flags, **changes})


def _wide(width: int, value_width: int | None = None) -> dict[str, Any]:
    return {"query_width": width, "key_width": width, "value_width": value_width or width}


@pytest.mark.parametrize(
    ("changes", "capability", "kernel"),
    [
        ({}, (8, 0), Kernel.FLASH),
        ({}, (9, 0), Kernel.CUDNN),
        ({}, (12, 0), Kernel.FLASH),
        ({}, (7, 5), Kernel.MATH),
        ({"dtype": 5}, (7, 5), Kernel.EFFICIENT),
        ({"dtype": 6}, (9, 0), Kernel.EFFICIENT),
        ({"masked": 1}, (8, 0), Kernel.EFFICIENT),
        ({"query_width": 200, "key_width": 200, "value_width": 200}, (8, 6), Kernel.EFFICIENT),
        ({"dtype": 7}, (8, 0), Kernel.MATH),
        (_wide(256), (9, 0), Kernel.CUDNN),
        (_wide(264), (9, 0), Kernel.EFFICIENT),
        (_wide(192), (10, 0), Kernel.FLASH),
        (_wide(256), (10, 3), Kernel.FLASH),
        (_wide(192, 128), (10, 0), Kernel.CUDNN),
        (_wide(192, 128), (10, 3), Kernel.CUDNN),
        (_wide(192, 128), (9, 0), Kernel.CUDNN),
        (_wide(192, 128), (8, 0), Kernel.EFFICIENT),
        (_wide(136), (10, 0), Kernel.FLASH),
        (_wide(128), (10, 0), Kernel.CUDNN),
    ],
)
def test_attention_is_chosen_as_in_torch(changes: dict[str, Any], capability: tuple[int, int], kernel: Kernel) -> None:
    """The kernel depends on type, mask, width and GPU."""
    assert choose_kernel(_attention(**changes), KernelProfile(compute_capability=capability, kind="cuda")) is kernel


@pytest.mark.parametrize(("torch_version", "kernel"), [("2.11.0", Kernel.CUDNN), ("2.13.0+cpu", Kernel.FLASH)])
def test_a_dropout_of_a_tenth_is_left_to_cudnn_by_older_torch(
    torch_version: str, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch 2.11 chose on an H100; since then cuDNN gets only sixteenths."""
    attention_kernels._limits_dropout.cache_clear()
    monkeypatch.setattr(attention_kernels, "version", lambda _name: torch_version)
    profile = KernelProfile(compute_capability=(9, 0), kind="cuda")
    try:
        assert choose_kernel(_attention(dropout=0.1), profile) is kernel
    finally:
        attention_kernels._limits_dropout.cache_clear()
