"""Peaks that others have measured on cards, with settings that are known, against estimates for those cards.

BERT-large as a classifier of 512 tokens on a V100-SXM2 of 16 GB, from "Performance and Scalability" of transformers
4.18 (https://huggingface.co/docs/transformers/v4.18.0/en/performance, January 2022): what NVML said after training
with its ``Trainer``, and what it said of a process that had put one number on the card (1,343 MiB). The difference is
taken for what the caching allocator held. The ``Trainer`` of that time kept gradients at zero between updates instead
of freeing them, clipped to a norm of 1, and updated one parameter after the other; attention was plain matrix products.

torch 1.10 kept the input of every softmax for the backward pass, which needs only its result
(https://github.com/pytorch/pytorch/issues/64000): 16 MiB per layer and sample here. The estimate is made of the same
model with such a softmax, and of the model as it is today.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tuner.estimation.client import estimate
from tuner.schemas.estimates import EstimateRequest, PeakEstimate
from tuner.schemas.workload import BatchSpec, TransformersModel, parse_spec
from tuner.workloads.base import Workload

MIB = 1024**2
CONTEXT_MIB = 1343
TOKENS = 512
Row = dict[str, Any]

CONFIG = {
    "model_type": "bert",
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "attn_implementation": "eager",
}
SETTINGS = {
    "optimizer": {"name": "adamw", "implementation": "for-loop"},
    "gradient_clipping": 1.0,
    "gradient_gathering": "in-place",
}


@dataclass(frozen=True)
class Published:
    """A measurement.

    Attributes:
        name: how its source calls it.
        micro_batch_size: samples per forward and backward pass.
        device_mib: what NVML said, in MiB (the source divides by ``1024**2``).
        precision: as in a spec.
        recomputes: whether activations are recomputed.
    """

    name: str
    micro_batch_size: int
    device_mib: int
    precision: str = "fp32"
    recomputes: bool = False


PUBLISHED = (
    Published("vanilla training", 4, 14949),
    Published("gradient accumulation", 1, 8681),
    Published("gradient checkpointing", 1, 6775, recomputes=True),
    Published("fp16 training", 4, 13939, precision="fp16-mixed"),
    Published("checkpointing, fp16", 1, 7275, precision="fp16-mixed", recomputes=True),
)


def workload(*, recomputes: bool, old_softmax: bool) -> Workload:
    """The classifier, as the ``python`` target ``estimator_published:workload``; in the process that traces alone."""
    from tuner.workloads.hugging_face import transformers_workload  # noqa: PLC0415 - torch and transformers come with it

    if old_softmax:
        _keep_inputs_of_softmax()
    model = TransformersModel(kind="transformers", task="sequence-classification", config=dict(CONFIG))
    return transformers_workload(model, BatchSpec(sequence_length=TOKENS), recompute=recomputes)


def _keep_inputs_of_softmax() -> None:
    """From here on ``softmax`` keeps what torch 1.10's did."""
    import torch  # noqa: PLC0415 - see workload

    class Softmax(torch.autograd.Function):
        """In fp32 under autocast."""

        @staticmethod
        def forward(ctx: Any, values: torch.Tensor, dim: int) -> torch.Tensor:  # noqa: ANN401 - torch's own
            found = torch.softmax(values, dim)
            ctx.save_for_backward(values, found)
            ctx.dim = dim
            return found

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401 - likewise
            values, found = ctx.saved_tensors
            return torch.ops.aten._softmax_backward_data(gradient, found, ctx.dim, values.dtype), None  # noqa: SLF001 - no public name

    def softmax(values: torch.Tensor, dim: int, **_: object) -> torch.Tensor:
        found: torch.Tensor = Softmax.apply(values.float(), dim)  # type: ignore[no-untyped-call]
        return found

    torch.nn.functional.softmax = softmax  # type: ignore[assignment]


def rows() -> Iterator[Row]:
    """A measurement at a time, with what the estimates say; in bytes."""
    for case in PUBLISHED:
        measured = (case.device_mib - CONTEXT_MIB) * MIB
        then, now = (estimated(case, old_softmax=it) for it in (True, False))
        found = {"reserved": then.reserved_bytes, "reserved, of today's torch": now.reserved_bytes}
        errors = {name: round(it / measured - 1, 4) for name, it in found.items()}
        for name, it in found.items():
            figures = f"{measured / MIB:.0f} | {it / MIB:.0f} | {errors[name]:+.1%}"
            print(f"| BERT-large, {case.name} | {case.micro_batch_size} | {name} | {figures} |", flush=True)
        yield {
            "name": case.name,
            "micro_batch_size": case.micro_batch_size,
            "measured": {"reserved": measured},
            "estimated": found,
            "errors": {str(case.micro_batch_size): errors},
        }


def estimated(case: Published, *, old_softmax: bool) -> PeakEstimate:
    """The peak that an estimate tells."""
    arguments = {"recomputes": case.recomputes, "old_softmax": old_softmax}
    model = {"kind": "python", "target": "estimator_published:workload", "arguments": arguments}
    spec = parse_spec({**SETTINGS, "model": model, "precision": case.precision})
    request = EstimateRequest(spec=spec, gpus=("V100-16GB",), micro_batch_size=case.micro_batch_size)
    peak = estimate(request).gpus[0].peak
    assert peak is not None
    return peak
