"""Training runs from start to end, in processes of their own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from batchwright.device_traits import CPU_ENVIRONMENT
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import TrainingResult
from batchwright.training.launching.launcher import TrainingProcess
from batchwright.training.launching.run_directory import RunPaths

if TYPE_CHECKING:
    from torch import Tensor

MIB = 1024**2
ENVIRONMENT = dict(CPU_ENVIRONMENT)
"""Environment variables of a recommendation for the CPU."""


def run_to_end(directory: Path, found: Recommendation, request: TrainingRequest) -> TrainingResult:
    """Start the processes of a run and wait for them."""
    process = TrainingProcess(directory)
    process.start(found, request)
    return wait_for(process)


def wait_for(process: TrainingProcess) -> TrainingResult:
    """Wait for a run that was started."""
    while (result := process.poll()) is None:
        time.sleep(0.02)
    return result


def weights_of(directory: Path) -> dict[str, Tensor]:
    """Return what a run has trained, by name."""
    from safetensors.torch import load_file

    return load_file(RunPaths(directory).weights)
