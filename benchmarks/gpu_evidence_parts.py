"""One part of gpu_evidence.py, in a process of its own: python benchmarks/gpu_evidence_parts.py PART DEVICE FOUND.json.

What was found is written after each step, so that a part that fails or is ended keeps what it had.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import gpu_evidence_jobs
import gpu_evidence_recurrent
import gpu_evidence_workspaces
import torch
from torch import Tensor, distributed, nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional

from batchwright.driving.foreground import run_tuning
from batchwright.errors import EstimateError
from batchwright.estimation.client import estimate
from batchwright.hardware.gpu_lookup import context_bytes_of, find_gpu
from batchwright.hardware.inventory import find_device
from batchwright.hardware.nvml import read_memory
from batchwright.schemas.estimates import EstimateRequest
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import TuningRequest
from batchwright.schemas.results import DeviceInfo
from batchwright.schemas.workload import parse_spec
from batchwright.system.files import write_atomically

MIB = 1024**2
GIB = 1024**3
PACKAGES = ("torch", "transformers", "accelerate", "lightning", "triton", "numpy")
SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG", "CUDA_MODULE_LOADING")
FINDERS_WORKLOAD = "LSTM"
Row = dict[str, Any]


class Report:
    """The findings of a part so far, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: Row = {}

    def put(self, name: str, value: object) -> None:
        """Add a finding, or replace it."""
        self._found[name] = value
        write_atomically(self._path, json.dumps(self._found))


# --- versions ---


def versions(device: DeviceInfo, report: Report) -> None:
    """Report what decides which kernels run, and the card as torch, NVML and our table describe it."""
    installed = {name: _version(name) for name in PACKAGES}
    report.put("packages", {name: version for name, version in installed.items() if version is not None})
    driver = Path("/proc/driver/nvidia/version")
    report.put("driver_file", driver.read_text(encoding="utf-8").strip() if driver.exists() else None)
    cuda: Any = torch.backends.cuda
    cudnn: Any = torch.backends.cudnn
    nccl = ".".join(map(str, _nccl_version())) if distributed.is_nccl_available() else None
    libraries = {"cuda": torch.version.cuda, "cudnn": cudnn.version(), "nccl": nccl}
    report.put("libraries", libraries)
    report.put("settings", {name: os.environ[name] for name in SETTINGS if name in os.environ})
    report.put(
        "kernels",
        {
            "cudnn_benchmark": cudnn.benchmark,
            "cudnn_allow_tf32": cudnn.allow_tf32,
            "matmul_allow_tf32": cuda.matmul.allow_tf32,
            "flash_attention": cuda.flash_sdp_enabled(),
            "efficient_attention": cuda.mem_efficient_sdp_enabled(),
            "cudnn_attention": cuda.cudnn_sdp_enabled(),
        },
    )
    properties = torch.cuda.get_device_properties(device.id)
    seen = {
        "name": properties.name,
        "total_bytes": properties.total_memory,
        "processors": properties.multi_processor_count,
    }
    report.put("torch_sees", {**seen, "compute_capability": [properties.major, properties.minor]})
    report.put("nvml_total_bytes", device.total_bytes)
    try:
        listed = find_gpu(device.name)
    except EstimateError as error:
        report.put("table", {"failed": str(error)})
    else:
        report.put("table", listed.model_dump(mode="json", exclude={"sources", "notes", "aliases"}))


def _nccl_version() -> list[int]:
    library: Any = torch.cuda.nccl
    return list(library.version())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# --- the context ---


def context(device: DeviceInfo, report: Report) -> None:
    """Report the memory outside torch's allocator: of the bare context, and after the first use of each library."""
    before = read_memory(device.id).used_bytes
    report.put("assumed", context_bytes_of(device.name).model_dump())
    report.put("used_before_bytes", before)
    half = partial(_ones, dtype=torch.bfloat16)
    steps: dict[str, Callable[[torch.device], object]] = {
        "context": lambda card: torch.empty(1, device=card),
        "first kernel": lambda card: torch.ones(1, device=card) + 1,
        "cublas handle": lambda _: torch.cuda.current_blas_handle(),  # type: ignore[no-untyped-call]
        "matrix product": lambda card: _ones(card, 512, 512) @ _ones(card, 512, 512),
        "backward pass": lambda card: _backward(_ones(card, 512, 512) @ _ones(card, 512, 512)),
        "half types": lambda card: _backward(half(card, 4096, 4096) @ half(card, 4096, 4096)),
        "convolution": lambda card: _backward(functional.conv2d(_ones(card, 4, 64, 32, 32), _ones(card, 64, 64, 3, 3))),
        "attention": lambda card: _backward(_attention(card)),
        "sort and index": lambda card: _backward(
            functional.embedding(torch.zeros(8, 512, dtype=torch.long, device=card), _ones(card, 1000, 64))
        ),
        "adamw update": _adamw_update,
        "lstm": lambda card: _backward(nn.LSTM(64, 64).to(card)(_ones(card, 16, 8, 64))[0]),
        "fourier transform": lambda card: torch.fft.fft(_ones(card, 1024)),
        "singular values": lambda card: torch.linalg.svdvals(torch.eye(64, device=card)),
    }
    after: Row = {}
    for name, step in steps.items():
        try:
            step(torch.device(device.id))
        except RuntimeError as error:  # a library that fails: the others are still of interest
            report.put(f"{name} failed", str(error)[:500])
            continue
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        after[name] = read_memory(device.id).used_bytes - before - torch.cuda.memory_reserved(device.id)
        report.put("outside_allocator_bytes_after", after)


