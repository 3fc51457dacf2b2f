"""Profiles whose kernels decide alike share a trace, which is for each of them the trace that it has alone."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from batchwright.hardware.gpu_lookup import find_gpu
from batchwright.schemas.gpus import KernelProfile
from tests.support.factories import gpt_spec, python_spec, resnet_spec, transformers_spec
from tests.support.forked import run_where_traced

pytestmark = pytest.mark.usefixtures("tracing")

GROUPED = {
    "model_type": "mixtral",
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "vocab_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CARDS = ("T4", "A100-80GB", "A10G", "H100-80GB", "B200", "MI300X")
TEXT = {"batch": {"sequence_length": 16}}
WORKLOADS = {
    "attention in half precision": gpt_spec(precision="bf16-mixed"),
    "convolutions": resnet_spec(),
    "recurrent layers": python_spec("tests.support.traced_models:tokens"),
    "sums of rows": gpt_spec(),
    "experts": transformers_spec("causal-lm", GROUPED, precision="bf16", **TEXT),
}
"""Workloads by what may differ: kernels, workspaces, a library, a workspace by threads, the capability."""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """For each workload the names of the profiles, those that led a run, and those whose trace alone is another."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        run_where_traced(_compare, path)
        result: dict[str, Any] = json.loads(path.read_bytes())
    return result


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_shared_trace_is_that_of_each_profile(found: dict[str, Any], name: str) -> None:
    """Events, bytes, bounds and errors are those of a trace of the profile alone."""
    assert found[name]["other"] == []


@pytest.mark.parametrize(
    ("name", "runs"),
    [("attention in half precision", 4), ("recurrent layers", 2), ("sums of rows", 2)],
)
def test_profiles_that_decide_alike_share_a_run(found: dict[str, Any], name: str, runs: int) -> None:
    """There are fewer runs than profiles: one for each kernel of attention, or for each library."""
    assert len(found[name]["led"]) == runs < len(found[name]["profiles"])


def _compare(path: Path) -> None:
    """Trace each workload for all profiles together and for each alone, and write where the traces differ."""
    from batchwright.estimation.cuda_shim import Shim, _load, cache_folder
    from batchwright.estimation.tracing.kernel_workspaces.device_kernels import representative
    from batchwright.estimation.tracing.runs import TracedRuns
    from batchwright.estimation.tracing.shape_cache import ShapeCache
    from batchwright.estimation.tracing.sized_workload import traced_profile

    shim, shapes = Shim(_load(cache_folder())), ShapeCache()
    profiles = [traced_profile(representative(find_gpu(name).profile)) for name in CARDS]
    found = {}
    for name, spec in WORKLOADS.items():
        together = TracedRuns(spec, profiles, shim=shim, shapes=shapes)
        led, other = [], []
        for profile in profiles:
            assert isinstance(profile, KernelProfile)
            if not any(traced == profile for traced, _ in together._traces):
                led.append(str(profile))
            shared = together.get(profile, 4, accumulates=True)
            alone = TracedRuns(spec, [profile], shim=shim, shapes=shapes).get(profile, 4, accumulates=True)
            other += [] if shared == alone else [str(profile)]
        found[name] = {"profiles": [str(profile) for profile in profiles], "led": led, "other": other}
    path.write_text(json.dumps(found))
    os._exit(0)  # as tasks of the fork server do: at a regular end torch's threads may abort the process
