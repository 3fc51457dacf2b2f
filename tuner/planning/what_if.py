"""What-ifs: changes of the spec that would take less memory, and what an estimate says of each. Pure, no torch.

A change is one that takes less memory and leaves the training what it is: a mixed precision, activation checkpointing,
an optimizer or a gathering of gradients without temporaries. Each is estimated alone, then all that help together. No
probe runs them: the estimate's curve is calibrated as the probes of the spec as requested calibrate its own.

**Correction.** The smallest fit shows what is held between updates beyond the estimate ``R`` (the surplus ``s``:
thread pools, handles), the largest how much steeper the rest rises (the ratio ``r`` of what was measured above that to
what the estimate ``e`` has above ``R``). A curve with its own ``R'`` and ``e'`` is then taken to be
``R' + s + r * (e'(b) - R')``. With no fit ``r`` is 1, and ``s`` what a probe saw between its updates, if one got there.

**Limit.** The limit that counts is the one given, moved as little as it takes for the calibrated curve to agree with
the sizes that fitted and those that ran out of memory (fragmentation takes a part of a card).

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
from tuner.planning.search_space import SearchSpace
from tuner.schemas.plans import PlanSummary
from tuner.schemas.recommendation import Proof, WhatIf
from tuner.schemas.results import DeviceInfo, ExpectedPeaks, Outcome, ProbeResult
from tuner.schemas.workload import WorkloadSpec, parse_spec

Changes = tuple[tuple[str, JsonValue], ...]
"""Fields of a spec, by dotted path, and what they would say."""

_ERROR = 0.05
"""Relative error of a calibrated curve."""
_ERROR_OF_PRECISION = 0.08
"""Relative error under another precision: other kernels run, with workspaces of their own."""
_ERROR_UNMEASURED = 0.10
"""Relative error where nothing fitted that could calibrate the curve."""
_RATIOS = (0.5, 2.0)
"""Bounds of the ratio of a calibration: a measurement beyond them is no matter of a ratio."""
_RISING = 0.02
"""Share of a peak that must be above what is held between updates for a ratio to be told from it."""
_HELPS = 0.99
"""A change that leaves more than this share of the memory does not help."""
_BY_MEMORY = {"oom", "warm-start"}
"""Stops of a search by memory; after any other, less memory is of no use."""
_BF16_CAPABILITY = (8, 0)
"""Cards below it only emulate bf16."""


@dataclass(frozen=True)
class WhatIfAnswer:
    """The outcome of estimating changes of a spec.

    Attributes:
        what_ifs: with which more is expected to fit, or would with more of it.
        judged: fields of the spec of which the estimate told what a change does, if only that it does not help.
        unanswered: the changes of which it could not tell; empty text for the spec as asked.
    """

    what_ifs: tuple[WhatIf, ...] = ()
    judged: frozenset[str] = frozenset()
    unanswered: tuple[str, ...] = ()


class WhatIfs:
    """Requests for the memory curves of changed specs, one after the other, and what would fit by them.

    Args:
        spec: as requested.
        device: the device it was probed on.
        space: the sizes that were searched, with the limit.
        effective_batch_size: samples per update over all ranks.
        proof: the search's.
        probes: every probe.
        expected: the estimate of the spec as requested; the first request asks for it when it is not there.
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
        self._curves: dict[Changes, ExpectedPeaks | None] = {} if expected is None else {(): expected}

    def ask(self) -> WorkloadSpec | None:
        """The spec whose memory curve is wanted next; none when there is nothing to ask."""
        changes = self._next()
        return None if changes is None else changed(self._spec, changes)

    def tell(self, peaks: ExpectedPeaks | None) -> None:
        """Take in the curve that was requested; none where the estimate cannot tell."""
        changes = self._next()
        if changes is not None:
            self._curves[changes] = peaks

    def _next(self) -> Changes | None:
        if not self._singles:
            return None
        if () not in self._curves:
            return ()
        if self._curves[()] is None:
            return None
        missing = [changes for changes in self._singles if changes not in self._curves]
        return missing[0] if missing else self._combination()

    def _combination(self) -> Changes | None:
        """All changes that help by themselves, if they are several and not requested yet."""
        helping = self._helping
        combined = tuple(change for single in helping for change in single)
        return combined if len(helping) > 1 and combined not in self._curves else None

    @property
    def _helping(self) -> list[Changes]:
        size = self._proof.next_size or 1
        asked = self._curves[()]
        curves = [(changes, self._curves.get(changes)) for changes in self._singles]
        return [
            changes
            for changes, peaks in curves
            if peaks and asked and peaks.used_bytes(size) < _HELPS * asked.used_bytes(size)
        ]

    def answer(self) -> WhatIfAnswer:
        """The outcome of the requests so far."""
        known = [changes for changes, peaks in self._curves.items() if peaks is not None]
        unknown = [changes for changes, peaks in self._curves.items() if peaks is None]
        return WhatIfAnswer(
            what_ifs=self._what_ifs(),
            judged=frozenset(path for changes in known for path, _ in changes),
            unanswered=tuple(changes_in_words(dict(changes)) for changes in unknown),
        )

    def _what_ifs(self) -> tuple[WhatIf, ...]:
        """Changes with which more is expected to fit than was found, the largest first.

        Where nothing fits, also those with which nothing is expected to: they tell how much is missing.
        """
        asked = self._curves.get(())
        if asked is None:
            return ()
        calibration = Calibration.of(asked, self._probes)
        limit = self._limit(calibration.curve(asked))
        found = [self._what_if(changes, peaks, calibration, limit) for changes, peaks in self._helpful()]
        worth = [it for it in found if it.largest_micro_batch_size > self._proof.fits or not self._proof.fits]
        return tuple(sorted(worth, key=lambda it: (-it.largest_micro_batch_size, it.peak_bytes, len(it.changes))))

    def _helpful(self) -> list[tuple[Changes, ExpectedPeaks]]:
        helping = self._helping
        curves = [
            (changes, self._curves[changes]) for changes in self._curves if changes in helping or len(changes) > 1
        ]
        return [(changes, peaks) for changes, peaks in curves if peaks is not None]

    def _limit(self, curve: Callable[[float], float]) -> float:
        """The limit given, moved between what fitted and what did not."""
        limit, fits, fails = float(self._space.limit_bytes or 0), self._proof.fits, self._proof.next_size
        if not fits or fails is None:
            return limit
        return min(max(limit, curve(fits)), max(curve(fails), curve(fits)))

    def _what_if(self, changes: Changes, peaks: ExpectedPeaks, calibration: Calibration, limit: float) -> WhatIf:
        curve, error = calibration.curve(peaks), calibration.error(changes)
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
    """Choices of the spec that could take less memory, one change each."""
    found: list[tuple[str, JsonValue]] = []
    if spec.precision == "fp32":
        found.append(("precision", _mixed_precision(device)))
    if not spec.activation_checkpointing:
        found.append(("activation_checkpointing", True))
    if spec.optimizer.implementation in ({"default", "foreach"} if device.kind == "cuda" else {"foreach"}):
        found.append(("optimizer.implementation", "fused"))
    if spec.gradient_gathering in ({"auto", "scratch"} if device.kind == "cuda" else {"scratch"}):
        found.append(("gradient_gathering", "in-place"))
    return tuple((change,) for change in found)


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
    """Write changes as they would stand in a spec: ``precision: bf16-mixed + activation_checkpointing: true``."""
    return " + ".join(f"{path}: {str(value).lower()}" for path, value in changes.items())


