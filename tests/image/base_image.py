"""Make a stand-in for the base image by debootstrap: Debian's Python, as the official image arranges it."""

import shutil
from pathlib import Path

from tests.image.container_tools import ContainerTools, ToolFailedError, call

BASE_IMAGE = "localhost/python-stand-in:bookworm"
_PACKAGES = "ca-certificates,python3,python3-venv,python3-pip,python-is-python3"
_BOOTSTRAP_SECONDS = 900
_APT_SETTINGS = """\
DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb /var/cache/apt/*.bin || true"; };
Apt::AutoRemove::SuggestsImportant "false";
"""
"""Settings of Debian's images that a bootstrapped system lacks: no package is kept in a layer."""
_PATH = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"


def ensure_base_image(tools: ContainerTools) -> None:
    """Make the stand-in, unless there is one."""
    try:
        tools.buildah("inspect", "--type", "image", BASE_IMAGE)
    except ToolFailedError:
        _commit(tools, _bootstrapped(tools))


def _bootstrapped(tools: ContainerTools) -> Path:
    """Return the folder of a minimal Debian with Python."""
    system, ready = tools.folder / "base", tools.folder / "base.ready"
    if not ready.exists():
        shutil.rmtree(system, ignore_errors=True)
        script = str(tools.root / "usr/sbin/debootstrap")
        scripts = {"DEBOOTSTRAP_DIR": str(tools.root / "usr/share/debootstrap"), "PATH": _PATH}
        call(
            [script, "--variant=minbase", f"--include={_PACKAGES}", "bookworm", str(system)],
            scripts,
            seconds=_BOOTSTRAP_SECONDS,
        )
        _tidy(system)
        ready.touch()
    return system


def _tidy(system: Path) -> None:
    caches = [*(system / "var/cache/apt/archives").glob("*.deb"), *(system / "var/lib/apt/lists").glob("*debian*")]
    for file in [*caches, *system.glob("usr/lib/python3*/EXTERNALLY-MANAGED")]:
        file.unlink()
    (system / "etc/pip.conf").touch()  # the settings of a build are mounted here
    (system / "etc/apt/apt.conf.d/docker").write_text(_APT_SETTINGS)


def _commit(tools: ContainerTools, system: Path) -> None:
    archive = tools.folder / "base.tar"
    call(["tar", "-C", str(system), "--numeric-owner", "-cf", str(archive), "."])
    container = tools.buildah("from", "scratch").strip()
    tools.buildah("add", "-q", container, str(archive), "/")
    archive.unlink()
    tools.buildah("config", "--env", f"PATH={_PATH}", "--env", "LANG=C.UTF-8", "--cmd", "python3", container)
    tools.buildah("commit", *tools.signature_policy, "-q", "--rm", container, BASE_IMAGE)
