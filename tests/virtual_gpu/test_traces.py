"""What a trace tells: the same by torch's builds for the CPU and for CUDA, and what the loops of others take."""

import importlib.util
import json
import os
import subprocess
from typing import Any

import pytest

from batchwright.estimation.allocator.config import DEFAULT_SETTINGS
from batchwright.estimation.allocator.replay import replay
from batchwright.estimation.trace import Trace
from batchwright.estimation.tracing.fake_device import operators_whole_on_cuda
from batchwright.schemas.workload import ParallelismSpec, WorkloadSpec
from batchwright.torch_internals import operators_with_kernel
from tests.estimation.test_tracing import KINDS, LAYERS
from tests.support.factories import python_spec, transformers_spec
from tests.support.paths import ROOT
from tests.support.traced import traced_on_cuda
from tests.virtual_gpu.conftest import StartHost
from tests.workloads.test_families import FAMILIES, LLAMA, LORA

pytestmark = [pytest.mark.virtual_gpu, pytest.mark.usefixtures("tracing")]

# --- builds of torch ---

CPU_BUILD = ROOT / ".venv" / "bin" / "python"
"""Python with torch's build for the CPU, which `make install` makes."""
_TRACES = """
import json, pathlib, sys
from tests.support.traced import traced_on_cuda
folder = pathlib.Path(sys.argv[1])
found = traced_on_cuda(json.loads((folder / "cases.json").read_bytes()))
traces = {name: [trace.model_dump(mode="json") for trace in traces] for name, traces in found.items()}
(folder / "traces.json").write_text(json.dumps(traces))
"""
EFFICIENTNET = {"model_type": "efficientnet", "image_size": 64, "hidden_dim": 320, "width_coefficient": 0.25}
OWN: dict[str, WorkloadSpec] = {
    "efficientnet": transformers_spec("image-classification", EFFICIENTNET, batch={"image_size": 64}),
    "diffusion transformer": python_spec("tests.support.traced_models:diffusion"),
    "llama, checkpointed": transformers_spec(
        "causal-lm", LLAMA, batch={"sequence_length": 16}, precision="bf16", activation_checkpointing=True
    ),
    **{
        f"qlora, {'checkpointed' if checkpoints else 'plain'}": transformers_spec(
            "causal-lm",
            LLAMA,
            batch={"sequence_length": 16},
            precision="bf16-mixed",
            adapter={**LORA, "quantization": {"kind": "nf4"}},
            activation_checkpointing=checkpoints,
        )
        for checkpoints in (False, True)
    },
    **{
        layer: python_spec("tests.support.traced_models:layered", layer=layer, **arguments)
        for layer, arguments in LAYERS.items()
    },
}
ALL = {**KINDS, **{f"family {name}": spec for name, spec in FAMILIES.items()}, **OWN}


