"""A session: a described host, the memory that processes hold on its GPUs, and failures to inject. No torch."""

import ctypes
import os
import sysconfig
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from batchwright.errors import VirtualGpuError
from batchwright.schemas.gpus import MIB
from batchwright.system import startup
from batchwright.system.temporary_folders import TemporaryFolder
from batchwright.units import format_bytes
from batchwright.virtual_gpu.build import CORE, build, preloaded
from batchwright.virtual_gpu.description import (
    AllocationFailure,
    DeviceLost,
    EccError,
    Failure,
    MemoryTaken,
    SlowKernels,
    VirtualHost,
)
from batchwright.virtual_gpu.uncomputed import Uncomputed, read_uncomputed

SESSION_VARIABLE = "VIRTUAL_GPU_SESSION"
"""Environment variable with the folder of the session, which the libraries read."""
COMPUTE_LIMIT_VARIABLE = "VIRTUAL_GPU_COMPUTE_LIMIT_BYTES"
"""Environment variable with the size of the largest operators that are computed, which `compute` reads."""
DEFAULT_COMPUTE_LIMIT_BYTES = MIB
_MICROSECONDS = 1_000_000
_MOST_PROCESSES = 512
"""``kMostProcesses`` of ``sources/ledger.h``."""


class _ProcessUse(ctypes.Structure):
    """``ProcessUse`` of ``sources/virtual_gpu.h``."""

    _fields_ = (("pid", ctypes.c_uint), ("used_bytes", ctypes.c_uint64))


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "create": (ctypes.c_void_p, (ctypes.c_char_p,)),
    "close": (None, (ctypes.c_void_p,)),
    "set_total": (None, (ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)),
    "used_bytes": (ctypes.c_int64, (ctypes.c_void_p, ctypes.c_int)),
    "processes": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_ProcessUse), ctypes.c_int)),
    "occupy": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)),
    "vacate": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_int)),
    "add_event": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)),
    "clear_failures": (None, (ctypes.c_void_p, ctypes.c_int)),
}
"""Results and arguments of the functions at the end of ``sources/ledger.cpp``."""


class _Ledger:
    """The ledger of a session, whose code is in C++ (``sources/ledger.h``)."""

    def __init__(self, library: Path, path: Path) -> None:
        loaded = ctypes.CDLL(str(library), use_errno=True)
        self._functions = {name: getattr(loaded, f"virtual_gpu_ledger_{name}") for name in _SIGNATURES}
        for name, (result, arguments) in _SIGNATURES.items():
            self._functions[name].restype, self._functions[name].argtypes = result, arguments
        self._handle = self._functions["create"](os.fsencode(path))
        if not self._handle:
            raise VirtualGpuError(f"{path} cannot be written: {os.strerror(ctypes.get_errno())}")

    def call(self, name: str, *arguments: int) -> int:
        """Call a function of ``_SIGNATURES`` that takes numbers."""
        return int(self._functions[name](self._handle, *arguments) or 0)

    def processes(self, gpu: int) -> dict[int, int]:
        """Return the bytes of each process, by its number."""
        uses = (_ProcessUse * _MOST_PROCESSES)()
        count = self._functions["processes"](self._handle, gpu, uses, _MOST_PROCESSES)
        return {use.pid: use.used_bytes for use in uses[:count]}


