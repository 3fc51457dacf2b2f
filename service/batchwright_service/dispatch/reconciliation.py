"""Compare the work with the jobs of an engine: what to submit, to stop and to forget. Pure: no clock, no store.

Safe to be done twice, by two dispatchers at once, and after either side has forgotten anything: a worker without the
lease of its work runs nothing, and equal attempts have equal names.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from batchwright_service.dispatch.cluster_engine import EngineJob, JobName, JobState

END_SECONDS = 15.0
"""Time for a job to end by itself after its work has ended, or after its lease has been lost."""
START_SECONDS = 180.0
"""Time for a running job to claim its work: imports from a loaded shared folder take long."""
_MAX_DELAY_SECONDS = 300.0


class TaskState(StrEnum):
    """The state of a task."""

    WAITING = "WAITING"
    """Has no live lease, and wants a job."""
    HELD = "HELD"
    """A worker holds a live lease."""
    ENDED = "ENDED"
    """Wants no job any more."""


@dataclass(frozen=True)
class Places:
    """The places that a task takes."""

    nodes: frozenset[str] = frozenset()
    """Ids of the nodes that have its devices; none of a task that takes no device."""
    takes_several: bool = False
    """True for several devices or nodes, which work of one device would take one after the other for ever: while such
    a task waits, later ones for these nodes wait too."""
    hosts: int = 1
    """Number of nodes that it takes at once."""

    @property
    def gathers(self) -> bool:
        """True for several nodes: its job may run for long until they are free."""
        return self.hosts > 1


@dataclass(frozen=True)
class Task:
    """A tuning or job, or a node whose devices are to be announced."""

    key: str
    generation: int
    """Rises with every lease (the fencing token)."""
    state: TaskState
    lane: str
    """The hardware that it needs: tasks of one lane wait for the same devices."""
    seconds: float = 0.0
    """Seconds since it was queued, lost its lease, or ended."""
    places: Places = Places()


@dataclass(frozen=True)
class SeenJob:
    """An engine's job, and the seconds for which it has been in its state."""

    job: EngineJob
    seconds: float

    @property
    def state(self) -> JobState:
        """The state of the job."""
        return self.job.state


@dataclass(frozen=True)
class Submit:
    """Submit a job for a task."""

    name: JobName


@dataclass(frozen=True)
class Stop:
    """Stop a job."""

    job_id: str
    reason: str


@dataclass(frozen=True)
class Forget:
    """Delete an ended job."""

    job_id: str


Action = Submit | Stop | Forget


@dataclass
class Reconciliation:
    """The actions, and why each waiting task waits (by its key)."""

    actions: list[Action] = field(default_factory=list)
    waits: dict[str, str] = field(default_factory=dict)


def reconcile(tasks: Sequence[Task], jobs: Iterable[SeenJob], most_pending: int) -> Reconciliation:
    """Compare tasks with jobs. Jobs of unknown keys are left alone: they may be of another service.

    Args:
        tasks: waiting tasks in the order in which they are to be submitted, and the others of interest.
        jobs: the engine's jobs.
        most_pending: pending jobs for each kind of hardware from which on nothing is submitted: the engine's queue
            stays short, so that priorities and fairness of our queue hold.
    """
    by_key: dict[str, list[SeenJob]] = {}
    for seen in jobs:
        by_key.setdefault(seen.job.name.key, []).append(seen)
    done = Reconciliation()
    pending = Counter(
        task.lane for task in tasks for seen in by_key.get(task.key, ()) if seen.state is JobState.PENDING
    )
    reserved: frozenset[str] = frozenset()
    for task in tasks:
        own = by_key.get(task.key, [])
        ended = [seen.job for seen in own if seen.state is JobState.ENDED]
        is_over = task.state is TaskState.ENDED  # else ended jobs of this generation still count for its delay
        forgets = [Forget(job.id) for job in ended if is_over or job.name.generation < task.generation]
        done.actions += [*_stops(task, own), *forgets]
        if task.state is not TaskState.WAITING:
            continue
        if _usable(task, own) is None and task.places.nodes & reserved:
            done.waits[task.key] = "waits behind work that takes several devices"
        elif _submit_or_wait(task, own, done, pending, most_pending) and task.places.takes_several:
            reserved |= task.places.nodes
    return done


