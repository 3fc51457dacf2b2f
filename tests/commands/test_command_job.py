"""Jobs of commands: their ends, their files, and nothing that is left of them."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from batchwright.commands.command_job import CommandJob
from batchwright.commands.job_outcomes import EndedJob, result_of_job
from batchwright.commands.job_progress import JobReports
from batchwright.commands.templates import Figures
from batchwright.errors import TrainingError
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.training import RunOutcome, TrainingResult
from tests.commands.recorded import (
    MEBIBYTE,
    Clock,
    Replay,
    of_program,
    plan_of_job,
    result_of_running,
    run_job,
    shape,
    stored,
)
from tests.support.command import is_running
from tests.system.test_subreaper import await_file

SLEEPS = """
import os, signal, subprocess, sys, time
if sys.argv[1] == "deaf": signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[2], "w").write(f"{os.getpid()} {child.pid}")
if sys.argv[1] == "saves":
    signal.signal(signal.SIGTERM, lambda *_: (open(sys.argv[2], "w").write("saved"), sys.exit(0)))
time.sleep(600)
"""
KILLED = """
import sys, time
from pathlib import Path
from batchwright.commands.command_job import CommandJob
from batchwright.commands.job_outcomes import EndedJob, result_of_job
from batchwright.commands.job_progress import JobReports
from batchwright.commands.templates import Figures
from batchwright.schemas.recommendation import Recommendation
job = CommandJob(Path(sys.argv[2]))
job.start(Recommendation.model_validate_json(Path(sys.argv[1]).read_bytes()), 1)
time.sleep(600)
"""


def run(found: Recommendation, folder: Path, updates: int = 4) -> TrainingResult:
    """Run a job to its end."""
    with CommandJob(folder) as job:
        job.start(found, updates)
        return result_of_running(job)


@pytest.fixture(params=["recorded", pytest.param("real", marks=pytest.mark.thorough)])
def result_in(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], TrainingResult]:
    """The results of jobs by their modes: of their records, or of runs, which report what the records have."""

    def found(mode: str) -> TrainingResult:
        if request.param == "real":
            result, record = run_job(mode, tmp_path)
            assert shape(record) == shape(stored(f"job-{mode}"))
        else:
            with patch("batchwright.commands.command_job.FreshCommand", Replay(stored(f"job-{mode}"), Clock())):
                result = run(plan_of_job(mode, tmp_path), tmp_path / "job")
        assert TrainingResult.model_validate_json((tmp_path / "job" / "result.json").read_text()) == result
        return result

    return found


@pytest.mark.parametrize(
    ("mode", "outcome", "message", "noted"),
    [
        ("plain", "SUCCEEDED", "the command ended with exit status 0 after 4 updates (64 samples)", None),
        ("large", "SUCCEEDED", "after 4 updates (64 samples)", "is above the limit of 300.00 MiB"),
        (
            "more",
            "SUCCEEDED",
            "after 4 updates (72 samples)",
            "1 of 4 updates had micro-batches unlike the plan's",
        ),
        ("caught", "SUCCEEDED", "after 3 updates (48 samples)", "The program caught the error"),
        ("oom", "FAILED", "the command ran out of memory in update 3 on rank 0", None),
    ],
)
def test_a_job_runs_to_its_end_and_is_counted(
    result_in: Callable[[str], TrainingResult], mode: str, outcome: str, message: str, noted: str | None
) -> None:
    """Its updates, its samples, its peak, and an OOM that ends it or that it catches."""
    result = result_in(mode)

    assert (result.outcome, result.limit_bytes) == (outcome, 300 * MEBIBYTE)
    assert message in result.message
    assert result.peak_bytes is not None
    assert (result.peak_bytes > 300 * MEBIBYTE) is (mode == "large")
    expected = [] if noted is None else [noted]
    assert len(result.notes) == len(expected)
    assert all(part in note for part, note in zip(expected, result.notes, strict=True))
    if mode == "oom":
        assert "The plan was 2 x 8 samples: 16; the peak was" in result.message
        assert "--probe-updates" in result.message


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> TrainingResult:
    """The result of a real job that trains."""
    folder = tmp_path_factory.mktemp("job")
    return run(plan_of_job("more", folder), folder / "job")


def test_the_updates_of_a_real_job_are_counted(counted: TrainingResult) -> None:
    """By the code that is injected into its process."""
    assert (counted.outcome, counted.updates, counted.samples_seen) == (RunOutcome.SUCCEEDED, 4, 72)
    assert len(counted.notes) == 1
    assert 0 < (counted.peak_bytes or 0) < 300 * MEBIBYTE


@pytest.fixture(scope="module")
def caught(tmp_path_factory: pytest.TempPathFactory) -> TrainingResult:
    """The result of a real job whose program catches an OOM of its model."""
    folder = tmp_path_factory.mktemp("job")
    return run(plan_of_job("caught", folder), folder / "job")


def test_an_oom_that_a_real_job_catches_is_noted(caught: TrainingResult) -> None:
    """It is seen where it passes the model, since the program ends without an error."""
    assert caught.outcome is RunOutcome.SUCCEEDED
    assert ["The program caught the error" in note for note in caught.notes] == [True]


def test_a_job_keeps_its_files(tmp_path: Path) -> None:
    """The rendered configuration, what the command wrote, all of its output, and the recommendation."""
    code = (
        "import json, sys; s = json.load(open(sys.argv[1])); print(s['size']); open(s['out'] + '/made', 'w').write('x')"
    )
    template = '{"size": {micro_batch_size}, "out": "{output_dir}"}'
    found = of_program(tmp_path, code, "{file:settings.json}", files={"settings.json": template})

    result = run(found, tmp_path / "job")

    assert result.outcome is RunOutcome.SUCCEEDED
    assert "no process of it imported torch" in result.notes[0]
    assert (tmp_path / "job" / "output" / "made").read_text() == "x"
    assert (tmp_path / "job" / "files" / "settings.json").exists()
    assert (tmp_path / "job" / "log.txt").read_text() == "8\n"
    assert Recommendation.model_validate_json((tmp_path / "job" / "recommendation.json").read_text()) == found


def test_a_failed_command_says_its_status_and_its_last_error(tmp_path: Path) -> None:
    """The result has the end of the output, of this start alone."""
    code = "import sys; print(sys.argv[1]); raise ValueError('the data is gone')"
    for _ in range(2):
        result = run(of_program(tmp_path, code, "{micro_batch_size}"), tmp_path / "job")

    assert (result.outcome, result.exit_status) == (RunOutcome.FAILED, 1)
    assert "exit status 1 after 0 updates: ValueError: the data is gone" in result.message
    assert result.output.count("the data is gone") == 2  # in the source line, and in the error
    assert (tmp_path / "job" / "log.txt").read_text().count("Traceback") == 2


def test_probe_arguments_are_not_the_jobs(tmp_path: Path) -> None:
    """They select the longest samples of a probe."""
    found = of_program(tmp_path, "import sys; print(sys.argv[1:])", "{micro_batch_size}", probe_arguments=("--long",))
    assert run(found, tmp_path / "job").output == "['8']"


@pytest.mark.parametrize(
    ("kind", "exit_status"), [("plain", -signal.SIGTERM), ("saves", 0)], ids=["ended by it", "saves and ends"]
)
def test_a_signal_reaches_the_command(tmp_path: Path, kind: str, exit_status: int) -> None:
    """The command may save its state; its grandchildren end with it."""
    told = tmp_path / "told"
    with CommandJob(tmp_path / "job") as job:
        job.start(of_program(tmp_path, SLEEPS, kind, str(told), "{micro_batch_size}"), 1)
        command, child = (int(text) for text in await_file(told).split())
        while not Path(f"/proc/{command}/status").read_text().count("SigCgt:\t0000000000004") and kind == "saves":
            time.sleep(0.01)  # until its handler is there
        job.request_stop(signal.SIGTERM)
        result = result_of_running(job)

    assert (result.outcome, result.exit_status) == (RunOutcome.STOPPED, exit_status)
    assert "stopped by SIGTERM" in result.message
    assert not is_running(command)
    assert not is_running(child)
    assert (told.read_text() == "saved") is (kind == "saves")


def test_a_command_that_ignores_the_signal_is_killed(tmp_path: Path) -> None:
    """With every process of its tree."""
    told = tmp_path / "told"
    with CommandJob(tmp_path / "job") as job:
        job.start(of_program(tmp_path, SLEEPS, "deaf", str(told), "{micro_batch_size}"), 1)
        processes = [int(text) for text in await_file(told).split()]
        job.request_stop(signal.SIGTERM)
        job.kill()
        result = result_of_running(job)

    assert (result.outcome, result.exit_status) == (RunOutcome.STOPPED, None)
    assert "had to be killed" in result.message
    assert not any(is_running(process) for process in processes)


def test_leaving_a_job_ends_it_with_a_result(tmp_path: Path) -> None:
    """As a second Ctrl-C does."""
    told = tmp_path / "told"
    with CommandJob(tmp_path / "job") as job:
        job.start(of_program(tmp_path, SLEEPS, "deaf", str(told), "{micro_batch_size}"), 1)
        processes = [int(text) for text in await_file(told).split()]

    assert not any(is_running(process) for process in processes)
    result = TrainingResult.model_validate_json((tmp_path / "job" / "result.json").read_text())
    assert (result.outcome, result.exit_status) == (RunOutcome.STOPPED, None)
    assert "because its caller ended" in result.message


def test_nothing_is_left_of_a_job_whose_subreaper_is_killed(tmp_path: Path) -> None:
    """The kernel ends the command with its subreaper; a process in a session of its own is found by its environment."""
    told = tmp_path / "told"
    with CommandJob(tmp_path / "job") as job:
        job.start(of_program(tmp_path, SLEEPS, "deaf", str(told), "{micro_batch_size}"), 1)
        command, child = (int(text) for text in await_file(told).split())
        keeper = int(Path(f"/proc/{command}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(keeper, signal.SIGKILL)
        result = result_of_running(job)

    assert (result.outcome, result.error_type) == (RunOutcome.FAILED, "lost")
    assert not is_running(command)
    assert not is_running(child)


def test_nothing_is_left_of_a_job_whose_caller_is_killed(tmp_path: Path) -> None:
    """Neither its processes nor its folder for temporary files; the folder of the job stays."""
    told, temporary = tmp_path / "told", tmp_path / "temporary"
    temporary.mkdir()
    found = of_program(tmp_path, SLEEPS, "deaf", str(told), "{micro_batch_size}")
    (tmp_path / "found.json").write_text(found.model_dump_json())
    caller = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "found.json"), str(tmp_path / "job")],
        env={"TMPDIR": str(temporary), "PATH": "/usr/bin:/bin"},
    )
    processes = [int(text) for text in await_file(told).split()]
    caller.kill()
    caller.wait()
    while any(is_running(process) for process in processes) or list(temporary.iterdir()):
        time.sleep(0.01)  # pytest's limit ends a wait in vain
    assert (tmp_path / "job" / "recommendation.json").exists()


def test_workers_of_a_data_loader_have_room_for_their_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the path of the folder for temporary files is longer than the address of a socket may be."""
    folder = tmp_path / ("long-" * 20)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    listens = "from multiprocessing.connection import Listener; Listener(family='AF_UNIX'); print('listens')"
    run(of_program(tmp_path, listens, "{micro_batch_size}"), tmp_path / "job")
    assert (tmp_path / "job" / "log.txt").read_text() == "listens\n"


