"""Compile the libraries that stand in for CUDA's, once per version of everything that they depend on. No torch.

Each library exports all names of the real one. Functions that `sources/` defines replace weak definitions that are
generated here, which record their call in the session's log, and succeed or report that they are not supported.
"""

import hashlib
import re
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from filelock import FileLock

from batchwright.errors import VirtualGpuError
from batchwright.system.cpp_compiler import compile_cpp, find_cpp_compiler, user_cache_folder
from batchwright.system.files import atomic_folder
from batchwright.system.temporary_folders import TemporaryFolder

CORE = "libvirtual_gpu.so"
"""The library that the others share."""
_SOURCES = Path(__file__).with_name("sources")
_CORE_SOURCES = ("address_space", "attributes", "description", "device", "errors", "ledger", "log")
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-Wno-deprecated-declarations")
_CUDA = "nvidia/cu13"
_INCLUDES = (f"{_CUDA}/include", "nvidia/cudnn/include", "nvidia/nccl/include")
_CUDA_NOT_SUPPORTED, _CUDNN_NOT_SUPPORTED, _CUBLAS_NOT_SUPPORTED, _NCCL_INVALID_USAGE = 801, 3000, 15, 5


@dataclass(frozen=True)
class Library:
    """A library that stands in for one of CUDA's.

    Attributes:
        soname: its name for the loader.
        sources: the files of `sources/` that define functions of it, without their suffix.
        original: the real library, from the folder of packages; or the header that declares its functions; or neither.
        unsupported: the status that other functions return; with ``gets_fail``, only those that have to answer.
        gets_fail: functions whose names do not begin with `Get` after the prefix succeed.
    """

    soname: str
    sources: tuple[str, ...]
    original: str = ""
    unsupported: int = _CUDA_NOT_SUPPORTED
    gets_fail: bool = False


LIBRARIES = (
    Library("libcudart.so.13", ("cudart", "cudart_kernels", "cudart_memory"), f"{_CUDA}/lib/libcudart.so.13"),
    Library("libcuda.so.1", ("cuda_driver",), f"{_CUDA}/include/cuda.h"),
    Library("libnvidia-ml.so.1", ("nvml",)),
    Library(
        "libcublasLt.so.13", ("cublaslt",), f"{_CUDA}/lib/libcublasLt.so.13", _CUBLAS_NOT_SUPPORTED, gets_fail=True
    ),
    Library("libcublas.so.13", ("cublas",), f"{_CUDA}/lib/libcublas.so.13", _CUBLAS_NOT_SUPPORTED, gets_fail=True),
    Library(
        "libcudnn.so.9", ("cudnn", "cudnn_rnn"), "nvidia/cudnn/lib/libcudnn.so.9", _CUDNN_NOT_SUPPORTED, gets_fail=True
    ),
    Library("libnccl.so.2", ("nccl",), "nvidia/nccl/lib/libnccl.so.2", _NCCL_INVALID_USAGE, gets_fail=True),
)
_REMEDY = (
    "install both into an environment of its own, about 5 GB (`pip install torch==2.13.0 nvidia-cuda-crt==13.0.88`; a "
    "CPU build that is installed already needs `--force-reinstall`), or use the `.venv-virtual-gpu` that "
    "`make virtual-gpu-test` makes in a checkout"
)
_TORCH, _HEADERS = "torch's CUDA build", "the headers of `nvidia-cuda-crt`"
_NEEDED = {
    f"{_CUDA}/include/cuda_runtime_api.h": _TORCH,
    f"{_CUDA}/include/crt/host_defines.h": _HEADERS,
    **dict.fromkeys((entry.original for entry in LIBRARIES if entry.original), _TORCH),
}
"""Files of the CUDA wheels, and what they are part of."""


def preloaded(folder: Path) -> list[Path]:
    """Return the libraries in a folder of ``build``, in the order in which they are to be loaded."""
    return [folder / CORE, *(folder / library.soname for library in LIBRARIES)]


def build(site_packages: Path, cache: Path | None = None) -> Path:
    """Compile the libraries for the CUDA wheels in ``site_packages``, unless the cache has them.

    One process compiles while others wait.

    Args:
        site_packages: the folder of packages that has torch's CUDA build, its wheels and `nvidia-cuda-crt`.
        cache: the folder of compiled libraries; the user's cache folder by default.

    Returns:
        The folder of the libraries.

    Raises:
        VirtualGpuError: when there is no compiler, a wheel is missing, or the compiler fails.
    """
    for path, part in _NEEDED.items():
        if not (site_packages / path).is_file():
            raise VirtualGpuError(
                f"virtual GPUs need {_TORCH} and {_HEADERS}, but {site_packages} lacks {part} ({path}): {_REMEDY}"
            )
    compiler = find_cpp_compiler()
    if compiler is None:
        raise VirtualGpuError("virtual GPUs need a C++ compiler (c++, g++, clang++, or the one that CXX names)")
    try:
        cache = cache or user_cache_folder()
        folder = cache / f"virtual-gpu-{_digest(site_packages, compiler)}"
        if folder.is_dir():
            return folder
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / ".compiling-virtual-gpu", fallback_to_soft=False):
            if not folder.is_dir():
                with atomic_folder(folder) as temporary, TemporaryFolder() as generated:
                    _Build(compiler, site_packages, temporary, generated).run()
    except (OSError, RuntimeError) as error:
        raise VirtualGpuError(f"the libraries of virtual GPUs cannot be kept: {error}; set XDG_CACHE_HOME") from None
    return folder


