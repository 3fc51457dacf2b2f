"""Tests of ``batchwright.commands.injected.watching``."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

from batchwright.commands.injected.memory import StartMemory
from batchwright.commands.injected.watching import WatchedProcess

MIB = 1024**2


def test_the_peak_of_a_job_never_falls(tmp_path: Path) -> None:
    """A file that is mapped later lowers what the kernel's mark of all addresses leaves for memory."""
    settings: dict[str, Any] = {"device": "cpu", "oom_texts": [], "limit_bytes": None}
    process = WatchedProcess(None, str(tmp_path), settings, StartMemory(), set())
    mmap.mmap(-1, 256 * MIB, flags=mmap.MAP_PRIVATE).close()
    highest = process.peaks()["process_peak_bytes"]
    (tmp_path / "data").write_bytes(b"\0" * 32 * MIB)
    with (tmp_path / "data").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        assert process.peaks()["process_peak_bytes"] == highest
    assert highest is not None
    assert highest >= 256 * MIB
