"""The GPUs of ``gpus.toml``, whose first lines say how to add one, with derived figures. No torch."""

import tomllib
from pathlib import Path
from typing import Literal

from batchwright.schemas.gpus import MIB, ContextEntry, ContextKind, Gpu, GpuEntry, GpuFile

_FILE = Path(__file__).with_name("gpus.toml")
_CAPABILITY_SOURCE = "https://developer.nvidia.com/cuda-gpus"
_OLD_CAPABILITY_SOURCE = "https://developer.nvidia.com/cuda-legacy-gpus"
_AMD_SOURCE = (
    "torch reports the LLVM target's number: gfx90a as 9.0, gfx942 as 9.4 (https://github.com/ROCm/ROCm/issues/4203); "
    "targets: https://rocm.docs.amd.com/en/7.13.0-preview/reference/gpu-specs.html"
)
_WORKSPACE_SOURCE = (
    "torch 2.13, `aten/src/ATen/cuda/CublasHandlePool.cpp`: 32 MiB with compute capability 9, 10 and 12, else "
    "8.125 MiB (`:4096:2:16:8`); with ROCm 128 MiB on gfx942 and gfx950, else 32 MiB"
)

_SLACK_BYTES = {"reported": 256 * MIB, "derived": 640 * MIB}
"""By how many bytes the total may be lower with other drivers, by the evidence for the total. Several reports of one
card differ by up to 212 MiB (A100 80 GB: 81,251 and 81,039 MiB; T4: 15,110 MiB with older drivers, 14,912 with newer
ones)."""
_ECC_DIVISOR = 16
"""Inline ECC of GDDR6 takes a sixteenth: RTX 6000 Ada 48,622 MiB without and 45,496 with; A5000 24,114 and 22,721."""
_ECC_NOTE = "The total is for ECC off, the default; with ECC on it is a sixteenth less."


_RESIDENT_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536}
"""Most threads that a multiprocessor runs at once, by compute capability; 2,048 with all others of the table. CUDA C++
Programming Guide, "Technical Specifications per Compute Capability"."""


def threads_per_multiprocessor(capability: tuple[int, int]) -> int:
    """Return the most threads that a multiprocessor runs at once."""
    return _RESIDENT_THREADS.get(capability, 2048)


def blas_workspace_bytes(capability: tuple[int, int], kind: Literal["cuda", "rocm"]) -> int:
    """Return the workspace bytes that cuBLAS (hipBLAS) keeps for each handle and stream.

    Follows ``parseChosenWorkspaceSize`` in torch's ``CublasHandlePool.cpp``. cuBLASLt shares the workspace
    (``TORCH_CUBLASLT_UNIFIED_WORKSPACE``, on by default).
    """
    if kind == "rocm":
        return (128 if capability in {(9, 4), (9, 5)} else 32) * MIB
    return 32 * MIB if capability[0] in {9, 10, 12} else (4096 * 2 + 16 * 8) * 1024


def _context_kind(entry: GpuEntry) -> ContextKind:
    if entry.vendor == "amd":
        return "rocm"
    return (
        "before 8.0"
        if entry.compute_capability < (8, 0)
        else "8"
        if entry.compute_capability < (9, 0)
        else "9"
        if entry.compute_capability < (10, 0)
        else "10 and later"
    )


def _compute_capability_source(entry: GpuEntry) -> str:
    if entry.vendor == "amd":
        return _AMD_SOURCE
    return _OLD_CAPABILITY_SOURCE if entry.compute_capability < (7, 5) else _CAPABILITY_SOURCE


def _build_gpu(entry: GpuEntry, context: ContextEntry) -> Gpu:
    """Build the card of an entry, with its derived figures."""
    total = entry.total_mebibytes * MIB
    least_bytes = total - total // _ECC_DIVISOR if entry.ecc_is_optional else total
    return Gpu(
        name=entry.name,
        family=entry.family or entry.name,
        aliases=entry.aliases,
        vendor=entry.vendor,
        marketed_memory=entry.marketed_memory,
        total_bytes=total,
        least_total_bytes=least_bytes - _SLACK_BYTES[entry.evidence],
        compute_capability=entry.compute_capability,
        resident_threads=entry.multiprocessors
        and entry.multiprocessors * threads_per_multiprocessor(entry.compute_capability),
        context_bytes=context.interval,
        workspace_bytes=blas_workspace_bytes(entry.compute_capability, "rocm" if entry.vendor == "amd" else "cuda"),
        evidence=entry.evidence,
        sources={
            "total": entry.source,
            "compute_capability": _compute_capability_source(entry),
            "context": context.source,
            "workspace": _WORKSPACE_SOURCE,
        },
        notes=(*entry.notes, _ECC_NOTE) if entry.ecc_is_optional else entry.notes,
    )


_TABLE = GpuFile.model_validate(tomllib.loads(_FILE.read_text(encoding="utf-8")))
GPUS: tuple[Gpu, ...] = tuple(_build_gpu(entry, _TABLE.contexts[_context_kind(entry)]) for entry in _TABLE.gpus)
"""The cards, in the order of the file."""
SKYPILOT_NAMES = {entry.name: entry.skypilot for entry in _TABLE.gpus if entry.skypilot is not None}
"""SkyPilot's names of cards, by ours."""


def unknown_gpu(name: str, total_bytes: int) -> Gpu:
    """Return a card of which only the memory is known."""
    context = _TABLE.contexts["unknown"]
    return Gpu(
        name=name,
        family=name,
        vendor="unknown",
        marketed_memory=name,
        total_bytes=total_bytes,
        least_total_bytes=total_bytes - total_bytes // 12,
        compute_capability=(8, 0),
        context_bytes=context.interval,
        workspace_bytes=blas_workspace_bytes((8, 0), "cuda"),
        evidence="given",
        sources={
            "total": "the request; a card sold as 48 GB leaves torch up to a twelfth less (A40, L40)",
            "compute_capability": "an assumption",
            "context": context.source,
            "workspace": _WORKSPACE_SOURCE,
        },
        notes=("Only the memory of this card is known: kernels of compute capability 8.0 are assumed.",),
    )