def _ones(card: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*shape, device=card, dtype=dtype, requires_grad=True)


def _attention(card: torch.device) -> Tensor:
    query, key, value = (
        torch.ones(2, 4, 128, 64, device=card, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def _backward(result: Tensor) -> None:
    torch.autograd.backward(result.float().sum())


def _adamw_update(card: torch.device) -> None:
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 256)).to(card)
    optimizer = torch.optim.AdamW(model.parameters())
    _backward(model(_ones(card, 32, 256)))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


# --- workspaces ---


def workspaces(device: DeviceInfo, report: Report) -> None:
    """Report the workspaces by operator and shape."""
    rows: list[Row] = []
    for row in gpu_evidence_workspaces.measure(torch.device(device.id)):
        rows.append(row)
        report.put("operators", rows)
    report.put("recurrent", list(gpu_evidence_recurrent.measure(torch.device(device.id))))


# --- NCCL ---


def nccl(device: DeviceInfo, report: Report) -> None:
    """Report the memory of a communicator of two cards outside torch's allocator."""
    del device
    if torch.cuda.device_count() < 2:
        report.put("skipped", f"needs two cards, and this host has {torch.cuda.device_count()}")
        return
    with tempfile.TemporaryDirectory() as folder:
        spawn(_communicate, args=(folder,), nprocs=2)  # type: ignore[no-untyped-call]
        for rank in range(2):
            report.put(f"rank {rank}", json.loads((Path(folder) / f"{rank}.json").read_text(encoding="utf-8")))


def _communicate(rank: int, folder: str) -> None:
    """Run one rank: the bytes outside the allocator before the communicator, and after each collective."""
    device = find_device(f"cuda:{rank}")
    card = torch.device(device.id)
    torch.cuda.set_device(card)
    values = torch.ones(16 * MIB, device=card)
    torch.cuda.synchronize()
    begin = read_memory(device.id).used_bytes - torch.cuda.memory_reserved(card)
    distributed.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found: Row = {"version": _nccl_version()}
    halves = values.chunk(2)
    collectives: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: distributed.all_reduce(values),
        "reduce_scatter": lambda: distributed.reduce_scatter_tensor(halves[0].clone(), values),
        "all_gather": lambda: distributed.all_gather_into_tensor(values, halves[0].clone()),
    }
    for name, collective in collectives.items():
        collective()
        torch.cuda.synchronize()
        found[f"outside_allocator_bytes_after_{name}"] = (
            read_memory(device.id).used_bytes - torch.cuda.memory_reserved(card) - begin
        )
    write_atomically(Path(folder) / f"{rank}.json", json.dumps(found))
    distributed.destroy_process_group()


# --- tunings ---


def tuned_specs(device: DeviceInfo) -> dict[str, tuple[Row, int, int | None]]:
    """Return the specs of the tunings, with their effective batch and their limit (None: the whole card).

    An LSTM in 3 GiB, of which the context is a large part; a transformer on the whole card; an adapter on a frozen one,
    and an optimizer whose state is not that of AdamW; a conv net, whose workspaces are the least certain, on 16 GiB at
    most, because its batches are made on the host.
    """
    gpt2 = {"model": gpu_evidence_jobs.GPT2, "batch": {"sequence_length": 1024}, "precision": "bf16-mixed"}
    resnet = {
        "model": {
            "kind": "transformers",
            "task": "image-classification",
            "config": {"model_type": "resnet", "num_labels": 1000},
        },
        "batch": {"image_size": 224},
        "precision": "bf16-mixed",
    }
    lstm = {
        "model": {
            "kind": "python",
            "target": "finders_workloads:lstm",
            "arguments": {"width": 512, "layers": 2, "length": 256},
        }
    }
    llama = {"model": gpu_evidence_jobs.LLAMA, "batch": {"sequence_length": 1024}, "precision": "bf16-mixed"}
    middle = 16 * GIB if device.total_bytes > 17 * GIB else None
    adapter = {"kind": "lora", "rank": 16, "target_modules": "all-linear"}
    return {
        "lstm in 3 GiB": (lstm, 4096, 3 * GIB),
        "gpt2": (gpt2, 512, None),
        "llama with lora": ({**llama, "adapter": adapter}, 512, None),
        "llama with adafactor": ({**llama, "optimizer": {"name": "adafactor"}}, 512, middle),
        "resnet50": (resnet, 1024, middle),
    }


