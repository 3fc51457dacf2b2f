"""Entry of the service that schemathesis calls: a real server, store and worker around scripted probes and runs.

Thousands of made-up submissions are then answered in milliseconds, estimates too, and none starts a process. Arguments:
data folder, port.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from batchwright.schemas.estimates import Estimate, EstimateRequest, GpuEstimate, Verdict
from batchwright_service.application.estimates import EstimateCases, EstimateLimits
from batchwright_service.application.rules.policy import Policy
from batchwright_service.bootstrap import build
from batchwright_service.entrypoints.serve import serve_system
from batchwright_service.settings import Settings
from tests.support.factories import CPU
from tests.support.service.scripted import InlineExecutor, ScriptedRunner, Trainer

VERSIONS = {"torch": "2.8"}


def estimated(request: EstimateRequest, _should_stop: Callable[[], bool]) -> Estimate:
    """An answer at once: everything fits everywhere."""
    gpus = tuple(
        GpuEstimate(
            gpu=name, usable_bytes=1, feasible=Verdict.FITS, largest_micro_batch_size=1, surely_fits=1, may_fit=1
        )
        for name in request.gpus
    )
    return Estimate(decisions="cpu", parameters=1, gpus=gpus, versions=VERSIONS, seconds=0.0)


def main(data_dir: str, port: str) -> None:
    """Serve until a stop signal."""
    settings = Settings(data_dir=Path(data_dir), port=int(port), node_name="host", poll_seconds=0.05)
    runner = ScriptedRunner(37)
    system = build(settings, lambda device: InlineExecutor(device, runner, Trainer()), [CPU], VERSIONS)
    estimates = EstimateCases(estimated, Policy((), ()), VERSIONS, EstimateLimits())
    serve_system(settings, replace(system, context=replace(system.context, estimates=estimates)))


if __name__ == "__main__":
    main(*sys.argv[1:])
