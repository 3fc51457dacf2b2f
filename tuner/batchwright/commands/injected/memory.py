"""Limit the memory of this process, and read its peaks.

On the CPU the limit is `RLIMIT_DATA`, counted from the end of torch's import, as
``batchwright.hardware.memory_devices.cpu`` counts from the start of a probe. On a card it is the allocator's fraction,
set as soon as CUDA is initialised.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import threading
from functools import wraps
from importlib import import_module
from importlib.machinery import ExtensionFileLoader
from typing import Any, Callable

from .torch_internals import when_cuda_starts

_LARGEST_CONTEXT = 2 * 1024**3
"""A larger difference between two readings of a card's memory is another process's (contexts take 0.25 to 0.9 GiB)."""

_LARGEST_GROWTH = 512 * 1024**2
"""A context that grows by more in an update is another process's memory: by 240 to 340 MiB on an H100."""

_THREAD_STACK = 2 * 1024**2
"""Bytes of a thread's stack, instead of the 8 MiB of `ulimit -s`: those that glibc takes on x86-64 where the stack has
no limit (`ARCH_STACK_DEFAULT_SIZE`)."""

_LARGEST_ATTRIBUTES = 256
"""More bytes than a `pthread_attr_t` has: 56 on x86-64, 64 on aarch64 (glibc's bits/pthreadtypes-arch.h)."""

_HEAP_STEP = 2 * 1024**2
"""Bytes of a huge page, by which the C library's heap grows in a probe (`glibc.malloc.hugetlb=1`)."""

_WORKSPACE_OF_THREAD = 16 * 1024**2
"""Bytes that a thread's workspace of a math library may have: the packing buffers of MKL took 4 MiB."""

_LIFTING = threading.Lock()
"""Held while the data limit is lifted or restored, so that two threads do not restore each other's."""
_LIFTED: list[tuple[int, int]] = []
"""The limits found by the calls that run without: the first one's are restored by the last to end."""


class StartMemory:
    """The private memory of this process at the end of torch's import, from which budget and peaks count.

    Threads that start later have small stacks where the budget is the CPU's: a stack counts whole, and is hardly used.
    """

    def __init__(self) -> None:
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            _use_small_stacks()
        self.start_bytes = _status_bytes("VmData")
        self.earlier_peak_bytes = 0
        """The peak above the start before this process was forked; the kernel's mark begins anew then."""
        self._used_bytes: int | None = None
        self._threads = 0

    @property
    def is_of_server(self) -> bool:
        """True in a fork server, and in what it has forked."""
        return self._used_bytes is not None

    def before_fork(self) -> None:
        """Record what the imports after torch's have taken, which counts in a forked process too."""
        self._used_bytes = self.held_bytes()
        self._threads = len(os.listdir("/proc/self/task")) - 1
        self.earlier_peak_bytes = self.peak_bytes()

    def after_fork(self) -> None:
        """Count on from there. Libraries' threads are not forked, and idle ones take their stacks."""
        if self._used_bytes is not None:
            _start_idle_threads(self._threads)
            self.start_bytes = _status_bytes("VmData") - self._used_bytes

    def held_bytes(self) -> int:
        """Return the memory above the start that is held now."""
        return _status_bytes("VmData") - self.start_bytes

    def peak_bytes(self) -> int:
        """Return the peak above the start, by the kernel's high-water mark."""
        others = _status_bytes("VmSize") - _status_bytes("VmData")
        return max(self.earlier_peak_bytes, self.marked_bytes() - others - self.start_bytes)

    @staticmethod
    def marked_bytes() -> int:
        """Return the kernel's high-water mark of all addresses, from which the peak is computed."""
        return _status_bytes("VmPeak")


