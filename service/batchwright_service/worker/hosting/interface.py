"""The interface of a host's workers: threads of this process, or a child process."""

from typing import Protocol


class Workers(Protocol):
    """Started once and stopped once."""

    @property
    def slots(self) -> list[str]:
        """Slot (host and device) of each running worker."""

    def start(self) -> None:
        """Start every worker, or none. Does nothing when they run.

        Raises:
            ServiceError: when they cannot be started.
        """

    def is_alive(self) -> bool:
        """Return whether every worker works or waits for work."""

    def notify(self) -> None:
        """Wake every worker to check for work and for cancellations. Never blocks."""

    def request_stop(self) -> None:
        """Begin a graceful stop. Returns at once."""

    def force_stop(self) -> None:
        """End running work now. Returns at once; ``stop`` then returns soon."""

    def stop(self) -> None:
        """Stop gracefully: running work is handed back to the queue. Idempotent."""
