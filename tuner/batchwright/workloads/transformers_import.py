"""Import ``transformers`` with one scan of its folder of models instead of two. Imports torch only through it."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

_HUB_KERNELS = "USE_HUB_KERNELS"


def forbid_hub_kernels() -> None:
    """Make transformers build models without kernels from a hub, even if the package `kernels` is installed.

    Some models (Mamba, Falcon-H1) download kernels when they are imported, built or run. Must be called before
    transformers is imported. A ``USE_HUB_KERNELS`` in the environment is kept.
    """
    os.environ.setdefault(_HUB_KERNELS, "0")


def import_transformers() -> None:
    """Import ``transformers`` and ``transformers.models``.

    Each of the two reads the files of all models, thousands, for their exported names. The second import reuses the
    result of the first, if this release of transformers caches it in the known form.

    Raises:
        ImportError: when transformers is missing or broken.
    """
    forbid_hub_kernels()
    transformers = importlib.import_module("transformers")
    utils = importlib.import_module("transformers.utils.import_utils")
    scan = getattr(utils, "define_import_structure", None)
    if scan is None or not hasattr(scan, "cache_info") or transformers.__file__ is None:
        return
    models = Path(transformers.__file__).parent / "models"
    scans = scan.cache_info().misses
    prefixed = scan(models, prefix=models.name)
    if scan.cache_info().misses > scans:  # transformers has not cached the scan
        return

    def cached_scan(path: Path | str, prefix: str | None = None) -> Any:  # noqa: ANN401 - as it is
        return (
            _strip_prefix(models.name, prefixed)
            if (Path(path).parent, prefix) == (models, None)
            else scan(path, prefix)
        )

    setattr(utils, scan.__name__, cached_scan)
    try:
        importlib.import_module("transformers.models")
    finally:
        setattr(utils, scan.__name__, scan)


def _strip_prefix(prefix: str, structure: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """The structure of the modules below ``prefix``, with the prefix removed."""
    start = f"{prefix}."
    return {
        backends: {name.removeprefix(start): exported for name, exported in modules.items() if name.startswith(start)}
        for backends, modules in structure.items()
    }
