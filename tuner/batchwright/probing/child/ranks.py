"""Run all ranks of a probe: a process for each, forked by the probe's own, which ends them together.

A rank that fails ends the others, which wait for it in a collective: the backend notices a closed connection at once
on the CPU, and not always on cards. The outcome of the probe is that of the worst rank.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from batchwright.probing.protocol import ProbePaths
from batchwright.schemas.requests import ProbeRequest
from batchwright.schemas.results import Outcome, Phase, ProbeResult, RankResult
from batchwright.system.processes import fork
from batchwright.training.accumulation.collectives import RENDEZVOUS

_PEERS_GRACE_SECONDS = 2.0
"""Time for the other ranks to report their own end after one has failed, before they are killed."""
_POLL_SECONDS = 0.02
_PEER_ERROR = "batchwright.errors.PeerError"
_FAILURES = (Outcome.OOM, Outcome.INVALID_SIZE, Outcome.ERROR)
"""Outcomes of a rank that are one of the probe, the strongest first: an OOM on one rank is an error on the others."""

RunRank = Callable[[ProbePaths, ProbeRequest], None]
"""Runs one rank, and writes its result."""


def run_ranks(paths: ProbePaths, request: ProbeRequest, run_rank: RunRank) -> None:
    """Run every rank of a probe, and write the result of the worst.

    A rank that a signal ends without a result ends this process by the same signal, as if it were the probe's own.
    """
    folders = [ProbePaths(paths.directory / f"rank-{rank}") for rank in range(len(request.rank_devices))]
    ranks: dict[int, int] = {}
    try:
        for rank, folder in enumerate(folders):
            folder.directory.mkdir()
            ranks[_start(rank, paths, folder, request, run_rank)] = rank
        paths.record_phase(Phase.START)
        statuses = _await_all(ranks, folders)
    except BaseException:
        _kill(ranks)
        raise
    _die_as_a_rank_did(statuses, folders)
    for phase, at in folders[0].recorded_phases()[1:]:
        paths.record_phase(phase, at)
    paths.write_result(merged_result([_result(folder) for folder in folders]))


def _start(rank: int, paths: ProbePaths, folder: ProbePaths, request: ProbeRequest, run_rank: RunRank) -> int:
    """Fork the process of a rank, and return its id."""
    count = len(request.rank_devices)
    rendezvous = str(paths.directory / "rendezvous")
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), RENDEZVOUS: rendezvous}

    def run() -> None:
        os.environ.update(variables)
        run_rank(folder, request.model_copy(update={"device": request.rank_devices[rank]}))

    return fork(run)


def _await_all(ranks: dict[int, int], folders: Sequence[ProbePaths]) -> dict[int, int]:
    """Wait for every rank, and return their wait statuses; after one has failed, end the others."""
    running, statuses = dict(ranks), {}
    deadline: float | None = None
    while running:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process in running:
            rank = running.pop(process)
            statuses[rank] = status
            found = _result(folders[rank])
            if deadline is None and (found is None or found.outcome is not Outcome.FIT):
                deadline = time.monotonic() + _PEERS_GRACE_SECONDS
        elif deadline is not None and time.monotonic() > deadline:
            _kill(running)
            for process_left, rank in running.items():
                os.waitpid(process_left, 0)
                statuses[rank] = 0  # this process ended it
            running.clear()
        else:
            time.sleep(_POLL_SECONDS)
    return statuses


def _kill(ranks: dict[int, int]) -> None:
    for process in ranks:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _die_as_a_rank_did(statuses: dict[int, int], folders: Sequence[ProbePaths]) -> None:
    """End this process as the first rank that ended without a result, unless another rank's result is the cause."""
    results = [_result(folder) for folder in folders]
    if any(result is not None and result.outcome in _FAILURES and not _is_of_peer(result) for result in results):
        return
    for rank, status in sorted(statuses.items()):
        if results[rank] is None and os.WIFSIGNALED(status):
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
            os.kill(os.getpid(), os.WTERMSIG(status))


def _result(folder: ProbePaths) -> ProbeResult | None:
    """Return the result that a rank has left."""
    return ProbeResult.model_validate_json(folder.result.read_bytes()) if folder.result.exists() else None


def _is_of_peer(result: ProbeResult) -> bool:
    return result.error_type == _PEER_ERROR


def merged_result(results: Sequence[ProbeResult | None]) -> ProbeResult:
    """Return the result of the worst rank, with those of all.

    Raises:
        ValueError: when no rank has left a result.
    """
    found = [result for result in results if result is not None]
    if not found:
        raise ValueError("no rank has left a result")
    ranks = tuple(
        RankResult(
            rank=rank,
            outcome=Outcome.LOST if result is None or _is_of_peer(result) else result.outcome,
            held_bytes=None if result is None else result.held_bytes,
        )
        for rank, result in enumerate(results)
    )
    return min(found, key=_badness).model_copy(update={"ranks": ranks})


def _badness(result: ProbeResult) -> tuple[int, int]:
    """Order results: the strongest failure first, then what other ranks' ends caused, then fits by their memory."""
    if result.outcome is Outcome.FIT:
        return len(_FAILURES) + 1, -(result.held_bytes or 0)
    return (len(_FAILURES) if _is_of_peer(result) else _FAILURES.index(result.outcome)), -(result.held_bytes or 0)
