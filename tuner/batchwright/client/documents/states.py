"""The states of tunings and jobs, and the transitions between them. Pure data."""

from enum import StrEnum


class State(StrEnum):
    """The state of a tuning or job."""

    QUEUED = "QUEUED"
    """Waits for its device. Records of an earlier attempt are kept."""
    RUNNING = "RUNNING"
    """A worker holds its lease, and its device."""
    CANCELLING = "CANCELLING"
    """Cancelled while running; its worker is ending it."""
    SUCCEEDED = "SUCCEEDED"
    """Ended with a result, "nothing fits" included."""
    FAILED = "FAILED"
    """Ended without a result; `problem` has the cause."""
    CANCELLED = "CANCELLED"
    """Ended on request."""

    @property
    def terminal(self) -> bool:
        """Return whether the work has ended. A job may be resumed from some of these states."""
        return self in TERMINAL_STATES


TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.RUNNING, State.CANCELLED}),
    State.RUNNING: frozenset({State.QUEUED, State.CANCELLING, State.SUCCEEDED, State.FAILED}),
    # The work may have ended before the cancellation reached it: then its result is kept.
    State.CANCELLING: frozenset({State.CANCELLED, State.SUCCEEDED, State.FAILED}),
    State.SUCCEEDED: frozenset(),
    # A job that has a checkpoint may be resumed.
    State.FAILED: frozenset({State.QUEUED}),
    State.CANCELLED: frozenset({State.QUEUED}),
}
"""The table of transitions. The store makes each an update that requires the old state."""

TERMINAL_STATES = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED})
"""States in which work has ended."""
RESUMABLE_STATES = TERMINAL_STATES & {state for state, targets in TRANSITIONS.items() if targets}
"""States from which a job may be resumed."""
HELD_STATES = frozenset({State.RUNNING, State.CANCELLING})
"""States in which a worker holds a device."""


def sources_of(target: State) -> frozenset[State]:
    """Return the states from which ``target`` may be entered."""
    return frozenset(state for state, targets in TRANSITIONS.items() if target in targets)


class WorkOutcome(StrEnum):
    """How a tuning or job ended: its state, in which a tuning that found no plan is told from one that found a plan."""

    SUCCEEDED = "succeeded"
    """A tuning ended with a plan, or a job ended its training."""
    INFEASIBLE = "infeasible"
    """A tuning ended with the proof that there is no plan. Its state is `SUCCEEDED`: the search has a result."""
    FAILED = "failed"
    """Ended without a result."""
    CANCELLED = "cancelled"
    """Ended on request."""


def outcome_of(state: State, *, feasible: bool | None) -> WorkOutcome:
    """Return how work ended.

    Args:
        state: its terminal state.
        feasible: whether its recommendation has a plan; None without a recommendation.

    Raises:
        ValueError: when the work has not ended.
    """
    return WorkOutcome.INFEASIBLE if state is State.SUCCEEDED and feasible is False else WorkOutcome(state.lower())


class WorkKind(StrEnum):
    """The kind of a piece of work."""

    TUNING = "tuning"
    JOB = "job"
