"""The workers of a host, as the service sees them: threads of its own process, or a process apart."""

from __future__ import annotations

from typing import Protocol


class Workers(Protocol):
    """Started once and stopped once."""

    @property
    def slots(self) -> list[str]:
        """Host and device of each worker that runs."""

    def start(self) -> None:
        """Start every worker, or none. Does nothing when they run.

        Raises:
            ServiceError: when they cannot be started.
        """

    def notify(self) -> None:
        """Have every worker look for work and for cancellations now. Never blocks."""

    def request_stop(self) -> None:
        """Begin to end gracefully. Returns at once."""

    def hurry(self) -> None:
        """End what runs now. Returns at once; ``stop`` ends soon then."""

    def stop(self) -> None:
        """End gracefully: what runs is handed back to the queue. Idempotent."""
