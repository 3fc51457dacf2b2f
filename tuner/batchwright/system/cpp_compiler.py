"""Find a C++ compiler, and a folder that keeps what it compiled."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

_COMPILERS = ("c++", "g++", "clang++")
_COMPILE_SECONDS = 300.0
_LONGEST_ERROR = 300


def find_cpp_compiler() -> str | None:
    """Return the compiler that the variable ``CXX`` names, else ``c++``, ``g++`` or ``clang++``, or None."""
    requested = os.environ.get("CXX", "").split()
    return next((found for name in (*requested[:1], *_COMPILERS) if (found := shutil.which(name)) is not None), None)


def compile_cpp(command: Sequence[str], output: Path) -> str:
    """Run a compiler that has to write ``output``.

    Returns:
        The reason why it failed, or an empty text.
    """
    try:
        completed = subprocess.run(  # noqa: S603 - a compiler of this host, with the caller's fixed arguments
            command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if completed.returncode == 0 and output.is_file():
        return ""
    return " ".join(completed.stderr.split())[-_LONGEST_ERROR:] or f"exit status {completed.returncode}"


def user_cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/batchwright``, else ``~/.cache/batchwright``.

    Raises:
        RuntimeError: when the user has no home folder.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "batchwright"
