"""Tests of ``batchwright.hardware.memory_in_use``: the memory of this host, and of a card whose driver is scripted."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from batchwright.hardware import inventory, memory_in_use, nvml
from batchwright.hardware.memory_in_use import MemoryInUse
from batchwright.schemas.results import DeviceInfo

MIB = 1024**2
HELD_BYTES = 96 * MIB
HOLDER = f"held = bytearray(b'x') * {HELD_BYTES}; print('ready', flush=True); input()"
CARD = DeviceInfo(id="cuda:0", kind="cuda", name="a card", total_bytes=1000)


@contextmanager
def holder(*, nested: bool) -> Iterator[int]:
    """A process that holds memory, as a child of this one or of a shell that is; gives its id."""
    command = [sys.executable, "-c", HOLDER]
    words = ["sh", "-c", '"$@"; true', "sh", *command] if nested else command
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process.pid
        process.communicate("\n")


@pytest.mark.parametrize("nested", [False, True])
def test_memory_of_descendants_is_own(*, nested: bool) -> None:
    """Memory of a child, or of its child, counts as in use and as own."""
    host = inventory.cpu()
    before = memory_in_use.memory_in_use(host)
    with holder(nested=nested) as pid:
        during = memory_in_use.memory_in_use(host)
        assert pid in memory_in_use.descendants()
    assert before is not None
    assert during is not None
    assert before.own_bytes is not None
    assert during.own_bytes is not None
    assert 0 < before.own_bytes <= before.used_bytes <= host.total_bytes
    assert HELD_BYTES <= during.own_bytes - before.own_bytes < 2 * HELD_BYTES
    assert during.own_bytes <= during.used_bytes <= host.total_bytes


def test_a_container_has_the_figures_of_its_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group whose limit is the memory of the device counts, less the cache that the kernel would drop."""
    (outer := tmp_path / "outer").mkdir()
    (inner := outer / "inner").mkdir()
    for folder, limit, current in ((outer, "max", 9 * MIB), (inner, str(1000 * MIB), 700 * MIB)):
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text(str(current))
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {300 * MIB}\n")

    def files(unified: str, legacy: str) -> list[Path]:
        del legacy
        return [folder / unified for folder in (inner, outer)]

    monkeypatch.setattr(memory_in_use, "cgroup_files", files)
    container = inventory.cpu().model_copy(update={"total_bytes": 1000 * MIB})
    found = memory_in_use.memory_in_use(container)
    assert found is not None
    assert found.used_bytes == 400 * MIB


@pytest.fixture
def script_driver(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the driver report a card of which 600 bytes are in use, and the processes on it with what they hold."""

    def script(processes: dict[int, int | None] | Exception, *, in_container: bool) -> None:
        def listed(_handle: object) -> list[SimpleNamespace]:
            if isinstance(processes, Exception):
                raise processes
            return [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in processes.items()]

        monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
        monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", listed)
        monkeypatch.setattr(nvml, "_visible_handles", lambda: ["a handle"])
        monkeypatch.setattr(nvml, "_used_and_total_bytes", lambda _handle: (600, 1000))
        monkeypatch.setattr(memory_in_use, "_has_ids_of_host", lambda: not in_container)

    return script


OWN, OTHER = os.getpid(), 1
UNSUPPORTED = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.mark.parametrize(
    ("processes", "in_container", "own"),
    [
        ({OWN: 200, OTHER: 300}, False, 200),
        ({OWN: 200, OTHER: 300}, True, 200),
        ({OTHER: 600}, False, 0),
        ({OTHER: 600}, True, None),
        ({OWN: None}, False, None),
        ({OWN: 900}, False, 600),
        (UNSUPPORTED, False, None),
    ],
)
def test_memory_of_a_card_is_divided_by_processes(
    script_driver: Callable[..., None],
    processes: dict[int, int | None] | Exception,
    in_container: bool,  # noqa: FBT001 - a parameter of the test
    own: int | None,
) -> None:
    """In a container, ids of which none is ours tell nothing; a driver that does not say is not guessed for."""
    script_driver(processes, in_container=in_container)
    assert memory_in_use.memory_in_use(CARD) == MemoryInUse(600, own)


def test_a_card_that_is_gone_has_no_reading(script_driver: Callable[..., None]) -> None:
    """Neither an id beyond the listed ones nor an error of the driver raises."""
    script_driver({}, in_container=False)
    assert memory_in_use.memory_in_use(CARD.model_copy(update={"id": "cuda:7"})) is None
