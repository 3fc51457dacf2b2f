"""Parameters of the tracing process. Imports almost nothing, because the process may be started first of all."""

from __future__ import annotations

from batchwright.hardware.allocator_env import CPU_THREADS
from batchwright.system.fork_server.spawn import Start


def tracing_worker(idle_seconds: float = 60.0) -> Start:
    """Return the parameters that start ``batchwright.estimation.tracing.worker``, which sees no GPU of this host.

    Args:
        idle_seconds: how long the process waits for the next task.
    """
    environment = {"CUDA_VISIBLE_DEVICES": "", **CPU_THREADS}
    return Start("batchwright.estimation.tracing.worker", (str(idle_seconds),), environment)
