"""Messages for wrong fields, by pydantic's types of errors. Pure, no torch.

A message follows the field's path: ``model.layers: must be at least 1 (got 0)``.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError
from typing_extensions import is_typeddict

from batchwright.errors import FieldProblem
from batchwright.suggestions import suggestion
from batchwright.units import TypedSize, format_bytes

_SHOWN_VALUE_LENGTH = 80
_MOST_NAMES = 40
"""Names listed in one message."""
_REWRITTEN = "rewritten"
"""Key in the context of an error whose message was already replaced."""
_NO_VALUE = frozenset({"missing", "union_tag_not_found"})
_NOT_IN_PATH = frozenset(
    {
        *("[key]", "json", "python", "nullable", "function-after", "function-before", "function-wrap"),
        *("WorkloadSpec", "CommandSpec"),  # tags of a union that has no discriminating field of its own
    }
)

Location = tuple[int | str, ...]

# --- patterns ---------------------------------------------------------------------------------------------------------

PATTERN_MESSAGES: dict[str, str] = {}
"""Messages for the regular expressions of fields."""


def described_pattern(pattern: str, message: str) -> str:
    """Register the message for a regular expression of a field, and return the expression."""
    PATTERN_MESSAGES[pattern] = message
    return pattern


# --- the structure of a field's type ----------------------------------------------------------------------------------


def _members(kind: Any) -> Iterator[Any]:  # noqa: ANN401 - annotations have no common type
    """The types that a field may have: annotations and unions taken apart."""
    if get_origin(kind) is Annotated:
        yield from _members(get_args(kind)[0])
    elif get_origin(kind) in {Union, UnionType}:
        for member in get_args(kind):
            yield from _members(member)
    elif isinstance(kind, FieldInfo):
        yield from _members(kind.annotation)
    else:
        yield kind


def _models(kind: Any) -> list[type[BaseModel]]:  # noqa: ANN401 - as above
    return [member for member in _members(kind) if isinstance(member, type) and issubclass(member, BaseModel)]


def _tags(model: type[BaseModel], discriminator: str) -> tuple[Any, ...]:
    field = model.model_fields.get(discriminator)
    return get_args(field.annotation) if field is not None and get_origin(field.annotation) is Literal else ()


def _tagged(models: Sequence[type[BaseModel]], tag: int | str) -> list[type[BaseModel]]:
    """The members of a union with a tag or a class name."""
    return [
        model
        for model in models
        if model.__name__ == tag or any(tag in _tags(model, name) for name in model.model_fields)
    ]


def _inside(kind: Any, part: int | str) -> Any:  # noqa: ANN401 - as above
    """The type at ``part`` of a location; none where unknown."""
    models = _models(kind)
    for model in models:
        if part in model.model_fields:
            return model.model_fields[str(part)].annotation
    if chosen := _tagged(models, part):
        return chosen[0]
    for member in _members(kind):
        if get_origin(member) in {tuple, list} and isinstance(part, int):
            items = get_args(member)
            return items[part] if part < len(items) and items[-1] is not Ellipsis else items[0]
        if get_origin(member) is dict:
            return get_args(member)[1]
    return None


def _type_at(kind: Any, location: Location) -> Any:  # noqa: ANN401 - as above
    for part in location:
        kind = _inside(kind, part)
    return kind


# --- messages ---------------------------------------------------------------------------------------------------------


def listed(names: Sequence[str], most: int = _MOST_NAMES) -> str:
    """List names in a message, and count those beyond the first ``most``."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _at_limit(relation: str, name: str) -> Callable[[ErrorDetails], str]:
    def message(item: ErrorDetails) -> str:
        limit = item["ctx"][name]
        if isinstance(item["input"], TypedSize):
            return f"must be {relation} {format_bytes(limit)}"
        is_bytes = bool(item["loc"]) and str(item["loc"][-1]).endswith("_bytes")
        return f"must be {relation} {limit}{f' ({format_bytes(limit)})' if is_bytes else ''}"

    return message


def _choice(expected: Sequence[str], given: object) -> str:
    near = suggestion(given, expected, "'") if isinstance(given, str) else ""
    names = [repr(name) for name in expected]
    return f"must be {'one of ' if len(names) > 1 else ''}{listed(names)}{near}"


