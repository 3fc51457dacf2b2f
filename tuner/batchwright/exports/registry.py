"""All targets by name, and the function that exports a recommendation. Pure, no torch."""

from collections.abc import Mapping
from dataclasses import replace

from batchwright.errors import ExportError
from batchwright.exports.advice import OWN_OPTIMIZER, how_to_verify
from batchwright.exports.base import Export, ExportContext, ExportOptions, Target, TargetPlan, Warnings
from batchwright.exports.frameworks import (
    accelerate,
    axolotl,
    deepspeed,
    hugging_face,
    lightning,
    llama_factory,
    megatron,
    nemo_automodel,
    pytorch,
    torchtitan,
)
from batchwright.exports.launchers import kubernetes, ray_jobs, rayjob, skypilot, slurm, torchrun, trainjob
from batchwright.exports.launchers.carried_command import command_advice
from batchwright.planning.accumulation import uniform_plan
from batchwright.schemas.plans import Plan
from batchwright.schemas.recommendation import Advice, Recommendation
from batchwright.suggestions import suggestion

_TARGETS = (
    pytorch.TARGET,
    hugging_face.TARGET,
    accelerate.TARGET,
    lightning.TARGET,
    deepspeed.TARGET,
    megatron.TARGET,
    torchtitan.TARGET,
    nemo_automodel.TARGET,
    axolotl.TARGET,
    llama_factory.TARGET,
    torchrun.TARGET,
    slurm.TARGET,
    kubernetes.TARGET,
    trainjob.TARGET,
    rayjob.TARGET,
    ray_jobs.TARGET,
    skypilot.TARGET,
)

TARGETS: Mapping[str, Target] = {target.name: target for target in _TARGETS}
"""Targets by name, in the order of the list: frameworks, then launchers."""

_DEFAULTS = ExportOptions()
_STARTED_BY_LAUNCHERS = "world-size"
"""Code of the advice to start as many processes as ranks, which a launcher does."""


def find_target(name: str) -> Target:
    """The target of this name.

    Raises:
        ExportError: when there is none; the message lists them.
    """
    if name not in TARGETS:
        near = suggestion(name, TARGETS, "'")
        raise ExportError("unknown-format", f"there is no export format {name!r}{near} (known: {', '.join(TARGETS)})")
    return TARGETS[name]


def export(
    recommendation: Recommendation, name: str, *, version: str | None = None, options: ExportOptions = _DEFAULTS
) -> Export:
    """Export a recommendation to a target.

    Args:
        recommendation: a feasible recommendation.
        name: the target's name.
        version: one of the target's versions; its newest when left out.
        options: properties of the job that the recommendation does not contain.

    Raises:
        ExportError: when the target or its version is unknown, nothing fits, or the target would change the effective
            batch and `options.allow_inexact` is false.
    """
    target = find_target(name)
    framework = _framework(target, options)
    _refuse_command(recommendation, target, options)
    plan = _target_plan(recommendation, options, framework or target)
    context = ExportContext(recommendation, plan, _version(target, version), options, (framework or target).name)
    inherited: Warnings = {}
    if framework is not None and framework.arguments is not None:
        inner = replace(context, version=framework.versions[0])
        context = replace(context, arguments=framework.arguments(inner))
        found: Warnings = {}
        if framework.arguments_leave:
            found["figures-alone"] = (
                f"Only the batch sizes are passed to {framework.title}. {framework.arguments_leave} also "
                f"affect memory: copy them from an export to {framework.name} into your own configuration "
                "file, and name that file in the command."
            )
        inherited = found | framework.write(inner).warnings
        inherited.pop(_STARTED_BY_LAUNCHERS, None)
    written = target.write(context)
    warnings = (*_of_the_plan(target, context).items(), *written.warnings.items(), *inherited.items())
    return Export(
        plan=plan.summary(),
        format=target.name,
        title=target.title,
        target_version=context.version,
        recommendation_id=recommendation.id,
        verification=how_to_verify(context),
        loop=target.loop,
        files=written.files,
        command=written.command,
        environment={**recommendation.environment, **written.environment},
        warnings=tuple(Advice(code=code, message=message) for code, message in dict.fromkeys(warnings)),
    )


def plan_of_target(recommendation: Recommendation, name: str, options: ExportOptions = _DEFAULTS) -> TargetPlan:
    """The plan that an export of a recommendation has.

    Raises:
        ExportError: as ``export``.
    """
    return _target_plan(recommendation, options, find_target(name))


