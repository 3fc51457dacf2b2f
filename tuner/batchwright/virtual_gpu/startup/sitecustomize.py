"""Run at the start of every Python process of a session, whose ``PYTHONPATH`` begins with this folder.

Once torch has been imported, its small operators are computed (``batchwright.virtual_gpu.compute``). Python runs one
module of this name, so the one that this module hides runs from here, under its name.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType

_FOLDER = Path(__file__).resolve().parent
_ROOT = _FOLDER.parents[2]
_MARK = "_batchwright_virtual_gpu_started"


class _TorchImport(MetaPathFinder):
    """Have the module of torch followed by the registration of our kernels, when it is executed."""

    def __init__(self) -> None:
        self._is_searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return torch's spec with another loader function; None for any other module."""
        del path, target
        if fullname != "torch" or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = find_spec("torch")
        finally:
            self._is_searching = False
        if spec is not None and spec.loader is not None:
            _register_after(spec.loader)
        return spec


def _register_after(loader: object) -> None:
    execute = loader.exec_module  # type: ignore[attr-defined]

    def exec_module(module: ModuleType) -> None:
        execute(module)
        if find_spec("batchwright") is None:  # the interpreter of the command has none
            sys.path.append(str(_ROOT))
        from batchwright.virtual_gpu.compute.registration import register_from_environment  # noqa: PLC0415

        register_from_environment()

    loader.exec_module = exec_module  # type: ignore[attr-defined]


def _run_hidden() -> None:
    folders = [Path(entry or ".").resolve() for entry in sys.path]
    hidden = sys.path[folders.index(_FOLDER) + 1 :] if _FOLDER in folders else sys.path  # what is before ran already
    others = [entry for entry in hidden if Path(entry or ".").resolve() != _FOLDER]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if _MARK not in sys.modules:  # what is hidden may itself run what hides it
    sys.modules[_MARK] = sys
    sys.meta_path.insert(0, _TorchImport())
    _run_hidden()
