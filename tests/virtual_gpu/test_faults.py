"""Faults of a host: others take the memory, allocations fail, cards fall off the bus, kernels hang."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.results import Outcome
from batchwright.schemas.training import TrainingProgress
from batchwright.virtual_gpu.description import (
    AllocationFailure,
    DeviceLost,
    EccError,
    MemoryTaken,
    OtherProcess,
    SlowKernels,
    VirtualGpu,
)
from tests.support.service.processes import wait_until
from tests.virtual_gpu.conftest import Host, StartHost
from tests.virtual_gpu.test_main_path import SMALL
from tests.virtual_gpu.test_service_on_cuda import request, served

pytestmark = pytest.mark.virtual_gpu

MIB = 1024**2
GIB = 1024**3


LONGER = SMALL.model_copy(update={"batch": SMALL.batch.model_copy(update={"sequence_length": 256})})
"""Its activations are large beside the allocator's segments of 20 MiB: a smaller micro-batch needs less of them."""


def small_card(mebibytes: int) -> VirtualGpu:
    """A T4 with so much memory beside a context."""
    card = VirtualGpu.of("T4")
    total = card.context_bytes + mebibytes * MIB
    return card.model_copy(update={"total_bytes": total, "nvml_total_bytes": total + 100 * MIB})


def progress_of(directory: Path) -> list[TrainingProgress]:
    """The updates that a run has made so far."""
    path = directory / "progress.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [TrainingProgress.model_validate_json(line) for line in lines if line.endswith("\n")]


def train(host: Host, found: Recommendation, name: str, *failures: Any) -> list[TrainingProgress]:
    """The updates of a run that writes a checkpoint after each; failures happen after the second."""
    (host.folder / "rec.json").write_text(found.model_dump_json())
    directory = host.folder / name
    options = ("--recommendation", host.folder / "rec.json", "--output-dir", directory, "--json")
    with host.started("train", host.written(LONGER), *options, "--updates", "5", "--checkpoint-every", "1") as process:
        wait_until(lambda: len(progress_of(directory)) > 1 or process.poll() is not None)
        for failure in failures:
            host.session.inject(failure)
        output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, output + errors
    return progress_of(directory)


def test_memory_that_another_process_takes_in_the_middle_of_a_run(start_host: StartHost) -> None:
    """Micro-batches that fit no more are divided; the losses stay those of an undisturbed run.

    Under a limit the run gives its cache back at each checkpoint, which is when others can take memory.
    """
    host = start_host(card := small_card(512), compute_limit_bytes=64 * MIB)
    found = host.tuned(LONGER, 96, "--max-micro-batch-size", "48", "--memory-limit", str(card.total_bytes - 64 * MIB))
    undisturbed = train(host, found, "undisturbed")
    disturbed = train(host, found, "disturbed", MemoryTaken(at_allocation=1, taken_bytes=400 * MIB))
    assert not any(it.splits for it in undisturbed)
    assert any(it.splits for it in disturbed)
    assert [it.samples for it in disturbed] == [96] * 5
    assert [it.loss for it in disturbed] == pytest.approx([it.loss for it in undisturbed], rel=1e-4)


def test_memory_of_others_is_accounted_for(start_host: StartHost) -> None:
    """NVML's figure before the probe; the allocator's limit is what is left, less the margin."""
    host = start_host("T4", processes=(OtherProcess(used_bytes=10 * GIB),))
    found = host.tuned(SMALL, 64, "--max-micro-batch-size", "2")
    total, context = host.session.host.gpus[0].total_bytes, host.session.host.gpus[0].context_bytes
    for probe in found.evidence.probes:
        assert (probe.other_processes_bytes, probe.context_bytes) == (10 * GIB, context)
        assert probe.limit_bytes is not None
        assert probe.limit_bytes <= (total - 10 * GIB - context) * 0.97


def test_an_allocation_that_fails_once_is_a_retry(start_host: StartHost) -> None:
    """The allocator releases its cache and asks again: the probe fits."""
    host = start_host("T4", failures=(AllocationFailure(at_allocation=5),))
    found = host.tuned(SMALL, 8, "--max-micro-batch-size", "4")
    assert {it.outcome for it in found.evidence.probes} == {Outcome.FIT}


def test_a_card_that_is_lost_in_a_probe_is_named(start_host: StartHost) -> None:
    """The command ends with the code for devices, whatever was found before."""
    host = start_host("T4", failures=(DeviceLost(at_allocation=8),))
    ended = host.batchwright("tune", host.written(SMALL), "--effective-batch-size", "64", "--json")
    assert ended.returncode == 5, ended.stdout + ended.stderr
    assert "cuda:0 does not respond" in json.loads(ended.stdout)["message"]


def test_work_is_handed_back_when_its_card_is_lost(start_host: StartHost) -> None:
    """The tuning is queued again, no worker takes it, and the device says why."""
    host = start_host("T4", failures=(DeviceLost(at_allocation=8),))
    with served(host) as api:
        path = api.submit("/v1/tunings", request())
        devices = api.when("/v1/devices", lambda found: bool(found["items"] and found["items"][0]["unready"]))
        assert "device: cuda:0 does not respond" in devices["items"][0]["unready"]
        assert api.when(path, lambda found: found["state"] == "QUEUED")["queue"] is not None


@pytest.mark.parametrize("at_allocation", [5, 12], ids=["in the check for coupled samples", "in a probe"])
def test_an_ecc_error_is_an_error_of_the_device(start_host: StartHost, at_allocation: int) -> None:
    """By its name and not as the workload's; the next tuning on the card works."""
    host = start_host("T4", failures=(EccError(at_allocation=at_allocation),))
    options = ("--effective-batch-size", "64", "--max-micro-batch-size", "20", "--json")
    ended = host.batchwright("tune", host.written(SMALL), *options)
    assert ended.returncode == 5, ended.stdout + ended.stderr
    assert "ECC error" in json.loads(ended.stdout)["message"]
    assert host.batchwright("tune", host.written(SMALL), *options).returncode == 0


def test_kernels_that_hang_end_at_the_time_limit(start_host: StartHost) -> None:
    """The probe is killed, its memory is free again, and the error says what to raise."""
    host = start_host("T4", failures=(SlowKernels(seconds=2.0),))
    options = ("--effective-batch-size", "64", "--probe-timeout", "6", "--json")
    began = time.monotonic()
    ended = host.batchwright("tune", host.written(SMALL), *options)
    assert ended.returncode == 4, ended.stdout + ended.stderr
    assert "raise `probe_timeout_seconds`" in json.loads(ended.stdout)["message"]
    assert time.monotonic() - began < 200
    assert host.session.used_bytes(0) == 0
