"""A Slurm of two nodes on this host, from Debian's packages that `make test-exports` unpacked: nothing is installed.

Both nodes have names that this host resolves to itself, so that their ranks can meet.
"""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.support.service.processes import processes_with

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
SlurmdSpoolDir={spool}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
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


CONTROLLER = "controller"


class Slurm:
    """Slurm's commands, with their configuration."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = root
        self._folder = folder
        self._spool = Path(tempfile.gettempdir(), f"slurm-{uuid.uuid4().hex[:8]}")
        """Short: the daemons have sockets here, whose paths the kernel limits to 107 characters."""
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
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
                spool=self._spool,
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
        with ExitStack() as stack:
            self._spool.mkdir()
            stack.callback(shutil.rmtree, self._spool)
            for name in (CONTROLLER, *self.nodes):
                self.start(name)
                stack.callback(self._end, name)
            self._wait_for_nodes()
            yield

    @property
    def nodes(self) -> tuple[str, str]:
        """The names of the nodes."""
        return socket.gethostname(), "localhost"

    def break_launches(self) -> None:
        """Have every node fail to launch jobs: no folder for them can be made."""
        for name in self.nodes:
            spool = self._spool / name
            shutil.rmtree(spool)
            spool.touch()

    def start(self, name: str) -> None:
        """Start the controller, or the daemon of a node."""
        programs = self.root / "usr" / "sbin"
        command = [f"{programs}/slurmctld-wlm", "-D"]
        if name != CONTROLLER:
            command = [f"{programs}/slurmd-wlm", "-D", "-d", f"{programs}/slurmstepd-wlm", "-N", name]
        self._daemons[name] = subprocess.Popen(
            command, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def kill(self, name: str) -> None:
        """Kill the controller, or a node with all that runs on it."""
        self._daemons[name].kill()
        self._daemons[name].wait()
        if name != CONTROLLER:
            ran = processes_with(f"SLURMD_NODENAME={name}\0") & processes_with(self.environment["SLURM_CONF"])
            for process in ran | {parent for parent in map(_parent, ran) if _is_of_slurm(parent)}:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    def _end(self, name: str) -> None:
        self._daemons[name].terminate()
        self._daemons[name].wait()

    def _wait_for_nodes(self) -> None:
        end = time.monotonic() + 60
        while self.run("sinfo", "-h", "-N", "-o", "%t", folder=self._folder).stdout.split() != ["idle", "idle"]:
            if time.monotonic() > end:
                raise TimeoutError("Slurm's nodes are not idle within 60 s")
            time.sleep(0.2)


def _parent(process: int) -> int:
    """The parent of a process; 1 when it has ended."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 1


def _is_of_slurm(process: int) -> bool:
    try:
        return b"slurmstepd" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
