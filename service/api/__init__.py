"""The HTTP side: a route parses, calls one use case and returns."""
