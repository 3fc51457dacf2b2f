"""Wrap every request before a route sees it.

From the outside in: ``observability`` identifies, traces and measures a request. ``security`` refuses foreign hosts and
origins, unauthenticated callers and bodies that are too large, with the help of ``host_names`` and ``json_bounds``.
``compression`` is called for the OpenAPI document and the pages.
"""
