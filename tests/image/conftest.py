"""The built image, and an operator's key."""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.image.base_image import ensure_base_image
from tests.image.container_tools import ContainerTools, reason_to_skip
from tests.image.image_build import CUDA_IMAGE, IMAGE, RAY_IMAGE, build_image, build_on
from tests.support.paths import ROOT
from tests.support.service.postgres import own_server

_DEFAULT_FOLDER = ROOT / ".venv" / "images"
_VIRTUAL_GPU = """\
USER 0
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && pip install nvidia-cuda-crt==13.0.88
USER 10001
RUN ["python", "-m", "batchwright.virtual_gpu", "--gpu", "H100-80GB", "--", "true"]
"""
"""Instructions that compile the libraries of virtual GPUs where their user looks for them."""


@pytest.fixture(scope="session")
def tools() -> ContainerTools:
    """Return the tools, and the base image made by them."""
    if (reason := reason_to_skip()) is not None:
        pytest.skip(reason)
    folder = Path(os.environ.get("BATCHWRIGHT_TEST_IMAGES") or _DEFAULT_FOLDER).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    unpacked = ContainerTools(folder)
    unpacked.unpack()
    ensure_base_image(unpacked)
    return unpacked


@pytest.fixture(scope="session")
def cpu_image(tools: ContainerTools) -> str:
    """Return the name of the image with torch's CPU build."""
    build_image(tools, IMAGE)
    return IMAGE


@pytest.fixture(scope="session")
def cuda_image(tools: ContainerTools) -> str:
    """Return the name of the image with torch's CUDA build."""
    build_image(tools, CUDA_IMAGE)
    return CUDA_IMAGE


@pytest.fixture(scope="session")
def ray_image(tools: ContainerTools) -> str:
    """Return the name of the image with Ray and torch's CPU build."""
    build_image(tools, RAY_IMAGE)
    return RAY_IMAGE


@pytest.fixture(scope="session")
def virtual_gpu_image(tools: ContainerTools, cuda_image: str) -> str:
    """Return the name of the image with torch's CUDA build, and what virtual GPUs are compiled with upon it."""
    name = "localhost/batchwright:virtual-gpu"
    build_on(tools, cuda_image, _VIRTUAL_GPU, name)
    return name


@pytest.fixture(scope="session")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with a key that was made beforehand, readable in a container."""
    file = tmp_path_factory.mktemp("secret") / "admin-key"
    file.write_text(f"bw_{secrets.token_hex(8)}_{secrets.token_hex(32)}\n")
    file.chmod(0o444)
    return file


@pytest.fixture
def database() -> Iterator[tuple[str, ...]]:
    """The options that reach a PostgreSQL server by its socket: the containers have no network."""
    with own_server() as url:
        folder = Path(str(url.query["host"]))
        folder.chmod(0o755)
        reached = "postgresql://postgres@/postgres?host=/postgres"
        yield ("--volume", f"{folder}:/postgres", "--env", f"BATCHWRIGHT_DATABASE_URL={reached}")


@pytest.fixture
def volume(tools: ContainerTools) -> Iterator[str]:
    """Return a new volume, which is removed after the test."""
    name = f"batchwright-test-{secrets.token_hex(4)}"
    tools.podman("volume", "create", name)
    yield name
    tools.podman_status("volume", "rm", "--force", name)