@dataclass(frozen=True)
class Calibration:
    """Difference between the measurements and an estimate (see the module).

    Attributes:
        surplus_bytes: memory held beyond the estimate, at every size.
        ratio: of the memory above that held between updates, measured to expected.
        measured: whether a fit told both.
    """

    surplus_bytes: float = 0.0
    ratio: float = 1.0
    measured: bool = False

    @classmethod
    def of(cls, peaks: ExpectedPeaks, probes: Sequence[ProbeResult]) -> Calibration:
        """Calibrate the estimate ``peaks`` by the probes of updates with several micro-batches."""
        measured = [probe for probe in probes if probe.accumulates and probe.used_bytes]
        seen = sorted(measured, key=lambda probe: probe.micro_batch_size)
        fits = [probe for probe in seen if probe.outcome is Outcome.FIT]
        resident, held = _resident(peaks, fits or seen)
        if not fits:
            return cls(surplus_bytes=held - resident)
        used, expected = fits[-1].used_bytes or 0, peaks.used_bytes(fits[-1].micro_batch_size)
        rising = expected - resident
        ratio = (used - held) / rising if rising > _RISING * expected else 1.0
        ratio = min(max(ratio, _RATIOS[0]), _RATIOS[1])
        return cls(surplus_bytes=used - ratio * rising - resident, ratio=ratio, measured=True)

    def curve(self, peaks: ExpectedPeaks) -> Callable[[float], float]:
        """The bytes to expect at a size by the estimate ``peaks``, calibrated."""
        resident = peaks.resident_bytes or 0
        return lambda size: resident + self.surplus_bytes + self.ratio * (peaks.used_bytes(size) - resident)

    def error(self, changes: Changes) -> float:
        """The relative error of the curve of a changed spec."""
        if not self.measured:
            return _ERROR_UNMEASURED
        return _ERROR_OF_PRECISION if "precision" in dict(changes) else _ERROR


def _resident(peaks: ExpectedPeaks, probes: Sequence[ProbeResult]) -> tuple[int, int]:
    """The memory held between updates: expected, and as the smallest probe saw it; twice the same where none did."""
    expected = peaks.resident_bytes or 0
    seen = [probe.resident_bytes for probe in probes if probe.resident_bytes is not None]
    return expected, seen[0] if seen and peaks.resident_bytes is not None else expected


def _largest(space: SearchSpace, curve: Callable[[float], float], limit: float) -> int:
    """The largest candidate whose expected memory is within the limit; 0 when none is."""
    low, high = 0, space.count + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if curve(space.size(middle)) <= limit else (low, middle)
    return space.size(low)
