"""Execute the import statements with which the program of this process begins, before the program itself runs.

An import runs only if nothing that the program executes before it is passed by: the statements are taken in their
order, up to the first that is neither a docstring nor an import. A module of the program's own ends them too, after its
own leading imports, which are what its import would execute next.
"""

from __future__ import annotations

import ast
import gc
import json
import os
import site
import sys
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import Any, Iterable, Iterator
from urllib.parse import unquote, urlsplit

_NEVER = 2**31 - 1
"""More collections of the younger objects than a process makes."""
_SITE_FOLDERS = ("site-packages", "dist-packages")
_LONGEST_TEXT = 100


class LeadingImports:
    """The import statements with which a program begins.

    Args:
        module: the module that runs as a program (`python -m`); none where `sys.argv[0]` is its file.

    Attributes:
        executed: the number of statements that were executed.
        place: the file and line of the first statement that was not, such as `train.py:12`; empty where all were.
        reason: why that one was not; empty where all were.
    """

    def __init__(self, module: str | None) -> None:
        self._module = module
        self._script = os.path.realpath(sys.argv[0])
        self._folder = os.getcwd() if module else os.path.dirname(self._script)
        self._namespace: dict[str, Any] = {"__name__": "_batchwright_imports"}
        self._read: set[str] = set()
        self.executed = 0
        self.place = self.reason = ""

    def execute(self) -> None:
        """Execute them. An import that raises is the last: the program will raise its error itself."""
        if site.ENABLE_USER_SITE and PathFinder.find_spec("usercustomize") is not None:
            self.reason = "`usercustomize` runs before the program"
            return
        is_safe = getattr(sys.flags, "safe_path", False)
        if not is_safe:
            sys.path.insert(0, self._folder)  # as Python does before the program starts
        try:
            self._execute([self._script] if self._module is None else self._files_of_program(self._module))
        except Exception as error:  # noqa: BLE001 - any import may raise anything; the program meets it again
            self.reason = f"{type(error).__name__}: {error}"[:_LONGEST_TEXT]
        finally:
            if not is_safe and self._folder in sys.path:
                sys.path.remove(self._folder)

    def _execute(self, files: Iterable[str]) -> None:
        """Execute the leading imports of files that run one after another, up to the first with anything else."""
        for file in files:
            if not self._execute_file(file):
                return

    def _execute_file(self, file: str) -> bool:
        """Execute the leading imports of a file; return whether it has nothing else."""
        self.place = self._place(file)
        if file in self._read:  # a package that imports itself
            return False
        self._read.add(file)
        statements, other = _leading_imports(file)
        for statement in statements:
            self.place = self._place(file, statement.lineno)
            module = _module_of(statement)
            if not self._is_installed(module):
                self._follow(module)
                return False
            code = compile(ast.Module([statement], []), "<leading imports>", "exec")
            exec(code, self._namespace)  # noqa: S102 - statements that the program executes next
            self.executed += 1
        self.place, self.reason = ("", "") if other is None else (self._place(file, other[0]), f"`{other[1]}`")
        return other is None

    def _follow(self, local: str) -> None:
        """Execute the leading imports of a module of the program's own, at which those of the program end."""
        place, reason = self.place, f"`{local}` is a module of the program's own" if local else "a relative import"
        self._execute(_files_of(local))
        if not self.reason:
            self.place, self.reason = place, reason

    def _place(self, file: str, line: int | None = None) -> str:
        """Name a line of a file, by its path from the folder of the program if it is in there."""
        name = os.path.relpath(file, self._folder) if file.startswith(self._folder + os.sep) else file
        return name if line is None else f"{name}:{line}"

    def _is_installed(self, name: str) -> bool:
        """Return whether a module belongs to Python or to an installed package, and not to the program."""
        package = name.partition(".")[0]
        if package in sys.builtin_module_names or package == "__future__":
            return True
        spec = find_spec(package) if package and package != "__main__" else None
        if spec is None:
            return False
        places = _installed_places(tuple(sys.path), self._folder)
        origins = [spec.origin] if spec.has_location and spec.origin else list(spec.submodule_search_locations or ())
        return spec.origin == "frozen" or all(_is_below(origin, places) for origin in origins)

    def _files_of_program(self, module: str) -> Iterator[str]:
        """Yield the files that `python -m` executes. The packages of an installed module are imported, as in Python."""
        if not self._is_installed(module):
            yield from _files_of(module, is_program=True)
            return
        spec = find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(module + ".__main__")
        if spec is not None and spec.origin is not None:
            yield spec.origin


@contextmanager
def without_full_collections() -> Iterator[None]:
    """Leave out the garbage collections of the oldest objects, and collect once at the end.

    Each of them visits all objects so far, and imports add hundreds of thousands that stay: six take 1 to 2 of 9
    seconds of Lightning's imports. The young objects are collected as ever, so that the heap grows as in a fresh
    process: by 0.1 MiB more or less, where imports without any collection leave 8 MiB more.
    """
    young, middle, old = gc.get_threshold()
    within = (young, middle, _NEVER)
    gc.set_threshold(*within)
    try:
        yield
    finally:
        if gc.get_threshold() == within:  # no import has set others
            gc.set_threshold(young, middle, old)
        if gc.isenabled():
            gc.collect()


