"""Probes of several ranks: all of them run under a budget each, or one runs in a simulated group."""

import os
from pathlib import Path
from typing import Any

import pytest

from batchwright.hardware.inventory import cpu
from batchwright.planning.session import TuningSession
from batchwright.probing.child.ranks import merged_result, run_ranks
from batchwright.probing.protocol import ProbePaths
from batchwright.probing.supervisor import ProbeSupervisor
from batchwright.schemas.requests import ProbeRequest
from batchwright.schemas.results import Outcome, Phase, ProbeResult
from batchwright.schemas.workload import WorkloadSpec, parse_spec
from batchwright.training.accumulation.collectives import RENDEZVOUS
from tests.probing.test_supervisor import MIB, misbehaving
from tests.support.factories import CPU, gpt_spec, tuning_request

pytestmark = pytest.mark.usefixtures("forked")

ARCHITECTURE = {"name": "gpt", "layers": 1, "heads": 1, "width": 64, "vocabulary_size": 256}
LIMIT_BYTES = 16 * MIB


def spec(strategy: str, world_size: int) -> WorkloadSpec:
    """A small GPT."""
    return gpt_spec(
        model={"kind": "reference", "architecture": ARCHITECTURE},
        batch={"sequence_length": 128},
        parallelism={"world_size": world_size, "strategy": strategy},
    )


