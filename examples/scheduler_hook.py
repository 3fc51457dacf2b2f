"""A scheduler's hook: request a tuning, wait for its plan, and start the job with it. Needs neither torch nor a GPU.

``REQUEST`` is a tuning request in YAML or JSON (``spec``, ``effective_batch_size``, ``device`` ...). In a batch script,
the command after ``--`` replaces the hook. Its environment has the plan, and the variables that the probes ran with::

    #SBATCH --requeue
    python scheduler_hook.py request.yaml --fallback-micro-batch-size 4 -- srun python train.py
    if [ $? = 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi

As Slurm's ``TaskProlog``, without a command, it prints ``export NAME=value`` lines, which Slurm sets for the task; a
shell evaluates them with ``eval``. (Not as ``Prolog``: Slurm drains the node when that fails.)

    BATCHWRIGHT_MICRO_BATCH_SIZE              the largest micro-batch of the plan
    BATCHWRIGHT_GRADIENT_ACCUMULATION_STEPS   micro-batches per rank and update
    BATCHWRIGHT_MICRO_BATCH_SIZES             each of them, as 34,33,33; ranks are separated by colons
    BATCHWRIGHT_EFFECTIVE_BATCH_SIZE          their sum
    BATCHWRIGHT_PLAN_SOURCE                   the recommendation's id, or `fallback`

If the service is unreachable, busy or broken, or the tuning does not end in time, the plan uses
``--fallback-micro-batch-size``; the effective batch stays exact. A submitted tuning continues, so that the next job
finds its recommendation. Exit codes, if nothing was started (else that of the command):

    0   the lines were printed
    2   the request is invalid, by the file or by the service
    3   nothing fits: not even a micro-batch of one sample
    4   the tuning failed
    75  no recommendation in time, and no fallback: try again later
    77  not allowed: by the API key (BATCHWRIGHT_API_KEY), or by the operator
    127 the command cannot be run
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import sys
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

import batchwright
from batchwright import (
    Client,
    ClientError,
    InvalidRequestError,
    NotAllowedError,
    NotAuthenticatedError,
    Plan,
    Recommendation,
    TuningFailedError,
    TuningRequest,
    load_document,
)
from batchwright.errors import PlanError, SpecError


class Exit(IntEnum):
    """The exit code of the hook if it starts nothing."""

    PRINTED = 0
    WRONG_REQUEST = 2
    NOTHING_FITS = 3
    TUNING_FAILED = 4
    TRY_LATER = 75
    NOT_ALLOWED = 77
    NOT_STARTED = 127


class NoPlanError(Exception):
    """There is no plan to start with."""

    def __init__(self, exit_code: Exit, message: object) -> None:
        self.exit_code = exit_code
        super().__init__(str(message))


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the options, and the command after ``--``."""
    given = list(arguments)
    at = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("request", type=Path, metavar="REQUEST", help="tuning request, YAML or JSON")
    parser.add_argument("--service", default=os.environ.get("BATCHWRIGHT_URL", "http://127.0.0.1:8000"))
    parser.add_argument(
        "--wait", type=float, default=900.0, help="seconds to wait for the recommendation (%(default)s)"
    )
    parser.add_argument("--retry", type=float, default=30.0, help="seconds to try to reach the service (%(default)s)")
    parser.add_argument(
        "--fallback-micro-batch-size",
        type=int,
        help="micro-batch size of the plan if there is no recommendation in time",
    )
    options = parser.parse_args(given[:at])
    options.command = given[at + 1 :]
    return options


def plan(options: argparse.Namespace) -> dict[str, str]:
    """Return the variables to start with: of the recommendation, or of the fallback if there is none in time.

    Raises:
        NoPlanError: with the exit code.
    """
    try:
        request = load_document(TuningRequest, options.request, "request")
    except SpecError as error:
        raise NoPlanError(Exit.WRONG_REQUEST, error) from None
    try:
        return recommended(tune(options, request))
    except NoPlanError as error:
        if error.exit_code is not Exit.TRY_LATER or options.fallback_micro_batch_size is None:
            raise
        print(f"scheduler_hook: {error}; starting with the fallback", file=sys.stderr)
        return fallback(request, options.fallback_micro_batch_size)


