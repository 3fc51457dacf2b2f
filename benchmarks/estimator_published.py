"""Peaks that others have measured on cards, with settings that can be rebuilt, against estimates for those cards.

Each row names its source, and what was measured there:

* ``allocated``: ``torch.cuda.max_memory_allocated``, against the estimate's allocated bytes.
* ``reserved``: ``torch.cuda.max_memory_reserved``, against its reserved bytes. Also what NVML said of a process, less
  what it said there of a process that had put next to nothing on the card.
* ``device``: what NVML or nvidia-smi said of the whole card, against the reserved bytes and the context.

An interval holds where the measurement lies between ``low`` and ``high``: of the allocator for ``reserved``, of the
card for ``device``. (An estimate's own interval begins from the memory with which an update just fits; here both ends
are taken in proportion to the reserved bytes, since none of these runs was short of memory.)

The estimate traces today's torch and transformers. ``SOURCES`` names the versions that were measured. No row was used
to choose a constant of the estimator, except those of ``GPUMemNet`` for the width of the interval of convolutions.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from fractions import Fraction
from statistics import median, quantiles
from typing import Any, Literal

from reporting import let_probes_import, print_head, print_row

from batchwright.estimation.pool import EstimatePool
from batchwright.hardware.gpu_lookup import find_gpu
from batchwright.schemas.estimates import EstimateRequest, Loop, PeakEstimate
from batchwright.schemas.workload import parse_spec

MIB = 1024**2
GIB = 1024**3
MB = 10**6
GB = 10**9
_EMPTY_PROCESS_MIB = 1343
"""NVML's figure of a process with one number on the card, in the documentation of transformers 4.18."""
_SMALLEST_PROCESS_MIB = 1443
"""nvidia-smi's figure of the smallest of GPUMemNet's 3,000 MLPs (Datasets/MLP/mlp_data_step1.csv)."""
_TIMEOUT_SECONDS = 600
Row = dict[str, Any]
Figure = Literal["allocated", "reserved", "device"]
Family = Literal["transformer", "convolutional", "compiled"]

SOURCES = {
    "transformers documentation": (
        "https://huggingface.co/docs/transformers/v4.18.0/en/performance: transformers 4.18, torch 1.10, its Trainer, "
        "which kept gradients at zero between updates and updated one parameter after the other; V100-SXM2 of 16 GB. "
        "The softmax of torch 1.10, which kept its input, is rebuilt."
    ),
    "pytorch-memory-optim": (
        "https://github.com/rasbt/pytorch-memory-optim/blob/main/logs.md: torch 2.1.0.dev20230623+cu118, torchvision, "
        "Lightning Fabric 2.1; an A100 (https://sebastianraschka.com/blog/2023/pytorch-memory-optimization.html). "
        "Gradients are freed between forward and backward pass, as in Lightning's loop. Two rows that accumulate "
        "gradients in bf16 are left out, since sums are kept in fp32 here."
    ),
    "LLMs-from-scratch": (
        "https://github.com/rasbt/LLMs-from-scratch/tree/main/ch05/10_llm-training-speed: torch 2.6.0+cu124, an A100. "
        "The variants share the first one's mask, a buffer of 4 MiB per layer."
    ),
    "GPUMemNet": (
        "https://github.com/itu-rad/GPUMemNet/blob/main/Test_Pipeline/GPUMemNet_CNN.xlsx, with the scripts in "
        "Test_Pipeline/cnn_models: an A100 of 40 GB, torchvision's models, torch of 2024 or 2025 (version not given). "
        "nvidia-smi, less its figure of the smallest of their MLPs. Gradients are freed as in pytorch-memory-optim."
    ),
    "optimum-benchmark": (
        "https://huggingface.co/datasets/optimum-benchmark/cuda (A10G; commits db2f644, 9307404) and .../rocm (MI250, "
        "torch 2.2.2+rocm5.7, transformers 4.40; commits b68fb87, 974dc66, 2b4601d, f932406): the Trainer, 2 samples, "
        "of 16 tokens or an image of 224 pixels."
    ),
}
"""Where the rows come from."""