def probe(workload: WorkloadSpec, size: int, ranks: int, **changes: Any) -> ProbeRequest:
    """A probe on the CPU, of so many real ranks."""
    fields: dict[str, Any] = {"limit_bytes": LIMIT_BYTES, "timeout_seconds": 300.0, "rank_devices": ("cpu",) * ranks}
    return ProbeRequest(
        spec=workload, micro_batch_size=size, samples_per_window=2 * size, device="cpu", **fields | changes
    )


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        pytest.param("ddp", 2, marks=pytest.mark.thorough),
        pytest.param("fsdp", 2, marks=pytest.mark.thorough),
        pytest.param("ddp", 4, marks=pytest.mark.fleet),
        pytest.param("fsdp", 4, marks=pytest.mark.fleet),
    ],
)
def test_the_largest_size_of_real_ranks_is_that_of_a_scan(
    supervisor: ProbeSupervisor, strategy: str, ranks: int
) -> None:
    """A tuning finds the size after which every probe runs out of memory, on whichever rank."""
    request = tuning_request(
        spec(strategy, ranks), 64 * ranks, memory_limit_bytes=LIMIT_BYTES, memory_margin=0.0, max_micro_batch_size=32
    )
    tuning = TuningSession(request, cpu(), environment=supervisor.environment(), versions={})
    assert tuning.conditions.rank_devices == ("cpu",) * ranks
    while (wanted := tuning.next_probe()) is not None:
        tuning.record(supervisor.run(wanted))
    proof = tuning.proof_of_search()
    distances = {"ddp": (2, 3), "fsdp": (proof.fits // 2, proof.fits)}[strategy]  # sharded ranks differ by up to 1 MiB
    sizes = (proof.fits - distances[0], proof.fits + distances[1])
    scan = {size: supervisor.run(probe(spec(strategy, ranks), size, ranks)) for size in sizes}
    assert proof.stopped_by == "oom"
    expected = {size: Outcome.FIT if size <= proof.fits else Outcome.OOM for size in scan}
    assert {size: result.outcome for size, result in scan.items()} == expected
    assert all(len(result.ranks) == ranks for result in scan.values())
    fit = scan[min(scan)]
    assert fit.held_bytes == max(rank.held_bytes or 0 for rank in fit.ranks)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_run_under_a_budget_each(supervisor: ProbeSupervisor, strategy: str) -> None:
    """Two samples fit on both ranks, and the largest peak counts. With 64 a rank runs out of memory."""
    fit, oom = (supervisor.run(probe(spec(strategy, 2), size, 2)) for size in (2, 64))
    assert [rank.outcome for rank in fit.ranks] == [Outcome.FIT, Outcome.FIT]
    assert fit.held_bytes == max(rank.held_bytes or 0 for rank in fit.ranks)
    assert (fit.outcome, oom.outcome) == (Outcome.FIT, Outcome.OOM)
    assert len(oom.ranks) == 2


def test_a_rank_that_runs_out_of_memory_ends_the_others(supervisor: ProbeSupervisor) -> None:
    """The others would wait for ever: they are ended, and the outcome is an OOM."""
    found = supervisor.run(probe(misbehaving("fail on the second rank"), 4, 2))
    assert found.outcome is Outcome.OOM, found.message
    assert [rank.outcome for rank in found.ranks] == [Outcome.LOST, Outcome.OOM]


def test_a_rank_that_crashes_ends_the_others(supervisor: ProbeSupervisor) -> None:
    """The crash is the probe's, as with one rank."""
    found = supervisor.run(probe(misbehaving("fail on the second rank", "killed"), 4, 2))
    assert found.outcome is Outcome.ERROR
    assert "SIGSEGV" in f"{found.message} {found.error_type}"


def test_one_rank_in_a_simulated_group_holds_a_shard(supervisor: ProbeSupervisor) -> None:
    """Its memory is below that of the whole model."""
    wide = {"model": {"kind": "reference", "architecture": ARCHITECTURE | {"layers": 4, "width": 256}}}
    sharded, alone = (parse_spec(spec("fsdp", ranks).model_dump(mode="json") | wide) for ranks in (4, 1))
    simulated, whole = (supervisor.run(probe(found, 1, 0, limit_bytes=400 * MIB)) for found in (sharded, alone))
    assert (simulated.outcome, simulated.simulated_ranks, whole.simulated_ranks) == (Outcome.FIT, 4, None)
    assert simulated.held_bytes is not None
    assert whole.held_bytes is not None
    assert simulated.held_bytes < 0.8 * whole.held_bytes


@pytest.mark.thorough
def test_one_rank_in_a_simulated_group_has_real_shards(supervisor: ProbeSupervisor) -> None:
    """Its memory is that of a rank among real ones, and below that of the whole model."""
    wide = {"model": {"kind": "reference", "architecture": ARCHITECTURE | {"layers": 4, "width": 256}}}
    sharded, alone = (parse_spec(spec("fsdp", ranks).model_dump(mode="json") | wide) for ranks in (4, 1))
    simulated = supervisor.run(probe(sharded, 1, 0, limit_bytes=400 * MIB))
    real = supervisor.run(probe(sharded, 1, 4, limit_bytes=400 * MIB))
    whole = supervisor.run(probe(alone, 1, 0, limit_bytes=400 * MIB))
    assert (simulated.outcome, simulated.simulated_ranks, real.simulated_ranks) == (Outcome.FIT, 4, None)
    assert simulated.held_bytes is not None
    assert real.held_bytes is not None
    assert whole.held_bytes is not None
    assert simulated.held_bytes == pytest.approx(real.held_bytes, rel=0.1)
    assert simulated.resident_bytes is not None
    assert simulated.held_bytes < 0.8 * whole.held_bytes


def test_each_rank_is_told_its_place(tmp_path: Path) -> None:
    """Its number, how many there are, where they meet, and its device."""

    def report(paths: ProbePaths, request: ProbeRequest) -> None:
        told = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", RENDEZVOUS)]
        (paths.directory / "told").write_text(" ".join([*told, request.device]))
        paths.write_result(ProbeResult(micro_batch_size=1, accumulates=True, outcome=Outcome.FIT, phase=Phase.DONE))

    request = probe(spec("ddp", 2), 1, 2, rank_devices=("cuda:0", "cuda:1"))
    run_ranks(ProbePaths(tmp_path), request, report)
    told = [(tmp_path / f"rank-{rank}" / "told").read_text() for rank in range(2)]
    assert told == [f"{rank} {rank} 2 {tmp_path / 'rendezvous'} cuda:{rank}" for rank in range(2)]


def test_the_worst_rank_decides() -> None:
    """An OOM goes before errors, an error before those that it caused, and among fits the largest peak."""

    def result(outcome: Outcome, held: int = 1, error_type: str | None = None) -> ProbeResult:
        return ProbeResult(
            micro_batch_size=1, accumulates=True, outcome=outcome, phase="done", process_peak_bytes=held,
            error_type=error_type,
        )  # fmt: skip

    peer = result(Outcome.ERROR, error_type="batchwright.errors.PeerError")
    assert merged_result([peer, result(Outcome.ERROR), result(Outcome.OOM)]).outcome is Outcome.OOM
    assert merged_result([peer, result(Outcome.ERROR)]).error_type is None
    assert merged_result([peer, None]).error_type == "batchwright.errors.PeerError"
    fits = merged_result([result(Outcome.FIT, 5), result(Outcome.FIT, 7)])
    assert (fits.process_peak_bytes, [rank.held_bytes for rank in fits.ranks]) == (7, [5, 7])


def test_ranks_run_where_there_is_memory_for_each() -> None:
    """Otherwise one stands for all; a fingerprint tells both apart."""
    request = tuning_request(spec("ddp", 2), memory_limit_bytes=CPU.total_bytes // 2)
    small = CPU.model_copy(update={"total_bytes": CPU.total_bytes - 2})
    tunings = [TuningSession(request, CPU, environment={}, versions={})]
    tunings.append(
        TuningSession(
            request.model_copy(update={"memory_limit_bytes": small.total_bytes}), small, environment={}, versions={}
        )
    )
    assert [tuning.conditions.rank_devices for tuning in tunings] == [("cpu", "cpu"), ()]
    assert tunings[0].conditions.request_fingerprint != tunings[1].conditions.request_fingerprint
