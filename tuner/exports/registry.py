"""All targets by name, and the one way from a recommendation to an export. Pure, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tuner.errors import ExportError
from tuner.exports.base import Export, ExportOptions, Figures, Order, Target
from tuner.exports.frameworks import (
    accelerate,
    axolotl,
    composer,
    deepspeed,
    hugging_face,
    lightning,
    llama_factory,
    megatron,
    nemo_automodel,
    pytorch,
    torchtitan,
    torchtune,
)
from tuner.exports.launchers import kubernetes, ray_jobs, rayjob, skypilot, slurm, torchrun, trainjob
from tuner.planning.accumulation import balanced_plan, uniform_plan
from tuner.schemas.plans import Plan
from tuner.schemas.recommendation import Advice, Recommendation
from tuner.suggestions import suggestion

_TARGETS = (
    pytorch.TARGET,
    hugging_face.TARGET,
    accelerate.TARGET,
    lightning.TARGET,
    deepspeed.TARGET,
    composer.TARGET,
    megatron.TARGET,
    torchtitan.TARGET,
    nemo_automodel.TARGET,
    torchtune.TARGET,
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
"""In the order in which they are listed: frameworks, then launchers."""

_DEFAULTS = ExportOptions()
_STARTED_BY_LAUNCHERS = "world-size"
"""The advice to start as many processes as there are ranks, which a launcher does."""


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
    """Write a recommendation in the words of a target.

    Args:
        recommendation: a feasible one.
        name: the target's name.
        version: one of the target's versions; its newest when left out.
        options: what the recommendation does not know.

    Raises:
        ExportError: when the target or its version is unknown, nothing fits, or the target would change the effective
            batch and `options.allow_inexact` does not say that this is fine.
    """
    target = find_target(name)
    framework = _framework(target, options)
    figures = _figures(recommendation, options, framework or target)
    order = Order(recommendation, figures, _version(target, version), options)
    passed_on: tuple[Advice, ...] = ()
    if framework is not None and framework.arguments is not None:
        inner = replace(order, version=framework.versions[0])
        order = replace(order, arguments=framework.arguments(inner))
        theirs = (it for it in framework.write(inner).warnings if it.code != _STARTED_BY_LAUNCHERS)
        passed_on = (*_left_out(framework), *theirs)
    written = target.write(order)
    of_the_plan = (*_changes(figures), *_unused(target, options), *_of_unlike_sizes(target, order))
    return Export(
        plan=figures.summary(),
        format=target.name,
        title=target.title,
        target_version=order.version,
        recommendation_id=recommendation.id,
        files=written.files,
        command=written.command,
        environment={**recommendation.environment, **written.environment},
        warnings=tuple(dict.fromkeys((*of_the_plan, *written.warnings, *passed_on))),
    )


def _changes(figures: Figures) -> tuple[Advice, ...]:
    """What the target cannot do as recommended."""
    if not figures.change:
        return ()
    code = "more-steps" if figures.exact else "effective-batch-changed"
    return (Advice(code=code, message=figures.change),)


def _unused(target: Target, options: ExportOptions) -> tuple[Advice, ...]:
    """Options that were given and are in no file of this target."""
    said = options.model_dump(exclude={"allow_inexact", "arguments_of"}, exclude_defaults=True)
    names = [name for name in said if name not in target.takes]
    if not names:
        return ()
    listed = ", ".join(f"`{name}`" for name in names)
    message = f"An export to {target.title} has no place for {listed}: not used."
    return (Advice(code="option-not-used", message=message),)


def _of_unlike_sizes(target: Target, order: Order) -> tuple[Advice, ...]:
    """What a program may make of a launcher's variables where no framework's arguments tell it the figures."""
    figures = order.figures
    repeated = figures.micro_batch_size * figures.gradient_accumulation_steps * figures.world_size
    if target.kind == "framework" or order.arguments or repeated == figures.effective_batch_size:
        return ()
    message = (
        f"Micro-batches are not all of one size: a program that repeats {figures.micro_batch_size} samples in "
        f"{figures.gradient_accumulation_steps} steps on every rank trains {repeated} samples per update, not "
        f"{figures.effective_batch_size}. Divide BATCHWRIGHT_EFFECTIVE_BATCH_SIZE over the ranks, and each share into "
        "micro-batches of at most BATCHWRIGHT_MICRO_BATCH_SIZE, as Batchwright's engine does, or name the framework "
        "in `arguments_of`."
    )
    return (Advice(code="micro-batches-differ", message=message),)


def _left_out(framework: Target) -> tuple[Advice, ...]:
    """What a framework's command line does not hold of its file."""
    if not framework.arguments_leave:
        return ()
    message = (
        f"Of {framework.title} the batch figures alone are passed on. {framework.arguments_leave} decide over memory "
        f"too: take them over from an export to {framework.name} into the configuration file of your own that its "
        "program reads, and name that file in the command."
    )
    return (Advice(code="figures-alone", message=message),)


