"""The application context: the store, the policy and the served devices, which the use cases share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from service.application.hit_counter import HitCounter
from service.application.job_files import RunFiles
from service.application.rules.idempotency import OnceEach
from service.application.rules.policy import Policy
from service.domain.identifiers import IdentifierSource
from service.errors import UnknownDeviceError
from service.store.models import SeenDevice
from service.store.store import Store


class ApplicationContext:
    """The dependencies that use cases share. Safe to share between threads.

    Args:
        store: where work is kept.
        policy: what the operator allows.
        runs_dir: where jobs run.
        lease_seconds: a worker not heard of for longer is not counted as serving its device.
        notify: called after work was queued or cancelled, so that workers of this process look at once.
    """

    def __init__(
        self, store: Store, policy: Policy, runs_dir: Path, lease_seconds: float, notify: Callable[[], None]
    ) -> None:
        self.store = store
        self.policy = policy
        self.runs = RunFiles(runs_dir)
        self.notify = notify
        self.identifiers = IdentifierSource()
        self.once = OnceEach(store.submissions)
        self.hit_counter = HitCounter(store.statistics.count_hits)
        self._lease_seconds = lease_seconds

    def is_alive(self, seen: SeenDevice) -> bool:
        """Whether a device's worker was heard of lately."""
        return seen.age_seconds <= self._lease_seconds

    def serving(self, device: str | None) -> SeenDevice:
        """The live worker for a device; for none, that of the first GPU, else of the CPU.

        Raises:
            UnknownDeviceError: when there is none.
            StoreUnavailableError: when there is none, and the database cannot be written: workers may be silent for it.
        """
        alive = [seen for seen in self.store.devices.list() if self.is_alive(seen)]
        alive.sort(key=lambda seen: (seen.served.device.kind == "cpu", len(seen.served.device.id), seen.served.slot))
        found = next((seen for seen in alive if device in {None, seen.served.device.id}), None)
        if found is None:
            self.store.queue.check()  # a worker that cannot write is silent: its device is not unknown
            served = ", ".join(sorted({seen.served.device.id for seen in alive})) or "none"
            raise UnknownDeviceError(f"device {device or '(any)'} is not served here; served: {served}")
        return found
