"""Traces of Mamba's recurrence in groups of steps, against traces of every step."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from batchwright.estimation.allocator.replay import replay
from batchwright.estimation.tracing import session
from batchwright.estimation.tracing.recorder import Recorder
from batchwright.schemas.gpus import KernelProfile
from batchwright.schemas.workload import Precision, WorkloadSpec
from tests.support.factories import transformers_spec

PROFILE = KernelProfile(compute_capability=(9, 0), kind="cuda")
MAMBA: dict[str, Any] = {"hidden_size": 64, "state_size": 16, "num_hidden_layers": 2, "vocab_size": 128}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64}
JAMBA = {**HEADS, "hidden_size": 64, "vocab_size": 128, "num_hidden_layers": 2, "num_experts": 2}
JAMBA |= {"num_experts_per_tok": 1, "mamba_dt_rank": 4}
JAMBA |= {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_d_state": 16}
JAMBA |= {"expert_layer_period": 2, "expert_layer_offset": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
KINDS = {"mamba": MAMBA | {"num_hidden_layers": 1}, "falcon_mamba": MAMBA, "jamba": JAMBA}


def recurrent(kind: str, length: int, precision: Precision = "fp32") -> WorkloadSpec:
    """A small model with a recurrence over ``length`` tokens."""
    return transformers_spec(
        "causal-lm", {"model_type": kind, **KINDS[kind]}, batch={"sequence_length": length}, precision=precision
    )


@contextmanager
def every_step(_: Recorder) -> Iterator[None]:
    """Trace every step."""
    yield


@pytest.fixture(scope="module")
def imported() -> None:
    """Transformers, and its Mamba, which take seconds to import."""
    session.trace(recurrent("mamba", 16), 2, accumulates=False, profile=PROFILE)


@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize(
    ("kind", "precision", "length", "accumulates"),
    [
        ("mamba", "fp32", 96, False),
        *(
            pytest.param(kind, precision, length, True, marks=pytest.mark.thorough)
            for kind, precision in (*((kind, "fp32") for kind in KINDS), ("mamba", "bf16-mixed"))
            for length in (128, 145)
        ),
    ],
)
def test_groups_of_steps_take_the_memory_of_the_steps(
    kind: str, precision: Precision, length: int, monkeypatch: pytest.MonkeyPatch, *, accumulates: bool
) -> None:
    """Peaks within 1 % of those of a trace of every step, with fewer events."""
    spec = recurrent(kind, length, precision)
    grouped = session.trace(spec, 4, accumulates=accumulates, profile=PROFILE)
    monkeypatch.setattr(session, "grouped_scans", every_step)
    stepped = session.trace(spec, 4, accumulates=accumulates, profile=PROFILE)
    peaks = [replay(taken.events, taken.sizes, parts=taken.parts) for taken in (grouped, stepped)]
    assert peaks[0].peak_allocated_bytes == pytest.approx(peaks[1].peak_allocated_bytes, rel=0.01)
    assert peaks[0].peak_reserved_bytes == pytest.approx(peaks[1].peak_reserved_bytes, rel=0.01)
    assert 2 * len(grouped.events) < len(stepped.events)
    assert grouped.parts
