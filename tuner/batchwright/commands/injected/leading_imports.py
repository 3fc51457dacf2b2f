"""Execute the import statements with which the program of this process begins, before the program itself runs.

An import runs only if nothing that the program executes before it is passed by: the statements are taken in their
order, up to the first that is neither a docstring nor an import. A module of the program's own ends them too, after its
own leading imports, which are what its import would execute next.
"""

from __future__ import annotations

import ast
import gc
import os
import site
import sys
from contextlib import contextmanager
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import Any, Iterator

_NEVER = 2**31 - 1
"""More collections of the younger objects than a process makes."""


def execute_leading_imports(module: str | None) -> None:
    """Execute them. An import that raises is the last: the program will raise its error itself.

    Args:
        module: the module that runs as a program (`python -m`); none where `sys.argv[0]` is its file.
    """
    if site.ENABLE_USER_SITE and PathFinder.find_spec("usercustomize") is not None:
        return  # which Python executes before the program
    script = os.path.realpath(sys.argv[0])
    folder = os.getcwd() if module else os.path.dirname(script)
    is_safe = getattr(sys.flags, "safe_path", False)
    if not is_safe:
        sys.path.insert(0, folder)  # as Python does before the program starts
    try:
        files = iter([script]) if module is None else _files_of_program(module)
        _execute_files(files, {"__name__": "_batchwright_imports"})
    except Exception:  # noqa: BLE001 - any import may raise anything; the program meets it again
        return
    finally:
        if not is_safe and folder in sys.path:
            sys.path.remove(folder)


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


def _execute_files(files: Iterator[str], namespace: dict[str, Any]) -> bool:
    """Execute the leading imports of files that run one after another; return whether they were all of the last."""
    return all(_execute_file(file, namespace) for file in files)


def _execute_file(file: str, namespace: dict[str, Any]) -> bool:
    """Execute the leading imports of a file; return whether it has nothing else."""
    statements, is_all = _leading_imports(file)
    for statement in statements:
        local = next((name for name in _modules_of(statement) if not _is_installed(name)), None)
        if local is not None:
            if len(statement.names) == 1 or isinstance(statement, ast.ImportFrom):
                _execute_files(_files_of(local), namespace)
            return False
        code = compile(ast.Module([statement], []), "<leading imports>", "exec")
        exec(code, namespace)  # noqa: S102 - statements that the program executes next
    return is_all


def _leading_imports(file: str) -> tuple[list[ast.Import | ast.ImportFrom], bool]:
    """Return the import statements with which a file begins, and whether it has nothing else.

    The rest of its syntax tree is freed before an import takes memory that is compared with that of a fresh process.
    """
    found: list[ast.Import | ast.ImportFrom] = []
    with open(file, "rb") as stream:
        statements = ast.parse(stream.read()).body
    for statement in statements:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            found.append(statement)
        elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
            return found, False
    return found, True


def _modules_of(statement: ast.Import | ast.ImportFrom) -> list[str]:
    """The modules that a statement names; an empty name for a relative import."""
    if isinstance(statement, ast.ImportFrom):
        return ["" if statement.level else statement.module or ""]
    return [alias.name for alias in statement.names]


def _is_installed(name: str) -> bool:
    """Return whether a module belongs to Python or to an installed package, and not to the program."""
    package = name.partition(".")[0]
    if package in sys.builtin_module_names or package == "__future__":
        return True
    spec = find_spec(package) if package and package != "__main__" else None
    if spec is None:
        return False
    places = [*site.getsitepackages(), site.getusersitepackages(), os.path.dirname(os.__file__)]
    installed = tuple(os.path.realpath(place) + os.sep for place in places)
    origins = [spec.origin] if spec.has_location and spec.origin else list(spec.submodule_search_locations or ())
    return spec.origin == "frozen" or all(os.path.realpath(origin).startswith(installed) for origin in origins)


def _files_of_program(module: str) -> Iterator[str]:
    """Yield the files that `python -m` executes. The packages of an installed module are imported, as Python does."""
    if not _is_installed(module):
        yield from _files_of(module, is_program=True)
        return
    spec = find_spec(module)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = find_spec(module + ".__main__")
    if spec is not None and spec.origin is not None:
        yield spec.origin


def _files_of(module: str, *, is_program: bool = False) -> Iterator[str]:
    """Yield the files that the import of a module of the program executes, parents first. Nothing is executed here."""
    path: list[str] | None = None
    parts = module.split(".") if module else []
    for number in range(1, len(parts) + 1):
        name = ".".join(parts[:number])
        spec = PathFinder.find_spec(name, path)
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
