"""Unpack the tools that build and run containers from Debian's packages, and call them without installing any."""

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

_PACKAGES = (
    "buildah",
    "podman",
    "conmon",
    "runc",  # crun does not run under hybrid cgroups
    "debootstrap",
    "patchelf",
    "libgpgme11",
    "libassuan0",
    "libsubid4",
    "golang-github-containers-common",  # the seccomp profile
)
_DOWNLOAD_SECONDS = 600
_CALL_SECONDS = 300


class ToolFailedError(RuntimeError):
    """A tool failed; the message has its command and the end of its output."""


def reason_to_skip() -> str | None:
    """Return why images cannot be built here; None where they can."""
    missing = [name for name in ("apt-get", "dpkg", "nsenter", "curl", "tar") if shutil.which(name) is None]
    if os.geteuid() != 0:
        return "images are built and run by root only"
    if missing:
        return f"images are built from Debian's packages, and {', '.join(missing)} is not here"
    return None


class ContainerTools:
    """The tools and their settings below one folder, which may be used again.

    Args:
        folder: the folder of the packages, the unpacked tools, the images and the containers.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "tools"

    def unpack(self) -> None:
        """Download and unpack the tools, unless they are there, and write their settings."""
        ready = self.folder / "tools.ready"
        if not ready.exists():
            downloads = self.folder / "packages"
            downloads.mkdir(parents=True, exist_ok=True)
            call(["apt-get", "download", "-q", *_PACKAGES], cwd=downloads, seconds=_DOWNLOAD_SECONDS)
            for package in downloads.glob("*.deb"):
                call(["dpkg", "-x", str(package), str(self.root)])
            self._find_libraries()
            ready.touch()
        self._configure()

    def buildah(self, *arguments: str, seconds: float = _CALL_SECONDS) -> str:
        """Call buildah, and return its output."""
        return call(
            [str(self.root / "usr/bin/buildah"), *self._storage, *arguments], self._environment, seconds=seconds
        )

    def podman(self, *arguments: str, seconds: float = _CALL_SECONDS) -> str:
        """Call podman, and return its output."""
        return call(self.podman_command(*arguments), self._environment, seconds=seconds)

    def podman_status(self, *arguments: str, seconds: float = _CALL_SECONDS) -> tuple[int, str]:
        """Call podman, and return its exit status and output; a failure is none of the tool's."""
        done = subprocess.run(
            self.podman_command(*arguments),
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )
        return done.returncode, done.stdout + done.stderr

    def podman_command(self, *arguments: str) -> list[str]:
        """Return the command line of a call of podman."""
        temporary = str(self.folder / "podman")
        return [str(self.root / "usr/bin/podman"), *self._storage, "--tmpdir", temporary, *arguments]

    @property
    def signature_policy(self) -> list[str]:
        """Options of buildah for images that nobody signed."""
        return ["--signature-policy", str(self.folder / "policy.json")]

    @cached_property
    def _storage(self) -> list[str]:
        folders = ["--root", str(self.folder / "storage"), "--runroot", str(self.folder / "run")]
        return ["--storage-driver", "overlay", *folders]

    @cached_property
    def _environment(self) -> Mapping[str, str]:
        settings = {"CONTAINERS_CONF": "containers.conf", "CONTAINERS_STORAGE_CONF": "storage.conf"}
        settings["CONTAINERS_REGISTRIES_CONF"] = "registries.conf"
        own = {name: str(self.folder / file) for name, file in settings.items()}
        return {name: value for name, value in os.environ.items() if not name.startswith("BATCHWRIGHT_")} | own

    def _find_libraries(self) -> None:
        """Write the libraries' folder into the programs: buildah starts itself anew with an empty environment."""
        libraries = self.root / "usr/lib" / f"{platform.machine()}-linux-gnu"
        programs = [self.root / "usr/bin" / name for name in ("buildah", "podman", "conmon")]
        for file in [*programs, libraries / "libgpgme.so.11"]:
            call([str(self.root / "usr/bin/patchelf"), "--set-rpath", str(libraries), str(file)])

    def _configure(self) -> None:
        (self.folder / "registries.conf").touch()
        (self.folder / "policy.json").write_text(json.dumps({"default": [{"type": "insecureAcceptAnything"}]}))
        storage = {"driver": "overlay", "runroot": self.folder / "run", "graphroot": self.folder / "storage"}
        (self.folder / "storage.conf").write_text("[storage]\n" + _toml(storage))
        engine = "[engine]\n" + _toml({"runtime": "runc", "cgroup_manager": "cgroupfs", "events_logger": "file"})
        engine += f'conmon_path = ["{self.root}/usr/bin/conmon"]\n'
        runtimes = f'[engine.runtimes]\nrunc = ["{self.root}/usr/bin/runc"]\n'
        profile = self.root / "usr/share/containers/seccomp.json"
        containers = "[containers]\n" + _toml({"log_driver": "k8s-file", "seccomp_profile": profile})
        (self.folder / "containers.conf").write_text(engine + runtimes + containers)


def call(
    command: list[str], environment: Mapping[str, str] | None = None, *, cwd: Path | None = None, seconds: float = 300
) -> str:
    """Run a command, and return its standard output.

    Raises:
        ToolFailedError: when the command fails.
    """
    done = subprocess.run(
        command, env=environment, cwd=cwd, capture_output=True, text=True, check=False, timeout=seconds
    )
    if done.returncode:
        raise ToolFailedError(f"{' '.join(command)[:2000]}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}")
    return done.stdout


def _toml(settings: Mapping[str, object]) -> str:
    return "".join(f'{name} = "{value}"\n' for name, value in settings.items())
