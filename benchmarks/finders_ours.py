"""Ours: python benchmarks/finders_ours.py command|served REQUEST.json DIARY. Started by finders.py. No torch.

As one command, the fork server is started cold, and its imports count. Served, it runs already, with what the workload
needs imported, as in a service's worker that had such a model before.
"""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from finders_trials import Diary, Outcome
from rich.console import Console

from tuner.cli.running import tune
from tuner.errors import BatchwrightError
from tuner.fingerprint import installed_versions
from tuner.memory.inventory import find_device
from tuner.probing.supervisor import ProbeSupervisor
from tuner.requests import TuningRequest
from tuner.results import Outcome as ProbeOutcome
from tuner.results import Recommendation
from tuner.tuning import Tuning, look_ahead

OUTCOMES: dict[ProbeOutcome, Outcome] = {ProbeOutcome.FIT: "fit", ProbeOutcome.OOM: "oom"}


def command(request: TuningRequest, _diary: Diary) -> Recommendation:
    """``batchwright tune``."""
    return tune(request, Console(stderr=True))


def served(request: TuningRequest, diary: Diary) -> Recommendation:
    """What a worker does whose fork server has had such a workload."""
    device = find_device(request.device)
    with ProbeSupervisor(device) as runner:
        runner.check(request)
        diary.ready()
        began = time.monotonic()
        tuning = Tuning(request, device, environment=runner.environment(), versions=installed_versions())
        look_ahead(tuning, runner.check, runner.expect)
        while (probe := tuning.next_probe()) is not None:
            tuning.record(runner.run(probe))
        return tuning.recommendation(
            identifier="rec_served", created_at=datetime.now(UTC), total_seconds=time.monotonic() - began
        )


WAYS = {"command": command, "served": served}


def main(way: str, request_path: Path, diary: Diary) -> None:
    """Tune; write down the probes and the answer."""
    request = TuningRequest.model_validate_json(request_path.read_bytes())
    try:
        found = WAYS[way](request, diary)
    except BatchwrightError as error:
        diary.failed(f"{type(error).__name__}: {error}")
        return
    for probe in found.evidence.probes:
        diary.tried(probe.micro_batch_size, OUTCOMES.get(probe.outcome, "error"), probe.seconds.total)
    diary.answered(found.micro_batch_size or 0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Diary(Path(sys.argv[3])))