def construct_optimizer() -> None:
    """Construct an optimizer of no use, which has torch execute the imports that it delays until the first one.

    They take as long as torch's own, and every program that is counted constructs an optimizer. Done on the CPU alone:
    whether these imports leave a card alone was not tried, and nothing can be forked after CUDA is initialised.
    """
    torch = sys.modules.get("torch")
    if torch is not None and os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        kind = type("Optimizer", (torch.optim.Optimizer,), {"step": lambda *_: None})
        kind([torch.zeros(1, device="cpu", requires_grad=True)], {})


def _leading_imports(file: str) -> tuple[list[ast.Import | ast.ImportFrom], tuple[int, str] | None]:
    """Return the import statements with which a file begins, and the number and text of the first other line.

    A statement that names several modules is returned as one for each.
    The rest of its syntax tree is freed before an import takes memory that is compared with that of a fresh process.
    """
    found: list[ast.Import | ast.ImportFrom] = []
    with open(file, "rb") as stream:
        source = stream.read()
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.ImportFrom):
            found.append(statement)
        elif isinstance(statement, ast.Import):
            found.extend(ast.copy_location(ast.Import([name]), statement) for name in statement.names)
        elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
            line = source.splitlines()[statement.lineno - 1].decode(errors="replace").strip()
            return found, (statement.lineno, line[:_LONGEST_TEXT])
    return found, None


def _module_of(statement: ast.Import | ast.ImportFrom) -> str:
    """The module that a statement names; an empty name for a relative import."""
    if isinstance(statement, ast.ImportFrom):
        return "" if statement.level else statement.module or ""
    return statement.names[0].name


def _is_below(path: str, folders: tuple[str, ...]) -> bool:
    """Return whether a path is below a folder, by its own name or by that of the file that it links to."""
    return os.path.abspath(path).startswith(folders) or os.path.realpath(path).startswith(folders)


@lru_cache(maxsize=None)
def _installed_places(path: tuple[str, ...], program: str) -> tuple[str, ...]:
    """The folders of Python and of installed packages for a `sys.path`, each with a separator at its end.

    Packages are installed in the site folders of `sys.path`, in any other of its folders that has their metadata
    (`pip install --target`), and in editable projects. A project that the program is a part of is the program's own.
    """
    folders = [os.path.abspath(entry or ".") for entry in path]
    sites = [folder for folder in folders if os.path.basename(folder) in _SITE_FOLDERS]
    others = [folder for folder in folders if folder not in sites and _has_metadata(folder)]
    others += [project for folder in sites for project in _editable_projects(folder)]
    own = os.path.realpath(program) + os.sep
    if own.startswith(os.path.realpath(sys.prefix) + os.sep):
        own = ""  # the script of an installed package, whose environment may be in a project's folder
    apart = [folder for folder in others if not own.startswith(os.path.realpath(folder) + os.sep)]
    found = [os.path.dirname(os.__file__), *sites, *apart]
    return tuple(name + os.sep for folder in found for name in (folder, os.path.realpath(folder)))


def _has_metadata(folder: str) -> bool:
    with suppress(OSError):
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    return False


def _editable_projects(folder: str) -> Iterator[str]:
    """Yield the folders of projects that are installed as editable into a site folder.

    The metadata of a distribution names its project in `direct_url.json` (PEP 610); older versions of setuptools leave
    an `.egg-link`.
    """
    with suppress(OSError):
        for name in os.listdir(folder):
            with suppress(OSError, ValueError):
                if name.endswith(".egg-link"):
                    with open(os.path.join(folder, name), encoding="utf-8") as stream:
                        yield stream.readline().strip()
                elif name.endswith(".dist-info"):
                    with open(os.path.join(folder, name, "direct_url.json"), encoding="utf-8") as stream:
                        found = json.load(stream)
                    if found.get("dir_info", {}).get("editable"):
                        yield unquote(urlsplit(found["url"]).path)


def _files_of(module: str, *, is_program: bool = False) -> Iterator[str]:
    """Yield the files that the import of a module of the program executes, parents first. Nothing is executed here."""
    path: list[str] | None = None
    parts = module.split(".") if module else []
    for number in range(1, len(parts) + 1):
        name = ".".join(parts[:number])
        spec = PathFinder.find_spec(name, path)
        if spec is None and path is None and name not in sys.modules:
            spec = find_spec(name)  # by the finder of an editable project
        if spec is None:
            return
        if name not in sys.modules and spec.origin is not None and spec.origin.endswith(".py"):
            yield spec.origin
        path = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
        if path is None and number < len(parts):
            return
    main = PathFinder.find_spec("__main__", path) if is_program and path is not None else None
    if main is not None and main.origin is not None:
        yield main.origin
