"""Classify exceptions and their messages: out of memory, an illegal size, a failed device, or another error.

No other module decides that an exception is an OOM; ``commands.injected.oom_watch`` reports those that may be one. The
end of a process that raised none is judged in ``batchwright.system.process_exit`` and
``batchwright.probing.exit_causes``.

Nothing here imports torch. The source of each message is beside it. An error that is not in these tables is an ordinary
error, never an OOM by guess.
"""

import builtins
import re
from enum import Enum

from batchwright.units import format_bytes


class FailureKind(Enum):
    """The meaning of a failure for the micro-batch size."""

    OUT_OF_MEMORY = "out of memory"
    SUSPECTED_OUT_OF_MEMORY = "suspected out of memory"
    """Errors of libraries that hide the cause: out of memory only if the device was nearly full."""
    INVALID_SIZE = "invalid size"
    DEVICE_FAILURE = "device failure"
    """The device itself failed, whatever ran on it."""
    OTHER = "other"


_OOM_MESSAGES = (
    "CUDA out of memory",  # c10/cuda/CUDACachingAllocator.cpp
    "CUDA error: out of memory",  # a failed cudaMalloc outside the allocator
    "cudaErrorMemoryAllocation",
    "HIP out of memory",
    "XPU out of memory",
    "MPS backend out of memory",
    "DefaultCPUAllocator: can't allocate memory",  # c10/core/impl/alloc_cpu.cpp
    "DefaultCPUAllocator: not enough memory",
    "posix_memalign failed",
    "Cannot allocate memory",  # ENOMEM of a system call: mmap, fork, pthread_create
    "Allocation is out of device memory on current platform",  # oneAPI
    "UR_RESULT_ERROR_OUT_OF",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
    "OpenBLAS error: Memory allocation still failed",  # driver/others/memory.c, which then ends the process
    "memory allocation of ",  # Rust's handle_alloc_error, which then aborts
)

_SUSPICIOUS_MESSAGES = (
    "CUDNN_STATUS_NOT_SUPPORTED",  # no workspace left for any algorithm
    "unable to find an engine",  # as above, the newer wording
    "CUFFT_INTERNAL_ERROR",
    "could not create a primitive",  # oneDNN on the CPU, when its scratchpad cannot be allocated
    "could not execute a primitive",  # as above, for memory that it allocates late
    "could not create a memory",  # as above
    "CUBLAS_STATUS_NOT_INITIALIZED",  # a handle that found no room for its workspace
    "can't start new thread",  # Python's threading, where the stack of a thread finds no room, or the host has no more
    "Thread creation failed",  # as above, of libgomp
    "pthread_create failed",  # as above, of OpenBLAS
)

_INVALID_SIZE_MESSAGES = (
    "invalid configuration argument",  # more blocks than a launch may have
    "canUse32BitIndexMath",
    "out of resource: shared memory",  # Triton: a tile that does not fit the multiprocessor
)

_DEVICE_MESSAGES = (  # cudaGetErrorString; `torch.AcceleratorError` has the text alone
    "uncorrectable ECC error encountered",  # cudaErrorECCUncorrectable
    "CUDA-capable device(s) is/are busy or unavailable",  # cudaErrorDevicesUnavailable
)


def oom_texts() -> tuple[str, ...]:
    """The parts of messages that mean or suggest an OOM, for a process that cannot import this module."""
    return (*_OOM_MESSAGES, *_SUSPICIOUS_MESSAGES)


def classify_exception(error: BaseException) -> FailureKind:
    """Classify an exception raised by a training step.

    Follows the chain of causes, since frameworks wrap the original error.
    """
    seen: list[BaseException] = []
    current: BaseException | None = error
    kinds = []
    while current is not None and current not in seen:
        seen.append(current)
        kinds.append(_classify_one(current))
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    order = (
        FailureKind.DEVICE_FAILURE,
        FailureKind.OUT_OF_MEMORY,
        FailureKind.INVALID_SIZE,
        FailureKind.SUSPECTED_OUT_OF_MEMORY,
    )
    return next((kind for kind in order if kind in kinds), FailureKind.OTHER)


def is_of_device(error: BaseException) -> bool:
    """Return whether an exception is one of the device, its memory or itself, so that no other batch is to blame."""
    return classify_exception(error) in {FailureKind.OUT_OF_MEMORY, FailureKind.DEVICE_FAILURE}


