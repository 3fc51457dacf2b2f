"""`batchwright estimate` and `batchwright gpus` as a user meets them: answers, words, exit codes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console, RenderableType

import batchwright as batchwright_package
from batchwright.cli.arguments import estimate_request
from batchwright.cli.estimate_display import estimate_panel, estimate_table, fits_nowhere
from batchwright.errors import EstimateError, SpecError, VirtualGpuError
from batchwright.hardware.gpu_table import GPUS
from batchwright.planning.accumulation import balanced_plan
from batchwright.schemas.estimates import (
    Engine,
    Estimate,
    EstimateRequest,
    GpuEstimate,
    PeakBreakdown,
    PeakEstimate,
    Verdict,
)
from batchwright.schemas.gpus import ByteInterval
from batchwright.schemas.workload import WorkloadSpec
from tests.support.command import called, is_running
from tests.support.factories import mlp_spec, python_spec

GIB = 1024**3


def batchwright(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command's answer; what it traces finds this folder's workloads."""
    return called(*arguments, columns=110)


def written(folder: Path, spec: WorkloadSpec) -> Path:
    """A spec on the disk."""
    path = folder / "spec.json"
    path.write_text(spec.model_dump_json())
    return path


# --- real estimates ---


@pytest.fixture(scope="module")
def of_one_gpu(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """The real estimate of one GPU."""
    spec = written(tmp_path_factory.mktemp("spec"), mlp_spec())
    return batchwright("estimate", spec, "--gpu", "NVIDIA A10G", "--effective-batch-size", "100")


def test_one_gpu_in_detail(of_one_gpu: subprocess.CompletedProcess[str]) -> None:
    """The verdict, the interval, what holds the memory, and the plan; nothing on standard error but progress."""
    done = of_one_gpu
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    for words in ("estimate: fits", "A10G: 21.40 GiB usable", "at least 100", "parameters", "not measured"):
        assert words in text


def test_the_remedy_of_a_time_limit_is_an_option(tmp_path: Path) -> None:
    """Exit code 4; the message names the option that was typed, not the field of the request."""
    spec = written(tmp_path, python_spec("tests.support.misbehaving:build", way="hangs"))
    done = batchwright("estimate", spec, "--gpu", "L4", "--timeout", "1")
    assert done.returncode == 4
    assert "longer than 1 s: raise `--timeout`" in " ".join(done.stderr.split())


@pytest.mark.thorough
def test_sigterm_leaves_no_process_and_no_files(tmp_path: Path) -> None:
    """SIGTERM ends it: exit code 143, and what traced code has started ends with it."""
    journal = tmp_path / "processes.txt"
    spec = written(
        tmp_path, python_spec("tests.support.misbehaving:build", way="leaves-a-child-and-hangs", argument=str(journal))
    )
    (tmp_path / "tmp").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    command = [sys.executable, "-m", "batchwright", "estimate", str(spec), "--gpu", "L4"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        while not (journal.exists() and journal.read_text().endswith("\n")):
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.wait(120) == 143
    assert not list((tmp_path / "tmp").glob("batchwright-*"))
    for pid in journal.read_text().split():
        assert not is_running(pid)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "either --gpu"),
        (("--gpu", "L4", "--all-gpus"), "either --gpu"),
        (("--gpu", "H1000"), "H100"),
        (("--gpu", "A100"), "A100-40GB, A100-80GB"),
        (("--gpu", "9" * 400 + "GiB"), "from 256MiB to 4TiB"),
        (("--gpu", "L4", "--micro-batch-size", "9", "--effective-batch-size", "8"), "`--micro-batch-size` is 9"),
        (("--gpu", "L4", "--memory-margin", "0.9"), "0.5"),
        (("--gpu", "L4", "--allocator", "best"), "expandable-segments"),
    ],
)
def test_wrong_input_is_reported_before_any_work(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    """Exit code 2 with the remedy."""
    done = batchwright("estimate", written(tmp_path, mlp_spec()), *arguments)
    assert done.returncode == 2
    assert words in " ".join(done.stderr.split())


def test_every_gpu_can_be_requested(tmp_path: Path) -> None:
    """`--all-gpus` is the catalogue; the ranks of the option count."""
    request_of_all = estimate_request(spec=written(tmp_path, mlp_spec()), world_size=4, gpus=(), all_gpus=True)
    assert request_of_all.gpus == tuple(gpu.name for gpu in GPUS)
    assert request_of_all.spec.parallelism.world_size == 4
    with pytest.raises(SpecError, match="--gpu"):
        estimate_request(spec=written(tmp_path, mlp_spec()), world_size=None, gpus=(), all_gpus=False)


def test_the_catalogue_is_listed() -> None:
    """A line for each GPU; as JSON a document a line."""
    done = batchwright("gpus")
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("H100-80GB ") and "9.0" in line]
    documents = [json.loads(line) for line in batchwright("gpus", "--json").stdout.splitlines()]
    assert [document["name"] for document in documents] == [gpu.name for gpu in GPUS]


