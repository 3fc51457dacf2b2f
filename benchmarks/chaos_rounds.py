"""A round of ``chaos.py``: one tuning or job that something happens to, held against an undisturbed one."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from chaos_deployment import TARGET, Deployment
from chaos_faults import Choices, Fault, KillWhileAsked, Struck

from batchwright.client import Client
from batchwright.client.documents.work import Job, RecordedProbe, Tuning, WorkSummary
from batchwright.client.errors import ClientError
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import TrainingRequest, TuningRequest
from batchwright.schemas.results import Outcome
from batchwright.schemas.workload import parse_spec
from batchwright.training.launching.run_directory import RunPaths

MIB = 1024**2
TRAINING = TrainingRequest(updates=40, checkpoint_every=4, seed=7)
"""Most moments of a job are to come after its first checkpoint: a process takes as long as ten updates to start."""
_PATIENCE_SECONDS = 300.0


def request() -> TuningRequest:
    """A GPT whose samples each take far more memory than differs from one fork server to the next: one answer."""
    arguments = {"layers": 2, "width": 64, "length": 256, "samples": 97}
    spec = parse_spec(
        {
            "model": {"kind": "python", "target": TARGET, "arguments": arguments},
            "optimizer": {"name": "adamw", "learning_rate": 0.001},
            "schedule": {"name": "cosine", "warmup_updates": 3},
            "data": {"kind": "workload"},
        }
    )
    return TuningRequest(spec=spec, effective_batch_size=12, device="cpu", memory_limit_bytes=88 * MIB)


def decision(found: Recommendation) -> dict[str, Any]:
    """What an answer says: all that must not depend on how the tuning went."""
    return {
        "feasible": found.feasible,
        "plan": found.plan and found.plan.model_dump(),
        "largest_micro_batch_size": found.largest_micro_batch_size,
        "proof": found.evidence.proof.model_dump(include={"fits", "next_size", "stopped_by"}),
        "fingerprint": found.fingerprint,
    }


@dataclass(frozen=True)
class Reference:
    """An undisturbed tuning and an undisturbed job."""

    decision: dict[str, Any]
    recommendation_id: str
    probes: int
    weights_sha256: str
    seconds: dict[str, float]
    """How long each kind of work takes."""


def undisturbed(deployment: Deployment) -> Reference:
    """The second of two tunings, which must agree, and a job made from it."""
    with Client(deployment.url, retry_seconds=_PATIENCE_SECONDS) as client:
        answers = [_tune(client) for _ in range(2)]
        (first, _), (second, seconds) = answers
        if decision(first) != decision(second):
            raise RuntimeError(f"undisturbed tunings differ: {decision(first)} and {decision(second)}")
        began = time.monotonic()
        job = client.jobs.wait(client.jobs.submit(second.id, TRAINING).id, _PATIENCE_SECONDS)
    if job.result is None or job.result.weights_sha256 is None:
        raise RuntimeError(f"the undisturbed job ended as {job.state}: {job.problem}")
    return Reference(
        decision=decision(second),
        recommendation_id=second.id,
        probes=len(second.evidence.probes),
        weights_sha256=job.result.weights_sha256,
        seconds={"tuning": seconds, "job": time.monotonic() - began},
    )


def _tune(client: Client) -> tuple[Recommendation, float]:
    began = time.monotonic()
    tuning = client.tunings.wait(client.tunings.submit(request(), fresh=True).id, _PATIENCE_SECONDS)
    if tuning.recommendation is None:
        raise RuntimeError(f"the undisturbed tuning ended as {tuning.state}: {tuning.problem}")
    return tuning.recommendation, time.monotonic() - began


@dataclass(frozen=True)
class Round:
    """What is to happen, to what."""

    work: str
    fault: Fault
    choices: Choices


@dataclass
class Verdict:
    """Everything that is wrong with how a round ended; nothing, when all is well."""

    wrong: list[str] = field(default_factory=list)

    def check(self, holds: bool, otherwise: str) -> None:  # noqa: FBT001 - reads as an assertion
        """Note what is wrong."""
        if not holds:
            self.wrong.append(otherwise)


def play(deployment: Deployment, planned: Round, reference: Reference) -> dict[str, Any]:
    """One round, as it is written."""
    began, since = time.monotonic(), time.time()
    verdict = Verdict()
    with Client(deployment.url, retry_seconds=_PATIENCE_SECONDS) as client:
        work_id, struck = _submit_and_strike(client, deployment, planned, reference)
        try:
            ended = _await_end(client, planned.work, work_id)
        except ClientError as error:
            ended = None
            verdict.check(holds=False, otherwise=f"it did not end: {error}")
        facts = {}
        if isinstance(ended, Tuning):
            facts = _judge_tuning(ended, client.tunings.probes(work_id), deployment.journal(since), reference, verdict)
        elif isinstance(ended, Job):
            facts = _judge_job(ended, client, reference, verdict)
        verdict.check(_stored(client, planned.work, since) == 1, "it was stored more than once")
    _judge_processes(deployment, since, struck, verdict)
    return {
        "deployment": deployment.name,
        "work": planned.work,
        "fault": planned.fault.name,
        "met": struck is not None,
        "at_seconds": round(planned.choices.at * reference.seconds[planned.work], 2),
        "what": struck.what if struck else "it had ended before",
        "gone_seconds": None if struck is None or struck.gone_seconds is None else round(struck.gone_seconds, 3),
        "attempts": ended.attempts if ended else None,
        **facts,
        "seconds": round(time.monotonic() - began, 2),
        "wrong": verdict.wrong,
    }


def _submit_and_strike(
    client: Client, deployment: Deployment, planned: Round, reference: Reference
) -> tuple[str, Struck | None]:
    if isinstance(planned.fault, KillWhileAsked):
        ask = partial(_submit, client, planned.work, reference)
        return planned.fault.strike_beside(deployment, planned.choices, ask)
    work_id = _submit(client, planned.work, reference)
    return work_id, _strike(client, deployment, planned, work_id, reference)


def _submit(client: Client, work: str, reference: Reference) -> str:
    if work == "tuning":
        return client.tunings.submit(request(), fresh=True).id
    return client.jobs.submit(reference.recommendation_id, TRAINING).id


def _strike(
    client: Client, deployment: Deployment, planned: Round, work_id: str, reference: Reference
) -> Struck | None:
    """Wait for the moment, and let it happen, unless the work has ended."""

    def ended() -> bool:
        found = client.tunings.get(work_id) if planned.work == "tuning" else client.jobs.get(work_id)
        return found.state.terminal

    time.sleep(planned.choices.at * reference.seconds[planned.work])
    return None if ended() else planned.fault.strike(deployment, planned.choices, ended)


def _await_end(client: Client, work: str, work_id: str) -> Tuning | Job:
    if work == "tuning":
        return client.tunings.wait(work_id, _PATIENCE_SECONDS)
    return client.jobs.wait(work_id, _PATIENCE_SECONDS)


def _stored(client: Client, work: str, since: float) -> int:
    """How many tunings or jobs were created since a time."""
    rows: Iterable[WorkSummary] = client.tunings.list() if work == "tuning" else client.jobs.list()
    return len(list(takewhile(lambda row: row.created_at.timestamp() >= since, rows)))


def _judge_tuning(
    ended: Tuning,
    probes: tuple[RecordedProbe, ...],
    journal: list[dict[str, Any]],
    reference: Reference,
    verdict: Verdict,
) -> dict[str, Any]:
    found = ended.recommendation
    verdict.check(found is not None, f"it ended as {ended.state}: {ended.problem.detail if ended.problem else ''}")
    if found is not None:
        verdict.check(decision(found) == reference.decision, f"another answer: {decision(found)}")
    started = [entry for entry in journal if entry["what"] == "probe"]
    again = [
        f"size {probe.result.micro_batch_size}, recorded as probe {probe.ordinal}, was run again"
        for probe in probes
        if probe.result.outcome is not Outcome.LOST
        for entry in started
        if entry["size"] == probe.result.micro_batch_size and entry["at"] > probe.recorded_at.timestamp()
    ]
    verdict.wrong.extend(again)
    return {
        "equal": found is not None and decision(found) == reference.decision,
        "recorded": [f"{it.result.micro_batch_size} {it.result.outcome}" for it in probes],
        "probes_started": [entry["size"] for entry in started],
        "recorded_and_run_again": len(again),
    }


def _judge_job(ended: Job, client: Client, reference: Reference, verdict: Verdict) -> dict[str, Any]:
    verdict.check(ended.result is not None, f"it ended as {ended.state}: {ended.problem}")
    stated = ended.result.weights_sha256 if ended.result else None
    weights = RunPaths(Path(ended.directory)).weights if ended.directory else None
    written = hashlib.sha256(weights.read_bytes()).hexdigest() if weights and weights.exists() else None
    equal = stated == written == reference.weights_sha256
    verdict.check(equal, f"other weights: {stated} stated, {written} written; {ended.problem}")
    told = [event.progress.update for event in client.jobs.events(ended.id) if event.progress is not None]
    verdict.check(told == list(range(1, TRAINING.updates + 1)), f"updates told: {told}")
    return {"equal": equal, "resumed_from": ended.result.resumed_from if ended.result else None}


def _judge_processes(deployment: Deployment, since: float, struck: Struck | None, verdict: Verdict) -> None:
    verdict.check(deployment.idle(), "something still works on the device after the end")
    verdict.check(deployment.gone_seconds() is not None, f"processes are left: {deployment.strays()}")
    if struck is not None:
        verdict.check(not struck.strays, f"processes outlived what started them: {struck.strays}")
    together = [entry for entry in deployment.journal(since) if not entry["alone"]]
    verdict.check(not together, f"two at once on the device: {together}")
