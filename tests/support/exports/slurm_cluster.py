"""A Slurm of two nodes on this host, from Debian's packages that `make test-exports` unpacked: nothing is installed.

Both nodes have names that this host resolves to itself, so that their ranks can meet.
"""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
PluginDir={plugins}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
MpiDefault=none
GresTypes=gpu
MessageTimeout=5
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={host_port} CPUs=16 RealMemory=8000
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 Port={localhost_port} CPUs=16 RealMemory=8000
PartitionName=team-a Nodes=ALL Default=YES State=UP
"""


class Slurm:
    """Slurm's commands, with their configuration."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = root
        self._folder = folder
        plugins = next(root.glob("usr/lib/*/slurm-wlm"))
        libraries = f"{plugins}:{plugins.parent}"
        self.environment = {
            **os.environ,
            "PATH": f"{root}/usr/bin:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": libraries,
            "SLURM_CONF": str(folder / "slurm.conf"),
        }
        ports = {name: _free_port() for name in ("controller_port", "host_port", "localhost_port")}
        (folder / "state").mkdir()
        (folder / "slurm.conf").write_text(
            _CONFIGURATION.format(
                host=socket.gethostname(),
                user=pwd.getpwuid(os.getuid()).pw_name,
                plugins=plugins,
                folder=folder,
                **ports,
            )
        )

    def run(self, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """Run one of its commands."""
        return subprocess.run(
            words, cwd=folder, env=self.environment, capture_output=True, text=True, timeout=240, check=False
        )

    @contextmanager
    def started(self) -> Iterator[None]:
        """The controller and a daemon for each node, until the end of the block."""
        programs = self.root / "usr" / "sbin"
        daemon = [f"{programs}/slurmd-wlm", "-D", "-d", f"{programs}/slurmstepd-wlm", "-N"]
        commands = [
            [f"{programs}/slurmctld-wlm", "-D"],
            *([*daemon, item] for item in (socket.gethostname(), "localhost")),
        ]
        with ExitStack() as stack:
            for command in commands:
                process = subprocess.Popen(
                    command, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
                stack.callback(process.wait)
                stack.callback(process.terminate)
            self._wait_for_nodes()
            yield

    def _wait_for_nodes(self) -> None:
        end = time.monotonic() + 60
        while self.run("sinfo", "-h", "-N", "-o", "%t", folder=self._folder).stdout.split() != ["idle", "idle"]:
            if time.monotonic() > end:
                raise TimeoutError("Slurm's nodes are not idle within 60 s")
            time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
