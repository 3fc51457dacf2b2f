"""The log of a run (``log.txt``): what happens in it, a dated line each, beside what the workload prints.

The command line shows the same words.
"""

import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime

from batchwright.schemas.plans import format_sizes
from batchwright.schemas.training import EvaluationReport, MicroBatchSplit, TrainingProgress

_LINES = 10
"""Lines about the loss in a run of that many updates or more."""


def log(text: str) -> None:
    """Write to the run's log, with the time (UTC). If the disk is full, only the result has the text."""
    with suppress(OSError):
        print(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {text}", file=sys.stderr, flush=True)  # noqa: T201 - the run's log


def events(progress: TrainingProgress) -> Iterator[str]:
    """Describe what is worth a line: divided micro-batches, lost steps, evaluations, and now and then the loss."""
    update = f"update {progress.update} of {progress.updates}"
    yield from (f"{update}: {describe_split(split)}" for split in progress.splits)
    if progress.skipped:
        yield f"{update}: no step was made, since {describe_skip(progress)}"
    before, after = ((progress.update - back) * _LINES // progress.updates for back in (1, 0))
    if progress.update == 1 or before < after:
        yield f"{update}: loss {format_figure(progress.loss)}, {progress.samples_per_second:.4g} samples per second"
    for evaluation in progress.evaluations:
        yield from describe_evaluation(evaluation)


def describe_split(split: MicroBatchSplit) -> str:
    """Describe the split of a micro-batch that did not fit."""
    parts = format_sizes(split.parts)
    return f"micro-batch of {split.size} did not fit on rank {split.rank}: {parts} from here on"


def describe_evaluation(evaluation: EvaluationReport) -> list[str]:
    """Describe an evaluation in a line, and each batch of it that did not fit in another."""
    named = {"loss": evaluation.loss, **evaluation.metrics}
    if evaluation.trained is not None:
        named["loss of the trained weights"] = evaluation.trained.loss
    averages = " of the moving averages" if evaluation.of_averages else ""
    figures = "  ".join(f"{name} {format_figure(value)}" for name, value in named.items())
    best = "  (best so far)" if evaluation.is_best else ""
    line = f"evaluation{averages} after update {evaluation.update}: {evaluation.message or figures}{best}"
    return [f"evaluation: {describe_split(split)}" for split in evaluation.splits] + [line]


def describe_skip(update: TrainingProgress) -> str:
    """Describe the reason for a skipped update."""
    return "a gradient was not finite" if any(update.weights.values()) else "no sample of it has a target"


def format_figure(value: float | None) -> str:
    """Format a loss or a metric, which is not known where it is not finite or nothing has a label."""
    return "not known" if value is None else f"{value:.4f}"