# --- exit codes of scripted estimates ---


Scripted = Callable[[Callable[[], Estimate]], None]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    """Has a function answer instead of the tracing process."""

    def script(answer: Callable[[], Estimate]) -> None:
        monkeypatch.setattr("batchwright.estimation.client.estimate", lambda *_, **__: answer())

    return script


@pytest.mark.parametrize(
    ("verdicts", "status"), [("DOES_NOT_FIT DOES_NOT_FIT", 3), ("DOES_NOT_FIT FITS", 0), ("UNCERTAIN", 0)]
)
def test_nowhere_is_an_exit_code(tmp_path: Path, scripted: Scripted, verdicts: str, status: int) -> None:
    """A GPU on which the workload may fit makes it 0."""
    answer = estimate(*(card("L4", Verdict[verdict]) for verdict in verdicts.split()))
    scripted(lambda: answer)
    command = ("estimate", written(tmp_path, mlp_spec()), "--gpu", "L4")
    assert batchwright(*command).returncode == status
    done = batchwright(*command, "--json")
    assert (done.returncode, Estimate.model_validate_json(done.stdout)) == (status, answer)


def test_an_error_of_traced_code_is_an_exit_code(tmp_path: Path, scripted: Scripted) -> None:
    """4: as JSON with the message alone, on a terminal with the place in the code."""
    error = EstimateError("labels must be below 10")
    error.add_note("in misbehaving.py")

    def fail() -> Estimate:
        raise error

    scripted(fail)
    command = ("estimate", written(tmp_path, mlp_spec()), "--gpu", "L4")
    done = batchwright(*command, "--json")
    assert (done.returncode, json.loads(done.stdout)["message"]) == (4, "labels must be below 10")
    done = batchwright(*command)
    assert done.returncode == 4
    assert "in misbehaving.py" in done.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_an_exit_code(tmp_path: Path, scripted: Scripted, number: signal.Signals, status: int) -> None:
    """The signal comes while the command waits for the tracing process."""

    def wait() -> Estimate:
        os.kill(os.getpid(), number)
        time.sleep(60)
        raise AssertionError("no signal came")

    scripted(wait)
    assert batchwright("estimate", written(tmp_path, mlp_spec()), "--gpu", "L4").returncode == status


# --- the virtual engine, where it cannot run ---


