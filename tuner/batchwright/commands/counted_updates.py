"""Compare the counted updates of a command with the figures that it was given. Pure, no torch.

The samples of an update are known by two sources: the first dimension of what the model was called with, and the
indices that the data loader drew. Either may mislead (packed sequences, a loader that reads ahead), so that they refute
a plan only where neither confirms it. The number of backward passes has one source.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from batchwright.commands.reports import ReportedProcess, Reports
from batchwright.commands.templates import Figures
from batchwright.schemas.results import CountedRank, CountedUpdates


def judge_updates(
    reports: Reports, figures: Figures, updates: int, *, takes_accumulation: bool, of_plan: bool
) -> CountedUpdates | None:
    """Judge the updates of a command; none where it made no update.

    Args:
        reports: what its processes have reported.
        figures: the figures that it was given.
        updates: updates that were wanted.
        takes_accumulation: whether it takes the steps of accumulation.
        of_plan: whether the figures are those of a plan.
    """
    if not reports.trained:
        return None
    ranks = tuple(_counted_rank(process, figures, updates) for process in reports.trained)
    sequences = [length for process in reports.trained for length in (process.done or {}).get("sequences", [])]
    as_planned, statement = _judge(ranks, figures, reports.world_size, takes_accumulation=takes_accumulation)
    first = reports.trained[0]
    versions = {"python": first.python, "torch": first.torch}
    return CountedUpdates(
        world_size=reports.world_size,
        ranks=ranks,
        of_plan=of_plan,
        as_planned=as_planned,
        statement=statement,
        longest_sequence=max(sequences, default=None),
        lengths_vary=len(set(sequences)) > 1,
        optimizer=first.updates[-1]["optimizer"],
        versions={name: version for name, version in versions.items() if version},
    )


def _counted_rank(process: ReportedProcess, figures: Figures, updates: int) -> CountedRank:
    events = process.updates[:updates]
    wanted = figures.micro_batch_size * figures.accumulation_steps
    return CountedRank(
        rank=process.rank,
        backward_passes=tuple(event["backward_passes"] for event in events),
        samples=_samples(events, wanted),
        skipped_updates=(process.done or {}).get("skipped", 0),
    )


def _samples(events: Sequence[dict[str, Any]], wanted: int) -> tuple[int, ...]:
    """The samples of each update by the source that is nearest to the plan; empty where none is complete."""
    sources = [[event[name] for event in events] for name in ("forward_samples", "loader_samples")]
    complete = [source for source in sources if source and None not in source]
    return tuple(min(complete, key=lambda source: sum(abs(each - wanted) for each in source), default=()))


def _judge(
    ranks: Sequence[CountedRank], figures: Figures, world_size: int, *, takes_accumulation: bool
) -> tuple[bool | None, str]:
    """Return whether the counted figures are those of the plan, and a sentence with both."""
    counted = describe_counted(ranks, world_size)
    planned = _describe_planned(figures)
    if not takes_accumulation:
        sizes = {samples // passes for rank in ranks for samples, passes in _pairs(rank) if passes}
        note = "the command takes no accumulation, so only its micro-batch size was set"
        if sizes and sizes != {figures.micro_batch_size}:
            return False, f"{counted}; planned were micro-batches of {figures.micro_batch_size}"
        return None, f"{counted}; {note}"
    if world_size != figures.world_size:
        remedy = f"tune with --world-size {world_size} (parallelism.world_size of the spec)"
        return False, f"{counted}; planned were {figures.world_size} ranks: {remedy}"
    passes_agree = all(count == figures.accumulation_steps for rank in ranks for count in rank.backward_passes)
    wanted = figures.micro_batch_size * figures.accumulation_steps
    samples_agree = all(count == wanted for rank in ranks for count in rank.samples)
    if not passes_agree or not samples_agree:
        return False, f"{counted}; planned were {planned}"
    if any(not rank.samples for rank in ranks):
        return None, f"{counted}; no tensor showed the samples"
    return True, f"{counted}, as planned"


def _pairs(rank: CountedRank) -> list[tuple[int, int]]:
    return list(zip(rank.samples, rank.backward_passes, strict=False))


def describe_counted(ranks: Sequence[CountedRank], world_size: int) -> str:
    """Describe the counted figures: `4 backward passes of 25 samples per update on each of 2 ranks: 200`."""
    kinds = {(rank.backward_passes, rank.samples) for rank in ranks}
    passes, samples = ranks[0].backward_passes, ranks[0].samples
    if len(kinds) > 1 or len(set(passes)) > 1 or len(set(samples)) > 1:
        return "; ".join(_describe_rank(rank, world_size) for rank in ranks)
    where = f" on each of {world_size} ranks" if world_size > 1 else ""
    times = "" if passes[0] == 1 else "es"
    if not samples:
        return f"{passes[0]} backward pass{times} per update{where}"
    even = samples[0] % max(1, passes[0]) == 0
    each = f"of {samples[0] // max(1, passes[0])} samples" if even else f"of {samples[0]} samples together"
    return f"{passes[0]} backward pass{times} {each} per update{where}: {samples[0] * world_size}"


def _describe_rank(rank: CountedRank, world_size: int) -> str:
    where = f"rank {rank.rank}: " if world_size > 1 else ""
    passes = ", ".join(str(count) for count in rank.backward_passes)
    samples = f" with {', '.join(str(count) for count in rank.samples)} samples" if rank.samples else ""
    return f"{where}{passes} backward passes in {len(rank.backward_passes)} updates{samples}"


def _describe_planned(figures: Figures) -> str:
    steps, size, ranks = figures.accumulation_steps, figures.micro_batch_size, figures.world_size
    where = f" on each of {ranks} ranks" if ranks > 1 else ""
    return f"{steps} of {size} samples{where}: {figures.effective_batch_size}"
