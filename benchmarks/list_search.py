"""Time searches in a list of tunings: the share of the store in a request, on SQLite or a given PostgreSQL database.

    python benchmarks/list_search.py [--tunings 10000] [--database URL]

Each search is made several times; the slowest is printed too, since a person waits for it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from api_load_rows import Rows

from service.domain.states import WorkKind
from service.store.models import Search, WorkFilter
from service.store.store import open_store

_REPEATS = 30
_SEARCHES = {
    "a word in every row": Search(words=("mlp",)),
    "a word in no row": Search(words=("nothing",)),
    "two letters": Search(words=("ml",)),
    "sorted by a column of another table": Search(sort="samples_per_second"),
    "a word, sorted": Search(words=("mlp",), sort="name", descending=False),
}


def main() -> None:
    """Fill a database, search it, and print the milliseconds as JSON."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--tunings", type=int, default=10_000)
    arguments.add_argument("--database", help="URL of an empty database; a temporary SQLite database when left out")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = given.database or f"sqlite:///{Path(folder) / 'store.db'}"
        store = open_store(url)
        Rows(url).grow_to(given.tunings)
        found = {}
        for name, search in _SEARCHES.items():
            wanted, seconds = WorkFilter(search=search), []
            for _ in range(_REPEATS):
                began = time.perf_counter()
                store.work.newest(WorkKind.TUNING, 50, wanted=wanted)
                seconds.append(time.perf_counter() - began)
            found[name] = {"median_ms": 1000 * statistics.median(seconds), "slowest_ms": 1000 * max(seconds)}
        store.close()
    print(json.dumps({"tunings": given.tunings, "searches": found}, indent=2))


if __name__ == "__main__":
    main()
