"""The peak of a training process against the limit of its recommendation, on the CPU."""

import os
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

from batchwright.device_traits import CPU_ENVIRONMENT
from batchwright.integrations.memory_peaks import PeakMeter
from tests.support.factories import recommendation
from tests.support.paths import ROOT

pytestmark = pytest.mark.torch

MIB = 1024**2


def meter(model: nn.Module, limit_bytes: int) -> PeakMeter:
    """A meter of a run on the CPU."""
    return PeakMeter(recommendation(limit_bytes=limit_bytes), model, torch.device("cpu"))


def test_memory_that_was_freed_again_counts() -> None:
    """The peak is the kernel's, between two readings."""
    measured = meter(nn.Linear(2, 2), 1024 * MIB)
    before = measured.peak_bytes()

    torch.ones(64 * MIB, dtype=torch.uint8)

    assert 60 * MIB <= measured.peak_bytes() - before <= 80 * MIB


def test_the_model_counts_and_what_was_resident_before_it_does_not() -> None:
    """As in a probe, whose budget begins before the model is built."""
    held = torch.ones(64 * MIB, dtype=torch.uint8)
    model = nn.Linear(4096, 4096, bias=False)

    peak = meter(model, 1024 * MIB).peak_bytes()

    assert 64 * MIB <= peak <= 80 * MIB
    assert held.numel() == 64 * MIB


def test_a_peak_of_before_the_run_is_forgotten() -> None:
    """Loading a checkpoint may take more than training does."""
    torch.ones(256 * MIB, dtype=torch.uint8)

    assert meter(nn.Linear(2, 2), 1024 * MIB).peak_bytes() <= 64 * MIB


def test_the_figures_are_bytes_and_a_fraction_of_the_limit() -> None:
    """Under the names that trainers log."""
    figures = meter(nn.Linear(1024, 1024), 100 * MIB).figures()

    assert set(figures) == {"memory/peak_resident_bytes", "memory/limit_bytes", "memory/peak_fraction"}
    assert figures["memory/limit_bytes"] == 100 * MIB


def test_a_warning_is_given_once() -> None:
    """Not at every update."""
    measured = meter(nn.Linear(1024, 1024), MIB)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        measured.warn_above_limit()
        measured.warn_above_limit()

    (warning,) = warned
    assert "is above the limit of 1.00 MiB that the micro-batch was found for" in str(warning.message)


def test_a_peak_below_the_limit_is_not_warned_of() -> None:
    """Training within the limit is quiet."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        meter(nn.Linear(2, 2), 1024 * MIB).warn_above_limit()

    assert warned == []


def test_another_allocator_than_that_of_the_probes_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Glibc's variables count only where the process was started with them; others may be set in the program."""
    found = recommendation().model_copy(
        update={"environment": {"MALLOC_ARENA_MAX": "1", "OMP_WAIT_POLICY": "ACTIVE", "MKL_DISABLE_FAST_MM": "1"}}
    )
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    monkeypatch.setenv("MKL_DISABLE_FAST_MM", "1")
    with pytest.warns(UserWarning, match=r"more memory than was measured. .* env MALLOC_ARENA_MAX=1 python"):
        PeakMeter(found, nn.Linear(2, 2), torch.device("cpu"))


def test_a_process_with_the_allocator_of_the_probes_is_not_warned() -> None:
    """As started by an export."""
    program = (
        "import torch; from batchwright.integrations.memory_peaks import PeakMeter\n"
        "from tests.support.factories import recommendation\n"
        f"found = recommendation().model_copy(update={{'environment': {CPU_ENVIRONMENT!r}}})\n"
        "PeakMeter(found, torch.nn.Linear(2, 2), torch.device('cpu'))"
    )
    command = [sys.executable, "-W", "error::UserWarning", "-c", program]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | CPU_ENVIRONMENT)
