"""The documents of the file of registered commands. Pure data."""

from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import (
    BeforeValidator,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import SchemaError

from batchwright.schemas.base import Document, Environment
from batchwright.schemas.command import (
    ARGUMENT_PREFIX,
    LONGEST_ARGUMENT,
    MICRO_BATCH_SIZE,
    MOST_WORDS,
    Argument,
    ArgumentName,
    FileName,
    RegisteredName,
    check_placeholders,
    placeholders_in,
)
from batchwright.schemas.workload import LARGEST_WORLD_SIZE
from batchwright_service.registry.placement import Placement, arguments_in, check_files, check_words

LONGEST_TEXT = 4096
"""Most characters of a text or a path."""
_MATCHED_AT_FULL_SIZE = 64
"""Characters of a text that a pattern as large as the engine compiles (10 MiB) may match: that takes about 0.5 s."""
_LARGEST_INTEGER = 2**53
"""Larger integers are not exact in browsers."""
_Integer = Annotated[int, Field(ge=-_LARGEST_INTEGER, le=_LARGEST_INTEGER)]
_Number = Annotated[float, Field(allow_inf_nan=False)]
_RangeT = TypeVar("_RangeT", bound="IntegerArgument | NumberArgument")
_Words = Annotated[tuple[Argument, ...], Field(min_length=1, max_length=MOST_WORDS)]


class ArgumentDefinition(Document):
    """An argument that callers may give."""

    description: Annotated[str, Field(max_length=2000)] = ""
    """Shown in forms."""
    required: bool = False
    """True if every caller has to give a value."""

    @property
    def always_has_value(self) -> bool:
        """Return whether the argument has a value whatever a caller gives."""
        return self.required or getattr(self, "default", None) is not None


class IntegerArgument(ArgumentDefinition):
    """A whole number."""

    type: Literal["integer"]
    """Selects this type."""
    minimum: _Integer
    """Least value."""
    maximum: _Integer
    """Largest value."""
    default: _Integer | None = None
    """Value where a caller gives none."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        return _checked_range(self)


class NumberArgument(ArgumentDefinition):
    """A number."""

    type: Literal["number"]
    """Selects this type."""
    minimum: _Number
    """Least value."""
    maximum: _Number
    """Largest value."""
    default: _Number | None = None
    """Value where a caller gives none."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        return _checked_range(self)


class StringArgument(ArgumentDefinition):
    """A text of printable characters in one line."""

    type: Literal["string"]
    """Selects this type."""
    pattern: str | None = None
    """Regular expression of the whole text, in the syntax of Rust's `regex`: without look-around
    or backreferences."""
    max_length: Annotated[int, Field(ge=1, le=LONGEST_TEXT)] = 256
    """Most characters."""
    default: Annotated[str, Field(min_length=1)] | None = None
    """Value where a caller gives none."""

    @model_validator(mode="after")
    def _pattern_takes_bounded_time(self) -> Self:
        """Bound the product of the compiled pattern's size and the text's length, which a match takes time for."""
        if self.pattern is None:
            return self
        try:
            _compiled(self.pattern)  # by itself, so that `a)|(b` does not become valid within a group
            _ = self._matcher
        except SchemaError as error:
            reason = str(error).strip().rpartition("error: ")[2]
            raise ValueError(f"`pattern` is not a regular expression: {reason}") from None
        try:
            _compiled(f"(?:{self.pattern}){{{-(-self.max_length // _MATCHED_AT_FULL_SIZE)}}}")
        except SchemaError:
            raise ValueError(
                f"`pattern` is too large for texts of {self.max_length} characters: lower `max_length` or the counts "
                "in braces, or write [A-Za-z0-9_] instead of \\w, which has every letter of Unicode"
            ) from None
        return self

    def matches(self, text: str) -> bool:
        """Return whether a text has the pattern of this argument. The time is linear in the length of the text."""
        try:
            self._matcher.validate_python(text)
        except ValidationError:
            return False
        return True

    @cached_property
    def _matcher(self) -> TypeAdapter[str]:
        return _compiled(r"(?s:.*)" if self.pattern is None else rf"\A(?:{self.pattern})\z")


def _compiled(expression: str) -> TypeAdapter[str]:
    """Compile a regular expression for pydantic's engine, which never backtracks, unlike ``re``.

    Raises:
        SchemaError: when the engine refuses the expression.
    """
    return TypeAdapter(Annotated[str, StringConstraints(pattern=expression)])


class BooleanArgument(ArgumentDefinition):
    """True or false. In `argv` it may stand for a word of its own, which a value selects."""

    type: Literal["boolean"]
    """Selects this type."""
    default: bool = False
    """Value where a caller gives none."""
    when_true: Argument | None = None
    """Word of `argv` for true, for example `--packing`. Without this and `when_false`, the word is `true` or
    `false`."""
    when_false: Argument | None = None
    """Word of `argv` for false; none leaves the word out where `when_true` is given."""

    @property
    def selects_word(self) -> bool:
        """Return whether the value selects a word instead of being one."""
        return self.when_true is not None or self.when_false is not None


class EnumArgument(ArgumentDefinition):
    """One of a few texts."""

    type: Literal["enum"]
    """Selects this type."""
    values: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=LONGEST_TEXT)], ...], Field(min_length=1)]
    """Allowed texts."""
    default: str | None = None
    """Value where a caller gives none."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.default is not None and self.default not in self.values:
            raise ValueError(f"`default` is {self.default!r}, which is not one of `values`")
        if unprintable := [value for value in self.values if not value.isprintable()]:
            raise ValueError(f"`values` has {unprintable[0]!r}, which is not printable in one line")
        return self


class PathArgument(ArgumentDefinition):
    """The absolute path of a file or folder below the data roots, with all links resolved."""

    type: Literal["path"]
    """Selects this type."""
    must_exist: bool = True
    """False if the program may make the file or folder."""
    default: str | None = None
    """Value where a caller gives none."""


AnyArgument = Annotated[
    IntegerArgument | NumberArgument | StringArgument | BooleanArgument | EnumArgument | PathArgument,
    Field(discriminator="type"),
]


def _as_group(entry: object) -> object:
    """Return an entry of `argv` as the words that are left out together; YAML reads some words as numbers."""
    words = entry if isinstance(entry, list | tuple) else [entry]
    return [str(word) if isinstance(word, int) and not isinstance(word, bool) else word for word in words]


class CommandDefinition(Document):
    """A command that the operator lets callers tune and run, with the arguments that they may give."""

    title: Annotated[str, Field(max_length=200)] = ""
    """Name in forms."""
    description: Annotated[str, Field(max_length=2000)] = ""
    """Shown in forms."""
    argv: Annotated[tuple[Annotated[_Words, BeforeValidator(_as_group)], ...], Field(min_length=1)]
    """The program and its arguments, as for `model.argv` of a spec, and `{argument:NAME}` for values of callers. A word
    whose argument has no value is left out. Words in a list of their own are left out together."""
    arguments: dict[ArgumentName, AnyArgument] = Field(default_factory=dict)
    """Arguments that callers may give."""
    environment: Environment = Field(default_factory=dict)
    """Environment variables, with placeholders. A variable whose argument has no value is not set."""
    files: dict[FileName, Annotated[str, Field(max_length=16 * LONGEST_ARGUMENT)]] = Field(default_factory=dict)
    """Templates of configuration files, with placeholders."""
    working_directory: str | None = None
    """Folder in which the command starts: absolute, or relative to the folder of this file, which is the default."""
    data_roots: tuple[str, ...] | None = None
    """Folders that `path` arguments may name. Default: BATCHWRIGHT_DATA_ROOTS."""
    world_size: Annotated[int, Field(ge=1, le=LARGEST_WORLD_SIZE)] = 1
    """Data-parallel ranks that the command starts."""
    probe_arguments: tuple[Argument, ...] = ()
    """Words that probes add at the end, and jobs do not."""
    probe_environment: Environment = Field(default_factory=dict)
    """Environment variables that probes add, and jobs do not."""
    allow_overwriting: bool = False
    """True if a tuning goes on where a probe has replaced files that existed before."""
    probe_updates: Annotated[int, Field(ge=2, le=10_000)] = 2
    """Optimizer updates after which a probe ends."""
    samples_dimension: Annotated[int, Field(ge=0, le=63)] | None = None
    """The dimension of what the model is called with that counts samples."""
    samples_per_unit: Annotated[int, Field(ge=1)] | None = None
    """Number of counted rows or items of a sample of a plan, such as 7 views; 1 by default."""
    counts_samples: bool = True
    """True if the samples of an update are compared with the plan."""
    longest_first: bool = True
    """True if batches of probes have the longest items of a data set."""
    loading_timeout_seconds: Annotated[float, Field(gt=0.0, le=86_400.0)] = 1800.0
    """Time limit until the first forward pass of a probe."""
    probe_timeout_seconds: Annotated[float, Field(gt=0.0, le=86_400.0)] | None = None
    """Longest time limit of a probe that callers may ask for, and the default; none for that of all requests."""

    @field_validator("data_roots")
    @classmethod
    def _are_absolute(cls, roots: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for root in roots or ():
            if not Path(root).is_absolute():
                raise ValueError(f"has {root!r}, which is not absolute")
        return roots

    @model_validator(mode="after")
    def _has_consistent_arguments(self) -> Self:
        for name, argument in self.arguments.items():
            default = argument.default
            if argument.required and default not in {None, False}:
                raise ValueError(
                    f"`arguments.{name}` is required, so its default is never used: leave one of the two out"
                )
        return self

    @model_validator(mode="after")
    def _has_known_placeholders(self) -> Self:
        used, sized = set(), False
        for field, text in self._texts():
            names = placeholders_in(text)
            check_placeholders(field, text, self.files, self.arguments)
            used.update(names)
            sized = sized or (MICRO_BATCH_SIZE in names and not self._may_be_left_out(field))
        if not sized:
            raise ValueError(
                "no field has `{micro_batch_size}`(fields that are left out when an argument has no value do "
                "not count): write it where the program takes its batch size"
            )
        unused = [f"files.{name}" for name in self.files if f"file:{name}" not in used]
        unused += [f"arguments.{name}" for name in self.arguments if ARGUMENT_PREFIX + name not in used]
        if unused:
            kind, _, name = unused[0].partition(".")
            raise ValueError(f"`{unused[0]}` is not used: name it as `{{{kind.removesuffix('s')}:{name}}}`")
        return self

    @model_validator(mode="after")
    def _keeps_values_in_their_places(self) -> Self:
        selecting = {
            name
            for name, argument in self.arguments.items()
            if isinstance(argument, BooleanArgument) and argument.selects_word
        }
        free = {
            name for name, argument in self.arguments.items() if isinstance(argument, StringArgument | PathArgument)
        }
        partial = {name for name, argument in self.arguments.items() if not argument.always_has_value}
        placement = Placement(selecting=selecting, free=free, partial=partial)
        of_probes = {f"probe_arguments.{number}": word for number, word in enumerate(self.probe_arguments)}
        of_probes |= {f"probe_environment.{name}": text for name, text in self.probe_environment.items()}
        check_words(self.argv, of_probes, self.environment, placement)
        check_files(self.files, self.arguments, placement)
        return self

    def _texts(self) -> list[tuple[str, str]]:
        """Return every text that may have placeholders, with its field."""
        return [
            *((f"argv.{number}", word) for number, group in enumerate(self.argv) for word in group),
            *((f"environment.{name}", text) for name, text in self.environment.items()),
            *((f"files.{name}", text) for name, text in self.files.items()),
            *((f"probe_environment.{name}", text) for name, text in self.probe_environment.items()),
            *((f"probe_arguments.{number}", text) for number, text in enumerate(self.probe_arguments)),
        ]

    def _may_be_left_out(self, field: str) -> bool:
        """Return whether a field is left out where an argument has no value."""
        kind, _, name = field.partition(".")
        texts = self.argv[int(name)] if kind == "argv" else (self.environment.get(name, ""),)
        partial = {key for key, argument in self.arguments.items() if not argument.always_has_value}
        return kind in {"argv", "environment"} and any(partial.intersection(arguments_in(text)) for text in texts)

    def begins_word(self, argument: str) -> bool:
        """Return whether a word of `argv` begins with the value of an argument, which then must not be an option."""
        return any(word.startswith(f"{{{ARGUMENT_PREFIX}{argument}}}") for group in self.argv for word in group)


class CommandsFile(Document):
    """The file of registered commands."""

    commands: dict[RegisteredName, CommandDefinition]
    """The commands by their names."""


def _checked_range(argument: _RangeT) -> _RangeT:
    """Return an argument whose bounds and default agree."""
    if argument.minimum > argument.maximum:
        raise ValueError(f"`minimum` is {argument.minimum}, above `maximum`, which is {argument.maximum}")
    if argument.default is not None and not argument.minimum <= argument.default <= argument.maximum:
        raise ValueError(f"`default` is {argument.default}, outside {argument.minimum} to {argument.maximum}")
    return argument
