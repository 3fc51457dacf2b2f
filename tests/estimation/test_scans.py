"""Traces of Mamba's recurrence in groups of steps, against traces of every step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.factories import transformers_spec
from tuner.estimation.allocator.replay import replay
from tuner.estimation.trace import Category, Mark, Trace
from tuner.estimation.tracing import session
from tuner.estimation.tracing.recorder import Recorder
from tuner.schemas.gpus import KernelProfile
from tuner.schemas.workload import Precision, WorkloadSpec

PROFILE = KernelProfile(compute_capability=(9, 0), kind="cuda")
MAMBA: dict[str, Any] = {"hidden_size": 64, "state_size": 16, "num_hidden_layers": 2, "vocab_size": 128}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64}
JAMBA = {**HEADS, "hidden_size": 64, "vocab_size": 128, "num_hidden_layers": 2, "num_experts": 2}
JAMBA |= {"num_experts_per_tok": 1, "mamba_dt_rank": 4}
JAMBA |= {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_d_state": 16}
JAMBA |= {"expert_layer_period": 2, "expert_layer_offset": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
KINDS = {"mamba": MAMBA, "falcon_mamba": MAMBA, "jamba": JAMBA}


def recurrent(kind: str, length: int, precision: Precision = "fp32") -> WorkloadSpec:
    """A small model with a recurrence over ``length`` tokens."""
    return transformers_spec(
        "causal-lm", {"model_type": kind, **KINDS[kind]}, batch={"sequence_length": length}, precision=precision
    )


@contextmanager
def every_step(_: Recorder) -> Iterator[None]:
    """Trace every step."""
    yield


@pytest.mark.parametrize("length", [128, 145])
@pytest.mark.parametrize(("kind", "precision"), [(kind, "fp32") for kind in KINDS] + [("mamba", "bf16-mixed")])
def test_groups_of_steps_take_the_memory_of_the_steps(
    kind: str, precision: Precision, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peaks within 1 % of those of a trace of every step, with fewer events."""
    spec = recurrent(kind, length, precision)
    grouped = session.trace(spec, 4, accumulates=True, profile=PROFILE)
    monkeypatch.setattr(session, "grouped_scans", every_step)
    stepped = session.trace(spec, 4, accumulates=True, profile=PROFILE)
    peaks = [replay(taken.events, taken.sizes) for taken in (grouped, stepped)]
    assert peaks[0].peak_allocated_bytes == pytest.approx(peaks[1].peak_allocated_bytes, rel=0.01)
    assert peaks[0].peak_reserved_bytes == pytest.approx(peaks[1].peak_reserved_bytes, rel=0.01)
    assert len(grouped.events) < len(stepped.events)


def test_a_block_is_replaced_by_its_parts() -> None:
    """In the place of the block, with its category, and with marks where they were."""
    whole = Trace(
        micro_batch_size=1,
        accumulates=False,
        sizes=(8, 12, 4),
        categories=(Category.PARAMETERS, Category.ACTIVATIONS, Category.TEMPORARIES),
        events=(0, 1, 2, ~1, ~2),
        marks=(Mark(name="build", position=0), Mark(name="measured-update", position=2), Mark(name="end", position=5)),
        decisions="cuda",
    )
    parts = whole.with_parts({1: 3})
    assert parts.sizes == (8, 4, 4, 4, 4)
    assert parts.events == (0, 1, 2, 3, 4, ~1, ~2, ~3, ~4)
    assert parts.categories[1:4] == (Category.ACTIVATIONS,) * 3
    assert [mark.position for mark in parts.marks] == [0, 4, 9]
    assert whole.with_parts({}) is whole
