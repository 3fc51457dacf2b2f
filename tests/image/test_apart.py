"""An API and a worker in containers of their own, over one PostgreSQL database and one folder of runs."""

from pathlib import Path

import pytest

from tests.image.container_tools import ContainerTools
from tests.image.containers import Container, started, wait_until
from tests.image.test_image import PORT, options, tuned

pytestmark = [pytest.mark.image, pytest.mark.timeout(3600), pytest.mark.usefixtures("cpu_image")]


def test_an_api_and_a_worker_apart(
    tools: ContainerTools, volume: str, key_file: Path, database: tuple[str, ...]
) -> None:
    """The API is ready by its database alone, a worker in another container tunes, and each has its own health."""
    key = key_file.read_text().strip()
    api, worker = Container(tools, "batchwright-api", key, PORT), Container(tools, "batchwright-worker", key)
    with started(api, (*options(volume, key_file), *database), "serve", "--no-worker"):
        assert api.status("/readyz/database") == 200
        assert api.status("/readyz") == 503
        hosted = (*database, "--hostname", "worker", "--env", "BATCHWRIGHT_LEASE_SECONDS=5")
        with started(worker, hosted, "work", "--device", "cpu"):
            wait_until(lambda: api.status("/readyz") == 200, 60.0, worker.logs)
            assert tuned(api)["largest_micro_batch_size"]
            assert "batchwright work" in worker.inside("batchwright", "health")
            api.stop()
            assert worker.is_healthy()
            worker.stop()
            assert worker.inspect("{{.State.ExitCode}}") == "0"
