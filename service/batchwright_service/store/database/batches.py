"""Calls of many threads that are made together, in the transaction of one of them."""

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class _PendingCall(Generic[Item, Result]):
    """A call that waits for its result."""

    def __init__(self, item: Item) -> None:
        self.item = item
        self.result: Result | None = None
        self.error: BaseException | None = None
        self.is_done = False


class Batches(Generic[Item, Result]):
    """Run a function for one thread at a time, with the items of all threads that have come meanwhile.

    A process so waits with one connection for what processes take in turn, and pays once for all that wait in it.

    Args:
        function: returns a result for each item, in their order; an exception is raised in every thread.
    """

    def __init__(self, function: Callable[[Sequence[Item]], Sequence[Result]]) -> None:
        self._function = function
        self._running = threading.Lock()
        self._adding = threading.Lock()
        self._waiting: list[_PendingCall[Item, Result]] = []

    def run(self, item: Item) -> Result:
        """Return the result for an item."""
        call: _PendingCall[Item, Result] = _PendingCall(item)
        with self._adding:
            self._waiting.append(call)
        with self._running:
            if not call.is_done:
                self._run_waiting()
        if call.error is not None:
            raise call.error
        return call.result  # type: ignore[return-value]  # of the function, since there was no error

    def _run_waiting(self) -> None:
        with self._adding:
            calls, self._waiting = self._waiting, []
        try:
            for call, result in zip(calls, self._function([call.item for call in calls]), strict=True):
                call.result = result
        except BaseException as error:  # noqa: BLE001 - raised in the threads of the calls
            for call in calls:
                call.error = error
        for call in calls:
            call.is_done = True
