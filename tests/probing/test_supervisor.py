"""Probes in real processes: their measurements, and the classification of failures."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import pytest

from batchwright.errors import (
    CheckLostError,
    DeviceError,
    EstimateError,
    HostFailureError,
    ProbeCancelledError,
    ProbeError,
    SpecError,
    StorageError,
)
from batchwright.estimation.client import expect
from batchwright.hardware.inventory import cpu
from batchwright.probing.supervisor import ProbeSupervisor
from batchwright.schemas.requests import CouplingRequest, ExpectationRequest, ProbeRequest
from batchwright.schemas.results import Outcome, Phase
from batchwright.schemas.workload import WorkloadSpec
from batchwright.system.fork_server.spawn import ChildProcess
from tests.support.factories import gpt_spec, mlp_spec, python_spec, resnet_spec, transformers_spec, tuning_request
from tests.support.forked import real_starts
from tests.support.paths import ROOT
from tests.support.scarce import small_disk
from tests.support.service.processes import wait_until

pytestmark = pytest.mark.usefixtures("tracing")

MIB = 1024**2


def probe(
    spec: WorkloadSpec, size: int = 4, window: int = 16, limit: int | None = 300 * MIB, timeout: float = 60.0
) -> ProbeRequest:
    """A probe on the CPU."""
    return ProbeRequest(
        spec=spec,
        micro_batch_size=size,
        samples_per_window=window,
        device="cpu",
        limit_bytes=limit,
        timeout_seconds=timeout,
    )


def misbehaving(way: str, argument: str = "") -> WorkloadSpec:
    """The spec of a workload that misbehaves in this way."""
    return python_spec("tests.support.misbehaving:build", way=way, argument=argument)


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def noted(note: Path) -> bool:
    """Return whether a probe has written its id and its child's."""
    return note.exists() and note.read_text().endswith("\n")


def gone(pids: list[int], seconds: float = 30.0) -> bool:
    """Return whether all these processes end within ``seconds``."""
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(alive(pid) for pid in pids)


def test_a_fit_reports_its_measurements(supervisor: ProbeSupervisor) -> None:
    """The result has peaks, resident bytes, the time of each phase and a summary of the model."""
    result = supervisor.run(probe(gpt_spec()))
    assert result.outcome is Outcome.FIT
    assert result.phase is Phase.DONE
    assert result.accumulates
    assert result.process_peak_bytes is not None
    assert result.resident_bytes is not None
    assert 0 < result.resident_bytes <= result.process_peak_bytes < 300 * MIB
    assert result.limit_bytes == 300 * MIB
    assert result.model is not None
    assert result.model.parameters == 34_176
    phases = result.seconds
    assert min(phases.start, phases.build, phases.warmup, phases.measure) > 0
    assert phases.total >= phases.start + phases.build + phases.warmup + phases.measure


def test_an_allocation_beyond_the_budget_is_an_oom(supervisor: ProbeSupervisor) -> None:
    """A real allocation fails: the message has its size, and the details are the allocator's message."""
    result = supervisor.run(probe(mlp_spec(), size=2_000_000, window=2_000_000))
    assert result.outcome is Outcome.OOM
    assert result.failed_micro_batch in {1, 2}
    assert re.fullmatch(r"asked for [\d.]+ MiB more in the warm-up", result.message)
    assert "can't allocate memory" in (result.details or "")
    assert result.traceback is None


def test_a_model_larger_than_the_budget_is_an_oom_while_building(supervisor: ProbeSupervisor) -> None:
    """The budget includes the model, as the memory of a GPU does."""
    architecture = {"name": "mlp", "hidden_features": 4096, "hidden_layers": 4}
    spec = mlp_spec(model={"kind": "reference", "architecture": architecture})
    result = supervisor.run(probe(spec, size=1, limit=64 * MIB))
    assert result.outcome is Outcome.OOM
    assert result.phase is Phase.BUILD


