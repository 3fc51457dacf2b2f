"""The log of a run (``log.txt``): what happens in it, a dated line each, beside what the workload prints."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime

from tuner.schemas.training import EvaluationReport, MicroBatchSplit, TrainedFigures, TrainingProgress

_LINES = 10
"""Lines about the loss in a run of that many updates or more."""


def log(text: str) -> None:
    """Write to the run's log, with the time (UTC). If the disk is full, only the result has the text."""
    with suppress(OSError):
        print(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {text}", file=sys.stderr, flush=True)  # noqa: T201 - the run's log


def events(progress: TrainingProgress) -> Iterator[str]:
    """Describe what is worth a line: divided micro-batches, lost steps, evaluations, and now and then the loss."""
    update = f"update {progress.update} of {progress.updates}"
    yield from (f"{update}: {_split(split)}" for split in progress.splits)
    if progress.skipped:
        yield f"{update}: no step was made, since a gradient was not finite or no sample had a target"
    before, after = ((progress.update - back) * _LINES // progress.updates for back in (1, 0))
    if progress.update == 1 or before < after:
        yield f"{update}: loss {_number(progress.loss)}, {progress.samples_per_second:.4g} samples per second"
    yield from map(_evaluation, progress.evaluations)


def _split(split: MicroBatchSplit) -> str:
    parts = " + ".join(map(str, split.parts))
    return f"a micro-batch of {split.size} ran out of memory on rank {split.rank} and was divided into {parts}"


def _evaluation(found: EvaluationReport) -> str:
    words = found.message or _figures(found)
    if found.of_averages:
        words += " (of the moving averages)"
    if found.trained is not None:
        words += f"; of the trained weights: {_figures(found.trained)}"
    divided = "".join(f"; {_split(split)}" for split in found.splits)
    return f"evaluation after update {found.update}: {words}{divided}{', the best' * found.is_best}"


def _figures(found: EvaluationReport | TrainedFigures) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in {"loss": found.loss, **found.metrics}.items())


def _number(value: float | None) -> str:
    return "not known" if value is None else f"{value:.4g}"
