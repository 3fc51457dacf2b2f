"""A host with virtual cards, of the test's own: what it holds and what fails there, and commands that run on it."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.workload import WorkloadSpec
from batchwright.virtual_gpu.description import VirtualGpu, VirtualHost
from batchwright.virtual_gpu.session import VirtualGpuSession
from tests.support.paths import ROOT

MIB = 1024**2
_TIMEOUT_SECONDS = 400.0
"""Ends a hang; several times what the longest command takes on a quiet machine."""


@dataclass(frozen=True)
class Host:
    """A session, and commands that run in it as a user's would."""

    session: VirtualGpuSession
    folder: Path

    def environment(self, **variables: str) -> dict[str, str]:
        """The environment of every process on this host."""
        own = {**os.environ, **self.session.environment(), **variables}
        own["PYTHONPATH"] = os.pathsep.join([own.get("PYTHONPATH", ""), str(ROOT)]).strip(os.pathsep)
        return own

    def run(self, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run Python with these arguments to its end."""
        return subprocess.run(
            [sys.executable, *map(str, command)],
            cwd=self.folder,
            env=self.environment(**variables),
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_SECONDS,
        )

    def batchwright(self, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Call the command line."""
        return self.run("-m", "batchwright", *arguments, **variables)

    @contextmanager
    def started(self, *arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
        """Call the command line and go on; what is left of it in the end is killed."""
        process = subprocess.Popen(
            [sys.executable, "-m", "batchwright", *map(str, arguments)],
            cwd=self.folder,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def written(self, spec: WorkloadSpec) -> Path:
        """A spec on the disk."""
        path = self.folder / "spec.json"
        path.write_text(spec.model_dump_json())
        return path

    def tuned(self, spec: WorkloadSpec, effective_batch_size: int, *options: str | Path) -> Recommendation:
        """The recommendation of `batchwright tune`."""
        batch = ("--effective-batch-size", str(effective_batch_size))
        ended = self.batchwright("tune", self.written(spec), *batch, *options, "--json")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return Recommendation.model_validate_json(ended.stdout)

    def tuned_patiently(self, spec: WorkloadSpec, effective_batch_size: int) -> Recommendation:
        """The recommendation of a search that an estimate leads, however long the estimate takes."""
        program = ("-m", "tests.virtual_gpu.patient_tuning")
        ended = self.run(*program, self.written(spec), str(effective_batch_size))
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return Recommendation.model_validate_json(ended.stdout)


StartHost = Callable[..., Host]


@pytest.fixture
def start_host(tmp_path: Path) -> Iterator[StartHost]:
    """Start a host with the cards that are named or described; fields of its description may be given."""
    with ExitStack() as stack:

        def start(*cards: str | VirtualGpu, compute_limit_bytes: int = MIB, **fields: Any) -> Host:
            gpus = tuple(VirtualGpu.of(card) if isinstance(card, str) else card for card in cards)
            session = VirtualGpuSession(VirtualHost(gpus=gpus, **fields), compute_limit_bytes=compute_limit_bytes)
            return Host(stack.enter_context(session), tmp_path)

        yield start
