"""Render a command for the figures of a run: arguments, environment and configuration files. Pure but for the files."""

import hashlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from batchwright.errors import FieldProblem, SpecError
from batchwright.schemas.command import CommandModel

_LARGEST_HASHED = 16 * 1024**2
"""Bytes of a file that is part of a fingerprint: more is data or an interpreter, and no script or configuration."""


@dataclass(frozen=True)
class Figures:
    """The figures that a command is given.

    Attributes:
        micro_batch_size: samples per rank, forward and backward pass.
        accumulation_steps: micro-batches per rank and update.
        world_size: data-parallel ranks.
        updates: optimizer updates to make.
    """

    micro_batch_size: int
    accumulation_steps: int
    world_size: int
    updates: int

    @property
    def effective_batch_size(self) -> int:
        """Samples per update over all ranks."""
        return self.micro_batch_size * self.accumulation_steps * self.world_size


@dataclass(frozen=True)
class RenderedCommand:
    """A command without placeholders.

    Attributes:
        argv: the command and its arguments.
        environment: the variables that it adds to the inherited ones.
        files: the texts of its configuration files, by path.
        working_directory: the folder in which it starts.
    """

    argv: tuple[str, ...]
    environment: dict[str, str]
    files: dict[Path, str]
    working_directory: Path

    def write_files(self) -> None:
        """Write the configuration files.

        Raises:
            OSError: when a file cannot be written.
        """
        for path, text in self.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


def render(model: CommandModel, figures: Figures, folder: Path, *, for_probe: bool = True) -> RenderedCommand:
    """Render a command for these figures.

    ``folder`` is for the configuration files, and for what the command writes to its output folder.
    """
    files = {name: folder / "files" / name for name in model.files}
    sizes = (figures.micro_batch_size, figures.accumulation_steps, figures.effective_batch_size, figures.updates)
    paths = {name: str(path) for name, path in files.items()}
    filled = model.filled(sizes, str(folder / "output"), paths, for_probe=for_probe)
    given = {  # to every command, as launchers of exports set them
        "BATCHWRIGHT_MICRO_BATCH_SIZE": str(figures.micro_batch_size),
        "BATCHWRIGHT_GRADIENT_ACCUMULATION_STEPS": str(figures.accumulation_steps),
        "BATCHWRIGHT_EFFECTIVE_BATCH_SIZE": str(figures.effective_batch_size),
    }
    return RenderedCommand(
        argv=filled.argv,
        environment=given | filled.environment,
        files={files[name]: text for name, text in filled.files.items()},
        working_directory=Path(model.working_directory),
    )


def check_command(model: CommandModel) -> None:
    """Check, before any probe, that the command can be started.

    Raises:
        SpecError: when its folder or its program does not exist, or when it is only named.
    """
    if model.is_only_named:
        message = "is required: `name` is for a service, whose operator has registered commands (BATCHWRIGHT_COMMANDS)"
        raise SpecError([FieldProblem("model.argv", message)])
    folder = Path(model.working_directory)
    if not folder.is_dir():
        problem = FieldProblem("model.working_directory", "is not a folder", str(folder.absolute()))
        raise SpecError([problem])
    if not find_program(model, os.environ):
        message = "cannot be started: the program is not on PATH, or not executable"
        raise SpecError([FieldProblem("model.argv.0", message, model.argv[0])])


def contents_of_files(model: CommandModel) -> dict[str, str]:
    """SHA-256 of the files that a command names in its arguments, its script above all, by their names there."""
    folder = Path(model.working_directory)
    found = {}
    for argument in model.argv:
        path = folder / argument.rpartition("=")[2]
        try:
            if path.is_file() and path.stat().st_size <= _LARGEST_HASHED:
                found[f"file {argument}"] = hashlib.sha256(path.read_bytes()).hexdigest()
        except (OSError, ValueError):  # no path at all, or not readable
            continue
    return found


def find_program(model: CommandModel, environment: Mapping[str, str]) -> str | None:
    """The path of the program of a command; none where there is none."""
    name = model.argv[0]
    found = str(Path(model.working_directory).absolute() / name) if os.sep in name else name
    return shutil.which(found, path={**environment, **model.environment}.get("PATH", os.defpath))
