"""What every test shares: a quiet world, and a last line that says which GPU tests did not run."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.forked import forked_starts

settings.register_profile("batchwright", deadline=None)  # no example fails for a busy machine
settings.load_profile("batchwright")

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: spinning threads starve two cores
for _name in [
    name for name in os.environ if name.startswith("BATCHWRIGHT_") and not name.startswith("BATCHWRIGHT_TEST_")
]:
    del os.environ[_name]
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a suite started in the background of a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)  # processes of the tests would inherit it, deaf to Ctrl-C

_SOFT_LIMITS = {kind: resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_NOFILE)}


def _has_gpu() -> bool:
    import torch  # noqa: PLC0415 - only where GPU tests were collected

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is no GPU; they are counted in the last lines."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many GPU tests were not run."""
    skipped = sum("gpu" in report.keywords for report in terminalreporter.stats.get("skipped", []))
    if skipped:
        terminalreporter.write_line(
            f"{skipped} GPU tests were NOT run for want of a CUDA device: `make gpu-test` runs them."
        )


@pytest.fixture(autouse=True)
def _own_world(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test sees the user's data folder, or the limits that a run inside the process of another test has set."""
    monkeypatch.setenv("BATCHWRIGHT_DATA_DIR", str(tmp_path_factory.mktemp("data")))
    yield
    for kind, soft in _SOFT_LIMITS.items():
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (soft, hard))


@pytest.fixture(scope="module")
def forked() -> Iterator[None]:
    """Runs and supervisors of the module's tests start no interpreter: their processes are forked, torch imported."""
    with forked_starts():
        yield