def _digest(site_packages: Path, compiler: str) -> str:
    """Return the digest of what the libraries depend on: sources, flags, wheels, their folder, the compiler."""
    wheels = sorted(
        f"{found.metadata['Name']}=={found.version}"
        for found in distributions(path=[str(site_packages)])
        if found.metadata["Name"] == "torch" or found.metadata["Name"].startswith("nvidia-")
    )
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout  # noqa: S603
    sources = [path.read_text(encoding="utf-8") for path in sorted(_SOURCES.iterdir())]
    parts = (Path(__file__).read_text(encoding="utf-8"), *sources, *wheels, str(site_packages), compiler, version)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class _Build:
    """One compilation of all libraries into ``folder``, with another folder for generated sources."""

    compiler: str
    site_packages: Path
    folder: Path
    generated: Path

    def run(self) -> None:
        """Compile the library that the others share, then the others, two at a time."""
        self._compile(CORE, (_source(name) for name in _CORE_SOURCES))
        with ThreadPoolExecutor(max_workers=2) as pool:
            list(pool.map(self._compile_library, LIBRARIES))

    def _compile_library(self, library: Library) -> None:
        names, version = self._exported(library)
        stubs = self.generated / f"{library.soname}.stubs.cpp"
        stubs.write_text(_stubs(library, names), encoding="utf-8")
        arguments = [f"-L{self.folder}", f"-l:{CORE}", "-Wl,-rpath,$ORIGIN", "-ldl"]
        if version:
            script = self.generated / f"{library.soname}.map"
            script.write_text(f"{version} {{ global: *; }};\n", encoding="utf-8")
            arguments.append(f"-Wl,--version-script={script}")
        self._compile(library.soname, (*(_source(name) for name in library.sources), stubs), arguments)

    def _compile(self, soname: str, sources: Iterable[Path], arguments: Iterable[str] = ()) -> None:
        includes = [f"-I{self.site_packages / path}" for path in _INCLUDES]
        output = self.folder / soname
        command = [self.compiler, *_FLAGS, f"-I{_SOURCES}", *includes, *map(str, sources), *arguments]
        command += [f"-Wl,-soname,{soname}", "-o", str(output)]
        if reason := compile_cpp(command, output):
            raise VirtualGpuError(f"{self.compiler} could not compile {soname}: {reason}")

    def _exported(self, library: Library) -> tuple[list[str], str]:
        """Return the functions of the real library, and the version of its symbols, if they have one."""
        if not library.original:
            return [], ""
        original = self.site_packages / library.original
        if original.suffix == ".h":
            declared = re.findall(r"^CUresult CUDAAPI (cu\w+)\(", original.read_text(encoding="utf-8"), re.MULTILINE)
            return sorted(set(declared)), ""
        symbols = _symbols(original)
        names = {name for name, _ in symbols if re.fullmatch(r"[A-Za-z]\w*|__cuda\w+", name)}
        return sorted(names), next((version for _, version in symbols if version), "")


def _source(name: str) -> Path:
    return _SOURCES / f"{name}.cpp"


def _symbols(library: Path) -> list[tuple[str, str]]:
    """Return the functions that a library exports, each with its version, which may be empty."""
    try:
        listed = subprocess.run(  # noqa: S603 - a tool of this host, with fixed arguments
            ["nm", "-D", "--defined-only", "--with-symbol-versions", str(library)],  # noqa: S607 - found by PATH
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise VirtualGpuError(f"virtual GPUs need `nm` of binutils, which failed: {error}") from None
    lines = (line.split() for line in listed.splitlines())
    functions = (words[-1].partition("@") for words in lines if len(words) > 1 and words[-2] in "TWi")
    return [(name, version.lstrip("@")) for name, _, version in functions]


def _stubs(library: Library, names: Iterable[str]) -> str:
    """Return the source of weak definitions of these functions."""
    lines = [
        '#include "virtual_gpu.h"',
        "#define STUB(name, status)                                                             \\",
        '  extern "C" __attribute__((weak, visibility("default"))) int name() {                 \\',
        '    static const bool logged = (virtual_gpu::log_once("stub", #name), true);           \\',
        "    return logged ? status : status;                                                   \\",
        "  }",
    ]
    for name in names:
        fails = not library.gets_fail or re.match(r"[a-z]+(Lt)?Get[A-Z]", name, re.IGNORECASE) is not None
        lines.append(f"STUB({name}, {library.unsupported if fails else 0})")
    return "\n".join(lines) + "\n"
