"""Respond to every error with `application/problem+json`, and declare the errors of routes."""

import re
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException

from batchwright.client.documents.problems import FieldFault, Problem
from batchwright.errors import BatchwrightError
from batchwright.schemas.field_errors import described, located, shown
from batchwright_service.errors import (
    MAX_FAULTS,
    IdempotencyKeyInFlightError,
    InvalidInputError,
    MalformedJsonError,
    NotAuthenticatedError,
    QuotaExceededError,
    ServiceError,
)
from batchwright_service.problem_mapping import make_problem, problem_of

PROBLEM_MEDIA_TYPE = "application/problem+json"
_RETRY_AFTER_SECONDS = "2"

_DESCRIPTIONS = {
    HTTPStatus.BAD_REQUEST: "The cursor or the JSON is malformed.",
    HTTPStatus.UNAUTHORIZED: "The API key is missing, unknown, revoked or expired.",
    HTTPStatus.FORBIDDEN: "The API key, the settings of the operator or the origin of the request do not permit it.",
    HTTPStatus.NOT_FOUND: "Nothing has this id. It may have been deleted.",
    HTTPStatus.CONFLICT: "The current state does not permit it; `code` names the reason.",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "The body is too large, or has too many values.",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "The body is not declared as JSON.",
    HTTPStatus.UNPROCESSABLE_ENTITY: "The request is invalid; `errors` lists the first fields at fault.",
    HTTPStatus.TOO_MANY_REQUESTS: "The API key has used its quota; try again later.",
    HTTPStatus.INTERNAL_SERVER_ERROR: "The service failed.",
    HTTPStatus.SERVICE_UNAVAILABLE: "The database, a worker or a slot is unavailable; try again later.",
    HTTPStatus.GATEWAY_TIMEOUT: "The time limit was exceeded.",
}
"""Fixed texts, because those of Python's `HTTPStatus` differ between its versions."""

RETRY_AFTER_HEADER: dict[str, Any] = {
    "Retry-After": {"description": "Seconds to wait before the next request.", "schema": {"type": "integer"}}
}
_CHALLENGE = {"WWW-Authenticate": {"description": "How to authenticate.", "schema": {"type": "string"}}}
_HEADERS: dict[HTTPStatus, dict[str, Any]] = {
    HTTPStatus.UNAUTHORIZED: {"headers": _CHALLENGE},
    HTTPStatus.TOO_MANY_REQUESTS: {"headers": RETRY_AFTER_HEADER},
    HTTPStatus.SERVICE_UNAVAILABLE: {"headers": RETRY_AFTER_HEADER},
}


def problem_response(error: Exception) -> Response:
    """Return the response to any error."""
    problem = problem_of(error)
    return _response(problem, _headers(error, problem))


def _headers(error: Exception, problem: Problem) -> dict[str, str] | None:
    if isinstance(error, NotAuthenticatedError):
        return {"WWW-Authenticate": error.challenge}
    if isinstance(error, QuotaExceededError):
        return {"Retry-After": str(error.retry_after_seconds)}
    if isinstance(error, IdempotencyKeyInFlightError):
        return {"Retry-After": "1"}
    return {"Retry-After": _RETRY_AFTER_SECONDS} if problem.status == HTTPStatus.SERVICE_UNAVAILABLE else None


def declared(*statuses: HTTPStatus) -> dict[int | str, dict[str, Any]]:
    """Return the ``responses`` of a route for these problems, by `content`, so that no other media type is declared."""
    content = {PROBLEM_MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {
        int(status): {"description": _DESCRIPTIONS[status], "content": content, **_HEADERS.get(status, {})}
        for status in sorted(statuses)
    }


def install_handlers(app: FastAPI) -> None:
    """Install the handlers that respond to every error of ``app`` with a problem."""
    app.add_exception_handler(ServiceError, _on_error)
    app.add_exception_handler(BatchwrightError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_request)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_error)


def _response(problem: Problem, headers: dict[str, str] | None = None) -> Response:
    body = problem.model_dump_json(exclude_none=True)
    return Response(body, status_code=problem.status or 500, media_type=PROBLEM_MEDIA_TYPE, headers=headers)


def _on_error(_request: Request, error: Exception) -> Response:
    return problem_response(error)


def _on_http_exception(request: Request, error: Exception) -> Response:
    """Handle the errors of the framework, such as an unknown path or method."""
    if not isinstance(error, HTTPException):
        return problem_response(error)
    if isinstance(cause := error.__cause__, ValueError):  # of the parser, which the framework does not report
        reason = str(cause).partition(" for integer string conversion")[0]  # "Exceeds the limit (4300 digits)"
        if isinstance(cause, UnicodeDecodeError):
            reason = f"byte {cause.start} is not UTF-8"
        return problem_response(MalformedJsonError(f"the body is not valid JSON: {reason}"))
    status = HTTPStatus(error.status_code)
    headers = dict(error.headers or {})
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        # The framework names those of one route of the path only.
        path, paths = request.url.path, request.app.openapi()["paths"]
        patterns = ((re.sub(r"\\{\w+\\}", "[^/]+", re.escape(template)), found) for template, found in paths.items())
        matching = (operations for pattern, operations in patterns if re.fullmatch(pattern, path))
        found = {method.upper() for method in paths.get(path) or next(matching, ("get",))}
        headers["Allow"] = ", ".join(sorted(found | {"OPTIONS"} | ({"HEAD"} if "GET" in found else set())))
        if request.method == "OPTIONS":
            return Response(status_code=HTTPStatus.NO_CONTENT, headers=headers)
    code = status.phrase.lower().replace(" ", "-")
    detail = f"{request.method} {request.url.path}: {error.detail}"
    return _response(make_problem(status, code, status.phrase, detail), headers)


def _on_invalid_request(_request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        return problem_response(error)
    found = error.errors()
    if any(item["type"] == "json_invalid" for item in found):
        invalid = next(item for item in found if item["type"] == "json_invalid")
        reason = invalid.get("ctx", {}).get("error") or invalid["msg"].removeprefix("is not valid JSON: ")
        return problem_response(MalformedJsonError(f"the body is not valid JSON: {reason}"))
    faults = [_fault(item, error.body) for item in found[:MAX_FAULTS]]
    return problem_response(InvalidInputError.listing(faults, len(found)))


def _fault(item: ErrorDetails, body: object) -> FieldFault:
    """Convert a fault, with its path as the caller wrote it, without the request's part and the tags of unions."""
    part, *rest = item["loc"] or ("body",)
    inner = item.copy()
    inner["loc"] = tuple(rest)
    field = located(inner, body if part == "body" else None)
    named = "(body)" if field == "(document)" else field
    return FieldFault(field=named, message=described(item), value=shown(item))


COMMON_STATUSES = (
    HTTPStatus.FORBIDDEN,
    HTTPStatus.UNPROCESSABLE_ENTITY,
    HTTPStatus.INTERNAL_SERVER_ERROR,
    HTTPStatus.SERVICE_UNAVAILABLE,
)
"""Statuses of the problems of every route."""

BODY_STATUSES = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
"""Statuses of the problems of every route that takes a body."""

ALWAYS = declared(HTTPStatus.UNAUTHORIZED, *COMMON_STATUSES)
"""Problems of every route that requires authentication."""
