"""Estimated effects of changes of the spec that take less memory (what-ifs). Pure, no torch.

The changes are a mixed precision, activation checkpointing, and an optimizer or gradient gathering without temporaries.
Each is estimated alone, then all that help are estimated combined. No probe runs them: the curve of an estimate is
calibrated with the probes of the requested spec.

**Calibration.** The smallest fit gives the memory held between updates beyond the estimate ``R`` (the surplus ``s``:
thread pools, handles). The largest fit gives the ratio ``r`` of the measured memory above that to the estimate ``e``
above ``R``. A curve with its own ``R'`` and ``e'`` is then taken to be ``R' + s + r * (e'(b) - R')``. Without a fit
``r`` is 1, and ``s`` comes from a probe that reached the end of an update, if there is one.

**Limit.** The given limit is moved as little as needed for the calibrated curve to agree with the sizes that fitted and
those that ran out of memory (fragmentation takes a part of a card).

Against tunings of the changed specs on the CPU (budgets of 48 to 160 MiB) the largest size was off by 0 % (two GPTs, a
ViT), 1.3 % (a GPT-2), 1.4 % (a BERT) and 2.9 % (a Llama) with activation checkpointing, by -5.3 % (a GPT) with a mixed
precision, and by -3.0 % with both. No card has been tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from batchwright.planning.accumulation import plan_size, share_per_rank, steps_of
from batchwright.planning.search_space import SearchSpace
from batchwright.schemas.plans import PlanSummary
from batchwright.schemas.recommendation import Proof, WhatIf
from batchwright.schemas.results import DeviceInfo, ExpectedPeaks, Outcome, ProbeResult
from batchwright.schemas.workload import WorkloadSpec, parse_spec

Changes = tuple[tuple[str, JsonValue], ...]
"""Fields of a spec, by dotted path, with their changed values."""

_ERROR = 0.05
"""Relative error of a calibrated curve."""
_ERROR_OF_PRECISION = 0.08
"""Relative error under another precision: other kernels run, with workspaces of their own."""
_ERROR_UNMEASURED = 0.10
"""Relative error where no fit could calibrate the curve."""
_RATIOS = (0.5, 2.0)
"""Bounds of the ratio of a calibration: a measurement beyond them has another cause."""
_RISING = 0.02
"""Smallest share of a peak above the memory held between updates from which a ratio is computed."""
_HELPS = 0.99
"""A change that leaves more than this share of the memory does not help."""
_BY_MEMORY = {"oom", "warm-start"}
"""Stops of a search by memory; after any other stop, saving memory does not help."""
_BF16_CAPABILITY = (8, 0)
"""Cards below it only emulate bf16."""


@dataclass(frozen=True)
class WhatIfResult:
    """The outcome of estimating changes of a spec.

    Attributes:
        what_ifs: the changes with which more is expected to fit.
        estimated_fields: fields of the spec whose change could be estimated, including changes that do not help.
        not_estimated: the changes that could not be estimated; empty text for the requested spec.
    """

    what_ifs: tuple[WhatIf, ...] = ()
    estimated_fields: frozenset[str] = frozenset()
    not_estimated: tuple[str, ...] = ()


class WhatIfs:
    """Ask/tell requests for the memory curves of changed specs, and the sizes that would fit by them.

    Args:
        spec: the requested spec.
        device: the probed device.
        space: the sizes that were searched, with the limit.
        effective_batch_size: samples per update over all ranks.
        proof: the proof of the search.
        probes: every probe.
        expected: the estimate of the requested spec; requested first when absent.
    """

    def __init__(  # noqa: PLR0913 - all parts of a finished search
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
        """The spec whose memory curve is needed next; none after the last one."""
        changes = self._next()
        return None if changes is None else changed(self._spec, changes)

    def tell(self, peaks: ExpectedPeaks | None) -> None:
        """Record the requested curve; none where the spec cannot be estimated."""
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
        if missing:
            return missing[0]
        combined = tuple(change for single in self._helping for change in single)
        return combined if len(self._helping) > 1 and combined not in self._curves else None

    @property
    def _helping(self) -> list[Changes]:
        size = self._proof.next_size or 1
        requested = self._curves[()]
        curves = [(changes, self._curves.get(changes)) for changes in self._singles]
        return [
            changes
            for changes, peaks in curves
            if peaks and requested and peaks.used_bytes(size) < _HELPS * requested.used_bytes(size)
        ]

    def result(self) -> WhatIfResult:
        """The result of the requests so far."""
        known = [changes for changes, peaks in self._curves.items() if peaks is not None]
        unknown = [changes for changes, peaks in self._curves.items() if peaks is None]
        return WhatIfResult(
            what_ifs=self._what_ifs(),
            estimated_fields=frozenset(path for changes in known for path, _ in changes),
            not_estimated=tuple(format_changes(dict(changes)) for changes in unknown),
        )

    def _what_ifs(self) -> tuple[WhatIf, ...]:
        """Changes with which a larger size is expected to fit, the largest size first.

        Where no size fits, changes that do not help enough are included too, because they show the missing memory.
        """
        requested = self._curves.get(())
        if requested is None:
            return ()
        calibration = Calibration.of(requested, self._probes)
        curve, limit = calibration.curve(requested), float(self._space.limit_bytes or 0)
        fits, fails, helping = self._proof.fits, self._proof.next_size, self._helping
        if fits and fails is not None:
            limit = min(max(limit, curve(fits)), max(curve(fails), curve(fits)))
        found = [
            self._what_if(changes, peaks, calibration, limit)
            for changes, peaks in self._curves.items()
            if peaks is not None and (changes in helping or len(changes) > 1)
        ]
        shown = [what_if for what_if in found if what_if.largest_micro_batch_size > fits or not fits]
        return tuple(sorted(shown, key=lambda one: (-one.largest_micro_batch_size, one.peak_bytes, len(one.changes))))

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
    """Changes of single fields of the spec that could take less memory."""
    found: list[tuple[str, JsonValue]] = []
    if spec.precision == "fp32":
        is_emulated = (device.capability or _BF16_CAPABILITY) < _BF16_CAPABILITY
        found.append(("precision", "fp16-mixed" if is_emulated else "bf16-mixed"))
    if not spec.activation_checkpointing:
        found.append(("activation_checkpointing", True))
    if spec.optimizer.has_fused and spec.optimizer.implementation_on(device.kind) == "foreach":
        found.append(("optimizer.implementation", "fused"))
    if {"auto": device.traits.gradient_gathering}.get(spec.gradient_gathering, spec.gradient_gathering) == "scratch":
        found.append(("gradient_gathering", "in-place"))
    return tuple((change,) for change in found)


def changed(spec: WorkloadSpec, changes: Changes) -> WorkloadSpec:
    """Apply changes to ``spec``.

    Raises:
        SpecError: when a changed field is wrong.
    """
    data = spec.model_dump(mode="json")
    for path, value in changes:
        *parents, name = path.split(".")
        part = data
        for parent in parents:
            part = part[parent]
        part[name] = value
    return parse_spec(data)


def format_changes(changes: Mapping[str, JsonValue]) -> str:
    """Format changes as in a spec: ``precision: bf16-mixed + activation_checkpointing: true``."""
    return " + ".join(f"{path}: {str(value).lower()}" for path, value in changes.items())


@dataclass(frozen=True)
class Calibration:
    """Correction of an estimate by measurements (see the module).

    Attributes:
        surplus_bytes: memory held beyond the estimate, at every size.
        ratio: ratio of measured to expected memory above the memory held between updates.
        measured: whether both come from a fit.
    """

    surplus_bytes: float = 0.0
    ratio: float = 1.0
    measured: bool = False

    @classmethod
    def of(cls, peaks: ExpectedPeaks, probes: Sequence[ProbeResult]) -> Calibration:
        """Calibrate the estimate ``peaks`` with the probes of updates with several micro-batches."""
        measured = [probe for probe in probes if probe.accumulates and probe.used_bytes]
        seen = sorted(measured, key=lambda probe: probe.micro_batch_size)
        fits = [probe for probe in seen if probe.outcome is Outcome.FIT]
        resident = held = peaks.resident_bytes or 0
        if peaks.resident_bytes is not None:
            held = next((each.resident_bytes for each in fits or seen if each.resident_bytes is not None), held)
        if not fits:
            return cls(surplus_bytes=held - resident)
        used, expected = fits[-1].used_bytes or 0, peaks.used_bytes(fits[-1].micro_batch_size)
        rising = expected - resident
        ratio = (used - held) / rising if rising > _RISING * expected else 1.0
        ratio = min(max(ratio, _RATIOS[0]), _RATIOS[1])
        return cls(surplus_bytes=used - ratio * rising - resident, ratio=ratio, measured=True)

    def curve(self, peaks: ExpectedPeaks) -> Callable[[float], float]:
        """The calibrated curve of the estimate ``peaks``: expected bytes by size."""
        resident = peaks.resident_bytes or 0
        return lambda size: resident + self.surplus_bytes + self.ratio * (peaks.used_bytes(size) - resident)

    def error(self, changes: Changes) -> float:
        """The relative error of the curve of a changed spec."""
        if not self.measured:
            return _ERROR_UNMEASURED
        return _ERROR_OF_PRECISION if "precision" in dict(changes) else _ERROR


def _largest(space: SearchSpace, curve: Callable[[float], float], limit: float) -> int:
    """The largest candidate whose expected memory is within the limit; 0 when there is none."""
    low, high = 0, space.count + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if curve(space.size(middle)) <= limit else (low, middle)
    return space.size(low)
