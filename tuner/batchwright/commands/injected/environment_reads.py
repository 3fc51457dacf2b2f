"""Record the variables that the imports of a fork server read, so that no process with others is forked from it."""

from __future__ import annotations

import os
import sys
from typing import Any, Iterable, Mapping

_FIXED = (
    *("PYTHON", "LD_", "GLIBC_", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "DNNL_", "ONEDNN_", "OPENBLAS_"),
    *("PYTORCH_", "TORCH", "CUDA_", "ARROW_", "TQDM_"),
)
"""Beginnings of the names of variables that libraries read once, and not by name in Python."""
_PASSED_BY = ("BATCHWRIGHT_", "TMPDIR", "TORCHELASTIC_", "TORCH_NCCL_")
"""Beginnings of those that differ in every probe: of the injection, of `tempfile`, which a forked process reads anew,
and those that torch's launcher sets for the process group."""


class EnvironmentReads:
    """The names that Python code reads from `os.environ` while this is installed.

    A loop over all variables is not recorded, as it would read those that differ in every process.

    Attributes:
        names: the names read, whether they were set or not.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._environment: Any = type(os.environ)
        self._read = self._environment.__getitem__

    def install(self) -> None:
        """Begin to record."""
        read, names = self._read, self.names

        def recorded(environment: Any, name: Any) -> Any:
            if isinstance(name, str) and sys._getframe(1).f_code.co_name != "__iter__":  # noqa: SLF001 - the caller
                names.add(name)
            return read(environment, name)

        self._environment.__getitem__ = recorded

    def remove(self) -> None:
        """End the recording."""
        self._environment.__getitem__ = self._read

    def difference(self, own: Mapping[str, str], other: Mapping[str, str]) -> str | None:
        """The name of a variable that was read, or that libraries read, and differs; none where there is none."""
        return next((name for name in self._compared({*own, *other}) if own.get(name) != other.get(name)), None)

    def _compared(self, present: Iterable[str]) -> list[str]:
        fixed = [name for name in present if name.startswith(_FIXED)]
        return sorted(name for name in {*fixed, *self.names} if not name.startswith(_PASSED_BY))
