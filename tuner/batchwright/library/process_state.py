"""What a probe's process needs of the caller's, beside the functions: written here, restored there. No torch.

The probe is no fork of the caller. Its allocator is chosen by variables that must be set before Python starts, its
budget counts from a small process, and after a fork neither OpenMP's threads nor a CUDA context can be used. So what
makes the caller's program another one than its imports is carried: the search path, the command line, the settings of
torch, and each value in the user's modules that the functions reach and that importing them anew does not make.
"""

import io
import os
import pickle
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from types import FunctionType
from typing import IO, Any

from batchwright.errors import FieldProblem, SpecError
from batchwright.library.pickling import ModulePickler, examine
from batchwright.library.reached_code import (
    Place,
    ReachedCode,
    function_in,
    is_own,
    replaced_in_libraries,
    set_at,
    value_at,
)
from batchwright.library.torch_settings import read_settings, restore_settings
from batchwright.schemas.recommendation import Advice
from batchwright.units import format_bytes

_LARGEST_BYTES = 16 * 2**20
"""A larger value is not carried: twice that would count against the memory limit of a probe on the CPU."""
_SHOWN_LENGTH = 60
_CONTAINERS = (dict, list, tuple, set)


@dataclass(frozen=True)
class _Found:
    """A value of the caller as another process can compare it.

    Attributes:
        shown: the value, or its type, for a message.
        description: equal for equal values; of a value that cannot be pickled, only its type.
        reason: why the value is not carried; None if it is.
    """

    shown: str
    description: tuple[str, ...]
    reason: str | None


def write_state(opened: IO[bytes], *objects: object) -> tuple[Advice, ...]:
    """Write what ``objects`` need of this process. The objects themselves are not written.

    Returns:
        warnings of the values that can neither be compared nor carried.

    Raises:
        Exception: when an object cannot be pickled, of any type.
    """
    reached = ReachedCode()
    for place, value in replaced_in_libraries():
        reached.add(place, value)
    for item in objects:
        reached.follow(item)
    table = {place: _find(value) for place, value in reached.values.items()}
    carried = io.BytesIO()
    ModulePickler(carried).dump({at: _by_value(value) for at, value in reached.values.items() if not table[at].reason})
    path = [entry or os.getcwd() for entry in sys.path]  # noqa: PTH109 - sys.path holds strings
    own_modules = [name for name in sys.modules if is_own(name)]  # in the order in which they were complete
    pickle.dump((path, sys.argv, own_modules, table, len(carried.getbuffer())), opened)
    opened.write(carried.getbuffer())
    pickle.dump(read_settings(), opened)
    return tuple(_unknown(at, table[at]) for at, value in reached.values.items() if _may_differ(value, table[at]))


def restore_state(opened: IO[bytes]) -> None:
    """Make this process what ``write_state`` read in its parent process.

    Raises:
        ImportError: when a module of the user cannot be imported.
        SpecError: when a value is another one here and cannot be set, naming it.
    """
    path, sys.argv, own_modules, table, size = pickle.load(opened)  # noqa: S301 - written by the parent process
    sys.path.extend(entry for entry in path if entry not in sys.path)
    _import_in_order(own_modules, {module for module, _ in table})
    end = opened.tell() + size
    differing = {
        place: here for place, found in table.items() if (here := _here(place)).description != found.description
    }
    carried: dict[Place, Any] = pickle.load(opened) if differing else {}  # noqa: S301 - as above
    for place, here in differing.items():
        _set(place, table[place], here, carried)
    opened.seek(end)
    restore_settings(pickle.load(opened))  # noqa: S301 - as above


def _import_in_order(own_modules: Sequence[str], needed: Collection[str]) -> None:
    """Import the needed modules of the user, which may import each other.

    A module that cannot be imported first follows one that needs it: in the program, such a one was complete later.
    """
    for number, name in enumerate(own_modules):
        later = iter(own_modules[number + 1 :])
        while name in needed:
            try:
                import_module(name)
                break
            except ImportError:
                if (importer := next(later, None)) is None:
                    raise
                with suppress(Exception):
                    import_module(importer)


def _find(value: object) -> _Found:
    """Describe a value of this process."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    plain = isinstance(value, (bool, int, float, str, type(None), *_CONTAINERS))
    shown = textwrap.shorten(repr(value), _SHOWN_LENGTH) if plain else name
    reason, details = None, _definition(value)
    try:
        examined = examine(_by_value(value))
        details = details or (examined.digest,)
        if examined.size_bytes > _LARGEST_BYTES:
            reason = f"takes {format_bytes(examined.size_bytes)}"
    except Exception as error:  # noqa: BLE001 - objects of the user raise anything
        reason = f"cannot be pickled: {type(error).__name__}: {error}"
    return _Found(shown, (name, *details), reason)


def _definition(value: object) -> tuple[str, ...]:
    """Where a function, also in a method or a decorator, was defined: its parts are places of their own."""
    function = function_in(value)
    if isinstance(function, FunctionType):
        return str(function.__globals__.get("__name__")), function.__qualname__
    return ()


def _here(place: Place) -> _Found:
    """Describe what importing a module anew makes at a place."""
    import_module(place[0])
    try:
        return _find(value_at(place))
    except (AttributeError, IndexError, TypeError):
        return _Found("missing", (), None)


def _set(place: Place, found: _Found, here: _Found, carried: Mapping[Place, Any]) -> None:
    """Set a value that is another one here."""
    reason = found.reason
    if reason is None:
        try:
            set_at(place, carried[place])
        except Exception as error:  # noqa: BLE001 - objects of the user raise anything
            reason = f"cannot be set: {type(error).__name__}: {error}"
        else:
            return
    message = (
        f"is {found.shown} here and {here.shown} in each probe, which imports its module anew, and the value "
        f"{reason}. Pass it as an argument, or set it inside the function"
    )
    raise SpecError([FieldProblem(_name(place), message)], "state of the program")


def _name(place: Place) -> str:
    """The name of a place for a message: of a function whose code is another one, that of the function."""
    return ".".join(place).partition(".__")[0]


def _may_differ(value: object, found: _Found) -> bool:
    """Return whether equal types say nothing about a value that cannot be compared: what the user put together."""
    is_compared = len(found.description) > 1
    return not is_compared and (isinstance(value, _CONTAINERS) or is_own(type(value).__module__))


def _unknown(place: Place, found: _Found) -> Advice:
    return Advice(
        code="state-not-compared",
        message=f"The probes used `{_name(place)}` as importing its module makes it, because its value in your program "
        f"{found.reason}. If you change it before you train, pass it as an argument.",
    )


def _by_value(value: object) -> object:
    """Return a copy of a function that took the name of another (``functools.wraps``), which is not looked up by it."""
    if not isinstance(value, FunctionType) or value.__globals__.get("__name__") == value.__module__:
        return value
    copy = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, value.__closure__)
    copy.__kwdefaults__, copy.__module__ = value.__kwdefaults__, "__main__"
    return copy
