"""Pin what is installed by hash: ``python tools/lock.py`` writes requirements/*.txt by means of ``uv``.

Versions are those of constraints.txt. torch, and what its builds for CUDA bring along, is not in the files:
its wheels differ from index to index (CPU, CUDA, a local file), so no list of hashes holds for all. Its version
is pinned.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GROUPS = {
    "runtime": ("torch", "transformers", "peft", "data", "service", "plots", "tensorboard"),
    "torch": ("torch",),
    "image": ("torch", "transformers", "peft", "metrics", "data", "service", "postgres", "otel"),
    "image-ray": ("torch", "transformers", "peft", "metrics", "data", "service", "postgres", "otel", "ray"),
    "dev": ("dev",),
    "docs": ("docs",),
}
"""The extras of each file: what `make install`, the images' layer of torch, the images without and with Ray, `make
test` and `make docs` install."""
TOOLS = {"sbom": ("cyclonedx-bom==7.5.0",)}
"""Programs of the image's build that are no part of the image, with a file each."""
BUILD = ("hatchling>=1.27", "editables>=0.5")
"""Packages that build the project itself, so that each is fetched by its hash."""
_OF_TORCH = re.compile(r"(torch|triton|cuda-\w+|nvidia-(?!ml-py)[\w-]+)==")
_HEADER = "# Made by `make lock`: the versions of constraints.txt with their files' hashes. Installed with --no-deps.\n"


def locked(extras: tuple[str, ...], build: Path) -> str:
    """The requirements of some extras, each with the hashes of all its files on PyPI."""
    return compiled("pyproject.toml", str(build), *(word for extra in extras for word in ("--extra", extra)))


def compiled(*sources: str) -> str:
    """The requirements of files of requirements and their options, each with the hashes of all its files on PyPI."""
    command = [str(Path(sys.executable).with_name("uv")), "pip", "compile", *sources]
    command += ["--constraints", "constraints.txt", "--generate-hashes", "--universal", "--python-version", "3.11"]
    command += ["--no-config", "--default-index", "https://pypi.org/simple", "--no-header", "--no-annotate", "--quiet"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)  # noqa: S603 - our own words
    blocks = re.split(r"^(?=\S)", done.stdout, flags=re.MULTILINE)
    return _HEADER + "".join(block for block in blocks if not _OF_TORCH.match(block))


def main() -> None:
    """Write the files."""
    with tempfile.TemporaryDirectory() as folder:
        build = Path(folder, "build.in")
        build.write_text("\n".join(BUILD) + "\n")
        for name, extras in GROUPS.items():
            (ROOT / "requirements" / f"{name}.txt").write_text(locked(extras, build))
        for name, wanted in TOOLS.items():
            tool = Path(folder, f"{name}.in")
            tool.write_text("\n".join(wanted) + "\n")
            (ROOT / "requirements" / f"{name}.txt").write_text(compiled(str(tool)))


if __name__ == "__main__":
    main()
