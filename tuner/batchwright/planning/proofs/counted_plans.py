"""Compare the counted updates of a command over the sizes of a tuning. Pure, no torch.

The counts of one probe may agree with its figures by chance, or disagree because a sample is something else: a row of
seven views, or a column of a batch with time first. Over two sizes a count that does not change is of no batch, and one
that grows in proportion shows how many of its kind a sample has. So does the number of backward passes over two
numbers of micro-batches: two for each micro-batch where a critic takes real and made samples apart, and always the same
where a program ignores its accumulation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from batchwright.schemas.results import CountedRank, CountedUpdates, Outcome, ProbeResult
from batchwright.units import counted as in_words


@dataclass(frozen=True)
class _Update:
    """A whole update of one optimizer, of a probe.

    Attributes:
        size: the micro-batch size.
        steps: micro-batches of the update, as the command was told.
        passes: its backward passes.
        samples: its samples, by what counted them.
    """

    size: int
    steps: int
    passes: int
    samples: dict[str, int]


def whole_updates(rank: CountedRank, steps: int | None) -> list[int] | None:
    """The places of the updates that have all of their micro-batches; none where others refute the accumulation.

    They are in order, but if data loaders drew less for the very last update, which may end an epoch, it comes first.

    Args:
        rank: the updates of an optimizer on a rank.
        steps: the micro-batches of an update; none for a command that was not given them.
    """
    whole = [at for at, passes in enumerate(rank.backward_passes) if passes >= (steps or 1)]
    later = set(range(whole[0], len(rank.backward_passes))) - set(rank.epoch_ends) if whole else set()
    if not whole or (
        steps is not None and len({rank.backward_passes[at] for at in later} | {rank.backward_passes[whole[0]]}) > 1
    ):
        return None
    found = [at for at in whole if at in later] or whole
    drawn = [sum(counts[at] for name, counts in rank.samples.items() if name.startswith("loader")) for at in found]
    return found if drawn[-1] >= max(drawn[-2:]) else [found[-1], *found[:-1]]


def own_steps(rank: CountedRank, size: int) -> int:
    """Count the micro-batches of an update that a command makes which takes no accumulation.

    Each is a backward pass, unless a data loader drew fewer: a critic goes backward for real and for made samples.
    """
    at = _last_whole(rank, None)
    passes = rank.backward_passes[at]
    drawn = [counts[at] for name, counts in rank.samples.items() if name.startswith("loader")]
    steps = [count // size for count in drawn if count and count % size == 0]
    return max((each for each in steps if passes % each == 0), default=passes)


def counts_nothing(rank: CountedRank, ranks: Sequence[CountedRank]) -> bool:
    """Return whether only other optimizers of a rank count samples, such as the one of a generator's critic."""
    return not rank.samples and any(other.samples for other in ranks if other.rank == rank.rank)


def _last_whole(rank: CountedRank, steps: int | None) -> int:
    """The place of the last whole update; without known steps, of those with the most backward passes."""
    whole = whole_updates(rank, steps) or [-1]
    return whole[-1] if steps is not None else max(reversed(whole), key=lambda at: rank.backward_passes[at])