class CpuMemory:
    """The private memory of this process, with a budget that counts from the ``start``; None for no limit."""

    is_of_card = False
    held_step_bytes = _HEAP_STEP
    """The step of ``held_bytes``: a difference of two readings is off by less."""

    def __init__(self, limit_bytes: int | None, start: StartMemory) -> None:
        self._limit_bytes = limit_bytes
        self._start = start
        self._own_limit: int | None = None
        """The data limit that this object has set; none while the process has no limit of it."""
        self._earlier_peak_bytes: int | None = None
        """The peak before the limit was set, above which the kernel has held the process since; none where it has not,
        because the program changed the limit."""
        self._settled: tuple[int, int] | None = None
        """The peak under the limit, and the kernel's mark of all addresses then."""

    def limit(self) -> None:
        """Set the limit. Allocations beyond it fail."""
        if self._limit_bytes is not None:
            self._earlier_peak_bytes = self._start.peak_bytes()
            self._own_limit = _set_data_limit(self._start.start_bytes + self._limit_bytes)

    def lift(self) -> None:
        """Lift the limit, so that a process that reached it can report."""
        if self._own_limit is not None:
            if resource.getrlimit(resource.RLIMIT_DATA)[0] != self._own_limit:
                self._earlier_peak_bytes = None
            self._own_limit = None
            _set_data_limit(resource.RLIM_INFINITY)

    def suspend(self) -> bool:
        """Lift the limit until it is set again, and return whether there was one. A peak above it meanwhile counts."""
        is_limited = self._own_limit is not None
        self.lift()
        if is_limited:
            self._earlier_peak_bytes = None
        return is_limited

    def begin_trial(self, threads: int) -> bool:
        """Return whether a further micro-batch may take more than the limit once that is lifted, and note the peak.

        Each of the ``threads`` of the math libraries may have done without a workspace.
        """
        if self._limit_bytes is None or resource.getrlimit(resource.RLIMIT_DATA)[0] != self._own_limit:
            return False  # there is none, or the program has changed it
        peak = self.peaks()["process_peak_bytes"] or 0
        self._settled = (peak, self._start.marked_bytes())
        return self._limit_bytes - peak < threads * _WORKSPACE_OF_THREAD

    def check_devices(self) -> None:
        """Do nothing: there is one device."""

    def follow_contexts(self) -> None:
        """Do nothing: `StartMemory` has what is outside the budget."""

    def synchronize(self) -> None:
        """Do nothing: the CPU has no queue."""

    def held_bytes(self) -> int | None:
        """Return the private memory above the start that is held now."""
        return self._start.held_bytes()

    def peaks(self) -> dict[str, int | None]:
        """Return the peak of private memory above the start.

        The kernel's mark is of all addresses, so files that were mapped at the peak and no longer are count as well.
        While the limit held, the peak was no higher. After it, the peak counts if the mark has risen.
        """
        peak = self._start.peak_bytes()
        if self._settled is not None:
            settled, mark = self._settled
            peak = max(settled, peak) if self._start.marked_bytes() > mark else settled
            return {"process_peak_bytes": peak, "limit_bytes": self._limit_bytes}
        if self._limit_bytes is not None and self._earlier_peak_bytes is not None:
            peak = max(self._earlier_peak_bytes, min(peak, self._limit_bytes))
        return {"process_peak_bytes": peak, "limit_bytes": self._limit_bytes}


