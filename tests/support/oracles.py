"""Oracles: workloads whose largest fitting size is known. They answer a size with a probe's result, as a device would.

For the tests and the benchmark of the search, and for whoever needs a tuning without a device. Everything is a function
of its arguments and a seed: the same size gives the same result every time.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from batchwright.planning.search import MicroBatchSearch
from batchwright.schemas.recommendation import CouplingCheck, DataReading
from batchwright.schemas.requests import CouplingRequest, ExpectationRequest, ProbeRequest, TuningRequest
from batchwright.schemas.results import ExpectedPeaks, Outcome, Phase, ProbeResult
from batchwright.schemas.workload import WorkloadSpec

LIMIT_BYTES = 80 * 1024**3
"""The limit of an oracle's device, unless told otherwise."""

Memory = Callable[[int], float]
"""Peak bytes at a size."""
Noise = Callable[[int, float, float], float]
"""Measured peak bytes at a size, from the constant and the growing part of the true ones."""


def probe_result(  # noqa: PLR0913 - the fields of a result that a test may care about
    size: int,
    outcome: Outcome = Outcome.FIT,
    *,
    used_bytes: int | None = None,
    resident_bytes: int | None = None,
    limit_bytes: int | None = None,
    message: str = "",
) -> ProbeResult:
    """The result of a probe as a device would record it."""
    return ProbeResult(
        micro_batch_size=size,
        accumulates=True,
        outcome=outcome,
        phase=Phase.DONE if outcome is Outcome.FIT else Phase.WARMUP,
        message=message,
        peak_allocated_bytes=used_bytes,
        resident_bytes=resident_bytes,
        limit_bytes=limit_bytes,
    )


@dataclass(frozen=True)
class Oracle:
    """Fits up to ``largest`` and fails above it, with the memory figures it was given."""

    largest: int
    memory: Memory | None = None
    resident_bytes: int | None = None
    limit_bytes: int | None = LIMIT_BYTES
    failure: Outcome = Outcome.OOM

    def __call__(self, size: int) -> ProbeResult:
        """Probe a size."""
        fits = size <= self.largest
        return probe_result(
            size,
            Outcome.FIT if fits else self.failure,
            used_bytes=max(0, round(self.memory(size))) if fits and self.memory else None,
            resident_bytes=self.resident_bytes if fits else None,
            limit_bytes=self.limit_bytes,
        )


def affine(  # noqa: PLR0913 - what an affine memory is made of
    largest: int,
    *,
    share: float = 0.3,
    noise: Noise | None = None,
    knows_resident: bool = True,
    fraction: float = 0.5,
    limit_bytes: int = LIMIT_BYTES,
) -> Oracle:
    """Memory ``a + c * size`` that meets the limit between ``largest`` and the next size.

    Args:
        largest: the answer.
        share: the intercept ``a`` as a share of the limit.
        noise: how the measurement differs from it.
        knows_resident: whether results tell the resident bytes: three quarters of the intercept, as with Adam.
        fraction: where between ``largest`` (0) and the next size (1) the limit is met.
        limit_bytes: the limit.
    """
    constant = share * limit_bytes
    slope = (limit_bytes - constant) / (largest + fraction)
    measured = noise or exact()
    return Oracle(
        largest,
        memory=lambda size: measured(size, constant, slope * size),
        resident_bytes=round(0.75 * constant) if knows_resident else None,
        limit_bytes=limit_bytes,
    )


def exact() -> Noise:
    """The measurement is the truth."""
    return lambda _size, constant, growing: constant + growing


def per_sample(amplitude: float, seed: int) -> Noise:
    """Every sample costs up to ``amplitude`` more or less than the mean: the sum of ``size`` such costs."""

    def measured(size: int, constant: float, growing: float) -> float:
        deviation = Random(f"{seed}/{size}").gauss(0.0, amplitude / math.sqrt(3 * size))
        return constant + growing * (1 + deviation)

    return measured


def wobble(amplitude: float, seed: int) -> Noise:
    """A smooth deviation of the growing part by up to ``amplitude``: waves over the order of magnitude of the size."""
    rng = Random(seed)
    phase, waves = rng.uniform(0.0, 2 * math.pi), rng.uniform(1.0, 6.0)
    return lambda size, constant, growing: (
        constant + growing * (1 + amplitude * math.sin(phase + waves * math.log(size)))
    )


def independent(amplitude: float, seed: int, *, total: bool) -> Noise:
    """Each size deviates by up to ``amplitude`` by itself: of the total, or of the growing part only."""

    def measured(size: int, constant: float, growing: float) -> float:
        factor = 1 + Random(f"{seed}/{size}").uniform(-amplitude, amplitude)
        return (constant + growing) * factor if total else constant + growing * factor

    return measured


def device(deviation: float, seed: int) -> Noise:
    """Each size deviates by itself, normally, with a standard deviation that is a share of the total."""
    return lambda size, constant, growing: (constant + growing) * (1 + Random(f"{seed}/{size}").gauss(0.0, deviation))


