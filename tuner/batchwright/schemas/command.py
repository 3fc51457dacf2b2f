"""The spec of a command: any training program, which is run unchanged at the sizes of a plan. Pure data, no torch.

A command receives its sizes by placeholders in its arguments, its environment or templates of its configuration files.
A name in single braces is a placeholder, and in double braces the literal text in single braces. The same holds for
arithmetic with the name of a figure, such as ``{effective_batch_size*1024}``. All other braces are left as they are, so
that JSON and YAML need no escapes.

To a service a caller sends the name of a command that the operator has registered, and values for its arguments. The
service adds the registered parts (``batchwright_service.registry``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Discriminator, Field, JsonValue, Tag, WithJsonSchema, model_validator

from batchwright.arithmetic import Arithmetic
from batchwright.errors import FieldProblem, SpecError
from batchwright.schemas.base import STORABLE, Document, Environment, PositiveInt, parse_document, read_data
from batchwright.schemas.field_errors import described_pattern
from batchwright.schemas.workload import RanksSpec, WorkloadSpec
from batchwright.suggestions import nearest

MICRO_BATCH_SIZE = "micro_batch_size"
ACCUMULATION_STEPS = "gradient_accumulation_steps"
EFFECTIVE_BATCH_SIZE = "effective_batch_size"
UPDATES = "updates"
OUTPUT_DIRECTORY = "output_dir"
FIGURES = (MICRO_BATCH_SIZE, ACCUMULATION_STEPS, EFFECTIVE_BATCH_SIZE, UPDATES)
"""Names of the placeholders that are whole numbers, with which expressions calculate."""
PLACEHOLDERS = (*FIGURES, OUTPUT_DIRECTORY)
"""Names of the placeholders, besides `file:NAME` and `argument:NAME`."""
FILE_PREFIX = "file:"
ARGUMENT_PREFIX = "argument:"

_NAME = r"[A-Za-z_][A-Za-z0-9_]*(?::[A-Za-z0-9_.-]+)?"
_EXPRESSION = r"[A-Za-z0-9_()+*/ -]{1,200}"
_BRACES = re.compile(rf"\{{\{{(?P<literal>{_NAME}|{_EXPRESSION})\}}\}}|\{{(?P<name>{_NAME}|{_EXPRESSION})\}}")
"""What may be a placeholder, or in double braces its literal text."""
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

LONGEST_ARGUMENT = 65_536
"""Characters of an argument, of which the kernel takes 131,072 bytes. A template may have sixteen times as many."""
_NO_NUL = described_pattern(r"^[^\x00]*$", "must not contain the character NUL")
_FILE_NAME = described_pattern(
    r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$",
    "must be a name of letters, digits, dots, hyphens and underscores, without folders",
)

_REGISTERED_NAME = r"^[a-z0-9][a-z0-9_.-]{0,63}$"
_ARGUMENT_NAME = r"^[a-z][a-z0-9_]{0,63}$"
_DIGEST = described_pattern(r"^[0-9a-f]{64}$", "must have 64 hexadecimal digits")

RegisteredName = Annotated[
    str,
    Field(
        pattern=described_pattern(
            _REGISTERED_NAME,
            "must be a name of up to 64 lower-case letters, digits, dots, hyphens and underscores",
        )
    ),
]
"""The name of a command that the operator of a service has registered."""
ArgumentName = Annotated[
    str,
    Field(
        pattern=described_pattern(
            _ARGUMENT_NAME,
            "must be a name of up to 64 lower-case letters, digits and underscores, with a letter first",
        )
    ),
]
"""The name of an argument of a registered command."""
Argument = Annotated[str, Field(max_length=LONGEST_ARGUMENT, pattern=_NO_NUL)]
MOST_WORDS = 4096
"""Words of a command line."""
FileName = Annotated[str, Field(max_length=128, pattern=_FILE_NAME)]


class FilledCommand(NamedTuple):
    """A command without placeholders."""

    argv: tuple[str, ...]
    """The command and its arguments."""
    environment: dict[str, str]
    """The variables that it adds to others."""
    files: dict[str, str]
    """The texts of its configuration files, by name."""


class CommandModel(Document):
    """A program that trains, as the command that starts it. No line of its code changes."""

    kind: Literal["command"]
    """Selects this kind of model."""
    argv: Annotated[tuple[Argument, ...], Field(max_length=MOST_WORDS)] = ()
    """The command and its arguments; no shell reads them. Placeholders: `{micro_batch_size}`,
    `{gradient_accumulation_steps}`, `{effective_batch_size}`, `{updates}` (updates to make), `{output_dir}` (a scratch
    folder), `{file:NAME}` (the path of one of `files`) and `{argument:NAME}` (one of `arguments`). The first four may
    be in arithmetic, such as `{effective_batch_size*1024}`. Write `{{name}}` for a literal `{name}`. Required, unless
    `name` is given to a service."""
    name: RegisteredName | None = None
    """To a service: the name of the command, which its operator has registered (`GET /v1/commands`). The service fills
    in the other fields, apart from `arguments`."""
    arguments: Annotated[
        dict[ArgumentName, JsonValue],
        STORABLE,
        Field(max_length=MOST_WORDS),
        WithJsonSchema(
            {
                "type": "object",
                "propertyNames": {"pattern": _ARGUMENT_NAME},
                "additionalProperties": {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "boolean"}]},
            }
        ),
    ] = Field(default_factory=dict)
    """Values of the placeholders `{argument:NAME}`: texts, numbers, true or false. Of a registered command, those that
    its operator allows."""
    definition: Annotated[str, Field(pattern=_DIGEST)] | None = None
    """SHA-256 of the registration of the command and of the files that it names, its script above all. Filled in by the
    service."""
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
    probe_environment: Environment = Field(default_factory=dict)
    """Environment variables that probes add to `environment`, and jobs do not: for example one that turns a tracker of
    experiments off. Values may have placeholders."""
    allow_overwriting: bool = False
    """Go on where a probe has replaced or removed files that existed before the tuning. Otherwise the tuning ends after
    the first such probe, with the names of the files."""
    probe_updates: Annotated[int, Field(ge=2, le=10_000)] = 2
    """Optimizer updates after which a probe ends. More updates see more of the data's lengths."""
    samples_dimension: Annotated[int, Field(ge=0, le=63)] | None = None
    """The dimension of what the model is called with that counts samples, where it is not found out."""
    samples_per_unit: PositiveInt | None = None
    """Number of counted rows or items of a sample of the plan, such as 7 views; 1 by default."""
    counts_samples: bool = True
    """True if samples are compared with the plan; otherwise only backward passes show that the command follows it."""
    longest_first: bool = True
    """True if batches of probes have the longest items of a data set, where its items differ in length, and samplers of
    torch or of a training framework draw them. Jobs draw what the program draws."""
    loading_timeout_seconds: Annotated[float, Field(gt=0.0, le=86_400.0)] = 1800.0
    """Time limit until the first forward pass. The time limit of a probe counts from there."""

    @model_validator(mode="after")
    def _has_a_program(self) -> Self:
        if not self.argv and self.name is None:
            raise ValueError("`argv` is required: the program and its arguments")
        for name, value in self.arguments.items():
            is_scalar = isinstance(value, str | int | float)
            if not is_scalar:
                raise ValueError(f"`arguments.{name}` must be a text, a number, true or false")
            if isinstance(value, str) and "\0" in value:
                raise ValueError(f"`arguments.{name}` must not contain the character NUL")
        return self

    @model_validator(mode="after")
    def _has_known_placeholders(self) -> Self:
        for field, text in self._texts():
            check_placeholders(field, text, self.files, self.arguments)
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
        yield from ((f"probe_environment.{name}", text) for name, text in self.probe_environment.items())
        yield from ((f"probe_arguments.{number}", text) for number, text in enumerate(self.probe_arguments))

    @property
    def placeholders(self) -> frozenset[str]:
        """The placeholders that the command uses."""
        return frozenset(name for _, text in self._texts() for name in placeholders_in(text))

    @property
    def divisions(self) -> tuple[tuple[str, Arithmetic], ...]:
        """The expressions in braces that divide, with their texts."""
        found = (name for _, text in self._texts() for name in _placeholders(text) if _is_expression(name))
        parsed = ((name, Arithmetic(name)) for name in found)
        return tuple((name, expression) for name, expression in parsed if expression.divides)

    def argument_texts(self, *, quoted: bool = False) -> dict[str, str]:
        """The texts that replace the placeholders of the arguments.

        In a configuration file a text is ``quoted``, in a word or a variable it is not.
        """
        return {
            ARGUMENT_PREFIX + name: value if isinstance(value, str) and not quoted else _scalar(value)
            for name, value in self.arguments.items()
        }

    def filled(
        self, figures: Sequence[int | None], output: str, files: Mapping[str, str], *, for_probe: bool = False
    ) -> FilledCommand:
        """Replace the placeholders.

        Args:
            figures: those of ``FIGURES``; None for one without a placeholder.
            output: the output folder.
            files: paths of the configuration files, by name.
            for_probe: whether to add the arguments and variables that only probes have.

        Raises:
            SpecError: when an expression is no whole number for these figures.
        """
        values = {name: str(figure) for name, figure in zip(FIGURES, figures, strict=True)}
        values |= {OUTPUT_DIRECTORY: output, **{FILE_PREFIX + name: path for name, path in files.items()}}
        quoted, values = values | self.argument_texts(quoted=True), values | self.argument_texts()
        variables = self.environment | (self.probe_environment if for_probe else {})
        return FilledCommand(
            tuple(replace_placeholders(word, values) for word in self.argv + self.probe_arguments * for_probe),
            {name: replace_placeholders(text, values) for name, text in variables.items()},
            {name: replace_placeholders(text, quoted) for name, text in self.files.items()},
        )

    @property
    def is_only_named(self) -> bool:
        """True if the command is to be looked up by its name before it can be run."""
        return not self.argv

    @property
    def takes_size(self) -> bool:
        """True if the command has a placeholder for its micro-batch size, as a tuning needs."""
        return MICRO_BATCH_SIZE in self.placeholders

    @property
    def takes_accumulation(self) -> bool:
        """True if the command knows how often to accumulate: by the steps, the effective batch, or its own text."""
        return not self.takes_size or bool(self.placeholders & {ACCUMULATION_STEPS, EFFECTIVE_BATCH_SIZE})

    @property
    def says_what_a_sample_is(self) -> bool:
        """True if the user says what counts samples."""
        return self.samples_dimension is not None or self.samples_per_unit is not None