def tunings(device: DeviceInfo, report: Report) -> None:
    """Report three tunings, each with its estimate and the errors of its peaks."""
    for name, (spec, batch, limit) in tuned_specs(device).items():
        request = TuningRequest(
            spec=parse_spec(spec),
            effective_batch_size=batch,
            device=device.id,
            memory_limit_bytes=limit,
            allow_batch_coupling=True,
        )
        began, row = time.monotonic(), Row()
        try:
            found = run_tuning(request)
            row = _tuned(found)
            report.put(name, row)  # what was measured stays, whatever becomes of the estimate
            report.put(name, {**row, **_estimated(found, device)})
        except Exception as error:  # noqa: BLE001 - the next tuning may succeed
            words = f"{type(error).__name__}: {error}"
            report.put(name, {"seconds": round(time.monotonic() - began, 1), **row, "failed": words[:2000]})


def jobs(device: DeviceInfo, report: Report) -> None:
    """Report jobs at one size: what probes, estimates and the jobs themselves say of their memory."""
    for name, row in gpu_evidence_jobs.rows(device, _tuned, _estimated):
        report.put(name, row)


def _tuned(found: Recommendation) -> Row:
    probes = [
        [probe.micro_batch_size, probe.outcome.value, probe.peak_reserved_bytes, round(probe.seconds.total, 2)]
        for probe in found.evidence.probes
    ]
    return {
        "largest": found.largest_micro_batch_size,
        "plan": None if found.plan is None else found.plan.micro_batch_sizes[0],
        "proof": found.evidence.proof.statement,
        "infeasible_reason": found.infeasible_reason,
        "probes": probes,
        "seconds": round(found.timings.total_seconds, 1),
        "warnings": [advice.message for advice in found.warnings],
        "environment": found.environment,
    }


def _estimated(found: Recommendation, device: DeviceInfo) -> Row:
    """Return the estimate at the size that was found, and its errors; of a whole card its largest sizes too."""
    headroom, size = found.headroom, found.largest_micro_batch_size
    if headroom is None or size is None:
        return {}
    request = EstimateRequest(
        spec=found.request.spec,
        gpus=(_gpu_name(device),),
        micro_batch_size=size,
        effective_batch_size=found.request.effective_batch_size,
    )
    answer = estimate(request)
    card, peak = answer.gpus[0], answer.gpus[0].peak
    if peak is None:
        return {"estimate": {"notes": card.notes}}
    measured = {
        "allocated": headroom.allocated_bytes,
        "reserved": headroom.reserved_bytes,
        "outside_allocator": headroom.context_bytes,
    }
    expected = {
        "allocated": peak.allocated_bytes,
        "reserved": peak.reserved_bytes,
        "outside_allocator": peak.outside_allocator_bytes.expected,
    }
    sizes = {"largest": card.largest_micro_batch_size, "surely": card.surely_fits, "perhaps": card.may_fit}
    return {
        "measured_bytes": measured,
        "estimate": {
            "bytes": expected,
            "device_bytes": peak.device_bytes.model_dump(),
            "notes": card.notes,
            **(sizes if found.request.memory_limit_bytes is None else {}),
        },
        "errors": {name: round(expected[name] / taken - 1, 4) for name, taken in measured.items() if taken},
    }


def _gpu_name(device: DeviceInfo) -> str:
    try:
        return find_gpu(device.name).name
    except EstimateError:
        return f"{device.total_bytes // MIB}MiB"


# --- finders ---


def finders(device: DeviceInfo, report: Report) -> None:
    """Report our search and the peers' on one workload, each in a process of its own, and whether each answer fits."""
    from finders import OURS, Bench, Finders, fitting  # noqa: PLC0415 - only this part's
    from finders_peers import PEERS  # noqa: PLC0415 - as above
    from finders_workloads import cases  # noqa: PLC0415 - as above

    case = next(case for case in cases(device) if case.name == FINDERS_WORKLOAD)
    report.put("workload", {"name": case.name, "limit_bytes": case.request.memory_limit_bytes})
    bench = Bench(device)
    answers: dict[str, int | None] = {}
    with tempfile.TemporaryDirectory() as folder:
        processes = Finders(bench, case, Path(folder))
        for name in (OURS, *PEERS):
            found = processes.run(name)
            answers[name] = found.answer
            figures = {"answer": found.answer, "error": found.error, "trials": len(found.trials)}
            report.put(name, {**figures, "seconds": round(found.seconds, 1)})
        report.put("fits", fitting(bench, case, processes, list(answers.values())))


PARTS: dict[str, Callable[[DeviceInfo, Report], None]] = {
    "versions": versions,
    "context": context,
    "workspaces": workspaces,
    "nccl": nccl,
    "tunings": tunings,
    "jobs": jobs,
    "finders": finders,
}


if __name__ == "__main__":
    PARTS[sys.argv[1]](find_device(sys.argv[2]), Report(Path(sys.argv[3])))