def tune(options: argparse.Namespace, request: TuningRequest) -> Recommendation:
    """Return the recommendation of the service.

    Raises:
        NoPlanError: when there is none in time, or none at all.
    """
    try:
        with Client(options.service, retry_seconds=options.retry) as client:
            return client.tunings.tune(request, timeout_seconds=options.wait, idempotency_key=_key(request))
    except TuningFailedError as error:
        raise NoPlanError(Exit.TUNING_FAILED, error) from None
    except InvalidRequestError as error:
        is_device_away = error.code == "unknown-device"  # its worker may come back
        raise NoPlanError(Exit.TRY_LATER if is_device_away else Exit.WRONG_REQUEST, error) from None
    except (NotAuthenticatedError, NotAllowedError) as error:
        raise NoPlanError(Exit.NOT_ALLOWED, error) from None
    except ClientError as error:  # unreachable, busy, broken, over quota, or not ended in time
        raise NoPlanError(Exit.TRY_LATER, error) from None


def _key(request: TuningRequest) -> str | None:
    """Make one key for equal requests of all tasks of a Slurm job, and another after each restart of the job."""
    if "SLURM_JOB_ID" not in os.environ:
        return None
    start = [os.environ.get(f"SLURM_{name}", "") for name in ("CLUSTER_NAME", "JOB_ID", "RESTART_COUNT")]
    identity = "\n".join([*start, request.model_dump_json()])
    return f"slurm-{hashlib.sha256(identity.encode()).hexdigest()}"


def recommended(recommendation: Recommendation) -> dict[str, str]:
    """Return the variables of a recommendation: those that the probes ran with, and the plan.

    Raises:
        NoPlanError: when nothing fits.
    """
    if recommendation.plan is None:
        raise NoPlanError(Exit.NOTHING_FITS, recommendation.infeasible_reason)
    return recommendation.environment | variables(recommendation.plan, recommendation.id)


def fallback(request: TuningRequest, micro_batch_size: int) -> dict[str, str]:
    """Return the variables for the fallback size, which was not measured.

    Raises:
        NoPlanError: when no plan exists for these numbers.
    """
    try:
        ranks = request.spec.parallelism.world_size
        fallback_plan = batchwright.plan(request.effective_batch_size, micro_batch_size, ranks)
    except PlanError as error:
        raise NoPlanError(Exit.WRONG_REQUEST, error) from None
    return variables(fallback_plan, "fallback")


def variables(plan: Plan, source: str) -> dict[str, str]:
    """Return a plan as environment variables."""
    return {
        "BATCHWRIGHT_MICRO_BATCH_SIZE": str(plan.micro_batch_size),
        "BATCHWRIGHT_GRADIENT_ACCUMULATION_STEPS": str(plan.gradient_accumulation_steps),
        "BATCHWRIGHT_MICRO_BATCH_SIZES": ":".join(",".join(map(str, sizes)) for sizes in plan.micro_batch_sizes),
        "BATCHWRIGHT_EFFECTIVE_BATCH_SIZE": str(plan.effective_batch_size),
        "BATCHWRIGHT_PLAN_SOURCE": source,
    }


def main(arguments: Sequence[str]) -> int:
    """Get the plan, and start the command or print the lines. Returns the exit code if nothing was started."""
    options = parse_arguments(arguments)
    try:
        environment = plan(options)
    except NoPlanError as error:
        print(f"scheduler_hook: {error}", file=sys.stderr)
        return error.exit_code
    if options.command:
        return start(options.command, environment)
    if quoted := [name for name, value in environment.items() if shlex.quote(value) != value]:
        # Slurm does not remove quotes, as a shell would.
        print(f"scheduler_hook: {', '.join(quoted)} would need quotes: give the command after `--`", file=sys.stderr)
        return Exit.WRONG_REQUEST
    for name, value in sorted(environment.items()):
        print(f"export {name}={value}")
    return Exit.PRINTED


def start(command: list[str], environment: dict[str, str]) -> int:
    """Replace this process by the command. Returns only if the command cannot be run."""
    sys.stderr.flush()
    try:
        os.execvpe(command[0], command, os.environ | environment)  # noqa: S606 - the caller's own command
    except OSError as error:
        print(f"scheduler_hook: {command[0]}: {error.strerror}", file=sys.stderr)
    return Exit.NOT_STARTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
