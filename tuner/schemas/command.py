"""The spec of a command: any training program, which is run unchanged at the sizes of a plan. Pure data, no torch.

A command receives its sizes by placeholders in its arguments, its environment or templates of its configuration files.
A name in single braces is a placeholder, and in double braces the literal text in single braces. All other braces are
left as they are, so that JSON and YAML need no escapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from tuner.schemas.base import Document, Environment, parse_document, read_data
from tuner.schemas.field_errors import described_pattern
from tuner.schemas.workload import RanksSpec, WorkloadSpec
from tuner.suggestions import nearest

MICRO_BATCH_SIZE = "micro_batch_size"
ACCUMULATION_STEPS = "gradient_accumulation_steps"
EFFECTIVE_BATCH_SIZE = "effective_batch_size"
UPDATES = "updates"
OUTPUT_DIRECTORY = "output_dir"
PLACEHOLDERS = (MICRO_BATCH_SIZE, ACCUMULATION_STEPS, EFFECTIVE_BATCH_SIZE, UPDATES, OUTPUT_DIRECTORY)
"""Names of the placeholders, besides `file:NAME`."""
FILE_PREFIX = "file:"

_NAME = r"[A-Za-z_][A-Za-z0-9_]*(?::[A-Za-z0-9_.-]+)?"
PLACEHOLDER = re.compile(rf"\{{\{{(?P<literal>{_NAME})\}}\}}|\{{(?P<name>{_NAME})\}}")
"""A placeholder, or a name in double braces, which stands for itself in single braces."""

LONGEST_ARGUMENT = 65_536
"""Characters of an argument, of which the kernel takes 131,072 bytes. A template may have sixteen times as many."""
_NO_NUL = described_pattern(r"^[^\x00]*$", "must not contain the character NUL")
_FILE_NAME = described_pattern(
    r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$",
    "must be a name of letters, digits, dots, hyphens and underscores, without folders",
)

Argument = Annotated[str, Field(max_length=LONGEST_ARGUMENT, pattern=_NO_NUL)]
FileName = Annotated[str, Field(max_length=128, pattern=_FILE_NAME)]


class CommandModel(Document):
    """A program that trains, as the command that starts it. No line of its code changes."""

    kind: Literal["command"]
    """Selects this kind of model."""
    argv: Annotated[tuple[Argument, ...], Field(min_length=1, max_length=4096)]
    """The command and its arguments; no shell reads them. Placeholders: `{micro_batch_size}`,
    `{gradient_accumulation_steps}`, `{effective_batch_size}`, `{updates}` (updates to make), `{output_dir}` (a scratch
    folder) and `{file:NAME}` (the path of one of `files`). Write `{{name}}` for a literal `{name}`."""
    environment: Environment = Field(default_factory=dict)
    """Environment variables, beside those that the command inherits. Values may have placeholders."""
    working_directory: Annotated[str, Field(max_length=4096, pattern=_NO_NUL)] = "."
    """Folder in which the command starts."""
    files: dict[FileName, Annotated[str, Field(max_length=16 * LONGEST_ARGUMENT)]] = Field(default_factory=dict)
    """Templates of configuration files by name, with placeholders: the command gets the path of the rendered file by
    `{file:NAME}`."""
    probe_arguments: tuple[Argument, ...] = ()
    """Arguments that probes add at the end, and jobs do not: for example a flag of the program that selects the longest
    samples."""
    probe_updates: Annotated[int, Field(ge=2, le=10_000)] = 2
    """Optimizer updates after which a probe ends. More updates see more of the data's lengths."""
    loading_timeout_seconds: Annotated[float, Field(gt=0.0, le=86_400.0)] = 1800.0
    """Time limit until the first forward pass. The time limit of a probe counts from there."""

    @model_validator(mode="after")
    def _has_known_placeholders(self) -> Self:
        for field, text in self._texts():
            for name in placeholders_in(text):
                self._require_known(field, name)
        used = self.placeholders
        unused = [name for name in self.files if FILE_PREFIX + name not in used]
        if unused:
            raise ValueError(f"`files.{unused[0]}` is not used: name it as `{{file:{unused[0]}}}` in `argv`")
        return self

    def _texts(self) -> Iterator[tuple[str, str]]:
        """Yield every text that may have placeholders, with the field that has it."""
        yield from ((f"argv.{number}", text) for number, text in enumerate(self.argv))
        yield from ((f"environment.{name}", text) for name, text in self.environment.items())
        yield from ((f"files.{name}", text) for name, text in self.files.items())
        yield from ((f"probe_arguments.{number}", text) for number, text in enumerate(self.probe_arguments))

    def _require_known(self, field: str, name: str) -> None:
        known = (*PLACEHOLDERS, *(FILE_PREFIX + file for file in self.files))
        if name in known:
            return
        listed = ", ".join(f"{{{each}}}" for each in known)
        near = nearest(name, known)
        hint = f"; did you mean `{{{near}}}`?" if near else f" (known: {listed})"
        raise ValueError(
            f"`{field}` has the unknown placeholder `{{{name}}}`{hint} Write `{{{{{name}}}}}` for the literal text."
        )

    @property
    def placeholders(self) -> frozenset[str]:
        """The placeholders that the command uses."""
        return frozenset(name for _, text in self._texts() for name in placeholders_in(text))

    @property
    def takes_size(self) -> bool:
        """True if the command has a placeholder for its micro-batch size, as a tuning needs."""
        return MICRO_BATCH_SIZE in self.placeholders

    @property
    def takes_accumulation(self) -> bool:
        """True if the command knows how often to accumulate: by the steps, the effective batch, or its own text."""
        return not self.takes_size or bool(self.placeholders & {ACCUMULATION_STEPS, EFFECTIVE_BATCH_SIZE})


