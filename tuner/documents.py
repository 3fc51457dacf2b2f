"""The base of every document that crosses a boundary (a file, HTTP, a process), and how a wrong one is reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema, model_validator

from tuner.errors import FieldProblem, SpecError

PositiveInt = Annotated[int, Field(ge=1)]
"""A count of at least one."""
NonNegativeInt = Annotated[int, Field(ge=0)]
"""A count or a number of bytes."""
NonNegativeFloat = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
"""A duration in seconds, or a rate."""

_MOST_VARIABLES = 64
_NAME, _LONGEST_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$", 128
_VALUE, _LONGEST_VALUE = r"^[^\x00]*$", 4096
"""The kernel takes no NUL in a variable, and at most 128 KiB (`MAX_ARG_STRLEN`)."""
Environment = Annotated[
    dict[
        Annotated[str, Field(pattern=_NAME, max_length=_LONGEST_NAME)],
        Annotated[str, Field(pattern=_VALUE, max_length=_LONGEST_VALUE)],
    ],
    Field(max_length=_MOST_VARIABLES),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": _NAME, "maxLength": _LONGEST_NAME},
            "additionalProperties": {"type": "string", "pattern": _VALUE, "maxLength": _LONGEST_VALUE},
            "maxProperties": _MOST_VARIABLES,
        }
    ),
]
"""Environment variables to set for a process. Pydantic's own schema would leave other names unchecked."""

_SHOWN_VALUE_LENGTH = 80


class Document(BaseModel):
    """Frozen, and closed to unknown fields: a misspelt field is an error, never ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)

    @model_validator(mode="after")
    def _can_be_written(self) -> Self:
        """Half a surrogate pair, which JSON can escape, is in no text: pydantic sees it everywhere but in free JSON."""
        for name, value in self:
            if isinstance(value, dict) and not _is_text(value):
                raise ValueError(f"`{name}` holds half of a surrogate pair, which is no text")
        return self


def _is_text(value: dict[Any, Any]) -> bool:
    try:
        json.dumps(value, ensure_ascii=False, skipkeys=True, default=str).encode()
    except UnicodeEncodeError:
        return False
    return True


DocumentT = TypeVar("DocumentT", bound=Document)


def _shown(error_type: str, value: object) -> str:
    """The offending value, short enough to read; nothing for a field that is missing or unknown."""
    if error_type in {"missing", "union_tag_not_found"} or isinstance(value, (dict, list)):
        return ""
    text = repr(value)
    return text if len(text) <= _SHOWN_VALUE_LENGTH else text[: _SHOWN_VALUE_LENGTH - 3] + "..."


def _field_path(location: tuple[int | str, ...], data: object) -> str:
    """The dotted path as the user wrote it: pydantic's location without the tags of discriminated unions."""
    path: list[str] = []
    for part in location:
        if isinstance(data, dict) and part not in data and part in data.values():
            continue
        path.append(str(part))
        data = data.get(part) if isinstance(data, dict) else None
    return ".".join(path) or "(document)"


def field_problems(error: ValidationError, data: object = None) -> list[FieldProblem]:
    """What pydantic found wrong in ``data``, as ``field: message (got value)`` with a dotted path for the field."""
    return [
        FieldProblem(
            field=_field_path(item["loc"], data),
            message=str(item["msg"]).removeprefix("Value error, "),
            value=_shown(item["type"], item["input"]),
        )
        for item in error.errors(include_url=False, include_context=False)
    ]


def parse_document(kind: type[DocumentT], data: object, name: str) -> DocumentT:
    """Validate ``data`` as a ``kind``.

    Raises:
        SpecError: naming every wrong field, its value and what is allowed.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise SpecError(field_problems(error, data), name) from None


def load_document(kind: type[DocumentT], path: Path, name: str) -> DocumentT:
    """Read a YAML or JSON file as a ``kind``.

    Raises:
        SpecError: when the file is missing, is not YAML or JSON, or does not describe a ``kind``.
    """
    return parse_document(kind, _read(path, name), f"{name} {path}")


def _read(path: Path, name: str) -> Any:  # noqa: ANN401 - whatever the file holds; validated by the caller
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError([FieldProblem(str(path), f"cannot be read: {error}")], name) from None
    try:
        return json.loads(text) if path.suffix == ".json" else _yaml(text)
    except RecursionError:
        raise SpecError([FieldProblem(str(path), "is nested too deeply")], name) from None
    except ValueError as error:
        raise SpecError([FieldProblem(str(path), f"is not valid {path.suffix or 'YAML'}: {error}")], name) from None


def _yaml(text: str) -> Any:  # noqa: ANN401 - as above
    """What YAML holds.

    Raises:
        ValueError: when it is none.
    """
    import yaml  # noqa: PLC0415 - the SDK reads no file

    from tuner.yaml_text import Loader  # noqa: PLC0415 - likewise

    try:
        return yaml.load(text, Loader)  # noqa: S506 - a safe one
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
