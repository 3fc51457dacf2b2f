"""The built image, and an operator's key."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.image.base_image import ensure_base_image
from tests.image.container_tools import ContainerTools, reason_to_skip
from tests.image.image_build import build_image
from tests.support.paths import ROOT

_DEFAULT_FOLDER = ROOT / ".venv" / "images"


@pytest.fixture(scope="session")
def tools() -> ContainerTools:
    """Return the tools, with the image built by them."""
    if (reason := reason_to_skip()) is not None:
        pytest.skip(reason)
    folder = Path(os.environ.get("BATCHWRIGHT_TEST_IMAGES") or _DEFAULT_FOLDER).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    unpacked = ContainerTools(folder)
    unpacked.unpack()
    ensure_base_image(unpacked)
    build_image(unpacked)
    return unpacked


@pytest.fixture(scope="session")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with a key that was made beforehand, readable in a container."""
    file = tmp_path_factory.mktemp("secret") / "admin-key"
    file.write_text(f"bw_{secrets.token_hex(8)}_{secrets.token_hex(32)}\n")
    file.chmod(0o444)
    return file


@pytest.fixture
def volume(tools: ContainerTools) -> Iterator[str]:
    """Return a new volume, which is removed after the test."""
    name = f"batchwright-test-{secrets.token_hex(4)}"
    tools.podman("volume", "create", name)
    yield name
    tools.podman_status("volume", "rm", "--force", name)
