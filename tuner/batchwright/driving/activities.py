"""Describe what a tuning does now, in the words of the terminal, the library and the pages. No torch."""

from batchwright.planning.accumulation import probe_window
from batchwright.planning.steps import CheckCoupling, EstimateWhatIf, ReadData, RunProbe, SeedSearch, StartProcess, Step
from batchwright.schemas.command import CommandSpec
from batchwright.schemas.plans import format_sizes
from batchwright.schemas.requests import ProbeRequest


def activity_of(step: Step) -> str:
    """Describe what a tuning does in a step."""
    match step:
        case StartProcess():
            return "importing torch and the libraries of the model"
        case ReadData():
            return "opening the data"
        case CheckCoupling():
            return "checking that the loss is a sum over samples"
        case SeedSearch(request):
            return "checking the spec and estimating its memory" if request.command is None else "checking the command"
        case RunProbe(probe):
            return _activity_of_probe(probe)
        case EstimateWhatIf():
            return "estimating what would fit with changes of the spec"


def _activity_of_probe(probe: ProbeRequest) -> str:
    size = f"{probe.micro_batch_size:,}"
    if isinstance(probe.spec, CommandSpec):
        ran = f"{probe.spec.model.probe_updates} updates"
        if probe.runs_plan:
            return f"running {ran} of the plan, in micro-batches of {size}"
        return f"{'timing updates' if probe.measures_time else f'running {ran}'} of the command at micro-batch {size}"
    if probe.runs_plan:
        return f"running two updates with micro-batches of the plan: {format_sizes(probe_window(probe))}"
    updates = "one update" if probe.brackets else "two updates"
    return f"{'timing updates' if probe.measures_time else f'running {updates}'} at micro-batch {size}"
