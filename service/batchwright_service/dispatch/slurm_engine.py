"""Slurm as the engine: submitit writes and submits the scripts, Slurm's own commands list and cancel jobs.

A node is one device on the CPU, or as many GPUs as it has (``gres``). Slurm keeps ended jobs for some minutes
(``MinJobAge``); no accounting database is needed.
"""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

from submitit import SlurmExecutor
from submitit.helpers import CommandFunction
from typing_extensions import override

from batchwright.device_traits import DeviceKind, traits_of
from batchwright_service.dispatch.cluster_engine import (
    Engine,
    EngineError,
    EngineJob,
    JobName,
    JobState,
    NewJob,
    Node,
)

_SECONDS = 60.0
_PENDING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "REQUEUE_FED"}
_RUNNING = {"RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "SUSPENDED", "STOPPED", "RESIZING"}
_DEAD = re.compile(r"down|drain|fail|unk|future|power|boot|\*")
_JOB_FIELDS = "%i|%j|%T|%x|%r"
_NODE_FIELDS = "%N|%T|%G"
_UNLIMITED_MINUTES = 0
"""Slurm's value for a job without a limit of its own, where the partition has none."""


class SlurmEngine(Engine):
    """The Slurm cluster of this host.

    Args:
        folder: a folder that all nodes share, for the files of the jobs.
        command: the command of Batchwright on the nodes.
    """

    name = "slurm"

    def __init__(self, folder: Path, command: str) -> None:
        self.address = str(folder)
        self._folder = folder
        self._command = shlex.split(command)
        self._known: frozenset[str] = frozenset()

    @override
    def submit(self, job: NewJob) -> None:
        """Submit; jobs of one name run one after another, so that a second one finds the work taken or ended.

        Slurm requeues none: it would hold a job whose launch failed until someone releases it, and the dispatcher
        submits the work again in any case.
        """
        executor = SlurmExecutor(folder=self._folder)
        excluded = ",".join(sorted(self._known - job.nodes))
        options = {"dependency": "singleton", "no_requeue": True} | ({"exclude": excluded} if excluded else {})
        devices = {"gres": f"gpu:{job.devices}"} if traits_of(job.kind).is_gpu else {"exclusive": True}
        executor.update_parameters(
            job_name=str(job.name),
            time=_UNLIMITED_MINUTES,
            nodes=job.hosts,
            use_srun=job.hosts == 1,  # of several nodes the first one's process starts steps on the others
            ntasks_per_node=1,
            additional_parameters=options,
            **(devices if job.devices else {}),
        )
        try:
            executor.submit(CommandFunction([*self._command, *job.arguments], verbose=False))
        except Exception as error:
            raise EngineError(f"sbatch: {error}") from error

    @override
    def jobs(self) -> list[EngineJob]:
        jobs = []
        allowed: dict[str, frozenset[str] | None] = {"(null)": None, "": None}
        for line in _run("squeue", "--noheader", "--states=all", f"--format={_JOB_FIELDS}").splitlines():
            identifier, text, state, excluded, reason = line.split("|", 4)
            if (name := JobName.parse(text)) is not None:
                if excluded not in allowed:
                    allowed[excluded] = self._known.difference(_run("scontrol", "show", "hostnames", excluded).split())
                message = self._message(identifier, state, reason)
                jobs.append(EngineJob(identifier, name, _state(state), message, allowed[excluded]))
        return jobs

    def _message(self, job_id: str, state: str, reason: str) -> str:
        """Return why a job waits; of one that has failed the state and the end of its log."""
        if _state(state) is not JobState.ENDED:
            return f"Slurm: {reason}"
        logs = [self._folder / f"{job_id}_0_log.err", self._folder / f"{job_id}_log.err"]
        text = next((log.read_text(errors="replace") for log in logs if log.is_file()), "")
        return f"Slurm: {state} ({reason}) {text[-1000:]}".strip()

    @override
    def stop(self, job_id: str) -> None:
        for signal in ((), ("--signal=KILL", "--full")):
            _run("scancel", "--quiet", *signal, job_id, may_fail_silently=True)  # as it does for a job that has ended

    @override
    def forget(self, job_id: str) -> None:
        """Delete the files of a job; Slurm forgets the job itself. Repeated calls do nothing."""
        for path in self._folder.glob(f"{job_id}_*"):
            path.unlink(missing_ok=True)

    @override
    def nodes(self) -> list[Node]:
        nodes = {}
        for line in _run("sinfo", "--noheader", "--Node", f"--format={_NODE_FIELDS}").splitlines():
            name, state, resources = line.split("|", 2)  # a node of two partitions has two lines
            kinds: tuple[DeviceKind, ...] = ("cuda",) if "gpu" in resources else ("cpu",)
            nodes[name] = Node(name, name, state, _DEAD.search(state) is None, kinds)
        self._known = frozenset(nodes)
        return list(nodes.values())


def _state(text: str) -> JobState:
    if text in _PENDING:
        return JobState.PENDING
    return JobState.RUNNING if text in _RUNNING else JobState.ENDED


def _run(*words: str, may_fail_silently: bool = False) -> str:
    """Run a command of Slurm's, and return its output."""
    program = shutil.which(words[0])
    if program is None:
        raise EngineError(f"{words[0]}: Slurm's commands are not installed on this host")
    try:
        done = subprocess.run([program, *words[1:]], capture_output=True, text=True, timeout=_SECONDS, check=False)  # noqa: S603 - constants and ids
    except subprocess.TimeoutExpired:
        raise EngineError(f"{words[0]} has not responded within {_SECONDS:g} s") from None
    if done.returncode != 0 and (done.stderr.strip() or not may_fail_silently):
        raise EngineError(f"{words[0]}: {done.stderr.strip()}")
    return done.stdout
