"""Process every request before a route does.

From the outside in: ``observability`` identifies, traces and measures a request. ``security`` refuses foreign hosts and
origins, unauthenticated callers, and bodies that are too large or nested too deeply.
"""
