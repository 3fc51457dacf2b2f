"""Checks of the values that callers give to the arguments of registered commands."""

from collections.abc import Mapping
from pathlib import Path
from typing import assert_never

from pydantic import JsonValue

from batchwright.client.documents.problems import FieldFault
from batchwright.errors import DataOutsideRootsError
from batchwright.suggestions import suggestion
from batchwright.system.data_roots import DataRoots
from batchwright_service.errors import MAX_FAULTS, DataPathNotAllowedError, InvalidInputError
from batchwright_service.registry.definitions import (
    LONGEST_TEXT,
    AnyArgument,
    BooleanArgument,
    CommandDefinition,
    EnumArgument,
    IntegerArgument,
    NumberArgument,
    PathArgument,
    StringArgument,
)

_FIELD = "spec.model.arguments"
_SHOWN = 80


class ValueRefusedError(Exception):
    """A value is not allowed; the message has the values that are."""


Value = bool | int | float | str


def checked_values(
    command: str, definition: CommandDefinition, given: Mapping[str, JsonValue], roots: DataRoots
) -> dict[str, Value]:
    """Return the values of all arguments that have one, with defaults, and with paths resolved.

    Args:
        command: the name of the command.
        definition: the command with its allowed arguments.
        given: the values of a caller; null counts as none.
        roots: the folders that paths may lie in.

    Raises:
        InvalidInputError: naming every invalid argument.
        DataPathNotAllowedError: when a path lies outside the folders.
    """
    faults = []
    unknown = [name for name in given if name not in definition.arguments]
    for name in unknown[:MAX_FAULTS]:  # suggestions are slow
        near = suggestion(name, definition.arguments) or f" (known: {', '.join(definition.arguments) or 'none'})"
        message = f"is not an argument of `{command}`{near}"
        faults.append(FieldFault(field=f"{_FIELD}.{name}", message=message, value=_shown(given[name])))
    values: dict[str, Value] = {}
    for name, argument in definition.arguments.items():
        value = given.get(name)
        if value is None:
            value = None if argument.required else argument.default
        if value is None:
            if argument.required:
                faults.append(FieldFault(field=f"{_FIELD}.{name}", message="is required"))
            continue
        try:
            values[name] = _checked(name, argument, value, definition, roots)
        except ValueRefusedError as error:
            faults.append(FieldFault(field=f"{_FIELD}.{name}", message=str(error), value=_shown(value)))
    if faults:
        raise InvalidInputError.listing(faults, len(faults) + len(unknown[MAX_FAULTS:]))
    return values


def _shown(value: JsonValue) -> str:
    if isinstance(value, dict | list):
        return ""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _checked(
    name: str, argument: AnyArgument, value: JsonValue, definition: CommandDefinition, roots: DataRoots
) -> Value:
    """Return one value.

    Raises:
        DataPathNotAllowedError: when a path lies outside ``roots``.
    """
    match argument:
        case IntegerArgument() | NumberArgument():
            return _number(argument, value)
        case BooleanArgument():
            if not isinstance(value, bool):
                raise ValueRefusedError("must be true or false")
            return value
        case EnumArgument():
            if value not in argument.values:
                near = suggestion(value, argument.values, "'") if isinstance(value, str) else ""
                raise ValueRefusedError(f"must be one of {', '.join(map(repr, argument.values))}{near}")
            return str(value)
        case StringArgument():
            return _text(argument, value, begins_word=definition.begins_word(name))
        case PathArgument():
            return _path(name, argument, value, roots)
        case _:
            assert_never(argument)


def _number(argument: IntegerArgument | NumberArgument, value: JsonValue) -> Value:
    is_whole = isinstance(argument, IntegerArgument)
    bounds = f"from {argument.minimum} to {argument.maximum}"
    if isinstance(value, bool) or not isinstance(value, int if is_whole else int | float):
        raise ValueRefusedError(f"must be a {'whole ' if is_whole else ''}number {bounds}")
    if not argument.minimum <= value <= argument.maximum:
        relation = f"at least {argument.minimum}" if value < argument.minimum else f"at most {argument.maximum}"
        raise ValueRefusedError(f"must be {relation} (allowed: {bounds})")
    return int(value) if is_whole else float(value)


def _text(argument: StringArgument, value: JsonValue, *, begins_word: bool) -> str:
    if not isinstance(value, str):
        raise ValueRefusedError("must be a text")
    if not value or len(value) > argument.max_length:
        raise ValueRefusedError(f"must have 1 to {argument.max_length} characters")
    if not value.isprintable():
        raise ValueRefusedError("must have printable characters only, in one line")
    if begins_word and value.startswith(("-", "@")):
        raise ValueRefusedError("must not begin with `-` or `@`, because the program would read options")
    if not argument.matches(value):
        raise ValueRefusedError(f"must match the regular expression {argument.pattern}")
    return value


def _path(name: str, argument: PathArgument, value: JsonValue, roots: DataRoots) -> str:
    if not isinstance(value, str):
        raise ValueRefusedError("must be a path")
    if len(value) > LONGEST_TEXT or not value.isprintable():
        raise ValueRefusedError(f"must be a path of at most {LONGEST_TEXT} printable characters")
    if not value.startswith("/") or ".." in Path(value).parts:
        raise ValueRefusedError("must be an absolute path without `..`")
    try:
        resolved = roots.resolve(value)
        exists = resolved.is_file() or resolved.is_dir()
    except DataOutsideRootsError:
        allowed = ", ".join(map(str, roots.folders or ())) or "none"
        raise DataPathNotAllowedError(
            f"{_FIELD}.{name}: {value!r} is outside the folders that this command may read, or links to outside "
            f"(allowed: {allowed}); the operator adds them to `data_roots` of the command, or to BATCHWRIGHT_DATA_ROOTS"
        ) from None
    except (OSError, RuntimeError) as error:  # a name is too long, links go in circles, or a folder is closed to us
        raise ValueRefusedError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not str(resolved).isprintable():
        raise ValueRefusedError("links to a path that is not printable")
    if argument.must_exist and not exists:
        raise ValueRefusedError("is not a file or folder on the host that serves the API")
    return str(resolved)
