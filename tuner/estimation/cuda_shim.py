"""Compile ``fake_cuda.cpp`` once per torch and host, and load it before torch. No torch itself.

torch without CUDA, or with CUDA on a host without a GPU, cannot run a backward pass of fake CUDA tensors: autograd asks
for the device. The library answers it. It is kept in the user's cache folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock

from tuner.errors import EstimateError
from tuner.estimation.attention_kernels import FIGURES, Attention, choose
from tuner.schemas.gpus import KernelProfile
from tuner.system.files import atomic_path

_SOURCE = Path(__file__).with_name("fake_cuda.cpp")
_COMPILERS = ("c++", "g++", "clang++")
_COMPILE_SECONDS = 120.0
_FLAGS = ("-shared", "-fPIC", "-std=c++20", "-O0", "-w")
_Rule = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.POINTER(ctypes.c_int64), ctypes.c_double)


class NoCompilerError(EstimateError):
    """The shim cannot be compiled on this host; the message says why."""


class _NotKeptError(NoCompilerError):
    """There is no folder for what is compiled."""


@dataclass(frozen=True)
class Shim:
    """The library in this process, loaded.

    Attributes:
        library: the loaded library.
        keeps: what C++ code calls back, which must stay as long as the process.
        reason: why the library is compiled again by every process; empty where it is kept.
    """

    library: ctypes.CDLL
    keeps: list[object] = field(default_factory=list)
    reason: str = ""

    @property
    def kept(self) -> bool:
        """Return whether the next process finds the library."""
        return not self.reason

    def install(self, profile: KernelProfile) -> None:
        """Take the place of whatever torch has registered, and choose attention as a card of this profile would.

        Call it after torch has been imported; again for another profile.
        """

        def rule(figures: ctypes._Pointer[ctypes.c_int64], dropout: float) -> int:
            return int(choose(Attention.told(figures[:FIGURES], dropout), profile))

        callback = _Rule(rule)
        self.keeps.append(callback)
        self.library.batchwright_install(callback)


def load_shim(cache: Path | None = None) -> Shim:
    """The library, compiled if it is not there yet, or does not load.

    Args:
        cache: where compiled libraries are kept; the user's cache folder when left out. Where nothing can be kept, it
            is compiled into a folder of this call's own, which is gone when it is loaded.

    Raises:
        NoCompilerError: when there is no C++ compiler, or it fails.
        EstimateError: when torch has been imported already, which is too late.
    """
    if "torch" in sys.modules:
        raise EstimateError("torch was imported before the device that stands in for CUDA: trace in a fresh process")
    try:
        return Shim(_loaded(cache or cache_folder()))
    except _NotKeptError as error:
        reason = str(error)
    try:
        with tempfile.TemporaryDirectory(prefix="batchwright-") as folder:
            return Shim(_loaded(Path(folder)), reason=reason)
    except OSError as error:
        raise NoCompilerError(f"{reason}; nor is there another folder to compile in ({error})") from None


def _loaded(cache: Path) -> ctypes.CDLL:
    """The library in ``cache``; one that does not load, as after a broken disk or from another host, is made again."""
    with suppress(OSError):
        return ctypes.CDLL(str(compiled(cache)), mode=ctypes.RTLD_GLOBAL)
    path = compiled(cache, again=True)
    try:
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise NoCompilerError(f"{path} cannot be loaded: {error}") from None


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/batchwright``, else ``~/.cache/batchwright``.

    Raises:
        NoCompilerError: when there is no such folder, since the user has no home.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "batchwright"
    except RuntimeError as error:
        raise _NotKeptError(f"there is no home folder ({error}): set XDG_CACHE_HOME") from None


def compiled(cache: Path, *, again: bool = False) -> Path:
    """The library for this torch and this source in ``cache``; compiled by the first who asks, others wait.

    Args:
        cache: where libraries are kept.
        again: compile it even if it is there, in place of the one that is.

    Raises:
        NoCompilerError: as ``load_shim``.
    """
    torch_folder = _torch_folder()
    path = cache / f"fake-cuda-{_identity(torch_folder)}.so"
    if path.is_file() and not again:
        return path
    compiler = _compiler()
    with _alone(cache):
        if again or not path.is_file():
            with atomic_path(path) as temporary:
                _compile(compiler, torch_folder, temporary)
    return path


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise EstimateError("torch is not installed: `pip install batchwright[torch]`")
    return Path(spec.origin).parent


def _identity(torch_folder: Path) -> str:
    """The digest of the library's inputs: its source, its compilation, torch and the folder of torch, the processor."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:  # built from its sources, in place
        version = "unpackaged"
    about = torch_folder / "version.py"
    built = about.read_text() if about.is_file() else ""
    parts = (_SOURCE.read_text(), *_FLAGS, version, built, str(torch_folder), platform.machine())
    return f"{version}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"


def _compiler() -> str:
    asked = os.environ.get("CXX", "")
    for name in (asked.split()[0] if asked.strip() else "", *_COMPILERS):
        found = shutil.which(name) if name else None
        if found is not None:
            return found
    raise NoCompilerError("there is no C++ compiler here (c++, g++ or clang++, or one named by CXX)")


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
    try:
        ended = subprocess.run(  # noqa: S603 - a compiler of this host, with arguments of our own
            command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompilerError(f"{compiler} did not compile the device that stands in for CUDA: {error}") from None
    if ended.returncode != 0 or not output.is_file():
        last = " ".join(ended.stderr.split())[-300:]
        raise NoCompilerError(f"{compiler} did not compile the device that stands in for CUDA: {last}")


@contextmanager
def _alone(cache: Path) -> Iterator[None]:
    """One process at a time compiles."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / ".compiling", fallback_to_soft=False):
            yield
    except OSError as error:
        raise _NotKeptError(
            f"{cache} cannot be written to ({error}): set XDG_CACHE_HOME to a folder that can"
        ) from None
