"""The files that a spec names."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

from tuner.training.data.base import data_problem


def matching_files(patterns: Sequence[str]) -> list[Path]:
    """The files that the patterns name, sorted, so that every host reads the same stream.

    Raises:
        SpecError: when a pattern matches no file.
    """
    found: set[Path] = set()
    for pattern in patterns:
        files = {Path(name).resolve() for name in glob.glob(pattern, recursive=True) if Path(name).is_file()}  # noqa: PTH207 - patterns may be absolute, which Path.glob refuses
        if not files:
            raise data_problem("data.paths", f"no file matches (from {Path.cwd()})", pattern)
        found |= files
    return sorted(found)
