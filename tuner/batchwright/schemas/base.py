"""Base class, parser and loader of the documents that cross a boundary (a file, HTTP, a process)."""

import ast
import inspect
import json
import logging
import math
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    WithJsonSchema,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from batchwright.errors import FieldProblem, SpecError, UnreadableDocumentError
from batchwright.html_view import html_view
from batchwright.schemas.field_errors import described_pattern, problems_in
from batchwright.units import NOT_A_SIZE, TypedSize, parse_bytes

_log = logging.getLogger(__name__)

PositiveInt = Annotated[int, Field(ge=1)]
"""A count of at least one."""
NonNegativeInt = Annotated[int, Field(ge=0)]
"""A count or a number of bytes."""
NonNegativeFloat = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
"""A duration in seconds, or a rate."""


DEEPEST_JSON = 64
"""Most levels of nesting in fields with any JSON value."""


def texts_schema(key: tuple[str, int], value: tuple[str, int], most: int, **others: object) -> WithJsonSchema:
    """Return the JSON schema of at most ``most`` texts by name. Pydantic's own would leave other names unchecked.

    ``key`` and ``value`` are the pattern and the most characters of a name and of a text.
    """
    return WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": key[0], "maxLength": key[1]},
            "additionalProperties": {"type": "string", "pattern": value[0], "maxLength": value[1]},
            "maxProperties": most,
            **others,
        }
    )


_MOST_VARIABLES = 64
_NAME = described_pattern(r"^[A-Za-z_][A-Za-z0-9_]*$", "must have a name of letters, digits and underscores")
_VALUE = described_pattern(r"^[^\x00]*$", "must not contain the character NUL")
_LONGEST_NAME, _LONGEST_VALUE = 128, 4096
"""The kernel takes no NUL in a variable, and at most 128 KiB (`MAX_ARG_STRLEN`)."""
Environment = Annotated[
    dict[
        Annotated[str, Field(pattern=_NAME, max_length=_LONGEST_NAME)],
        Annotated[str, Field(pattern=_VALUE, max_length=_LONGEST_VALUE)],
    ],
    Field(max_length=_MOST_VARIABLES),
    texts_schema((_NAME, _LONGEST_NAME), (_VALUE, _LONGEST_VALUE), _MOST_VARIABLES),
]
"""Environment variables to set for a process."""


def typed_size(value: object) -> object:
    """Parse a text such as ``128MiB``, for a field of bytes; any other value is left to the validation as an integer.

    Raises:
        PydanticCustomError: when the text is not a size.
    """
    if not isinstance(value, str):
        return value
    try:
        return TypedSize(parse_bytes(value), value)
    except ValueError:
        raise PydanticCustomError("size_parsing", NOT_A_SIZE) from None


class Document(BaseModel):
    """Base class of all documents: frozen, with unknown fields forbidden, so that a misspelt field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @classmethod
    def mistaken(cls, data: Mapping[str, object]) -> str | None:
        """Say of the data of another document, which is easily mistaken for this kind, what to do with it."""
        del data
        return None

    @classmethod
    def from_stored(cls, text: str | bytes) -> Self:
        """Read a document that an earlier version may have stored. Fields that this version lacks are left out.

        Raises:
            UnreadableDocumentError: when a field that this version needs is missing or wrong, naming it.
        """
        try:
            return cls.model_validate_json(text, extra="ignore")
        except ValidationError as error:
            faults = "; ".join(map(str, problems_in(error)))
            raise UnreadableDocumentError(
                f"a stored {cls.__name__} cannot be read by this version of Batchwright: {faults}"
            ) from None

    @classmethod
    def readable(cls, texts: Iterable[str | bytes]) -> list[Self]:
        """Read those of several stored documents that can be read; the log says what was wrong with the others."""
        found = []
        for text in texts:
            try:
                found.append(cls.from_stored(text))
            except UnreadableDocumentError as error:
                _log.warning("%s", error)
        return found

    @property
    def headline(self) -> str:
        """The document in a line: the heading of its view in a notebook."""
        return type(self).__name__

    def _repr_html_(self) -> str:
        """The view of the document in a notebook."""
        return html_view(self.headline, dict(self))

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema of pydantic, in which fields without a description have their docstrings.

        ``use_attribute_docstrings`` reads them when a class is made: a quarter of what a command's imports take.
        """
        found = handler(schema)
        properties = handler.resolve_ref_schema(found).get("properties", {})
        for name, text in _field_docstrings(cls).items():
            if name in properties:
                properties[name].setdefault("description", text)
        return found


