"""What every memory device must do. Each check is forked from a process that has torch imported and nothing else.

Run as ``python device_contract.py DEVICE``: prints, for each check, ``ok`` or the traceback.
"""

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from batchwright.device_traits import CPU_ENVIRONMENT
from batchwright.errors import DeviceError, OutOfMemoryError
from batchwright.hardware.memory_devices.base import MemoryDevice
from batchwright.hardware.memory_devices.factory import open_device

MIB = 1024**2


def limit(device: MemoryDevice, mebibytes: int) -> None:
    """Leave tensors this much: a card's limit also covers its context, of hundreds of MiB."""
    device.limit(mebibytes * MIB + (device.context_bytes() or 0))


def take(device: MemoryDevice, mebibytes: int) -> torch.Tensor:
    """A tensor of this size, really touched."""
    return torch.ones(mebibytes * MIB, dtype=torch.uint8, device=device.torch_device)


def failure_of(device: MemoryDevice, mebibytes: int) -> Exception | None:
    """What taking this much raises."""
    try:
        take(device, mebibytes)
    except RuntimeError as error:
        return error
    return None


def check_a_limit_is_hard(device: MemoryDevice) -> None:
    """Less fits, more fails, and the failure is translated; afterwards less fits again."""
    limit(device, 256)
    take(device, 200)
    failure = failure_of(device, 300)
    assert failure is not None
    assert isinstance(device.translate(failure), OutOfMemoryError)
    del failure
    device.release()
    take(device, 200)


def check_other_errors_are_not_translated(device: MemoryDevice) -> None:
    """A shape mismatch stays what it is."""
    try:
        take(device, 1) @ take(device, 2)
    except RuntimeError as error:
        assert device.translate(error) is None  # noqa: PT017 - no pytest in a forked check
    else:
        raise AssertionError("shapes that do not match multiplied")


def check_a_second_limit_is_refused(device: MemoryDevice) -> None:
    """A limit is set once in a process."""
    limit(device, 256)
    try:
        limit(device, 128)
    except DeviceError as error:
        assert "already" in str(error)  # noqa: PT017 - see above
    else:
        raise AssertionError("a second limit was accepted")


def check_a_lifted_limit_is_gone(device: MemoryDevice) -> None:
    """So that a process that ran into it can still report."""
    limit(device, 128)
    assert failure_of(device, 200) is not None
    device.lift_limit()
    take(device, 200)


def check_a_stretch_without_limit_ends(device: MemoryDevice) -> None:
    """The same limit holds again after it."""
    limit(device, 128)
    with device.without_limit():
        held = take(device, 200)
        assert held.numel() == 200 * MIB
        del held
    assert failure_of(device, 200) is not None
    assert failure_of(device, 100) is None


def check_peaks_hold_what_was_taken(device: MemoryDevice) -> None:
    """The peak counts what has been given back, the use does not."""
    limit(device, 512)
    device.reset_peaks()
    before = device.used_bytes()
    held = take(device, 100)
    assert device.used_bytes() - before >= 100 * MIB
    del held
    device.release()
    assert device.used_bytes() - before < 10 * MIB
    assert 100 * MIB <= device.peak_bytes() < 150 * MIB


def check_a_fit_never_exceeds_its_limit(device: MemoryDevice) -> None:
    """The peak is measured as the limit counts."""
    limit(device, 256)
    for size in range(150, 400, 5):
        if failure_of(device, size) is not None:
            break
    assert 200 * MIB < device.peak_bytes() <= 256 * MIB


CHECKS: dict[str, Callable[[MemoryDevice], None]] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}


def outcome(check: Callable[[MemoryDevice], None], identifier: str, folder: Path) -> str:
    """Run a check in a forked process; ``ok``, or its traceback."""
    note = folder / check.__name__
    pid = os.fork()
    if pid == 0:
        text = "ok"
        device = None
        try:
            device = open_device(identifier)
            check(device)
        except BaseException:  # noqa: BLE001 - whatever it is, it is the outcome
            text = traceback.format_exc()
        if device is not None:
            device.lift_limit()
        note.write_text(text)
        os._exit(0)
    os.waitpid(pid, 0)
    return note.read_text() if note.exists() else "the process died"


def main() -> None:
    """Run every check."""
    with tempfile.TemporaryDirectory() as folder:
        outcomes = {name: outcome(check, sys.argv[1], Path(folder)) for name, check in CHECKS.items()}
    print(json.dumps(outcomes))  # noqa: T201 - read by the test


if __name__ == "__main__":
    if os.environ.get("MALLOC_ARENA_MAX") is None:  # glibc reads its settings when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **CPU_ENVIRONMENT})  # noqa: S606
    main()
