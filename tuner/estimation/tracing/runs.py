"""The traced runs of one workload, at several sizes and for several kinds of cards, made side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

import torch

from tuner.estimation.cuda_shim import Shim
from tuner.estimation.tracing.session import TracedRun, begun
from tuner.estimation.tracing.shape_cache import Shapes
from tuner.schemas.gpus import KernelProfile
from tuner.schemas.workload import WorkloadSpec
from tuner.system.fork_map import run_in_forks

Wanted: TypeAlias = "tuple[KernelProfile | None, int, bool]"
"""The kind of card (none for the CPU's own run), the micro-batch size, and whether updates accumulate."""

_T = TypeVar("_T")
_SEVERAL = 2


class TracedRuns:
    """Runs of ``spec``, each traced once, when it is asked for.

    Args:
        spec: what is trained.
        shim: the device that stands in for a card; without one the CPU's decisions are traced.
        shapes: what operators are known to return.
        processes: how many processes may trace at once. More than one needs a process without threads, in which no
            backward pass has run: autograd starts threads for its devices, and they are not there in a forked process.
        warm_up: as of ``tuner.estimation.tracing.session.trace``.
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
        self._processes = processes
        self._begin = partial(begun, spec, shim=shim, shapes=shapes or Shapes(), warm_up=warm_up, shards=shards)
        self._made: dict[Wanted, TracedRun] = {}
        self._tried: set[Wanted] = set()

    def prepare(self, wanted: Iterable[Wanted]) -> None:
        """Trace what will be wanted, where several can be traced at once. What fails is left to ``get``."""
        missing = [it for it in dict.fromkeys(wanted) if it not in self._tried]
        if self._processes < _SEVERAL or len(missing) < _SEVERAL:
            return
        self._tried.update(missing)
        torch.set_num_threads(1)  # nothing here is worth a second thread, which a forked process would not have
        profiles = list(dict.fromkeys(profile for profile, _, _ in missing))
        alone = len(profiles) == 1
        of_a_profile = partial(self._several, threads=_threads(), at_once=alone)
        each = [partial(of_a_profile, [it for it in missing if it[0] == profile]) for profile in profiles]
        for runs in [_nothing_if_it_fails(each[0])] if alone else run_in_forks(each, self._processes):
            self._made.update(runs or {})

    def _several(self, wanted: Sequence[Wanted], *, threads: int, at_once: bool) -> dict[Wanted, TracedRun]:
        """Runs for one kind of card: what they have in common is traced once, and each goes on in a fork.

        Args:
            wanted: few sizes.
            threads: how many there were before any workload was built.
            at_once: whether the forks run side by side, or one after the other.
        """
        with self._begin(profile=wanted[0][0]) as common:
            if _threads() > threads:  # the workload's own
                return {}
            tasks = [partial(common.updated, size, accumulates=accumulates) for _, size, accumulates in wanted]
            found = run_in_forks(tasks, len(tasks)) if at_once else [run_in_forks([it], 1)[0] for it in tasks]
        return {it: run for it, run in zip(wanted, found, strict=True) if run is not None}

    def get(self, profile: KernelProfile | None, size: int, *, accumulates: bool) -> TracedRun:
        """A run, traced here if it has not been before.

        Raises:
            SpecError, WorkloadError, EstimateError: as ``tuner.estimation.tracing.session.trace``.
        """
        wanted = (profile, size, accumulates)
        if wanted not in self._made:
            self._processes = 1  # from here on there may be threads
            with self._begin(profile=profile) as started:
                self._made[wanted] = started.updated(size, accumulates=accumulates)
        return self._made[wanted]


def _nothing_if_it_fails(task: Callable[[], _T]) -> _T | None:
    with suppress(Exception):  # who asks for one run is told
        return task()
    return None


def _threads() -> int:
    """Of this process, those of libraries included."""
    return len(list(Path("/proc/self/task").iterdir()))
