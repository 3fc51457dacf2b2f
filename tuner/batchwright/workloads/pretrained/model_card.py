"""The model card of a trained model: what it was trained from and by, with the plan and its evidence. No torch."""

import json

from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.training import EvaluationReport, EvaluationSummary
from batchwright.schemas.workload import TransformersModel
from batchwright.units import format_bytes

CARD = "README.md"
"""The file that the Hugging Face hub shows as the card of a model."""


def model_card(found: Recommendation, updates: int, evaluation: EvaluationSummary | None) -> str:
    """Write the model card of a `transformers` model, with the front matter of the Hugging Face hub.

    No path of the machine is in it, as cards are published: a base in a folder is called a local one.

    Args:
        found: the recommendation that the run followed.
        updates: optimizer updates that were made when the run ended.
        evaluation: the evaluations of the run; None without.

    Returns:
        Markdown that ends with a newline.
    """
    parts = [_front_matter(found), "# Model trained with Batchwright", _training(found, updates), _evidence(found)]
    if evaluation is not None:
        parts.append(_evaluation(evaluation))
    return "\n\n".join(parts) + "\n"


def _front_matter(found: Recommendation) -> str:
    spec = found.request.workload
    fields = [f"library_name: {'transformers' if spec.adapter is None else 'peft'}"]
    if isinstance(spec.model, TransformersModel) and spec.model.hub_model is not None:
        fields.append(f"base_model: {json.dumps(spec.model.hub_model.id)}")
    fields += ["tags:", "- batchwright", *(["- lora"] if spec.adapter is not None else [])]
    return "\n".join(["---", *fields, "---"])


def _training(found: Recommendation, updates: int) -> str:
    spec = found.request.workload
    rows = {"task": spec.model.task if isinstance(spec.model, TransformersModel) else "", "started from": _base(found)}
    if (adapter := spec.adapter) is not None:
        rows["adapter"] = f"{adapter.kind}, rank {adapter.rank}, alpha {adapter.alpha:g}"
    rows |= {
        "optimizer": f"{spec.optimizer.name}, learning rate {spec.optimizer.learning_rate:g}",
        "precision": str(spec.precision),
        "updates": f"{updates:,}",
    }
    return "## Training\n\n" + _table(rows)


def _base(found: Recommendation) -> str:
    model = found.request.workload.model
    if not isinstance(model, TransformersModel) or model.pretrained is None:
        return "random weights"
    if (hub := model.hub_model) is None:
        return "pretrained weights of a local folder"
    return hub.id if hub.revision is None else f"{hub.id}, revision {hub.revision}"


def _evidence(found: Recommendation) -> str:
    rows = {}
    if (plan := found.plan) is not None:
        sizes = "; ".join(" + ".join(str(size) for size in rank) for rank in plan.micro_batch_sizes)
        rows = {
            "effective batch": f"{plan.effective_batch_size:,} samples per update",
            "ranks": str(plan.world_size),
            "accumulation steps": str(plan.gradient_accumulation_steps),
            "micro-batches of each rank": sizes,
        }
    if (room := found.headroom) is not None:
        rows["peak of the probe"] = f"{format_bytes(room.peak_bytes)} of {format_bytes(room.limit_bytes)}"
    rows |= {
        "device": found.device.name,
        "proof": found.evidence.proof.statement,
        "proof of the plan": found.evidence.plan_proof,
        "recommendation": f"{found.id}, fingerprint {found.fingerprint}",
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(found.versions.items())),
    }
    return "## Plan and evidence\n\nMeasured before the training, by probes.\n\n" + _table(rows)


def _evaluation(evaluation: EvaluationSummary) -> str:
    weights = "" if evaluation.weights == "trained" else " Averaged weights were evaluated."
    reports = {"first": evaluation.first, "best": evaluation.best, "last": evaluation.last}
    rows = {f"{name}, after update {at.update}": _figures(at) for name, at in reports.items() if at is not None}
    return f"## Evaluation\n\n{evaluation.message}.{weights}\n\n" + _table(rows)


def _figures(report: EvaluationReport) -> str:
    figures = {"loss": report.loss, **report.metrics}
    return ", ".join(f"{name} {'-' if value is None else format(value, '.4f')}" for name, value in figures.items())


def _table(rows: dict[str, str]) -> str:
    cells = (f"| {name} | {' '.join(text.split()).replace('|', '/')} |" for name, text in rows.items() if text)
    return "\n".join(["| | |", "|---|---|", *cells])
