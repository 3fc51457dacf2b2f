"""The child process of ``batchwright serve`` that dispatches work to a cluster, in place of the workers of the host."""

from __future__ import annotations

import sys

from batchwright_service.dispatch_bootstrap import build_dispatcher
from batchwright_service.entrypoints.hosted_worker import main

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], build_dispatcher)