@dataclass(frozen=True)
class Published:
    """A measurement.

    Attributes:
        source: the key of its source.
        name: how its source calls it.
        family: the kind of model.
        figure: what was measured.
        measured_bytes: the measurement.
        card: the card.
        size: samples of a micro-batch.
        model: as in a spec.
        settings: the other fields of the spec.
        accumulates: whether gradients stay while the next micro-batch runs.
        loop: the training loop of the source.
    """

    source: str
    name: str
    family: Family
    figure: Figure
    measured_bytes: int
    card: str
    size: int
    model: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    accumulates: bool = False
    loop: Loop = "batchwright"


def _target(name: str, **arguments: object) -> dict[str, Any]:
    return {"kind": "python", "target": f"published_models:{name}", "arguments": arguments}


def _transformers_documentation() -> Iterator[Published]:
    trainer = {"optimizer": {"name": "adamw", "implementation": "for-loop"}, "gradient_clipping": 1.0}
    for name, size, device_mib, precision, recomputes in (
        ("vanilla training", 4, 14949, "fp32", False),
        ("gradient accumulation", 1, 8681, "fp32", False),
        ("gradient checkpointing", 1, 6775, "fp32", True),
        ("fp16 training", 4, 13939, "fp16-mixed", False),
        ("checkpointing, fp16", 1, 7275, "fp16-mixed", True),
    ):
        yield Published(
            source="transformers documentation",
            name=f"BERT-large, {name}",
            family="transformer",
            figure="reserved",
            measured_bytes=(device_mib - _EMPTY_PROCESS_MIB) * MIB,
            card="V100-16GB",
            size=size,
            model=_target("bert_large", recomputes=recomputes),
            settings={**trainer, "precision": precision},
            accumulates=True,
        )


def _pytorch_memory_optim() -> Iterator[Published]:
    for name, size, gigabytes, precision in (
        ("fp32", 64, 26.79, "fp32"),
        ("fp16-mixed", 64, 18.21, "fp16-mixed"),
        ("bf16", 64, 13.82, "bf16"),
        ("bf16", 16, 5.69, "bf16"),
    ):
        yield Published(
            source="pytorch-memory-optim",
            name=f"ViT-L/16, {name}",
            family="transformer",
            figure="reserved",
            measured_bytes=round(gigabytes * GB),
            card="A100-40GB",
            size=size,
            model=_target("vit_large"),
            settings={"precision": precision, "optimizer": {"name": "adam"}},
            loop="lightning",
        )


def _llms_from_scratch() -> Iterator[Published]:
    native: dict[str, object] = {"native": True}
    flash = native | {"flash": True}
    padded = flash | {"vocabulary": 50304}
    fused: dict[str, Any] = {"precision": "bf16", "optimizer": {"name": "adamw", "implementation": "fused"}}
    compiled = fused | {"compile": True}
    for name, gibibytes, size, settings, options in (
        ("fp32", 26.2617, 8, {"optimizer": {"name": "adamw"}}, {}),
        ("fp32, fused AdamW", 26.2422, 8, fused | {"precision": "fp32"}, {}),
        ("bf16", 13.7871, 8, fused, {}),
        ("bf16, native layers", 11.5645, 8, fused, native),
        ("bf16, FlashAttention", 5.9004, 8, fused, flash),
        ("bf16, FlashAttention, 50,257 tokens", 6.1875, 8, compiled, flash),
        ("bf16, FlashAttention, 50,304 tokens", 5.8906, 8, compiled, padded),
        ("bf16, FlashAttention, 50,304 tokens", 22.5078, 32, compiled, padded),
    ):
        yield Published(
            source="LLMs-from-scratch",
            name=f"GPT-2 124M, {name}",
            family="compiled" if settings is compiled else "transformer",
            figure="reserved",
            measured_bytes=round(gibibytes * GIB),
            card="A100-40GB",
            size=size,
            model=_target("gpt", **options),
            settings=settings,
            loop="plain",
        )


