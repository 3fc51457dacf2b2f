"""The image by itself: hardened, complete, and resumed after every kind of end."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.image.container_tools import ContainerTools
from tests.image.containers import TEMPORARY, WORK_SECONDS, Container, run_to_its_end, started, wait_until
from tests.image.image_build import IMAGE, REVISION

pytestmark = [pytest.mark.image, pytest.mark.timeout(3600), pytest.mark.usefixtures("cpu_image")]

PORT = 8080
MEMORY_BYTES = 2 * 1024**3
SPEC = {
    "model": {"kind": "reference", "architecture": {"name": "gpt", "layers": 2, "width": 128}},
    "batch": {"sequence_length": 64},
}
TUNING = {"spec": SPEC, "effective_batch_size": 100, "device": "cpu", "memory_limit_bytes": 128 * 1024**2}


def options(volume: str, key_file: Path, host: str = "first") -> tuple[str, ...]:
    """The options of a service that other machines could reach, with its key from a file."""
    settings = {"HOST": "0.0.0.0", "PORT": str(PORT), "ADMIN_KEY_FILE": "/secret/key", "LEASE_SECONDS": "5"}  # noqa: S104
    words = [word for name, value in settings.items() for word in ("--env", f"BATCHWRIGHT_{name}={value}")]
    mounts = ["--volume", f"{volume}:/data", "--volume", f"{key_file}:/secret/key:ro"]
    return (*words, *mounts, "--hostname", host)


def container(tools: ContainerTools, key_file: Path) -> Container:
    """The container of this module."""
    return Container(tools, "batchwright-test", key_file.read_text().strip(), PORT)


def tuned(service: Container) -> dict[str, object]:
    """Submit the tuning by curl, and return its recommendation."""
    tuning = service.post("/v1/tunings", TUNING)["id"]
    recommendation: dict[str, object] = ended(service, tuning)["recommendation"]
    return recommendation


def ended(service: Container, tuning: str) -> dict[str, Any]:
    """Wait for a tuning, and return it."""
    path = f"/v1/tunings/{tuning}"
    terminal = {"SUCCEEDED", "FAILED", "CANCELLED", "INFEASIBLE"}
    wait_until(lambda: service.get(path)["state"] in terminal, WORK_SECONDS, service.logs)
    tuning_document = service.get(path)
    assert tuning_document["state"] == "SUCCEEDED", tuning_document
    return tuning_document


def test_the_image_describes_itself(tools: ContainerTools) -> None:
    """Labels with the revision, ports, an unprivileged user, and a list of what is installed."""
    (found,) = json.loads(tools.podman("image", "inspect", IMAGE))
    config = found["Config"]
    assert config["User"] == "10001"
    assert set(config["ExposedPorts"]) == {"8000/tcp", "9100/tcp"}
    assert config["Labels"]["org.opencontainers.image.revision"] == REVISION
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    program = 'import sys; sys.stdout.write(open("/usr/share/batchwright/sbom.cdx.json").read())'
    status, text = run_to_its_end(tools, "--entrypoint", "python", command=("-c", program))
    assert status == 0, text
    components = {part["name"]: part["version"] for part in json.loads(text)["components"]}
    assert {"torch", "batchwright", "fastapi", "psycopg", "opentelemetry-sdk"} <= set(components)
    assert "pytest" not in components


def test_a_service_is_hardened_and_tunes(tools: ContainerTools, volume: str, key_file: Path) -> None:
    """On a read-only root, as an unprivileged user, on another port; then stopped, and started under another name."""
    service = container(tools, key_file)
    with started(service, options(volume, key_file)):
        assert service.inside("sh", "-c", "id -u; tr '\\0' ' ' < /proc/1/cmdline").split("\n")[0] == "10001"
        assert "batchwright serve" in service.inside("sh", "-c", "tr '\\0' ' ' < /proc/1/cmdline")
        assert service.inside("stat", "-c", "%a", "/data", "/data/batchwright.db").split() == ["700", "600"]
        assert service.inside("sh", "-c", "command -v gcc g++ cc c++ ld as || true") == ""
        assert service.status("/readyz/database", "--header", "Host: 10.42.0.17:8080") == 200
        assert service.status("/readyz", "--header", "Host: 10.42.0.17:8080") == 200
        assert service.status("/v1/devices", "--header", "Authorization: Bearer bw_0_0") == 401
        estimate = {"spec": SPEC, "gpus": ["A10G"], "effective_batch_size": 64}
        assert service.post("/v1/estimates", estimate)["decisions"] == "cuda"
        first = tuned(service)
        others = "find / -xdev -type f -newer /data/locks/cpu.lock -not -path '/proc/*' -not -path '/sys/*'"
        assert service.inside("sh", "-c", others + " 2> /dev/null || true") == ""
        seconds = service.stop()
        assert service.inspect("{{.State.ExitCode}}") == "0"
        assert seconds < 30
    with started(service, options(volume, key_file, host="second")):
        assert tuned(service)["id"] == first["id"]


def test_a_killed_service_goes_on(tools: ContainerTools, volume: str, key_file: Path) -> None:
    """After kill -9 of process 1 in a tuning, a container on the same volume takes the work over and ends it."""
    service = container(tools, key_file)
    with started(service, options(volume, key_file)):
        tuning = service.post("/v1/tunings", TUNING)["id"]
        wait_until(lambda: service.get(f"/v1/tunings/{tuning}")["state"] == "RUNNING", WORK_SECONDS, service.logs)
        tools.podman("kill", "--signal", "KILL", service.name)
    with started(service, options(volume, key_file)):
        assert ended(service, tuning)["recommendation"]


def test_the_memory_limit_is_the_device(tools: ContainerTools, volume: str, key_file: Path) -> None:
    """A container's limit, not the host's memory, is what the CPU has."""
    service = container(tools, key_file)
    limited = (*options(volume, key_file), "--memory", str(MEMORY_BYTES))
    with started(service, limited):
        (device,) = service.get("/v1/devices")["items"]
        assert device["device"]["total_bytes"] == MEMORY_BYTES


def test_missing_mounts_are_named(tools: ContainerTools, volume: str, key_file: Path) -> None:
    """A root without /tmp, and a data folder of another user: a message with the remedy, no traceback."""
    given = options(volume, key_file)
    status, text = run_to_its_end(tools, *given, "--workdir", "/")  # else the working folder /data takes such files
    assert (status, "Traceback" in text) == (2, False)
    assert "mount one at /tmp" in " ".join(text.split())
    status, text = run_to_its_end(tools, *TEMPORARY, *given, "--user", "10002")
    assert (status, "Traceback" in text) == (2, False)
    assert "/data" in text
    assert "by user 10002" in " ".join(text.split())
