"""Load the batches of accumulation windows, in this process or ahead of use in worker processes.

Both ways give bit-equal batches, and neither changes the random generators of this process.
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

from batchwright.errors import TrainingError
from batchwright.system.subreaper import die_with_parent
from batchwright.system.temporary_folders import LONGEST_WITH_SOCKETS
from batchwright.torch_internals import loader_queues, shut_down_loader
from batchwright.training.data.base import TrainingData
from batchwright.training.micro_batches.nested_batches import entries_of, is_container, rebuilt
from batchwright.workloads.base import Batch

_log = logging.getLogger(__name__)

_PARENT_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals that a worker ignores: they are often sent to the process group while the parent still needs batches."""
_THREAD_STACK_BYTES = 1024**2
"""Stack of the threads that feed workers: the usual 8 MiB would take a significant part of a CPU memory limit."""
WORKER_BYTES = _THREAD_STACK_BYTES + 128 * 1024
"""Memory that a worker takes of its parent's limit: the thread that feeds the worker, and its queue."""
_NO_THREAD = "can't start new thread"
_SHORT_TEMPORARY = "/tmp"  # noqa: S108 - the folder made in it has a random name and is private to the user


@dataclass(frozen=True)
class SampleRange:
    """The samples of one micro-batch, consecutive in their epoch's order."""

    epoch: int
    """Epoch of the samples."""
    indices: tuple[int, ...]
    """Indices into the data, in order."""
    is_padding: bool = False
    """True for a padding micro-batch: it runs because another rank has one more, and its loss is ignored."""


AccumulationWindow = tuple[SampleRange, ...]
"""The sample ranges of one rank in one update, one per micro-batch; may be empty."""


