"""A tuning that waits for its estimate as long as that takes: `patient_tuning.py SPEC EFFECTIVE_BATCH_SIZE`.

How many probes the command takes depends on the load of the host, because it waits half a minute for the estimate that
leads its search.
"""

import sys
import uuid
from datetime import UTC, datetime
from pathlib import Path

from batchwright.driving.loop import drive
from batchwright.hardware.inventory import find_device
from batchwright.planning.fingerprint import installed_versions
from batchwright.planning.session import TuningSession
from batchwright.probing.supervisor import ProbeSupervisor
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import TuningRequest
from batchwright.schemas.workload import load_spec

_WAIT_SECONDS = 380.0


def tuned(spec: Path, effective_batch_size: int) -> Recommendation:
    """The recommendation of `batchwright tune` on the first card."""
    device = find_device("cuda:0")
    request = TuningRequest(spec=load_spec(spec), effective_batch_size=effective_batch_size, device=device.id)
    with ProbeSupervisor(device, estimate_wait_seconds=_WAIT_SECONDS) as runner:
        tuning = TuningSession(request, device, environment=runner.environment(), versions=installed_versions())
        drive(tuning, runner)
    return tuning.recommendation(identifier=uuid.uuid4().hex, created_at=datetime.now(UTC), total_seconds=0.0)


if __name__ == "__main__":
    sys.stdout.write(tuned(Path(sys.argv[1]), int(sys.argv[2])).model_dump_json())
