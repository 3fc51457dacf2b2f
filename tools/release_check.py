"""Build the distributions and try them as a user would: ``python tools/release_check.py`` (`make release-check`).

The sdist and the wheel are built and checked by ``twine``. The wheel is installed into two fresh environments: one
without torch, for the SDK and the command line, and one with torch, for the library. Both are in the build folder,
apart from `.venv`, and nothing is uploaded. With ``--tag TAG`` (`make release-check TAG=v0.1.0`) the tag and the date
in the changelog are checked before anything is built.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
PACKAGES = ("batchwright", "batchwright_service")
"""The packages that the wheel has to hold."""
DATA_FILES = (
    "batchwright/hardware/gpus.toml",
    "batchwright/virtual_gpu/figures.toml",
    "batchwright/virtual_gpu/sources/virtual_gpu.h",
    "batchwright_service/dashboard/static/api.js",
    "batchwright_service/dashboard/static/dom.js",
)
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


def newest_section(changelog: str) -> tuple[str, str]:
    """The version and the date, as written, of a changelog's first heading, ``## 0.1.0 - 2026-01-31``; else empty."""
    heading = re.search(r"^## (\S+)(?: - )?(.*)$", changelog, flags=re.MULTILINE)
    return (heading[1], heading[2].strip()) if heading else ("", "")


def is_iso_date(text: str) -> bool:
    """Tell whether a text is a day of the calendar, written as ``YYYY-MM-DD``."""
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def changelog_problems(changelog: str, version: str) -> list[str]:
    """The problem of a changelog, unless its first section is that of the version."""
    return [] if newest_section(changelog)[0] == version else [f"CHANGELOG.md does not begin with {version}"]


def tag_problems(tag: str, changelog: str, version: str) -> list[str]:
    """Why a tag cannot be released: it is not that of the version, or the newest section has no ISO date."""
    marked = newest_section(changelog)[1]
    problems = []
    if tag != f"v{version}":
        problems.append(f"the tag is {tag}, but the version in pyproject.toml asks for v{version}")
    if not is_iso_date(marked):
        problems.append(
            f"the newest section of CHANGELOG.md has {marked or 'nothing'!r} instead of a date (YYYY-MM-DD)"
        )
    return problems


def refuse(problems: list[str]) -> None:
    """End the check when there are problems.

    Raises:
        SystemExit: with a line for each problem.
    """
    if problems:
        sys.exit("\n".join(problems))


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
    parser = argparse.ArgumentParser(description="Build the sdist and the wheel, check both, and try the wheel.")
    parser.add_argument("--tag", help="the tag of the release, such as v0.1.0; refused unless all agrees with it")
    tag: str | None = parser.parse_args().tag
    changelog = (ROOT / "CHANGELOG.md").read_text()
    refuse(changelog_problems(changelog, version()) + ([] if tag is None else tag_problems(tag, changelog, version())))
    wheel = build()
    refuse([f"the wheel lacks {name}" for name in missing(wheel)])
    folder = Path(sys.prefix) / "tried"
    try_out(wheel, "", WITHOUT_TORCH, folder / "without-torch")
    try_out(wheel, "[torch]", WITH_TORCH, folder / "with-torch")
    sys.stdout.write(f"{wheel.name} is good\n")


if __name__ == "__main__":
    main()
