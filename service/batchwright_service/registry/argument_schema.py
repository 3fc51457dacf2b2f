"""The JSON Schema of the arguments of a registered command, from which forms are made."""

from typing import Any, assert_never

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


def schema_of(definition: CommandDefinition) -> dict[str, Any]:
    """Return the JSON Schema of the `arguments` of a spec."""
    return {
        "type": "object",
        "properties": {name: _property(argument) for name, argument in definition.arguments.items()},
        "required": [name for name, argument in definition.arguments.items() if argument.required],
        "additionalProperties": False,
    }


def _property(argument: AnyArgument) -> dict[str, Any]:
    found = _type(argument)
    if argument.description:
        found["description"] = argument.description
    if argument.default is not None and not argument.required:
        found["default"] = argument.default
    return found


def _type(argument: AnyArgument) -> dict[str, Any]:
    match argument:
        case IntegerArgument() | NumberArgument():
            return {"type": argument.type, "minimum": argument.minimum, "maximum": argument.maximum}
        case BooleanArgument():
            return {"type": "boolean"}
        case EnumArgument():
            return {"type": "string", "enum": list(argument.values)}
        case StringArgument():
            bounds = {"type": "string", "minLength": 1, "maxLength": argument.max_length}
            return bounds if argument.pattern is None else {**bounds, "pattern": f"^(?:{argument.pattern})$"}
        case PathArgument():
            return {"type": "string", "maxLength": LONGEST_TEXT, "pattern": "^/"}
        case _:
            assert_never(argument)