def test_accumulation_raises_the_peak(supervisor: ProbeSupervisor) -> None:
    """The gradients of the first micro-batch stay: about the parameters' bytes more."""
    architecture = {"name": "mlp", "input_features": 16, "hidden_features": 1536, "hidden_layers": 3}
    optimizer = {"name": "sgd", "learning_rate": 0.1, "implementation": "for-loop"}
    spec = mlp_spec(model={"kind": "reference", "architecture": architecture}, optimizer=optimizer)
    alone = supervisor.run(probe(spec, size=1024, window=1024, limit=None))
    accumulating = supervisor.run(probe(spec, size=1024, window=2048, limit=None))
    assert alone.model is not None
    assert alone.process_peak_bytes is not None
    assert accumulating.process_peak_bytes is not None
    more = accumulating.process_peak_bytes - alone.process_peak_bytes
    assert more > 0.4 * alone.model.parameter_bytes


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "bf16-mixed"},
        {"precision": "fp16-mixed"},
        {"precision": "bf16"},
        {"gradient_clipping": 1.0},
        {"activation_checkpointing": True},
        {"optimizer": {"name": "adam", "implementation": "for-loop"}},
        {"optimizer": {"name": "adamw", "implementation": "fused"}},
        {"parallelism": {"world_size": 2}},
        {"parallelism": {"world_size": 2, "strategy": "fsdp"}},
    ],
    ids=str,
)
def test_every_option_of_a_spec_runs(supervisor: ProbeSupervisor, changes: dict[str, object]) -> None:
    """Precisions, clipping, checkpointing, optimizers and DDP's buckets are part of the measured update."""
    result = supervisor.run(probe(gpt_spec(**changes)))
    assert result.outcome is Outcome.FIT, result.message


def test_fp16_measures_updates_that_step(supervisor: ProbeSupervisor) -> None:
    """Updates that the loss scaler skips are repeated until the optimizer's state is allocated."""
    architecture = {"name": "mlp", "input_features": 64, "hidden_features": 1024, "hidden_layers": 3}
    spec = mlp_spec(model={"kind": "reference", "architecture": architecture}, precision="fp16-mixed")
    result = supervisor.run(probe(spec, size=4, window=8, limit=None))
    assert result.outcome is Outcome.FIT, result.message
    assert result.model is not None
    assert result.resident_bytes is not None
    assert result.resident_bytes > 2.5 * result.model.parameter_bytes  # the parameters and two moments of each


def test_batches_without_weight_are_an_error(supervisor: ProbeSupervisor) -> None:
    """A probe whose updates are all skipped is an error."""
    result = supervisor.run(probe(misbehaving("weighs-nothing")))
    assert result.outcome is Outcome.ERROR
    assert "have no weight" in result.message


@pytest.mark.parametrize("spec", [mlp_spec(precision="bf16"), resnet_spec(precision="bf16")], ids=["mlp", "resnet"])
def test_bf16_models_take_float_inputs(supervisor: ProbeSupervisor, spec: WorkloadSpec) -> None:
    """Inputs are cast to the parameters' type."""
    result = supervisor.run(probe(spec))
    assert result.outcome is Outcome.FIT, result.message


def test_a_package_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork server survives and names the missing package."""
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("raise ImportError('broken on purpose')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    spec = transformers_spec("causal-lm", {"model_type": "gpt2"}, batch={"sequence_length": 8})
    with ProbeSupervisor(cpu()) as fresh:
        with pytest.raises(ProbeError, match="broken on purpose"):
            fresh.check(tuning_request(spec))
        assert fresh.run(probe(mlp_spec())).outcome is Outcome.FIT


def test_batch_norm_is_detected(supervisor: ProbeSupervisor) -> None:
    """The result names batch-coupled modules, for the warning."""
    result = supervisor.run(probe(resnet_spec()))
    assert result.model is not None
    assert result.model.batch_coupled_modules


@pytest.mark.parametrize(
    ("way", "outcome", "error_type", "words"),
    [
        ("raises", Outcome.ERROR, "builtins.ValueError", "labels must be below 10"),
        ("segfaults", Outcome.ERROR, "SIGSEGV", "crashed with SIGSEGV"),
        ("exits", Outcome.ERROR, "builtins.SystemExit", "sys.exit(3)"),
        ("exits-hard", Outcome.ERROR, "exit status 5", "ended itself with exit status 5"),
        ("gives-up", Outcome.OOM, "exit status 1", "found no more memory in phase warmup, by its output"),
        ("kills-itself", Outcome.LOST, "SIGKILL", "ended from outside by SIGKILL"),
        ("chatters", Outcome.FIT, None, "two optimizer updates ran"),
    ],
)
def test_failures_are_classified(
    supervisor: ProbeSupervisor, way: str, outcome: Outcome, error_type: str | None, words: str
) -> None:
    """A bug, a crash, an exit, a kill and a message about memory do not count as out of memory.

    A library that ends the process because it found no memory does.
    """
    result = supervisor.run(probe(misbehaving(way)))
    assert result.outcome is outcome
    assert result.error_type == error_type
    assert words in result.message


@pytest.mark.parametrize(("plan", "sizes"), [(False, (7, 7)), (True, (7, 6))])
def test_a_probe_runs_whole_micro_batches_or_those_of_its_plan(
    supervisor: ProbeSupervisor, sizes: tuple[int, ...], *, plan: bool
) -> None:
    """Two of the size, though the update has fewer samples; or the plan's own."""
    result = supervisor.run(probe(mlp_spec(), size=7, window=13).model_copy(update={"runs_plan": plan}))
    assert result.timing is not None
    assert result.timing.micro_batch_sizes == result.micro_batch_sizes == sizes
    assert result.runs_plan is plan


