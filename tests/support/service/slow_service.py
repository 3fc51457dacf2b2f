"""Entry of a served process for tests that kill it: a real server, store and worker around a slow scripted runner.

Arguments: data folder, port (0 for a free one), and where the workers run: "inside" this process, or "apart" in one of
their own, which is `slow_worker.py`. The environment tells that how slow it is.
"""

from __future__ import annotations

import sys
from pathlib import Path

from service.bootstrap import build
from service.entrypoints.serve import serve_system
from service.settings import Settings
from tests.support.factories import CPU
from tests.support.service.slow_worker import executor


def main(data_dir: str, port: str, where: str) -> None:
    """Serve until a stop signal."""
    settings = Settings(data_dir=Path(data_dir), port=int(port), node_name="host", shutdown_grace_seconds=600.0)
    if where == "apart":
        system = build(settings, versions={"torch": "2.8"}, worker_module="tests.support.service.slow_worker")
    else:
        system = build(settings, executor, [CPU], {"torch": "2.8"})
    serve_system(settings, system)


if __name__ == "__main__":
    main(*sys.argv[1:])
