"""A Ray node in the image with Ray, started as KubeRay starts one, and an API that dispatches to it."""

import secrets
from pathlib import Path

import pytest

from tests.image.container_tools import ContainerTools
from tests.image.containers import Container, started, wait_until
from tests.image.test_image import PORT, tuned

pytestmark = [pytest.mark.image, pytest.mark.timeout(3600)]

_NODE = """ulimit -n 65536; ray start --head --num-cpus=1 --object-store-memory=100000000 \
--resources='{"batchwright_cpu": 1}' --dashboard-host=0.0.0.0 --disable-usage-stats --block"""
_ASK = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1])"


def _asked(node: Container, url: str) -> tuple[int, str]:
    """Ask a URL inside of the node without a token; the status is 0 if it answers."""
    return node.tools.podman_status("exec", node.name, "python", "-c", _ASK, url)


def _is_healthy(node: Container) -> bool:
    """Ask the route of the chart's probes."""
    return _asked(node, "http://localhost:52365/api/healthz")[0] == 0


def test_work_runs_on_a_ray_node(
    tools: ContainerTools, ray_image: str, volume: str, key_file: Path, database: tuple[str, ...]
) -> None:
    """A tuning by curl runs on a node with a read-only root, whose jobs need a token."""
    token = ("--env", "RAY_AUTH_MODE=token", "--env", f"RAY_AUTH_TOKEN={secrets.token_hex(32)}")
    shared = (*database, *token, "--volume", f"{volume}:/runs", "--env", "BATCHWRIGHT_RUNS_DIR=/runs")
    own = ("--shm-size", "1g", "--hostname", "ray-node")
    node = Container(tools, "batchwright-ray-node", "", PORT, ray_image)
    with started(node, (*shared, *own, "--entrypoint", "/bin/bash"), "-c", "--", _NODE, is_ready=_is_healthy):
        status, text = _asked(node, "http://localhost:8265/api/jobs/")
        assert (status, "HTTP Error 401" in text) == (1, True), text
        api = Container(
            tools, "batchwright-ray-api", key_file.read_text().strip(), PORT, ray_image, f"container:{node.name}"
        )
        settings = {"HOST": "0.0.0.0", "PORT": str(PORT), "ADMIN_KEY_FILE": "/secret/key"}  # noqa: S104
        words = [word for name, value in settings.items() for word in ("--env", f"BATCHWRIGHT_{name}={value}")]
        mounts = ("--volume", f"{key_file}:/secret/key:ro")
        with started(api, (*shared, *words, *mounts), "serve", "--ray", "http://127.0.0.1:8265"):
            wait_until(lambda: bool(api.get("/v1/devices")["items"]), 180.0, api.logs)
            assert tuned(api)["largest_micro_batch_size"]
            (cluster,) = api.get("/v1/fleet")["items"]
            assert [found["slots"] for found in cluster["nodes"]] == [["ray-node/cpu"]]
