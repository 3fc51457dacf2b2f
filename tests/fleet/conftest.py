"""A database, and services that dispatch to a cluster."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.fleet.work import Dispatching
from tests.support.exports.slurm_cluster import Slurm
from tests.support.service.postgres import own_server
from tests.support.service.processes import LISTENS, spoken

StartService = Callable[..., Dispatching]
LEASE_SECONDS = 10


@pytest.fixture(scope="session", autouse=True)
def _installed() -> None:
    """Skip where the engines are not installed."""
    missing = [name for name in ("ray", "submitit") if find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed here: {', '.join(missing)}; `make fleet-test` has them")


@pytest.fixture
def database() -> Iterator[str]:
    """An empty database, which processes of any user reach."""
    with own_server() as url:
        yield url.render_as_string(hide_password=False)


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    """Slurm's commands; no cluster runs yet."""
    root = Path(os.environ.get("BATCHWRIGHT_TEST_SLURM", "")).resolve()
    if not (root / "usr" / "sbin").is_dir():
        pytest.skip("BATCHWRIGHT_TEST_SLURM names no folder with Slurm: `make fleet-test` could not make it")
    folder = tmp_path / "slurm"
    folder.mkdir()
    return Slurm(root, folder)


def environment_of(slurm: Slurm) -> dict[str, str]:
    """The variables of Slurm's commands alone; the path has Batchwright too."""
    path = f"{Path(sys.executable).parent}:{slurm.environment['PATH']}"
    return {name: slurm.environment[name] for name in ("LD_LIBRARY_PATH", "SLURM_CONF")} | {"PATH": path}


@pytest.fixture
def serve(database: str, tmp_path: Path) -> Iterator[StartService]:
    """Starts `batchwright serve` with options."""
    with ExitStack() as stack:

        def start(*options: str, environment: Mapping[str, str] | None = None) -> Dispatching:
            settings = {
                "BATCHWRIGHT_DATABASE_URL": database,
                "BATCHWRIGHT_DATA_DIR": str(tmp_path / "api"),
                "BATCHWRIGHT_LEASE_SECONDS": str(LEASE_SECONDS),
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            }
            command = ["-m", "batchwright", "serve", "--port", "0", *options]
            process = stack.enter_context(spoken(command, LISTENS, settings | dict(environment or {})))
            assert process.url, "".join(process.lines)
            service = Dispatching(process, tmp_path / "api" / "runs")
            stack.callback(service.api.http.close)
            return service

        yield start
