"""Time searches in a list of tunings: the share of the store in a request, on SQLite or a given PostgreSQL database.

    python benchmarks/list_search.py [--tunings 10000] [--database URL]

Each search is made several times; the slowest is printed too, since a person waits for it. On SQLite the processor's
milliseconds are those of the whole search, and depend little on what else the machine does.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from api_load_rows import Rows

from batchwright.client.documents.states import WorkKind
from batchwright_service.store.models import Search, WorkFilter
from batchwright_service.store.store import open_store

_REPEATS = 30
_SEARCHES = {
    "a word in every row": Search(words=("mlp",)),
    "a word in no row": Search(words=("nothing",)),
    "two letters": Search(words=("ml",)),
    "sorted by samples per second": Search(sort="samples_per_second"),
    "sorted by samples per second, deep in the list": Search(sort="samples_per_second", after=1e-9),
    "a word, sorted by samples per second": Search(words=("mlp",), sort="samples_per_second"),
    "sorted by peak": Search(sort="peak"),
    "sorted by name": Search(sort="name", descending=False),
    "sorted by the end": Search(sort="ended"),
    "a word, sorted by name": Search(words=("mlp",), sort="name", descending=False),
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
            wanted, seconds, processor = WorkFilter(search=search), [], []
            before = None if search.after is None else "tun_f"
            for _ in range(_REPEATS):
                began, used = time.perf_counter(), time.process_time()
                store.work.newest(WorkKind.TUNING, 50, before, wanted)
                seconds.append(time.perf_counter() - began)
                processor.append(time.process_time() - used)
            found[name] = {
                "median_ms": round(1000 * statistics.median(seconds), 1),
                "slowest_ms": round(1000 * max(seconds), 1),
                "median_processor_ms": round(1000 * statistics.median(processor), 1),
            }
        store.close()
    print(json.dumps({"tunings": given.tunings, "searches": found}, indent=2))


if __name__ == "__main__":
    main()
