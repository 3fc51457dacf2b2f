"""Build docker/Dockerfile as it is, with the packages that pip finds on this machine."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

from tests.image.base_image import BASE_IMAGE
from tests.image.container_tools import ContainerTools
from tests.support.paths import ROOT

IMAGE = "localhost/batchwright:cpu"
REVISION = "0123456789abcdef"
_BUILD_SECONDS = 1800
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_WHEELS = "/mnt"
"""An empty folder of the base image, at which a local folder of wheels is mounted, so that no layer gets a new one."""


def build_image(tools: ContainerTools) -> None:
    """Build the image for the CPU; layers of an earlier build are used again."""
    arguments = {"PYTHON_IMAGE": BASE_IMAGE, "RUNTIME_PACKAGES": "", "REVISION": REVISION}
    options = ["--isolation", "chroot", "--network", "host", "--pull=never", "--layers", "--format", "docker"]
    options += [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    options += [word for volume in _volumes(tools.folder) for word in ("--volume", volume)]
    files = ["-f", str(ROOT / "docker/Dockerfile"), "-t", IMAGE, str(ROOT)]
    tools.buildah("bud", *options, *tools.signature_policy, *files, seconds=_BUILD_SECONDS)


def _volumes(folder: Path) -> list[str]:
    """Return the mounts of a build: pip's settings, its local folder of wheels, and this machine's certificates."""
    settings = _pip_settings()
    lines = ["[global]"]
    volumes = [f"{_CERTIFICATES}:{_CERTIFICATES}:ro"]
    wheels = next((word for word in settings.get("find-links", "").split() if Path(word).is_dir()), None)
    if wheels is not None:
        lines.append(f"find-links = {_WHEELS}")
        volumes.append(f"{wheels}:{_WHEELS}:ro")
    lines += [f"{name} = {settings[name]}" for name in ("index-url", "timeout") if name in settings]
    (folder / "pip.conf").write_text("\n".join(lines) + "\n")
    return [*volumes, f"{folder / 'pip.conf'}:/etc/pip.conf:ro"]


def _pip_settings() -> dict[str, str]:
    """Return pip's settings on this machine, those of the environment first."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    settings: dict[str, str] = {}
    for line in found.splitlines():
        name, _, value = line.partition("=")
        settings.setdefault(name.rpartition(".")[2], " ".join(shlex.split(value)))
    return settings