def _quoted(text: str) -> list[str]:
    """Parse choices as pydantic writes them: ``'a', 'b' or 'c'``."""
    return [str(ast.literal_eval(quoted)) for quoted in re.findall(r"'(?:[^'\\]|\\.)*'|\b\d+\b", text)]


def _one_of(item: ErrorDetails) -> str:
    return _choice(_quoted(item["ctx"]["expected"]), item["input"])


def _pattern(item: ErrorDetails) -> str:
    pattern = item["ctx"]["pattern"]
    return PATTERN_MESSAGES.get(pattern) or f"must match the regular expression {pattern}"


def _count(relation: str, name: str, unit: str) -> Callable[[ErrorDetails], str]:
    def message(item: ErrorDetails) -> str:
        count = item["ctx"][name]
        return f"must have {relation} {count} {unit}{'' if count == 1 else 's'}"

    return message


def _validator_message(item: ErrorDetails) -> str:
    """The message of one of our validators."""
    return str(item["ctx"]["error"]) if "error" in item.get("ctx", {}) else str(item["msg"])


def _fixed(message: str) -> Callable[[ErrorDetails], str]:
    return lambda _: message


_WHOLE = _fixed("must be a whole number")
_REAL = _fixed("must be a number")
_TRUTH = _fixed("must be true or false")
_TEXT = _fixed("must be a text")
_OBJECT = _fixed("must be a mapping of fields to values")
_LIST = _fixed("must be a list")
_TIME = _fixed("must be a date and time, for example 2026-01-31T12:00:00Z")
_PATH = _fixed("must be a path")

MESSAGES: Mapping[str, Callable[[ErrorDetails], str]] = MappingProxyType(
    {
        "missing": _fixed("is required"),
        "extra_forbidden": _fixed("is not a field here"),
        "union_tag_invalid": lambda item: _choice(_quoted(item["ctx"]["expected_tags"]), item["ctx"]["tag"]),
        "union_tag_not_found": _fixed("is required"),
        "literal_error": _one_of,
        "enum": _one_of,
        "int_type": _WHOLE,
        "int_parsing": _WHOLE,
        "int_parsing_size": _fixed("must be a whole number of at most 4,300 digits"),
        "int_from_float": _WHOLE,
        "float_type": _REAL,
        "float_parsing": _REAL,
        "finite_number": _fixed("must be a finite number"),
        "greater_than": _at_limit("above", "gt"),
        "greater_than_equal": _at_limit("at least", "ge"),
        "less_than": _at_limit("below", "lt"),
        "less_than_equal": _at_limit("at most", "le"),
        "bool_type": _TRUTH,
        "bool_parsing": _TRUTH,
        "string_type": _TEXT,
        "string_sub_type": _TEXT,
        "string_unicode": _fixed("must be a text of valid Unicode characters"),
        "string_too_short": _count("at least", "min_length", "character"),
        "string_too_long": _count("at most", "max_length", "character"),
        "string_pattern_mismatch": _pattern,
        "too_short": _count("at least", "min_length", "item"),
        "too_long": _count("at most", "max_length", "item"),
        "list_type": _LIST,
        "tuple_type": _LIST,
        "dict_type": _OBJECT,
        "mapping_type": _OBJECT,
        "model_type": _OBJECT,
        "model_attributes_type": _OBJECT,
        "dataclass_type": _OBJECT,
        "invalid_key": _fixed("has a key that is not a text"),
        "none_required": _fixed("must be null"),
        "invalid-json-value": _fixed("must be a JSON value: a text, a number, true, false, null, a list or a mapping"),
        "is_instance_of": _PATH,
        "path_type": _PATH,
        "datetime_type": _TIME,
        "datetime_parsing": _TIME,
        "datetime_from_date_parsing": _TIME,
        "datetime_object_invalid": _TIME,
        "timezone_naive": _TIME,
        "timezone_aware": _TIME,
        "recursion_loop": _fixed("contains itself"),
        "json_invalid": lambda item: f"is not valid JSON: {item['ctx']['error']}",
        "json_type": _fixed("must be JSON text"),
        "value_error": _validator_message,
        "assertion_error": _validator_message,
    }
)
"""Messages by type of error. A test checks that every type that our schemas can produce is included."""


