"""The start of the process that traces. Imports next to nothing: it may be started before anything else."""

from __future__ import annotations

from tuner.hardware.allocator_env import CPU_THREADS
from tuner.system.fork_server.spawn import Start


def tracing(idle_seconds: float = 60.0) -> Start:
    """Return the start of ``tuner.estimation.tracing.worker``, which sees no card of this host.

    Args:
        idle_seconds: how long it stays with nothing to do.
    """
    environment = {"CUDA_VISIBLE_DEVICES": "", **CPU_THREADS}
    return Start("tuner.estimation.tracing.worker", (str(idle_seconds),), environment)
