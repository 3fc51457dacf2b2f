"""What functions reach in the user's own files, and what the program has replaced in installed libraries. No torch.

A probe imports modules anew. So it lacks what the caller's program has set in them since (``settings.LENGTH`` from the
command line, a method that was replaced) and may have other code (a file that was edited after its import). This module
finds the places of such state, by the name of a module and a path in it, with the values that they have here.
"""

import dis
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial, partialmethod
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from batchwright.library.pickling import examine

Place = tuple[str, str]
"""The name of a module, and the path of an attribute in it, such as ``("models", "Net.forward.__defaults__")``."""

_WRAPPED = {staticmethod: "__func__", classmethod: "__func__", property: "fget", type(cache(len)): "__wrapped__"}
"""Where methods, properties and caches hold their function."""
_NOT_SEARCHED = {"__main__", "batchwright", *sys.stdlib_module_names}
"""Packages whose functions nobody replaces for a model."""
_HOOKS = ("torch.nn.modules.module", "_global_")
"""The module of torch with the hooks of all modules, and how the names of their dicts begin."""


def value_at(place: Place) -> Any:  # noqa: ANN401 - of any type
    """The value at a place of this process, whose module was imported.

    Raises:
        AttributeError, IndexError, TypeError: when there is none.
    """
    module, path = place
    found: Any = sys.modules[module]
    for part in path.split(".") if path else ():
        found = _part_of(found, part)
    return found


def set_at(place: Place, value: object) -> None:
    """Set the value at a place.

    Raises:
        Exception: when there is no such place, or it takes no value, of a type that depends on the owner.
    """
    path, _, name = place[1].rpartition(".")
    setattr(value_at((place[0], path)), name, value)


def _part_of(owner: Any, name: str) -> Any:  # noqa: ANN401 - of any type
    if name.isdigit():
        return owner[int(name)]
    if isinstance(owner, (type, ModuleType)) and name in vars(owner):
        return vars(owner)[name]
    return getattr(owner, name)


def is_own(module: object) -> bool:
    """Return whether a module, by its name, is one of the user's files: neither installed nor the running program."""
    file = getattr(sys.modules.get(module), "__file__", None) if isinstance(module, str) else None
    if not isinstance(file, str) or _package(module) in _NOT_SEARCHED:
        return False
    return not {"site-packages", "dist-packages"} & {*Path(file).parts}


def _package(module: object) -> str:
    return module.partition(".")[0] if isinstance(module, str) else ""


class ReachedCode:
    """Follows what objects refer to into the user's own files.

    A variable of an own module is reached if a function of the module that is reached uses it, or if reached code
    refers to the module and has the name as an attribute or a text; an attribute of an own class likewise. That is more
    than the code uses, but never less, unless it composes names.

    Attributes:
        values: the value of each place that was reached; an owner comes before what is in it.
    """

    def __init__(self) -> None:
        self.values: dict[Place, Any] = {}
        self._attributes: set[str] = set()
        self._variables: defaultdict[str, set[str]] = defaultdict(set)
        self._referred: set[str] = set()
        self._owners: dict[Place, ModuleType | type] = {}
        self._functions: set[int] = set()

    def follow(self, value: object) -> None:
        """Add everything that ``value`` reaches.

        Raises:
            Exception: when it cannot be pickled, of any type.
        """
        for reference in examine(value).references:
            self._refer(reference)
        reached = -1
        while reached != (reached := self._size()):
            for (module, path), owner in list(self._owners.items()):
                is_class = isinstance(owner, type)
                names = set() if is_class else self._variables[module]
                names = names | self._attributes if is_class or module in self._referred else names
                for name, held in list(vars(owner).items()):
                    is_method = is_class and isinstance(function_in(held), FunctionType)
                    if is_method or (name in names and not name.startswith("__")):
                        self.add((module, f"{path}.{name}" if path else name), held)

    def _size(self) -> int:
        names = sum(map(len, self._variables.values())) + len(self._attributes)
        return len(self.values) + len(self._owners) + len(self._referred) + names

    def add(self, place: Place, value: object) -> None:
        """Add a place, and what is reached from its value."""
        if place in self.values:
            return
        if isinstance(value, ModuleType):
            self._refer(value)
            return
        self.values[place] = value
        with suppress(Exception):  # a value that cannot be pickled is known by its type
            for reference in examine(value).references:
                self._refer(reference)
        module, path = place
        while (held := _WRAPPED.get(type(value))) is not None:
            value, path = getattr(value, held), f"{path}.{held}"
        if isinstance(value, FunctionType):
            self._add_function((module, path), value)

    def _refer(self, reference: FunctionType | type | ModuleType) -> None:
        """Add a function, class or module that was met, if it is one of the user's or imported by such a function."""
        if isinstance(reference, ModuleType):
            if is_own(reference.__name__):
                self._owners[reference.__name__, ""] = reference
                self._referred.add(reference.__name__)
            return
        if isinstance(reference, FunctionType):
            self._add_names(reference)
        place = (reference.__module__, reference.__qualname__)
        if place in self._owners or not is_own(place[0]) or not _is_at(place, reference):
            return
        self._owners[place[0], ""] = sys.modules[place[0]]
        if isinstance(reference, FunctionType):
            self.add(place, reference)
            return
        self._owners[place] = reference
        for base in reference.__mro__[1:]:
            self._refer(base)

    def _add_function(self, place: Place, function: FunctionType) -> None:
        """Add the parts of a function, which may be replaced one by one."""
        self._add_names(function)
        if id(function) in self._functions:
            return
        self._functions.add(id(function))
        module, path = place
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            self.add((module, f"{path}.{name}"), getattr(function, name))
        for number, cell in enumerate(function.__closure__ or ()):
            with suppress(ValueError):  # an empty cell
                self.add((module, f"{path}.__closure__.{number}.cell_contents"), cell.cell_contents)

    def _add_names(self, function: FunctionType) -> None:
        """Add the names in a function's code, and the own modules that it imports when it runs."""
        variables, attributes = _names(function.__code__)
        package = function.__globals__.get("__package__")
        for name in attributes - self._attributes:
            for module in (name, f"{package}.{name}"):
                if is_own(module):
                    self._refer(sys.modules[module])
        self._variables[str(function.__globals__.get("__name__"))] |= variables
        self._attributes |= attributes