def _field_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The docstrings below the fields of a model and of its bases, by the fields' names."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            found |= _docstrings_in(base.__module__).get(base.__qualname__, {})
    return found


@cache
def _docstrings_in(name: str) -> dict[str, dict[str, str]]:
    """The docstrings of all classes at the top of a module, by the classes' names."""
    tree = ast.parse(inspect.getsource(sys.modules[name]))
    return {found.name: _of_fields(found) for found in tree.body if isinstance(found, ast.ClassDef)}


def _of_fields(found: ast.ClassDef) -> dict[str, str]:
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(found.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def check_json(value: object, levels: int = DEEPEST_JSON) -> None:
    """Refuse a parsed JSON value that cannot be stored and read again unchanged.

    Args:
        value: any JSON value, or a document; ``json.loads`` accepts NaN, overflowing numbers and half surrogate pairs.
        levels: the most levels of nesting.

    Raises:
        ValueError: naming the fault.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError("contains half of a surrogate pair, which is not valid text") from None
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"contains {value}, which JSON cannot represent: write a finite number, a text or null")
    elif isinstance(value, dict | list):
        if not levels:
            raise ValueError(f"is nested more than {DEEPEST_JSON} levels deep")
        for inner in (*value, *value.values()) if isinstance(value, dict) else value:
            check_json(inner, levels - 1)


def _checked_json(value: object) -> object:
    check_json(value)
    return value


STORABLE = BeforeValidator(_checked_json)
"""Refuses what ``check_json`` refuses, and pydantic's ``JsonValue`` takes: belongs to every field of that type."""

DocumentT = TypeVar("DocumentT", bound=Document)


_FIELDS_OF_ANOTHER = 3
"""A document with at least this many fields, all of them unknown, is taken for another kind of document."""


def parse_document(kind: type[DocumentT], data: object, name: str) -> DocumentT:
    """Validate ``data`` as a ``kind``.

    Raises:
        SpecError: naming every wrong field, its value and what is allowed.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        if isinstance(data, dict) and (message := kind.mistaken(data)) is not None:
            raise SpecError([FieldProblem("", message)], name) from None
        if isinstance(data, dict) and len(data) >= _FIELDS_OF_ANOTHER and not data.keys() & kind.model_fields.keys():
            known, found = (", ".join([*names][:_FIELDS_OF_ANOTHER]) for names in (kind.model_fields, data))
            message = f"is another kind of document: it has {found}, ... but no field of this kind ({known}, ...)"
            raise SpecError([FieldProblem("(document)", message)], name) from None
        raise SpecError(problems_in(error, data, kind), name) from None


def load_document(kind: type[DocumentT], path: Path, name: str) -> DocumentT:
    """Read a YAML or JSON file as a ``kind``.

    Raises:
        SpecError: when the file is missing, is not YAML or JSON, or does not describe a ``kind``.
    """
    return parse_document(kind, read_data(path, name), f"{name} {path}")


def read_data(path: Path, name: str) -> Any:  # noqa: ANN401 - any content; validated by the caller
    """Read a YAML or JSON file as data.

    Raises:
        SpecError: when the file is missing, or is not YAML or JSON.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise _unreadable(path, name, f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise _unreadable(path, name, f"cannot be read: byte {error.start} is not UTF-8") from None
    try:
        if not text.strip():
            raise _unreadable(path, name, "is empty")
        return json.loads(text) if path.suffix == ".json" else _yaml(text)
    except RecursionError:
        raise _unreadable(path, name, "is nested too deeply") from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise _unreadable(path, name, f"is not valid JSON: {place}: {error.msg}") from None
    except ValueError as error:
        raise _unreadable(path, name, str(error)) from None


def _unreadable(path: Path, name: str, message: str) -> SpecError:
    return SpecError([FieldProblem(str(path), message)], name)


def _yaml(text: str) -> Any:  # noqa: ANN401 - as above
    """Parse a YAML text; an error names the line and the column."""
    import yaml  # noqa: PLC0415 - the SDK reads no file

    from batchwright.yaml_loader import Loader, describe_yaml_error  # noqa: PLC0415 - as above

    try:
        return yaml.load(text, Loader)  # noqa: S506 - a safe one
    except yaml.YAMLError as error:
        raise ValueError(f"is not valid YAML: {describe_yaml_error(error)}") from None
