"""Serve the HTTP API: a route parses a request, calls one use case, and returns. It holds no SQL and no business rule.

The pipeline of a request:

1. ``middleware.observability`` assigns a request id and a trace, and measures the request.
2. ``middleware.security`` checks host and origin, authenticates the caller (``authentication``), and bounds the body.
3. A module of ``routes`` parses the request. ``dependencies`` defines the parameters that routes share, and
   ``strict_route`` refuses unknown query parameters.
4. The route calls a use case of ``batchwright_service.application``, found in the ``context``. Reads that many callers
   make at once go through ``reads``. Long polls and event streams wait in ``events``.
5. ``responses``, ``etags`` and ``compression`` build the response. ``problems`` builds the response to an error,
   translated by ``batchwright_service.problem_mapping``.

``app`` assembles the application, ``openapi`` and ``examples`` build the OpenAPI document, and ``docs_page`` shows it.
`make openapi` records the examples of responses from a service whose probes are scripted.

Where a new thing goes:

- a route: a module of ``routes`` (list a new module in ``app``), with a use case behind it, then `make openapi`;
- an error: ``batchwright_service.errors``, with its status and code; nothing here;
- a scope: ``batchwright.client.documents.api_keys``; a limit on bodies: ``middleware.security``.

The package may import ``batchwright_service.application``, ``batchwright_service.auth``,
``batchwright_service.observability``, the values of ``batchwright_service.store.models``,
``batchwright_service.fast_path`` and the layers below, but neither ``batchwright_service.worker`` nor
``batchwright_service.dashboard``.
"""
