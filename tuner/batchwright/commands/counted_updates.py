"""Compare the counted updates of a command with the figures that it was given. Pure, no torch.

What a sample is only the program knows. The samples of an update are counted by the indices that each data loader drew
and by the dimensions of what the model was called with, and any of them may mislead: packed sequences have one row,
recurrent networks have time first, and a loader may read ahead. So one of them confirms the figures, and none refutes
them alone. ``batchwright.planning.proofs.counted_plans`` compares the probes of several sizes. Here the figures are
refuted by fewer backward passes than planned, by other ranks, and by a loader and the model that both count the same
other number.

Updates before the first one with all passes are of a program that ramps its accumulation, and a smaller one may end an
epoch of the data loader.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from batchwright.commands.reports import ReportedProcess, Reports
from batchwright.commands.templates import Figures
from batchwright.planning.proofs.counted_plans import counts_nothing, own_steps, whole_updates
from batchwright.schemas.command import CommandModel
from batchwright.schemas.results import CountedRank, CountedUpdates
from batchwright.units import counted as in_words

_LEAST_SHARE = 0.01
"""Share of an optimizer's parameters without a gradient from which they are named."""


def judge_updates(reports: Reports, figures: Figures, model: CommandModel, *, of_plan: bool) -> CountedUpdates | None:
    """Judge the updates of a command that was given these figures; None if it made no update."""
    if not reports.trained:
        return None
    ranks = tuple(rank for process in reports.trained for rank in _counted_ranks(process))
    as_planned, statement = _judge(ranks, figures, reports.world_size, model)
    first, done = reports.trained[0], [process.done or {} for process in reports.trained]
    versions = {"python": first.python, "torch": first.torch}
    return CountedUpdates(
        world_size=reports.world_size,
        ranks=ranks,
        accumulation_steps=figures.accumulation_steps if model.takes_accumulation else None,
        of_plan=of_plan,
        as_planned=as_planned,
        statement=statement,
        shapes=_shapes([each.get("shapes", {}) for each in done]),
        unseen=_unseen(done[0], model),
        longest_first="; ".join(_drawn(done[0])),
        batch_norms=any(each.get("batch_norms", False) for each in done),
        versions={name: version for name, version in versions.items() if version},
    )


def _counted_ranks(process: ReportedProcess) -> list[CountedRank]:
    """The updates of a process, by the optimizers that ended them."""
    done = process.done or {}
    found: list[CountedRank] = []
    for number in dict.fromkeys(event["optimizer_number"] for event in process.updates):
        events = [event for event in process.updates if event["optimizer_number"] == number]
        sources = [name for name in events[-1]["samples"] if all(name in event["samples"] for event in events)]
        ends = [at for at, event in enumerate(events) if event["number"] - 1 in done.get("epoch_ends", ())]
        kind = events[-1]["optimizer"]
        alike = sum((each.optimizer or "").partition(" ")[0] == kind for each in found)
        found.append(
            CountedRank(
                rank=process.rank,
                optimizer=f"{kind} {alike + 1}" if alike else kind,
                backward_passes=tuple(event["backward_passes"] for event in events),
                samples={name: tuple(event["samples"][name] for event in events) for name in sources},
                epoch_ends=tuple(ends),
                skipped_updates=0 if found else done.get("skipped", 0),
            )
        )
    return found


def _shapes(reported: Sequence[dict[str, Any]]) -> dict[str, tuple[tuple[int, int], ...]]:
    """The smallest and the largest size of each dimension on any rank."""
    found: dict[str, tuple[tuple[int, int], ...]] = {}
    for shapes in reported:
        for name, (smallest, largest) in shapes.items():
            before = found.get(name, tuple(zip(smallest, largest, strict=True)))
            sizes = zip(before, smallest, largest, strict=False)
            found[name] = tuple((min(low, least), max(high, most)) for (low, high), least, most in sizes)
    return found