def test_a_probe_that_brackets_makes_one_update(supervisor: ProbeSupervisor) -> None:
    """Its peak is that of two, within a twentieth or what equal probes differ by; nothing is timed."""
    request = probe(gpt_spec(), size=256, window=800)
    two, one = (supervisor.run(request.model_copy(update={"brackets": brackets})) for brackets in (False, True))
    assert (one.outcome, one.phase, one.timing) == (Outcome.FIT, Phase.DONE, None)
    assert (one.brackets, two.brackets) == (True, False)
    assert one.process_peak_bytes == pytest.approx(two.process_peak_bytes, rel=0.05, abs=2 * MIB)
    assert (one.message, one.seconds.measure) == ("one optimizer update ran within the limit", 0.0)


def test_a_bug_comes_with_its_traceback(supervisor: ProbeSupervisor) -> None:
    """The traceback names the user's line."""
    result = supervisor.run(probe(misbehaving("raises")))
    assert result.traceback is not None
    assert "misbehaving.py" in result.traceback
    assert "in _raise" in result.traceback


def test_an_illegal_size_is_not_an_oom(supervisor: ProbeSupervisor) -> None:
    """A kernel's own limit on the size is a separate outcome."""
    spec = misbehaving("invalid-when-large")
    assert supervisor.run(probe(spec, size=8)).outcome is Outcome.FIT
    assert supervisor.run(probe(spec, size=9)).outcome is Outcome.INVALID_SIZE


def test_a_hang_is_ended_with_its_stack(supervisor: ProbeSupervisor) -> None:
    """The probe is killed, and the traceback has the hanging line."""
    result = supervisor.run(probe(misbehaving("hangs"), timeout=5.0))
    assert result.outcome is Outcome.TIMED_OUT
    assert result.traceback is not None
    assert "_hang_where_it_can_be_seen" in result.traceback


def test_a_crash_that_only_a_limit_causes_is_an_oom(supervisor: ProbeSupervisor) -> None:
    """Two crashes under the limit and a success under a higher one are evidence of an OOM."""
    result = supervisor.run(probe(misbehaving("segfaults-under-a-limit"), size=16))
    assert result.outcome is Outcome.OOM
    assert "SIGSEGV twice under 300.00 MiB, and fits under 1.17 GiB" in result.message


def test_processes_that_a_probe_started_end_with_it(supervisor: ProbeSupervisor, tmp_path: Path) -> None:
    """Processes that user code leaves behind are killed."""
    note = tmp_path / "pids"
    assert supervisor.run(probe(misbehaving("leaves-a-child", str(note)))).outcome is Outcome.FIT
    assert gone([int(pid) for pid in note.read_text().split()])


