"""What a tuning does now, in the words of the terminal, the library and the pages. No torch."""

from __future__ import annotations

from batchwright.driving.loop import Step
from batchwright.schemas.command import CommandSpec
from batchwright.schemas.requests import ProbeRequest, TuningRequest


def activity_of(step: Step | ProbeRequest, request: TuningRequest) -> str:
    """Describe what a tuning does in a step; an empty string for the last one, if nothing is done there."""
    match step:
        case Step.DATA:
            return "opening the data"
        case Step.COUPLING_CHECK:
            return "checking that the loss is a sum over samples"
        case Step.ESTIMATE:
            return "checking the spec and estimating its memory" if request.command is None else "checking the command"
        case Step.WHAT_IFS:
            return "estimating what would fit with changes of the spec" if request.what_if else ""
        case ProbeRequest():
            return _activity_of_probe(step)


def _activity_of_probe(probe: ProbeRequest) -> str:
    size = f"{probe.micro_batch_size:,}"
    if isinstance(probe.spec, CommandSpec):
        ran = f"{probe.spec.model.probe_updates} updates"
        if probe.runs_plan:
            return f"running {ran} of the plan, in micro-batches of {size}"
        return f"{'timing updates' if probe.measures_time else f'running {ran}'} of the command at micro-batch {size}"
    if probe.runs_plan:
        return f"running two updates of the plan, of at most {size} samples at a time"
    return f"{'timing updates' if probe.measures_time else 'running two updates'} at micro-batch {size}"
