"""Trace one workload at several sizes and for several kernel profiles, in parallel processes."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch

from batchwright.estimation.cuda_shim import Shim
from batchwright.estimation.trace import Trace
from batchwright.estimation.tracing.kernel_workspaces.shared_kernels import Profile
from batchwright.estimation.tracing.session import TracedRun, begin_trace
from batchwright.estimation.tracing.shape_cache import ShapeCache
from batchwright.schemas.estimates import Loop
from batchwright.schemas.workload import WorkloadSpec
from batchwright.system.fork_map import run_in_forks

_Updates: TypeAlias = "tuple[int, bool]"
"""The micro-batch size, and whether updates accumulate."""

_MIN_PARALLEL = 2


class TracedRuns:
    """Traces of ``spec``, each taken once on demand. Profiles that decide alike share their runs.

    Args:
        spec: the workload.
        profiles: the kernel profiles of interest: those of GPUs, or None for the CPU.
        shim: the stand-in for CUDA; without it the CPU's decisions are traced.
        shapes: the cache of operators' result shapes.
        processes: how many processes may trace in parallel. More than one requires that this process has no threads and
            has run no backward pass: autograd starts threads for its devices, which do not exist in a forked process.
        warm_up: as in ``batchwright.estimation.tracing.session.trace``.
        shards: as in ``batchwright.estimation.tracing.session.trace``.
        loop: as in ``batchwright.estimation.tracing.session.trace``.
        share: as in ``batchwright.estimation.tracing.session.trace``.

    Attributes:
        parameters: number of the model's parameters; 0 before the first trace.
    """

    def __init__(  # noqa: PLR0913 - the parameters that all runs share
        self,
        spec: WorkloadSpec,
        profiles: Sequence[Profile] = (None,),
        *,
        shim: Shim | None = None,
        shapes: ShapeCache | None = None,
        processes: int = 1,
        warm_up: bool = True,
        shards: bool = True,
        loop: Loop = "batchwright",
        share: int | None = None,
    ) -> None:
        self._processes = processes
        self._begin = partial(
            begin_trace,
            spec,
            shim=shim,
            shapes=shapes or ShapeCache(),
            warm_up=warm_up,
            shards=shards,
            loop=loop,
            share=share,
        )
        self._alike: dict[Profile, tuple[Profile, ...]] = {
            profile: (profile, *(other for other in profiles if other != profile)) for profile in profiles
        }
        """For each profile itself, and those that may decide as it does."""
        self._traces: dict[tuple[Profile, _Updates], Trace] = {}
        self._prepared: set[tuple[Profile, _Updates]] = set()
        self.parameters = 0

    def prepare(self, wanted: Iterable[Profile], sizes: Iterable[int], *, accumulates: bool) -> None:
        """Trace updates of several sizes in parallel, if possible. Runs that fail are left to ``get``."""
        if self._processes < _MIN_PARALLEL:
            return
        torch.set_num_threads(1)  # a forked process would not have the other threads
        updates = [(size, accumulates) for size in sizes]
        for profile in wanted:
            new = [each for each in updates if (profile, each) not in self._traces.keys() | self._prepared]
            if new:
                self._prepared.update((profile, each) for each in new)
                with suppress(Exception):  # ``get`` traces the run again, and raises the error
                    self._trace_in_forks(self._alike[profile], new)

    def _trace_in_forks(self, profiles: Sequence[Profile], updates: Sequence[_Updates]) -> None:
        """Trace updates for the first of the profiles: the common part once, then each update in its own fork."""
        threads_before = _thread_count()
        with self._begin(profiles=profiles) as common:
            if _thread_count() > threads_before:  # the workload has started threads
                return
            tasks = [partial(common.trace_updates, size, accumulates=accumulates) for size, accumulates in updates]
            found = run_in_forks(tasks, len(tasks))
        for each, run in zip(updates, found, strict=True):
            if run is not None:
                self._keep(each, run)

    def get(self, profile: Profile, size: int, *, accumulates: bool) -> Trace:
        """Return a trace, taken in this process unless it has been taken.

        Raises:
            SpecError, WorkloadError, EstimateError: as ``batchwright.estimation.tracing.session.trace``.
        """
        updates = size, accumulates
        if (profile, updates) not in self._traces:
            self._processes = 1  # from here on there may be threads
            with self._begin(profiles=self._alike[profile]) as started:
                self._keep(updates, started.trace_updates(size, accumulates=accumulates))
        return self._traces[profile, updates]

    def _keep(self, updates: _Updates, run: TracedRun) -> None:
        """Keep the traces of a run, and which profiles decided alike."""
        self.parameters = run.parameters
        self._traces |= {(profile, updates): trace for profile, trace in run.traces.items()}
        self._alike = {
            profile: tuple(other for other in alike if (other in run.traces) == (profile in run.traces))
            for profile, alike in self._alike.items()
        }


def _thread_count() -> int:
    """Return the number of threads of this process, those of libraries included."""
    return len(list(Path("/proc/self/task").iterdir()))
