"""The agents of a run over several hosts: a ``torchrun`` on each, with a static rendezvous. Never imports torch."""

import os
import re
import signal
import socket
from collections.abc import Mapping
from pathlib import Path

from typing_extensions import override

from batchwright.schemas.base import Document
from batchwright.system.processes import tied
from batchwright.training.launching.rank_processes import RankProcesses, training_command, with_shared_threads
from batchwright.training.launching.run_directory import RunPaths

HOSTS = "BATCHWRIGHT_HOSTS"
"""Variable in which the process that leads on a Ray cluster finds its ``Hosts``, as JSON."""
LOST_HOST_STATUS = os.EX_UNAVAILABLE
"""Exit status of a prefix of ``Hosts`` whose host is gone."""
_CRASH = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\s+exitcode\s*: (-\d+) \(pid")
"""A rank that a signal has ended, in the report that ``torchrun`` writes to the log."""


class Hosts(Document):
    """The hosts that a cluster's engine has given to a run: this one, which leads, and others. All share its folder."""

    address: str
    """Name or address of this host, by which the others reach it."""
    others: tuple[tuple[str, ...], ...]
    """For each other host the words before a command that run it there: with the output, the exit status and the end of
    the process that they start here, which passes SIGTERM on."""

    @property
    def count(self) -> int:
        """Number of hosts."""
        return 1 + len(self.others)


class HostAgents(RankProcesses):
    """One agent per host, each with ``per_host`` ranks.

    Args:
        paths: the run's files, in a folder that the hosts share; all ranks write to the same log.
        per_host: number of ranks of each host.
        environment: environment of every process.
        hosts: the hosts.
    """

    def __init__(self, paths: RunPaths, per_host: int, environment: Mapping[str, str], hosts: Hosts) -> None:
        self._paths = paths
        self._hosts = hosts
        self._log_start = paths.log.stat().st_size if paths.log.exists() else 0
        super().__init__(paths, per_host, environment)

    @override
    def _start(self, paths: RunPaths, count: int, environment: Mapping[str, str], rendezvous: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = int(probe.getsockname()[1])
        for number, prefix in enumerate(((), *self._hosts.others)):
            at = {
                "PET_NODE_RANK": str(number),
                "PET_MASTER_ADDR": self._hosts.address,
                "PET_MASTER_PORT": str(port),
                "PET_LOG_DIR": os.devnull,  # otherwise each start leaves a folder in the host's temporary files
            }
            command = training_command(paths.directory, count, hosts=self._hosts.count)
            setting = ["env", *(f"{name}={value}" for name, value in at.items())]  # on any host
            self._launch(tied([*prefix, *setting, *command]), with_shared_threads(environment, count), paths.log)

    @override
    def crashed(self) -> tuple[int, int] | None:
        """The first rank that an external signal has ended, by the agents' reports; None without one."""
        with self._paths.log.open("rb") as log:
            log.seek(self._log_start)
            found = _CRASH.findall(log.read().decode(errors="replace"))
        ended = ((int(rank), int(code)) for rank, code in found)
        return next((pair for pair in ended if pair[1] != -signal.SIGTERM), None)

    @property
    def lost_host(self) -> int | None:
        """Number of a host that is gone; None without one."""
        return next((number for number, code in enumerate(self.return_codes) if code == LOST_HOST_STATUS), None)
