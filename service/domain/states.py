"""The states of tunings and jobs, and the transitions between them. Pure data.

The SDK imports this module, so it knows neither FastAPI nor SQLAlchemy nor torch.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """Where a tuning or a job stands."""

    QUEUED = "QUEUED"
    """Waits for its device; what was recorded of an earlier attempt is kept."""
    RUNNING = "RUNNING"
    """A worker holds its lease and its device."""
    CANCELLING = "CANCELLING"
    """Cancelled while running: its worker is ending it."""
    SUCCEEDED = "SUCCEEDED"
    """Ended with its result, "nothing fits" included."""
    FAILED = "FAILED"
    """Ended without a result; `problem` says why."""
    CANCELLED = "CANCELLED"
    """Ended on request."""

    @property
    def terminal(self) -> bool:
        """Whether nothing follows, unless someone resumes it."""
        return self in TERMINAL_STATES


TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.RUNNING, State.CANCELLED}),
    State.RUNNING: frozenset({State.QUEUED, State.CANCELLING, State.SUCCEEDED, State.FAILED}),
    # It may have ended before the cancellation reached it: then what it found is kept.
    State.CANCELLING: frozenset({State.CANCELLED, State.SUCCEEDED, State.FAILED}),
    State.SUCCEEDED: frozenset(),
    # A job may be resumed that has a checkpoint.
    State.FAILED: frozenset({State.QUEUED}),
    State.CANCELLED: frozenset({State.QUEUED}),
}
"""The one table of transitions. The store turns each into an update that requires the old state."""

TERMINAL_STATES = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED})
"""States in which work has ended."""
RESUMABLE_STATES = TERMINAL_STATES & {state for state, targets in TRANSITIONS.items() if targets}
"""Ends from which a job may go on."""
HELD_STATES = frozenset({State.RUNNING, State.CANCELLING})
"""States in which a worker holds a device."""


def sources_of(target: State) -> frozenset[State]:
    """The states from which ``target`` may be entered."""
    return frozenset(state for state, targets in TRANSITIONS.items() if target in targets)


class WorkKind(StrEnum):
    """What a piece of work is."""

    TUNING = "tuning"
    JOB = "job"
