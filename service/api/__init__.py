"""Answer HTTP requests: a route parses, calls one use case, and returns. No SQL and no business rule.

The pipeline of a request:

1. ``middleware.observability`` gives it an identifier, a trace and a measurement.
2. ``middleware.security`` checks host and origin, finds out who calls (``authentication``), and bounds the body.
3. A module of ``routes`` parses it; ``dependencies`` has the parameters that routes share, and ``strict_route`` refuses
   unknown query parameters.
4. The route calls a use case of ``service.application``, found in the ``context``. Reads that many callers make at once
   go through ``reads``; long polls and event streams wait in ``events``.
5. ``responses`` and ``etags`` make the answer; ``problems`` makes one of any error, worded by
   ``service.problem_mapping``.

``app`` puts the routes together, ``openapi`` and ``examples`` make the document, and ``docs_page`` shows it.

Where a new thing goes:

- a route: a module of ``routes`` (a new one is listed in ``app``), a use case behind it, then `make openapi`;
- an error: ``service.errors``, with its status and code, nothing here;
- a scope: ``service.domain.api_keys``; a limit on bodies: ``middleware.security``.

The package may import ``service.application``, ``service.auth``, ``service.observability``, the types of
``service.store.interface`` and the layers below, but neither ``service.worker`` nor ``service.dashboard``.
"""
