"""Load the batches of accumulation windows, in this process or ahead of use in worker processes.

Both ways give bit-equal batches, and neither uses up a random number of this process.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.process
import multiprocessing.queues
import multiprocessing.util
import os
import pickle
import resource
import signal
import tempfile
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tuner.errors import TrainingError
from tuner.system.processes import die_with_parent
from tuner.torch_internals import loader_queues, shut_down_loader
from tuner.training.data.base import TrainingData
from tuner.workloads.base import Batch

_log = logging.getLogger(__name__)

_LEFT_TO_PARENT = (signal.SIGTERM, signal.SIGINT)
"""Signals that a worker ignores: they often go to the whole process group, and the parent may still need batches."""
_THREAD_STACK_BYTES = 1024**2
"""Stack of the threads that feed workers: with the usual 8 MiB they would take a visible part of a CPU budget."""
WORKER_BYTES = _THREAD_STACK_BYTES + 128 * 1024
"""Share of a worker in the memory limit of the process that it loads for: a thread that feeds it, and its queue."""
_NO_THREAD = "can't start new thread"
_LONGEST_TEMPORARY = 107 - len("/pymp-12345678/listener-12345678")
"""Largest length in bytes of the path of the folder for temporary files: the sockets by which ``multiprocessing`` hands
tensors over lie in the folder, and a socket's address has at most 107 bytes (unix(7))."""
_SHORT_TEMPORARY = "/tmp"  # noqa: S108 - the folder that is made in it has a random name, and is the user's alone


@dataclass(frozen=True)
class SampleRange:
    """The samples of one micro-batch, consecutive in their epoch's order."""

    epoch: int
    """Epoch of the samples."""
    indices: tuple[int, ...]
    """Indices into the data, in order."""
    is_padding: bool = False
    """True for a padding micro-batch: it runs because another rank has one more, and its loss counts for nothing."""


AccumulationWindow = tuple[SampleRange, ...]
"""The sample ranges of one update that fall to one rank, one per micro-batch; may be empty."""


class WindowLoader:
    """The batches of accumulation windows, to be iterated once.

    Args:
        data: the samples.
        windows: the sample ranges of each update. Without workers a window is drawn when its batches are requested;
            with workers windows are drawn ahead of use, by about two sample ranges per worker.
        workers: processes that load ahead of use, forked from this one; 0 loads in this process.
        seed: seeds the user's random choices, with the epoch and the sample.

    Workers start with the iteration and end with it, with ``close()``, or with the thread that iterates. They are
    outside the memory limit of this process; a loaded batch counts here once it arrives.
    """

    def __init__(self, data: TrainingData, windows: Iterable[AccumulationWindow], *, workers: int, seed: int) -> None:
        self._data = data
        self._windows = windows
        self._workers = workers
        self._seed = seed
        self._running: Any = None
        """The DataLoader's iterator, whose type has no public name."""
        self._processes: list[multiprocessing.process.BaseProcess] = []

    def __iter__(self) -> Iterator[list[Batch]]:
        """Yield per window one batch per sample range, in order, on the CPU; for an empty window an empty list.

        An error of reading a sample is raised unchanged, with the worker's traceback as its cause.

        Raises:
            TrainingError: when a worker ended, or raised an error that cannot be sent to another process.
        """
        return self._ahead() if self._workers else self._here()

    def close(self) -> None:
        """End the workers, if there are any left."""
        running, self._running = self._running, None
        processes, self._processes = self._processes, []
        try:
            if running is not None:
                shut_down_loader(running)
        except Exception as error:  # noqa: BLE001 - it starts threads, and talks to processes that may be gone
            _log.warning("the processes that load data are killed: they cannot be asked to end: %s", error)
        finally:
            for queue in loader_queues(running) if running is not None else ():
                queue.cancel_join_thread()  # or the end of this process waits for readers that are gone
            for process in processes:
                if process.is_alive():  # not asked, or busy for longer than torch waits, and deaf to SIGTERM
                    process.kill()
                process.join()

    def _here(self) -> Iterator[list[Batch]]:
        for window in self._windows:
            yield [self._data.loaded(samples.epoch, samples.indices, self._seed) for samples in window]

    def _ahead(self) -> Iterator[list[Batch]]:
        try:
            self._start()
            yield from self._received()
        finally:
            self.close()

    def _start(self) -> None:
        """Start the workers, and record them even where a failure leaves some half started.

        Raises:
            TrainingError: when there is no memory for the threads that feed the workers, or no folder for sockets.
        """
        _place_sockets()
        others = set(multiprocessing.active_children())
        try:
            with _signals_held(), _small_stacks():
                self._running = iter(self._loader())
        except RuntimeError as error:
            if _NO_THREAD not in str(error):
                raise
            raise TrainingError(
                f"no room for the threads that feed {self._workers} processes that load data ({error}): ask for fewer "
                "workers, or for a larger memory limit"
            ) from error
        finally:
            self._processes = [process for process in multiprocessing.active_children() if process not in others]
            for process in self._processes:  # deaf to SIGTERM: torch would wait five seconds for each in turn
                process.terminate = process.kill  # type: ignore[method-assign]

    def _loader(self) -> DataLoader[_Loaded]:
        return DataLoader(
            _Pieces(self._data, self._seed),
            sampler=_pieces_of(self._windows),
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=self._workers,
            worker_init_fn=partial(_start_worker, os.getpid()),
            multiprocessing_context="fork",
            generator=torch.Generator(),
        )

    def _received(self) -> Iterator[list[Batch]]:
        batches: list[Batch] = []
        while (loaded := self._next()) is not None:
            if loaded.failure is not None:
                raise loaded.failure.error from _WorkerTraceback(loaded.failure.trace)
            batches += _owned(loaded.batches)
            if loaded.last:
                yield batches
                batches = []

    def _next(self) -> _Loaded | None:
        try:
            loaded: _Loaded | None = next(self._running, None)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise TrainingError(
                f"a process that loads data ended: {error}. Killed by signal 9 it was most likely out of host memory: "
                "ask for fewer workers. What it wrote before is in the log."
            ) from error
        return loaded


