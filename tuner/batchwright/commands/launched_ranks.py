"""Fork the ranks that a launcher starts from a process that has executed the imports of their program. No torch.

`accelerate launch` and `torchrun` start the program that trains in processes of its own, which would import torch anew
in every probe. The launcher runs as ever, with a rendezvous of its own in each probe. A process that it starts asks the
server of the ranks for a fork (``injected.standing_in``), which that server refuses where a fork would not be alike.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from batchwright.commands.injected import standing_in
from batchwright.commands.launching import Launch, find_interpreter

RANKS_VARIABLE = "BATCHWRIGHT_RANK_SERVER"
_UNBUFFERED = {"torchrun": ("-u",), "deepspeed": ("-u",), "accelerate": ()}
"""Launchers, and the options of Python that they start a rank with."""
_LAUNCHER_MODULES = {"torch.distributed.run": "torchrun", "accelerate.commands.launch": "accelerate"}
_ON_CPU = {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"}
"""Variables that `accelerate launch --cpu` sets (accelerate 1.15)."""
_THREADS = "OMP_NUM_THREADS"
"""A variable that launchers set to 1 where it is not set: torchrun for several ranks, accelerate for one too."""
_LONGEST_ADDRESS = 100
"""Bytes; an address of a Unix socket has at most 107."""


def expected_rank(launch: Launch, program: str) -> Launch | None:
    """The rank that a known launcher will start, with its figures; none for other commands.

    A rank that then turns out to be another is not forked, so that a wrong expectation costs time alone.

    Args:
        launch: the launch of the command.
        program: the file of its program.
    """
    words = list(launch["argv"])
    launcher = _launcher(words)
    interpreter = find_interpreter(program, launch["environment"])
    if launcher is None or interpreter is None:
        return None
    folder = Path(launch["working_directory"])
    places = (number for number, word in enumerate(words) if number and word.endswith(".py"))
    place = next((number for number in places if (folder / words[number]).is_file()), None)
    if place is None:
        return None
    variables = _variables_of(launcher, words[:place], launch["environment"])
    argv = [interpreter, *_UNBUFFERED[launcher], *words[place:]]
    return {**launch, "argv": argv, "environment": {**launch["environment"], **variables}}


def _variables_of(launcher: str, words: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a launcher sets for its ranks, as far as libraries read them at their start.

    Args:
        launcher: its name.
        words: the command, up to the script.
        environment: the variables of the launcher.
    """
    variables = {**_ON_CPU} if launcher == "accelerate" and "--cpu" in words else {}
    options = " ".join(words).replace("_", "-").replace("=", " ").split()
    alone = launcher == "torchrun" and ("--nproc-per-node" not in options or "--nproc-per-node 1" in " ".join(options))
    if _THREADS not in environment and launcher in {"torchrun", "accelerate"} and not alone:
        variables[_THREADS] = "1"
    return variables


def _launcher(words: Sequence[str]) -> str | None:
    """The name of the launcher that a command starts; none for another program."""
    name = Path(words[0]).name
    if name.startswith("python") and len(words) > 2 and words[1] == "-m":  # noqa: PLR2004 - and a module
        return _LAUNCHER_MODULES.get(words[2])
    return name if name in _UNBUFFERED else None


def refused_rank(folder: Path, processes: Iterable[int], launch: Launch) -> Launch | None:
    """The launch of a rank of an ended probe that had to start anew, for a server that is alike; none without one.

    Args:
        folder: the folder of the probe.
        processes: the processes that have trained.
        launch: the launch of the command.
    """
    for process in processes:
        path = folder / standing_in.REQUESTS / f"{process}.json"
        with suppress(OSError, ValueError):
            wanted: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            argv = [wanted["alike"]["interpreter"][0], *wanted["argv"][1:]]
            fields = {"argv": argv, "working_directory": wanted["working_directory"]}
            return {**launch, **fields, "environment": wanted["environment"]}
    return None


def may_listen(folder: Path) -> bool:
    """Return whether sockets in a folder have addresses that are short enough."""
    return len(os.fsencode(folder)) < _LONGEST_ADDRESS - len("/ranks-1/socket")
