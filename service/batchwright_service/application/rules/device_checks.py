"""Checks that the device of a job can run it, and on how many devices it runs."""

from collections.abc import Sequence
from pathlib import Path

from batchwright.client.documents.workers import ServedDevice
from batchwright.planning.accumulation import share_per_rank
from batchwright.schemas.command import CommandSpec
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import MOST_DEVICES_PER_NODE, TrackerName, TrainingRequest, TuningRequest
from batchwright.schemas.results import DeviceInfo
from batchwright.schemas.workload import WorkloadSpec
from batchwright.system.files import write_atomically
from batchwright.workloads.required_packages import missing_packages
from batchwright_service.domain.hardware import HardwareNeed
from batchwright_service.errors import DeviceMismatchError, InvalidInputError, UnknownDeviceError, UnsupportedJobError
from batchwright_service.store.models import AnnouncedDevice

SLOT_FILE = ".slot"
"""Name of the file in a job's folder with the slot on which the job ran last."""
_MAX_CPU_PROCESSES = 16
"""Each process takes the memory of a rank, and no number of GPUs bounds them: one job must not exhaust the host."""


def mark_slot(directory: Path, slot: str) -> None:
    """Write the slot of a job into its folder, to tell it from the folder of an earlier attempt on another host."""
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / SLOT_FILE, slot)


def probe_environment(request: TuningRequest, served: ServedDevice) -> dict[str, str]:
    """Return the environment variables of the probes of a request on a device."""
    further = {} if request.command is None else served.device.traits.command_environment
    return {**served.environment, **further}


def check_cards_of_ranks(spec: CommandSpec, served: ServedDevice, announced: Sequence[AnnouncedDevice]) -> None:
    """Refuse a command of several ranks, which takes several cards, where its host serves the others to other work.

    Raises:
        UnknownDeviceError: naming the slots and the remedy.
    """
    ranks = spec.parallelism.world_size
    host = served.slot.rpartition("/")[0]
    others = [
        device.served.slot
        for device in announced
        if device.served.slot.rpartition("/")[0] == host
        and device.served.device.traits.is_gpu
        and device.served.slot != served.slot
    ]
    if ranks > 1 and served.device.traits.is_gpu and others:
        raise UnknownDeviceError(
            f"the command starts {ranks} ranks, each with a GPU, and {host} serves other work on "
            f"{', '.join(others)}: give `hardware` with `devices_per_node: {ranks}` instead of `device`: the "
            "tuning then takes that many GPUs"
        )


def ranks_per_node(recommendation: Recommendation, training: TrainingRequest) -> int:
    """Return the number of processes of the run on each of its hosts."""
    return training.ranks_per_node(recommendation.request.spec.parallelism.world_size)


def hardware_of_job(recommendation: Recommendation, training: TrainingRequest) -> HardwareNeed | None:
    """Return the hardware that a job needs if any device of it will do.

    Such a job has several GPUs or hosts, or its tuning named hardware. Another job needs the device that was probed, by
    its id.
    """
    devices = ranks_per_node(recommendation, training) if recommendation.device.traits.is_gpu else 1
    if recommendation.request.hardware is None and devices * training.nodes == 1:
        return None
    return HardwareNeed.of_kind(recommendation.device, min(devices, MOST_DEVICES_PER_NODE), training.nodes)


def check_same_device(measured: DeviceInfo, here: DeviceInfo) -> None:
    """Refuse a recommendation that was measured on a device of another kind or size.

    Raises:
        DeviceMismatchError: naming both devices.
    """
    if (measured.name, measured.total_bytes) != (here.name, here.total_bytes):
        raise DeviceMismatchError(
            f"the recommendation was measured on {measured.name} with {measured.total_bytes} bytes; {here.id} is "
            f"{here.name} with {here.total_bytes} bytes: tune for this device first"
        )


def check_every_process_has_samples(recommendation: Recommendation, training: TrainingRequest) -> None:
    """Refuse a run with more processes than an update has samples.

    Raises:
        PlanError: naming both numbers.
    """
    share_per_rank(
        recommendation.request.effective_batch_size, training.nodes * ranks_per_node(recommendation, training)
    )


def check_process_count(recommendation: Recommendation, training: TrainingRequest) -> None:
    """Refuse a run with more processes on a host than it may have. Dry runs are not limited.

    Raises:
        UnsupportedJobError: naming the number of processes and the remedy.
    """
    processes = ranks_per_node(recommendation, training)
    most = MOST_DEVICES_PER_NODE if recommendation.device.traits.is_gpu else _MAX_CPU_PROCESSES
    if processes > most:
        raise UnsupportedJobError(
            f"the run has {processes} processes on a host, and a job may have {most}: start the command of a dry run "
            "(`dry_run: true`) with a launcher of your own, or lower `training.processes_per_node`: the effective "
            "batch stays the same"
        )


def check_packages(recommendation: Recommendation, training: TrainingRequest, devices: Sequence[ServedDevice]) -> None:
    """Refuse a run that needs an optional package, for a metric or an optimizer say, which no worker has.

    Where no worker is known, or one does not say what it has, the run itself finds out.

    Raises:
        UnsupportedJobError: naming the package and the extra that installs it.
    """
    if (missing := _missing_on_all(recommendation.request.workload, training.trackers, devices)) is not None:
        raise UnsupportedJobError(missing)


def check_packages_of_probes(request: TuningRequest, devices: Sequence[ServedDevice]) -> None:
    """Refuse a tuning whose model or optimizer needs an optional package which no worker has, as a job is.

    Raises:
        InvalidInputError: naming the package and the extra that installs it.
    """
    if request.command is not None:
        return
    probed = request.workload.model_copy(update={"evaluation": None})  # whose metrics no probe computes
    if (missing := _missing_on_all(probed, (), devices)) is not None:
        raise InvalidInputError(missing)


def _missing_on_all(spec: WorkloadSpec, trackers: Sequence[TrackerName], devices: Sequence[ServedDevice]) -> str | None:
    """Return the need and the remedy of the package that all devices lack, or None if one may have all of them."""
    lacking = [missing_packages(spec, trackers, served.packages) for served in devices if served.packages is not None]
    if not lacking or len(lacking) < len(devices) or not all(lacking):
        return None
    missing = min(lacking, key=len)[0]
    return (
        f"{missing.field}: {missing.message} in the environment of the workers (none has it), and restart "
        f"them, or do without `{missing.name}`"
    )
