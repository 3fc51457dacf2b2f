"""Checks of arguments that several functions for a loop of one's own take, which name argument, value and remedy."""

from collections.abc import Iterable, Mapping
from operator import index

from torch import Tensor, nn

from batchwright.errors import FieldProblem, SpecError
from batchwright.schemas.plans import Plan

_LONGEST = 60
"""Characters of a value in a message."""


def wrong_argument(name: str, message: str, value: object) -> SpecError:
    """The error for one wrong argument."""
    return SpecError([FieldProblem(name, message, shown(value))], "arguments")


def shown(value: object) -> str:
    """A value in a message: its type alone if it is long, or spans lines."""
    if isinstance(value, (type, nn.Module)):
        return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
    text = repr(value)
    return type(value).__name__ if len(text) > _LONGEST or "\n" in text else text


def require_count(name: str, value: object) -> int:
    """Return ``value`` as an integer of at least 1.

    Raises:
        SpecError: when it is something else, naming the argument ``name``.
    """
    if isinstance(value, Plan):
        raise wrong_argument(name, "must be a number, such as the plan's gradient_accumulation_steps", value)
    try:
        count = 0 if isinstance(value, bool) else index(value)  # type: ignore[arg-type] # raises for what is no integer
    except TypeError:
        count = 0
    if count < 1:
        raise wrong_argument(name, "must be an integer of at least 1", value)
    return count


def require_batches(micro_batches: object) -> None:
    """Check that iterating ``micro_batches`` gives batches.

    Raises:
        SpecError: when it is one batch, or nothing to iterate over.
    """
    name = "micro_batches"
    if isinstance(micro_batches, (Tensor, Mapping, str)):
        of = "characters" if isinstance(micro_batches, str) else "rows" if isinstance(micro_batches, Tensor) else "keys"
        message = f"a window is a list of batches, and this one would be iterated by its {of}: give `[batch]`"
        raise wrong_argument(name, message, type(micro_batches))
    if not isinstance(micro_batches, Iterable) and not hasattr(micro_batches, "__getitem__"):
        raise wrong_argument(
            name, "must be a list of batches, or another iterable; for one batch `[batch]`", micro_batches
        )