def _gpumemnet() -> Iterator[Published]:
    for target, name, by_size in (
        ("vgg16", "VGG16", {32: 8222, 64: 13642, 128: 24408}),
        ("resnet50", "ResNet-50", {32: 5262, 64: 8536, 128: 15120}),
        ("mobilenet_v2", "MobileNetV2", {32: 4544, 64: 7224, 128: 12578}),
    ):
        for size, device_mib in by_size.items():
            yield Published(
                source="GPUMemNet",
                name=f"{name}, fp32",
                family="convolutional",
                figure="reserved",
                measured_bytes=(device_mib - _SMALLEST_PROCESS_MIB) * MIB,
                card="A100-40GB",
                size=size,
                model=_target(target),
                settings={"optimizer": {"name": "adam"}},
                loop="lightning",
            )


def _optimum_benchmark() -> Iterator[Published]:
    text, image = {"sequence_length": 16}, {"image_size": 224}
    gpt2 = ("causal-lm", {"model_type": "gpt2"}, text)
    bert = ("masked-lm", {"model_type": "bert"}, text)
    vit = ("image-classification", {"model_type": "vit", "num_labels": 1000}, image)
    roberta_config = {
        "model_type": "roberta",
        "vocab_size": 50265,
        "max_position_embeddings": 514,
        "type_vocab_size": 1,
    }
    roberta = ("sequence-classification", roberta_config, text)
    figures: tuple[tuple[str, tuple[str, dict[str, Any], dict[str, int]], str, Figure, float], ...] = (
        ("GPT-2", gpt2, "MI250X", "allocated", 2506.73664),
        ("GPT-2", gpt2, "MI250X", "reserved", 2894.06976),
        ("BERT-base", bert, "MI250X", "allocated", 2195.345408),
        ("BERT-base", bert, "MI250X", "reserved", 2497.708032),
        ("BERT-base", bert, "A10G", "reserved", 2520.776704),
        ("BERT-base", bert, "A10G", "device", 3169.32096),
        ("RoBERTa-base", roberta, "MI250X", "allocated", 2497.900032),
        ("RoBERTa-base", roberta, "MI250X", "reserved", 2707.423232),
        ("ViT-base", vit, "MI250X", "allocated", 1738.272256),
        ("ViT-base", vit, "MI250X", "reserved", 1935.671296),
        ("ViT-base", vit, "A10G", "reserved", 1956.642816),
        ("ViT-base", vit, "A10G", "device", 2628.255744),
    )
    for name, (task, config, batch), card, figure, megabytes in figures:
        yield Published(
            source="optimum-benchmark",
            name=f"{name}, fp32",
            family="transformer",
            figure=figure,
            measured_bytes=round(megabytes * MB),
            card=card,
            size=2,
            model={"kind": "transformers", "task": task, "config": config},
            settings={"batch": batch, "gradient_clipping": 1.0},
            loop="hugging-face",
        )


def published() -> tuple[Published, ...]:
    """Every measurement."""
    return (
        *_transformers_documentation(),
        *_pytorch_memory_optim(),
        *_llms_from_scratch(),
        *_gpumemnet(),
        *_optimum_benchmark(),
    )


def rows() -> Iterator[Row]:
    """A measurement at a time, with what the estimate says; in bytes."""
    print("\n| source | model | micro-batch | figure | measured, MiB | estimated, MiB | error | interval |")
    print("|---|---|---|---|---|---|---|---|")
    peaks: dict[str, PeakEstimate] = {}
    with closing(EstimatePool()) as pool:
        for case in published():
            setting = repr((case.card, case.size, case.model, case.settings, case.accumulates))
            if setting not in peaks:
                peaks[setting] = estimated(case, pool)
            yield row(case, peaks[setting])


