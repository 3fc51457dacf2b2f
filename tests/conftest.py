"""Fixtures and hooks of all tests: isolation, and last lines that say how many GPU tests did not run."""

import gc
import os
import resource
import signal
import sys
from collections.abc import Generator, Iterator
from importlib import metadata
from itertools import count
from pathlib import Path

import pytest
from hypothesis import settings

from batchwright.hardware.inventory import cpu
from batchwright.probing.supervisor import ProbeSupervisor
from tests.support.factories import mlp_spec
from tests.support.forked import await_server, forked_starts
from tests.support.paths import ROOT

pytest_plugins = ("tests.support.processor_time",)

settings.register_profile("batchwright", deadline=None)  # no example fails for a busy machine
settings.load_profile("batchwright")

# Before torch is imported: several processes of tests share two cores, and their models are small.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
for _name in [
    name for name in os.environ if name.startswith("BATCHWRIGHT_") and not name.startswith("BATCHWRIGHT_TEST_")
]:
    del os.environ[_name]
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a suite started in the background of a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)  # processes of the tests would inherit it, deaf to Ctrl-C

_SOFT_LIMITS = {kind: resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_NOFILE)}


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _has_virtual_gpu() -> bool:
    """Return whether the header is installed that virtual cards are built with, beside torch's CUDA build."""
    return any(metadata.distributions(name="nvidia-cuda-crt"))


_REQUIREMENTS = {
    "gpu": (_has_gpu, "no CUDA device here", "GPU tests were NOT run for want of a CUDA device: `make gpu-test`"),
    "virtual_gpu": (
        _has_virtual_gpu,
        "torch's CUDA build is not installed here, with the headers that virtual cards are built with",
        "tests on virtual cards were NOT run without torch's CUDA build: `make virtual-gpu-test`",
    ),
}
"""By marker: the check, the reason of a skipped test, and what the last lines say."""


MANY_MODULES = 100
"""Modules whose import by a test makes one more collection cheaper than the later ones that would look through them."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage during the import of the tests, a third of its time, and never look through it again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Never look again through what a module or a test has imported, which each later collection would."""
    known = len(sys.modules)
    try:
        return (yield)
    finally:
        imported = len(sys.modules) - known
        if nextitem is not None and (nextitem.path != item.path or imported > MANY_MODULES):
            gc.collect()
            gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests whose marker names what is not here; the last lines count these."""
    for marker, (is_here, reason, _) in _REQUIREMENTS.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and not is_here():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))
    if "VIRTUAL_GPU_SESSION" in os.environ:
        for item in items:
            if (mark := item.get_closest_marker("physical_gpu")) is not None:
                item.add_marker(pytest.mark.skip(reason=f"not on a virtual card: {mark.args[0]}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests were not run for want of a device or of a build of torch."""
    skipped = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    for _, reason, not_run in _REQUIREMENTS.values():
        if count := sum(reason in text for text in skipped):
            terminalreporter.write_line(f"{count} {not_run} runs them.")


@pytest.fixture(scope="session")
def _data_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Paths of folders, one for each test: ``mktemp`` would look through those of all earlier tests."""
    parent = tmp_path_factory.mktemp("data")
    return (parent / str(number) for number in count())


@pytest.fixture(autouse=True)
def _own_world(monkeypatch: pytest.MonkeyPatch, _data_folders: Iterator[Path]) -> Iterator[None]:
    """No test sees the user's data folder, or the limits that a run inside the process of another test has set."""
    folder = next(_data_folders)
    folder.mkdir()
    monkeypatch.setenv("BATCHWRIGHT_DATA_DIR", str(folder))
    yield
    for kind, soft in _SOFT_LIMITS.items():
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (soft, hard))


@pytest.fixture
def own_datasets_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the user's cache of `datasets`."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def forked() -> Iterator[None]:
    """Runs and supervisors of the module's tests start no interpreter: their processes are forked, torch imported."""
    await_server()
    with forked_starts():
        yield


@pytest.fixture(scope="module")
def tracing(forked: None) -> None:
    """Tracing processes of the module's tests are forked too; their server starts now, and not within a test."""
    del forked
    await_server(traces=True)


@pytest.fixture(scope="module")
def supervisor(forked: None) -> Iterator[ProbeSupervisor]:
    """Real probes on the CPU, which find the workloads of the tests."""
    del forked
    before = Path.cwd()
    os.chdir(ROOT)
    with ProbeSupervisor(cpu()) as running:
        running.start(mlp_spec())
        os.chdir(before)
        yield running
