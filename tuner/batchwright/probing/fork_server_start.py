"""Parameters of the probes' fork server. Imports almost nothing, because the server may be started first of all."""

from __future__ import annotations

import os
from typing import Literal

from batchwright.hardware.allocator_env import allocator_environment
from batchwright.system.fork_server.spawn import Start


def fork_server(kind: Literal["cpu", "cuda"]) -> Start:
    """Return the parameters with which ``batchwright.probing.child.fork_server`` is started, for one kind of device.

    The environment is that of the job. It also makes torch detect GPUs without initialising CUDA (``cuInit``).
    """
    environment = {**allocator_environment(kind, os.environ), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    return Start("batchwright.probing.child.fork_server", (), environment)
