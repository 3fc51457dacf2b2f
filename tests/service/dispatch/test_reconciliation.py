"""Work and an engine's jobs are compared without a clock: what is submitted, stopped and forgotten, and why."""

import random
from collections.abc import Sequence

import pytest

from batchwright_service.dispatch.cluster_engine import EngineJob, JobName, JobState
from batchwright_service.dispatch.reconciliation import (
    END_SECONDS,
    START_SECONDS,
    Action,
    Forget,
    Places,
    SeenJob,
    Stop,
    Submit,
    Task,
    TaskState,
    reconcile,
)

KEY = "tun_1"
LONG = 10_000.0


def task(state: TaskState, generation: int = 1, seconds: float = 0.0, key: str = KEY) -> Task:
    """A task that needs a CPU."""
    return Task(key, generation, state, "cpu", seconds)


def seen(state: JobState, generation: int = 1, attempt: int = 0, seconds: float = 0.0, key: str = KEY) -> SeenJob:
    """A job of a task, with an id of its own."""
    name = JobName(key, generation, attempt)
    return SeenJob(EngineJob(f"id-{generation}-{attempt}", name, state, "the engine's words"), seconds)


def actions(task: Task, *jobs: SeenJob) -> list[Action]:
    """The actions for one task."""
    return reconcile([task], jobs, 1).actions


SUBMITTED = Submit(JobName(KEY, 1, 0))


@pytest.mark.parametrize(
    ("of_task", "jobs", "expected"),
    [
        pytest.param(task(TaskState.WAITING), [], [SUBMITTED], id="waiting work is submitted"),
        pytest.param(task(TaskState.WAITING), [seen(JobState.PENDING)], [], id="once"),
        pytest.param(task(TaskState.HELD), [], [], id="a live lease needs no job: the engine may have forgotten it"),
        pytest.param(task(TaskState.HELD), [seen(JobState.RUNNING, 0)], [], id="work that runs is left alone"),
        pytest.param(
            task(TaskState.HELD), [seen(JobState.PENDING)], ["id-1-0"], id="a job for work that runs elsewhere"
        ),
        pytest.param(
            task(TaskState.WAITING, 2, 1.0),
            [seen(JobState.RUNNING, 1)],
            [Submit(JobName(KEY, 2, 0))],
            id="work whose lease was lost is submitted at once, its worker has time to end",
        ),
        pytest.param(
            task(TaskState.WAITING, 2, END_SECONDS + 1),
            [seen(JobState.RUNNING, 1), seen(JobState.PENDING, 2)],
            ["id-1-0"],
            id="a worker that has lost its lease and does not end",
        ),
        pytest.param(
            task(TaskState.WAITING),
            [seen(JobState.RUNNING, seconds=START_SECONDS + 1)],
            ["id-1-0"],
            id="a job that has not claimed its work",
        ),
        pytest.param(
            task(TaskState.WAITING),
            [seen(JobState.PENDING, attempt=0), seen(JobState.RUNNING, attempt=1)],
            ["id-1-0"],
            id="of two jobs the one that waits",
        ),
        pytest.param(task(TaskState.ENDED), [seen(JobState.PENDING)], ["id-1-0"], id="cancelled before it ran"),
        pytest.param(task(TaskState.ENDED), [seen(JobState.RUNNING)], [], id="a worker that is about to end"),
        pytest.param(
            task(TaskState.ENDED, seconds=END_SECONDS + 1),
            [seen(JobState.RUNNING)],
            ["id-1-0"],
            id="a worker that does not end",
        ),
        pytest.param(
            task(TaskState.ENDED),
            [seen(JobState.ENDED)],
            [Forget("id-1-0")],
            id="what ended work has left in the engine",
        ),
        pytest.param(
            task(TaskState.HELD, 2), [seen(JobState.ENDED)], [Forget("id-1-0")], id="what an earlier attempt has left"
        ),
        pytest.param(task(TaskState.WAITING), [seen(JobState.ENDED)], [], id="not again at once"),
        pytest.param(
            task(TaskState.WAITING),
            [seen(JobState.ENDED, seconds=2.5)],
            [Submit(JobName(KEY, 1, 1))],
            id="again after a pause, under a name of its own",
        ),
        pytest.param(
            task(TaskState.WAITING),
            [seen(JobState.ENDED, attempt=n, seconds=100.0) for n in range(8)],
            [],
            id="pauses that double",
        ),
        pytest.param(
            task(TaskState.WAITING),
            [seen(JobState.ENDED, attempt=n, seconds=301.0) for n in range(20)],
            [Submit(JobName(KEY, 1, 20))],
            id="up to five minutes",
        ),
        pytest.param(
            task(TaskState.WAITING), [seen(JobState.RUNNING, key="tun_2", seconds=LONG)], [SUBMITTED], id="others' jobs"
        ),
    ],
)
def test_each_state_has_its_actions(of_task: Task, jobs: Sequence[SeenJob], expected: list[Action | str]) -> None:
    """An expected text is the id of a job to stop."""
    done = [action.job_id if isinstance(action, Stop) else action for action in actions(of_task, *jobs)]
    assert done == expected


