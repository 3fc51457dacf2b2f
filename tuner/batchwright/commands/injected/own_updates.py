"""Updates by other code than a ``torch.optim.Optimizer``: an optimizer of Keras or fastai, or a line of the program.

Such an update is seen where the next forward or backward pass begins: some parameters have other values by then.
"""

from __future__ import annotations

from typing import Any, Callable, Iterable, Iterator
from weakref import ref

_MOST_WATCHED = 8
"""Parameters that are watched: the smallest ones, because a copy of each is kept. A few may have no gradient but 0."""


class OwnUpdates:
    """The updates of a process without optimizers of torch; stands for its optimizer, whose parameters nobody knows.

    Args:
        torch: the module.
        updated: takes this object after each update.
    """

    param_groups = ()

    def __init__(self, torch: Any, updated: Callable[[OwnUpdates], None]) -> None:
        self._torch = torch
        self._updated = updated
        self._copies: list[tuple[ref[Any], Any]] = []
        """The watched parameters, with their values after the last backward pass."""

    def look(self) -> None:
        """Compare the watched parameters with their copies, and report an update where one has other values."""
        held = [(parameter(), copy) for parameter, copy in self._copies]
        if any(each is not None and not self._torch.equal(each.detach(), copy) for each, copy in held):
            self._copies = []
            self._updated(self)

    def keep(self, outputs: Any) -> None:
        """Copy the parameters that a backward pass from ``outputs`` reached, to be compared later."""
        held = [parameter() for parameter, _ in self._copies]
        if held and None not in held:
            return
        watched = sorted(_leaves(outputs), key=lambda each: int(each.numel()))[:_MOST_WATCHED]
        self._copies = [(ref(each), each.detach().clone()) for each in watched]


def _leaves(outputs: Any) -> Iterator[Any]:
    """Yield the parameters of the graph behind tensors."""
    tensors: Iterable[Any] = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    left = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(left)
    while left:
        node = left.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield variable
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        left.extend(new)
