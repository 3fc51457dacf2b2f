"""Asking for an estimate from a terminal."""

from __future__ import annotations

from rich.console import Console, RenderableType

from tuner.cli.estimate_display import estimate_panel, estimate_table, verdict_asked
from tuner.estimation import client
from tuner.schemas.estimates import Estimate, EstimateRequest, Verdict


def estimate(request: EstimateRequest, console: Console) -> Estimate:
    """The answer; on a terminal ``console`` shows meanwhile that something is going on.

    Raises:
        SpecError, PlanError, WorkloadError: when the workload cannot be built or planned.
        EstimateError: when it cannot be traced, or not in time.
    """
    with console.status("tracing updates, without a GPU"):
        return client.estimate(request)


def in_words(found: Estimate, request: EstimateRequest) -> RenderableType:
    """The answer as people read it: one GPU in detail, several side by side."""
    return estimate_panel(found, request) if len(found.gpus) == 1 else estimate_table(found, request)


def fits_nowhere(found: Estimate, request: EstimateRequest) -> bool:
    """Whether what was asked, this micro-batch or any, fits on none of the GPUs."""
    return all(verdict_asked(it, request) is Verdict.DOES_NOT_FIT for it in found.gpus)