class CudaMemory:
    """The memory of this process's cards, limited through the caching allocator."""

    is_of_card = True
    held_step_bytes = 0
    """The allocator counts bytes exactly."""

    def __init__(self, torch: Any, settings: dict[str, Any]) -> None:
        self._torch = torch
        self._limit_bytes: int | None = settings["limit_bytes"]
        self._margin: float = settings["memory_margin"]
        self._used_before: list[int | None] = settings["used_bytes"]
        self._least_context: int = settings["least_context_bytes"] or 0
        self._limits: dict[int, int] = {}
        self._contexts: dict[int, int] = {}
        self._followed: set[int] = set()

    def limit(self) -> None:
        """Set the limit on this rank's card, as soon as CUDA is initialised."""
        when_cuda_starts(self._torch, self._limit_own_card)

    def _limit_own_card(self) -> None:
        local = os.environ.get("LOCAL_RANK", "")
        count = self._torch.cuda.device_count()
        self._limit_card(int(local) if local.isdigit() and int(local) < count else 0)

    def _limit_card(self, index: int) -> None:
        cuda = self._torch.cuda
        free, total = cuda.mem_get_info(index)
        reserved = int(cuda.memory_reserved(index))
        self._contexts[index] = context = self._context_bytes(index, total - free - reserved)
        if self._limit_bytes is None:
            return
        available = int((free + reserved) * (1.0 - self._margin))
        self._set_limit(index, min(self._limit_bytes - context, available, total))

    def _set_limit(self, index: int, limit: int) -> None:
        cuda = self._torch.cuda
        self._limits[index] = limit = max(0, limit)
        cuda.set_per_process_memory_fraction(min(1.0, limit / cuda.get_device_properties(index).total_memory), index)

    def follow_contexts(self) -> None:
        """Take off the limit what the contexts have grown by in the first update, after which this does nothing.

        CUDA loads kernels when they are first used, and libraries make their handles. Where the first update took more
        than is left then, its cache is given back, so that the next one has to do with the new limit.
        """
        cuda = self._torch.cuda
        for index in set(self._contexts) - self._followed:
            self._followed.add(index)
            free, total = cuda.mem_get_info(index)
            context = self._context_bytes(index, total - free - int(cuda.memory_reserved(index)))
            if not 0 < context - self._contexts[index] <= _LARGEST_GROWTH:
                continue
            self._contexts[index] = context
            if self._limit_bytes is None:
                continue
            self._set_limit(index, min(self._limits[index], self._limit_bytes - context))
            if cuda.max_memory_reserved(index) > self._limits[index]:
                cuda.empty_cache()
                cuda.reset_peak_memory_stats(index)

    def _context_bytes(self, index: int, outside: int) -> int:
        """Bytes of the context: used on the card outside the allocator, less what others used before the command."""
        before = self._used_before[index] if index < len(self._used_before) else None
        found = outside - before if before is not None else self._least_context
        return found if self._least_context <= found <= _LARGEST_CONTEXT else self._least_context

    def lift(self) -> None:
        """Do nothing: a report takes no memory of a card."""

    def suspend(self) -> bool:
        """Return False: the limit stays, because cleaning up takes hardly any memory of a card."""
        return False

    def begin_trial(self, threads: int) -> bool:
        """Return False: a job has no more memory than the card."""
        del threads
        return False

    def check_devices(self) -> None:
        """Limit every card that this process has begun to use."""
        if not self._torch.cuda.is_initialized():
            return
        for index in range(self._torch.cuda.device_count()):
            if index not in self._contexts and self._torch.cuda.memory_reserved(index):
                self._limit_card(index)

    def synchronize(self) -> None:
        """Wait for the cards, so that an error of their queues is raised here and times are those of the work."""
        if self._torch.cuda.is_initialized():
            self._torch.cuda.synchronize()

    def held_bytes(self) -> int | None:
        """Return the bytes of tensors on the card with the most reserved memory; None where there is none."""
        cuda = self._torch.cuda
        return int(cuda.memory_allocated(self._fullest_card())) if cuda.is_initialized() else None

    def _fullest_card(self) -> int:
        return int(max(range(self._torch.cuda.device_count()), key=self._torch.cuda.max_memory_reserved))

    def peaks(self) -> dict[str, int | None]:
        """Return the allocator's peaks on the card with the most reserved memory."""
        cuda = self._torch.cuda
        if not cuda.is_initialized():
            return {}
        index = self._fullest_card()
        stats = cuda.memory_stats(index)
        return {
            "allocated_bytes": int(cuda.max_memory_allocated(index)),
            "reserved_bytes": int(cuda.max_memory_reserved(index)),
            "allocator_retries": int(stats.get("num_alloc_retries", 0)),
            "context_bytes": self._contexts.get(index),
            "limit_bytes": self._limits.get(index),
            "card": index,
        }