def test_a_folder_holds_the_job_of_one_command(tmp_path: Path) -> None:
    """Another command may take the checkpoints of the first for its own."""
    run(of_program(tmp_path, "", "{micro_batch_size}"), tmp_path / "job")
    with pytest.raises(TrainingError, match="holds the run of another command"):
        run(of_program(tmp_path, "", "--other", "{micro_batch_size}"), tmp_path / "job")


def test_one_job_at_a_time_runs_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is refused, and the first goes on."""
    monkeypatch.setattr("batchwright.commands.command_job._LOCK_WAIT_SECONDS", 0.0)
    told = tmp_path / "told"
    found = of_program(tmp_path, SLEEPS, "plain", str(told), "{micro_batch_size}")
    with CommandJob(tmp_path / "job") as job:
        job.start(found, 1)
        await_file(told)
        with pytest.raises(TrainingError, match="another process trains in"), CommandJob(tmp_path / "job") as second:
            second.start(found, 1)
        assert job.poll() is None


def test_a_job_waits_for_an_earlier_one_of_its_folder_to_end(tmp_path: Path) -> None:
    """The tree of a killed supervisor may take a moment to end, and its subreaper keeps a lock of the log."""
    (tmp_path / "job").mkdir()
    with (tmp_path / "job" / "log.txt").open("w") as log, CommandJob(tmp_path / "job") as job:
        fcntl.flock(log, fcntl.LOCK_EX)
        job.start(of_program(tmp_path, "", "{micro_batch_size}"), 1)
        inode = f":{os.fstat(log.fileno()).st_ino} "
        while not any(": -> " in line and inode in line for line in Path("/proc/locks").read_text().splitlines()):
            assert job.poll() is None
            time.sleep(0.01)
        fcntl.flock(log, fcntl.LOCK_UN)
        assert result_of_running(job).outcome is RunOutcome.SUCCEEDED


@pytest.mark.parametrize(("made", "outcome"), [(3, RunOutcome.STOPPED), (4, RunOutcome.SUCCEEDED)])
def test_a_job_that_made_all_updates_before_it_was_stopped_succeeded(
    tmp_path: Path, made: int, outcome: RunOutcome
) -> None:
    """A command that ended by itself is run by no worker a second time."""
    counted = {"rank": 0, "world_size": 1, "updates": made, "samples": 16 * made, "unlike_plan": 0}
    (tmp_path / "1.progress").write_text(json.dumps({**counted, "first_at": 1.0, "last_at": 2.0}))
    reports = JobReports(tmp_path, total=4)
    reports.read()
    result = result_of_job(
        EndedJob(
            figures=Figures(8, 2, 1, 4),
            recommendation=of_program(tmp_path, "", "{updates}", "{micro_batch_size}"),
            reports=reports,
            exit_status=0,
            start_error=None,
            stopped_by=signal.SIGTERM,
            is_killed=False,
            kernel_oom_kills=0,
            output="",
            seconds=1.0,
        )
    )
    assert (result.outcome, result.updates) == (outcome, made)


@pytest.mark.parametrize("kills", [0, 1])
def test_a_kill_by_the_kernel_is_a_lack_of_memory(tmp_path: Path, kills: int) -> None:
    """SIGKILL alone is no evidence of one."""
    result = result_of_job(
        EndedJob(
            figures=Figures(8, 2, 1, 4),
            recommendation=of_program(tmp_path, "", "{updates}", "{micro_batch_size}"),
            reports=JobReports(tmp_path, total=4),
            exit_status=-signal.SIGKILL,
            start_error=None,
            stopped_by=None,
            is_killed=False,
            kernel_oom_kills=kills,
            output="",
            seconds=1.0,
        )
    )
    assert (result.outcome, result.out_of_memory) == (RunOutcome.FAILED, kills > 0)
