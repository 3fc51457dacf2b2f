"""Compile ``fake_cuda.cpp`` once per torch and host, and load it before torch. No torch itself.

torch without CUDA, or with CUDA on a host without a GPU, cannot run a backward pass of fake CUDA tensors, because
autograd queries the device. The library is a stand-in device. It is cached in the user's cache folder.
"""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock

from batchwright.errors import EstimateError
from batchwright.estimation.attention_kernels import FIGURE_COUNT, Attention, Kernel
from batchwright.system.cpp_compiler import compile_cpp, find_cpp_compiler, user_cache_folder
from batchwright.system.files import atomic_path
from batchwright.system.temporary_folders import TemporaryFolder

_SOURCE = Path(__file__).with_name("fake_cuda.cpp")
_FLAGS = ("-shared", "-fPIC", "-std=c++20", "-O0", "-w")
_Rule = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.POINTER(ctypes.c_int64), ctypes.c_double)


class NoCompilerError(EstimateError):
    """The shim cannot be compiled on this host; the message says why."""


class _NoCacheFolderError(NoCompilerError):
    """No cache folder for the compiled library can be written to."""


@dataclass(frozen=True)
class Shim:
    """The library, loaded in this process.

    Attributes:
        library: the loaded library.
        callbacks: functions that C++ code calls, which must live as long as the process.
        uncached_reason: why the library cannot be cached and every process compiles it; empty if it is cached.
    """

    library: ctypes.CDLL
    callbacks: list[object] = field(default_factory=list)
    uncached_reason: str = ""

    @property
    def is_cached(self) -> bool:
        """Return whether later processes find the library."""
        return not self.uncached_reason

    def install(self, choose_attention: Callable[[Attention], Kernel]) -> None:
        """Replace the device that torch has registered, and let a function choose attention kernels.

        Call it after torch has been imported, and again for another function.
        """

        def rule(figures: "ctypes._Pointer[ctypes.c_int64]", dropout: float) -> int:
            return int(choose_attention(Attention.from_figures(figures[:FIGURE_COUNT], dropout)))

        callback = _Rule(rule)
        self.callbacks.append(callback)
        self.library.batchwright_install(callback)


def load_shim() -> Shim:
    """Load the library, and compile it first if it is not cached or does not load.

    If the user's cache folder cannot be written to, the library is compiled into a temporary folder.

    Raises:
        NoCompilerError: when there is no C++ compiler, or it fails.
        EstimateError: when torch has been imported already.
    """
    if "torch" in sys.modules:
        raise EstimateError("torch was imported before the stand-in for CUDA: trace in a fresh process")
    try:
        return Shim(_load(cache_folder()))
    except _NoCacheFolderError as error:
        uncached_reason = str(error)
    try:
        with TemporaryFolder() as folder:
            return Shim(_load(folder), uncached_reason=uncached_reason)
    except OSError as error:
        raise NoCompilerError(f"{uncached_reason}; nor is there another folder to compile in ({error})") from None


def _load(cache: Path) -> ctypes.CDLL:
    """Load the library in ``cache``; compile it again if it does not load, because it is damaged or of another host."""
    with suppress(OSError):
        return ctypes.CDLL(str(compile_cached(cache)), mode=ctypes.RTLD_GLOBAL)
    path = compile_cached(cache, recompile=True)
    try:
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise NoCompilerError(f"{path} cannot be loaded: {error}") from None


def cache_folder() -> Path:
    """Return the user's cache folder.

    Raises:
        NoCompilerError: when the user has no home folder.
    """
    try:
        return user_cache_folder()
    except RuntimeError as error:
        raise _NoCacheFolderError(f"there is no home folder ({error}): set XDG_CACHE_HOME") from None


def compile_cached(cache: Path, *, recompile: bool = False) -> Path:
    """Return the library for this torch and this source in ``cache``; one process compiles it while others wait.

    Args:
        cache: the folder of compiled libraries.
        recompile: replace a library that is there.

    Raises:
        NoCompilerError: as ``load_shim``.
    """
    torch_folder = _torch_folder()
    path = cache / f"fake-cuda-{_digest(torch_folder)}.so"
    if path.is_file() and not recompile:
        return path
    compiler = find_cpp_compiler()
    if compiler is None:
        raise NoCompilerError("there is no C++ compiler (c++, g++, clang++, or the one that CXX names)")
    with _compile_lock(cache):
        if recompile or not path.is_file():
            with atomic_path(path) as temporary:
                _compile(compiler, torch_folder, temporary)
    return path


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise EstimateError("torch is not installed: `pip install batchwright[torch]`")
    return Path(spec.origin).parent


def _digest(torch_folder: Path) -> str:
    """Return the digest of the library's inputs: its source, the flags, torch, torch's folder, the processor type."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:  # built in place from its sources
        version = "unpackaged"
    version_file = torch_folder / "version.py"
    version_text = version_file.read_text() if version_file.is_file() else ""
    parts = (_SOURCE.read_text(), *_FLAGS, version, version_text, str(torch_folder), platform.machine())
    return f"{version}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"


def _compile(compiler: str, torch_folder: Path, output: Path) -> None:
    libraries = torch_folder / "lib"
    command = [
        compiler,
        *_FLAGS,
        f"-I{torch_folder / 'include'}",
        str(_SOURCE),
        "-o",
        str(output),
        f"-L{libraries}",
        "-ltorch_cpu",
        "-lc10",
        f"-Wl,-rpath,{libraries}",
    ]
    if reason := compile_cpp(command, output):
        raise NoCompilerError(f"{compiler} could not compile the stand-in for CUDA: {reason}")


@contextmanager
def _compile_lock(cache: Path) -> Iterator[None]:
    """Let one process at a time compile."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / ".compiling", fallback_to_soft=False):
            yield
    except OSError as error:
        raise _NoCacheFolderError(
            f"{cache} cannot be written to ({error}): set XDG_CACHE_HOME to a writable folder"
        ) from None
