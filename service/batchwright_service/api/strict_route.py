"""Routes that refuse unknown query parameters, instead of ignoring them."""

from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.problems import FieldFault
from batchwright.suggestions import suggestion
from batchwright_service.api.authentication import requires_scope
from batchwright_service.api.problems import ALWAYS
from batchwright_service.errors import MAX_FAULTS, InvalidInputError

_SHOWN_LENGTH = 80

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class StrictRoute(APIRoute):
    """A route that responds 422 to unknown query parameters, and to single ones that are repeated."""

    def get_route_handler(self) -> Handler:
        """Return a handler that checks the query before the request is handled."""
        handler = super().get_route_handler()
        single = _parameters(self.dependant)

        async def handle(request: Request) -> Response:
            if query := request.scope["query_string"]:
                check_query(query, single)
            return await handler(request)

        return handle


def strict_router(
    tag: str, prefix: str = "", scope: Scope | None = None, responses: dict[int | str, dict[str, Any]] = ALWAYS
) -> APIRouter:
    """Return a router of strict routes, each with the id of its endpoint's name in camel case.

    Args:
        tag: the group of the routes in the OpenAPI document.
        prefix: begins the path of every route.
        scope: the scope that every route requires.
        responses: the problems of every route.
    """
    return APIRouter(
        prefix=prefix,
        tags=[tag],
        dependencies=[] if scope is None else [requires_scope(scope)],
        responses=responses,
        route_class=StrictRoute,
        generate_unique_id_function=_operation_id,
    )


def _operation_id(route: APIRoute) -> str:
    first, *others = route.name.split("_")
    return first + "".join(map(str.capitalize, others))


def _parameters(dependant: Dependant) -> dict[str, bool]:
    """Return, for each query parameter of a route and its dependencies, whether it has a single value."""
    found = {field.alias: "list[" not in str(field.field_info.annotation) for field in dependant.query_params}
    for inner in dependant.dependencies:
        found |= _parameters(inner)
    return found


def check_query(query: bytes, single: dict[str, bool]) -> None:
    """Refuse unknown parameters, and single parameters that are repeated.

    Args:
        query: the query string of the request.
        single: whether a parameter has a single value, by its name.

    Raises:
        InvalidInputError: names every parameter at fault, with the most similar known one.
    """
    given = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    times = Counter(name for name, _ in given)
    repeated = [name for name, count in times.items() if count > 1 and single.get(name)]
    unknown = [(name, value) for name, value in dict(given).items() if name not in single]
    faults = [_fault(name, value, single) for name, value in unknown[:MAX_FAULTS]]  # suggestions are slow
    faults += [
        FieldFault(field=name, message=f"can be given once, and was given {times[name]} times") for name in repeated
    ]
    if faults:
        raise InvalidInputError.listing(faults[:MAX_FAULTS], len(unknown) + len(repeated))


def _fault(name: str, value: str, single: dict[str, bool]) -> FieldFault:
    hint = suggestion(name, single)
    known = f" (known: {', '.join(single)})" if single and not hint else ""
    return FieldFault(
        field=name[:_SHOWN_LENGTH],
        message=f"is not a query parameter of this route{hint}{known}",
        value=repr(value[:_SHOWN_LENGTH]),
    )
