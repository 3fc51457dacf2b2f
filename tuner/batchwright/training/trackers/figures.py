"""The figures and settings of a run as trackers show them, by name."""

from collections import defaultdict
from collections.abc import Mapping

from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import TrainingProgress
from batchwright.training.trackers.base import Setting

_LONGEST_SETTING = 500
"""Characters, as MLflow took them up to its version 2.8; later ones take 6,000."""


def figures_of(progress: TrainingProgress, limit_bytes: int | None) -> Mapping[int, dict[str, float]]:
    """The figures of an update and of the evaluations that came with it, by the update whose weights they are of.

    Args:
        progress: the update.
        limit_bytes: the memory limit of a rank, drawn beside the peak.
    """
    figures = {
        "loss/total": progress.loss,
        **{f"loss/{name}": value for name, value in progress.terms.items() if len(progress.terms) > 1},
        "optimizer/learning_rate": progress.learning_rate,
        "optimizer/gradient_norm": progress.gradient_norm,
        "speed/updates_per_second": 1.0 / progress.seconds if progress.seconds else None,
        "speed/samples_per_second": progress.samples_per_second,
        "speed/tokens_per_second": progress.tokens_per_second,
        "memory/peak_bytes": progress.peak_bytes,
        "memory/limit_bytes": limit_bytes,
        "micro_batches/count": len(progress.micro_batch_sizes),
        "micro_batches/splits": len(progress.splits),
        "optimizer/noise_scale_samples": None if progress.noise_scale is None else progress.noise_scale.samples,
    }
    found: dict[int, dict[str, float]] = defaultdict(dict)
    found[progress.update] = {name: float(value) for name, value in figures.items() if value is not None}
    for evaluation in progress.evaluations:
        of_weights = {"loss": evaluation.loss, **evaluation.metrics}
        if evaluation.trained is not None:
            beside = {"loss": evaluation.trained.loss, **evaluation.trained.metrics}
            of_weights |= {f"trained/{name}": value for name, value in beside.items()}
        known = {f"evaluation/{name}": value for name, value in of_weights.items() if value is not None}
        found[evaluation.update] |= known
    return dict(sorted(found.items()))


def settings_of(recommendation: Recommendation, request: TrainingRequest) -> dict[str, Setting]:
    """The settings of a run that decide its updates and its memory."""
    tuned, headroom = recommendation.request, recommendation.headroom
    spec = tuned.workload
    settings: dict[str, Setting | None] = {
        "recommendation": recommendation.id,
        "model": spec.model.model_dump_json(exclude_defaults=True)[:_LONGEST_SETTING],
        "precision": spec.precision,
        "device": recommendation.device.name,
        "effective_batch_size": tuned.effective_batch_size,
        "micro_batch_size": recommendation.largest_micro_batch_size,
        "memory_limit_bytes": None if headroom is None else headroom.limit_bytes,
        "updates": request.updates,
        "seed": request.seed,
        "optimizer": spec.optimizer.name,
        "learning_rate": spec.optimizer.learning_rate,
    }
    return {name: value for name, value in settings.items() if value is not None}
