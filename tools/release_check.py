"""Build the distributions and try them as a user would: ``python tools/release_check.py`` (`make release-check`).

The sdist and the wheel are built and checked by ``twine``. The wheel is installed into two fresh environments: one
without torch, for the SDK and the command line, and one with torch, for the library. Both are in the build folder,
apart from `.venv`, and nothing is uploaded.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
PACKAGES = ("batchwright", "service", "tuner")
"""The packages that the wheel has to hold."""
DATA_FILES = ("tuner/hardware/gpus.toml", "service/dashboard/static/api.js", "service/dashboard/static/dom.js")
"""Files that are no modules, a few of those that the wheel has to hold."""
WITHOUT_TORCH = """
import importlib.util, sys
import batchwright
assert importlib.util.find_spec("torch") is None
assert batchwright.plan(effective_batch_size=100, micro_batch_size=37).micro_batch_sizes == ((34, 33, 33),)
with batchwright.Client("http://127.0.0.1:9") as client:
    assert client.tunings
print("without torch: plan and SDK work")
"""
WITH_TORCH = """
import torch
from torch import nn
import batchwright
model = nn.Linear(4, 1)
accumulation = batchwright.GradientAccumulation(model, torch.optim.SGD(model.parameters()))
for window in batchwright.windows([torch.ones(3, 4), torch.ones(2, 4)], 2):
    report = accumulation.update(window, lambda model, batch: (model(batch).sum(), len(batch)))
assert report.micro_batch_sizes == (3, 2), report
print("with torch: exact accumulation works")
"""


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command and return its standard output.

    Raises:
        SystemExit: with the command and its output, when it fails.
    """
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, check=False)  # noqa: S603 - our own words
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def version() -> str:
    """The version in pyproject.toml."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def build() -> Path:
    """Build the sdist, and the wheel from the sdist, into an empty dist/. Return the wheel."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST, ROOT)
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted(DIST.iterdir()))
    (wheel,) = DIST.glob("*.whl")
    return wheel


def missing(wheel: Path) -> list[str]:
    """The packages, data files and licence that the wheel lacks."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    wanted = [f"{package}/__init__.py" for package in PACKAGES]
    wanted += [f"{name}/py.typed" for name in PACKAGES if (ROOT / name / "py.typed").exists()]
    wanted += [*DATA_FILES, f"{wheel.name.partition('-')[0]}-{version()}.dist-info/licenses/LICENSE"]
    return [name for name in wanted if name not in names]


def changelog_problem() -> str | None:
    """The problem of CHANGELOG.md, unless its first section is that of the version."""
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    return None if headings and headings[0] == version() else f"CHANGELOG.md does not begin with {version()}"


def install(wheel: Path, extras: str, folder: Path) -> Path:
    """Install the wheel into a fresh environment. Return its Python."""
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin" / "python"
    run(
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "-c",
        ROOT / "constraints.txt",
        f"{wheel}{extras}",
    )
    return python


def try_out(wheel: Path, extras: str, program: str, folder: Path) -> None:
    """Run the command and a program with the installed wheel, outside of the repository."""
    python = install(wheel, extras, folder)
    printed = run(folder / "bin" / "batchwright", "--version", cwd=folder)
    if printed.strip() != f"batchwright {version()}":
        sys.exit(f"batchwright --version printed {printed!r}")
    sys.stdout.write(run(python, "-c", program, cwd=folder))


def main() -> None:
    """Build, check and try everything."""
    wheel = build()
    problems = [f"the wheel lacks {name}" for name in missing(wheel)]
    problems += [problem] if (problem := changelog_problem()) else []
    if problems:
        sys.exit("\n".join(problems))
    folder = Path(sys.prefix) / "tried"
    try_out(wheel, "", WITHOUT_TORCH, folder / "without-torch")
    try_out(wheel, "[torch]", WITH_TORCH, folder / "with-torch")
    sys.stdout.write(f"{wheel.name} is good\n")


if __name__ == "__main__":
    main()
