"""The folder that comes first in the ``PYTHONPATH`` of a command, and of a program on virtual cards.

``sitecustomize`` is imported by Python itself, by this name and from the folder; others import this package to find the
folder. Nothing else may be put here: each module would hide one of the same name in every program.
"""