class WindowLoader:
    """The batches of accumulation windows, to be iterated once.

    Without ``workers``, processes that are forked from this one, a window is drawn when its batches are requested; with
    workers windows are drawn ahead of use, by about two sample ranges per worker. ``seed`` seeds the user's random
    choices, together with the epoch and the sample.
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
        """Yield a list per window, with one batch per sample range, in order, on the CPU.

        An error in reading a sample is raised unchanged, with the worker's traceback as its cause.

        Raises:
            TrainingError: when a worker ended, or raised an error that cannot be pickled.
        """
        if not self._workers:
            for window in self._windows:
                yield [self._data.load(samples.epoch, samples.indices, self._seed) for samples in window]
            return
        try:
            self._start()
            yield from self._receive()
        finally:
            self.close()

    def close(self) -> None:
        """End the workers that are left."""
        running, self._running = self._running, None
        processes, self._processes = self._processes, []
        try:
            if running is not None:
                shut_down_loader(running)
        except Exception as error:  # noqa: BLE001 - torch starts threads here, and the workers may have ended
            _log.warning("data-loading workers cannot be shut down, and are killed: %s", error)
        finally:
            for queue in loader_queues(running) if running is not None else ():
                queue.cancel_join_thread()  # or the exit of this process waits for readers that have ended
            for process in processes:
                if process.is_alive():  # not shut down, or busy for longer than torch waits; workers ignore SIGTERM
                    process.kill()
                process.join()

    def _start(self) -> None:
        """Start the workers, and record them even if a failure leaves only some of them started."""
        _choose_socket_folder()
        others = set(multiprocessing.active_children())
        try:
            with _signals_blocked(), _small_stacks():
                self._running = iter(self._loader())
        except RuntimeError as error:
            if _NO_THREAD not in str(error):
                raise
            raise TrainingError(
                f"not enough memory for the threads that feed {self._workers} data-loading workers ({error}): use "
                "fewer workers or a larger memory limit"
            ) from error
        finally:
            self._processes = [process for process in multiprocessing.active_children() if process not in others]
            for process in self._processes:  # workers ignore SIGTERM: torch would wait five seconds for each in turn
                process.terminate = process.kill  # type: ignore[method-assign]

    def _loader(self) -> DataLoader[_LoadedBatch]:
        return DataLoader(
            _RequestedBatches(self._data, self._seed),
            sampler=_requests_for(self._windows),
            batch_size=None,
            collate_fn=lambda loaded: loaded,  # items are batches already
            num_workers=self._workers,
            worker_init_fn=partial(_start_worker, os.getpid()),
            multiprocessing_context="fork",
            generator=torch.Generator(),
        )

    def _receive(self) -> Iterator[list[Batch]]:
        batches: list[Batch] = []
        while (loaded := self._next()) is not None:
            if loaded.error is not None:
                raise loaded.error from _WorkerTraceback(loaded.trace)
            batches += _copied_from_shared_memory(loaded.batches)
            if loaded.last:
                yield batches
                batches = []

    def _next(self) -> _LoadedBatch | None:
        try:
            loaded: _LoadedBatch | None = next(self._running, None)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise TrainingError(
                f"a data-loading worker ended: {error}. If it was killed by signal 9, the host most likely ran out of "
                "memory: use fewer workers. The worker's output is in the log."
            ) from error
        return loaded


# --- messages to and from a worker ---


@dataclass(frozen=True)
class _LoadRequest:
    """A sample range of a window, or None for an empty window."""

    samples: SampleRange | None
    last: bool
    """True for the last one of its window."""


@dataclass(frozen=True)
class _LoadedBatch:
    """At most one batch, or the error of loading it."""

    batches: list[Batch]
    last: bool
    error: BaseException | None = None
    trace: str = ""


class _WorkerTraceback(Exception):  # noqa: N818 - never raised, only the cause of another error
    """The traceback of an error in a worker."""

    def __str__(self) -> str:
        return f"in a data-loading worker\n{self.args[0]}"


class _RequestedBatches(Dataset[_LoadedBatch]):
    """Data set whose items are the requested batches, loaded in a worker."""

    def __init__(self, data: TrainingData, seed: int) -> None:
        self._data = data
        self._seed = seed

    def __getitem__(self, request: _LoadRequest) -> _LoadedBatch:
        samples = request.samples
        if samples is None:
            return _LoadedBatch([], request.last)
        try:
            return _LoadedBatch([self._data.load(samples.epoch, samples.indices, self._seed)], request.last)
        except BaseException as error:  # noqa: BLE001 - the main process raises the error
            return _LoadedBatch([], request.last, _picklable(error), traceback.format_exc())


def _requests_for(windows: Iterable[AccumulationWindow]) -> Iterator[_LoadRequest]:
    for window in windows:
        if not window:
            yield _LoadRequest(None, last=True)
        for number, samples in enumerate(window, start=1):
            yield _LoadRequest(samples, last=number == len(window))


def _picklable(error: BaseException) -> BaseException:
    """``error``, or a ``TrainingError`` with its message if pickling would change the error."""
    try:
        if str(pickle.loads(pickle.dumps(error))) == str(error):  # noqa: S301 - our own bytes
            return error
    except Exception:  # noqa: BLE001, S110 - any error in pickling means that the error cannot be sent
        pass
    return TrainingError(f"{type(error).__module__}.{type(error).__qualname__}: {error}")


def _copied_from_shared_memory(batch: Batch) -> Batch:
    """``batch`` with its tensors copied out of the memory shared with a worker.

    Every shared tensor holds a file descriptor, and a window may have thousands.
    """
    if isinstance(batch, Tensor):
        return batch.clone()
    if not is_container(batch):
        return batch
    return rebuilt(batch, [_copied_from_shared_memory(value) for _, value in entries_of(batch)])


# --- processes ---


def _choose_socket_folder() -> None:
    """Choose a folder with a path that is short enough for the sockets of this process and its workers."""
    configured = tempfile.gettempdir()
    if len(os.fsencode(configured)) <= LONGEST_WITH_SOCKETS:
        return
    tempfile.tempdir = _SHORT_TEMPORARY
    try:
        multiprocessing.util.get_temp_dir()  # creates the folder once, for this process and its forks
    except OSError as error:
        raise TrainingError(
            f"TMPDIR is {configured}: the sockets of data-loading workers need a folder whose path has at most "
            f"{LONGEST_WITH_SOCKETS} bytes, and {_SHORT_TEMPORARY} cannot be used ({error})"
        ) from error
    finally:
        tempfile.tempdir = configured


def _exit_on_send_failure(error: Exception, _batch: object) -> None:
    """End a worker that cannot send a batch: ``multiprocessing`` would drop the batch, and the parent would hang."""
    traceback.print_exception(error)
    os._exit(1)


def _start_worker(parent: int, _number: int) -> None:
    """Prepare a worker: end with the parent, ignore signals to the group, and lift the parent's memory limit."""
    die_with_parent(parent)
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(_exit_on_send_failure)  # type: ignore[attr-defined] # noqa: SLF001 - made to be replaced
    for number in _PARENT_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PARENT_SIGNALS)
    threading.stack_size(0)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block signals while workers start: a signal before the workers ignore it would end them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENT_SIGNALS)
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
