"""The environment of a command whose processes load the injected code. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tuner.commands.templates import RenderedCommand
from tuner.schemas.results import DeviceInfo

_STARTUP = Path(__file__).parent / "injected" / "startup"
_FOLDER_VARIABLE = "BATCHWRIGHT_PROBE_FOLDER"


def injected_environment(
    inherited: Mapping[str, str], command: RenderedCommand, device: DeviceInfo, folder: Path, *, has_one_card: bool
) -> dict[str, str]:
    """The whole environment of a command.

    Args:
        inherited: the variables that the command's own are added to.
        command: the command.
        device: the device of the run.
        folder: the folder of the events.
        has_one_card: whether the command has one rank, which sees no other card than the device.
    """
    environment = {**inherited, **command.environment, _FOLDER_VARIABLE: str(folder)}
    if device.kind == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    elif has_one_card:
        environment["CUDA_VISIBLE_DEVICES"] = _visible_card(device.id, environment)
    before = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([str(_STARTUP), *([before] if before else [])])
    return environment


def processes_of(folder: Path) -> list[int]:
    """The processes whose environment names a folder of events, wherever in the tree of processes they are."""
    mark = f"{_FOLDER_VARIABLE}={folder}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is another user's
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def _visible_card(device: str, environment: Mapping[str, str]) -> str:
    """The entry of a card for the variable that hides the others."""
    index = int(device.rpartition(":")[2])
    visible = [part.strip() for part in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    return visible[index] if index < len(visible) else str(index)
