"""The table of GPUs: the memory torch finds on them, and what a process takes beside its tensors. No torch.

Three figures of a card differ: what it is sold as (80 GB), what NVML and `nvidia-smi` report (81,559 MiB), and what
torch reports as `total_memory` and can give out (81,008 MiB). Estimates are made with the last. Drivers reserve more or
less of it (a T4: 15,110 MiB with older ones, 14,912 with newer ones), so each card has the fewest bytes to expect too.

Where nobody was found to report torch's figure, these rules give one, with a wider interval:

* from NVML's total: 0.7 GiB less. On fourteen cards of this list for which both are known the difference is 440 to
  930 MiB.
* from the memory a card is sold with, for GDDR6 with ECC: fifteen sixteenths of it are left (A10: 23,028 MiB of 24 GiB,
  L40S: 46,068 MiB of 48 GiB, T4: 15,360 MiB of 16 GiB), then as before.
* AMD Instinct: 16 MiB less than it is sold with, as reported of MI210, MI250X and MI300X.
"""

from __future__ import annotations

from typing import Literal

from tuner.schemas.gpus import ByteInterval, Gpu

_MIB = 1024**2


def blas_workspace_bytes(capability: tuple[int, int], kind: Literal["cuda", "rocm"]) -> int:
    """What cuBLAS (hipBLAS) keeps for each handle and stream: ``parseChosenWorkspaceSize`` in ``CublasHandlePool.cpp``.

    cuBLASLt shares it (``TORCH_CUBLASLT_UNIFIED_WORKSPACE``, on by default).
    """
    if kind == "rocm":
        return (128 if capability in {(9, 4), (9, 5)} else 32) * _MIB
    return 32 * _MIB if capability[0] in {9, 10, 12} else (4096 * 2 + 16 * 8) * 1024


def _mebibytes(low: int, expected: int, high: int) -> ByteInterval:
    return ByteInterval(low=low * _MIB, expected=expected * _MIB, high=high * _MIB)


_ISSUES = "https://github.com/{}/issues/{}"
_T4 = _ISSUES.format("hpcaitech/Open-Sora", 697)
_A4000 = _ISSUES.format("DengKaiCQ/VGGT-Long", 6)
_A10 = _ISSUES.format("zai-org/CogVLM", 236)
_A100 = _ISSUES.format("TianheWu/CoSeR", 10)
_L40 = _ISSUES.format("QwenLM/Qwen3-VL", 2097)
_RTX_4090 = _ISSUES.format("Soul-AILab/SoulX-FlashTalk", 5)
_ADA_6000 = _ISSUES.format("DINGYANB/MTVCrafter", 21)
_MI300X = _ISSUES.format("ROCm/legacy-rocm-build", 4750)
_MEASURED = "0.25 to 0.45 GiB measured with CUDA 12 and 13"
_MESSAGES = "out-of-memory messages (memory in use by the process, less what torch allocated and reserved)"
_CONTEXTS: dict[str, tuple[ByteInterval, str]] = {
    "before 8.0": (_mebibytes(100, 300, 450), f"{_MESSAGES}: 0.10 GiB on a T4 ({_T4}); {_MEASURED}"),
    "8": (
        _mebibytes(200, 450, 600),
        (
            f"{_MESSAGES}: 0.21 GiB on an A4000 ({_A4000}), 0.22 on an A10 ({_A10}), 0.49 on an A100 ({_A100}), 0.44 "
            f"on a 4090 ({_RTX_4090}), 0.42 on a 6000 Ada ({_ADA_6000}), 0.50 on an L40 ({_L40}); 0.25 bare on a 3090 "
            f"({_ISSUES.format('invoke-ai/InvokeAI', 9413)})"
        ),
    ),
    "9 and later": (
        _mebibytes(250, 560, 800),
        (
            f"{_MESSAGES}: 0.58 GiB on a 5090 ({_ISSUES.format('Wan-Video/Wan2.1', 465)}), 0.66 in a public log of a "
            f"card with 139.72 GiB (an H200); {_MEASURED}"
        ),
    ),
    "rocm": (
        _mebibytes(250, 600, 1536),
        f"no report was found: as on recent NVIDIA cards, and more above; an idle MI300X shows 284 MiB ({_MI300X})",
    ),
    "unknown": (_mebibytes(100, 500, 1024), "an assumption that covers every card of the catalogue but AMD's"),
}
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

