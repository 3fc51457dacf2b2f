"""The trace of one workload at every micro-batch size, from traces at a few."""

from __future__ import annotations

from contextlib import suppress

from tuner.errors import EstimateError
from tuner.estimation.trace import Category, SizedTrace, Trace
from tuner.estimation.tracing.runs import TracedRuns, Wanted
from tuner.schemas.gpus import KernelProfile

_SIZES = ((4, 6, 10), (16, 24, 40))
"""Three tell a quadratic. Some code does other things with one sample, or with few (GPT-2's masks with up to 3): then
more are tried. Where something grows unevenly, all are."""
_SCALED_FROM = 16
_DIFFER = (
    "the workload does different things at different micro-batch sizes: what it takes at one is scaled to the others"
)
_UNEVEN = (
    "some tensors grow unevenly with the micro-batch: between the sizes that were traced and beyond them they are told "
    "by lines"
)


class SizedWorkload:
    """A ``TracedWorkload`` (see ``tuner.estimation.memory_curve``).

    It traces when it is asked: updates of several micro-batches and of a single one apart.

    Args:
        runs: of what is trained.
        profile: the kind of card; none for the CPU's own run.

    Raises:
        SpecError, WorkloadError, EstimateError: as ``tuner.estimation.tracing.session.trace``.
    """

    def __init__(self, runs: TracedRuns, profile: KernelProfile | None) -> None:
        self.profile = profile
        self._runs = runs
        self._sized: dict[bool, SizedTrace | Trace] = {}
        runs.prepare(first_wanted(profile))
        self.parameters = runs.get(profile, _SIZES[0][0], accumulates=True).parameters
        self.exact_sizes = True
        self.notes: tuple[str, ...] = ()

    def trace_at(self, micro_batch_size: int, *, accumulates: bool) -> Trace:
        """The trace at a size; quick but for the first of each kind."""
        if accumulates not in self._sized:
            self._sized[accumulates] = self._traced(accumulates=accumulates)
        found = self._sized[accumulates]
        return found.at(micro_batch_size) if isinstance(found, SizedTrace) else _scaled(found, micro_batch_size)

    def _traced(self, *, accumulates: bool) -> SizedTrace | Trace:
        """The trace of every size; of one size alone where more than sizes differ."""
        traces: list[Trace] = []
        found: SizedTrace | None = None
        for sizes in _SIZES:
            self._runs.prepare((self.profile, it, accumulates) for it in sizes)
            latest = [self._runs.get(self.profile, it, accumulates=accumulates).trace for it in sizes]
            traces += latest
            with suppress(EstimateError):  # they differ in more than sizes
                found = SizedTrace.of(traces if found else latest)
            if found is not None and found.exact:
                return found
        self.exact_sizes = False
        self.notes = tuple(dict.fromkeys((*self.notes, _UNEVEN if found else _DIFFER)))
        return found or next(it for it in traces if it.micro_batch_size == _SCALED_FROM)


def first_wanted(profile: KernelProfile | None) -> tuple[Wanted, ...]:
    """The runs that a ``SizedWorkload`` needs first."""
    return tuple((profile, size, True) for size in _SIZES[0])


def _scaled(trace: Trace, size: int) -> Trace:
    """``trace`` with what may grow with the micro-batch grown in proportion.

    Activations shrink with it too. Of what is there for a moment, temporaries and workspaces, nobody knows how much
    belongs to the samples and how much to the parameters (an optimizer's step): for smaller sizes it stays.
    """
    passing = {~event for event in trace.events if event < 0}
    sizes = list(trace.sizes)
    for block, (nbytes, category) in enumerate(zip(trace.sizes, trace.categories, strict=True)):
        grown = nbytes * size // trace.micro_batch_size
        if category is Category.ACTIVATIONS:
            sizes[block] = grown
        elif category is Category.TEMPORARIES or (category is Category.WORKSPACE and block in passing):
            sizes[block] = max(nbytes, grown)
        if block in trace.bounds:
            sizes[block] = min(sizes[block], trace.bounds[block].most)
    return trace.model_copy(update={"micro_batch_size": size, "sizes": tuple(sizes)})
