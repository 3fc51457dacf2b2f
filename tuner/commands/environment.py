"""The environment of a command whose processes load the injected code. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tuner.commands.templates import RenderedCommand
from tuner.schemas.results import DeviceInfo

_STARTUP = Path(__file__).parent / "injected" / "startup"
_FOLDER_VARIABLE = "BATCHWRIGHT_PROBE_FOLDER"


def injected_environment(
    inherited: Mapping[str, str], command: RenderedCommand, device: DeviceInfo, folder: Path, cards: Sequence[str]
) -> dict[str, str]:
    """The whole environment of a command.

    Args:
        inherited: the variables that the command's own are added to.
        command: the command.
        device: the device of the run.
        folder: the folder of the events.
        cards: the only cards that the command sees; empty for all.
    """
    environment = {**inherited, **command.environment, _FOLDER_VARIABLE: str(folder)}
    if device.kind == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    elif cards:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(_visible_card(card, environment) for card in cards)
    before = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([str(_STARTUP), *([before] if before else [])])
    return environment


def cards_of_ranks(device: DeviceInfo, world_size: int, rank_devices: Sequence[str]) -> tuple[str, ...]:
    """The cards that a command sees, a card for each rank in their order; empty for all cards.

    Args:
        device: the device of the run.
        world_size: the ranks that the command starts.
        rank_devices: the devices that the run holds, of which the first ``world_size`` are taken; may be too few.
    """
    if device.kind != "cuda":
        return ()
    if world_size == 1:
        return (device.id,)
    return tuple(rank_devices[:world_size]) if len(rank_devices) >= world_size else ()


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
