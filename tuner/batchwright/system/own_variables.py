"""Environment variables with the prefix of this project: those of the library, and those that may be settings."""

import re
from collections.abc import Iterable

PREFIX = "BATCHWRIGHT_"
OTHER_VARIABLES = frozenset(
    {
        "BATCHWRIGHT_API_KEY",  # the SDK's
        "BATCHWRIGHT_URL",  # the SDK's
        "BATCHWRIGHT_HOSTS",  # from Ray to a job over several hosts
        "BATCHWRIGHT_RENDEZVOUS",  # between the ranks of a run
        "BATCHWRIGHT_RUN_DATA_ROOTS",  # of a run that a worker starts
        "BATCHWRIGHT_EFFECTIVE_BATCH_SIZE",  # a plan's figures, in exported jobs
        "BATCHWRIGHT_GRADIENT_ACCUMULATION_STEPS",
        "BATCHWRIGHT_MICRO_BATCH_SIZE",
        "BATCHWRIGHT_MICRO_BATCH_SIZES",
        "BATCHWRIGHT_PLAN_SOURCE",
        "BATCHWRIGHT_WORLD_SIZE",
        "BATCHWRIGHT_PROBE_FOLDER",  # of a command that is probed
        "BATCHWRIGHT_FORK_SERVER",  # of the process that is forked for such probes
        "BATCHWRIGHT_WORKSPACES",  # workspaces that were measured on a card, of estimates
    }
)
"""Variables with the prefix that are no settings."""
_IGNORED = re.compile(
    r"BATCHWRIGHT_(TEST_\w*|(\w+_)?SERVICE_(HOST|PORT(_\w+)?)|(\w+_)?PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""Variables of the tests, and those that Kubernetes sets in pods beside a service whose name begins with
`batchwright`."""


def possible_settings(names: Iterable[str]) -> list[str]:
    """Return the variables that only a service's settings can explain, sorted.

    Args:
        names: names of environment variables, in any case.
    """
    own = (name for name in names if name.upper().startswith(PREFIX))
    return sorted(name for name in own if name.upper() not in OTHER_VARIABLES and not _IGNORED.fullmatch(name.upper()))
