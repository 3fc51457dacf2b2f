"""Fetch the config of a model on the hub for a service: in a child process, within a time, to a file of bounded size.

`huggingface_hub` repeats requests for minutes, waits for each byte anew, and shares one client among threads, which it
closes after a refused connection.
"""

import os
import resource
import subprocess
import sys
from pathlib import Path

from batchwright.errors import HubUnavailableError, SpecError
from batchwright.schemas.model.hub import HubModel
from batchwright.system.processes import tighten_limit
from batchwright.system.subreaper import die_with_parent
from batchwright.workloads.pretrained.hub_files import cached_model, fetch_config, hub_problem

_LARGEST_FILE = 16 * 2**20
"""Bytes of any file that the child process writes."""
_FETCHED, _REFUSED, _UNAVAILABLE = 0, 3, 4
"""Exit codes of the child process, which writes a path or the reason."""
_COMMIT_DIGITS = 40


def fetch_config_within(model: HubModel, name: str, seconds: float) -> Path:
    """Fetch one file of a model as ``hub_files.fetch_config`` does, within ``seconds``.

    A file of a commit that is in the cache is found without the hub, and without a process.

    Raises:
        HubUnavailableError: when the hub is not reached, fails, breaks off, or takes longer.
        SpecError: when the model or the file cannot be had.
    """
    if model.revision is not None and len(model.revision) == _COMMIT_DIGITS and (folder := cached_model(model)):
        return folder / name
    words = [model.id, name, model.revision or "", str(os.getpid())]
    try:
        ended = subprocess.run(  # noqa: S603 - our own command
            [sys.executable, "-P", "-m", __name__, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise hub_problem(model, f"did not answer within {seconds:g} s", HubUnavailableError) from None
    said = os.fsdecode(ended.stdout)
    if ended.returncode == _FETCHED:
        return Path(said)
    if ended.returncode == _REFUSED:
        raise hub_problem(model, said)
    raise hub_problem(model, said or "could not be fetched: the process that fetches it failed", HubUnavailableError)


def _main() -> int:
    """Run the child process."""
    model_id, name, revision, parent = sys.argv[1:]
    die_with_parent(int(parent))
    tighten_limit(resource.RLIMIT_FSIZE, _LARGEST_FILE)
    try:
        said, code = str(fetch_config(HubModel(model_id, revision or None), name)), _FETCHED
    except SpecError as error:
        code = _UNAVAILABLE if isinstance(error, HubUnavailableError) else _REFUSED
        said = error.problems[0].message.partition(" on the hub ")[2]
    sys.stdout.buffer.write(os.fsencode(said))
    return code


if __name__ == "__main__":
    sys.exit(_main())
