"""The simulated allocator against torch's own: requests recorded on a CUDA device, replayed.

Each recording is a process of its own (this file run as a program): the history has to begin before the first block.
"""

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import torch

from batchwright.errors import OutOfMemoryError
from batchwright.estimation.allocator.config import DEFAULT_SETTINGS, EXPANDABLE_SEGMENTS, AllocatorSettings
from batchwright.estimation.allocator.replay import CapacitySearch, replay
from batchwright.hardware.memory_devices.base import MemoryDevice
from batchwright.hardware.memory_devices.factory import open_device
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.micro_batches.splitting import sliced
from batchwright.training.update_engine import UpdateEngine
from batchwright.workloads.build import build_model, build_workload
from tests.support.factories import gpt_spec, resnet_spec
from tests.support.recorded_requests import recorded_requests

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # other versions deprecate other things

ALLOCATORS = {
    "default": (DEFAULT_SETTINGS, "expandable_segments:False"),
    "expandable": (EXPANDABLE_SEGMENTS, "expandable_segments:True"),
}
WORKLOADS = {
    "gpt": (
        gpt_spec(
            model={"kind": "reference", "architecture": {"name": "gpt", "layers": 4, "heads": 8, "width": 512}},
            batch={"sequence_length": 512},
            precision="bf16-mixed",
        ),
        16,
    ),
    "resnet": (
        resnet_spec(
            model={"kind": "reference", "architecture": {"name": "resnet", "width": 64}}, batch={"image_size": 160}
        ),
        24,
    ),
}
"""Each with its micro-batch size; an update has two micro-batches."""
IS_EXACT = not torch.__version__.startswith(("2.8.", "2.9.", "2.10.", "2.11.", "2.12."))
"""True if the simulator has the order of equal blocks of this torch (see ``takes_oldest_first``)."""


def record(name: str, limit_bytes: int, device_name: str = "cuda:0") -> dict[str, Any]:
    """Two updates of a workload: the history of the allocator, and the peaks of the whole and of the second update."""
    spec, size = WORKLOADS[name]
    device = open_device(device_name)  # gives back what it takes, which no replay knows of
    torch.cuda.reset_peak_memory_stats()
    if limit_bytes:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(limit_bytes / total)
    torch.cuda.memory._record_memory_history(context=None, max_entries=1_000_000)
    found: dict[str, Any] = {"fits": True}
    try:
        found |= two_updates(spec, size, device)
    except (OutOfMemoryError, torch.OutOfMemoryError):
        found["fits"] = False
    found["retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
    found["history"] = history()
    return found


def two_updates(spec: WorkloadSpec, size: int, device: MemoryDevice) -> dict[str, Any]:
    """Peaks until the first update's end and during the second, and where in the history that begins."""
    workload = build_workload(spec)
    model = build_model(spec, workload).to(device.torch_device)
    engine = UpdateEngine(spec, workload, model, device, recovers=False)
    window = [sliced(workload.make_batch(size), size) for _ in range(2)]
    engine.update(window)
    first, mark = peaks(), len(history())
    torch.cuda.reset_peak_memory_stats()
    engine.update(window)
    return {"first": first, "mark": mark, "second": peaks()}


def peaks() -> list[int]:
    """Most allocated and most reserved."""
    return [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]


def history() -> list[dict[str, Any]]:
    """What the allocator did so far, without what no replay needs."""
    entries = torch.cuda.memory._snapshot()["device_traces"][0]
    names = ("action", "addr", "size", "stream")
    return [{name: entry[name] for name in names if name in entry} for entry in entries]


@cache
def recording(name: str, allocator: str, limit_bytes: int = 0) -> dict[str, Any]:
    """``record`` in a process whose allocator is set so, once for all tests."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTORCH_CUDA_ALLOC_CONF"}
    environment["PYTORCH_ALLOC_CONF"] = ALLOCATORS[allocator][1]
    finished = subprocess.run(
        [sys.executable, __file__, name, str(limit_bytes)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    found: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module", params=[(name, allocator) for name in WORKLOADS for allocator in ALLOCATORS])
def recorded(request: pytest.FixtureRequest) -> tuple[str, str, dict[str, Any]]:
    """A workload, an allocator, and what torch recorded and measured of them."""
    name, allocator = request.param
    return name, allocator, recording(name, allocator)


def replayed(found: dict[str, Any], settings: AllocatorSettings, since: int = 0) -> tuple[int, int]:
    """Most allocated and most reserved of a recording's requests, from an entry of its history on."""
    events, sizes = recorded_requests(found["history"])
    before, _ = recorded_requests(found["history"][:since])
    result = replay(events, sizes, settings, since=len(before))
    return result.peak_allocated_bytes, result.peak_reserved_bytes


def test_a_replay_has_torchs_own_peaks(recorded: tuple[str, str, dict[str, Any]]) -> None:
    """Allocated and reserved bytes of the first update and of the second, to the byte from torch 2.13 on.

    Before, addresses decided between equal blocks: allocated within 1 %, reserved within 3.
    """
    _, allocator, found = recorded
    assert found["fits"]
    assert len({entry["stream"] for entry in found["history"] if entry["action"] == "alloc"}) == 1, "one stream"
    settings, _ = ALLOCATORS[allocator]
    first = {**found, "history": found["history"][: found["mark"]]}
    for peaks_found, expected in (
        (replayed(first, settings), found["first"]),
        (replayed(found, settings, since=found["mark"]), found["second"]),
    ):
        assert peaks_found[0] == pytest.approx(expected[0], rel=0 if IS_EXACT else 0.01)
        assert peaks_found[1] == pytest.approx(expected[1], rel=0 if IS_EXACT else 0.03)


def test_torch_gets_through_with_the_least_capacity(recorded: tuple[str, str, dict[str, Any]]) -> None:
    """A process limited to the least capacity makes both updates.

    Where addresses decide, blocks lie elsewhere under pressure than in the replay, and in expandable segments torch
    holds a limit against what is asked for, not against what it maps: 2 % and a segment more.
    """
    name, allocator, found = recorded
    settings, _ = ALLOCATORS[allocator]
    least = CapacitySearch(*recorded_requests(found["history"]), settings).result()
    if not IS_EXACT or settings.expandable_segments:
        least = int(least * 1.02) + settings.large_segment_bytes
    assert recording(name, allocator, least)["fits"]


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_torch_runs_out_below_the_live_bytes(allocator: str) -> None:
    """At 95 % of the most rounded bytes at once, which an expandable segment's allocated bytes are, nothing helps."""
    requests = recorded_requests(recording("gpt", allocator)["history"])
    live = replay(*requests, EXPANDABLE_SEGMENTS).peak_allocated_bytes
    assert not recording("gpt", allocator, int(live * 0.95))["fits"]


if __name__ == "__main__":
    print(json.dumps(record(sys.argv[1], int(sys.argv[2]))))  # noqa: T201 - what the parent reads
