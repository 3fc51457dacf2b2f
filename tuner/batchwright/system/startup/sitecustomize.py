"""Run at the start of every Python process of a command, and of a program on virtual cards.

Their ``PYTHONPATH`` begins with this folder. Once torch has been imported, a process of a command is armed
(``batchwright.commands.injected.arming``), and on virtual cards small operators are computed
(``batchwright.virtual_gpu.compute``). Python runs one module of this name, so the one that this module hides runs from
here, and its errors are raised as without this module.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec

TYPE_CHECKING = False  # that of `typing`, which would be imported into every process
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_FOLDER = os.path.dirname(os.path.realpath(__file__))
_LIBRARY = os.path.dirname(os.path.dirname(_FOLDER))
_ALIAS = "_batchwright"
_MARK = "_batchwright_started"
_FOLDER_VARIABLE = "BATCHWRIGHT_PROBE_FOLDER"
_SERVER_VARIABLE = "BATCHWRIGHT_FORK_SERVER"
_VIRTUAL_VARIABLE = "VIRTUAL_GPU_SESSION"


class _FollowedImports(MetaPathFinder):
    """Have the execution of some modules followed by calls, by the module's name."""

    def __init__(self, followed_by: dict[str, list[Callable[[ModuleType], None]]]) -> None:
        self._followed_by = followed_by
        self._is_searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of one of the modules with another loader function; None for any other module."""
        del path, target
        if fullname not in self._followed_by or self._is_searching:
            return None
        self._is_searching = True  # `find_spec` asks every finder, this one included
        try:
            spec = find_spec(fullname)
        finally:
            self._is_searching = False
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                for call in self._followed_by[fullname]:
                    call(module)

            loader.exec_module = exec_module
        return spec


def _load(name: str) -> Any:
    """Import a module of the injected code, which stands alone, under an alias of the library.

    The interpreter of the command may have another version of Batchwright, or none.
    """
    if _ALIAS not in sys.modules:
        library: Any = type(sys)(_ALIAS)
        library.__path__ = [_LIBRARY]
        sys.modules[_ALIAS] = library
    return import_module(_ALIAS + ".commands.injected." + name)


def _run_hidden() -> None:
    """Run the ``sitecustomize`` that this one hides, under its name."""
    folders = [os.path.realpath(entry or ".") for entry in sys.path]
    hidden = sys.path[folders.index(_FOLDER) + 1 :] if _FOLDER in folders else sys.path  # what is before ran already
    others = [entry for entry in hidden if os.path.realpath(entry or ".") != _FOLDER]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


class _Injection:
    """Arm this process for a probe, as soon as the probe is known and torch has been imported."""

    def __init__(self) -> None:
        self._folder: str | None = None
        self._imported: Any = None
        self._is_watched = True
        """Whether writers of files are observed; not in a job."""

    def take_torch(self, torch: ModuleType) -> None:
        """Hook torch, which has just been imported."""
        if self._is_watched:
            _load("written_files").audit_torch(torch)
        self._imported = _load("arming").ImportedTorch(torch)
        if self._folder:
            self._imported.arm(self._folder)

    def take_safetensors(self, safetensors: ModuleType) -> None:
        """Observe the files that safetensors writes."""
        if self._is_watched:
            _load("written_files").audit_safetensors(safetensors)

    def before_fork(self) -> None:
        """Prepare for processes that are forked from this one, one for each probe."""
        if self._imported is not None:
            self._imported.before_fork()

    def begin(self, folder: str) -> None:
        """Take the folder of the probe."""
        self._folder = folder
        _load("reporting").report_start(folder)
        self._is_watched = _load("written_files").watch(folder)
        if self._imported is not None:
            self._imported.arm(folder)


def _serve(address: str, injection: _Injection) -> None:
    """Be the fork server of the command. Return only in a process that is forked for a probe."""
    process, descriptor = address.split(":")
    if process != str(os.getpid()):
        os._exit(1)  # a child of the command, which was to be the server itself
    try:
        server = _load("command_server").CommandServer(int(descriptor))
        _run_hidden()
        folder = server.serve(injection.before_fork)
    except BaseException:  # noqa: BLE001 - the program must not run in the server
        os._exit(1)
    injection.begin(folder)


def _compute(torch: ModuleType) -> None:
    """Have the CPU compute small operators of virtual cards."""
    del torch
    if find_spec("batchwright") is None:  # the interpreter of the command has none
        sys.path.append(os.path.dirname(_LIBRARY))
    import_module("batchwright.virtual_gpu.compute.registration").register_from_environment()


def _start() -> None:
    """Prepare this process, and run what this module hides: once, since what is hidden may itself run what hides it."""
    if _MARK in sys.modules:
        return
    sys.modules[_MARK] = sys
    address, folder = os.environ.pop(_SERVER_VARIABLE, None), os.environ.get(_FOLDER_VARIABLE)
    injection = _Injection()
    followed_by: dict[str, list[Callable[[ModuleType], None]]] = {}
    if address or folder:
        followed_by = {"torch": [injection.take_torch], "safetensors": [injection.take_safetensors]}
    if os.environ.get(_VIRTUAL_VARIABLE):
        followed_by.setdefault("torch", []).append(_compute)
    sys.meta_path.insert(0, _FollowedImports(followed_by))
    if address:
        _serve(address, injection)
        return
    if folder:
        injection.begin(folder)
    _run_hidden()


_start()
