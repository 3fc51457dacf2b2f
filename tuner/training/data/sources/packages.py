"""Packages that only some kinds of data need."""

from __future__ import annotations

import importlib
from typing import Any

from tuner.training.data.base import data_problem


def needed(module: str, field: str, value: str) -> Any:  # noqa: ANN401 - a module, whose names only it knows
    """The module, imported.

    Raises:
        SpecError: when its package is not installed; names the field that needs it and what to install.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # the package is there, and something of its own is not
        package = {"PIL": "pillow"}.get(package, package)
        message = f"needs the package `{package}`, which is not installed: pip install 'batchwright[data]'"
        raise data_problem(field, message, value) from None