def _names(code: CodeType) -> tuple[set[str], set[str]]:
    """The variables of its module that code names, and its other names and texts: of attributes, methods, modules."""
    variables = {step.argval for step in dis.get_instructions(code) if step.opname.endswith("_GLOBAL")}
    texts = {text for text in code.co_consts if isinstance(text, str) and text.isidentifier()}
    attributes = {*code.co_names} | texts
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            inner_variables, inner_attributes = _names(inner)
            variables, attributes = variables | inner_variables, attributes | inner_attributes
    return variables, attributes


def _is_at(place: Place, value: object) -> bool:
    with suppress(AttributeError, IndexError, KeyError, TypeError):
        return value_at(place) is value
    return False


def function_in(value: object) -> object:
    """The function in a method, a property or a decorator; any other value as it is."""
    while (held := _WRAPPED.get(type(value))) is not None:
        value = getattr(value, held)
    return value.func if type(value) in {partial, partialmethod} else value  # type: ignore[attr-defined] # of both


def replaced_in_libraries() -> Iterator[tuple[Place, Any]]:
    """Functions and classes that the program has put into modules and classes of installed libraries.

    Only modules that use torch are searched. Functions of the user's own files count. Those of another library, such as
    one of fast kernels, count where the code of the module or class defines the name itself. Hooks of all modules of
    torch belong here too.
    """
    for name, module in list(sys.modules.items()):
        if type(module) is not ModuleType or not _uses_torch(name, module):
            continue
        for attribute, value in list(vars(module).items()):
            if issubclass(type(value), type) and value.__module__ == name:
                for method, held in list(vars(value).items()):
                    function = function_in(held)
                    if type(function) is FunctionType and _is_put(function, module, f"{value.__qualname__}.{method}"):
                        yield (name, f"{value.__qualname__}.{method}"), held
            elif (type(value) is FunctionType or issubclass(type(value), type)) and _is_put(value, module, attribute):
                yield (name, attribute), value
    hooks, prefix = _HOOKS
    for attribute, value in vars(sys.modules[hooks]).items() if hooks in sys.modules else ():
        if attribute.startswith(prefix) and value:
            yield (hooks, attribute), value


def _uses_torch(name: str, module: ModuleType) -> bool:
    """Return whether a module is of torch or holds something of torch. Asks functions, classes and modules alone."""
    if _package(name) in _NOT_SEARCHED or is_own(name):
        return False
    held = list(vars(module).values())
    homes = {value.__module__ for value in held if type(value) is FunctionType or issubclass(type(value), type)}
    homes |= {name, *(value.__name__ for value in held if type(value) is ModuleType)}
    return "torch" in map(_package, homes)


def _is_put(value: FunctionType | type, module: ModuleType, path: str) -> bool:
    """Return whether the program has put a function or class at a path in a module of an installed library."""
    defined = value.__globals__.get("__name__") if type(value) is FunctionType else None
    if value.__module__ == module.__name__ == (defined or module.__name__):
        return False
    homes = {home: _package(home) for home in (value.__module__, defined or value.__module__)}
    own = _package(module.__name__)
    foreign = [home for home, package in homes.items() if package != own and package not in sys.stdlib_module_names]
    if any(home == "__main__" or is_own(home) for home in foreign):
        return True
    if value.__name__ == path or len(foreign) < len(homes) or not _is_at((value.__module__, value.__qualname__), value):
        return False
    with suppress(Exception):  # loaders of any library
        codes = [module.__spec__.loader.get_code(module.__name__)]  # type: ignore[union-attr] # not every loader has one
        for name in path.split("."):
            codes = [it for code in codes for it in code.co_consts if isinstance(it, CodeType) and it.co_name == name]
        return bool(codes)
    return False