def memory_of(torch: Any, settings: dict[str, Any], start: StartMemory) -> CpuMemory | CudaMemory:
    """Return the memory of the kind of device that the settings name."""
    return CudaMemory(torch, settings) if settings["device"] == "cuda" else CpuMemory(settings["limit_bytes"], start)


def _use_small_stacks() -> None:
    """Lower the size of the stacks of threads that choose none themselves. The main thread's stack stays as it is."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "pthread_setattr_default_np"):
        return
    attributes, size = ctypes.create_string_buffer(_LARGEST_ATTRIBUTES), ctypes.c_size_t()
    libc.pthread_getattr_default_np(attributes)
    libc.pthread_attr_getstacksize(attributes, ctypes.byref(size))
    if size.value > _THREAD_STACK:
        libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(_THREAD_STACK))
        libc.pthread_setattr_default_np(attributes)
    libc.pthread_attr_destroy(attributes)


def _start_idle_threads(count: int) -> None:
    """Start native threads that do nothing, take no signal, and are unknown to Python.

    The C library keeps the stacks of threads that were not forked for the next threads. Those of the program would take
    them, and an HF Trainer counted 8 MiB less than in a fresh process.
    """
    libc = ctypes.CDLL(None)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    for _ in range(count):
        libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, ctypes.cast(libc.pause, ctypes.c_void_p), None)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _status_bytes(field: str) -> int:
    """Read a ``kB`` field of /proc/self/status, in bytes."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as stream:
        for line in stream:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0


def _set_data_limit(total: int) -> int:
    """Set the soft limit, bounded by the hard one, so that this process may raise it again. Return it."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard != resource.RLIM_INFINITY:
        total = hard if total == resource.RLIM_INFINITY else min(total, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (total, hard))
    return total


def start_children_without_limit() -> None:
    """Have every program that this process executes start without its data limit.

    A compiler, a shell or a helper is no part of the training process. Python that imports torch sets its own limit.
    Forked processes that execute nothing are the matter of ``os.register_at_fork``.
    """
    posix: Any = import_module("_posixsubprocess")
    fork_exec = _without_limit(posix.fork_exec)
    posix.fork_exec = fork_exec
    if hasattr(subprocess, "_fork_exec"):  # the name of subprocess's own, from Python 3.11
        subprocess._fork_exec = fork_exec  # noqa: SLF001
    for name in ("posix_spawn", "posix_spawnp", "execv", "execve", "system"):
        setattr(os, name, _without_limit(getattr(os, name)))
    os.register_at_fork(after_in_child=_forget_lifting)


def load_libraries_without_limit() -> None:
    """Have native libraries load without the data limit, and raise `MemoryError` where one took more than it leaves.

    OpenBLAS, of which scipy has its own, allocates its buffers while it is loaded, and tries for ever where it cannot.
    """
    loader: Any = ExtensionFileLoader
    loader.create_module = _loads(loader.create_module)
    native: Any = ctypes
    native._dlopen = _loads(native._dlopen)  # noqa: SLF001


def _loads(load: Callable[..., Any]) -> Callable[..., Any]:
    load = _without_limit(load)

    @wraps(load)
    def loaded(*args: Any, **kwargs: Any) -> Any:
        library = load(*args, **kwargs)
        limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
        if limit != resource.RLIM_INFINITY and _status_bytes("VmData") > limit:
            raise MemoryError
        return library

    return loaded


def _forget_lifting() -> None:
    """Forget what the threads of the forking process were doing."""
    global _LIFTING  # noqa: PLW0603 - a lock cannot be released by another process
    _LIFTING = threading.Lock()
    _LIFTED.clear()


def _without_limit(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        with _LIFTING:
            found = resource.getrlimit(resource.RLIMIT_DATA)
            _LIFTED.append(found)
            resource.setrlimit(resource.RLIMIT_DATA, (found[1], found[1]))
        try:
            return call(*args, **kwargs)
        finally:
            with _LIFTING:
                if len(_LIFTED) == 1:
                    resource.setrlimit(resource.RLIMIT_DATA, _LIFTED[0])
                del _LIFTED[-1:]

    return called