class VirtualGpuSession:
    """A host with virtual GPUs, for the processes that are started with its environment.

    ::

        with VirtualGpuSession(VirtualHost.of("T4")) as session:
            subprocess.run(["python", "train.py"], env={**os.environ, **session.environment()})
            session.used_bytes(0)

    Two sessions share nothing. A session is a folder, which is removed at its end; processes that still run then keep
    what they hold.

    Args:
        host: its GPUs, the other processes on them, and the failures to inject at the beginning.
        compute_limit_bytes: operators whose tensors have at most this size are computed, by the CPU; new results of
            others are zero. 0: none is computed, and results are undefined.
        site_packages: the folder of packages of the Python that will run, with torch's CUDA build; that of this Python
            by default.
    """

    def __init__(
        self,
        host: VirtualHost,
        *,
        compute_limit_bytes: int = DEFAULT_COMPUTE_LIMIT_BYTES,
        site_packages: Path | None = None,
    ) -> None:
        self.host = host
        self._compute_limit_bytes = compute_limit_bytes
        self._site_packages = site_packages or Path(sysconfig.get_path("purelib"))
        self._folder: TemporaryFolder | None = None
        self._libraries: list[Path] = []
        self._open_ledger: _Ledger | None = None

    def __enter__(self) -> Self:
        libraries = build(self._site_packages)
        self._libraries = preloaded(libraries)
        self._folder = TemporaryFolder()
        try:
            (self.folder / "description").write_text("".join(_description(self.host)), encoding="utf-8")
            self._open_ledger = _Ledger(libraries / CORE, self.folder / "ledger")
            for gpu, description in enumerate(self.host.gpus):
                self._ledger.call("set_total", gpu, description.total_bytes)
            for process in self.host.processes:
                self.occupy(process.gpu, process.used_bytes)
            for failure in self.host.failures:
                self.inject(failure)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove everything that the session has."""
        if self._open_ledger is not None:
            self._open_ledger.call("close")
            self._open_ledger = None
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

    @property
    def folder(self) -> Path:
        """The session's folder.

        Raises:
            VirtualGpuError: when the session is not open.
        """
        if self._folder is None:
            raise VirtualGpuError("the session of virtual GPUs is not open")
        return self._folder.path

    @property
    def _ledger(self) -> _Ledger:
        if self._open_ledger is None:
            raise VirtualGpuError("the session of virtual GPUs is not open")
        return self._open_ledger

    def environment(self) -> dict[str, str]:
        """Return the variables that make a child process, and its children, see the GPUs.

        `LD_PRELOAD` and `PYTHONPATH` keep what they are in this process. The libraries are preloaded, because torch's
        run paths come before `LD_LIBRARY_PATH`, and the loader takes a loaded library when its name is asked for.
        """
        return {
            SESSION_VARIABLE: str(self.folder),
            COMPUTE_LIMIT_VARIABLE: str(self._compute_limit_bytes),
            "LD_PRELOAD": _joined(*map(str, self._libraries), os.environ.get("LD_PRELOAD")),
            "PYTHONPATH": _joined(str(Path(startup.__file__).parent), os.environ.get("PYTHONPATH")),
            "TRITON_LIBCUDA_PATH": str(self._libraries[0].parent),
        }

    def used_bytes(self, gpu: int = 0) -> int:
        """Return the bytes that all processes hold on a GPU, their contexts included."""
        self._check(gpu)
        return self._ledger.call("used_bytes", gpu)

    def processes(self, gpu: int = 0) -> dict[int, int]:
        """Return the processes that hold memory of a GPU, by their numbers, each with its bytes."""
        self._check(gpu)
        return self._ledger.processes(gpu)

    def occupy(self, gpu: int, used_bytes: int) -> int:
        """Let a process outside of the session take memory.

        Returns:
            Its number, which no process of this host can have.

        Raises:
            VirtualGpuError: when less is free.
        """
        self._check(gpu)
        pid = self._ledger.call("occupy", gpu, used_bytes)
        if pid == 0:
            free = self.host.gpus[gpu].total_bytes - self._ledger.call("used_bytes", gpu)
            raise VirtualGpuError(
                f"GPU {gpu} has {format_bytes(free)} free: no process can take {format_bytes(used_bytes)}"
            )
        return pid

    def free(self, pid: int) -> None:
        """End a process of ``occupy``.

        Raises:
            VirtualGpuError: when there is no such process.
        """
        if self._ledger.call("vacate", pid):
            raise VirtualGpuError(f"no process outside of the session has the number {pid}")

    def inject(self, failure: Failure) -> None:
        """Let a failure happen, at once or at an allocation to come.

        Raises:
            VirtualGpuError: when too many failures are still to come.
        """
        self._check(failure.gpu)
        kind, amount = _event(failure)
        if self._ledger.call("add_event", failure.gpu, kind, failure.at_allocation, amount):
            raise VirtualGpuError("too many failures are still to come: a session has at most 64")

    def clear_failures(self, gpu: int = 0) -> None:
        """End the failures of a GPU, and drop those to come. Processes with an ECC error keep it."""
        self._check(gpu)
        self._ledger.call("clear_failures", gpu)

    def uncomputed(self) -> list[Uncomputed]:
        """Return the operators that were called and whose values no process has computed, the most frequent first."""
        return read_uncomputed(self.folder)

    def log(self) -> str:
        """Return a developer's log: stubs that were called, unknown attributes, copies that were left out."""
        path = self.folder / "log"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def _check(self, gpu: int) -> None:
        if not 0 <= gpu < len(self.host.gpus):
            raise VirtualGpuError(f"there is no GPU {gpu}: the host has {len(self.host.gpus)}, counted from 0")


def _joined(*paths: str | None) -> str:
    return os.pathsep.join(path for path in paths if path)


def _event(failure: Failure) -> tuple[int, int]:
    """Return the number of a failure's kind (`EventKind` of ``sources/ledger.h``), and its amount."""
    match failure:
        case AllocationFailure(lasting=False):
            return 1, 0
        case AllocationFailure():
            return 2, 0
        case MemoryTaken():
            return 3, failure.taken_bytes
        case DeviceLost():
            return 4, 0
        case EccError():
            return 5, 0
        case SlowKernels():
            return 6, round(failure.seconds * _MICROSECONDS)


def _description(host: VirtualHost) -> Iterator[str]:
    """Yield the lines that ``sources/description.cpp`` reads."""
    yield f"host_memory_bytes {host.host_memory_bytes}\n"
    for gpu in host.gpus:
        major, minor = gpu.compute_capability
        yield f"gpu\nname {gpu.name}\nuuid {uuid.uuid4().hex}\n"
        yield f"compute_capability_major {major}\ncompute_capability_minor {minor}\n"
        figures = gpu.model_dump(exclude={"name", "compute_capability"})
        yield from (f"{key} {int(value)}\n" for key, value in figures.items())