def test_the_engines_queue_stays_short_in_each_lane() -> None:
    """The first in our queue are submitted, up to the limit; another lane has a limit of its own."""
    cpu = [task(TaskState.WAITING, key=f"tun_{n}") for n in range(4)]
    gpu = [Task("tun_gpu", 0, TaskState.WAITING, "cuda:0")]
    pending = seen(JobState.PENDING, key="tun_0")
    plan = reconcile([*cpu, *gpu], [pending], 2)
    assert [action.name.key for action in plan.actions if isinstance(action, Submit)] == ["tun_1", "tun_gpu"]
    assert plan.waits["tun_0"] == "the engine's words"
    assert "waits behind 2 jobs" in plan.waits["tun_3"]


def test_work_of_one_device_does_not_overtake_work_of_several() -> None:
    """While such work waits, later work for its nodes is not submitted; other work is."""
    pair = Places(frozenset({"a", "b"}), takes_several=True, hosts=2)
    tasks = [
        Task("job_first", 0, TaskState.WAITING, "cpu", places=Places(frozenset({"a", "b"}))),
        Task("job_pair", 0, TaskState.WAITING, "pair", places=pair),
        Task("job_last", 0, TaskState.WAITING, "cpu", places=Places(frozenset({"b"}))),
        Task("job_other_pair", 0, TaskState.WAITING, "pair", places=pair),
        Task("job_elsewhere", 0, TaskState.WAITING, "gpu", places=Places(frozenset({"c"}))),
        Task("node-a", 0, TaskState.WAITING, "a"),
    ]
    gathering = seen(JobState.RUNNING, 0, seconds=START_SECONDS + 1.0, key="job_pair")
    for jobs in ([], [gathering]):
        plan = reconcile(tasks, jobs, 10)
        submitted = [action.name.key for action in plan.actions if isinstance(action, Submit)]
        assert submitted == ["job_first", *([] if jobs else ["job_pair"]), "job_elsewhere", "node-a"]
        assert not [action for action in plan.actions if isinstance(action, Stop)], "it may gather for long"
        assert plan.waits["job_last"] == plan.waits["job_other_pair"] == "waits behind work that takes several devices"


@pytest.mark.parametrize(
    ("hosts", "nodes", "state", "is_stopped"),
    [
        pytest.param(1, "ab", JobState.PENDING, False, id="it names them"),
        pytest.param(1, "b", JobState.PENDING, False, id="one is left"),
        pytest.param(1, "cd", JobState.PENDING, True, id="none is left, it would wait for ever"),
        pytest.param(1, "cd", JobState.RUNNING, True, id="its node is gone"),
        pytest.param(1, "abc", JobState.PENDING, False, id="another could take it, and has other work"),
        pytest.param(1, "abc", JobState.RUNNING, False, id="its worker starts"),
        pytest.param(2, "ab", JobState.RUNNING, False, id="it gathers them"),
        pytest.param(2, "ac", JobState.RUNNING, True, id="too few are left, it would gather for ever"),
        pytest.param(2, "abc", JobState.RUNNING, True, id="another could be gathered"),
    ],
)
def test_a_job_that_names_other_nodes_makes_way_for_another(
    hosts: int, nodes: str, state: JobState, *, is_stopped: bool
) -> None:
    """Nodes that a job names may be lost, and others may join, before it has them."""
    waiting = Task(KEY, 1, TaskState.WAITING, "cpu", places=Places(frozenset(nodes), hosts=hosts))
    job = EngineJob("id", JobName(KEY, 1, 0), state, nodes=frozenset("ab"))
    stops = [action.job_id for action in actions(waiting, SeenJob(job, 1.0)) if isinstance(action, Stop)]
    assert stops == ["id"] * is_stopped
    held = Task(KEY, 1, TaskState.HELD, "cpu", places=waiting.places)
    assert not [stop for stop in actions(held, SeenJob(job, 1.0)) if state is JobState.RUNNING]
    assert not actions(waiting, SeenJob(EngineJob("id", job.name, state), 1.0)), "a job for any node finds one"


