"""The work of ``fleet_chaos.py``: small tunings and jobs of mixed hardware, and how they must end."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

from chaos_rounds import MIB, decision
from fleet_chaos_service import Service

from batchwright.client.documents.work import Job, Tuning
from batchwright.hardware.inventory import cpu
from batchwright.schemas.requests import TrainingRequest, TuningRequest
from batchwright.schemas.workload import parse_spec
from batchwright.training.launching.run_directory import RunPaths

MODELS = {"short": (128, 64, 84), "long": (256, 64, 88), "wide": (128, 128, 81)}
"""Sequence length and width of the GPTs, and a memory limit in MiB about half-way between what two sizes take, so that
processes that differ by a MiB give one answer."""
RUNS = {"short": ((1, 1), (1, 2)), "long": ((2, 1), (1, 2)), "wide": ((1, 1), (2, 1))}
"""Ranks on each host, and hosts, of the jobs of each model."""
A_PRODUCT = "a product"
UPDATES = 20
"""A process takes about as long to start."""


@dataclass(frozen=True)
class Kind:
    """Work whose every piece must end alike."""

    work: str
    """``tuning`` or ``job``."""
    model: str
    place: str
    """The hardware that it names, or the ranks and hosts that it takes."""

    @property
    def answer(self) -> str:
        """The fields that the answer may depend on: for a tuning the model, for a job also the number of ranks."""
        ranks = "" if self.work == "tuning" else f", {_ranks(self.place)} ranks"
        return f"{self.work} {self.model}{ranks}"


@dataclass
class References:
    """Undisturbed answers by ``Kind.answer``, and the recommendations that jobs follow."""

    answers: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    recommendations: dict[str, list[str]] = field(default_factory=dict)
    """Ids by model, one for each kind of hardware on which the model was tuned; the last is of the largest nodes."""


def places(large_bytes: int | None) -> dict[str, dict[str, Any]]:
    """The hardware that tunings name: a device, a product, and nodes with the most memory where they differ."""
    name = cpu().name
    found: dict[str, dict[str, Any]] = {"device cpu": {"device": "cpu"}, A_PRODUCT: {"hardware": {"product": name}}}
    if large_bytes is not None:
        found["a large node"] = {"hardware": {"product": name, "min_memory_bytes": large_bytes}}
    return found


def request(model: str, place: dict[str, Any]) -> TuningRequest:
    """A tuning of a GPT, whose largest micro-batch lies between 1 and the effective batch."""
    length, width, limit = MODELS[model]
    architecture = {"name": "gpt", "layers": 2, "heads": 4, "width": width, "vocabulary_size": 4096, "dropout": 0.1}
    spec = parse_spec(
        {
            "model": {"kind": "reference", "architecture": architecture},
            "batch": {"sequence_length": length},
            "data": {"kind": "synthetic", "samples": 97},
        }
    )
    return TuningRequest(spec=spec, effective_batch_size=12, memory_limit_bytes=limit * MIB, **place)


def tuning_kinds(count: int, large_bytes: int | None) -> list[Kind]:
    """Tunings, each model and place in turn."""
    every = [Kind("tuning", model, place) for place, model in product(places(large_bytes), MODELS)]
    return list(islice(cycle(every), count))


def job_kinds(count: int) -> list[Kind]:
    """Jobs, each run of each model in turn."""
    every = [
        Kind("job", model, _run(*run))
        for runs in zip(*RUNS.values(), strict=True)
        for model, run in zip(RUNS, runs, strict=True)
    ]
    return list(islice(cycle(every), count))


def submit(service: Service, kind: Kind, references: References, number: int = 0) -> str:
    """Queue a piece of work; its id. Jobs of one host follow the recommendations of the model in turn."""
    if kind.work == "tuning":
        place = places(service.cluster.large_bytes)[kind.place]
        return service.client.tunings.submit(request(kind.model, place), fresh=True, labels={"kind": kind.model}).id
    ranks, nodes = _numbers(kind.place)
    known = references.recommendations[kind.model]
    chosen = known[-1] if nodes > 1 else known[number % len(known)]
    training = TrainingRequest(updates=UPDATES, checkpoint_every=4, seed=7, nodes=nodes, processes_per_node=ranks)
    return service.client.jobs.submit(chosen, training).id


def undisturbed(service: Service, jobs: int) -> References:
    """One piece of work of every kind, of which those with equal answers must agree.

    Args:
        service: the service.
        jobs: number of jobs that are to be compared; fewer than there are kinds need fewer answers.

    Raises:
        RuntimeError: when two undisturbed answers differ, or work fails.
    """
    found = References()
    named = places(service.cluster.large_bytes)
    named.pop(A_PRODUCT)  # which is any node, as the device is
    tunings = [Kind("tuning", model, place) for place, model in product(named, MODELS)]
    hardware: dict[str, dict[int, str]] = {}
    for kind, ended in _ended(service, tunings, found):
        assert isinstance(ended, Tuning)
        assert ended.recommendation is not None
        hardware.setdefault(kind.model, {})[ended.recommendation.device.total_bytes] = ended.recommendation.id
    found.recommendations = {model: [ids[size] for size in sorted(ids)] for model, ids in hardware.items()}
    for _ in _ended(service, job_kinds(min(jobs, sum(map(len, RUNS.values())))), found):
        pass
    return found


def _ended(service: Service, kinds: list[Kind], found: References) -> Iterator[tuple[Kind, Tuning | Job]]:
    queued = [(kind, submit(service, kind, found, number)) for number, kind in enumerate(kinds)]
    for kind, work_id in queued:
        ended = service.ended(work_id)
        answer = answer_of(ended)
        if found.answers.setdefault(kind.answer, answer) != answer:
            raise RuntimeError(f"undisturbed answers differ: {found.answers[kind.answer]}, {answer} ({kind})")
        if ended.started_at and ended.ended_at:
            found.seconds[f"{kind.answer}, {kind.place}"] = (ended.ended_at - ended.started_at).total_seconds()
        yield kind, ended


def answer_of(ended: Tuning | Job) -> Any:  # noqa: ANN401 - what is compared and written
    """The part of an answer that must not change: a decision without the hardware's fingerprint, or the weights.

    Raises:
        RuntimeError: when the work has failed.
    """
    if isinstance(ended, Tuning):
        if ended.recommendation is None:
            raise RuntimeError(f"{ended.id} ended as {ended.state}: {ended.problem}")
        return {name: value for name, value in decision(ended.recommendation).items() if name != "fingerprint"}
    if ended.result is None or ended.directory is None:
        raise RuntimeError(f"{ended.id} ended as {ended.state}: {ended.problem}")
    written = hashlib.sha256(RunPaths(Path(ended.directory)).weights.read_bytes()).hexdigest()
    if written != ended.result.weights_sha256:
        raise RuntimeError(f"{ended.id} states other weights than it wrote: {ended.result.weights_sha256}, {written}")
    return written


def judge(service: Service, work_id: str, kind: Kind, references: References) -> dict[str, Any]:
    """How a piece of work ended, as it is written: ``wrong`` is empty when all is well."""
    wrong: list[str] = []
    ended = (service.client.tunings if kind.work == "tuning" else service.client.jobs).get(work_id)
    if not ended.state.terminal:
        wrong.append(f"it has not ended: {ended.state}")
    else:
        try:
            answer = answer_of(ended)
        except (RuntimeError, OSError) as error:
            answer = None
            wrong.append(str(error))
        if answer is not None and answer != references.answers[kind.answer]:
            wrong.append(f"another answer: {answer}")
    if isinstance(ended, Job) and ended.state.terminal:
        told = [event.progress.update for event in service.client.jobs.events(work_id) if event.progress is not None]
        if told != list(range(1, UPDATES + 1)):
            wrong.append(f"updates told: {told}")
    return {
        "id": work_id,
        "kind": kind.answer,
        "place": kind.place,
        "state": str(ended.state),
        "attempts": ended.attempts,
        "slot": ended.slot,
        "wrong": wrong,
    }


def _run(ranks: int, hosts: int) -> str:
    return f"{hosts} x {ranks} ranks"


def _numbers(place: str) -> tuple[int, int]:
    """The ranks of each host, and the hosts."""
    hosts, ranks = place.removesuffix(" ranks").split(" x ")
    return int(ranks), int(hosts)


def _ranks(place: str) -> int:
    ranks, hosts = _numbers(place)
    return ranks * hosts