def _stops(task: Task, jobs: Sequence[SeenJob]) -> list[Stop]:
    """Return the stops of a task's jobs: each that can do nothing for the task any more."""
    stops = []
    kept = _usable(task, jobs)
    for seen in jobs:
        name, reason = seen.job.name, ""
        if seen.state is JobState.ENDED:
            continue
        if task.state is TaskState.ENDED:
            reason = _unless_ending(seen, task, "its work has ended")
        elif task.state is TaskState.HELD:
            reason = "its work runs elsewhere" if seen.state is JobState.PENDING else ""
        elif name.generation < task.generation:
            reason = _unless_ending(seen, task, "its lease was lost")
        elif _names_others(seen, task):
            reason = "its hardware is now on other nodes than it names"
        elif seen.state is JobState.RUNNING and seen.seconds > START_SECONDS and not task.places.gathers:
            reason = f"it has not claimed its work within {START_SECONDS:g} s"
        elif kept is not None and seen is not kept:
            reason = "its work was submitted twice"
        if reason:
            stops.append(Stop(seen.job.id, reason))
    return stops


def _names_others(seen: SeenJob, task: Task) -> bool:
    """Return whether a job names other nodes than those that have its hardware now, and has not started on one.

    If too few of its nodes are left, it would wait for ever. While a job gathers nodes, all other work for them waits
    too, so it must also know those that have joined: the nodes of a cluster that starts announce themselves one after
    the other. Of one node it may wait a little longer than another would: to stop a job takes Ray seconds.
    """
    named, nodes = seen.job.nodes, task.places.nodes
    if named is None:
        return False
    return len(named & nodes) < task.places.hosts or (task.places.gathers and not nodes <= named)


def _unless_ending(seen: SeenJob, task: Task, reason: str) -> str:
    is_ending = seen.state is JobState.RUNNING and task.seconds <= END_SECONDS
    return "" if is_ending else reason


def _usable(task: Task, jobs: Sequence[SeenJob]) -> SeenJob | None:
    """Return the job that will claim a waiting task: a running one, else the first; None when there is none."""
    live = [seen for seen in _of_generation(task, jobs) if seen.state is not JobState.ENDED]
    return min(live, key=lambda seen: (seen.state is JobState.PENDING, seen.job.id), default=None)


def _of_generation(task: Task, jobs: Sequence[SeenJob]) -> list[SeenJob]:
    return [seen for seen in jobs if seen.job.name.generation >= task.generation]


def _submit_or_wait(
    task: Task, jobs: Sequence[SeenJob], done: Reconciliation, pending: Counter[str], most_pending: int
) -> bool:
    """Submit a job for a waiting task, or say why not. Return whether the task has a job now."""
    if (usable := _usable(task, jobs)) is not None:
        starts = "its nodes are being gathered" if task.places.gathers else "its worker starts"
        is_pending = usable.state is JobState.PENDING
        done.waits[task.key] = (usable.job.message or "waits for a node") if is_pending else starts
        return True
    failed = [seen for seen in _of_generation(task, jobs) if seen.state is JobState.ENDED]
    if failed:
        last = min(failed, key=lambda seen: seen.seconds)
        left = min(_MAX_DELAY_SECONDS, 2.0 ** len(failed)) - last.seconds
        if left > 0:
            done.waits[task.key] = f"attempt {len(failed)} ended without taking the work: {last.job.message}"
            return False
    if pending[task.lane] >= most_pending:
        done.waits[task.key] = f"waits behind {pending[task.lane]} jobs that wait for the same hardware"
        return False
    pending[task.lane] += 1
    attempt = max((seen.job.name.attempt + 1 for seen in failed), default=0)
    done.actions.append(Submit(JobName(task.key, task.generation, attempt)))
    done.waits[task.key] = "is being submitted"
    return True
