"""The context of a process on a kind of card, as earlier tunings there measured it. Pure, no torch.

Estimates expect the context of the table of GPUs, but its size depends on the driver and on torch's build. Every probe
measures it, so that there is nothing to infer: replays of the next estimate leave the measured bytes to the context.
"""

from collections.abc import Sequence

from batchwright.planning.parameters import PARAMETERS
from batchwright.planning.session import TuningSession
from batchwright.schemas.residuals import EstimateResidual

_VERSIONS = ("torch", "driver")
"""The versions that change a context."""


def expect_measured_context(tuning: TuningSession, residuals: Sequence[EstimateResidual]) -> None:
    """Let the estimates of ``tuning`` expect the context that earlier tunings on such a device measured.

    The median of these and of the table's figure is taken, by weight: a single measurement under the same versions
    outweighs the table, while those under other versions do so together.
    """
    found = [(tuning.expected_context_bytes, PARAMETERS.table_context_weight)]
    for residual in residuals:
        if residual.context_bytes is not None:
            same = all(residual.versions.get(name) == tuning.conditions.versions.get(name) for name in _VERSIONS)
            found.append((residual.context_bytes, 1.0 if same else PARAMETERS.other_versions_weight))
    tuning.expected_context_bytes = _weighted_median(found)


def _weighted_median(values: Sequence[tuple[int, float]]) -> int:
    """The smallest value that, together with those below it, has half of the weight."""
    half, weight = sum(weight for _, weight in values) / 2, 0.0
    *others, (largest, _) = sorted(values)
    for value, share in others:
        weight += share
        if weight >= half:
            return value
    return largest
