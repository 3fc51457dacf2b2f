"""Classification of host failures as opposed to failures of the work, and the check of a host."""

import errno
import os
from pathlib import Path

import pytest

from batchwright.errors import (
    CheckpointError,
    FieldProblem,
    HostFailureError,
    HubUnavailableError,
    ProbeError,
    SpecError,
    StorageError,
)
from batchwright.system.host_failures import (
    Cause,
    DiskUsage,
    check_host,
    disk_usage_of,
    host_failure_of,
    is_filled_by_run,
)
from tests.support.scarce import descriptors_used_up, fill, small_disk

MIB = 1024**2


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (errno.ENOSPC, Cause.DISK_FULL),
        (errno.EDQUOT, Cause.DISK_FULL),
        (errno.EROFS, Cause.READ_ONLY),
        (errno.EIO, Cause.INPUT_OUTPUT),
        (errno.EMFILE, Cause.DESCRIPTORS),
        (errno.ENFILE, Cause.DESCRIPTORS),
        (errno.EAGAIN, Cause.PROCESSES),
        (errno.ENOMEM, Cause.MEMORY),
        (errno.EACCES, Cause.PERMISSION),
        (errno.EPERM, Cause.PERMISSION),
    ],
)
def test_system_errors_of_a_host_are_recognised(number: int, cause: Cause) -> None:
    """The errno decides, and the message names the file."""
    found = host_failure_of(OSError(number, os.strerror(number), "/runs/job"))
    assert found is not None
    assert found.cause is cause
    assert found.message == f"{os.strerror(number)} (/runs/job)"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (RuntimeError("can't start new thread"), Cause.PROCESSES),
        (MemoryError(), Cause.MEMORY),
        (RuntimeError("unable to write to file: No space left on device (28)"), Cause.DISK_FULL),
        (StorageError("the disk is full", errno.ENOSPC, 5), Cause.DISK_FULL),
        (HostFailureError("device", "cuda:0 is gone"), Cause.DEVICE),
        (HubUnavailableError([FieldProblem("model.pretrained", "does not answer")]), Cause.HUB),
    ],
)
def test_errors_without_a_number_are_recognised(error: Exception, cause: Cause) -> None:
    """The message or the class decides."""
    found = host_failure_of(error)
    assert found is not None
    assert found.cause is cause


def test_an_nvml_error_is_a_device_failure() -> None:
    """Any error of NVML counts as a failure of the device."""
    pynvml = pytest.importorskip("pynvml")
    found = host_failure_of(pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST))
    assert found is not None
    assert found.cause is Cause.DEVICE


@pytest.mark.parametrize(
    "error",
    [
        ValueError("No space left on device"),
        SpecError([], "spec"),
        OSError(errno.E2BIG, os.strerror(errno.E2BIG)),
        CheckpointError("belongs to another run"),
        RuntimeError("shape mismatch"),
    ],
)
def test_failures_of_the_work_are_not_host_failures(error: Exception) -> None:
    """Errors that would occur on any host are not classified."""
    assert host_failure_of(error) is None


def test_the_cause_of_an_error_counts_and_its_context_does_not() -> None:
    """The error of ``raise ... from`` is the cause; the context is only an earlier error."""
    lack = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    caused, after = ProbeError("the fork server did not start"), ProbeError("something else")
    caused.__cause__ = after.__context__ = lack
    assert host_failure_of(caused) is not None
    assert host_failure_of(after) is None


# --- looking at the host ---


def test_a_healthy_host_passes_the_check(tmp_path: Path) -> None:
    """The check creates missing folders, and leaves no file in them."""
    assert check_host([tmp_path / "runs", tmp_path]) is None
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_full_disk_and_its_recovery_are_detected(tmp_path: Path) -> None:
    """The message names the folder."""
    with small_disk(tmp_path / "runs", MIB) as runs:
        filler = fill(runs)
        found = check_host([runs])
        assert found is not None
        assert found.cause is Cause.DISK_FULL
        assert str(runs) in found.message
        filler.unlink()
        assert check_host([runs]) is None


def test_a_lack_of_descriptors_is_detected(tmp_path: Path) -> None:
    """The check passes once there are descriptors again."""
    with descriptors_used_up(spare=3):
        found = check_host([tmp_path])
    assert found is not None
    assert found.cause is Cause.DESCRIPTORS
    assert check_host([tmp_path]) is None


def test_a_folder_that_cannot_be_created_is_detected(tmp_path: Path) -> None:
    """A file has the folder's name."""
    (tmp_path / "data").touch()
    found = check_host([tmp_path / "data" / "runs"])
    assert found is not None
    assert found.cause is Cause.MISSING
    assert str(tmp_path / "data" / "runs") in found.message


def test_the_space_that_work_needs_is_checked(tmp_path: Path) -> None:
    """A disk with too little free space counts as full."""
    found = check_host([tmp_path], needed_bytes=2**60)
    assert found is not None
    assert (found.cause, found.needed_bytes) == (Cause.DISK_FULL, 2**60)


# --- who filled the disk ---


def test_the_disk_usage_of_a_folder_is_measured(tmp_path: Path) -> None:
    """The folder's own files count, also those in subfolders."""
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "file").write_bytes(bytes(MIB))
    room = disk_usage_of(tmp_path)
    assert room.own >= MIB
    assert room.total >= room.free > 0


def test_a_run_whose_checkpoints_fill_the_disk_is_at_fault() -> None:
    """The run had enough space, and no other files grew."""
    assert is_filled_by_run(DiskUsage(100, 60, 0), DiskUsage(100, 10, 50), needed_bytes=25)


def test_a_resumed_run_that_uses_most_of_a_full_disk_is_at_fault() -> None:
    """The run has failed for its own files before, and no space was freed."""
    assert is_filled_by_run(DiskUsage(100, 10, 50), DiskUsage(100, 10, 50), needed_bytes=25)


def test_a_run_that_could_never_fit_is_at_fault() -> None:
    """A single write of the run is larger than the disk."""
    assert is_filled_by_run(DiskUsage(100, 100, 0), DiskUsage(100, 100, 0), needed_bytes=101)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (DiskUsage(100, 0, 0), DiskUsage(100, 0, 0)),  # full before it began
        (DiskUsage(100, 60, 0), DiskUsage(100, 5, 25)),  # others took more meanwhile
        (DiskUsage(900, 800, 0), DiskUsage(130, 0, 30)),  # the disk itself has shrunk
        (DiskUsage(100, 20, 0), DiskUsage(100, 20, 0)),  # too little room from the start, others have the rest
        (DiskUsage(100, 0, 40), DiskUsage(100, 0, 40)),  # resumed on a disk that was full by then
    ],
)
def test_a_disk_that_others_have_filled_is_no_fault_of_the_run(before: DiskUsage, now: DiskUsage) -> None:
    """The run waits for room instead of failing."""
    assert not is_filled_by_run(before, now, needed_bytes=25)
