"""Memory devices: one contract for all of them, and the inventory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchwright.device_traits import CPU_ENVIRONMENT
from batchwright.errors import DeviceError
from batchwright.hardware import inventory
from batchwright.hardware.memory_devices.cuda import limit_less_context
from batchwright.units import format_bytes, parse_bytes
from tests.support import device_contract
from tests.support.paths import SUPPORT

MIB = 1024**2


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def outcomes(request: pytest.FixtureRequest) -> dict[str, str]:
    """Outcomes of the checks of the contract on a device."""
    command = [sys.executable, str(SUPPORT / "device_contract.py"), request.param]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", device_contract.CHECKS)
def test_the_contract_of_a_memory_device(outcomes: dict[str, str], name: str) -> None:
    """Every device passes every check."""
    assert outcomes[name] == "ok"


def test_a_limit_leaves_the_allocator_what_the_context_does_not_take() -> None:
    """A limit that leaves no room for a segment is an error with both figures, never a limit of a byte."""
    assert limit_less_context(500 * MIB, 450 * MIB, "cuda:0") == 50 * MIB
    for limit in (1, 450 * MIB, 451 * MIB):
        with pytest.raises(DeviceError, match=r"after the margin.*context .* cuda:0 takes 450\.00 MiB .*Raise the"):
            limit_less_context(limit, 450 * MIB, "cuda:0")


def test_the_inventory_ends_with_the_cpu() -> None:
    """The inventory works without a GPU, and the CPU has memory."""
    found = inventory.devices()
    assert found[-1].id == "cpu"
    assert found[-1].total_bytes > 2**28
    assert inventory.find_device(None) == found[0]


def test_an_unknown_device_is_answered_with_those_there_are() -> None:
    """The message lists what to choose from."""
    with pytest.raises(DeviceError, match=r"no device cuda:63; this host has .*cpu"):
        inventory.find_device("cuda:63")


def test_a_containers_limit_counts_as_the_hosts_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smaller of host and container; `max` is no limit."""
    (tmp_path / "unlimited").write_text("max\n")
    (tmp_path / "limited").write_text(f"{2**27}\n")
    monkeypatch.setattr(inventory, "cgroup_files", lambda *_: [tmp_path / "unlimited", tmp_path / "none"])
    assert inventory.cpu().total_bytes > 2**28
    monkeypatch.setattr(inventory, "cgroup_files", lambda *_: [tmp_path / "unlimited", tmp_path / "limited"])
    assert inventory.cpu().total_bytes == 2**27


@pytest.mark.parametrize(
    ("text", "number"),
    [("1GiB", 2**30), ("1.5 gib", 3 * 2**29), ("800MB", 800_000_000), ("12345", 12345), ("2k", 2000), ("7B", 7)],
)
def test_sizes_are_read(text: str, number: int) -> None:
    """Binary units with an i, decimal ones without."""
    assert parse_bytes(text) == number


@pytest.mark.parametrize("text", ["", "lots", "-1GiB", "1 XiB", "GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    """The error has an example of a valid value."""
    with pytest.raises(ValueError, match="8GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (2**40, "1.00 TiB"), (10**400, "inf TiB")]
)
def test_sizes_are_written(number: int, text: str) -> None:
    """Two digits after the point, and binary units."""
    assert format_bytes(number) == text


GROWTHS = """
import ctypes, os, torch
from batchwright.hardware.memory_devices.cpu import CpuDevice
device, malloc = CpuDevice(torch.device("cpu")), ctypes.CDLL(None).malloc
def in_heap(kibibytes): return [malloc(16 * 1024) for _ in range(kibibytes // 16)]
def in_arenas(kibibytes): return [(index, *range(50)) for index in range(2 * kibibytes)]
for hold in (in_heap, in_arenas):
    for kibibytes in range(0, 2048, 512):
        if os.fork() == 0:
            before = hold(kibibytes)
            device.limit(2**30)
            after = hold(12 * 1024)
            print(hold.__name__, device.peaks().process_bytes, flush=True)
            os._exit(0)
        os.wait()
"""


def test_memory_grows_alike_whatever_was_held_before() -> None:
    """The heap by steps of 2 MiB, Python's arenas by 1 MiB, of which the last ones were begun somewhere."""
    run = subprocess.run(
        [sys.executable, "-c", GROWTHS],
        env={**os.environ, **CPU_ENVIRONMENT},
        capture_output=True,
        text=True,
        check=True,
    )
    growths = run.stdout.splitlines()
    assert (len(growths), len(set(growths))) == (8, 2), growths