def test_names_come_back_from_the_engine() -> None:
    """A name survives the engine; a job of somebody else has none."""
    name = JobName("node-0a1b-2", 3, 14)
    assert JobName.parse(str(name)) == name
    assert JobName.parse("batchwright") is None


class Cluster:
    """Tasks, leases and jobs under two dispatchers, where everything fails at random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generations = {f"tun_{n}": 0 for n in range(6)}
        self.ended: dict[str, int] = {}
        self.holders: dict[str, str] = {}
        """The job that holds the lease of a key."""
        self.expires: dict[str, int] = {}
        self.jobs: dict[str, tuple[JobName, JobState, int]] = {}
        self.now = 0

    def tasks(self) -> list[Task]:
        """The tasks as the store has them."""
        found = []
        for key, generation in self.generations.items():
            is_held = self.expires.get(key, -1) > self.now
            waiting = TaskState.HELD if is_held else TaskState.WAITING
            state = TaskState.ENDED if key in self.ended else waiting
            since = self.ended.get(key, max(0, self.expires.get(key, 0)))
            found.append(Task(key, generation, state, "cpu", self.now - since))
        return found

    def seen(self) -> list[SeenJob]:
        """The jobs as the engine lists them."""
        return [SeenJob(EngineJob(job, *one[:2]), self.now - one[2]) for job, one in self.jobs.items()]

    def act(self, plan: Sequence[Action]) -> None:
        """Perform actions, some of which came too late."""
        for action in plan:
            match action:
                case Submit(name) if str(name) not in self.jobs:
                    self.jobs[str(name)] = (name, JobState.PENDING, self.now)
                case Stop(job) if job in self.jobs:
                    self.jobs[job] = (self.jobs[job][0], JobState.ENDED, self.now)
                case Forget(job):
                    self.jobs.pop(job, None)
                case _:
                    pass

    def step(self, *, is_calm: bool) -> None:
        """A second of the engine and its workers."""
        self.now += 1
        for job, (name, state, _) in list(self.jobs.items()):
            if state is JobState.PENDING and self.random.random() < 0.5:
                self.jobs[job] = (name, JobState.RUNNING, self.now)
            elif state is JobState.RUNNING:
                self._work(job, name, is_calm=is_calm)
        if not is_calm and self.random.random() < 0.02:
            self.jobs.clear()  # the head is lost: it forgets its jobs, and they are gone

    def _work(self, job: str, name: JobName, *, is_calm: bool) -> None:
        key = name.key
        if not is_calm and self.random.random() < 0.1:  # its node is gone, and the lease with it, later
            self.jobs[job] = (name, JobState.ENDED, self.now)
        elif self.holders.get(key) == job and self.expires[key] > self.now:
            self.expires[key] = self.now + 15
            if self.random.random() < 0.1:
                self.ended[key] = self.now
                self.jobs[job] = (name, JobState.ENDED, self.now)
        elif key not in self.ended and self.expires.get(key, -1) <= self.now:  # the store's rule of a claim
            self.generations[key] += 1
            self.holders[key], self.expires[key] = job, self.now + 15
        else:
            self.jobs[job] = (name, JobState.ENDED, self.now)


@pytest.mark.parametrize("seed", range(20))
def test_two_dispatchers_end_all_work_and_leave_nothing(seed: int) -> None:
    """Whatever was lost in the first two minutes, all work ends afterwards, and no job is left."""
    cluster = Cluster(seed)
    for second in range(3000):
        first, other = (reconcile(cluster.tasks(), cluster.seen(), 3).actions for _ in range(2))
        cluster.act(first)
        cluster.act(other)
        cluster.step(is_calm=second > 120)
        if second > 120 and len(cluster.ended) == len(cluster.generations) and not cluster.jobs:
            return
    raise AssertionError(f"left: {cluster.jobs}, ended: {cluster.ended}")
