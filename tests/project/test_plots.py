"""The plot of a tuning: it shows what was measured, for much evidence and for little."""

import pytest

from batchwright.plots import fitted_line, memory_figure
from batchwright.schemas.recommendation import Evidence, Proof, Recommendation
from batchwright.schemas.results import Outcome
from tests.support.factories import probe_result, recommendation

MIB = 1024**2


def evidence(*sizes: int, largest: int) -> Evidence:
    """Probes of these sizes on a device that holds ``largest`` at 10 MiB a sample above 100."""
    probes = tuple(
        probe_result(size, Outcome.FIT, (100 + 10 * size) * MIB, limit_bytes=500 * MIB)
        if size <= largest
        else probe_result(size, Outcome.OOM, None, limit_bytes=500 * MIB)
        for size in sizes
    )
    return Evidence(probes=probes, proof=Proof(fits=largest, stopped_by="oom", statement="for a test"))


def found(*sizes: int, largest: int) -> Recommendation:
    """A recommendation from such evidence."""
    if largest:
        return recommendation(largest_micro_batch_size=largest, evidence=evidence(*sizes, largest=largest))
    nothing = {"plan": None, "feasible": False, "largest_micro_batch_size": None}
    return recommendation().model_copy(update={**nothing, "evidence": evidence(*sizes, largest=0)})


def test_the_line_goes_through_the_two_largest_fits() -> None:
    """10 MiB a sample above 100 MiB."""
    assert fitted_line(evidence(1, 20, 40, 41, largest=40).probes) == pytest.approx((100 * MIB, 10 * MIB))
    assert fitted_line(evidence(1, largest=1).probes) is None


@pytest.mark.parametrize(
    ("sizes", "largest", "drawn"), [((1, 20, 40, 41), 40, 1), ((1,), 40, 0), ((1, 500), 40, 0), ((1,), 0, 1)]
)
def test_every_fit_and_the_failures_near_it_are_drawn(sizes: tuple[int, ...], largest: int, drawn: int) -> None:
    """A failure far above the largest fit is left out, and without a fit there is no line."""
    line, fits, failures, limit = memory_figure(found(*sizes, largest=largest)).data

    assert list(fits.x) == [size for size in sizes if size <= largest]
    assert len(failures.x) == drawn
    assert bool(line.x) is (len(fits.x) > 1)
    assert limit.y[0] == pytest.approx(500)
