"""The start of the fork server of probes. Imports next to nothing: the server may be started before anything else."""

from __future__ import annotations

import os
from typing import Literal

from tuner.hardware.allocator_env import allocator_environment
from tuner.system.fork_server.spawn import Start


def fork_server(kind: Literal["cpu", "cuda"]) -> Start:
    """Return the start of ``tuner.probing.child.fork_server``, for probes of one kind of device.

    Its environment is the one of the job, and has torch ask for cards without initialising CUDA (``cuInit``).
    """
    environment = {**allocator_environment(kind, os.environ), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    return Start("tuner.probing.child.fork_server", (), environment)