def test_a_cancelled_probe_leaves_no_process(
    supervisor: ProbeSupervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hanging probe is cancelled, its processes are gone, and the supervisor stays usable."""
    note, scratch = tmp_path / "pids", tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    with pytest.raises(ProbeCancelledError):
        supervisor.run(probe(misbehaving("leaves-a-child-and-hangs", str(note))), lambda: noted(note))
    assert gone([int(pid) for pid in note.read_text().split()])
    assert list(scratch.iterdir()) == []
    assert supervisor.run(probe(mlp_spec())).outcome is Outcome.FIT


def test_a_lost_fork_server_costs_one_probe(supervisor: ProbeSupervisor, tmp_path: Path) -> None:
    """The probe of a killed server is LOST, its processes are ended, and the next probe has a new server."""
    server = supervisor._server.start().process
    note = tmp_path / "pids"

    def kill_the_server() -> bool:
        """Kill the server once the probe hangs, without a request to stop."""
        if noted(note):
            with suppress(ProcessLookupError):  # asked again before its end is noticed
                os.kill(server.pid, signal.SIGKILL)
        return False

    result = supervisor.run(probe(misbehaving("leaves-a-child-and-hangs", str(note))), kill_the_server)
    assert result.outcome is Outcome.LOST
    assert gone([int(pid) for pid in note.read_text().split()])
    assert supervisor.run(probe(mlp_spec())).outcome is Outcome.FIT


ALL = 1000
"""Every start: one that is seen to be dead before it is used is replaced without counting as an attempt."""


class KilledStarts:
    """Starts fork servers, and kills the first few at once."""

    def __init__(self, kills: int) -> None:
        self.left = kills
        self.started = 0

    def __call__(self, module: str, arguments: tuple[str, ...], environment: Mapping[str, str]) -> ChildProcess:
        """Start a server, and kill it if it is one of the first."""
        child = ChildProcess(module, arguments, environment)
        self.started += 1
        if self.left > 0:
            self.left -= 1
            os.kill(child.process.pid, signal.SIGKILL)
        return child


def test_a_server_killed_while_it_starts_is_a_lost_probe() -> None:
    """Each killed start costs one probe, which the search repeats; it is no ProbeError."""
    with ProbeSupervisor(cpu(), KilledStarts(2)) as running:
        for _ in range(2):
            lost = running.run(probe(mlp_spec()))
            assert lost.outcome is Outcome.LOST
            assert lost.phase is Phase.START
        assert running.run(probe(mlp_spec())).outcome is Outcome.FIT


def test_a_server_killed_between_two_probes_costs_none() -> None:
    """A new server is started before the next probe."""
    starts = KilledStarts(0)
    with ProbeSupervisor(cpu(), starts) as running:
        running.start(mlp_spec())
        process = running._server.start().process
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert running.run(probe(mlp_spec())).outcome is Outcome.FIT
    assert starts.started == 2


def test_a_check_and_an_estimate_survive_a_killed_server() -> None:
    """Both are repeated on a new server; a server that is killed each time is no invalid spec."""
    request = tuning_request(mlp_spec())
    with ProbeSupervisor(cpu(), KilledStarts(1)) as running:
        running.check(request)
    expectation = ExpectationRequest(
        spec=request.spec, samples_per_window=64, largest_micro_batch=64, limit_bytes=300 * MIB
    )
    with ProbeSupervisor(cpu(), KilledStarts(1)) as running:
        assert running.expect(expectation) is not None
    with ProbeSupervisor(cpu(), KilledStarts(ALL)) as running, pytest.raises(CheckLostError, match="lost 2 times"):
        running.check(request)


def test_an_estimate_that_was_begun_is_the_one_that_is_expected() -> None:
    """A card's estimate is made while the loss is checked. Another request has an estimate of its own."""
    begun = ExpectationRequest(
        spec=mlp_spec(), samples_per_window=64, largest_micro_batch=64, limit_bytes=300 * MIB, compute_capability=(8, 0)
    )
    with ProbeSupervisor(cpu(), estimate_wait_seconds=300.0) as running:
        running.begin_estimate(begun)
        assert running.check_coupling(coupling(mlp_spec())).verdict == "separate"
        wait_until(lambda: running.late_estimate() is not None)
        made = running.late_estimate()
        assert running.expect(begun) is made
        running.begin_estimate(begun)
        other = running.expect(begun.model_copy(update={"largest_micro_batch": 8}))
        assert other.points[-1].micro_batch_size <= 8


@pytest.mark.parametrize("kills", [1, ALL])
def test_a_killed_tracing_process_is_replaced_once(kills: int) -> None:
    """An estimate is repeated in a new process; if every process is killed, it is reported."""
    request = ExpectationRequest(
        spec=mlp_spec(), samples_per_window=64, largest_micro_batch=64, limit_bytes=300 * MIB, compute_capability=(8, 0)
    )
    if kills == 1:
        assert expect(request, start=KilledStarts(kills)).points
        return
    with pytest.raises(EstimateError, match="ended with SIGKILL"):
        expect(request, start=KilledStarts(kills))


def test_probes_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    """Kill -9 of the process that supervises leaves no server, no probe, nothing that a probe started, and no files.

    The subreaper of the probe is stopped meanwhile: however late it gets to run, it has to be there to end those.
    """
    note, scratch = tmp_path / "pids", tmp_path / "scratch"
    scratch.mkdir()
    script = (
        "import sys\n"
        "from tests.probing.test_supervisor import *\n"
        "supervisor = ProbeSupervisor(cpu()); supervisor.start(mlp_spec())\n"
        "open(sys.argv[1], 'w').write(f'{supervisor._server.start().process.pid}\\n')\n"
        "supervisor.run(probe(misbehaving('leaves-a-child-and-hangs', sys.argv[1])))\n"
    )
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with subprocess.Popen([sys.executable, "-c", script, str(note)], cwd=ROOT, env=environment) as process:
        while not note.exists() or len(note.read_text().split()) < 3:
            assert process.poll() is None
            time.sleep(0.02)
        server, *started = [int(pid) for pid in note.read_text().split()]
        subreaper = int(Path(f"/proc/{started[0]}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(subreaper, signal.SIGSTOP)
        process.kill()
        process.wait()
    os.kill(subreaper, signal.SIGCONT)
    assert gone([server, subreaper, *started])
    assert not list(scratch.glob("batchwright-*"))


def test_an_invalid_config_is_found_before_any_probe(supervisor: ProbeSupervisor) -> None:
    """The check builds the workload without its tensors and names the field."""
    with pytest.raises(SpecError, match=r"model\.target"):
        supervisor.check(tuning_request(python_spec("tests.support.misbehaving:nothing")))
    supervisor.check(tuning_request(gpt_spec()))


def test_a_crash_while_checking_is_reported(tmp_path: Path) -> None:
    """User code that ends the process while it is imported does not end the supervisor."""
    (tmp_path / "ends_the_process.py").write_text("import os\nos._exit(7)\n")
    with ProbeSupervisor(cpu()) as fresh:
        before = Path.cwd()
        os.chdir(tmp_path)
        try:
            with pytest.raises(SpecError, match="exit status 7"):
                fresh.check(tuning_request(python_spec("ends_the_process:build")))
        finally:
            os.chdir(before)


@pytest.mark.parametrize("ending", ["os.kill(os.getpid(), 9)", "raise MemoryError"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_lost_check_says_nothing_about_the_spec(tmp_path: Path, ending: str, times: int) -> None:
    """A check that is killed, or without memory, is repeated; if every attempt is lost, it has its own error."""
    (tmp_path / "lost_checks.py").write_text(
        "import os, pathlib, torch\n"
        f"path = pathlib.Path({str(tmp_path / 'count')!r})\n"
        "count = len(path.read_text()) if path.exists() else 0\n"
        "path.write_text('x' * (count + 1))\n"
        f"if count < {times}: {ending}\n"
        "from tests.support.misbehaving import Misbehaving\n"
        "def build(): return Misbehaving('exits', '')\n"
    )
    with ProbeSupervisor(cpu()) as fresh:
        before = Path.cwd()
        os.chdir(tmp_path)
        try:
            if times < 2:
                fresh.check(tuning_request(python_spec("lost_checks:build")))
            else:
                with pytest.raises(CheckLostError, match="lost 2 times"):
                    fresh.check(tuning_request(python_spec("lost_checks:build")))
        finally:
            os.chdir(before)
    assert len((tmp_path / "count").read_text()) == 2


def coupling(spec: WorkloadSpec, timeout: float = 60.0) -> CouplingRequest:
    """A check on the CPU."""
    return CouplingRequest(spec=spec, device="cpu", limit_bytes=1024 * MIB, timeout_seconds=timeout)


def test_a_loss_is_compared_with_its_parts_in_a_separate_process(supervisor: ProbeSupervisor) -> None:
    """A sum over samples passes, and BatchNorm is named."""
    separate = supervisor.check_coupling(coupling(mlp_spec()))
    assert (separate.verdict, separate.precision, separate.samples) == ("separate", "fp64", 4)
    coupled = supervisor.check_coupling(coupling(resnet_spec()))
    assert coupled.verdict == "coupled"
    assert "BatchNorm2d" in coupled.message
    assert (coupled.gradient_error or 0.0) > 0.1


def test_a_result_that_finds_no_space_is_not_the_workloads_fault(
    supervisor: ProbeSupervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ended without a result is judged by the disk: full, or the workload has ended it."""
    request = probe(misbehaving("exits-hard"))
    assert supervisor.run(request).outcome is Outcome.ERROR
    with small_disk(tmp_path / "disk", 32 * 1024) as disk:
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        with pytest.raises(StorageError, match=r"result\.json cannot be written: the disk is full .* set TMPDIR"):
            supervisor.run(request)


def test_a_folder_that_is_removed_is_not_the_workloads_fault(
    supervisor: ProbeSupervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cleaning of temporary files takes the folder of a probe: the host's trouble, and the next probe runs."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(temporary))
        with pytest.raises(HostFailureError, match=rf"{temporary}/\S+ was removed while a probe ran") as raised:
            supervisor.run(probe(misbehaving("removes-temporary-files", str(temporary))))
    assert raised.value.cause == "missing"
    assert supervisor.run(probe(mlp_spec())).outcome is Outcome.FIT


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("raises", "ended with ValueError: labels must be below 10"),
        ("segfaults", "ended with SIGSEGV"),
        ("exits", "ended with SystemExit"),
        ("kills-itself", "ended with SIGKILL"),
        ("hangs", "did not end within 2 s"),
    ],
)
def test_a_check_that_cannot_be_made_concludes_nothing(supervisor: ProbeSupervisor, way: str, words: str) -> None:
    """A failure of the workload is left to the probe, and the next task runs."""
    found = supervisor.check_coupling(coupling(misbehaving(way), timeout=2.0 if way == "hangs" else 60.0))
    assert found.verdict == "not-compared"
    assert words in found.message
    assert supervisor.run(probe(mlp_spec())).outcome is Outcome.FIT


def test_a_device_that_fails_in_the_check_is_named(supervisor: ProbeSupervisor, tmp_path: Path) -> None:
    """A part of the batch meets the error, which is no refusal to divide it, and no note; the next check works."""
    spec = misbehaving("breaks-the-device-once", str(tmp_path / "failed"))
    with pytest.raises(DeviceError, match="the device failed: CUDA error: uncorrectable ECC error encountered"):
        supervisor.check_coupling(coupling(spec))
    assert supervisor.check_coupling(coupling(spec)).verdict == "separate"


def test_a_check_without_memory_concludes_nothing(supervisor: ProbeSupervisor) -> None:
    """A limit below two samples in fp32 leaves the loss uncompared."""
    architecture = {"name": "mlp", "hidden_features": 4096, "hidden_layers": 4}
    spec = mlp_spec(model={"kind": "reference", "architecture": architecture})
    found = supervisor.check_coupling(coupling(spec).model_copy(update={"limit_bytes": 64 * MIB}))
    assert found.verdict == "not-compared"
    assert "memory" in found.message


def test_a_running_comparison_can_be_cancelled(supervisor: ProbeSupervisor) -> None:
    """The process is gone, and the next task runs."""
    with pytest.raises(ProbeCancelledError):
        supervisor.check_coupling(coupling(misbehaving("hangs")), lambda: True)
    assert supervisor.run(probe(mlp_spec())).outcome is Outcome.FIT


@pytest.mark.parametrize("starts", [nullcontext, pytest.param(real_starts, marks=pytest.mark.thorough)])
def test_close_is_idempotent_and_leaves_no_process(starts: Callable[[], AbstractContextManager[None]]) -> None:
    """Closing twice is fine, and the server is gone. One that nobody waits for continues to start."""
    running = ProbeSupervisor(cpu())
    with starts():
        with pytest.raises(ProbeCancelledError):
            running.start(mlp_spec(), lambda: True)
        running.start(mlp_spec())
    process = running._server.start().process
    running.close()
    running.close()
    assert process.poll() is not None