@pytest.fixture
def without_cuda_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment whose folder of packages has no CUDA build, whatever that of the tests has."""
    monkeypatch.setattr("batchwright.driving.virtual_estimate.sysconfig.get_path", lambda _: str(tmp_path))


@pytest.mark.usefixtures("without_cuda_build")
def test_the_virtual_engine_names_what_it_needs(tmp_path: Path) -> None:
    """Exit code 5, as of other hosts that lack something; the message says what installs it, and what needs nothing."""
    command = ("estimate", written(tmp_path, mlp_spec()), "--gpu", "T4", "--engine", "virtual")
    done = batchwright(*command)
    assert (done.returncode, done.stdout) == (5, "")
    for words in ("torch's CUDA build", "pip install torch==", "nvidia-cuda-crt==", "make virtual-gpu-test", "`trace`"):
        assert words in " ".join(done.stderr.split())
    done = batchwright(*command, "--json")
    assert json.loads(done.stdout)["error"] == "VirtualGpuError"


@pytest.mark.usefixtures("without_cuda_build")
def test_the_function_takes_the_engine() -> None:
    """The function takes the engine as the command does, and refuses another one by its name."""
    with pytest.raises(VirtualGpuError, match="torch's CUDA build"):
        batchwright_package.estimate(mlp_spec(), ["T4"], engine="virtual")
    with pytest.raises(SpecError, match=r"engine: must be one of trace, virtual \(got 'real'\)"):
        batchwright_package.estimate(mlp_spec(), ["T4"], engine=cast("Engine", "real"))


def test_a_card_without_a_virtual_one_is_refused_before_any_work(tmp_path: Path) -> None:
    """Exit code 5 with the cards that there are."""
    spec = written(tmp_path, mlp_spec())
    done = batchwright("estimate", spec, "--gpu", "T4", "--gpu", "MI250", "--gpu", "24GiB", "--engine", "virtual")
    assert done.returncode == 5
    words = " ".join(done.stderr.split())
    assert "no virtual cards of MI250X, 24GiB, only of " in words
    assert ", T4, " in words


def test_an_unknown_engine_is_wrong_input(tmp_path: Path) -> None:
    """Exit code 2 with those that there are."""
    done = batchwright("estimate", written(tmp_path, mlp_spec()), "--gpu", "T4", "--engine", "real")
    assert done.returncode == 2
    assert "'trace', 'virtual'" in " ".join(done.stderr.replace("│", " ").split())


# --- words ---


def shown(what: RenderableType) -> str:
    """What a terminal of 110 columns would show, runs of blanks as one."""
    console = Console(width=110, highlight=False)
    with console.capture() as capture:
        console.print(what)
    return " ".join(capture.get().replace("│", " ").split())


def request(*gpus: str, **changes: Any) -> EstimateRequest:
    """Build a request."""
    return EstimateRequest(spec=mlp_spec(), gpus=gpus, **changes)


def peak(size: int, verdict: Verdict) -> PeakEstimate:
    """Ten GiB, half of them activations."""
    return PeakEstimate(
        micro_batch_size=size,
        accumulates=True,
        verdict=verdict,
        allocated_bytes=8 * GIB,
        reserved_bytes=9 * GIB,
        capacity_bytes=17 * GIB // 2,
        outside_allocator_bytes=ByteInterval(low=GIB // 2, expected=GIB, high=2 * GIB),
        device_bytes=ByteInterval(low=9 * GIB, expected=10 * GIB, high=11 * GIB),
        breakdown=PeakBreakdown(
            parameters_bytes=GIB,
            gradients_bytes=GIB,
            optimizer_state_bytes=GIB,
            activations_bytes=5 * GIB,
            temporaries_bytes=0,
            workspace_bytes=0,
        ),
    )


def card(name: str, verdict: Verdict, largest: int = 0, **changes: Any) -> GpuEstimate:
    """The answer for one GPU."""
    values: dict[str, Any] = {
        "gpu": name,
        "usable_bytes": 20 * GIB,
        "feasible": verdict,
        "largest_micro_batch_size": largest,
        "surely_fits": max(0, largest - 1),
        "may_fit": 0 if verdict is Verdict.DOES_NOT_FIT else largest + 1,
        "peak": peak(max(1, largest), verdict),
    }
    return GpuEstimate(**(values | changes))


def estimate(*cards: GpuEstimate) -> Estimate:
    """An answer for these GPUs."""
    return Estimate(decisions="cuda", parameters=1000, gpus=cards, versions={"torch": "2.8"}, seconds=1.0)


def test_a_panel_adds_up() -> None:
    """The parts are of what the card needs, gaps between blocks included; the allocator's are named apart."""
    text = shown(estimate_panel(estimate(card("L4", Verdict.FITS, 7)), request("L4")))
    assert "activations 5.00 GiB 50%" in text
    assert "outside allocator 1.00 GiB 10%" in text
    assert "gaps between blocks 1.00 GiB 10%" in text
    assert "allocator 8.50 GiB to 9.00 GiB reserved, 8.00 GiB allocated" in text
    assert "10.00 GiB needed on the card (9.00 GiB to 11.00 GiB)" in text
    assert "micro-batch of 7 expected to fit; at least 6, at most 8" in text
    assert "1,000 parameters, CUDA's kernels traced, torch 2.8" in text


@pytest.mark.parametrize(
    ("verdict", "size", "title"),
    [
        (Verdict.FITS, None, "estimate: fits ─"),
        (Verdict.UNCERTAIN, None, "estimate: may fit, run `tune` to measure ─"),
        (Verdict.DOES_NOT_FIT, None, "estimate: nothing fits ─"),
        (Verdict.FITS, 1, "estimate: a micro-batch of 1 fits ─"),
        (Verdict.DOES_NOT_FIT, 1, "estimate: a micro-batch of 1 does not fit ─"),
    ],
)
def test_a_title_is_the_verdict(verdict: Verdict, size: int | None, title: str) -> None:
    """The title shows the verdict of the requested size, or of any size."""
    found = estimate(card("L4", verdict, peak=peak(1, verdict)))
    assert title in shown(estimate_panel(found, request("L4", micro_batch_size=size)))


