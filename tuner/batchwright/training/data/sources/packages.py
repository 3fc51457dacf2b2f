"""Import packages that only some kinds of data need."""

from __future__ import annotations

import importlib
from typing import Any

from batchwright.training.data.base import data_problem

RENDERER = "transformers.utils.chat_template_utils"
"""Module that renders chat templates."""


def import_optional(module: str, field: str, value: str) -> Any:  # noqa: ANN401 - a module, whose names only it knows
    """Import a module.

    Raises:
        SpecError: when its package is not installed, with the field that needs it and the command to install it.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # the package is installed, but one of its dependencies is not
        package = {"PIL": "pillow"}.get(package, package)
        message = f"needs the package `{package}`, which is not installed: pip install 'batchwright[data]'"
        raise data_problem(field, message, value) from None
