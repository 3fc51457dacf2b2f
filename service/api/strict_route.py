"""Routes that refuse query parameters which nothing reads, instead of answering another question."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import parse_qsl

from fastapi import Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from service.domain.problems import FieldFault
from service.errors import MAX_FAULTS, InvalidInputError
from tuner.suggestions import suggestion

_SHOWN_LENGTH = 80

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class StrictRoute(APIRoute):
    """A route that answers 422 to a query parameter that it does not have, and to one given too often."""

    def get_route_handler(self) -> Handler:
        """The handler of a request, behind the check of its query."""
        handler = self.strict_handler()
        single = _parameters(self.dependant)

        async def handle(request: Request) -> Response:
            if query := request.scope["query_string"]:
                check_query(query, single)
            return await handler(request)

        return handle

    def strict_handler(self) -> Handler:
        """The handler of a request whose query has known parameters only."""
        return super().get_route_handler()


def _parameters(dependant: Dependant) -> dict[str, bool]:
    """The names of the query parameters that a route or its dependencies read, and whether each has one value."""
    found = {it.alias: "list[" not in str(it.field_info.annotation) for it in dependant.query_params}
    for inner in dependant.dependencies:
        found |= _parameters(inner)
    return found


def check_query(query: bytes, single: dict[str, bool]) -> None:
    """Refuse what nothing reads.

    Args:
        query: the query string as it was sent.
        single: by the names of the parameters: whether only one value is read.

    Raises:
        InvalidInputError: naming every parameter at fault, with the most similar one.
    """
    given = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    times = Counter(name for name, _ in given)
    repeated = [name for name, count in times.items() if count > 1 and single.get(name)]
    unknown = [(name, value) for name, value in dict(given).items() if name not in single]
    faults = [_fault(name, value, single) for name, value in unknown[:MAX_FAULTS]]  # a suggestion takes time
    faults += [
        FieldFault(field=name, message=f"can be given once, and is given {times[name]} times") for name in repeated
    ]
    if faults:
        raise InvalidInputError.listing(faults[:MAX_FAULTS], len(unknown) + len(repeated))


def _fault(name: str, value: str, single: dict[str, bool]) -> FieldFault:
    near = suggestion(name, single)
    known = f" (known: {', '.join(single)})" if single and not near else ""
    return FieldFault(
        field=name[:_SHOWN_LENGTH],
        message=f"is not a query parameter of this route{near}{known}",
        value=repr(value[:_SHOWN_LENGTH]),
    )
