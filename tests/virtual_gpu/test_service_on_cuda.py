"""The service with a worker of `cuda:0`, on a virtual card."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.service.processes import LISTENS, Api, spoken
from tests.virtual_gpu.conftest import Host, StartHost
from tests.virtual_gpu.test_main_path import SMALL

pytestmark = pytest.mark.virtual_gpu

MIB = 1024**2


@contextmanager
def served(host: Host) -> Iterator[Api]:
    """A service with one worker, of the first card."""
    command = ["-m", "batchwright", "serve", "--port", "0"]
    environment = host.environment(BATCHWRIGHT_DATA_DIR=str(host.folder / "data"), BATCHWRIGHT_DEVICES="cuda:0")
    with spoken(command, LISTENS, environment) as service:
        api = Api(service.url)
        with api.http:
            yield api


def request(**changes: Any) -> dict[str, Any]:
    """A small tuning on the first card."""
    spec = SMALL.model_dump(mode="json")
    return {"spec": spec, "effective_batch_size": 64, "device": "cuda:0", "max_micro_batch_size": 20, **changes}


def test_a_tuning_and_a_job_succeed_over_http(start_host: StartHost) -> None:
    """From the submission to the trained model; the card is empty afterwards."""
    host = start_host("T4", compute_limit_bytes=64 * MIB)
    with served(host) as api:
        (device,) = api.get("/v1/devices")["items"]
        assert (device["device"]["id"], device["device"]["name"]) == ("cuda:0", "Tesla T4")
        tuning = api.ended(api.submit("/v1/tunings", request()))
        assert tuning["state"] == "SUCCEEDED", tuning
        recommendation = tuning["recommendation"]
        assert recommendation["plan"]["effective_batch_size"] == 64
        probes = recommendation["evidence"]["probes"]
        assert all(it["context_bytes"] and it["other_processes_bytes"] == 0 for it in probes)
        job = api.submit("/v1/jobs", {"recommendation_id": recommendation["id"], "training": {"updates": 3}})
        ended = api.ended(job)
        assert ended["state"] == "SUCCEEDED", ended
        assert ended["result"]["updates"] == 3
    assert host.session.used_bytes(0) == 0
