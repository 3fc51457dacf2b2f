"""Ours, as one command runs it: python benchmarks/finders_ours.py REQUEST.json DIARY. Started by finders.py. No torch.

The fork server is started cold, and its imports count.
"""

from __future__ import annotations

import sys
from pathlib import Path

from finders_trials import Diary, Outcome
from rich.console import Console

from tuner.cli.running import tune
from tuner.errors import BatchwrightError
from tuner.requests import TuningRequest
from tuner.results import Outcome as ProbeOutcome

OUTCOMES: dict[ProbeOutcome, Outcome] = {ProbeOutcome.FIT: "fit", ProbeOutcome.OOM: "oom"}


def main(request_path: Path, diary: Diary) -> None:
    """Tune; write down the probes and the answer."""
    request = TuningRequest.model_validate_json(request_path.read_bytes())
    try:
        found = tune(request, Console(stderr=True))
    except BatchwrightError as error:
        diary.failed(f"{type(error).__name__}: {error}")
        return
    for probe in found.evidence.probes:
        diary.tried(probe.micro_batch_size, OUTCOMES.get(probe.outcome, "error"), probe.seconds.total)
    diary.answered(found.micro_batch_size or 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Diary(Path(sys.argv[2])))
