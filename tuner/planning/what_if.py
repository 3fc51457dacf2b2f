"""What would fit if the spec chose otherwise: which changes to look at, and what an estimate says of them. Pure.

A change is one that takes less memory and leaves the training what it is: a mixed precision, activation checkpointing,
an optimizer or a gathering of gradients without temporaries. Each is estimated alone, then all that help together. No
probe runs them: the estimate's curve is bent as the probes of the spec as asked bend its own.

**Correction.** The smallest fit shows what is held between updates beyond the estimate ``R`` (the surplus ``s``:
thread pools, handles), the largest how much steeper the rest rises (the ratio ``r`` of what was measured above that to
what the estimate ``e`` has above ``R``). A curve with its own ``R'`` and ``e'`` is then taken to be
``R' + s + r * (e'(b) - R')``. With no fit ``r`` is 1, and ``s`` what a probe saw between its updates, if one got there.

**Limit.** The limit that counts is the one given, moved as little as it takes for the bent curve to agree with what
fitted and with what ran out of memory (fragmentation takes a part of a card).

Against tunings of the changed specs on the CPU (budgets of 48 to 160 MiB) the largest size was off by 0 % (two GPTs, a
ViT), 1.3 % (a GPT-2), 1.4 % (a BERT) and 2.9 % (a Llama) with activation checkpointing, by -5.3 % (a GPT) with a mixed
precision, and by -3.0 % with both. No card has been tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from tuner.planning.accumulation import share_per_rank
from tuner.planning.objectives import plan_size, steps_of
from tuner.planning.search import SearchSpace
from tuner.schemas.plans import PlanSummary
from tuner.schemas.recommendation import Proof, WhatIf
from tuner.schemas.results import DeviceInfo, ExpectedPeaks, Outcome, ProbeResult
from tuner.schemas.workload import WorkloadSpec, parse_spec

Changes = tuple[tuple[str, JsonValue], ...]
"""Fields of a spec, by dotted path, and what they would say."""

_ERROR = 0.05
"""How far a bent curve may be off."""
_ERROR_OF_PRECISION = 0.08
"""Other kernels run then, with workspaces of their own."""
_ERROR_UNMEASURED = 0.10
"""Where nothing fitted that could bend it."""
_RATIOS = (0.5, 2.0)
"""A measurement that bends more than this says that it is no matter of a ratio."""
_RISING = 0.02
"""Share of a peak that must be above what is held between updates for a ratio to be told from it."""
_HELPS = 0.99
"""A change that leaves more than this share of the memory does not help."""
_BY_MEMORY = {"oom", "warm-start"}
"""Where a search was stopped by something else, less memory is of no use."""
_BF16_CAPABILITY = (8, 0)
"""Cards below it only emulate bf16."""


@dataclass(frozen=True)
class WhatIfAnswer:
    """What came out of asking an estimate about changes of a spec.

    Attributes:
        what_ifs: with which more is expected to fit, or would with more of it.
        judged: fields of the spec of which the estimate told what a change does, if only that it does not help.
        unanswered: the changes of which it could not tell; empty text for the spec as asked.
    """

    what_ifs: tuple[WhatIf, ...] = ()
    judged: frozenset[str] = frozenset()
    unanswered: tuple[str, ...] = ()


class WhatIfs:
    """Asks for the memory curves of changed specs, one after the other, and tells what would fit.

    Args:
        spec: as asked.
        device: what it was probed on.
        space: the sizes that were searched, with the limit.
        effective_batch_size: samples per update over all ranks.
        proof: what the search found.
        probes: every probe.
        expected: the estimate of the spec as asked; asked for first when it is not there.
    """

    def __init__(  # noqa: PLR0913 - all that a finished search is made of
        self,
        spec: WorkloadSpec,
        device: DeviceInfo,
        *,
        space: SearchSpace,
        effective_batch_size: int,
        proof: Proof,
        probes: Sequence[ProbeResult],
        expected: ExpectedPeaks | None,
    ) -> None:
        self._spec = spec
        self._space = space
        self._batch = effective_batch_size
        self._proof = proof
        self._probes = probes
        self._singles = choices(spec, device) if proof.stopped_by in _BY_MEMORY else ()
        self._told: dict[Changes, ExpectedPeaks | None] = {} if expected is None else {(): expected}

    def ask(self) -> WorkloadSpec | None:
        """The spec whose memory curve is wanted next; none when there is nothing to ask."""
        changes = self._next()
        return None if changes is None else changed(self._spec, changes)

    def tell(self, peaks: ExpectedPeaks | None) -> None:
        """Take in the curve that was asked for; none where the estimate cannot tell."""
        changes = self._next()
        if changes is not None:
            self._told[changes] = peaks

    def _next(self) -> Changes | None:
        if not self._singles:
            return None
        if () not in self._told:
            return ()
        if self._told[()] is None:
            return None
        untold = [it for it in self._singles if it not in self._told]
        return untold[0] if untold else self._combination()

    def _combination(self) -> Changes | None:
        """All that help by themselves, if they are several and not asked for yet."""
        helping = self._helping
        together = tuple(change for single in helping for change in single)
        return together if len(helping) > 1 and together not in self._told else None

    @property
    def _helping(self) -> list[Changes]:
        size = self._proof.next_size or 1
        asked = self._told[()]
        curves = [(changes, self._told.get(changes)) for changes in self._singles]
        return [
            changes
            for changes, peaks in curves
            if peaks and asked and peaks.used_bytes(size) < _HELPS * asked.used_bytes(size)
        ]

    def answer(self) -> WhatIfAnswer:
        """What came out of what was asked."""
        known = [changes for changes, peaks in self._told.items() if peaks is not None]
        unknown = [changes for changes, peaks in self._told.items() if peaks is None]
        return WhatIfAnswer(
            what_ifs=self._what_ifs(),
            judged=frozenset(path for changes in known for path, _ in changes),
            unanswered=tuple(changes_in_words(dict(changes)) for changes in unknown),
        )

    def _what_ifs(self) -> tuple[WhatIf, ...]:
        """Changes with which more is expected to fit than was found, the largest first.

        Where nothing fits, also those with which nothing is expected to: they tell how much is missing.
        """
        asked = self._told.get(())
        if asked is None:
            return ()
        bend = Bend.of(asked, self._probes)
        limit = self._limit(bend.curve(asked))
        found = [self._what_if(changes, peaks, bend, limit) for changes, peaks in self._helpful()]
        worth = [it for it in found if it.largest_micro_batch_size > self._proof.fits or not self._proof.fits]
        return tuple(sorted(worth, key=lambda it: (-it.largest_micro_batch_size, it.peak_bytes, len(it.changes))))

    def _helpful(self) -> list[tuple[Changes, ExpectedPeaks]]:
        helping = self._helping
        curves = [(changes, self._told[changes]) for changes in self._told if changes in helping or len(changes) > 1]
        return [(changes, peaks) for changes, peaks in curves if peaks is not None]

    def _limit(self, curve: Callable[[float], float]) -> float:
        """The limit given, moved between what fitted and what did not."""
        limit, fits, fails = float(self._space.limit_bytes or 0), self._proof.fits, self._proof.next_size
        if not fits or fails is None:
            return limit
        return min(max(limit, curve(fits)), max(curve(fails), curve(fits)))

    def _what_if(self, changes: Changes, peaks: ExpectedPeaks, bend: Bend, limit: float) -> WhatIf:
        curve, error = bend.curve(peaks), bend.error(changes)
        largest = _largest(self._space, curve, limit)
        return WhatIf(
            changes=dict(changes),
            plan=self._plan(largest) if largest else None,
            largest_micro_batch_size=largest,
            surely_fits=_largest(self._space, curve, limit / (1 + error)),
            may_fit=_largest(self._space, curve, limit / (1 - error)),
            error=error,
            peak_bytes=max(0, round(curve(largest or self._space.size(1)))),
        )

    def _plan(self, largest: int) -> PlanSummary:
        """The balanced plan in micro-batches of at most ``largest``."""
        ranks = self._spec.parallelism.world_size
        share = share_per_rank(self._batch, ranks)[0]
        steps = steps_of(share, largest)
        return PlanSummary(
            gradient_accumulation_steps=steps,
            micro_batch_size=plan_size(share, steps),
            world_size=ranks,
            effective_batch_size=self._batch,
            requested_effective_batch_size=self._batch,
            exact=True,
        )


def choices(spec: WorkloadSpec, device: DeviceInfo) -> tuple[Changes, ...]:
    """What the spec could choose to take less memory, one change each."""
    found: list[tuple[str, JsonValue]] = []
    if spec.precision == "fp32":
        found.append(("precision", _mixed_precision(device)))
    if not spec.activation_checkpointing:
        found.append(("activation_checkpointing", True))
    if spec.optimizer.implementation in ({"default", "foreach"} if device.kind == "cuda" else {"foreach"}):
        found.append(("optimizer.implementation", "fused"))
    if spec.gradient_gathering in ({"auto", "scratch"} if device.kind == "cuda" else {"scratch"}):
        found.append(("gradient_gathering", "in-place"))
    return tuple((it,) for it in found)


def _mixed_precision(device: DeviceInfo) -> str:
    if device.compute_capability is None:
        return "bf16-mixed"
    major, _, minor = device.compute_capability.partition(".")
    return "bf16-mixed" if (int(major), int(minor or 0)) >= _BF16_CAPABILITY else "fp16-mixed"


def changed(spec: WorkloadSpec, changes: Changes) -> WorkloadSpec:
    """``spec`` with the changes.

    Raises:
        SpecError: when a field would be wrong.
    """
    data = spec.model_dump(mode="json")
    for path, value in changes:
        *parents, name = path.split(".")
        part = data
        for parent in parents:
            part = part[parent]
        part[name] = value
    return parse_spec(data)


def changes_in_words(changes: Mapping[str, JsonValue]) -> str:
    """As they would stand in a spec: ``precision: bf16-mixed + activation_checkpointing: true``."""
    return " + ".join(f"{path}: {str(value).lower()}" for path, value in changes.items())


@dataclass(frozen=True)
class Bend:
    """How what was measured differs from what was expected (see the module).

    Attributes:
        surplus_bytes: what is held beyond the estimate, at every size.
        ratio: of what is held above what stays between updates, measured to expected.
        measured: whether a fit told them.
    """

    surplus_bytes: float = 0.0
    ratio: float = 1.0
    measured: bool = False

    @classmethod
    def of(cls, peaks: ExpectedPeaks, probes: Sequence[ProbeResult]) -> Bend:
        """What the probes of updates with several micro-batches tell of the estimate ``peaks``."""
        seen = sorted((it for it in probes if it.accumulates and it.used_bytes), key=lambda it: it.micro_batch_size)
        fits = [it for it in seen if it.outcome is Outcome.FIT]
        resident, held = _resident(peaks, fits or seen)
        if not fits:
            return cls(surplus_bytes=held - resident)
        used, expected = fits[-1].used_bytes or 0, peaks.used_bytes(fits[-1].micro_batch_size)
        rising = expected - resident
        ratio = (used - held) / rising if rising > _RISING * expected else 1.0
        ratio = min(max(ratio, _RATIOS[0]), _RATIOS[1])
        return cls(surplus_bytes=used - ratio * rising - resident, ratio=ratio, measured=True)

    def curve(self, peaks: ExpectedPeaks) -> Callable[[float], float]:
        """The bytes to expect at a size where an estimate says ``peaks``."""
        resident = peaks.resident_bytes or 0
        return lambda size: resident + self.surplus_bytes + self.ratio * (peaks.used_bytes(size) - resident)

    def error(self, changes: Changes) -> float:
        """How far the curve of a changed spec may be off, as a share."""
        if not self.measured:
            return _ERROR_UNMEASURED
        return _ERROR_OF_PRECISION if "precision" in dict(changes) else _ERROR


def _resident(peaks: ExpectedPeaks, probes: Sequence[ProbeResult]) -> tuple[int, int]:
    """What is held between updates: expected, and as the smallest probe saw it; the same where none did."""
    expected = peaks.resident_bytes or 0
    seen = [it.resident_bytes for it in probes if it.resident_bytes is not None]
    return expected, seen[0] if seen and peaks.resident_bytes is not None else expected


def _largest(space: SearchSpace, curve: Callable[[float], float], limit: float) -> int:
    """The largest candidate whose expected memory is within the limit; 0 when none is."""
    low, high = 0, space.count + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if curve(space.size(middle)) <= limit else (low, middle)
    return space.size(low)
