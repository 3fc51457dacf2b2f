"""The tunings and jobs of ``chaos.py``, and the invariants that must hold when they have ended."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_deployments import TARGET, Deployment
from reporting import wait_until

from batchwright.client.documents.work import Job, RecordedProbe, Tuning
from batchwright.schemas.requests import TuningRequest
from batchwright.schemas.results import Outcome
from batchwright.schemas.workload import parse_spec
from batchwright.training.launching.run_directory import RunPaths
from tests.support.soak import UPDATES, output_of, run_request

MIB = 1024**2


@dataclass(frozen=True)
class Kind:
    """Work whose every piece must end alike."""

    work: str
    """``tuning`` or ``job``."""
    ranks: int = 1
    """Ranks of a job on each host."""
    hosts: int = 1
    loaders: int = 0
    """Processes that load data for each rank, which must not change the weights."""

    def __str__(self) -> str:
        if self.work == "tuning":
            return self.work
        return f"job, {self.hosts} x {self.ranks} ranks, {self.loaders} loaders"

    @property
    def answer(self) -> tuple[str, int]:
        """The fields that the result depends on. The order of sums depends on the number of ranks."""
        return self.work, self.ranks * self.hosts


TUNING = Kind("tuning")
ON_ONE_HOST = (TUNING, Kind("job"), TUNING, Kind("job", loaders=2), TUNING, Kind("job", ranks=2))
ON_A_CLUSTER = (TUNING, Kind("job"), TUNING, Kind("job", ranks=2), TUNING, Kind("job", hosts=2))


def request() -> TuningRequest:
    """Return a tuning whose samples take far more memory than two fork servers differ by, so that one size is right.

    Windows of 16, 16, 16 and 2 samples, as in the soak test of training runs, whose updates and checkpoints jobs have.
    """
    sizes = {"layers": 2, "width": 64, "length": 256}
    spec = {
        "model": {"kind": "python", "target": TARGET, "arguments": sizes},
        "optimizer": {"name": "adamw", "learning_rate": 0.001},
        "schedule": {"name": "cosine", "warmup_updates": 3},
        "gradient_clipping": 0.5,
        "ema_decay": 0.9,
        "data": {"kind": "synthetic", "samples": 50},
    }
    return TuningRequest(spec=parse_spec(spec), effective_batch_size=16, device="cpu", memory_limit_bytes=88 * MIB)


@dataclass
class References:
    """Undisturbed results by ``Kind.answer``, the seconds they took, and the recommendation that jobs follow."""

    answers: dict[tuple[str, int], object] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    recommendation_id: str = ""


def submit(deployment: Deployment, kind: Kind, references: References) -> str:
    """Queue a piece of work. Return its id."""
    if kind.work == "tuning":
        return deployment.client.tunings.submit(request(), fresh=True).id
    training = run_request(kind.loaders, kind.ranks).model_copy(update={"nodes": kind.hosts})
    return deployment.client.jobs.submit(references.recommendation_id, training).id


def undisturbed(deployment: Deployment, kinds: Iterable[Kind]) -> References:
    """Run one piece of work of every kind, and two tunings.

    Raises:
        RuntimeError: when two results that must be equal differ, or work fails.
    """
    found = References()
    for kind in (TUNING, *dict.fromkeys(kinds)):
        work_id = submit(deployment, kind, found)
        wait_until(lambda: deployment.get(work_id).state.terminal, deployment.seconds_left, 0.1)  # noqa: B023
        ended = deployment.get(work_id)
        answer = answer_of(ended)
        if found.answers.setdefault(kind.answer, answer) != answer:
            raise RuntimeError(f"undisturbed results of {kind} differ: {found.answers[kind.answer]}, {answer}")
        if isinstance(ended, Tuning) and ended.recommendation is not None:
            found.recommendation_id = ended.recommendation.id
        if ended.started_at and ended.ended_at:
            found.seconds[str(kind)] = (ended.ended_at - ended.started_at).total_seconds()
    return found


def answer_of(ended: Tuning | Job) -> object:
    """Return what must not depend on faults: the decision of a tuning; weights, averages and losses of a job.

    Raises:
        RuntimeError: when the work has failed.
    """
    if isinstance(ended, Tuning) and (found := ended.recommendation) is not None:
        proof = found.evidence.proof.model_dump(include={"fits", "next_size", "stopped_by"})
        return found.feasible, found.plan, found.largest_micro_batch_size, proof, found.fingerprint
    if isinstance(ended, Job) and ended.result is not None and ended.directory is not None:
        output = output_of(RunPaths(Path(ended.directory)), ended.result)
        if output.stated_sha256 == output.weights_sha256:
            return output
        raise RuntimeError(f"{ended.id} states other weights than it wrote: {output}")
    raise RuntimeError(f"{ended.id} ended as {ended.state}: {ended.problem}")


def judge(deployment: Deployment, work_id: str, kind: Kind, references: References, since: float) -> dict[str, Any]:
    """Return how a piece of work ended. ``wrong`` is empty if every invariant holds."""
    ended = deployment.get(work_id)
    row: dict[str, Any] = {"id": work_id, "kind": str(kind), "attempts": ended.attempts, "slot": ended.slot}
    wrong: list[str] = []
    try:
        if (answer := answer_of(ended)) != references.answers[kind.answer]:
            wrong.append(f"another result: {answer}")
    except (RuntimeError, OSError) as error:
        wrong.append(str(error))
    if isinstance(ended, Tuning):
        entries = [entry for entry in deployment.journal(since) if entry["work"] in {"", work_id}]
        recorded = deployment.client.tunings.probes(work_id)
        row["probes"] = [f"{probe.result.micro_batch_size} {probe.result.outcome}" for probe in recorded]
        wrong += _repeated(recorded, entries)
    elif ended.state.terminal:
        told = [event.progress.update for event in deployment.client.jobs.events(work_id) if event.progress is not None]
        row["resumed_from"] = ended.result and ended.result.resumed_from
        if told != list(range(1, UPDATES + 1)):
            wrong.append(f"updates told: {told}")
    return {**row, "wrong": wrong}


def _repeated(recorded: Iterable[RecordedProbe], entries: list[dict[str, Any]]) -> list[str]:
    """Return the probes that were run again after their result was recorded."""
    return [
        f"size {probe.result.micro_batch_size}, recorded as probe {probe.ordinal}, was run again"
        for probe in recorded
        if probe.result.outcome is not Outcome.LOST
        for entry in entries
        if entry["size"] == probe.result.micro_batch_size and entry["at"] > probe.recorded_at.timestamp()
    ]