# --- messages to and from a worker ---


@dataclass(frozen=True)
class _Piece:
    """A sample range of a window, or None for an empty window."""

    samples: SampleRange | None
    last: bool
    """True for the last one of its window."""


@dataclass(frozen=True)
class _Failure:
    error: BaseException
    trace: str


@dataclass(frozen=True)
class _Loaded:
    """At most one batch, or the failure of loading it."""

    batches: list[Batch]
    last: bool
    failure: _Failure | None = None


class _WorkerTraceback(Exception):  # noqa: N818 - never raised by itself: it is the cause of another
    """The traceback of an error in a worker."""

    def __str__(self) -> str:
        return f"in a process that loads data\n{self.args[0]}"


class _Pieces(Dataset[_Loaded]):
    """Load pieces, in a worker."""

    def __init__(self, data: TrainingData, seed: int) -> None:
        self._data = data
        self._seed = seed

    def __getitem__(self, piece: _Piece) -> _Loaded:
        samples = piece.samples
        if samples is None:
            return _Loaded([], piece.last)
        try:
            return _Loaded([self._data.loaded(samples.epoch, samples.indices, self._seed)], piece.last)
        except BaseException as error:  # noqa: BLE001 - the main process judges it
            return _Loaded([], piece.last, _Failure(_sendable(error), traceback.format_exc()))


def _pieces_of(windows: Iterable[AccumulationWindow]) -> Iterator[_Piece]:
    for window in windows:
        if not window:
            yield _Piece(None, last=True)
        for number, samples in enumerate(window, start=1):
            yield _Piece(samples, last=number == len(window))


def _as_it_is(loaded: Any) -> Any:  # noqa: ANN401 - torch declares a list, which it gives only when it makes batches
    """Replace torch's collation by none."""
    return loaded


def _sendable(error: BaseException) -> BaseException:
    """``error``, or a ``TrainingError`` with its message where pickling would change it."""
    try:
        if str(pickle.loads(pickle.dumps(error))) == str(error):  # noqa: S301 - our own bytes
            return error
    except Exception:  # noqa: BLE001, S110 - whatever the error's own code raises means the same
        pass
    return TrainingError(f"{type(error).__module__}.{type(error).__qualname__}: {error}")


def _owned(batch: Batch) -> Batch:
    """``batch`` with its tensors copied out of the memory shared with a worker.

    Every shared tensor holds a file descriptor, and a window may have thousands.
    """
    if isinstance(batch, Tensor):
        return batch.clone()
    if isinstance(batch, dict):
        return {name: _owned(value) for name, value in batch.items()}
    if type(batch) in {list, tuple}:
        return type(batch)(_owned(value) for value in batch)
    return batch


# --- processes ---


def _place_sockets() -> None:
    """Choose a folder for the sockets of this process and its workers whose path is short enough.

    Raises:
        TrainingError: when the folder for temporary files has too long a name, and nothing can be written to ``/tmp``.
    """
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) <= _LONGEST_TEMPORARY:
        return
    tempfile.tempdir = _SHORT_TEMPORARY
    try:
        multiprocessing.util.get_temp_dir()  # makes it once, for this process and those that it forks
    except OSError as error:
        raise TrainingError(
            f"TMPDIR is {usual}: processes that load data need a folder whose name has at most {_LONGEST_TEMPORARY} "
            f"bytes for their sockets, and {_SHORT_TEMPORARY} cannot be used ({error})"
        ) from error
    finally:
        tempfile.tempdir = usual


def _end_unsent(error: Exception, _batch: object) -> None:
    """End a worker that cannot send a batch: ``multiprocessing`` would drop the batch, and the parent wait forever."""
    traceback.print_exception(error)
    os._exit(1)


def _start_worker(parent: int, _number: int) -> None:
    """Prepare a worker: end with the parent, leave signals to the parent, and lift the parent's memory limit."""
    die_with_parent(parent)
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(_end_unsent)  # type: ignore[attr-defined] # noqa: SLF001 - made to be replaced
    for number in _LEFT_TO_PARENT:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _LEFT_TO_PARENT)
    threading.stack_size(0)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


@contextmanager
def _signals_held() -> Iterator[None]:
    """Hold signals back while workers start: a signal that came before they ignore it would end them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_PARENT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _small_stacks() -> Iterator[None]:
    before = threading.stack_size(_THREAD_STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before)
