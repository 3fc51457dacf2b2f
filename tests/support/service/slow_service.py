"""Entry of a served process for tests that kill it: a real server, store and worker around a slow scripted runner.

Arguments: data folder, and port (0 for a free one). The workers run in a process of their own, `slow_worker.py`, which
the environment tells how slow it is.
"""

import sys
from pathlib import Path

from batchwright_service.bootstrap import build
from batchwright_service.entrypoints.serve import serve_system
from batchwright_service.settings import Settings


def main(data_dir: str, port: str) -> None:
    """Serve until a stop signal."""
    settings = Settings(data_dir=Path(data_dir), port=int(port), node_name="host", shutdown_grace_seconds=600.0)
    system = build(settings, versions={"torch": "2.8"}, worker_module="tests.support.service.slow_worker")
    serve_system(settings, system)


if __name__ == "__main__":
    main(*sys.argv[1:])
