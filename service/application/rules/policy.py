"""What the operator allows: which code runs, which files are read, and how much each API key may take."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from service.errors import DataPathNotAllowedError, InvalidInputError, TargetNotAllowedError
from service.store.models import UNLIMITED, Quota
from tuner.errors import DataOutsideRootsError
from tuner.hardware.allocator_env import CUDA_ALLOCATOR_VARIABLES
from tuner.schemas.dataset import PathRead
from tuner.schemas.recommendation import Recommendation
from tuner.schemas.workload import PythonModel, WorkloadSpec
from tuner.system.data_roots import DataRoots, expand_glob, literal_prefix

_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_LONGEST_IDENTIFIER = 64
_MOST_ENTRIES = 10_000
"""Entries of folders that are looked at for one pattern, so that a request ends soon; the run looks at all."""


class Policy:
    """Checks specs against the operator's settings. ``quota`` is what each API key may take; the store applies it."""

    def __init__(self, python_targets: Sequence[str], data_roots: Sequence[str], quota: Quota = UNLIMITED) -> None:
        self.quota = quota
        self._targets = frozenset(python_targets)
        self._roots = DataRoots(data_roots)

    def check_model(self, spec: WorkloadSpec) -> None:
        """Refuse code that is not allow-listed.

        Raises:
            TargetNotAllowedError: naming the target and the setting.
        """
        if isinstance(spec.model, PythonModel) and spec.model.target not in self._targets:
            allowed = ", ".join(sorted(self._targets)) or "none"
            raise TargetNotAllowedError(
                f"spec.model.target {spec.model.target!r} is not allow-listed (allowed: {allowed}); "
                "the operator adds it to BATCHWRIGHT_PYTHON_TARGETS"
            )

    def check_data(self, spec: WorkloadSpec) -> None:
        """Refuse paths outside the data roots, and patterns that lead there by a link which this host sees.

        The run judges every file that it opens once more: links may come later, or be on its host alone.

        Raises:
            DataPathNotAllowedError: naming the path and the setting.
        """
        for read in spec.data.paths_read() if spec.data is not None else []:
            self._check_path(read)

    @staticmethod
    def check_foreign(recommendation: Recommendation, probes_set: Collection[str]) -> None:
        """Refuse a recommendation sent along with a job that would set more than probes set here.

        Any other variable, such as LD_PRELOAD, would let the sender run code of their own.

        Raises:
            InvalidInputError: naming the variables, or the field that is not what we write there.
        """
        allowed = {*probes_set, *CUDA_ALLOCATOR_VARIABLES}
        others = sorted(set(recommendation.environment) - allowed)
        if others:
            raise InvalidInputError(
                f"recommendation.environment sets {', '.join(others)}; a job may set only {', '.join(sorted(allowed))}"
            )
        if not _FINGERPRINT.fullmatch(recommendation.fingerprint) or len(recommendation.id) > _LONGEST_IDENTIFIER:
            raise InvalidInputError("recommendation.fingerprint must be 64 hexadecimal digits, and its id at most 64")

    def _check_path(self, read: PathRead) -> None:
        field, path, pattern = f"spec.data.{read.field}", read.path, read.pattern
        if "\0" in path or not path.startswith("/") or ".." in Path(path).parts:
            raise DataPathNotAllowedError(f"{field}: {path!r} must be absolute and free of `..` in the service")
        try:
            self._roots.resolve(path if pattern != path else literal_prefix(pattern))
            for _ in expand_glob(pattern, self._roots, _MOST_ENTRIES):
                pass
        except DataOutsideRootsError as error:
            raise DataPathNotAllowedError(f"{field}: {path!r}: {error}") from None
