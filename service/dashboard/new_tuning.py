"""Data for the forms that make tunings and jobs: the schemas they are made from, and YAML as JSON."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import yaml
from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool

from service.api import examples
from service.api.etags import conditional, tagged
from service.api.middleware.compression import compressed, takes_gzip
from service.errors import InvalidInputError
from tuner.schemas.yaml_loader import Loader, describe_yaml_error

SCHEMA = "/tunings/new/schema"
JOB_SCHEMA = "/jobs/new/schema"
YAML = "/tunings/new/yaml"
_SUBMISSION = "TuningSubmission"
_TRAINING = "TrainingRequest"
_REFERENCE = "#/components/schemas/"
_MOST_CHARACTERS = 65_536
"""Longer than any spec, and read within a second."""


def install(app: FastAPI) -> None:
    """Add the routes. They are no part of the API's document: programs read that, and send JSON."""

    async def read_yaml(request: Request) -> Response:
        body = await request.body()
        return Response(await run_in_threadpool(_answer, body), media_type="application/json")

    app.add_route(SCHEMA, _schema_endpoint(app, _SUBMISSION), methods=["GET"], include_in_schema=False)
    app.add_route(JOB_SCHEMA, _schema_endpoint(app, _TRAINING), methods=["GET"], include_in_schema=False)
    app.add_route(YAML, read_yaml, methods=["POST"], include_in_schema=False)


def _schema_endpoint(app: FastAPI, name: str) -> Callable[[Request], Awaitable[Response]]:
    written: list[bytes] = []

    async def schema(request: Request) -> Response:
        if not written:
            written.append(compressed(json.dumps(form_document(app.openapi(), name)).encode()))
        if not takes_gzip(request.headers):
            return Response(json.dumps(form_document(app.openapi(), name)), media_type="application/json")
        told = {"Content-Encoding": "gzip", "Vary": "Accept-Encoding", "Cache-Control": "no-cache"}
        return conditional(tagged(written[0]), request.headers.get("if-none-match"), told)

    return schema


def form_document(document: dict[str, Any], submission: str = _SUBMISSION) -> dict[str, Any]:
    """The schemas of an OpenAPI document that a submission is made of, and its examples."""
    schemas = document["components"]["schemas"]
    found: dict[str, Any] = {}
    wanted = [submission]
    while wanted:
        name = wanted.pop()
        if name not in found:
            found[name] = schemas[name]
            wanted += _references(schemas[name])
    return {"components": {"schemas": found}, "examples": examples.REQUESTS.get(submission, {})}


def _references(part: object) -> list[str]:
    if isinstance(part, dict):
        own = [part["$ref"].removeprefix(_REFERENCE)] if isinstance(part.get("$ref"), str) else []
        return own + [name for inner in part.values() for name in _references(inner)]
    return [name for inner in part for name in _references(inner)] if isinstance(part, list) else []


def _answer(body: bytes) -> str:
    try:
        asked = json.loads(body)
        text = asked["text"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise InvalidInputError('send {"text": "..."}') from None
    if not isinstance(text, str):
        raise InvalidInputError('send {"text": "..."}')
    return json.dumps({"value": parsed(text)})


def parsed(text: str) -> dict[str, Any]:
    """The mapping that a YAML document holds, of what JSON has too.

    Raises:
        InvalidInputError: when it is none; the message says where.
    """
    if len(text) > _MOST_CHARACTERS:
        raise InvalidInputError(f"the text has {len(text)} characters; a spec has at most {_MOST_CHARACTERS}")
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader)):
            raise InvalidInputError("aliases (`*name`) are not read here: write out what they stand for")
        value = yaml.load(text, Loader)  # noqa: S506 - a safe one
        json.dumps(value, allow_nan=False)
    except yaml.YAMLError as error:
        raise InvalidInputError(f"the text is not valid YAML: {describe_yaml_error(error)}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidInputError(f"this holds what JSON has not: {error}") from None
    if not isinstance(value, dict):
        raise InvalidInputError("a spec is a mapping, such as `model: ...` and `batch: ...`")
    return value
