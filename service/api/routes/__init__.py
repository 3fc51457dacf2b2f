"""Define the routes, one module per resource of `/v1`, and ``health`` for `/readyz` and `/metrics`.

``work`` has the routes that tunings and jobs share.

A function parses through its annotations, calls one use case of ``service.application``, and returns. Every status that
it can answer with is declared, since the exported OpenAPI document is compared with the app.
"""
