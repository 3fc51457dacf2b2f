"""Decide whether a loss may be accumulated, by the check for coupled samples on a device with enough memory."""

import torch

from batchwright.errors import BatchwrightError, DeviceError, OutOfMemoryError, TrainingError
from batchwright.hardware.memory_devices.base import MemoryDevice
from batchwright.hardware.memory_devices.factory import open_device
from batchwright.hardware.uncomputed_kernels import uncomputed_kernels
from batchwright.schemas.recommendation import CouplingCheck
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.coupling.check import check_spec_coupling
from batchwright.training.coupling.precision import Precision
from batchwright.training.coupling.report import CouplingReport
from batchwright.training.micro_batches.loss_window import finite_or_none
from batchwright.workloads.base import Workload

_ATTEMPTS: tuple[tuple[int, Precision], ...] = ((4, "fp64"), (4, "fp32"), (2, "fp32"))
"""Samples and arithmetic to try in turn: each attempt needs about half of the memory of the one before."""


def measure_coupling(spec: WorkloadSpec, workload: Workload, device: MemoryDevice) -> CouplingCheck:
    """Compare the loss of a batch with that of its parts, on a new model of ``spec``.

    The verdict is "not-compared" if the check cannot be made (not enough memory, a batch that cannot be divided, or a
    virtual card that leaves the operators of large tensors out, of a batch more than of its parts). Errors of the
    workload's own code are raised unchanged.

    Raises:
        DeviceError: when the device failed.
    """
    left_out = -uncomputed_kernels()
    report = _reported(spec, workload, device)
    left_out += uncomputed_kernels()
    if left_out:
        report = f"a virtual card computed only the values of small tensors, and skipped {left_out:,} operators."
    device.release()
    device.reset_peaks()
    if isinstance(report, str):
        return CouplingCheck(verdict="not-compared", message=report)
    return CouplingCheck(
        verdict=report.verdict,
        message=report.message,
        samples=report.samples,
        precision=report.precision,
        loss_error=finite_or_none(report.loss_error),
        gradient_error=finite_or_none(report.gradient_error),
    )


def admit(check: CouplingCheck, *, allowed: bool) -> str | None:
    """Return a warning about accumulating a loss; None if accumulation changes nothing.

    Raises:
        TrainingError: when the loss couples samples, and that is not ``allowed``.
    """
    if check.verdict == "separate":
        return None
    if check.verdict == "not-compared":
        return f"it could not be checked whether the loss couples the samples of a batch: {check.message}"
    if not allowed:
        raise TrainingError(
            f"{check.message} To train nevertheless, set allow_batch_coupling (--allow-batch-coupling)."
        )
    return check.message


def _reported(spec: WorkloadSpec, workload: Workload, device: MemoryDevice) -> CouplingReport | str:
    """The report, or the reason why there is none. If the device has no memory for a second model, the CPU is tried.

    Raises:
        DeviceError: when the device failed.
    """
    reason = ""
    own = device.torch_device
    for torch_device in dict.fromkeys([own, torch.device("cpu")]):
        for samples, precision in _ATTEMPTS:
            outcome = _attempt(spec, workload, torch_device, samples, precision)
            if isinstance(outcome, CouplingReport):
                return outcome
            if isinstance(outcome, DeviceError):
                raise outcome
            reason = str(outcome)
            if not isinstance(outcome, OutOfMemoryError):
                return reason
            device.release()
    return reason


def _attempt(
    spec: WorkloadSpec, workload: Workload, torch_device: torch.device, samples: int, precision: Precision
) -> CouplingReport | BatchwrightError:
    failure: Exception
    try:
        return check_spec_coupling(spec, workload, torch_device, samples, precision)
    except BatchwrightError as error:
        return error
    except Exception as error:  # noqa: BLE001 - handled after the block, when its memory is free
        failure = error
    oom_error = open_device(str(torch_device)).translate(failure)
    if oom_error is None:
        raise failure
    return oom_error
