"""From pasted YAML to JSON, for the form that makes tunings. Nothing is checked here but that it is YAML."""

from __future__ import annotations

import json
from typing import Any

import yaml
from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool

from service.errors import InvalidInputError

PATH = "/tunings/new/yaml"
_MOST_CHARACTERS = 65_536
"""Longer than any spec, and read within a second."""


def install(app: FastAPI) -> None:
    """Add the route. It is no part of the API's document: programs send JSON."""

    async def read(request: Request) -> Response:
        body = await request.body()
        return Response(await run_in_threadpool(_answer, body), media_type="application/json")

    app.add_route(PATH, read, methods=["POST"], include_in_schema=False)


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
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise InvalidInputError("aliases (`*name`) are not read here: write out what they stand for")
        value = yaml.safe_load(text)
        json.dumps(value, allow_nan=False)
    except yaml.YAMLError as error:
        raise InvalidInputError(f"this is no YAML: {error}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidInputError(f"this holds what JSON has not: {error}") from None
    if not isinstance(value, dict):
        raise InvalidInputError("a spec is a mapping, such as `model: ...` and `batch: ...`")
    return value