_REPORTED_SLACK_BYTES = 256 * _MIB
"""Drivers differ by up to 212 MiB where several reports of one card were found (A100 80 GB: 81,251 and 81,039 MiB)."""
_DERIVED_SLACK_BYTES = 640 * _MIB
_ECC_SHARE = 16
"""Inline ECC of GDDR6 takes a sixteenth: RTX 6000 Ada 48,622 MiB without, 45,496 with; A5000 24,114 and 22,721."""
_ECC_NOTE = "The total is that with ECC off, as it is shipped; with ECC on it is a sixteenth less."


def _context_key(capability: tuple[int, int], vendor: str) -> str:
    if vendor == "amd":
        return "rocm"
    return "before 8.0" if capability < (8, 0) else "8" if capability < (9, 0) else "9 and later"


def _gpu(  # noqa: PLR0913 - one line of the table
    name: str,
    capability: tuple[int, int],
    mebibytes: int,
    source: str,
    *,
    sold: str,
    family: str = "",
    aliases: tuple[str, ...] = (),
    vendor: Literal["nvidia", "amd"] = "nvidia",
    derived: bool = False,
    ecc_is_a_choice: bool = False,
    notes: tuple[str, ...] = (),
) -> Gpu:
    """One card; ``mebibytes`` is torch's total."""
    total = mebibytes * _MIB
    with_ecc = total - total // _ECC_SHARE if ecc_is_a_choice else total
    context, context_source = _CONTEXTS[_context_key(capability, vendor)]
    capability_source = _OLD_CAPABILITY_SOURCE if capability < (7, 5) else _CAPABILITY_SOURCE
    return Gpu(
        name=name,
        family=family or name,
        aliases=aliases,
        vendor=vendor,
        marketed_memory=sold,
        total_bytes=total,
        least_total_bytes=with_ecc - (_DERIVED_SLACK_BYTES if derived else _REPORTED_SLACK_BYTES),
        compute_capability=capability,
        context_bytes=context,
        workspace_bytes=blas_workspace_bytes(capability, "rocm" if vendor == "amd" else "cuda"),
        evidence="derived" if derived else "reported",
        sources={
            "total": source,
            "compute_capability": _AMD_SOURCE if vendor == "amd" else capability_source,
            "context": context_source,
            "workspace": _WORKSPACE_SOURCE,
        },
        notes=(*notes, _ECC_NOTE) if ecc_is_a_choice else notes,
    )


_LOG = "torch's device properties in public logs that were searched by their text (no address is known)"

