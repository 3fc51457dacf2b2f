"""The image with torch's CUDA build: without a card, and on a virtual one, since these hosts have none."""

import json
from pathlib import Path

import pytest

from tests.image.container_tools import ContainerTools
from tests.image.containers import TEMPORARY, Container, run_to_its_end, started
from tests.image.test_image import PORT, SPEC, ended, options

pytestmark = [pytest.mark.cuda_image, pytest.mark.timeout(7200)]

_ON_CARD = ("-m", "batchwright.virtual_gpu", "--gpu", "H100-80GB", "--", "batchwright")
_TUNING = {"spec": SPEC, "effective_batch_size": 64, "device": "cuda:0", "max_micro_batch_size": 20}


def test_the_image_describes_itself(tools: ContainerTools, cuda_image: str) -> None:
    """Its bill of materials has torch with CUDA, and its user is not root."""
    (found,) = json.loads(tools.podman("image", "inspect", cuda_image))
    assert found["Config"]["User"] == "10001"
    program = 'import sys; sys.stdout.write(open("/usr/share/batchwright/sbom.cdx.json").read())'
    status, text = run_to_its_end(tools, "--entrypoint", "python", command=("-c", program), image=cuda_image)
    assert status == 0, text
    components = {part["name"]: part["version"] for part in json.loads(text)["components"]}
    assert {"torch", "triton", "nvidia-cublas", "nvidia-nccl-cu13"} <= set(components)


def test_it_starts_without_a_card(tools: ContainerTools, cuda_image: str) -> None:
    """The CPU is its device, and torch is built for CUDA."""
    status, version = run_to_its_end(tools, *TEMPORARY, command=("--version",), image=cuda_image)
    assert (status, version.startswith("batchwright ")) == (0, True), version
    status, listed = run_to_its_end(tools, *TEMPORARY, command=("devices", "--json"), image=cuda_image)
    assert status == 0, listed
    assert [json.loads(line)["id"] for line in listed.splitlines()] == ["cpu"]
    program = "import torch; print(torch.version.cuda, torch.backends.cuda.is_built(), torch.cuda.is_available())"
    status, text = run_to_its_end(
        tools, *TEMPORARY, "--entrypoint", "python", command=("-c", program), image=cuda_image
    )
    assert status == 0, text
    assert text.split()[-2:] == ["True", "False"]


def test_it_tunes_on_a_virtual_card(tools: ContainerTools, virtual_gpu_image: str, volume: str, key_file: Path) -> None:
    """The service finds the card, and a tuning by curl succeeds on it; the root is read-only."""
    service = Container(tools, "batchwright-cuda", key_file.read_text().strip(), PORT, virtual_gpu_image)
    with started(service, (*options(volume, key_file), "--entrypoint", "python"), *_ON_CARD, "serve"):
        devices = {found["device"]["id"]: found["device"] for found in service.get("/v1/devices")["items"]}
        assert devices["cuda:0"]["name"] == "NVIDIA H100 80GB HBM3"
        tuning = service.post("/v1/tunings", _TUNING)["id"]
        recommendation = ended(service, tuning)["recommendation"]
        assert recommendation["plan"]["effective_batch_size"] == 64
        assert all(probe["context_bytes"] for probe in recommendation["evidence"]["probes"])