def _refuse_command(recommendation: Recommendation, target: Target, options: ExportOptions) -> None:
    """Refuse to configure a framework for a command, which has its figures by arguments of its own."""
    if recommendation.request.command is None:
        return
    if options.arguments_of is not None:
        raise ExportError(
            "wrong-option",
            f"recommendation {recommendation.id} is for a command, which gets the figures of the plan by its own "
            f"placeholders: leave `arguments_of` out (it is {options.arguments_of!r})",
        )
    if target.kind == "framework":
        launchers = ", ".join(known.name for known in TARGETS.values() if known.kind == "launcher")
        raise ExportError(
            "not-expressible",
            f"recommendation {recommendation.id} is for a command, and an export to {target.title} would configure "
            "another program. Run the command with the figures of the plan (`batchwright train recommendation.json`), "
            f"or export to a launcher, which starts it: {launchers}",
        )


def _of_the_plan(target: Target, context: ExportContext) -> Warnings:
    """Warn of what the program has to know of the plan, whatever the target."""
    plan, is_command, earlier = context.plan, context.recommendation.request.command is not None, OWN_OPTIMIZER.code
    found = {each.code: each.message for each in context.recommendation.warnings if each.code == earlier}
    found |= command_advice(context)
    if plan.change:
        found["more-steps" if plan.exact else "effective-batch-changed"] = plan.change
    given = context.options.model_dump(exclude={"allow_inexact", "arguments_of"}, exclude_defaults=True)
    takes = (target.takes - {"script"}) | {"updates"} if is_command else target.takes
    if unused := [f"`{name}`" for name in given if name not in takes]:
        found["option-not-used"] = f"An export to {target.title} does not use {', '.join(unused)}."
    repeated = plan.micro_batch_size * plan.gradient_accumulation_steps * plan.world_size
    if target.kind == "launcher" and not context.arguments and repeated != plan.effective_batch_size:
        found["micro-batches-differ"] = (
            f"Micro-batches are not all of one size: a program that repeats {plan.micro_batch_size} samples in "
            f"{plan.gradient_accumulation_steps} steps on every rank trains {repeated} samples per update, not "
            f"{plan.effective_batch_size}. Divide BATCHWRIGHT_EFFECTIVE_BATCH_SIZE over the ranks, and each share into "
            "micro-batches of at most BATCHWRIGHT_MICRO_BATCH_SIZE, as Batchwright's engine does, or name the "
            "framework in `arguments_of`."
        )
    return found


def _framework(target: Target, options: ExportOptions) -> Target | None:
    """The framework whose arguments a launcher passes on."""
    if options.arguments_of is None:
        return None
    framework = find_target(options.arguments_of)
    if target.kind != "launcher":
        raise ExportError("wrong-option", f"`arguments_of` is for launchers, and {target.name} is not a launcher")
    if framework.arguments is None:
        able = ", ".join(known.name for known in TARGETS.values() if known.arguments is not None)
        raise ExportError(
            "wrong-option", f"{framework.title} does not take the batch sizes as arguments; these do: {able}"
        )
    return framework


def _version(target: Target, requested: str | None) -> str:
    if requested is None:
        return target.versions[0]
    if requested not in target.versions:
        raise ExportError(
            "unknown-version",
            f"{target.title} can be exported for the versions {', '.join(target.versions)}, not for {requested!r}",
        )
    return requested


def _target_plan(recommendation: Recommendation, options: ExportOptions, target: Target) -> TargetPlan:
    """Adapt the recommended plan to ``target``."""
    plan, largest = recommendation.plan, recommendation.largest_micro_batch_size
    if not recommendation.feasible or plan is None or largest is None:
        reason = recommendation.infeasible_reason or "no micro-batch fits"
        raise ExportError("infeasible", f"recommendation {recommendation.id} cannot be exported: {reason}")
    if target.repeats_one_size:
        return _one_size(plan, largest, options)
    return TargetPlan(**dict(plan))


def _one_size(plan: Plan, largest: int, options: ExportOptions) -> TargetPlan:
    """The uniform plan."""
    uniform = uniform_plan(plan.effective_batch_size, plan.world_size, largest)
    if not uniform.exact and not options.allow_inexact:
        near = ", ".join(str(batch.effective_batch_size) for batch in uniform.nearest)
        raise ExportError(
            "inexact",
            f"{uniform.change} Set `allow_inexact` to export it anyway, tune for a reachable batch ({near}), "
            "or export to a target that takes uneven micro-batches (`pytorch`).",
        )
    changed = not uniform.exact or uniform.gradient_accumulation_steps > plan.gradient_accumulation_steps
    sizes = ((uniform.micro_batch_size,) * uniform.gradient_accumulation_steps,) * uniform.world_size
    change = uniform.change if changed else ""
    return TargetPlan(**dict(uniform.summary()), micro_batch_sizes=sizes, change=change)
