"""The child process of ``batchwright serve`` that dispatches work to a cluster, in place of the workers of the host."""

from collections.abc import Sequence

from batchwright.system.subreaper import Channel
from batchwright_service.dispatch_bootstrap import build_dispatcher
from batchwright_service.entrypoints import hosted_worker


def main(channel: Channel, arguments: Sequence[str]) -> None:
    """Dispatch until a stop request, or until the API process has ended."""
    hosted_worker.main(channel, arguments, build_dispatcher)
