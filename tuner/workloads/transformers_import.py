"""``transformers``, imported with its folder of models looked through once instead of twice. No torch but its own."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

_HUB_KERNELS = "USE_HUB_KERNELS"


def forbid_hub_kernels() -> None:
    """Have transformers build models of its own code alone, where the package `kernels` is installed too.

    Some models (Mamba, Falcon-H1) fetch kernels from a hub when they are imported, built or run. Takes effect before
    transformers is imported; a ``USE_HUB_KERNELS`` in the environment is kept.
    """
    os.environ.setdefault(_HUB_KERNELS, "0")


def import_transformers() -> None:
    """Import ``transformers`` and ``transformers.models``.

    Each of the two reads the files of all models, thousands, for the names that they export. What the first has found
    is given to the second, where this release of transformers keeps it as we know it.

    Raises:
        ImportError: when it is missing or broken.
    """
    forbid_hub_kernels()
    transformers = importlib.import_module("transformers")
    utils = importlib.import_module("transformers.utils.import_utils")
    found = getattr(utils, "define_import_structure", None)
    if found is None or not hasattr(found, "cache_info") or transformers.__file__ is None:
        return
    models = Path(transformers.__file__).parent / "models"
    scans = found.cache_info().misses
    prefixed = found(models, prefix=models.name)
    if found.cache_info().misses > scans:  # transformers has not kept it, after all
        return

    def known(path: Path | str, prefix: str | None = None) -> Any:  # noqa: ANN401 - as it is
        return _without(models.name, prefixed) if (Path(path).parent, prefix) == (models, None) else found(path, prefix)

    with patch.object(utils, found.__name__, known):
        importlib.import_module("transformers.models")


def _without(prefix: str, structure: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """What each backend is needed for, by module below ``prefix``."""
    start = f"{prefix}."
    return {
        backends: {name.removeprefix(start): exported for name, exported in modules.items() if name.startswith(start)}
        for backends, modules in structure.items()
    }
