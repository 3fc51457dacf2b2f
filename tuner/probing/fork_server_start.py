"""How the fork server of probes is started. No torch, and little else: that may happen before anything is imported."""

from __future__ import annotations

import os
from typing import Literal

from tuner.hardware.allocator_env import allocator_environment
from tuner.system.subprocesses import Start


def fork_server(kind: Literal["cpu", "cuda"]) -> Start:
    """The start of ``tuner.probing.child.fork_server``, for probes of one kind of device.

    Its environment is the one of the job, and has torch ask for cards without initialising CUDA (``cuInit``).
    """
    environment = {**allocator_environment(kind, os.environ), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    return Start("tuner.probing.child.fork_server", (), environment)
