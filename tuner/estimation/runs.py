"""The traced runs of one workload, at several sizes and for several kinds of cards, made side by side."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TypeAlias

from tuner.catalogue import KernelProfile
from tuner.estimation.shapes import Shapes
from tuner.estimation.shim import Shim
from tuner.estimation.side_by_side import side_by_side
from tuner.estimation.tracing import TracedRun, trace_run
from tuner.specs import WorkloadSpec

Wanted: TypeAlias = "tuple[KernelProfile | None, int, bool]"
"""The kind of card (none for the CPU's own run), the micro-batch size, and whether updates accumulate."""


class TracedRuns:
    """Runs of ``spec``, each traced once, when it is asked for.

    Args:
        spec: what is trained.
        shim: the device that stands in for a card; without one the CPU's decisions are traced.
        shapes: what operators are known to return.
        processes: how many processes may trace at once. More than one needs a process without threads, in which no
            backward pass has run: autograd starts threads for its devices, and they are not there in a forked process.
        warm_up: as of ``tuner.estimation.tracing.trace``.
        shards: likewise.
    """

    def __init__(  # noqa: PLR0913 - what all runs share
        self,
        spec: WorkloadSpec,
        *,
        shim: Shim | None = None,
        shapes: Shapes | None = None,
        processes: int = 1,
        warm_up: bool = True,
        shards: bool = True,
    ) -> None:
        self.spec = spec
        self._shim = shim
        self._processes = processes
        self._options = {"warm_up": warm_up, "shards": shards}
        self._shapes = shapes or Shapes()
        self._made: dict[Wanted, TracedRun] = {}
        self._tried: set[Wanted] = set()

    def prepare(self, wanted: Iterable[Wanted]) -> None:
        """Trace what will be wanted, where several can be traced at once. What fails is left to ``get``."""
        missing = [it for it in dict.fromkeys(wanted) if it not in self._tried]
        if self._processes > 1 and len(missing) > 1:
            self._tried.update(missing)
            found = side_by_side([partial(self._run, *it) for it in missing], self._processes)
            self._made.update((it, run) for it, run in zip(missing, found, strict=True) if run is not None)

    def get(self, profile: KernelProfile | None, size: int, *, accumulates: bool) -> TracedRun:
        """A run, traced here if it has not been before.

        Raises:
            SpecError, WorkloadError, EstimateError: as ``tuner.estimation.tracing.trace``.
        """
        wanted = (profile, size, accumulates)
        if wanted not in self._made:
            self._processes = 1  # from here on there may be threads
            self._made[wanted] = self._run(*wanted)
        return self._made[wanted]

    def _run(self, profile: KernelProfile | None, size: int, accumulates: bool) -> TracedRun:  # noqa: FBT001 - part of what is wanted
        return trace_run(
            self.spec,
            size,
            accumulates=accumulates,
            profile=profile,
            shim=self._shim,
            shapes=self._shapes,
            **self._options,
        )
