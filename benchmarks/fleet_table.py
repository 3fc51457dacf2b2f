"""Print the results of ``fleet.py`` as the tables of the documents.

python benchmarks/fleet_table.py [--input benchmarks/results/fleet.json] [label ...]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HEAD = (
    "hosts, devices (load)",
    "transactions per device and second, idle",
    "submission to claim, median / p99",
    "claims a second (items, failed transactions)",
    "processor ms for an item: PostgreSQL / simulator",
    "most connections",
    "takeover, worst",
)


def line(cells: tuple[str, ...]) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(cells)} |"


def cells(label: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of one fleet."""
    idle, waits, queue, takeover = (row[part] for part in ("idle", "submission_to_claim", "queue", "takeover"))
    costs = (queue.get(f"items_per_cpu_second_of_{name}") for name in ("postgresql", "hosts"))
    return (
        f"{label}: {row['hosts']}, {row['devices']} ({row['load_before']:.0f} to {row['load_after']:.0f})",
        f"{idle['transactions_per_device_and_second']:.3f}",
        f"{waits['median_seconds']:.3f} / {waits['p99_seconds']:.3f} s",
        f"{queue['claims_per_second']:.0f} ({queue['items']}, {queue.get('rolled_back', 'not counted')})",
        " / ".join("not measured" if each is None else f"{1000 / each:.1f}" for each in costs),
        str(queue.get("most_connections", "not measured")),
        f"{takeover['worst_leases']:.2f} leases ({takeover['hosts']} hosts, {takeover['items']} items)",
    )


def table(results: Mapping[str, Any], labels: list[str]) -> Iterator[str]:
    """Yield the lines of the table of these labels, or of all."""
    yield line(HEAD)
    yield line(("---",) * len(HEAD))
    for label, made in results.items():
        if isinstance(made, dict) and "rows" in made and (label in labels or not labels):
            yield from (line(cells(label, row)) for row in made["rows"])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("labels", nargs="*", help="labels of the rows; all by default")
    parser.add_argument("--input", type=Path, default=Path("benchmarks/results/fleet.json"))
    given = parser.parse_args()
    print("\n".join(table(json.loads(given.input.read_text()), given.labels)))


if __name__ == "__main__":
    main()
