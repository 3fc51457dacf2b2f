"""The job of a command by `batchwright serve`: its workers and the service are killed, and its variables are kept."""

import os
import signal
from pathlib import Path

import pytest

from batchwright.client import Client
from batchwright.client.documents.states import State
from batchwright.hardware.inventory import cpu
from batchwright.schemas.recommendation import Recommendation
from batchwright_service.settings import Settings
from tests.support.service.processes import (
    LISTENS,
    PATIENCE_SECONDS,
    are_gone,
    children_of,
    spoken,
    wait_until,
)
from tests.support.service.registered import commands_file, recommended

pytestmark = pytest.mark.usefixtures("starts")

LASTS = """
import os, signal, subprocess, sys, time
from pathlib import Path
print("variables", *sorted(os.environ), flush=True)
folder = Path(sys.argv[1])
number = len(list(folder.glob("start-*"))) + 1
child = None
if number < 3:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
partial = folder / "partial"
partial.write_text(f"{os.getpid()} {child and child.pid}")
partial.rename(folder / f"start-{number}")
if number < 3:
    time.sleep(600)
print("went on from", number)
"""
HIDDEN = "hidden-from-commands"


def test_a_job_survives_its_worker_and_its_service(tmp_path: Path) -> None:
    """The command is started anew in its folder after each, once nothing of it is left; it sees no setting."""
    file = commands_file(
        tmp_path / "operator", LASTS, argv=["python", "program.py", "{output_dir}", "{micro_batch_size}"], arguments={}
    )
    data = tmp_path / "data"
    variables = {
        "BATCHWRIGHT_DATA_DIR": str(data),
        "BATCHWRIGHT_DATABASE_URL": f"sqlite:///{tmp_path / HIDDEN}.db",
        "BATCHWRIGHT_API_KEY": HIDDEN,
        "BATCHWRIGHT_COMMANDS": str(file),
        "BATCHWRIGHT_LEASE_SECONDS": "6",
        "OF_THE_OPERATOR": "for commands",
    }
    serve = ["-m", "batchwright", "serve", "--port", "0"]

    def started(number: int) -> set[int]:
        (start,) = wait_until_found(data, number)
        return {int(process) for process in start.read_text().split()}

    with spoken(serve, LISTENS, variables) as served, Client(served.url, api_key="") as client:
        found = Recommendation.model_validate(recommended(cpu()))
        job_id = client.jobs.submit(found).id
        first = started(1)
        descendants = children_of(served.process.pid)
        assert descendants > first
        assert not [each for each in descendants if HIDDEN in Path(f"/proc/{each}/environ").read_text()]
        direct = Path(f"/proc/{served.process.pid}/task").glob("*/children")
        (worker,) = descendants & {int(each) for path in direct for each in path.read_text().split()}
        os.kill(worker, signal.SIGKILL)
        second = started(2)
        assert are_gone(first)
        served.end(signal.SIGKILL)
    with spoken(serve, LISTENS, variables) as served, Client(served.url, api_key="") as client:
        job = client.jobs.wait(job_id, PATIENCE_SECONDS)
        log = client.jobs.logs(job_id).splitlines()
    assert are_gone(second)
    assert (job.state, job.attempts) == (State.SUCCEEDED, 3)
    assert log[-1] == "went on from 3"
    settings = {f"BATCHWRIGHT_{name.upper()}" for name in Settings.model_fields} | {"BATCHWRIGHT_API_KEY"}
    for line in log[:3]:
        names = set(line.split())
        assert names >= {"variables", "OF_THE_OPERATOR", "BATCHWRIGHT_MICRO_BATCH_SIZE"}
        assert not names & settings


def wait_until_found(data: Path, number: int) -> list[Path]:
    """Wait for the file that the command writes at a start."""
    pattern = f"runs/*/output/start-{number}"
    wait_until(lambda: any(data.glob(pattern)))
    return list(data.glob(pattern))
