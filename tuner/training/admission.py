"""Whether a loss may be accumulated: the check for coupled samples, made where there is memory for it."""

from __future__ import annotations

import torch

from tuner.errors import BatchwrightError, OutOfMemoryError, TrainingError
from tuner.memory.devices import MemoryDevice, open_device
from tuner.specs import WorkloadSpec
from tuner.training.coupling import CouplingReport, check_spec_coupling
from tuner.workloads.base import Workload

_SAMPLES = (4, 2)
"""How many are tried: a batch that is too much memory may do with half."""


def check_accumulation(spec: WorkloadSpec, workload: Workload, device: MemoryDevice, *, allowed: bool) -> str | None:
    """What the user should know of accumulating this loss; none when it changes nothing.

    A check that cannot be made (no memory, a batch that cannot be divided) proves nothing: that is said, not refused.

    Raises:
        TrainingError: when the loss couples samples, and that is not ``allowed``.
    """
    report = _checked(spec, workload, device)
    device.release()
    device.reset_peaks()
    if isinstance(report, str):
        return f"whether the loss couples the samples of a batch could not be checked: {report}"
    if not report.coupled:
        return None
    if not allowed:
        raise TrainingError(
            f"{report.message} To train nevertheless, ask for allow_batch_coupling (--allow-batch-coupling)."
        )
    return report.message


def _checked(spec: WorkloadSpec, workload: Workload, device: MemoryDevice) -> CouplingReport | str:
    """The report, or why there is none. On the CPU, too, when the device has no room for a second model in fp32."""
    reason = ""
    places = [device.torch_device] if device.torch_device.type == "cpu" else [device.torch_device, torch.device("cpu")]
    for place in places:
        for samples in _SAMPLES:
            outcome = _attempt(spec, workload, place, samples)
            if isinstance(outcome, CouplingReport):
                return outcome
            reason = str(outcome)
            if not isinstance(outcome, OutOfMemoryError):
                return reason
            device.release()
    return reason


def _attempt(
    spec: WorkloadSpec, workload: Workload, place: torch.device, samples: int
) -> CouplingReport | BatchwrightError:
    failure: Exception
    try:
        return check_spec_coupling(spec, workload, place, samples)
    except BatchwrightError as error:
        return error
    except Exception as error:  # noqa: BLE001 - judged after the block, when what it held is free
        failure = error
    shortage = open_device(str(place)).translate(failure)
    if shortage is None:
        raise failure
    return shortage
