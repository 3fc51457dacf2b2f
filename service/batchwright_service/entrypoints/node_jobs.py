"""Processes that a cluster's engine starts on its nodes: a worker for one piece of work, an announcer of devices."""

import os
import shutil
import subprocess
from collections.abc import Sequence

from batchwright.client.documents.states import TERMINAL_STATES, WorkKind
from batchwright.client.documents.work import JobRequest
from batchwright.client.documents.workers import ServedDevice
from batchwright.hardware import inventory
from batchwright.planning.fingerprint import installed_versions
from batchwright.schemas.requests import TuningRequest
from batchwright.schemas.results import DeviceInfo
from batchwright.system.data_roots import DataRoots
from batchwright.training.launching.host_agents import HOSTS, Hosts
from batchwright.workloads.required_packages import installed_packages
from batchwright_service.application.rules.device_checks import hardware_of_job
from batchwright_service.domain.hardware import HardwareNeed
from batchwright_service.entrypoints.signals import handling_signals
from batchwright_service.errors import ConfigurationError, NotFoundError, NotReadyError
from batchwright_service.observability.logging import announce as log_start, configure_logging
from batchwright_service.settings import Settings, withhold_variables
from batchwright_service.store.models import WorkItem
from batchwright_service.store.store import open_store
from batchwright_service.worker.coordinator import Coordinator
from batchwright_service.worker.worker_settings import Assignment
from batchwright_service.worker_bootstrap import assemble_worker, local_executor, registered_commands

_NUMBERS_OF_HOST = ("SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES")
"""Variables with the host's numbers of the GPUs that an engine has assigned. Slurm may number those in
``CUDA_VISIBLE_DEVICES`` anew."""


def run_work(settings: Settings, work_id: str) -> None:
    """Claim one piece of work, run it until it ends or SIGTERM arrives, and return.

    Work that has ended, or that another worker runs, is left alone.

    Raises:
        ConfigurationError: when this node has no device for the work.
        DeviceTakenError: when another live process uses the device.
        NotReadyError: when the work still waits, since this host could not run it.
        StoreUnavailableError: when the database cannot be reached.
    """
    withhold_variables()
    configure_logging(settings.log_level, settings.log_format)
    item = _find(settings, work_id)
    if item is None or item.state in TERMINAL_STATES:
        log_start(f"{work_id} has ended, or does not exist", settings.log_format)
        return
    need = _need(item)
    count = 1 if need is None else need.devices_per_node
    device, *beside = _devices("" if item.device is None else item.device.partition(":")[0], count)
    hosts = None if need is None or need.nodes == 1 else assigned_hosts()
    executor = local_executor(device, registered_commands(settings), DataRoots(settings.data_roots), hosts)
    assignment = Assignment(work_id, name_on_host(device), tuple(other.id for other in beside))
    system = assemble_worker(settings, [executor], installed_versions(), assignment)
    coordinator = system.coordinator
    assert isinstance(coordinator, Coordinator)  # noqa: S101 - assembled around an executor
    try:
        with handling_signals(coordinator.request_stop, coordinator.force_stop):
            system.start()
            log_start(f"Batchwright runs {work_id} on {', '.join(coordinator.slots)}", settings.log_format)
            coordinator.join()
    finally:
        system.stop()
    left = _find(settings, work_id)
    if left is not None and left.state not in TERMINAL_STATES and left.attempts == item.attempts:
        raise NotReadyError(f"{work_id} was not taken on {', '.join(coordinator.slots)}: see the log above")


def announce(settings: Settings, owner: str, kinds: Sequence[str]) -> None:
    """Announce the devices of this node in the name of a dispatcher, which keeps them announced.

    Args:
        settings: the settings of the service.
        owner: the name under which the dispatcher knows this node.
        kinds: the kinds of devices that the engine hands out here.

    Raises:
        StoreUnavailableError: when the database cannot be reached.
    """
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # of this job, which takes no device
    store = open_store(settings.url)
    commands = registered_commands(settings)
    try:
        for device in inventory.devices():
            if device.kind in kinds:
                executor = local_executor(device, commands, DataRoots(settings.data_roots))
                served = ServedDevice(
                    slot=f"{settings.node_name}/{device.id}",
                    owner=owner,
                    device=device,
                    environment=executor.environment(),
                    versions=installed_versions(),
                    packages=installed_packages(),
                )
                executor.close()
                store.devices.announce(served)
                log_start(f"Batchwright announces {served.slot}", settings.log_format)
    finally:
        store.close()


def name_on_host(device: DeviceInfo) -> str:
    """Return the id of a device by the numbers of its host, where an engine has assigned it."""
    if not device.traits.is_gpu:
        return device.id
    for variable in _NUMBERS_OF_HOST:
        if assigned := os.environ.get(variable, "").split(",")[0].strip():
            return f"{device.kind}:{assigned}"
    return device.id


def _devices(kind: str, count: int) -> list[DeviceInfo]:
    """Return the first devices that the engine has assigned, of this kind if one is given: GPUs before the CPU."""
    found = [device for device in inventory.devices() if kind in {"", device.kind}]
    found = [device for device in found if device.kind == found[0].kind][:count]
    if len(found) < count:
        raise ConfigurationError(
            f"the engine has assigned {len(found)} {kind} devices of {count}: CUDA_VISIBLE_DEVICES names no more"
        )
    return found


def _need(item: WorkItem) -> HardwareNeed | None:
    """Return the hardware that work needs if any device of it will do."""
    if item.kind is WorkKind.JOB:
        job = JobRequest.from_stored(item.payload)
        return hardware_of_job(job.recommendation, job.training)
    request = TuningRequest.from_stored(item.payload)
    return None if request.hardware is None else HardwareNeed.of_request(request)


def _find(settings: Settings, work_id: str) -> WorkItem | None:
    store = open_store(settings.url)
    try:
        return store.work.get(work_id)
    except NotFoundError:
        return None
    finally:
        store.close()


_SECONDS = 60.0


def assigned_hosts() -> Hosts:
    """Return the hosts of this process's job.

    Raises:
        ConfigurationError: when no engine has assigned any.
    """
    if (text := os.environ.pop(HOSTS, None)) is not None:
        return Hosts.model_validate_json(text)
    own, listed = os.environ.get("SLURMD_NODENAME"), os.environ.get("SLURM_JOB_NODELIST")
    if own is None or listed is None:
        raise ConfigurationError("this work takes several hosts, and no engine has assigned them to this process")
    others = [name for name in _expanded(listed) if name != own]
    step = ("srun", "--nodes=1", "--ntasks=1", "--overlap", "--kill-on-bad-exit=1")  # a step of this job, on one node
    return Hosts(address=own, others=tuple((*step, f"--nodelist={name}") for name in others))


def _expanded(nodes: str) -> list[str]:
    """Return the names in a list of Slurm's, such as ``node[1-3]``."""
    program = shutil.which("scontrol")
    if program is None:
        raise ConfigurationError("scontrol: Slurm's commands are not installed on this node")
    words = (program, "show", "hostnames", nodes)
    done = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS, check=False)  # noqa: S603 - Slurm's own
    if done.returncode != 0:
        raise ConfigurationError(f"scontrol: {done.stderr.strip()}")
    return done.stdout.split()
