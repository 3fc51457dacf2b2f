"""Define the routes, one module per resource of `/v1`, and ``health`` for `/livez`, `/readyz` and `/metrics`.

``work`` defines the routes that tunings and jobs share.

An endpoint parses through its annotations, calls one use case of ``batchwright_service.application``, and returns.
Every status of its responses is declared, since a test compares the exported OpenAPI document with the application.
"""
