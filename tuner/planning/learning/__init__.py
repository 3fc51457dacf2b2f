"""Learn from earlier tunings how far estimates are off on a kind of device. Pure, no torch.

1. ``residual`` takes from a recommendation by how much its measurements differ from the estimate that seeded it.
2. ``workload_family`` names the parts of a spec by which such differences are comparable.
3. ``correction`` turns earlier residuals into the correction of a new estimate: a mean and a standard error of the two
   figures that the posterior of the search calibrates, and of the memory that can be used.

The correction is a field of the estimate (``ExpectedPeaks.correction``). The posterior takes it as further hypotheses
beside its own, so that a wrong lesson costs probes, never correctness. Only a service keeps residuals.
"""
