"""Workloads that misbehave in one way each. Probed as the ``python`` target ``tests.support.misbehaving:build``."""

import ctypes
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from batchwright.workloads.base import LossTerms

OVERSIZED = 8
"""Sizes above this misbehave where a way depends on the size."""
_SAMPLES_OF_CHECK = 4
"""Samples of the whole batch in the check for coupled samples."""


class Misbehaving:
    """A linear model whose forward pass does what it is told to."""

    def __init__(self, way: str, argument: str) -> None:
        self._act = WAYS[way]
        self._argument = argument

    def build_model(self) -> nn.Module:
        """A small linear layer."""
        return nn.Linear(64, 8)

    def make_batch(self, size: int) -> Tensor:
        """Random features."""
        return torch.randn(size, 64)

    def loss_terms(self, model: nn.Module, batch: Tensor) -> LossTerms:
        """Misbehave, then return a sum of squares."""
        self._act(self._argument, len(batch))
        return {"l2": (model(batch).square().sum(), float(len(batch)))}


def _raise(_argument: str, _size: int) -> None:
    raise ValueError("labels must be below 10; this mentions CUDA out of memory and is still no OOM")


def _need_compute_capability(argument: str, _size: int) -> None:
    if "{}.{}".format(*torch.cuda.get_device_capability()) < argument:
        raise RuntimeError(f"this kernel needs compute capability {argument}")


def _raise_when_large(_argument: str, size: int) -> None:
    if size > OVERSIZED:
        raise RuntimeError("CUDA error: invalid configuration argument")


def _break_the_device_once(argument: str, size: int) -> None:
    """Raise the error of a card with a faulty page, which is retired then: in a part of the first batch, or a probe."""
    if size != _SAMPLES_OF_CHECK and not Path(argument).exists():
        Path(argument).touch()
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")


def _fail_on_the_second_rank(argument: str, _size: int) -> None:
    """Run out of memory, or be killed, on rank 1; the other ranks never notice."""
    if os.environ.get("RANK") != "1":
        time.sleep(3600)
    elif argument == "killed":
        os.kill(os.getpid(), signal.SIGSEGV)
    else:
        torch.empty(2**40, dtype=torch.uint8)


def _hang_where_it_can_be_seen(_argument: str, _size: int) -> None:
    time.sleep(3600)


def _segfault(_argument: str, _size: int) -> None:
    ctypes.string_at(0)


def _segfault_under_a_limit(_argument: str, size: int) -> None:
    """Like a library that does not check what malloc returned."""
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if size > OVERSIZED and limit < 2**30:
        ctypes.string_at(0)


def _exit(_argument: str, _size: int) -> None:
    sys.exit(3)


def _exit_hard(_argument: str, _size: int) -> None:
    os._exit(5)


def _give_up(_argument: str, _size: int) -> None:
    os.write(2, b"OpenBLAS error: Memory allocation still failed after 10 retries, giving up.\n")
    os._exit(1)


def _remove_temporary(argument: str, _size: int) -> None:
    shutil.rmtree(argument)
    os._exit(5)


def _kill_itself(_argument: str, _size: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _leave_a_child(argument: str, _size: int) -> None:
    """Start a process that would outlive the probe, and note its id."""
    child = subprocess.Popen(["/bin/sleep", "3600"])
    with open(argument, "a") as stream:  # noqa: PTH123 - the argument is a plain string
        stream.write(f"{os.getpid()} {child.pid}\n")


def _leave_a_child_and_hang(argument: str, size: int) -> None:
    _leave_a_child(argument, size)
    time.sleep(3600)


def _chatter(_argument: str, _size: int) -> None:
    print("error: not really" * 10_000)  # noqa: T201 - that is the point
    sys.stderr.write("CUDA out of memory, said a comment\n")


_KEPT: dict[int, Tensor] = {}


def _keep_by_size(_argument: str, size: int) -> None:
    """Take a MiB per sample, and keep 40 MiB for each size of micro-batch, as a cache by shape does."""
    torch.ones(size * 2**18)
    _KEPT.setdefault(size, torch.ones(40 * 2**18))


WAYS: dict[str, Callable[[str, int], None]] = {
    "fail on the second rank": _fail_on_the_second_rank,
    "raises": _raise,
    "needs-compute-capability": _need_compute_capability,
    "invalid-when-large": _raise_when_large,
    "breaks-the-device-once": _break_the_device_once,
    "hangs": _hang_where_it_can_be_seen,
    "segfaults": _segfault,
    "segfaults-under-a-limit": _segfault_under_a_limit,
    "exits": _exit,
    "exits-hard": _exit_hard,
    "gives-up": _give_up,
    "removes-temporary-files": _remove_temporary,
    "kills-itself": _kill_itself,
    "leaves-a-child": _leave_a_child,
    "leaves-a-child-and-hangs": _leave_a_child_and_hang,
    "chatters": _chatter,
    "keeps-by-size": _keep_by_size,
}


class WeighsNothing(Misbehaving):
    """Says beforehand that no sample of its batches counts."""

    def loss_weights(self, batch: Tensor) -> dict[str, float]:
        """Nothing."""
        del batch
        return {"l2": 0.0}


def build(way: str, argument: str = "") -> Misbehaving:
    """The factory."""
    return WeighsNothing("chatters", argument) if way == "weighs-nothing" else Misbehaving(way, argument)
