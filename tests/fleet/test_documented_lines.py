"""The lines with which docs/clusters.md goes from one host to a cluster, run on a real Ray and a real Slurm."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.exports.test_real_launchers import free_port
from tests.fleet.conftest import environment_of
from tests.fleet.work import Dispatching
from tests.support.exports.slurm_cluster import Slurm
from tests.support.paths import ROOT
from tests.support.service.processes import LISTENS, processes_with, spoken

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(1800)]

PROGRAMS = Path(sys.executable).parent
_URL = "postgresql://batchwright:PASSWORD@db/batchwright"
_WITH_BASH = "import os, sys; os.execvp('bash', ['bash', '-euc', sys.argv[1]])"


def documented(heading: str, replaced: Mapping[str, str]) -> str:
    """The block of a section, with the names of its hosts and folders replaced by those of the test."""
    page = (ROOT / "docs" / "clusters.md").read_text()
    section = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    found = re.search(r"```bash\n(.*?)```", section, re.DOTALL)
    assert found is not None, heading
    lines = found[1]
    for name, value in replaced.items():
        assert name in lines, name
        lines = lines.replace(name, value)
    *first, last = lines.strip().splitlines()
    return "\n".join([*first, f"exec {last}"])


@contextmanager
def typed(lines: str, folder: Path, environment: Mapping[str, str]) -> Iterator[Dispatching]:
    """A service that is started by lines of a shell. Whatever they leave is killed."""
    settings = {"BATCHWRIGHT_DATA_DIR": str(folder), "BATCHWRIGHT_PORT": "0", "TYPED_FOR": str(folder), **environment}
    try:
        with spoken(["-c", _WITH_BASH, lines], LISTENS, settings) as process:
            assert process.url, "".join(process.lines)
            service = Dispatching(process, folder / "runs")
            yield service
            service.api.http.close()
            assert process.end(signal.SIGTERM) == 0
    finally:
        for left in processes_with(f"TYPED_FOR={folder}\0"):
            with suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)


def assert_tunes(service: Dispatching) -> None:
    """Tune once, and find that something fits."""
    path = service.submit_tuning(32)
    service.answer(path)
    assert service.api.get(path)["recommendation"]["largest_micro_batch_size"] > 1


def test_the_lines_for_ray(database: str, tmp_path: Path) -> None:
    """A node joins with its CPU, and the service dispatches a tuning to it."""
    folder, port, dashboard = tmp_path / "ray", free_port(), free_port()
    variables = {
        "TYPED_FOR": str(folder),
        "BATCHWRIGHT_DATABASE_URL": database,
        "RAY_USAGE_STATS_ENABLED": "0",
        "PATH": f"{PROGRAMS}:{os.environ['PATH']}",
    }
    head = ("--head", f"--port={port}", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", "--num-cpus=0")
    lines = documented(
        "From one host to Ray",
        {_URL: database, "--address=head:6379": f"--address=127.0.0.1:{port}", "head:8265": f"127.0.0.1:{dashboard}"},
    )
    try:
        command = [str(PROGRAMS / "ray"), "start", *head, "--dashboard-agent-listen-port=0"]
        subprocess.run(command, env=os.environ | variables, check=True, timeout=300)
        with typed(lines, folder, variables) as service:
            service.wait_for_devices(1)
            assert_tunes(service)
    finally:
        for left in processes_with(f"TYPED_FOR={folder}\0"):
            with suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)


def test_the_lines_for_slurm(slurm: Slurm, database: str, tmp_path: Path) -> None:
    """The service submits a tuning to the partition, whose nodes run the program of the variable."""
    replaced = {
        _URL: database,
        "SBATCH_PARTITION=gpu": "SBATCH_PARTITION=team-a",
        "/shared/batchwright/bin/": f"{PROGRAMS}/",
        "/shared/batchwright/jobs": str(tmp_path / "jobs"),
    }
    lines = documented("From one host to Slurm", replaced)
    with slurm.started(), typed(lines, tmp_path / "service", environment_of(slurm)) as service:
        service.wait_for_devices(len(slurm.nodes))
        assert_tunes(service)
