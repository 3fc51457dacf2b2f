"""Data for the forms of tunings and jobs: their schemas, and YAML parsed into JSON."""

import json
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool

from batchwright.yaml_loader import Loader, describe_yaml_error
from batchwright_service.api import examples
from batchwright_service.api.etags import StaticContent
from batchwright_service.errors import InvalidInputError

SCHEMA = "/tunings/new/schema"
JOB_SCHEMA = "/jobs/new/schema"
YAML = "/tunings/new/yaml"
_SUBMISSION = "TuningSubmission"
_TRAINING = "TrainingRequest"
_PRESETS = Path(__file__).with_name("presets.json")
_REFERENCE = "#/components/schemas/"
_MOST_CHARACTERS = 65_536
"""Longer than any spec, and read within a second."""


def install(app: FastAPI) -> None:
    """Add the routes. They are not in the API's document, because programs send JSON."""

    async def read_yaml(request: Request) -> Response:
        body = await request.body()
        return Response(await run_in_threadpool(_yaml_as_json, body), media_type="application/json")

    app.add_route(SCHEMA, _schema_endpoint(app, _SUBMISSION), methods=["GET"], include_in_schema=False)
    app.add_route(JOB_SCHEMA, _schema_endpoint(app, _TRAINING), methods=["GET"], include_in_schema=False)
    app.add_route(YAML, read_yaml, methods=["POST"], include_in_schema=False)


def _schema_endpoint(app: FastAPI, name: str) -> Callable[[Request], Awaitable[Response]]:
    content = StaticContent(lambda: json.dumps(form_document(app.openapi(), name)).encode())

    async def schema(request: Request) -> Response:
        return content.response(request.headers, {"Cache-Control": "no-cache"})

    return schema


def form_document(document: dict[str, Any], submission: str = _SUBMISSION) -> dict[str, Any]:
    """Return the schemas of an OpenAPI document that a submission refers to, its examples, and a tuning's presets."""
    schemas = document["components"]["schemas"]
    found: dict[str, Any] = {}
    wanted = [submission]
    while wanted:
        name = wanted.pop()
        if name not in found:
            found[name] = schemas[name]
            wanted += _references(schemas[name])
    form: dict[str, Any] = {"components": {"schemas": found}, "examples": examples.REQUESTS.get(submission, {})}
    return {**form, "presets": presets()} if submission == _SUBMISSION else form


@cache
def presets() -> dict[str, dict[str, Any]]:
    """Return requests of common models by name, by families of models."""
    found: dict[str, dict[str, Any]] = json.loads(_PRESETS.read_text(encoding="utf-8"))
    return found


def _references(part: object) -> list[str]:
    if isinstance(part, dict):
        own = [part["$ref"].removeprefix(_REFERENCE)] if isinstance(part.get("$ref"), str) else []
        return own + [name for inner in part.values() for name in _references(inner)]
    return [name for inner in part for name in _references(inner)] if isinstance(part, list) else []


def _yaml_as_json(body: bytes) -> str:
    try:
        text = json.loads(body)["text"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise InvalidInputError('send {"text": "..."}') from None
    if not isinstance(text, str):
        raise InvalidInputError('send {"text": "..."}')
    return json.dumps({"value": parsed(text)})


def parsed(text: str) -> dict[str, Any]:
    """Parse a YAML document into a mapping that JSON can represent.

    Raises:
        InvalidInputError: when the text is no such mapping; the message names the place.
    """
    if len(text) > _MOST_CHARACTERS:
        raise InvalidInputError(f"the text has {len(text)} characters; a spec has at most {_MOST_CHARACTERS}")
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader)):
            raise InvalidInputError("aliases (`*name`) are not supported here: write out the values")
        value = yaml.load(text, Loader)  # noqa: S506 - a safe one
        json.dumps(value, allow_nan=False)
    except yaml.YAMLError as error:
        raise InvalidInputError(f"the text is not valid YAML: {describe_yaml_error(error)}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidInputError(f"the document has a value that JSON cannot represent: {error}") from None
    if not isinstance(value, dict):
        raise InvalidInputError("a spec is a mapping, such as `model: ...` and `batch: ...`")
    return value