def placeholders_in(text: str) -> list[str]:
    """The names of the placeholders in a text, in order."""
    return [found["name"] for found in PLACEHOLDER.finditer(text) if found["name"]]


def replace_placeholders(text: str, values: Mapping[str, str]) -> str:
    """Replace the placeholders of a text; a name in double braces becomes that name in single braces."""
    return PLACEHOLDER.sub(lambda found: values[found["name"]] if found["name"] else "{" + found["literal"] + "}", text)


class CommandSpec(Document):
    """A command that trains. Everything else of a workload (optimizer, precision, data) is in the command itself."""

    model: CommandModel
    """The command."""
    parallelism: RanksSpec = RanksSpec()
    """Data-parallel ranks that the command starts."""

    def with_world_size(self, world_size: int) -> CommandSpec:
        """Return this command with ``world_size`` ranks."""
        return self.model_copy(update={"parallelism": RanksSpec(world_size=world_size)})


_KINDS = ("transformers", "reference", "python", "command")


def _class_of_spec(spec: object) -> str:
    """The name of the class that a spec is validated as: by `model.kind`, also where that is misspelt."""
    if isinstance(spec, CommandSpec | WorkloadSpec):
        return type(spec).__name__
    model = spec.get("model") if isinstance(spec, dict) else None
    kind = model.get("kind") if isinstance(model, dict) else getattr(model, "kind", None)
    is_command = isinstance(kind, str) and nearest(kind, _KINDS) == "command"
    return CommandSpec.__name__ if is_command else WorkloadSpec.__name__


def load_any_spec(path: Path) -> WorkloadSpec | CommandSpec:
    """Read the spec of a workload or of a command from a YAML or JSON file.

    Raises:
        SpecError: when the file cannot be read or describes neither.
    """
    data = read_data(path, "spec")
    kind: type[WorkloadSpec | CommandSpec] = (
        CommandSpec if _class_of_spec(data) == CommandSpec.__name__ else WorkloadSpec
    )
    return parse_document(kind, data, f"spec {path}")


Spec = Annotated[
    Annotated[WorkloadSpec, Tag("WorkloadSpec")] | Annotated[CommandSpec, Tag("CommandSpec")],
    Discriminator(_class_of_spec),
]
"""A workload that is described, or a command that trains."""