def _classify_one(error: BaseException) -> FailureKind:
    named = (kind for kind in type(error).__mro__ if kind.__name__ == "OutOfMemoryError")
    if isinstance(error, MemoryError) or any(kind.__module__.startswith("torch") for kind in named):  # without torch
        return FailureKind.OUT_OF_MEMORY
    if not isinstance(error, (RuntimeError, OSError)) and type(error).__name__ != "OutOfResources":
        return FailureKind.OTHER  # a message that merely mentions memory, such as a ValueError's, proves nothing
    return classify_message(str(error))


def classify_message(message: str) -> FailureKind:
    """Classify the message of a ``RuntimeError``."""
    tables = (
        (FailureKind.OUT_OF_MEMORY, _OOM_MESSAGES),
        (FailureKind.INVALID_SIZE, _INVALID_SIZE_MESSAGES),
        (FailureKind.SUSPECTED_OUT_OF_MEMORY, _SUSPICIOUS_MESSAGES),
        (FailureKind.DEVICE_FAILURE, _DEVICE_MESSAGES),
    )
    return next(
        (kind for kind, texts in tables if any(text.lower() in message.lower() for text in texts)), FailureKind.OTHER
    )


_PREFIX = re.compile(r"^(?:\[[^\]]*\](?:<\w+>)?:?\s*|\(\S+ pid=[^)]*\)\s*|\d+:\s+)+")
"""What launchers write before the lines of a rank: `[rank0]: `, `[default0]:`, `[1,0]<stderr>:`, `(Worker pid=7) `,
`0: `."""
_ERROR_CLASS = re.compile(
    r"^[\w.]*(?:Error|Exception|bad_alloc)\b|bad_alloc|^OpenBLAS error: |^memory allocation of \d+ bytes failed"
)
_ERRORS_OF_LAUNCHERS = ("ChildFailedError", "CalledProcessError", "ProcessExitedException", "ProcessRaisedException")
"""Errors by which a launcher says that a process of it failed, after that process's own error."""


def printed_error(output: str) -> tuple[str, FailureKind]:
    """Find the error that explains a failed process in its output, and classify it.

    An OOM comes first, because the other ranks fail at the connections to the one that ran out of memory. Then come the
    last error of a rank, the last error of a launcher, and the last line.
    """
    lines = [_PREFIX.sub("", line.strip()) for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR_CLASS.search(line)]
    ooms = [line for line in errors if classify_printed(line) is FailureKind.OUT_OF_MEMORY]
    of_ranks = [line for line in errors if not _names_class(line, _ERRORS_OF_LAUNCHERS)]
    line = next((found[-1] for found in (ooms[:1], of_ranks, errors, lines) if found), "")
    return line, classify_printed(line)


def classify_printed(line: str) -> FailureKind:
    """Classify an exception as Python prints it, by the rules of ``_classify_one``: its class, and then its message."""
    if _names_class(line, ("MemoryError", "OutOfMemoryError")):
        return FailureKind.OUT_OF_MEMORY
    kind = getattr(builtins, line.partition(":")[0], None)
    is_other = isinstance(kind, type) and not issubclass(kind, (RuntimeError, OSError))
    return FailureKind.OTHER if is_other else classify_message(line)


def _names_class(line: str, endings: tuple[str, ...]) -> bool:
    return line.partition(":")[0].endswith(endings)


_REQUESTED = (
    re.compile(r"tried to allocate (?P<bytes>\d+) bytes", re.IGNORECASE),  # c10/core/impl/alloc_cpu.cpp
    re.compile(r"memory allocation of (?P<bytes>\d+) bytes"),  # Rust's
    re.compile(r"tried to allocate (?P<figure>[\d.]+) (?P<unit>[KMGT]iB)", re.IGNORECASE),  # CUDA's, HIP's, XPU's
)


def oom_in_words(message: str) -> str:
    """Summarise an out-of-memory error in a few words, with the size of the failed request if the message has it."""
    for pattern in _REQUESTED:
        if (found := pattern.search(message)) is not None:
            parts = found.groupdict()
            requested = format_bytes(int(parts["bytes"])) if "bytes" in parts else f"{parts['figure']} {parts['unit']}"
            return f"asked for {requested} more"
    return "found no more memory"
