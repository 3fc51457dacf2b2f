"""Whether a job goes with the device it would run on, and with how many of them."""

from __future__ import annotations

from pathlib import Path

from service.errors import DeviceMismatchError, UnsupportedJobError
from tuner.planning.accumulation import share_per_rank
from tuner.schemas.recommendation import Recommendation
from tuner.schemas.requests import TrainingRequest
from tuner.schemas.results import DeviceInfo
from tuner.system.files import write_atomically

SLOT_FILE = ".slot"
"""Name of the file in a job's folder that names the slot on which the job ran last."""
_MOST_PROCESSES_ON_CPU = 16
"""Each takes a rank's memory, and no card bounds their number: one job must not drown the host."""


def mark_slot(directory: Path, slot: str) -> None:
    """Note in a job's folder where the job runs: a folder of the same name on another host is of an earlier attempt."""
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / SLOT_FILE, slot)


def processes_of(recommendation: Recommendation, training: TrainingRequest) -> int:
    """The processes that the run is made by, one per rank: as many as ``tuner.training.launching.launcher`` starts."""
    return training.processes_per_node or recommendation.request.spec.parallelism.world_size


def check_same_device(measured: DeviceInfo, here: DeviceInfo) -> None:
    """Refuse what was measured on a device of another kind or size.

    Raises:
        DeviceMismatchError: naming both.
    """
    if (measured.name, measured.total_bytes) != (here.name, here.total_bytes):
        raise DeviceMismatchError(
            f"it was measured on {measured.name} with {measured.total_bytes} bytes; {here.id} is "
            f"{here.name} with {here.total_bytes} bytes: tune for this device first"
        )


def check_every_process_has_samples(recommendation: Recommendation, training: TrainingRequest) -> None:
    """Refuse more processes than an update has samples.

    Raises:
        PlanError: naming both numbers.
    """
    share_per_rank(recommendation.request.effective_batch_size, processes_of(recommendation, training))


def check_goes_with_one_device(recommendation: Recommendation, training: TrainingRequest) -> None:
    """Refuse a run that a job, which holds one device, cannot make. A dry run may ask for it.

    Raises:
        UnsupportedJobError: naming the number of processes and the way out.
    """
    processes = processes_of(recommendation, training)
    remedy = (
        "start the command of a dry run (`dry_run: true`) with a launcher of your own, or lower "
        "`training.processes_per_node`: the effective batch stays the same"
    )
    if recommendation.device.kind == "cuda" and processes > 1:
        raise UnsupportedJobError(
            f"the run has {processes} processes, which take a card each, and a job holds one card, "
            f"{recommendation.device.id}: {remedy}"
        )
    if processes > _MOST_PROCESSES_ON_CPU:
        raise UnsupportedJobError(
            f"the run has {processes} processes, and a job on the CPU may have {_MOST_PROCESSES_ON_CPU}: {remedy}"
        )
