"""Traces taken with CUDA's decisions, in a process of their own: torch must not be imported before the shim.

The shim is compiled into the user's cache folder, once for all tests and for the commands that they call.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from batchwright.estimation.trace import Category, Trace
from batchwright.schemas.gpus import KernelProfile
from tests.support.forked import run_where_traced


def traced_on_cuda(cases: list[dict[str, Any]]) -> dict[str, list[Trace]]:
    """The traces of each case, by name.

    Args:
        cases: ``{"name", "spec", "sizes", "accumulates", "compute_capability"}`` each. A case with ``"forked"`` is
            traced by several processes, of which so many sizes are expected to be told.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "traces.json"
        run_where_traced(_trace, cases, path)
        found = json.loads(path.read_bytes())
    return {name: [Trace.model_validate(trace) for trace in traces] for name, traces in found.items()}


def most_bytes(trace: Trace, category: Category | None = None, stretch: str | None = None) -> int:
    """The most that was held at a time: of one category or of all, in one stretch or in all of them."""
    names = {mark.position: mark.name for mark in trace.marks}
    held = most = 0
    now = None
    for position, event in enumerate(trace.events):
        now = names.get(position, now)
        block = event if event >= 0 else ~event
        if category is None or trace.categories[block] is category:
            held += trace.sizes[block] if event >= 0 else -trace.sizes[block]
        if stretch is None or now == stretch:
            most = max(most, held)
    return most


def held_bytes(trace: Trace, mark: str, category: Category | None = None) -> int:
    """What was held when a stretch began."""
    position = next(section.position for section in trace.marks if section.name == mark)
    held = 0
    for event in trace.events[:position]:
        block = event if event >= 0 else ~event
        if category is None or trace.categories[block] is category:
            held += trace.sizes[block] if event >= 0 else -trace.sizes[block]
    return held


def _trace(cases: list[dict[str, Any]], path: Path) -> None:
    """Trace every case, and write the traces."""
    import numpy as np

    from batchwright.estimation.cuda_shim import Shim, _load, cache_folder
    from batchwright.estimation.tracing.runs import TracedRuns
    from batchwright.estimation.tracing.shape_cache import ShapeCache
    from batchwright.schemas.workload import parse_spec
    from tests.support import traced_models  # noqa: F401 - imported by the process that forks others

    shim, shapes = Shim(_load(cache_folder())), ShapeCache()
    prepared = []
    for case in cases:
        profile = KernelProfile(compute_capability=tuple(case["compute_capability"]), kind="cuda")
        runs = TracedRuns(
            parse_spec(case["spec"]),
            (profile,),
            shim=shim,
            processes=3 if "forked" in case else 1,
            shapes=shapes,
            loop=case.get("loop", "batchwright"),
            share=case.get("share"),
        )
        runs.prepare((profile,), case["sizes"], accumulates=case["accumulates"])
        assert len(runs._traces) == case.get("forked", 0), case["name"]
        prepared.append((case, profile, runs))
    found = {}
    for case, profile, runs in prepared:  # only now are there backward passes in this process, and autograd's threads
        np.random.seed(0)  # noqa: NPY002 - transformers masks features of wav2vec2 by it, which are indexed
        traces = [runs.get(profile, size, accumulates=case["accumulates"]) for size in case["sizes"]]
        found[case["name"]] = [trace.model_dump(mode="json") for trace in traces]
    path.write_text(json.dumps(found))
    os._exit(0)  # as tasks of the fork server do: at a regular end torch's threads may abort the process
