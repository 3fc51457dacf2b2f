"""The folder that a session puts first in ``PYTHONPATH``.

``sitecustomize`` is imported by Python itself, by this name and from the folder; nothing imports this package. Nothing
else may be put here: each module would hide one of the same name in every program of the session.
"""
