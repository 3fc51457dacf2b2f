"""The trace's side of virtual_gpu.py: python benchmarks/virtual_gpu_traced.py NAME ... prints a line of JSON for each.

A process of its own, because the stand-in for CUDA is loaded before torch.
"""

import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from batchwright.errors import BatchwrightError
from batchwright.estimation.allocator.config import AllocatorSettings
from batchwright.estimation.allocator.replay import replay
from batchwright.estimation.cuda_shim import Shim, load_shim
from batchwright.hardware.gpu_lookup import find_gpu
from batchwright.planning.accumulation import probe_window
from batchwright.schemas.gpus import KernelProfile
from batchwright.system.fork_map import run_in_forks


def traced(name: str, shim: Shim) -> dict[str, Any]:
    """Trace one workload, and replay it."""
    import torch  # noqa: PLC0415 - after the shim
    from virtual_gpu_workloads import cases  # noqa: PLC0415 - as above

    from batchwright.estimation.tracing.kernel_workspaces.device_kernels import (  # noqa: PLC0415 - imports torch
        representative,
    )
    from batchwright.estimation.tracing.session import begin_trace  # noqa: PLC0415 - as above

    torch.set_num_threads(1)
    case = next(case for case in cases() if case.name == name)
    profile: KernelProfile = representative(find_gpu(case.card).profile)
    began = time.monotonic()
    try:
        with begin_trace(case.spec, profiles=(profile,), shim=shim) as common:
            trace = common.trace_window(probe_window(case.probe)).traces[profile]
    except BatchwrightError as error:
        return {"failed": str(error)}
    settings = AllocatorSettings.parse(case.allocator)
    found = replay(trace.events, trace.sizes, settings, since=trace.position("measured-update"))
    return {
        "allocated_bytes": found.peak_allocated_bytes,
        "reserved_bytes": found.peak_reserved_bytes,
        "seconds": round(time.monotonic() - began, 1),
        "notes": trace.notes,
    }


def main(names: Sequence[str]) -> None:
    """Trace one workload after the other, each in a fork."""
    shim = load_shim()
    import virtual_gpu_workloads  # noqa: F401, PLC0415 - torch, for all forks

    import batchwright.estimation.tracing.session  # noqa: F401, PLC0415 - as above

    for name in names:
        (found,) = run_in_forks([partial(traced, name, shim)], 1)
        sys.stdout.write(json.dumps(found or {"failed": "the process ended"}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
