"""``find_batch_size`` in cells of a notebook, run by Jupyter's kernel: classes of ``__main__``, errors, interrupts."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.support.paths import ROOT

WORKLOAD = """
import torch, batchwright
from torch import nn
VALUES = 2**19

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.ones(VALUES))
    def forward(self, samples):
        return samples * self.weights

def loss(model, batch):
    return model(batch).square().sum() / VALUES, len(batch)

options = dict(effective_batch_size=30, memory_limit="128MiB", device="cpu", progress=False)
"""
BATCH = "lambda size: torch.rand(size, 1).expand(size, VALUES).contiguous()"
FIND = f"batchwright.find_batch_size(Scaled, {BATCH}, loss, **options)"
CHILDREN = """
import glob
print([child for file in glob.glob("/proc/self/task/*/children") for child in open(file).read().split()])
"""


_ENDED: list[object] = []
"""Notebooks whose kernel has ended: jupyter_client leaves a socket open, which the garbage collector warns of."""


class _ThisInterpreter(KernelSpecManager):
    """The kernel of this environment, whatever kernels are installed for the user."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        del kernel_name
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, language="python")


class Notebook:
    """A notebook with its kernel."""

    def __init__(self, folder: Path) -> None:
        manager = AsyncKernelManager(kernel_spec_manager=_ThisInterpreter(), kernel_name="python3")
        book = nbformat.v4.new_notebook()  # type: ignore[no-untyped-call] # nbformat's own
        options: dict[str, Any] = {"km": manager, "timeout": 600, "resources": {"metadata": {"path": str(folder)}}}
        self.manager = manager
        self.client = NotebookClient(book, **options)

    def run(self, source: str) -> list[Any]:
        """Run a cell and return its outputs.

        Raises:
            CellExecutionError: when the cell raises.
        """
        cell = nbformat.v4.new_code_cell(source)  # type: ignore[no-untyped-call] # as above
        self.client.nb.cells.append(cell)
        self.client.execute_cell(cell, len(self.client.nb.cells) - 1)
        return list(cell.outputs)

    def printed(self, source: str) -> str:
        """Run a cell and return what it prints."""
        return "".join(output.text for output in self.run(source) if output.output_type == "stream")


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A notebook in a folder of its own, with the workload defined in its first cell."""
    opened = Notebook(tmp_path_factory.mktemp("notebook"))
    with opened.client.setup_kernel(env={**os.environ, "PYTHONPATH": str(ROOT)}):
        opened.run(WORKLOAD)
        yield opened
    _ENDED.append(opened)


@pytest.fixture(scope="module")
def shown(notebook: Notebook) -> list[Any]:
    """The outputs of a cell that shows a recommendation and the progress of its search."""
    return notebook.run(f"options['progress'] = True\nfound = {FIND}\noptions['progress'] = False\nfound")


def test_a_class_of_a_cell_and_a_lambda(notebook: Notebook, shown: list[Any]) -> None:
    """The plan is exact, a larger size ran out of memory, and the cell shows the recommendation."""
    assert "ran out of memory" in shown[-1].data["text/html"]
    checks = "print(sum(map(sum, found.plan.micro_batch_sizes)), found.evidence.proof.shows_larger_fail)"
    assert notebook.printed(checks).split() == ["30", "True"]


def test_progress_is_one_output(shown: list[Any]) -> None:
    """Each step replaces it; at the end it has all probes, under a heading, and no step."""
    (progress,) = [output for output in shown[:-1] if "text/html" in output.get("data", {})]
    html = progress.data["text/html"]
    assert "<b>Probes of real updates</b>" in html
    assert all(word in html for word in ("micro-batch", "seconds", "FIT", "OOM"))


@pytest.mark.thorough
def test_a_bug_of_a_cell_is_shown_with_its_line(notebook: Notebook) -> None:
    """The traceback of the user's function is in the cell's error."""
    bug = "def buggy(size):\n    return torch.rand(size, VALUES, layout='sparse')\n"
    with pytest.raises(CellExecutionError) as raised:
        notebook.run(bug + FIND.replace(BATCH, "buggy"))
    assert "TuningFailedError" in str(raised.value)
    assert "in buggy" in str(raised.value)


@pytest.fixture(scope="module")
def interrupted(notebook: Notebook) -> str:
    """The error of a cell that was interrupted in a function of the user."""
    slow = "import time\ndef endless(size):\n    open('started', 'w').close()\n    time.sleep(600)\n"
    marker = Path(notebook.client.resources["metadata"]["path"], "started")

    kernel = int(notebook.printed("import os; print(os.getpid())"))

    def interrupt() -> None:
        while not marker.exists():
            time.sleep(0.05)
        os.kill(kernel, signal.SIGINT)

    started = threading.Thread(target=interrupt, daemon=True)
    started.start()
    with pytest.raises(CellExecutionError) as raised:
        notebook.run(slow + FIND.replace(BATCH, "endless"))
    started.join()
    return str(raised.value)


def test_an_interrupt_ends_the_processes(notebook: Notebook, interrupted: str) -> None:
    """The notebook's button: no process is left, and the next cell runs."""
    assert "KeyboardInterrupt" in interrupted
    assert notebook.printed(CHILDREN).strip() == "[]"
