"""Starts an export of a launcher as that launcher would, with a torchrun that tells how it was called.

What is emulated is little: Kubernetes' `$(NAME)` (its `third_party/forked/golang/expansion`), Ray's `$NAME` in values
of variables (its `update_envs`), and the variables that a cluster sets on its nodes. Shells and YAML are real.
"""

import json
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from batchwright.exports.base import Export

_TOLD = """\
#!/bin/sh
printf '%s\\0' "$@" > "$TOLD/arguments"
env -0 > "$TOLD/environment"
"""
_SRUN = """\
#!/bin/sh
while [ "${1#--}" != "$1" ]; do printf '%s\\0' "$1" >> "$TOLD/srun"; shift; done
exec "$@"
"""
_SCONTROL = """\
#!/bin/sh
[ "$*" = "show hostnames $SLURM_JOB_NODELIST" ] && printf 'node1\\nnode2\\n'
"""


@dataclass(frozen=True)
class Called:
    """A call of torchrun on a node."""

    arguments: list[str]
    """Its words."""
    environment: dict[str, str]
    """Its variables."""

    def option(self, name: str) -> str:
        """The value of the last `--name=value`."""
        return [argument.split("=", 1)[1] for argument in self.arguments if argument.startswith(f"--{name}=")][-1]

    @property
    def program(self) -> list[str]:
        """The arguments after torchrun's own options."""
        return self.arguments[next(at for at, word in enumerate(self.arguments) if not word.startswith("--")) :]


def start(given: Export, folder: Path, node: int = 0) -> Called:
    """Start an export on one node in an empty folder, and return the call of torchrun."""
    for name, text in (("torchrun", _TOLD), ("srun", _SRUN), ("scontrol", _SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    command, variables = write(given, folder, node)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "TOLD": str(folder), **variables}
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=240)
    return Called(_words(folder / "arguments"), dict(word.split("=", 1) for word in _words(folder / "environment")))


def write(given: Export, folder: Path, node: int = 0) -> tuple[list[str], dict[str, str]]:
    """Write an export's files, and say what its launcher runs on a node: the command, and the variables it sets."""
    for file in given.files:
        (folder / file.name).write_text(file.content)
    return _COMMANDS[given.format](given, node)


def document(given: Export, kind: str | None = None) -> Any:
    """The first file's document, or that of a kind, where it is YAML or JSON."""
    text = given.files[0].content
    if given.files[0].name.endswith(".json"):
        return json.loads(text)
    found = list(yaml.safe_load_all(text))
    return found[0] if kind is None else next(item for item in found if item["kind"] == kind)


def _words(path: Path) -> list[str]:
    return path.read_text().split("\0")[:-1]


def _torchrun(given: Export, _node: int) -> tuple[list[str], dict[str, str]]:
    return list(given.command), {"MASTER_ADDR": "node1", "PYTORCH_ALLOC_CONF": "strange", "UNRELATED": "kept"}


def _slurm(given: Export, _node: int) -> tuple[list[str], dict[str, str]]:
    cpus = re.findall(r"^#SBATCH --cpus-per-task=(\d+)$", given.files[0].content, re.MULTILINE)
    return ["bash", *given.command[1:]], {
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_CPUS_PER_TASK": cpus[0],
        "SLURM_RESTART_COUNT": "1",
        "PYTORCH_ALLOC_CONF": "strange",
    }


def _kubernetes(given: Export, node: int) -> tuple[list[str], dict[str, str]]:
    container = document(given, "Job")["spec"]["template"]["spec"]["containers"][0]
    return _container({**container, "env": [*container["env"], {"name": "JOB_COMPLETION_INDEX", "value": str(node)}]})


def _trainjob(given: Export, _node: int) -> tuple[list[str], dict[str, str]]:
    trainer = document(given)["spec"]["trainer"]
    return _container({**trainer, "env": [*trainer["env"], {"name": "PET_NNODES", "value": str(trainer["numNodes"])}]})


def _rayjob(given: Export, _node: int) -> tuple[list[str], dict[str, str]]:
    spec = document(given)["spec"]
    return _ray(spec["entrypoint"], yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"])


def _ray_jobs(given: Export, _node: int) -> tuple[list[str], dict[str, str]]:
    request = document(given)
    return _ray(request["entrypoint"], request["runtime_env"]["env_vars"])


def _ray(entrypoint: str, variables: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    return ["sh", "-c", entrypoint], {name: os.path.expandvars(value) for name, value in variables.items()}


def _skypilot(given: Export, node: int) -> tuple[list[str], dict[str, str]]:
    task = document(given)
    cluster = {"SKYPILOT_NODE_RANK": str(node), "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    return ["bash", "-c", task["run"]], task["envs"] | cluster


def _container(container: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
    variables: dict[str, str] = {}
    for item in container["env"]:
        variables[item["name"]] = _expanded(item["value"], variables)
    words = [*container["command"], *container.get("args", [])]
    return [_expanded(word, variables) for word in words], variables


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """`$$` is `$`, `$(NAME)` a variable that is known, and everything else itself."""

    def replaced(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replaced, text)


_COMMANDS = {
    "torchrun": _torchrun,
    "slurm": _slurm,
    "kubernetes": _kubernetes,
    "trainjob": _trainjob,
    "rayjob": _rayjob,
    "ray-jobs": _ray_jobs,
    "skypilot": _skypilot,
}
