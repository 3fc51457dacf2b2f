"""Build docker/Dockerfile as it is, with the packages that pip finds on this machine."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

from tests.image.base_image import BASE_IMAGE
from tests.image.container_tools import ContainerTools
from tests.support.paths import ROOT

IMAGE = "localhost/batchwright:cpu"
CUDA_IMAGE = "localhost/batchwright:latest"
RAY_IMAGE = "localhost/batchwright:ray-cpu"
REVISION = "0123456789abcdef"
_BUILD_SECONDS = 1800
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_WHEELS = "/mnt"
"""An empty folder of the base image, at which a local folder of wheels is mounted, so that no layer gets a new one."""


def build_image(tools: ContainerTools, image: str) -> None:
    """Build an image as docker/bake.json names it; layers of an earlier build are used again."""
    arguments = {**_bake_arguments(image.removeprefix("localhost/")), "PYTHON_IMAGE": BASE_IMAGE, "REVISION": REVISION}
    if _local_wheels() is not None:  # pip's own settings decide where torch comes from
        arguments.pop("TORCH_PIP_OPTIONS", None)
    words = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    _build(tools, *words, "-f", str(ROOT / "docker/Dockerfile"), "-t", image, str(ROOT))


def build_on(tools: ContainerTools, image: str, instructions: str, name: str) -> None:
    """Build another image upon one, by further instructions."""
    file = tools.folder / f"{name.rpartition('/')[2].replace(':', '-')}.dockerfile"
    file.write_text(f"FROM {image}\n{instructions}")
    (context := tools.folder / "empty").mkdir(exist_ok=True)
    _build(tools, "-f", str(file), "-t", name, str(context))


def _build(tools: ContainerTools, *arguments: str) -> None:
    options = ["--isolation", "chroot", "--network", "host", "--pull=never", "--layers", "--format", "docker"]
    options += [word for volume in _volumes(tools.folder) for word in ("--volume", volume)]
    tools.buildah("bud", *options, *tools.signature_policy, *arguments, seconds=_BUILD_SECONDS)


def _volumes(folder: Path) -> list[str]:
    """Return the mounts of a build: pip's settings, its local folder of wheels, and this machine's certificates."""
    settings, wheels = _pip_settings(), _local_wheels()
    lines = ["[global]"]
    volumes = [f"{_CERTIFICATES}:{_CERTIFICATES}:ro"]
    if wheels is not None:
        lines.append(f"find-links = {_WHEELS}")
        volumes.append(f"{wheels}:{_WHEELS}:ro")
    lines += [f"{name} = {settings[name]}" for name in ("index-url", "timeout") if name in settings]
    (folder / "pip.conf").write_text("\n".join(lines) + "\n")
    return [*volumes, f"{folder / 'pip.conf'}:/etc/pip.conf:ro"]


def _bake_arguments(tag: str) -> dict[str, str]:
    """Return the arguments of the build that has this tag, with those of the builds that it inherits from."""
    targets = json.loads((ROOT / "docker/bake.json").read_text())["target"]
    (name,) = (name for name, target in targets.items() if tag in target["tags"])
    arguments: dict[str, str] = {}
    pending = [name]
    while pending:
        target = targets[pending.pop()]
        arguments = {**target.get("args", {}), **arguments}
        pending += target.get("inherits", [])
    return arguments


def _local_wheels() -> str | None:
    """Return the folder of wheels in pip's settings, if there is one."""
    return next((word for word in _pip_settings().get("find-links", "").split() if Path(word).is_dir()), None)


def _pip_settings() -> dict[str, str]:
    """Return pip's settings on this machine, those of the environment first."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    settings: dict[str, str] = {}
    for line in found.splitlines():
        name, _, value = line.partition("=")
        settings.setdefault(name.rpartition(".")[2], " ".join(shlex.split(value)))
    return settings
