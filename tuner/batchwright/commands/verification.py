"""Verify a recommendation: one run of the user's command with the figures of its plan. No torch."""

from datetime import datetime
from typing import Literal

from batchwright.commands.command_supervisor import CommandSupervisor
from batchwright.commands.templates import check_command
from batchwright.errors import PlanError
from batchwright.hardware.inventory import find_device
from batchwright.planning.proofs.counted_plans import judge_over_sizes
from batchwright.schemas.command import CommandModel, CommandSpec
from batchwright.schemas.plans import Plan
from batchwright.schemas.recommendation import Recommendation, Verification
from batchwright.schemas.requests import ProbeRequest
from batchwright.schemas.results import PLAN_NOT_FOLLOWED, Outcome, ProbeResult
from batchwright.schemas.workload import RanksSpec

Verdict = Literal["as-planned", "not-as-planned", "does-not-fit", "not-known"]


def verify(
    recommendation: Recommendation, plan: Plan, command: CommandModel, *, created_at: datetime, format_: str | None
) -> Verification:
    """Run a command for a few updates under the limit of a recommendation, and compare them with a plan.

    The plan is that of the recommendation, or of the export ``format_``. The command has placeholders, or the figures
    of the plan in its text.

    Raises:
        PlanError: when the plan does not repeat one micro-batch size.
        SpecError: when the command cannot be started.
        DeviceError: when this host lacks the device of the recommendation.
    """
    sizes = {size for rank in plan.micro_batch_sizes for size in rank}
    if len(sizes) > 1:
        listed = " and ".join(str(size) for size in sorted(sizes, reverse=True))
        raise PlanError(
            f"the plan has micro-batches of {listed} samples, and a framework repeats one size: name the format of the "
            "export that you train with (`--format hugging-face`)"
        )
    size = sizes.pop()
    share = size * plan.gradient_accumulation_steps
    request = recommendation.request
    device = find_device(recommendation.device.id)
    limit = recommendation.headroom.limit_bytes if recommendation.headroom else request.memory_limit_bytes
    probe = ProbeRequest(
        spec=CommandSpec(model=command, parallelism=RanksSpec(world_size=plan.world_size)),
        micro_batch_size=size,
        samples_per_window=share,
        device=device.id,
        limit_bytes=None if limit is None else int(limit * (1.0 - request.memory_margin)),
        memory_margin=request.memory_margin,
        timeout_seconds=request.probe_timeout_seconds,
        runs_plan=True,
    )
    check_command(command)
    with CommandSupervisor(device) as supervisor:
        result = supervisor.run(probe)
    counted = judge_over_sizes(result, recommendation.evidence.probes, share) if result.outcome is Outcome.FIT else None
    if counted is not None:
        message = f"{result.message.partition(': ')[0]}: {counted.statement}"
        result = result.model_copy(update={"counted": counted, "message": message})
    seconds = None if result.timing is None else result.timing.update_seconds
    return Verification(
        created_at=created_at,
        argv=command.argv,
        format=format_,
        plan=plan.summary(),
        verdict=_verdict(result),
        statement=result.message,
        samples_per_second=plan.effective_batch_size / seconds if seconds else None,
        probe=result,
    )


def _verdict(result: ProbeResult) -> Verdict:
    if result.outcome is Outcome.FIT:
        as_planned = None if result.counted is None else result.counted.as_planned
        return "not-known" if as_planned is None else "as-planned" if as_planned else "not-as-planned"
    if result.outcome is Outcome.OOM:
        return "does-not-fit"
    return "not-as-planned" if result.error_type == PLAN_NOT_FOLLOWED else "not-known"
