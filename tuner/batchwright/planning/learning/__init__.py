"""Learn from earlier tunings how far estimates are off on a kind of device. Pure, no torch.

1. ``residual`` takes from a recommendation by how much its measurements differ from the estimate that seeded it.
2. ``workload_family`` names the parts of a spec by which such differences are comparable.
3. ``correction`` turns earlier residuals into the correction of a new estimate: a mean and a standard error of the two
   figures that the posterior of the search calibrates, and of the memory that can be used.
4. ``measured_context`` lets estimates for a card expect the context that probes there measured.

The correction is a field of the estimate (``ExpectedPeaks.correction``). The posterior takes it as further hypotheses
beside its own, so that a wrong lesson costs probes, never correctness. Only a service keeps residuals.

An estimate stays as it is where the usual errors of estimates explain the residuals better than a common cause. Its
tuning then takes the probes that it would take without residuals. No rule can promise this of every corrected tuning.
Where probes only show whether a size fits, a search is a binary tree whose leaves are the answers, and the depths of
its leaves satisfy Kraft's equality: the sum of ``2**-depth`` is 1. A tree with one leaf nearer to the root has another
one further away, so that what is saved on the answers that a lesson makes likely is paid on others.
"""
