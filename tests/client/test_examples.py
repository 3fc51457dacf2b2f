"""The examples that use the SDK, run as they stand against a real service."""

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from typing_extensions import override

from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.states import State
from batchwright.errors import WorkloadError
from batchwright_service.domain.key_texts import make_key
from tests.support.factories import tuning_request
from tests.support.paths import EXAMPLES
from tests.support.service.processes import spoken
from tests.support.service.running import Running, StartService
from tests.support.service.scripted import ScriptedRunner, until_stopped

pytestmark = pytest.mark.usefixtures("starts")

NOWHERE = "http://127.0.0.1:1"
SHOW = ["--", "sh", "-c", 'env | grep -E "BATCHWRIGHT_|ALLOC" | sort; exit 9']
Hook = Callable[..., subprocess.CompletedProcess[str]]


class WithEnvironment(ScriptedRunner):
    """Its probes run with a variable."""

    @override
    def environment(self) -> dict[str, str]:
        return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def run_example(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run an example; warnings are errors there too."""
    with TemporaryDirectory() as folder:
        output = Path(folder, "output")
        command = ["-W", "error", str(EXAMPLES / name), *arguments]
        with spoken(command, "no such line", environment, output) as started:
            status = started.end()
        return subprocess.CompletedProcess(command, status, output.read_text(), "".join(started.lines))


@pytest.fixture
def hook(tmp_path: Path) -> Hook:
    """Runs the scheduler's hook with a request on file."""
    request = tmp_path / "request.json"
    request.write_text(tuning_request().model_dump_json())

    def run(url: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        own = ["--service", url, "--retry", "0", str(request)]
        return run_example("scheduler_hook.py", *own, *arguments, **environment)

    return run


def test_the_hook_prints_what_slurm_takes(hook: Hook, start_service: StartService) -> None:
    """`export` lines with the plan and the variables that the probes ran with; nothing else on standard output."""
    done = hook(start_service(WithEnvironment(37)).url)
    assert (done.returncode, done.stderr) == (0, "")
    *lines, source = done.stdout.splitlines()
    assert lines == [
        "export BATCHWRIGHT_EFFECTIVE_BATCH_SIZE=100",
        "export BATCHWRIGHT_GRADIENT_ACCUMULATION_STEPS=3",
        "export BATCHWRIGHT_MICRO_BATCH_SIZE=34",
        "export BATCHWRIGHT_MICRO_BATCH_SIZES=34,33,33",
        lines[4],
    ]
    assert lines[4].startswith("export BATCHWRIGHT_PLAN_SOURCE=rec_")
    assert source == "export PYTORCH_ALLOC_CONF=expandable_segments:True"


def test_the_hook_becomes_the_command(hook: Hook, start_service: StartService) -> None:
    """The command gets the variables in its environment, and its exit code is returned."""
    done = hook(start_service(WithEnvironment(37)).url, *SHOW)
    assert done.returncode == 9
    variables = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert variables["BATCHWRIGHT_MICRO_BATCH_SIZES"] == "34,33,33"
    assert variables["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize("arguments", [[], ["--fallback-micro-batch-size", "4"]])
def test_an_infeasible_request_starts_nothing(hook: Hook, start_service: StartService, arguments: list[str]) -> None:
    """Exit code 3 with the reason; a fallback would not fit either."""
    done = hook(start_service(ScriptedRunner(0)).url, *arguments, *SHOW)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("scheduler_hook: ")


def test_a_failed_tuning_starts_nothing(hook: Hook, start_service: StartService) -> None:
    """Exit code 4 with the message of the service."""
    runner = ScriptedRunner(37)
    runner.spec_error = WorkloadError("no loss terms")
    done = hook(start_service(runner).url, "--fallback-micro-batch-size", "4")
    assert (done.returncode, done.stdout) == (4, "")
    assert "no loss terms" in done.stderr


def test_an_unreachable_service_leads_to_the_fallback(hook: Hook) -> None:
    """Exit code 75 without a fallback; with one, its exact plan."""
    away = hook(NOWHERE, *SHOW)
    assert (away.returncode, away.stdout) == (75, "")
    assert "cannot be reached" in away.stderr
    done = hook(NOWHERE, "--fallback-micro-batch-size", "40", *SHOW)
    assert done.returncode == 9
    assert "BATCHWRIGHT_MICRO_BATCH_SIZES=34,33,33" in done.stdout
    assert "BATCHWRIGHT_PLAN_SOURCE=fallback" in done.stdout
    assert "starting with the fallback" in done.stderr


def test_tasks_of_one_job_share_one_tuning(hook: Hook, start_service: StartService, tmp_path: Path) -> None:
    """Two tasks of one Slurm job ask for one tuning, which goes on when their time is up.

    Another start, another cluster's job of that number and another request of the same job ask anew.
    """
    started = threading.Event()
    service = start_service(ScriptedRunner(37, until_stopped(started)))
    for _ in range(2):
        done = hook(service.url, "--wait", "0.1", SLURM_JOB_ID="7")
        assert done.returncode == 75
        assert "after 0.1 s" in done.stderr
    with service.client as client:
        (row,) = client.tunings.list()
        assert row.state in {State.QUEUED, State.RUNNING}
        hook(service.url, "--wait", "0.1", SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1")
        hook(service.url, "--wait", "0.1", SLURM_JOB_ID="7", SLURM_CLUSTER_NAME="Zürich 2")
        (tmp_path / "request.json").write_text(tuning_request(effective_batch_size=7).model_dump_json())
        assert hook(service.url, "--wait", "0.1", SLURM_JOB_ID="7").returncode == 75
        assert len(list(client.tunings.list())) == 4


def test_refusals_have_different_exit_codes(hook: Hook, service: Running, tmp_path: Path) -> None:
    """2 for an invalid request, 77 without a valid API key, 127 for a missing command."""
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("effective_batch_size: 0")
    done = run_example("scheduler_hook.py", str(wrong), "--service", service.url)
    assert done.returncode == 2
    assert "effective_batch_size" in done.stderr
    assert hook(NOWHERE, "--fallback-micro-batch-size", "0").returncode == 2
    assert hook(service.url, "--", "no-such-command").returncode == 127
    new, _ = make_key("ci", (Scope.ADMIN,))
    service.system.store.keys.add(new)
    refused = hook(service.url, "--fallback-micro-batch-size", "4", BATCHWRIGHT_API_KEY="bw_0_0")
    assert refused.returncode == 77
    assert "bw_0_0" not in refused.stderr


def test_variants_are_tuned_concurrently(shared_service: Running) -> None:
    """The asynchronous example shows the probes of all, then every variant with its size."""
    done = run_example("compare_async.py", "--service", shared_service.url, "--effective-batch-size", "64")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "bf16-mixed: 1 FIT" in lines
    assert [line.split()[-1] for line in lines[-4:]] == ["37"] * 4
    away = run_example("compare_async.py", "--service", "nowhere")
    assert (away.returncode, "scheme" in away.stderr) == (1, True)
