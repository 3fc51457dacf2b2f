"""Admission of a loss to accumulation: the check for coupled samples, made where there is memory for it."""

from __future__ import annotations

import math

import torch

from tuner.errors import BatchwrightError, OutOfMemoryError, TrainingError
from tuner.hardware.memory_devices.base import MemoryDevice
from tuner.hardware.memory_devices.factory import open_device
from tuner.schemas.recommendation import CouplingCheck
from tuner.schemas.workload import WorkloadSpec
from tuner.training.coupling.check import check_spec_coupling
from tuner.training.coupling.precision import Precision
from tuner.training.coupling.report import CouplingReport
from tuner.workloads.base import Workload

_ATTEMPTS: tuple[tuple[int, Precision], ...] = ((4, "fp64"), (4, "fp32"), (2, "fp32"))
"""Samples and arithmetic that are tried: what is too much memory may do with half."""


def measure_coupling(spec: WorkloadSpec, workload: Workload, device: MemoryDevice) -> CouplingCheck:
    """Compare the loss of a batch with that of its parts, on a new model of ``spec``.

    A check that cannot be made (no memory, a batch that cannot be divided) proves nothing, and its verdict is
    "not-compared". Errors of the workload's own code are raised unchanged.
    """
    report = _reported(spec, workload, device)
    device.release()
    device.reset_peaks()
    if isinstance(report, str):
        return CouplingCheck(verdict="not-compared", message=report)
    return CouplingCheck(
        verdict=report.verdict,
        message=report.message,
        samples=report.samples,
        precision=report.precision,
        loss_error=_finite(report.loss_error),
        gradient_error=_finite(report.gradient_error),
    )


def admit(check: CouplingCheck, *, allowed: bool) -> str | None:
    """Warning about accumulating a loss; None where accumulation changes nothing.

    Raises:
        TrainingError: when the loss couples samples, and that is not ``allowed``.
    """
    if check.verdict == "separate":
        return None
    if check.verdict == "not-compared":
        return f"whether the loss couples the samples of a batch could not be checked: {check.message}"
    if not allowed:
        raise TrainingError(
            f"{check.message} To train nevertheless, ask for allow_batch_coupling (--allow-batch-coupling)."
        )
    return check.message


def _finite(error: float) -> float | None:
    return error if math.isfinite(error) else None


def _reported(spec: WorkloadSpec, workload: Workload, device: MemoryDevice) -> CouplingReport | str:
    """The report, or why there is none. On the CPU, too, when the device has no room for a second model in fp32."""
    reason = ""
    places = [device.torch_device] if device.torch_device.type == "cpu" else [device.torch_device, torch.device("cpu")]
    for place in places:
        for samples, precision in _ATTEMPTS:
            outcome = _attempt(spec, workload, place, samples, precision)
            if isinstance(outcome, CouplingReport):
                return outcome
            reason = str(outcome)
            if not isinstance(outcome, OutOfMemoryError):
                return reason
            device.release()
    return reason


def _attempt(
    spec: WorkloadSpec, workload: Workload, place: torch.device, samples: int, precision: Precision
) -> CouplingReport | BatchwrightError:
    failure: Exception
    try:
        return check_spec_coupling(spec, workload, place, samples, precision)
    except BatchwrightError as error:
        return error
    except Exception as error:  # noqa: BLE001 - judged after the block, when what it held is free
        failure = error
    shortage = open_device(str(place)).translate(failure)
    if shortage is None:
        raise failure
    return shortage