def test_a_table_says_which_cards_can_run_it_at_which_plan() -> None:
    """A row for each, with the ranks' sizes; what only some cards say comes with their names."""
    plan = balanced_plan(101, 2, 30)
    cards = (
        card("L4", Verdict.FITS, 30, plan=plan, notes=("All say so.",)),
        card("T4", Verdict.DOES_NOT_FIT, notes=("All say so.", "It is old.")),
    )
    text = shown(estimate_table(estimate(*cards), request("L4", "T4", effective_batch_size=101)))
    assert "L4 20.00 GiB 10.00 GiB fits 30 29-31 1 x (26 + 25); 1 x (25 + 25)" in text
    assert "T4 20.00 GiB 10.00 GiB does not fit - -" in text
    assert text.count("All say so.") == 1
    assert "The needs include 1.00 GiB of the process outside torch's allocator." in text
    assert "T4: It is old." in text


def test_a_card_without_an_estimate_shows_its_note() -> None:
    """Neither a number of samples nor that none fit: the note has the reason."""
    unknown = card("L4", Verdict.UNCERTAIN, may_fit=0, peak=None, notes=("Nothing is known: it failed.",))
    text = shown(estimate_panel(estimate(unknown), request("L4")))
    assert "largest not known" in text
    assert "Nothing is known: it failed." in text
    assert "L4 20.00 GiB may fit - -" in shown(estimate_table(estimate(unknown, unknown), request("L4", "T4")))


def on_virtual_cards(*cards: GpuEstimate) -> Estimate:
    """An answer of the virtual engine."""
    return estimate(*cards).model_copy(update={"engine": "virtual"})


def virtual_card(name: str, verdict: Verdict, largest: int = 0) -> GpuEstimate:
    """The answer of the virtual engine for one GPU: neither an interval of sizes nor parts."""
    taken = peak(max(1, largest), verdict).model_copy(update={"breakdown": None})
    return card(name, verdict, largest, surely_fits=None, may_fit=None, probes=largest and 4, peak=taken)


def test_a_panel_of_the_virtual_engine_calls_it_virtual() -> None:
    """The sizes ran on a virtual card, nothing is measured, and what holds the memory is not known."""
    text = shown(estimate_panel(on_virtual_cards(virtual_card("L4", Verdict.FITS, 7)), request("L4")))
    assert "estimate on a virtual card: fits" in text
    assert "micro-batch of 7 ran on the virtual card, in 4 probes" in text
    assert "1,000 parameters, 4 probes on virtual cards, torch 2.8" in text
    assert "activations" not in text
    nothing = shown(estimate_panel(on_virtual_cards(virtual_card("L4", Verdict.DOES_NOT_FIT)), request("L4")))
    assert "estimate on a virtual card: nothing fits" in nothing
    assert "largest none ran on the virtual card" in nothing


def test_a_table_of_the_virtual_engine_counts_its_probes() -> None:
    """In the place of the sizes that fit surely and perhaps."""
    cards = (virtual_card("L4", Verdict.FITS, 7), virtual_card("T4", Verdict.DOES_NOT_FIT))
    text = shown(estimate_table(on_virtual_cards(*cards), request("L4", "T4")))
    assert "needs largest probes L4 20.00 GiB 10.00 GiB fits 7 4 T4 20.00 GiB 10.00 GiB does not fit - 0" in text


def test_the_requested_size_decides_the_exit_code() -> None:
    """A size that does not fit is a no, even where smaller ones do; one GPU in doubt is not a no."""
    smaller_fits = card("L4", Verdict.FITS, 7, peak=peak(50, Verdict.DOES_NOT_FIT))
    assert not fits_nowhere(estimate(smaller_fits), request("L4"))
    assert fits_nowhere(estimate(smaller_fits), request("L4", micro_batch_size=50))
    doubtful = card("T4", Verdict.UNCERTAIN, peak=peak(50, Verdict.UNCERTAIN))
    assert not fits_nowhere(estimate(smaller_fits, doubtful), request("L4", "T4", micro_batch_size=50))