def _drawn(done: dict[str, Any]) -> Iterator[str]:
    """Name the items that the batches of a process had because they are the longest."""
    for looked, count, low, high in done.get("longest_first", ()):
        of = f"all {count:,}" if looked == count else f"{looked:,} of {count:,}"
        yield f"the longest of {of} items, which have {low:,} to {high:,} values"


def _unseen(done: dict[str, Any], model: CommandModel) -> dict[str, str]:
    """What a process did not do in its probe, by the code of the warning."""
    found = {}
    idle, trained = done.get("idle_optimizers", ()), done.get("idle_parameters", 0)
    if idle:
        named = " and ".join(f"{name.rpartition('.')[2]} ({count:,} parameters)" for name, count in idle)
        found["optimizer-did-not-step"] = (
            f"An optimizer made no step in the probes: {named}. Its gradients and state will take memory "
            f"later. Watch more updates (`--probe-updates {4 * model.probe_updates}`)."
        )
    if trained > _LEAST_SHARE * done.get("held_parameters", 0):
        found["parameters-without-gradient"] = (
            f"{trained:,} parameters of the optimizers had no gradient. If they get one later (unfrozen "
            "layers), the gradient and the optimizer state take more memory. Watch more updates "
            "(`--probe-updates`)."
        )
    if any(looked < count for looked, count, _, _ in done.get("longest_first", ())):
        found["longer-items"] = (
            f"Probe batches had {'; '.join(_drawn(done))}. Another item may be longer and take more memory."
        )
    if done.get("calls_vary"):
        found["calls-vary"] = (
            "The number of model calls per backward pass varied, as with an adaptive solver: a later update "
            "may make more calls and take more memory. Watch more updates (`--probe-updates`)."
        )
    if place := done.get("later_evaluation"):
        found["evaluation-not-seen"] = (
            f"The program may evaluate ({place}), but no evaluation ran in the probes: it may take more "
            "memory than training. Have probes evaluate first, with an argument of the program "
            "(`--probe-argument=...`)."
        )
    return found


# --- the verdict ---


def _judge(
    ranks: Sequence[CountedRank], figures: Figures, world_size: int, model: CommandModel
) -> tuple[bool | None, str]:
    """Return whether the counted figures are those of the plan, and a sentence with both."""
    steps = figures.accumulation_steps if model.takes_accumulation else None
    size = figures.micro_batch_size
    whole = [whole_updates(rank, steps) for rank in ranks]
    counted = describe_counted(ranks, whole, figures, world_size)
    if world_size != figures.world_size:
        remedy = f"tune with --world-size {world_size} (parallelism.world_size of the spec)"
        return False, f"{counted}; planned: {in_words(figures.world_size, 'rank')}; {remedy}"
    verdicts = [
        False if places is None else _confirms(rank, places, steps, model, size)
        for rank, places in zip(ranks, whole, strict=True)
    ]
    where = f" on each of {world_size} ranks" if world_size > 1 else ""
    planned = figures.accumulation_steps * size * world_size
    if False in verdicts:
        of_plan = f"{steps} of {size} samples{where}: {planned}" if steps else f"micro-batches of {size}"
        return False, f"{counted}; planned: {of_plan}"
    if steps is None:
        return None, f"{counted}; the command takes no accumulation, so only its micro-batch size was set"
    if model.says_what_a_sample_is:
        unit = [] if model.samples_per_unit is None else [f"{model.samples_per_unit} of a count are a sample"]
        unit += [] if model.samples_dimension is None else [f"dimension {model.samples_dimension} counts them"]
        return None, f"{counted}; these are the planned samples, {planned}, given that {' and '.join(unit)}"
    if any(verdict is None and not counts_nothing(rank, ranks) for rank, verdict in zip(ranks, verdicts, strict=True)):
        return None, f"{counted}; not verified to be the {planned} planned samples"
    return True, f"{counted}, as planned"


