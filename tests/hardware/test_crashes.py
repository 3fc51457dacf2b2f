"""Tests of ``batchwright.hardware.crashes``: the runs that explain a crash, over attempts with known ends."""

import pytest

from batchwright.hardware.crashes import run_explaining_crashes
from batchwright.schemas.requests import ProbeRequest
from batchwright.schemas.results import Outcome, Phase, ProbeResult
from tests.support.factories import mlp_spec

LIMIT = 1024**2
"""Small enough that any host has four times as much."""


class Attempts:
    """A probe that crashes up to a limit, so many times."""

    def __init__(self, up_to: int, times: int = 99, error_type: str = "SIGSEGV") -> None:
        self.limits: list[int | None] = []
        self._up_to, self._times, self._error_type = up_to, times, error_type

    def run(self, request: ProbeRequest) -> tuple[ProbeResult, bool]:
        """Run once."""
        crashes = (request.limit_bytes or 0) <= self._up_to and len(self.limits) < self._times
        self.limits.append(request.limit_bytes)
        return ProbeResult(
            micro_batch_size=request.micro_batch_size,
            accumulates=False,
            micro_batch_sizes=(request.micro_batch_size,),
            outcome=Outcome.ERROR if crashes else Outcome.FIT,
            phase=Phase.WARMUP,
            message="crashed" if crashes else "fits",
            error_type=self._error_type if crashes else None,
            traceback="Segmentation fault" if crashes else None,
        ), crashes


def probe(limit_bytes: int | None = LIMIT) -> ProbeRequest:
    """A request of one micro-batch."""
    return ProbeRequest(
        spec=mlp_spec(), micro_batch_size=2, samples_per_window=2, device="cpu", limit_bytes=limit_bytes
    )


@pytest.mark.parametrize(("cause", "named"), [("SIGSEGV", " with SIGSEGV"), ("exit status 1", "")])
def test_a_crash_that_a_higher_limit_prevents_is_an_oom(cause: str, named: str) -> None:
    """The cause is named where it is a signal, and not where it is the status of a launcher."""
    attempts = Attempts(LIMIT, error_type=cause)

    result = run_explaining_crashes(attempts.run, probe(), "cpu")

    assert (result.outcome, result.traceback) == (Outcome.OOM, None)
    assert result.message == f"crashed{named} twice under 1.00 MiB, and fits under 4.00 MiB"
    assert attempts.limits == [LIMIT, LIMIT, 4 * LIMIT]


def test_a_crash_that_says_it_found_no_memory_is_not_repeated() -> None:
    """The process printed the cause, as Rust does before it aborts."""
    attempts = Attempts(LIMIT)

    def run(request: ProbeRequest) -> tuple[ProbeResult, bool]:
        result, crashed = attempts.run(request)
        return result.model_copy(update={"outcome": Outcome.OOM}), crashed

    assert run_explaining_crashes(run, probe(), "cpu").outcome is Outcome.OOM
    assert attempts.limits == [LIMIT]


def test_a_crash_under_the_higher_limit_too_is_a_bug() -> None:
    """The first result stands, with its traceback."""
    result = run_explaining_crashes(Attempts(8 * LIMIT).run, probe(), "cpu")

    assert (result.outcome, result.traceback) == (Outcome.ERROR, "Segmentation fault")


def test_a_crash_that_does_not_repeat_is_no_verdict() -> None:
    """The second run is the result, and no third is made."""
    attempts = Attempts(LIMIT, times=1)

    assert run_explaining_crashes(attempts.run, probe(), "cpu").outcome is Outcome.FIT
    assert attempts.limits == [LIMIT, LIMIT]


@pytest.mark.parametrize(("kind", "limit"), [("cuda", LIMIT), ("cpu", None)])
def test_a_crash_is_not_repeated_where_no_limit_of_the_cpu_is_set(kind: str, limit: int | None) -> None:
    """A card's allocator raises, and without a limit there is nothing to raise."""
    attempts = Attempts(LIMIT)

    assert run_explaining_crashes(attempts.run, probe(limit), kind).outcome is Outcome.ERROR
    assert len(attempts.limits) == 1
