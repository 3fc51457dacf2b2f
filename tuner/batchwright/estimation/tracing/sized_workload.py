"""Trace one workload at a few micro-batch sizes, and extrapolate to every size."""

from collections.abc import Sequence
from contextlib import suppress

from batchwright.errors import EstimateError
from batchwright.estimation.trace import Bound, Category, SizedTrace, Trace
from batchwright.estimation.tracing.kernel_workspaces.shared_kernels import Profile
from batchwright.estimation.tracing.runs import TracedRuns

TRACED_SIZES = (4, 10)
"""Two sizes tell a constant from bytes in proportion to the samples, which nearly all blocks are. Some code behaves
differently with few samples (GPT-2's masks with up to 3)."""
_BETWEEN = 6
"""With a third size, where blocks grow otherwise, a quadratic is determined."""
_LARGER_SIZES = (16, 24, 40)
"""Traced too if the first traces differ in more than sizes, or grow unevenly."""
_SCALED_FROM = 16
_DIFFERENT_OPERATORS = (
    "the workload runs different operators at different micro-batch sizes: "
    "its memory at one size is scaled to the others"
)
_UNEVEN_GROWTH = (
    "some tensors grow unevenly with the micro-batch size: between and beyond the traced sizes they are interpolated "
    "linearly"
)


class SizedWorkload:
    """A ``TracedWorkload`` (see ``batchwright.estimation.memory_curve``) that traces on demand.

    Updates with several micro-batches and with a single one are traced separately.

    Args:
        runs: the traced runs of the workload.
        profile: the kernel profile; None for the CPU.
    """

    def __init__(self, runs: TracedRuns, profile: Profile) -> None:
        self.profile = profile
        self._traced = traced_profile(profile)
        self._runs = runs
        self._sized_traces: dict[bool, SizedTrace | Trace] = {}
        self.exact_sizes = True
        self.notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """Number of parameters; 0 before the first trace."""
        return self._runs.parameters

    def trace_at(self, micro_batch_size: int, *, accumulates: bool) -> Trace:
        """Return the trace at a size; fast except for the first call of each kind.

        Raises:
            SpecError, WorkloadError, EstimateError: as ``batchwright.estimation.tracing.session.trace``.
        """
        if accumulates not in self._sized_traces:
            self._sized_traces[accumulates] = self._trace_sizes(accumulates=accumulates)
        found = self._sized_traces[accumulates]
        return found.at(micro_batch_size) if isinstance(found, SizedTrace) else _scaled(found, micro_batch_size)

    def _trace_sizes(self, *, accumulates: bool) -> SizedTrace | Trace:
        """Return the trace at every size, or at one size if the traces differ in more than sizes."""
        traces = self._trace_each(TRACED_SIZES, accumulates=accumulates)
        found = _sized(traces)
        if found is not None and not found.proportional:
            traces += self._trace_each((_BETWEEN,), accumulates=accumulates)
            found = _sized(traces)
        if found is None or not found.exact:
            larger = self._trace_each(_LARGER_SIZES, accumulates=accumulates)
            traces = [*traces, *larger] if found else larger
            found = _sized(traces) or found
        if found is None or not found.exact:
            self.exact_sizes = False
            self._note(_UNEVEN_GROWTH if found else _DIFFERENT_OPERATORS)
        self._note(*traces[0].notes)
        return found or next(trace for trace in traces if trace.micro_batch_size == _SCALED_FROM)

    def _trace_each(self, sizes: Sequence[int], *, accumulates: bool) -> list[Trace]:
        """Return the traces at these sizes."""
        self._runs.prepare((self._traced,), sizes, accumulates=accumulates)
        traces = [self._runs.get(self._traced, size, accumulates=accumulates) for size in sizes]
        threads = None if self.profile is None else self.profile.resident_threads
        return [trace if threads is None else trace.on_card(threads) for trace in traces]

    def _note(self, *notes: str) -> None:
        self.notes = tuple(dict.fromkeys((*self.notes, *notes)))


def _sized(traces: Sequence[Trace]) -> SizedTrace | None:
    """Return the trace at every size, or None where the traces differ in more than sizes."""
    with suppress(EstimateError):
        return SizedTrace.of(sorted(traces, key=lambda trace: trace.micro_batch_size))
    return None


def traced_profile(profile: Profile) -> Profile:
    """Return the profile of the traces, which cards share that differ in nothing but their threads."""
    return None if profile is None else profile.model_copy(update={"resident_threads": None})


def _scaled(trace: Trace, size: int) -> Trace:
    """Scale the blocks of ``trace`` that may grow with the micro-batch size in proportion to it.

    Activations are also scaled down. Temporaries and temporary workspaces are not, because some belong to the
    parameters (an optimizer's step) and not to the samples.
    """
    temporary = {~event for event in trace.events if event < 0}
    sizes = list(trace.sizes)
    for block, (nbytes, category) in enumerate(zip(trace.sizes, trace.categories, strict=True)):
        grown = nbytes * size // trace.micro_batch_size
        if category is Category.ACTIVATIONS:
            sizes[block] = grown
        elif category is Category.TEMPORARIES or (category is Category.WORKSPACE and block in temporary):
            sizes[block] = max(nbytes, grown)
        bound = trace.bounds.get(block)
        if isinstance(bound, Bound):
            sizes[block] = min(sizes[block], bound.max_bytes + bound.beside_bytes * size // trace.micro_batch_size)
    return trace.model_copy(
        update={
            "micro_batch_size": size,
            "sizes": tuple(sizes),
            "workspace_error": tuple(nbytes * size // trace.micro_batch_size for nbytes in trace.workspace_error),
        }
    )