GPUS: tuple[Gpu, ...] = (
    _gpu(
        "P100-16GB", (6, 0), 16280, f"{_LOG}; NVML says the same: https://github.com/karpathy/minGPT/issues/1",
        sold="16 GB", family="P100",
        notes=("Recent builds of torch have no kernels for compute capability 6.0.",),
    ),
    _gpu(
        "V100-16GB", (7, 0), 16130, f"{_LOG}: 16,130 and 16,160 MiB",
        sold="16 GB", family="V100",
    ),
    _gpu(
        "V100-32GB", (7, 0), 32501, "31.74 GiB: https://github.com/liucongg/ChatGLM-Finetuning/issues/73",
        sold="32 GB", family="V100",
    ),
    _gpu(
        "T4", (7, 5), 14912,
        f"{_LOG}: 14,912 MiB (14.56 GiB) with recent drivers; 14.75 GiB with older ones: {_T4}",
        sold="16 GB",
    ),
    _gpu(
        "A30", (8, 0), 24094, "23.53 GiB: https://github.com/google/RB-Modulation/issues/5",
        sold="24 GB",
    ),
    _gpu(
        "A100-40GB", (8, 0), 40339,
        "42,298,834,944 bytes: https://github.com/bottlerocket-os/bottlerocket/pull/3873; 39.50 GiB: "
        f"{_A100}",
        sold="40 GB", family="A100",
    ),
    _gpu(
        "A100-80GB", (8, 0), 81039,
        "79.14 GiB: https://github.com/lianqi1008/Control-GIC/issues/6; 81,051 MiB: "
        "https://github.com/ultralytics/ultralytics/issues/22877; the PCIe card has the same memory",
        sold="80 GB", family="A100",
    ),
    _gpu(
        "A10", (8, 6), 22517, f"21.99 GiB: {_A10}",
        sold="24 GB",
    ),
    _gpu("A10G", (8, 6), 22587, f"{_LOG}: 22,587 MiB", sold="24 GB"),
    _gpu(
        "A16", (8, 6), 14643, "derived: fifteen sixteenths of 16 GiB, less 0.7 GiB; of one of its four GPUs",
        sold="4 x 16 GB", aliases=("A16-16GB",), derived=True,
    ),
    _gpu("A40", (8, 6), 45416, f"{_LOG}: 45,416 MiB", sold="48 GB"),
    _gpu(
        "RTX A4000", (8, 6), 15984, f"15.61 GiB: {_A4000}",
        sold="16 GB", ecc_is_a_choice=True,
    ),
    _gpu("RTX A5000", (8, 6), 24114, f"{_LOG}: 24,114 MiB", sold="24 GB", ecc_is_a_choice=True),
    _gpu(
        "RTX A6000", (8, 6), 48670, "48,670 MiB: https://github.com/ultralytics/ultralytics/issues/19084",
        sold="48 GB", ecc_is_a_choice=True,
    ),
    _gpu(
        "RTX 3060 12GB", (8, 6), 12032, "11.75 GiB: https://github.com/Kunhao-Liu/StyleGaussian/issues/12",
        sold="12 GB", family="RTX 3060", notes=("There is an RTX 3060 with 8 GB too: give 8GiB for that.",),
    ),
    _gpu(
        "RTX 3080 10GB", (8, 6), 10014, "9.78 GiB: https://github.com/zai-org/CogVideo/issues/34",
        sold="10 GB", family="RTX 3080", notes=("There is an RTX 3080 with 12 GB too: give 12GiB for that.",),
    ),
    _gpu(
        "RTX 3090", (8, 6), 24248,
        "23.68 GiB: https://github.com/LambdaLabsML/examples/issues/48, https://github.com/vllm-project/vllm/issues/16343",
        sold="24 GB",
    ),
    _gpu(
        "L4", (8, 9), 22491,
        "23,583,784,960 bytes: https://github.com/bottlerocket-os/bottlerocket-kernel-kit/pull/139",
        sold="24 GB",
    ),
    _gpu(
        "L40", (8, 9), 45465, f"44.40 GiB: {_L40}",
        sold="48 GB",
    ),
    _gpu("L40S", (8, 9), 45495, f"{_LOG}: 45,495 and 45,589 MiB", sold="48 GB"),
    _gpu(
        "RTX 4080", (8, 9), 15944, f"{_LOG}: 15,944 MiB of a 4080 SUPER, 16,049 MiB of a 4080",
        sold="16 GB", aliases=("RTX 4080 SUPER",),
    ),
    _gpu(
        "RTX 4090", (8, 9), 24084, f"23.52 GiB: {_RTX_4090}",
        sold="24 GB",
    ),
    _gpu(
        "RTX 6000 Ada", (8, 9), 48622,
        f"{_LOG}: 48,622 MiB; 44.43 GiB with ECC on: {_ADA_6000}",
        sold="48 GB", aliases=("RTX 6000 Ada Generation",), ecc_is_a_choice=True,
    ),
    _gpu(
        "H100-80GB", (9, 0), 81008,
        "79.11 GiB: https://github.com/vllm-project/vllm/issues/27508; 81,008 MiB of the PCIe card in a public log",
        sold="80 GB", family="H100",
        aliases=("H100-SXM", "H100-SXM5", "NVIDIA H100 PCIe"),
    ),
    _gpu(
        "H100-NVL-94GB", (9, 0), 95330,
        "99,961,274,368 bytes: https://github.com/fastfetch-cli/fastfetch/issues/1658; 93.10 GiB in public "
        "out-of-memory messages",
        sold="94 GB", family="H100", aliases=("NVIDIA H100 NVL", "H100-94GB"),
    ),
    _gpu(
        "GH200-96GB", (9, 0), 96768,
        "derived: NVML says 97,871 MiB (https://github.com/marin-community/marin/pull/5446); 94.50 GiB in public "
        "out-of-memory messages that do not name the card",
        sold="96 GB", family="GH200", aliases=("NVIDIA GH200 480GB", "NVIDIA GH200 120GB"), derived=True,
    ),
    _gpu(
        "GH200-144GB", (9, 0), 145728,
        "derived: NVML says 146,831 MiB in public code, less what GH200-96GB loses",
        sold="144 GB", family="GH200", aliases=("NVIDIA GH200 144G",), derived=True,
    ),
    _gpu(
        "H200", (9, 0), 143156,
        "143,156 MiB: https://github.com/ai-bot-pro/achatbot, deploy/modal/src/llm/vllm/vlm/skywork_r1v.py",
        sold="141 GB", aliases=("H200 NVL",),
    ),
    _gpu(
        "B200", (10, 0), 182630,
        "178.35 GiB: https://github.com/pytorch/ao/pull/4002; 182,642 MiB: https://github.com/ai-bot-pro/achatbot, "
        "deploy/modal/src/llm/vllm/vlm/skywork_r1v.py",
        sold="180 GB", aliases=("B200-192GB",),
    ),
    _gpu(
        "B300", (10, 3), 274114, f"{_LOG}: 267.69 GiB; NVML says 275,040 MiB",
        sold="288 GB", aliases=("NVIDIA B300 SXM6 AC",),
    ),
    _gpu(
        "RTX 5090", (12, 0), 32117,
        "33,677,180,928 bytes: https://github.com/aikitoria/open-gpu-kernel-modules/issues/1",
        sold="32 GB",
    ),
    _gpu(
        "RTX PRO 6000 Blackwell", (12, 0), 97249, "94.97 GiB: https://github.com/antirez/ds4/issues/431",
        sold="96 GB", family="RTX PRO 6000",
        aliases=(
            "RTX PRO 6000 Blackwell Server Edition",
            "RTX PRO 6000 Blackwell Workstation Edition",
            "RTX PRO 6000 Blackwell Max-Q Workstation Edition",
            "RTX PRO 6000 96GB",
        ),
    ),
    _gpu(
        "MI210", (9, 0), 65520, "67,092,480 KiB: https://github.com/ROCm/legacy-rocm-build/issues/2595",
        sold="64 GB", vendor="amd",
    ),
    _gpu(
        "MI250X", (9, 0), 65520, f"{_LOG}: 65,520 MiB of each die",
        sold="2 x 64 GB", vendor="amd", aliases=("AMD Instinct MI250X/MI250", "MI250", "MI250X GCD"),
        notes=("Torch sees each of its two dies (GCD) as a GPU of its own; this is one of them.",),
    ),
    _gpu(
        "MI300X", (9, 4), 196592, f"206,141,652,992 bytes: {_MI300X}",
        sold="192 GB", vendor="amd",
    ),
    _gpu(
        "MI325X", (9, 4), 262128, "255.98 GiB in public out-of-memory messages, which is 16 MiB less than 256 GiB",
        sold="256 GB", vendor="amd", derived=True,
    ),
)  # fmt: skip
"""By generation, then by memory; AMD's last."""


def unknown_gpu(name: str, total_bytes: int) -> Gpu:
    """A card of which only the memory is known."""
    context, context_source = _CONTEXTS["unknown"]
    return Gpu(
        name=name,
        family=name,
        vendor="unknown",
        marketed_memory=name,
        total_bytes=total_bytes,
        least_total_bytes=total_bytes - total_bytes // 12,
        compute_capability=(8, 0),
        context_bytes=context,
        workspace_bytes=blas_workspace_bytes((8, 0), "cuda"),
        evidence="given",
        sources={
            "total": "the request; a card sold as 48 GB leaves torch up to a twelfth less (A40, L40)",
            "compute_capability": "an assumption",
            "context": context_source,
            "workspace": _WORKSPACE_SOURCE,
        },
        notes=("Of this card only the memory is known: kernels are taken to be those of compute capability 8.0.",),
    )