def _scalar(value: JsonValue) -> str:
    """The text of a value that JSON, YAML and TOML read equally.

    A number such as ``1e-05`` gets a point: YAML 1.1 would read a text.
    """
    text = json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and "e" in text and "." not in text:
        return text.replace("e", ".0e")
    return text


def check_placeholders(field: str, text: str, files: Iterable[str], arguments: Iterable[str]) -> None:
    """Check that the placeholders of the text of a field have values, of these files and arguments.

    Raises:
        ValueError: with the nearest placeholder or all, or with what an expression may have.
    """
    known = (
        *PLACEHOLDERS,
        *(FILE_PREFIX + file for file in files),
        *(ARGUMENT_PREFIX + argument for argument in arguments),
    )
    for name in _placeholders(text):
        literal = f"Write `{{{{{name}}}}}` for the literal text."
        if _is_expression(name):
            _check_expression(field, name, literal)
        elif name not in known:
            near = nearest(name, known)
            hint = f"; did you mean `{{{near}}}`?" if near else f" (known: {_in_braces(known)})"
            raise ValueError(f"`{field}` has the unknown placeholder `{{{name}}}`{hint} {literal}")


def _check_expression(field: str, text: str, literal: str) -> None:
    try:
        unknown = sorted(Arithmetic(text).names.difference(FIGURES))
    except ValueError as error:
        raise ValueError(f"`{field}` has `{{{text}}}`, which {error}. {literal}") from None
    if unknown:
        known = _in_braces(FIGURES)
        raise ValueError(
            f"`{field}` has `{{{text}}}`, in which `{unknown[0]}` is not a figure (known: {known}). {literal}"
        )


