"""Compare which changes let a larger micro-batch fit: tune variants of one request concurrently, with ``AsyncClient``.

Each variant is one tuning of the same model; a service with several devices runs several at a time. The probes of all
tunings are shown as they end::

    batchwright serve &
    python examples/compare_async.py --effective-batch-size 256
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from typing import Any

from batchwright import AsyncClient, ClientError, Recommendation, TuningRequest, parse_spec

MODEL: dict[str, Any] = {
    "model": {"kind": "reference", "architecture": {"name": "gpt", "layers": 2, "width": 128}},
    "batch": {"sequence_length": 64},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "unchanged": {},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "activation checkpointing": {"activation_checkpointing": True},
    "both": {"precision": "bf16-mixed", "activation_checkpointing": True},
}


async def tune(client: AsyncClient, name: str, request: TuningRequest) -> tuple[str, Recommendation | None]:
    """Submit one variant, show its probes as they end, and return its recommendation."""
    tuning = await client.tunings.submit(request)
    async for event in client.tunings.events(tuning.id):
        if event.probe is not None:
            print(f"{name}: {event.probe.result.micro_batch_size} {event.probe.result.outcome}")
    return name, (await client.tunings.get(tuning.id)).recommendation


async def compare(service: str, effective_batch_size: int, limit_bytes: int | None) -> None:
    """Tune all variants concurrently, and print them by micro-batch, largest first."""
    requests = {
        name: TuningRequest(
            spec=parse_spec(MODEL | changes),
            effective_batch_size=effective_batch_size,
            memory_limit_bytes=limit_bytes,
        )
        for name, changes in VARIANTS.items()
    }
    async with AsyncClient(service) as client:
        results = await asyncio.gather(*(tune(client, name, request) for name, request in requests.items()))
    sizes = {name: None if found is None else found.largest_micro_batch_size or 0 for name, found in results}
    for name, size in sorted(sizes.items(), key=lambda item: -(item[1] or 0)):
        print(f"{name:26} {'no recommendation' if size is None else size}")


def main() -> None:
    """Compare the variants, or exit with the message of an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--service", default=os.environ.get("BATCHWRIGHT_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--effective-batch-size", type=int, default=256)
    parser.add_argument("--memory-limit-bytes", type=int, default=128 * 1024**2)
    options = parser.parse_args()
    try:
        asyncio.run(compare(options.service, options.effective_batch_size, options.memory_limit_bytes))
    except ClientError as error:
        sys.exit(f"compare_async: {error}")


if __name__ == "__main__":
    main()
