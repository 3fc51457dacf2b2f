"""A device that is not there: what a traced run asks of it, and of ``torch.cuda``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from tuner.errors import BatchwrightError
from tuner.hardware.memory_devices.base import MemoryDevice, Peaks

_RANDOM_STATE_BYTES = 16
"""Philox's seed and offset, as ``torch.cuda.get_rng_state`` returns them."""
_DROPOUT_PLACE = 4
"""Among the arguments of attention: query, key, value, mask, dropout."""


class FakeDevice(MemoryDevice):
    """A device of which a trace takes any amount: there is no limit, and nothing is counted here."""

    def translate(self, error: Exception) -> BatchwrightError | None:
        """Nothing that happens in a trace is a lack of device memory."""
        del error
        return None

    def _effective_limit(self, limit_bytes: int, margin: float) -> int:
        del margin
        return limit_bytes

    def _set_limit(self, limit_bytes: int) -> None: ...

    def _lift_limit(self) -> None: ...

    def total_bytes(self) -> int:
        """Not told."""
        return 0

    def used_bytes(self) -> int:
        """Not told."""
        return 0

    def peaks(self) -> Peaks:
        """Not told."""
        return Peaks()

    def reset_peaks(self) -> None:
        """Nothing to reset."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def release(self) -> None:
        """Nothing to give back."""

    def other_processes_bytes(self) -> int | None:
        """None."""
        return None

    def context_bytes(self) -> int | None:
        """None."""
        return None


class _Order:
    """A stream or an event: everything is in order here, and nobody waits."""

    def __init__(self, *_: object, **__: object) -> None:
        self.device = torch.device("cuda", 0)

    def record(self, *_: object) -> None: ...

    def record_event(self, event: object = None) -> object:
        """An event that has happened."""
        return event or _Order()

    def wait(self, *_: object) -> None: ...

    def wait_event(self, *_: object) -> None: ...

    def wait_stream(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        """It has happened."""
        return True


@contextmanager
def answering_for_cuda(compute_capability: tuple[int, int]) -> Iterator[None]:
    """While the block runs ``torch.cuda`` answers as if a card of this compute capability were there, and idle.

    Only questions are answered: nothing is computed, and ``torch.cuda.is_available()`` keeps saying what is true, as
    torch itself would start CUDA on its word.
    """
    answers: dict[str, Callable[..., Any]] = {
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_capability": lambda *_: compute_capability,
        "get_rng_state": lambda *_: _random_state(),
        "is_bf16_supported": lambda *_, **__: True,  # torch says so of every card: older ones emulate it
        "set_rng_state": lambda *_: None,
        "synchronize": lambda *_: None,
        "Stream": _Order,
        "Event": _Order,
        "current_stream": lambda *_: _Order(),
        "stream": lambda *_: nullcontext(),
        "empty_cache": lambda: None,
        "is_current_stream_capturing": lambda: False,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        stack.enter_context(patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False))
        yield


@contextmanager
def without_cudnn_in_recurrent_layers(told: Callable[[], None]) -> Iterator[None]:
    """While the block runs recurrent layers take torch's own kernels: nobody but cuDNN knows what its own reserve.

    Args:
        told: called for every layer that runs.
    """
    with ExitStack() as stack:
        for kind in (nn.LSTM, nn.GRU, nn.RNN):
            stack.enter_context(patch.object(kind, "forward", _without_cudnn(kind.forward, told)))
            stack.enter_context(patch.object(kind, "flatten_parameters", lambda _: None))
        yield


@contextmanager
def without_dropout_in_attention() -> Iterator[None]:
    """While the block runs attention drops nothing out; everything else that does is as it is.

    With dropout the CPU has no kernel that does without the matrix of all pairs of tokens; those of cards keep a seed.
    """
    found: Callable[..., Tensor] = nn.functional.scaled_dot_product_attention

    def attend(*args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401 - whatever it takes
        given = args[:_DROPOUT_PLACE] + (0.0,) * (len(args) > _DROPOUT_PLACE) + args[_DROPOUT_PLACE + 1 :]
        return found(*given, **{name: 0.0 if name == "dropout_p" else value for name, value in kwargs.items()})

    with patch.object(nn.functional, "scaled_dot_product_attention", attend):
        yield


def _without_cudnn(forward: Callable[..., Any], told: Callable[[], None]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the layer takes
        told()
        with torch.backends.cudnn.flags(enabled=False):
            return forward(*args, **kwargs)

    return run


def _random_state() -> Tensor:
    return torch.zeros(_RANDOM_STATE_BYTES, dtype=torch.uint8)