def floored(largest: int, *, share: float, until: float, limit_bytes: int = LIMIT_BYTES) -> Oracle:
    """Affine memory above a floor (an optimizer step as the peak) that ends at the share ``until`` of ``largest``."""
    rising = affine(largest, share=share, knows_resident=False, limit_bytes=limit_bytes).memory
    assert rising is not None
    floor = rising(max(1, round(until * largest)))
    return Oracle(largest, memory=lambda size: max(floor, rising(size)), limit_bytes=limit_bytes)


def elastic(largest: int, *, share: float, give: float, seed: int, fraction: float = 0.5) -> Oracle:
    """A process whose libraries do without buffers that are refused: ``give``, as a share of the limit.

    Affine memory meets the limit between ``largest`` and the next size. A probe measures up to ``give`` more, 1 % more
    or less, but never the whole limit: what was asked for above it was refused.
    """
    rising = affine(largest, share=share, fraction=fraction).memory
    assert rising is not None

    def measured(size: int) -> float:
        random = Random(f"{seed}/{size}")
        asked = (rising(size) + give * LIMIT_BYTES * min(1.0, size / largest)) * (1 + random.uniform(-0.01, 0.01))
        return min(asked, LIMIT_BYTES * (1 - random.choice((0.0005, 0.001, 0.004, 0.012, 0.02))))

    return Oracle(largest, measured, resident_bytes=round(0.75 * share * LIMIT_BYTES))


def biased(largest: int, *, share: float, bias: float) -> Oracle:
    """Affine memory whose limit in practice is below the nominal one by the share ``bias`` (above if negative)."""
    return Oracle(largest, memory=affine(largest, share=share, limit_bytes=round(LIMIT_BYTES * (1 - bias))).memory)


def run_search(search: MicroBatchSearch, oracle: Callable[[int], ProbeResult]) -> list[ProbeResult]:
    """Drive a search to its end; returns the results in order."""
    results: list[ProbeResult] = []
    while (size := search.ask()) is not None:
        assert len(results) < 100, f"the search does not end: {[result.micro_batch_size for result in results]}"
        results.append(oracle(size))
        search.tell(results[-1])
    return results


def failures(results: list[ProbeResult]) -> int:
    """How many of the probes did not fit."""
    return sum(result.outcome is not Outcome.FIT for result in results)


class OracleRunner:
    """A ``batchwright.driving.probe_runner.WorkloadRunner`` of functions, whose losses are sums over samples.

    Args:
        run: runs a probe.
        expect: makes an estimate; none by default.
        late: finds the estimate that ``expect`` did not wait for.
    """

    def __init__(
        self,
        run: Callable[[ProbeRequest], ProbeResult],
        expect: Callable[[ExpectationRequest], ExpectedPeaks | None] = lambda _: None,
        late: Callable[[], ExpectedPeaks | None] = lambda: None,
    ) -> None:
        self._run = run
        self._expect = expect
        self._late = late
        self.calls: list[str] = []
        """The names of the methods that were called, in order."""

    def check(self, request: TuningRequest, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Find nothing wrong."""
        del request, should_stop
        self.calls.append("check")

    def start(self, spec: WorkloadSpec, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Do nothing."""
        del spec, should_stop
        self.calls.append("start")

    def read_data(
        self,
        spec: WorkloadSpec,
        should_stop: Callable[[], bool] = lambda: False,
        on_progress: Callable[[int, int], None] = lambda _read, _total: None,
    ) -> DataReading:
        """Read one of two samples."""
        del spec, should_stop
        self.calls.append("read_data")
        on_progress(1, 2)
        return DataReading(read=1, total=2, seconds=0.0)

    def check_coupling(
        self, request: CouplingRequest, should_stop: Callable[[], bool] = lambda: False
    ) -> CouplingCheck:
        """Find that the loss is a sum."""
        del request, should_stop
        self.calls.append("check_coupling")
        return CouplingCheck(verdict="separate", message="A sum.")

    def begin_estimate(self, request: ExpectationRequest) -> None:
        """Do nothing."""
        del request
        self.calls.append("begin_estimate")

    def expect(
        self, request: ExpectationRequest, should_stop: Callable[[], bool] = lambda: False
    ) -> ExpectedPeaks | None:
        """Make the estimate."""
        del should_stop
        self.calls.append("expect")
        return self._expect(request)

    def late_estimate(self) -> ExpectedPeaks | None:
        """Find the late estimate."""
        return self._late()

    def run(self, request: ProbeRequest, should_stop: Callable[[], bool] = lambda: False) -> ProbeResult:
        """Run the probe."""
        del should_stop
        self.calls.append("run")
        return self._run(request)

    def end_search(self) -> None:
        """Do nothing."""
        self.calls.append("end_search")

    def environment(self) -> dict[str, str]:
        """Nothing is set."""
        return {}

    def close(self) -> None:
        """Do nothing."""
