"""Ours: python benchmarks/finders_ours.py command|quick|served REQUEST.json DIARY. Started by finders.py. No torch.

As one command it is ``batchwright tune``, with all that it imports, and ``quick`` is that with ``--quick``. Served, the
fork server runs already, with what the workload needs imported, as in a service's worker that had such a model before.
"""

import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from finders_trials import OUTCOMES, Diary

from batchwright.cli.main import main as batchwright


def command(request_path: Path, diary: Diary, *flags: str) -> dict[str, Any]:
    """Run ``batchwright tune`` with the options of the request, and with more flags.

    Raises:
        FileNotFoundError: when it gave no answer; it has said why.
    """
    request = json.loads(request_path.read_text())
    spec, answer = diary.path.with_suffix(".spec.json"), diary.path.with_suffix(".answer.json")
    spec.write_text(json.dumps(request["spec"]))
    numbers = ("effective_batch_size", "memory_margin", "granularity", "max_micro_batch_size", "device")
    given = {name: request[name] for name in numbers if request[name] is not None}
    given["memory_limit"] = request["memory_limit_bytes"]
    options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    options += ["--allow-batch-coupling"] if request["allow_batch_coupling"] else []
    sys.argv = ["batchwright", "tune", str(spec), *options, *flags, "--output", str(answer)]
    with suppress(SystemExit):
        batchwright()
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def quick(request_path: Path, diary: Diary) -> dict[str, Any]:
    """Run ``batchwright tune --quick``: one plan that the estimate is sure of.

    Raises:
        FileNotFoundError: when it gave no answer; it has said why.
    """
    return command(request_path, diary, "--quick")


def served(request_path: Path, diary: Diary) -> dict[str, Any]:
    """What a worker does whose fork server has had such a workload.

    Raises:
        BatchwrightError: when there is no answer.
    """
    from datetime import UTC, datetime  # noqa: PLC0415 - the command imports what it needs by itself

    from batchwright.driving.loop import drive  # noqa: PLC0415 - as above
    from batchwright.hardware.inventory import find_device  # noqa: PLC0415 - as above
    from batchwright.planning.fingerprint import installed_versions  # noqa: PLC0415 - as above
    from batchwright.planning.session import TuningSession  # noqa: PLC0415 - as above
    from batchwright.probing.supervisor import ProbeSupervisor  # noqa: PLC0415 - as above
    from batchwright.schemas.requests import TuningRequest  # noqa: PLC0415 - as above

    request = TuningRequest.model_validate_json(request_path.read_bytes())
    device = find_device(request.device)
    with ProbeSupervisor(device) as runner:
        runner.check(request)
        diary.ready()
        began = time.monotonic()
        tuning = TuningSession(request, device, environment=runner.environment(), versions=installed_versions())
        drive(tuning, runner)
        found = tuning.recommendation(
            identifier="rec_served", created_at=datetime.now(UTC), total_seconds=time.monotonic() - began
        )
    return found.model_dump(mode="json")


WAYS = {"command": command, "quick": quick, "served": served}


def main(way: str, request_path: Path, diary: Diary) -> None:
    """Tune; write down the probes and the answer."""
    try:
        found = WAYS[way](request_path, diary)
    except Exception as error:
        diary.failed(f"{type(error).__name__}: {error}")
        raise
    for probe in found["evidence"]["probes"]:
        diary.tried(probe["micro_batch_size"], OUTCOMES.get(probe["outcome"], "error"), probe["seconds"]["total"])
    plan = found["plan"]
    diary.answered(
        found["evidence"]["proof"]["fits"], plan and max(size for rank in plan["micro_batch_sizes"] for size in rank)
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Diary(Path(sys.argv[3])))