def row(case: Published, peak: PeakEstimate) -> Row:
    """Compare a measurement with its estimate, and print both."""
    found, (low, high) = figure_of(peak, case.figure), interval_of(peak, case)
    error = round(found / case.measured_bytes - 1, 4)
    holds = "" if case.figure == "allocated" else "holds"
    holds = "too low" if holds and case.measured_bytes > high else holds
    holds = "too high" if holds and case.measured_bytes < low else holds
    print(
        f"| {case.source} | {case.name} | {case.size} | {case.figure} | {case.measured_bytes / MIB:.0f} | "
        f"{found / MIB:.0f} | {error:+.1%} | {holds} |",
        flush=True,
    )
    return {
        "source": case.source,
        "name": case.name,
        "family": case.family,
        "card": case.card,
        "micro_batch_size": case.size,
        "figure": case.figure,
        "measured_bytes": case.measured_bytes,
        "estimated_bytes": found,
        "error": error,
        "low_bytes": low,
        "high_bytes": high,
        "interval": holds,
    }


def estimated(case: Published, pool: EstimatePool) -> PeakEstimate:
    """The peak that an estimate tells."""
    spec = parse_spec({"gradient_gathering": "in-place", **case.settings, "model": case.model})
    request = EstimateRequest(
        spec=spec,
        gpus=(case.card,),
        micro_batch_size=case.size,
        effective_batch_size=None if case.accumulates else case.size,
        memory_margin=0.0,
        loop=case.loop,
        timeout_seconds=_TIMEOUT_SECONDS,
    )
    peak = pool.estimate(request).gpus[0].peak
    assert peak is not None
    return peak


def figure_of(peak: PeakEstimate, figure: Figure) -> int:
    """The estimate of what was measured."""
    if figure == "allocated":
        return peak.allocated_bytes
    return peak.reserved_bytes + (peak.outside_allocator_bytes.expected if figure == "device" else 0)


def interval_of(peak: PeakEstimate, case: Published) -> tuple[int, int]:
    """The interval of the reserved bytes, or of the card's."""
    gpu = find_gpu(case.card)
    context, whole = gpu.context_bytes, peak.device_bytes
    shortfall = gpu.total_bytes - gpu.least_total_bytes
    low = Fraction(whole.low - context.low, peak.capacity_bytes) * peak.reserved_bytes
    high = Fraction(whole.high - context.high - shortfall, peak.capacity_bytes) * peak.reserved_bytes
    if case.figure == "device":
        low, high = low + context.low, high + context.high
    return int(low), int(high)


def summary(found: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Median, 90th percentile and largest size of the errors, and the share of intervals that hold; by group."""
    groups: dict[str, list[Row]] = {"all": list(found)}
    for row in found:
        groups.setdefault(row["family"], []).append(row)
        groups.setdefault(f"{row['family']}, {row['figure']}", []).append(row)
        groups.setdefault(row["source"], []).append(row)
    return {name: _errors(group) for name, group in groups.items()}


def _errors(group: Sequence[Row]) -> dict[str, float]:
    sizes = sorted(abs(row["error"]) for row in group)
    intervals = [row["interval"] for row in group if row["interval"]]
    errors: dict[str, float] = {
        "rows": len(sizes),
        "median": round(median(sizes), 4),
        "90th percentile": round(quantiles(sizes, n=10, method="inclusive")[-1], 4) if len(sizes) > 1 else sizes[0],
        "largest": max(sizes),
    }
    if not intervals:
        return errors
    shares = {verdict: round(intervals.count(verdict) / len(intervals), 4) for verdict in ("holds", "too low")}
    return {
        **errors,
        "intervals": len(intervals),
        "intervals that hold": shares["holds"],
        "above high": shares["too low"],
    }


def show(found: Sequence[Row]) -> None:
    """Print the errors by group, as a markdown table."""
    print()
    print_head("group", "rows", "median", "90th percentile", "largest", "intervals that hold", "above high")
    for name, errors in summary(found).items():
        shares = [f"{errors[key]:.1%}" if key in errors else "" for key in ("intervals that hold", "above high")]
        sizes = [f"{errors[key]:.1%}" for key in ("median", "90th percentile", "largest")]
        print_row(name, errors["rows"], *sizes, *shares)


if __name__ == "__main__":
    let_probes_import()
    show(list(rows()))
