"""The hosts that an engine has assigned to a job over several, as its leading process finds them."""

from __future__ import annotations

import os
import shutil
import subprocess

from batchwright.training.launching.host_agents import HOSTS, Hosts
from batchwright_service.errors import ConfigurationError

_SECONDS = 60.0


def assigned_hosts() -> Hosts:
    """Return the hosts of this process's job.

    Raises:
        ConfigurationError: when no engine has assigned any.
    """
    if (text := os.environ.pop(HOSTS, None)) is not None:
        return Hosts.model_validate_json(text)
    own, listed = os.environ.get("SLURMD_NODENAME"), os.environ.get("SLURM_JOB_NODELIST")
    if own is None or listed is None:
        raise ConfigurationError("this work takes several hosts, and no engine has assigned them to this process")
    others = [name for name in _expanded(listed) if name != own]
    step = ("srun", "--nodes=1", "--ntasks=1", "--overlap", "--kill-on-bad-exit=1")  # a step of this job, on one node
    return Hosts(address=own, others=tuple((*step, f"--nodelist={name}") for name in others))


def _expanded(nodes: str) -> list[str]:
    """Return the names in a list of Slurm's, such as ``node[1-3]``."""
    program = shutil.which("scontrol")
    if program is None:
        raise ConfigurationError("scontrol: Slurm's commands are not installed on this node")
    words = (program, "show", "hostnames", nodes)
    done = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS, check=False)  # noqa: S603 - Slurm's own
    if done.returncode != 0:
        raise ConfigurationError(f"scontrol: {done.stderr.strip()}")
    return done.stdout.split()
