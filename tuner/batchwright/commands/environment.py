"""The environment of a command whose processes load the injected code. No torch."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from getpass import getuser
from pathlib import Path

from batchwright.device_traits import DeviceKind, traits_of, visible_devices
from batchwright.hardware.inventory import devices
from batchwright.schemas.results import DeviceInfo
from batchwright.system import startup
from batchwright.system.processes import propagated_environment

_FOLDER_VARIABLE = "BATCHWRIGHT_PROBE_FOLDER"


def probe_environment(
    of_command: Mapping[str, str], kind: DeviceKind, folder: Path, cards: Sequence[str] = ()
) -> dict[str, str]:
    """The whole environment of a command in a probe.

    Args:
        of_command: the command's own variables.
        kind: the kind of the device.
        folder: the folder of the probe.
        cards: the only cards that the command sees; empty for all.
    """
    compiled_code = str(Path(tempfile.gettempdir()) / f"torchinductor_{getuser()}")  # torch's default, outside TMPDIR
    inherited = {
        **os.environ,
        **propagated_environment(),
        **traits_of(kind).environment_from(os.environ),
        **traits_of(kind).command_environment,
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", compiled_code),
        "TMPDIR": str(folder / "tmp"),
    }
    return injected_environment({**inherited, **of_command}, kind, folder, cards)


def injected_environment(
    variables: Mapping[str, str], kind: DeviceKind, folder: Path, cards: Sequence[str]
) -> dict[str, str]:
    """Add to the environment of a command what has its processes load the injected code.

    Args:
        variables: the environment, with the command's own variables.
        kind: the kind of the device.
        folder: the folder of the events.
        cards: the only cards that the command sees; empty for all.
    """
    environment = {**variables, _FOLDER_VARIABLE: str(folder)}
    if cards or not traits_of(kind).is_gpu:
        environment |= visible_devices(cards, environment)
    before = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(startup.__file__).parent), *([before] if before else [])])
    return environment


def cards_of_host(device: DeviceInfo) -> dict[str, DeviceInfo]:
    """Return the GPUs of this host by their ids, if the device of a run is one; else none."""
    return {card.id: card for card in devices() if card.traits.is_gpu} if device.traits.is_gpu else {}


def cards_of_ranks(device: DeviceInfo, world_size: int, rank_devices: Sequence[str]) -> tuple[str, ...]:
    """The cards that a command sees, a card for each rank in their order; empty for all cards.

    Args:
        device: the device of the run.
        world_size: the ranks that the command starts.
        rank_devices: the devices that the run holds, of which the first ``world_size`` are taken; may be too few.
    """
    if not device.traits.is_gpu:
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