def _confirms(
    rank: CountedRank, whole: Sequence[int], steps: int | None, model: CommandModel, size: int
) -> bool | None:
    """Return whether the samples of an update are those planned: as one source counts them, or two agree on others.

    A micro-batch of one sample is not confirmed by a dimension, since that of packed sequences is one too. Counts that
    differ from update to update refute nothing: a sampler may draw batches of random sizes.
    """
    at = whole[-1]
    passes = rank.backward_passes[at]
    steps = steps or own_steps(rank, size)
    wanted = size * steps
    counts = {name: samples[at] for name, samples in rank.samples.items()}
    if model.says_what_a_sample_is:
        said = [count for name, count in counts.items() if model.samples_dimension in {None, _dimension(name)}]
        return None if wanted * (model.samples_per_unit or 1) in said else False
    drawn = [count for name, count in counts.items() if _dimension(name) is None]
    rows = counts.get("dimension 0")
    if wanted in drawn or (rows == wanted and size > 1 and passes == steps):
        return True
    varies = len({rank.samples["dimension 0"][place] for place in whole}) > 1 if rows is not None else False
    is_refuted = model.counts_samples and len(drawn) == 1 and rows == drawn[0] and not varies
    return False if is_refuted else None


def _dimension(source: str) -> int | None:
    """The dimension that a source of counts is; none for a data loader."""
    kind, _, number = source.partition(" ")
    return int(number) if kind == "dimension" else None


def describe_counted(
    ranks: Sequence[CountedRank], whole: Sequence[Sequence[int] | None], figures: Figures, world_size: int
) -> str:
    """Describe the counted figures: `4 backward passes of 25 samples per update on each of 2 ranks: 200`.

    ``whole`` has the places of the whole updates of each of ``ranks``.
    """
    by_rank = [_describe(rank, places, figures, world_size) for rank, places in zip(ranks, whole, strict=True)]
    if len(set(by_rank)) == 1:
        return by_rank[0]
    has_optimizers = len(ranks) > world_size
    names = [
        (f"rank {rank.rank} " if world_size > 1 else "")
        + ((rank.optimizer or "").rpartition(".")[2] if has_optimizers else "")
        for rank in ranks
    ]
    return "; ".join(f"{name.strip()}: {text}" for name, text in zip(names, by_rank, strict=True))


def _describe(rank: CountedRank, whole: Sequence[int] | None, figures: Figures, world_size: int) -> str:
    """Describe the updates of one optimizer on a rank: by a whole update, or one by one where they differ."""
    where = f" on each of {world_size} ranks" if world_size > 1 else ""
    if whole is None and len(set(rank.backward_passes)) > 1:
        listed = ", ".join(map(str, rank.backward_passes[-8:]))
        return f"{listed} backward passes in the last of {len(rank.backward_passes)} updates{where}"
    at = whole[-1] if whole else len(rank.backward_passes) - 1
    passes = rank.backward_passes[at]
    counted = f"{passes} backward pass{'' if passes == 1 else 'es'}"
    counts = {name: samples[at] for name, samples in rank.samples.items() if name.startswith(("loader", "dimension 0"))}
    if not counts:
        return f"{counted} per update{where}"
    size = figures.micro_batch_size
    wanted = {size * figures.accumulation_steps, size * passes, size * own_steps(rank, size)}
    found = [count for count in counts.values() if count in wanted]
    found += [size * passes] if size * passes in [samples[at] for samples in rank.samples.values()] else []
    count = next(iter([*found, *counts.values()]))
    if count in wanted and count < size * passes and passes * size % count == 0:  # two for each micro-batch
        each = f"for {in_words(count, 'sample')}"
    else:
        each = f"of {in_words(count // passes, 'sample')}" if count % passes == 0 else f"of {count} samples together"
    return f"{counted} {each} per update{where}: {count * world_size}"
