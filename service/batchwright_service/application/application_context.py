"""The application context: the store, the policy and the served devices, which the use cases share."""

from pathlib import Path

from batchwright_service.application.hit_counter import HitCounter
from batchwright_service.application.job_files import JobFiles
from batchwright_service.application.rules.idempotency import IdempotentRequests
from batchwright_service.application.rules.policy import Policy
from batchwright_service.domain.identifiers import IdentifierSource
from batchwright_service.errors import UnknownDeviceError
from batchwright_service.registry.registered_commands import RegisteredCommands
from batchwright_service.store.models import AnnouncedDevice
from batchwright_service.store.store import Store


class ApplicationContext:
    """The dependencies that use cases share. Safe to share between threads.

    Args:
        store: the store of all work.
        policy: the code, files and quotas that the operator allows.
        runs_dir: the folder of the jobs' runs.
        lease_seconds: the age of a heartbeat up to which a worker is alive.
        commands: the commands that the operator has registered.
        hit_counter: counts the submissions that a stored recommendation serves; flushed by its owner.
    """

    def __init__(  # noqa: PLR0913 - built in one place
        self,
        store: Store,
        policy: Policy,
        runs_dir: Path,
        lease_seconds: float,
        *,
        commands: RegisteredCommands,
        hit_counter: HitCounter,
    ) -> None:
        self.store = store
        self.policy = policy
        self.job_files = JobFiles(runs_dir)
        self.identifiers = IdentifierSource()
        self.idempotent_requests = IdempotentRequests(store.submissions)
        self.commands = commands
        self.hit_counter = hit_counter
        self._lease_seconds = lease_seconds

    def is_alive(self, announced: AnnouncedDevice) -> bool:
        """Return whether the worker of a device sent a heartbeat within ``lease_seconds``."""
        return self.is_recent(announced.age_seconds)

    def is_recent(self, age_seconds: float) -> bool:
        """Return whether a heartbeat or report of this age is of a live process."""
        return age_seconds <= self._lease_seconds

    def live_workers(self) -> list[AnnouncedDevice]:
        """Return the devices with a live worker."""
        return [announced for announced in self.store.devices.list() if self.is_alive(announced)]

    def live_device(self, device: str | None) -> AnnouncedDevice:
        """Return a device with a live worker, by its id; for None the first GPU, else the CPU.

        Raises:
            UnknownDeviceError: when no live worker serves the device.
            StoreUnavailableError: when there is none and the database cannot be written, so that no worker could send
                its heartbeat.
        """
        alive = self.live_workers()
        alive.sort(
            key=lambda live: (not live.served.device.traits.is_gpu, len(live.served.device.id), live.served.slot)
        )
        found = next((live for live in alive if device in {None, live.served.device.id}), None)
        if found is None:
            self.store.queue.check()
            served = ", ".join(sorted({live.served.device.id for live in alive})) or "none"
            raise UnknownDeviceError(f"device {device or '(any)'} is not served here; served: {served}")
        return found