def _in_braces(names: Iterable[str]) -> str:
    return ", ".join(f"{{{name}}}" for name in names)


def _is_expression(text: str) -> bool:
    """Return whether a text in braces calculates with a figure."""
    is_named = not set(FIGURES).isdisjoint(_WORD.findall(text))
    return is_named and re.fullmatch(_NAME, text) is None and re.search(r"[()+*/-]", text) is not None


def _is_placeholder(text: str) -> bool:
    return re.fullmatch(_NAME, text) is not None or _is_expression(text)


def _placeholders(text: str) -> list[str]:
    """The placeholders in a text, in order: names and expressions."""
    return [found["name"] for found in _BRACES.finditer(text) if found["name"] and _is_placeholder(found["name"])]


def placeholders_in(text: str) -> list[str]:
    """The names of the placeholders in a text, in order. Those in expressions count."""
    return [
        name
        for content in _placeholders(text)
        for name in (_WORD.findall(content) if _is_expression(content) else [content])
    ]


def substitute(text: str, value: Callable[[str], str]) -> str:
    """Replace the placeholders of a text, names and expressions; what double braces hold gets single braces.

    All are replaced in one pass, so that braces in a value are text.
    """

    def replaced(found: re.Match[str]) -> str:
        content = found["literal"] or found["name"]
        if not _is_placeholder(content):
            return found[0]
        return "{" + content + "}" if found["literal"] else value(content)

    return _BRACES.sub(replaced, text)


def replace_placeholders(text: str, values: Mapping[str, str]) -> str:
    """Replace the placeholders of a text by their values.

    Raises:
        SpecError: when an expression is no whole number for these values.
    """
    return substitute(text, lambda name: _calculated(name, values) if _is_expression(name) else values[name])


def _calculated(text: str, values: Mapping[str, str]) -> str:
    expression = Arithmetic(text)
    figures = {name: int(values[name]) for name in expression.names}
    try:
        found = expression.value(figures)
    except ZeroDivisionError:
        found = None
    if found is None or found.denominator > 1:
        used = ", ".join(f"{name} {number}" for name, number in sorted(figures.items()))
        fault = "divides by zero" if found is None else f"is {found}, which is not a whole number"
        raise SpecError([FieldProblem(f"{{{text}}}", f"{fault}: {used}")])
    return str(found)


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
