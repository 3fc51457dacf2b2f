"""Traced updates compared with what the same updates take on this host's card."""

from collections.abc import Iterator

import pytest
import torch

from batchwright.estimation.attention_kernels import Attention, choose_kernel
from batchwright.estimation.trace import Trace
from batchwright.hardware.inventory import find_device
from batchwright.probing.supervisor import ProbeSupervisor
from batchwright.schemas.gpus import KernelProfile
from batchwright.schemas.requests import ProbeRequest
from batchwright.schemas.results import Outcome
from batchwright.schemas.workload import WorkloadSpec
from tests.support.factories import gpt_spec, mlp_spec, resnet_spec
from tests.support.traced import most_bytes, traced_on_cuda

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # other versions deprecate other things

TOLERANCE = 0.05
LARGE_MLP = {
    "kind": "reference",
    "architecture": {"name": "mlp", "input_features": 4096, "hidden_features": 8192, "classes": 1000},
}
LARGE_GPT = {
    "kind": "reference",
    "architecture": {"name": "gpt", "layers": 6, "heads": 8, "width": 512, "vocabulary_size": 32000},
}
LARGE_RESNET = {"kind": "reference", "architecture": {"name": "resnet"}}
CASES: dict[str, tuple[WorkloadSpec, int]] = {
    "mlp": (mlp_spec(model=LARGE_MLP), 512),
    "gpt, fp32": (gpt_spec(model=LARGE_GPT, batch={"sequence_length": 512}), 8),
    "gpt, bf16-mixed": (gpt_spec(model=LARGE_GPT, batch={"sequence_length": 512}, precision="bf16-mixed"), 8),
    "gpt, fp16-mixed": (gpt_spec(model=LARGE_GPT, batch={"sequence_length": 512}, precision="fp16-mixed"), 8),
    "gpt, bf16": (gpt_spec(model=LARGE_GPT, batch={"sequence_length": 512}, precision="bf16"), 8),
    "resnet": (resnet_spec(model=LARGE_RESNET, batch={"image_size": 224}), 32),
}


@pytest.fixture(scope="module")
def supervisor() -> Iterator[ProbeSupervisor]:
    """A supervisor of the first card."""
    with ProbeSupervisor(find_device("cuda:0")) as running:
        yield running


@pytest.fixture(scope="module")
def traces() -> dict[str, list[Trace]]:
    """Traces of every case, with and without accumulation, for the card of this host, in one process."""
    return traced_on_cuda(
        [
            {
                "name": f"{name}, {accumulates}",
                "spec": spec.model_dump(mode="json"),
                "sizes": [size],
                "accumulates": accumulates,
                "compute_capability": list(torch.cuda.get_device_capability(0)),
            }
            for name, (spec, size) in CASES.items()
            for accumulates in (True, False)
        ]
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("accumulates", [True, False])
def test_traced_peaks_are_those_of_the_card(
    name: str, supervisor: ProbeSupervisor, traces: dict[str, list[Trace]], *, accumulates: bool
) -> None:
    """The peak that a trace has is what a probe measures, within five percent."""
    spec, size = CASES[name]
    window = size * 4 if accumulates else size
    probe = ProbeRequest(spec=spec, micro_batch_size=size, samples_per_window=window, device="cuda:0", limit_bytes=None)
    measured = supervisor.run(probe)
    assert measured.outcome is Outcome.FIT, measured.message
    (traced,) = traces[f"{name}, {accumulates}"]
    assert most_bytes(traced, stretch="measured-update") == pytest.approx(measured.peak_allocated_bytes, rel=TOLERANCE)


@pytest.mark.parametrize(
    "widths", [(32, 32), (64, 64), (100, 100), (136, 136), (192, 192), (192, 128), (256, 256), (264, 264)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("dropout", "masked", "causal"), [(0, 0, 0), (0, 0, 1), (0.1, 0, 1), (0.25, 0, 0), (0, 1, 0)])
def test_attention_is_chosen_as_on_the_card(
    widths: tuple[int, int], dtype: torch.dtype, dropout: float, masked: int, causal: int
) -> None:
    """Torch's own choice for tensors of the card is that of the rules that stand in for it."""
    if torch.backends.cudnn.version() < 91400:  # type: ignore[no-untyped-call]
        pytest.skip("the rules are those of the cuDNN that torch 2.13 brings")
    heads, length, (width, value_width) = 4, 128, widths
    query, key = (
        torch.zeros(2, heads, length, width, dtype=dtype, device="cuda", requires_grad=True) for _ in range(2)
    )
    value = torch.zeros(2, heads, length, value_width, dtype=dtype, device="cuda", requires_grad=True)
    mask = torch.zeros(length, length, dtype=dtype, device="cuda") if masked else None
    own = torch._fused_sdp_choice(query, key, value, mask, dropout, bool(causal))
    told = Attention(
        dtype={torch.float16: 5, torch.float32: 6, torch.bfloat16: 15}[dtype],
        batch=2,
        query_heads=heads,
        key_heads=heads,
        value_heads=heads,
        query_length=length,
        key_length=length,
        query_width=width,
        key_width=width,
        value_width=value_width,
        masked=masked,
        mask_requires_grad=0,
        causal=causal,
        grouped=0,
        state=3,
        dropout=dropout,
    )
    profile = KernelProfile(compute_capability=torch.cuda.get_device_capability(0), kind="cuda")
    assert int(choose_kernel(told, profile)) == own