def described(item: ErrorDetails, kind: Any = None) -> str:  # noqa: ANN401 - a model or an annotation
    """Format the message of one error, without the field and the value.

    With the validated type, ``kind``, the message lists the known fields or tags.
    """
    if _REWRITTEN in item.get("ctx", {}):
        return str(item["msg"])
    found = _message_with_known_names(item, kind)
    return found or MESSAGES.get(item["type"], _validator_message)(item)


def _message_with_known_names(item: ErrorDetails, kind: Any) -> str | None:  # noqa: ANN401 - as above
    """The message for an unknown field, or a union's missing tag, with the known names."""
    if kind is None or not item["loc"]:
        return None
    if item["type"] == "extra_forbidden":
        outer = _type_at(kind, item["loc"][:-1])
        remedies = (getattr(model, "ABSENT_FIELDS", {}).get(item["loc"][-1]) for model in _models(outer))
        if remedy := next(filter(None, remedies), None):
            return f"is not a field here; {remedy}"
        dicts = [list(member.__annotations__) for member in _members(outer) if is_typeddict(member)]
        names = list(dict.fromkeys(chain(*(model.model_fields for model in _models(outer)), *dicts)))
        near = suggestion(str(item["loc"][-1]), names)
        known = f" (known: {listed(names)})" if names and not near else ""
        return f"is not a field here{near}{known}"
    if item["type"] == "union_tag_not_found":
        name = _discriminator(item)
        tags = [str(tag) for model in _models(_type_at(kind, item["loc"])) for tag in _tags(model, name)]
        return f"is required: one of {listed([repr(tag) for tag in tags])}" if tags else None
    return None


def _discriminator(item: ErrorDetails) -> str:
    return str(item["ctx"]["discriminator"]).strip("'")


def located(item: ErrorDetails, data: object) -> str:
    """The dotted path as in the document: pydantic's location without the tags of unions."""
    path: list[str] = []
    for part in item["loc"]:
        is_tag = isinstance(data, dict) and part not in data and part in data.values()
        if is_tag or part in _NOT_IN_PATH:
            continue
        path.append(str(part) if str(part).isprintable() else repr(part))
        data = _part_of(data, part)
    if item["type"] in {"union_tag_invalid", "union_tag_not_found"} and _REWRITTEN not in item.get("ctx", {}):
        path.append(_discriminator(item))
    return ".".join(path) or "(document)"


def _part_of(data: object, part: int | str) -> object:
    if isinstance(data, dict):
        return data.get(part)
    if isinstance(data, list | tuple) and isinstance(part, int) and part < len(data):
        return data[part]
    return None


def shown(item: ErrorDetails) -> str:
    """The wrong value, shortened; empty where a field is missing, or for a whole object."""
    value = item["ctx"]["tag"] if item["type"] == "union_tag_invalid" and "ctx" in item else item["input"]
    if item["type"] in _NO_VALUE or isinstance(value, (dict, list, tuple, BaseModel)):
        return ""
    text = repr(value)
    return text if len(text) <= _SHOWN_VALUE_LENGTH else text[: _SHOWN_VALUE_LENGTH - 3] + "..."


def problems_in(error: ValidationError, data: object = None, kind: Any = None) -> list[FieldProblem]:  # noqa: ANN401 - as above
    """List the problems of ``data``, which was validated as a ``kind``: each with a path, a message and a value."""
    return [
        FieldProblem(field=located(item, data), message=described(item, kind), value=shown(item))
        for item in error.errors(include_url=False)
    ]


def reworded(error: ValidationError, kind: Any, most: int) -> ValidationError:  # noqa: ANN401 - as above
    """Replace the messages of an error, for code that takes a ``ValidationError`` and does not know ``kind``.

    Args:
        error: the error from pydantic.
        kind: the validated type.
        most: number of messages; further errors keep their location with an empty message, since suggestions take time.
    """
    items: list[InitErrorDetails] = []
    for number, item in enumerate(error.errors(include_url=False)):
        context = {"message": described(item, kind) if number < most else "", _REWRITTEN: True}
        location = item["loc"]
        if item["type"] in {"union_tag_invalid", "union_tag_not_found"}:
            location = (*location, _discriminator(item))
            context["tag"] = item["ctx"].get("tag")
        replaced = PydanticCustomError(item["type"], "{message}", context)
        items.append(InitErrorDetails(type=replaced, loc=location, input=item["input"]))
    return ValidationError.from_exception_data(error.title, items)