def _framework(target: Target, options: ExportOptions) -> Target | None:
    """The framework whose arguments a launcher passes on."""
    if options.arguments_of is None:
        return None
    framework = find_target(options.arguments_of)
    if target.kind != "launcher":
        raise ExportError("wrong-option", f"`arguments_of` is for launchers, and {target.name} is none")
    if framework.arguments is None:
        able = ", ".join(it.name for it in TARGETS.values() if it.arguments is not None)
        raise ExportError(
            "wrong-option", f"{framework.title} does not take the batch figures as arguments; these do: {able}"
        )
    return framework


def _version(target: Target, asked: str | None) -> str:
    if asked is None:
        return target.versions[0]
    if asked not in target.versions:
        raise ExportError(
            "unknown-version",
            f"{target.title} can be exported for the versions {', '.join(target.versions)}, not for {asked!r}",
        )
    return asked


def _figures(recommendation: Recommendation, options: ExportOptions, taker: Target) -> Figures:
    """The numbers as ``taker`` can follow them."""
    plan, largest = recommendation.plan, recommendation.largest_micro_batch_size
    if not recommendation.feasible or plan is None or largest is None:
        reason = recommendation.infeasible_reason or "no micro-batch fits"
        raise ExportError("infeasible", f"recommendation {recommendation.id} cannot be exported: {reason}")
    if taker.repeats_one_size:
        return _one_size(plan, largest, options)
    if taker.divides_shares:
        return _equal_shares(plan, largest, options)
    return Figures(**dict(plan))


def _one_size(plan: Plan, largest: int, options: ExportOptions) -> Figures:
    """The uniform plan."""
    uniform = uniform_plan(plan.effective_batch_size, plan.world_size, largest)
    if not uniform.exact and not options.allow_inexact:
        near = ", ".join(str(it.effective_batch_size) for it in uniform.nearest)
        raise _inexact(uniform.change, near, "takes uneven micro-batches")
    changed = not uniform.exact or uniform.gradient_accumulation_steps > plan.gradient_accumulation_steps
    sizes = ((uniform.micro_batch_size,) * uniform.gradient_accumulation_steps,) * uniform.world_size
    change = uniform.change if changed else ""
    return Figures(**dict(uniform.summary()), micro_batch_sizes=sizes, change=change)


def _equal_shares(plan: Plan, largest: int, options: ExportOptions) -> Figures:
    """The plan of the nearest batch that gives every rank as many samples, each divided as the target does."""
    asked, ranks = plan.effective_batch_size, plan.world_size
    below = asked // ranks * ranks
    given = below if asked - below <= ranks // 2 else below + ranks
    change = ""
    if given != asked:
        change = (
            f"The effective batch becomes {given} instead of {asked} ({given - asked:+d}): {ranks} ranks with as many "
            f"samples each cannot reach {asked}."
        )
        if not options.allow_inexact:
            raise _inexact(change, f"{below}, {below + ranks}", "gives ranks unlike numbers of samples")
    share, size = given // ranks, balanced_plan(given, ranks, largest).micro_batch_size
    sizes = (size,) * (share // size) + ((share % size,) if share % size else ())
    return Figures(
        gradient_accumulation_steps=len(sizes),
        micro_batch_size=size,
        world_size=ranks,
        effective_batch_size=given,
        requested_effective_batch_size=asked,
        exact=given == asked,
        micro_batch_sizes=(sizes,) * ranks,
        change=change,
    )


def _inexact(change: str, near: str, able: str) -> ExportError:
    return ExportError(
        "inexact",
        f"{change} Say `allow_inexact` to export it all the same, tune for a batch that it reaches ({near}), "
        f"or export to a target that {able} (`pytorch`).",
    )
