"""Trace one workload at several sizes and for several kernel profiles, in parallel processes."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch

from batchwright.estimation.cuda_shim import Shim
from batchwright.estimation.tracing.session import TracedRun, begin_trace
from batchwright.estimation.tracing.shape_cache import ShapeCache
from batchwright.schemas.estimates import Loop
from batchwright.schemas.gpus import KernelProfile
from batchwright.schemas.workload import WorkloadSpec
from batchwright.system.fork_map import run_in_forks

RunKey: TypeAlias = "tuple[KernelProfile | None, int, bool]"
"""The kernel profile (None for the CPU), the micro-batch size, and whether updates accumulate."""

_MIN_PARALLEL = 2


class TracedRuns:
    """Traced runs of ``spec``, each traced once on demand.

    Args:
        spec: the workload.
        shim: the stand-in for CUDA; without it the CPU's decisions are traced.
        shapes: the cache of operators' result shapes.
        processes: how many processes may trace in parallel. More than one requires that this process has no threads and
            has run no backward pass: autograd starts threads for its devices, which do not exist in a forked process.
        warm_up: as in ``batchwright.estimation.tracing.session.trace``.
        shards: as in ``batchwright.estimation.tracing.session.trace``.
        loop: as in ``batchwright.estimation.tracing.session.trace``.
    """

    def __init__(  # noqa: PLR0913 - the parameters that all runs share
        self,
        spec: WorkloadSpec,
        *,
        shim: Shim | None = None,
        shapes: ShapeCache | None = None,
        processes: int = 1,
        warm_up: bool = True,
        shards: bool = True,
        loop: Loop = "batchwright",
    ) -> None:
        self._processes = processes
        self._begin = partial(
            begin_trace, spec, shim=shim, shapes=shapes or ShapeCache(), warm_up=warm_up, shards=shards, loop=loop
        )
        self._runs: dict[RunKey, TracedRun] = {}
        self._prepared: set[RunKey] = set()

    def prepare(self, wanted: Iterable[RunKey]) -> None:
        """Trace several runs in parallel, if possible. Runs that fail are left to ``get``."""
        new = [key for key in dict.fromkeys(wanted) if key not in self._prepared]
        if self._processes < _MIN_PARALLEL or not new:
            return
        self._prepared.update(new)
        torch.set_num_threads(1)  # a forked process would not have the other threads
        profiles = list(dict.fromkeys(profile for profile, _, _ in new))
        single_profile = len(profiles) == 1
        trace_profile = partial(self._trace_in_forks, threads_before=_thread_count(), in_parallel=single_profile)
        tasks = [partial(trace_profile, [key for key in new if key[0] == profile]) for profile in profiles]
        if single_profile:
            with suppress(Exception):  # ``get`` traces the run again, and raises the error
                self._runs.update(tasks[0]())
            return
        for runs in run_in_forks(tasks, self._processes):
            self._runs.update(runs or {})

    def _trace_in_forks(
        self, wanted: Sequence[RunKey], *, threads_before: int, in_parallel: bool
    ) -> dict[RunKey, TracedRun]:
        """Trace runs for one profile: the common part once, then each run in its own fork.

        Args:
            wanted: a few runs that differ in their sizes.
            threads_before: the number of threads before any workload was built.
            in_parallel: whether the forks run in parallel, or one after the other.
        """
        with self._begin(profile=wanted[0][0]) as common:
            if _thread_count() > threads_before:  # the workload has started threads
                return {}
            tasks = [partial(common.trace_updates, size, accumulates=accumulates) for _, size, accumulates in wanted]
            found = run_in_forks(tasks, len(tasks)) if in_parallel else [run_in_forks([task], 1)[0] for task in tasks]
        return {key: run for key, run in zip(wanted, found, strict=True) if run is not None}

    def get(self, profile: KernelProfile | None, size: int, *, accumulates: bool) -> TracedRun:
        """Return a run, traced in this process unless it has been traced.

        Raises:
            SpecError, WorkloadError, EstimateError: as ``batchwright.estimation.tracing.session.trace``.
        """
        wanted = (profile, size, accumulates)
        if wanted not in self._runs:
            self._processes = 1  # from here on there may be threads
            with self._begin(profile=profile) as started:
                self._runs[wanted] = started.trace_updates(size, accumulates=accumulates)
        return self._runs[wanted]


def _thread_count() -> int:
    """Return the number of threads of this process, those of libraries included."""
    return len(list(Path("/proc/self/task").iterdir()))