def judge_over_sizes(fit: ProbeResult, probes: Sequence[ProbeResult], share: int) -> CountedUpdates | None:
    """The counted updates of a fit, with a verdict that the other sizes of the tuning give where its own is open.

    Args:
        fit: the fit.
        probes: every probe of the tuning.
        share: samples of an update of the plan on a rank, for a command that takes no accumulation.
    """
    counted = fit.counted
    if counted is None or counted.as_planned is not None:
        return counted
    steps = counted.accumulation_steps or own_steps(counted.ranks[0], fit.micro_batch_size)
    if counted.accumulation_steps is None and steps * fit.micro_batch_size != share:
        return counted
    fits = [probe for probe in probes if probe.outcome is Outcome.FIT and probe is not fit]
    notes, verdicts = [], []
    for rank in counted.ranks:
        others = [update for probe in fits for update in _updates(probe, rank)]
        verdict, note = _judge(_updates(fit, rank)[0], others)
        if verdict is None and counts_nothing(rank, counted.ranks):
            continue
        verdicts.append(verdict)
        notes.append(note)
    note = "; ".join(dict.fromkeys(filter(None, notes)))
    as_planned = False if False in verdicts else True if all(verdicts) else None
    statement = counted.statement
    if as_planned:
        where = f" on each of {counted.world_size} ranks"
        statement = (
            f"{steps} micro-batch{'' if steps == 1 else 'es'} of "
            f"{in_words(fit.micro_batch_size, 'sample')} per update{where if counted.world_size > 1 else ''}: "
            f"{steps * fit.micro_batch_size * counted.world_size}, as planned"
        )
    return counted.model_copy(
        update={"as_planned": as_planned, "statement": f"{statement} ({note})" if note else statement}
    )


def _updates(probe: ProbeResult, rank: CountedRank) -> list[_Update]:
    """The last whole update of the same rank and optimizer in a probe."""
    found, counted = [], probe.counted
    for each in counted.ranks if counted is not None else ():
        if counted is not None and (each.rank, each.optimizer) == (rank.rank, rank.optimizer):
            at = _last_whole(each, counted.accumulation_steps)
            samples = {name: counts[at] for name, counts in each.samples.items()}
            steps = counted.accumulation_steps or own_steps(each, probe.micro_batch_size)
            found.append(_Update(probe.micro_batch_size, steps, each.backward_passes[at], samples))
    return found[:1]


def _judge(own: _Update, others: Sequence[_Update]) -> tuple[bool | None, str]:
    """Judge an update by those of the same optimizer in other probes; return also what a sample is, in words."""
    passes = own.passes / own.steps
    of_other_steps = [other for other in others if other.steps != own.steps]
    if any(other.passes == own.passes for other in of_other_steps):
        steps = ", ".join(str(other.steps) for other in of_other_steps)
        return False, f"it also made {own.passes} backward passes with {steps} micro-batches per update"
    follows = passes == 1 or any(other.passes / other.steps == passes for other in of_other_steps)
    note = f"{own.passes // own.steps} backward passes per micro-batch" if follows and passes != 1 else ""
    shown = [name for name in own.samples if name.startswith("loader") or (name == "dimension 0" and own.size > 1)]
    if passes == 1 and any(own.samples[name] == own.steps * own.size for name in shown):
        return True, note
    ratios = {}
    for name, count in own.samples.items():
        found = {
            other.samples[name] / (other.steps * other.size)
            for other in others
            if other.size != own.size and name in other.samples
        }
        if found == {count / (own.steps * own.size)}:
            ratios[name] = found.pop()
        elif found == {1.0} and len({other.size for other in others if name in other.samples}) > 1:
            return False, f"{_unit(name)} counts {count} samples, but {own.steps * own.size} were planned"
    confirming = [name for name, ratio in ratios.items() if ratio == 1 or (follows and ratio == passes)]
    if confirming and (follows or ratios[confirming[0]] == 1):
        return True, "; ".join(filter(None, [note, _in_words(confirming[0])]))
    if ratios:
        name, ratio = next(iter(ratios.items()))
        return None, f"{_unit(name)} counts {ratio:g} for each sample of the plan"
    has_sizes = any(other.size != own.size for other in others)
    grows = "nothing that was counted grows in proportion to the micro-batch size"
    return None, grows if has_sizes else "only one size was counted"


def _in_words(source: str) -> str:
    """Name what counts samples where it is not the obvious."""
    return "" if source == "dimension 0" or source.startswith("loader") else f"{_unit(source)} counts the samples"


def _unit(source: str) -> str:
    kind, _, number = source.partition(" ")
    return f"dimension {number} of the model's input" if kind == "dimension" else f"data loader {number}"