@pytest.fixture(scope="module")
def by_build(tracing: None, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Trace]]]:
    """The traces of all kinds of models and families: by torch's build for the CPU, and by that for CUDA."""
    del tracing
    if not CPU_BUILD.exists():
        pytest.skip(f"{CPU_BUILD} is missing: run `make install`")
    cases: list[dict[str, Any]] = [
        {
            "name": name,
            "spec": spec.model_dump(mode="json"),
            "sizes": [4],
            "accumulates": True,
            "compute_capability": [9, 0],
        }
        for name, spec in ALL.items()
    ]
    folder = tmp_path_factory.mktemp("builds")
    (folder / "cases.json").write_text(json.dumps(cases))
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tuner", ROOT / "service")))
    ended = subprocess.run(
        [CPU_BUILD, "-c", _TRACES, folder],
        cwd=ROOT,
        env={"HOME": os.environ["HOME"], "PATH": os.environ["PATH"], "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads((folder / "traces.json").read_bytes())
    return [
        {name: [Trace.model_validate(trace) for trace in traces] for name, traces in found.items()},
        traced_on_cuda(cases),
    ]


@pytest.mark.parametrize("name", ALL)
def test_both_builds_trace_the_same(name: str, by_build: list[dict[str, list[Trace]]]) -> None:
    """Every block, in the same order."""
    of_cpu, of_cuda = by_build
    assert of_cpu[name] == of_cuda[name]


def test_the_table_of_torch_names_the_operators_that_are_whole_on_cuda() -> None:
    """The operators for which this build, which is CUDA's, has both a kernel of CUDA and a composition."""
    both = set(operators_with_kernel("CUDA")) & set(operators_with_kernel("CompositeImplicitAutograd"))
    assert operators_whole_on_cuda() == both


# --- training loops ---

MIB = 1024**2
SIZE = 4
LOOPS = ("hugging-face", "lightning", "plain")
WIDE = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 1376}
SPECS: dict[str, tuple[WorkloadSpec, int]] = {
    "gpt2": (
        transformers_spec(
            "causal-lm",
            {"model_type": "gpt2", "n_layer": 4},
            batch={"sequence_length": 512},
            precision="bf16-mixed",
            gradient_clipping=1.0,
            optimizer={"name": "adamw", "implementation": "foreach"},
        ),
        2,
    ),
    "llama, adapted and checkpointed": (
        transformers_spec(
            "causal-lm",
            {"model_type": "llama", **WIDE, "vocab_size": 32000},
            batch={"sequence_length": 512},
            precision="bf16-mixed",
            activation_checkpointing=True,
            adapter={"kind": "lora", "target_modules": "all-linear"},
            optimizer={"name": "adamw", "implementation": "foreach"},
        ),
        1,
    ),
    "bert": (
        transformers_spec(
            "sequence-classification",
            {"model_type": "bert", **WIDE},
            batch={"sequence_length": 256},
            optimizer={"name": "adamw", "implementation": "foreach"},
        ),
        3,
    ),
}
"""Workloads with the micro-batches of an update."""
_GPT2, _MICRO_BATCHES = SPECS["gpt2"]
SPECS["gpt2 on two ranks"] = (_GPT2.model_copy(update={"parallelism": ParallelismSpec(world_size=2)}), _MICRO_BATCHES)
LOOPS_OF_SPECS = [
    (loop, name)
    for name, (spec, _) in SPECS.items()
    for loop in LOOPS
    if loop != "lightning" or spec.parallelism.world_size == 1
]
"""The loops and workloads that can be estimated."""


@pytest.fixture(scope="module")
def estimated(tracing: None) -> dict[str, tuple[int, int]]:
    """The allocated and reserved bytes of each workload in each loop."""
    del tracing
    cases: list[dict[str, Any]] = [
        {
            "name": f"{name} by {loop}",
            "spec": spec.model_dump(mode="json"),
            "sizes": [SIZE],
            "accumulates": micro_batches > 1,
            "compute_capability": [8, 6],
            "loop": loop,
        }
        for loop, name in (*LOOPS_OF_SPECS, *(("batchwright", name) for name in SPECS))
        for spec, micro_batches in (SPECS[name],)
    ]
    found = {}
    for case, (trace,) in traced_on_cuda(cases).items():
        replayed = replay(trace.events, trace.sizes, DEFAULT_SETTINGS)
        found[case] = (replayed.peak_allocated_bytes, replayed.peak_reserved_bytes)
    return found


@pytest.mark.parametrize(("loop", "name"), LOOPS_OF_SPECS)
def test_a_loop_takes_what_was_estimated(
    loop: str, name: str, estimated: dict[str, tuple[int, int]], start_host: StartHost
) -> None:
    """Allocated bytes to a part in a thousand, reserved bytes to a few segments of 2 MiB."""
    if loop == "lightning" and importlib.util.find_spec("lightning") is None:
        pytest.skip("Lightning is not installed beside torch's CUDA build")
    spec, micro_batches = SPECS[name]
    ranks = spec.parallelism.world_size
    host = start_host(*["A10G"] * ranks)
    launcher = ("-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone") if ranks > 1 else ()
    program = ("-m", "tests.virtual_gpu.loop_program", loop, host.written(spec), str(SIZE), str(micro_batches))
    ended = host.run(*launcher, *program)
    assert ended.returncode == 0, ended.stderr
    peaks = json.loads(ended.stdout.splitlines()[-1])
    allocated, reserved = estimated[f"{name} by {loop}"]
    assert allocated == pytest.approx(peaks["allocated_bytes"], rel=1e-3)
    assert reserved == pytest.approx(peaks["reserved_bytes"], abs=8 * MIB)
