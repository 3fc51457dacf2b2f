"""Single probes of programs, each in fresh processes, and the budget under which a known size is the largest."""

from collections.abc import Iterable
from typing import Any

from batchwright.commands.command_supervisor import CommandSupervisor
from batchwright.driving.foreground import run_tuning
from batchwright.hardware.inventory import find_device
from batchwright.schemas.base import parse_document
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import ProbeRequest, TuningRequest
from batchwright.schemas.results import Outcome, ProbeResult
from tests.commands.program_list import Program

MICRO_BATCHES = 2
"""In an update of a probe, as in those of a search."""
EFFECTIVE_BATCH_SIZE = 120
"""Samples of an update, in a tuning."""


def probe_request(
    program: Program,
    size: int,
    limit_bytes: int | None = None,
    timeout_seconds: float = 300.0,
    **fields: Any,
) -> ProbeRequest:
    """The request of one probe of a program."""
    data: dict[str, Any] = {
        "spec": program.spec(),
        "micro_batch_size": size,
        "samples_per_window": MICRO_BATCHES * size,
        "device": "cpu",
        "limit_bytes": limit_bytes,
        "timeout_seconds": timeout_seconds,
        "runs_plan": True,
        **fields,
    }
    return ProbeRequest.model_validate(data)


def probe(program: Program, size: int, limit_bytes: int | None = None, **fields: Any) -> ProbeResult:
    """One probe of a program, in a fresh process as a plan is run; with ``runs_plan=False``, forked after imports."""
    request = probe_request(program, size, limit_bytes, **fields)
    with CommandSupervisor(find_device(request.device)) as supervisor:
        return supervisor.run(request)


def peak_bytes(program: Program, size: int) -> int:
    """The peak of a probe without a limit, of the process with the highest."""
    result = probe(program, size)
    assert result.outcome is Outcome.FIT, result
    assert result.process_peak_bytes is not None
    return result.process_peak_bytes


def budget_for(program: Program, size: int) -> int:
    """The budget half-way between the peaks of ``size`` samples and of one more."""
    return (peak_bytes(program, size) + peak_bytes(program, size + 1)) // 2


def scan(program: Program, sizes: Iterable[int], limit_bytes: int) -> dict[int, Outcome]:
    """The outcome of each size under a limit, in the order given and without a search."""
    return {size: probe(program, size, limit_bytes).outcome for size in sizes}


def tune_program(program: Program, limit_bytes: int, **fields: Any) -> Recommendation:
    """Tune a program, on the CPU unless another device is named, over every size and not only those that divide."""
    data = {"device": "cpu", "memory_limit_bytes": limit_bytes, "memory_margin": 0.0, "uniform_only": False, **fields}
    request = parse_document(
        TuningRequest,
        {"spec": program.spec(), "effective_batch_size": EFFECTIVE_BATCH_SIZE, **data},
        "arguments",
    )
    return run_tuning(request)
