"""Caches and coalescing that make frequent reads cheap: each reuses the work of another request.

Each module states its gain: the CPU time of the server process per request without the part, divided by that with all
parts. `benchmarks/fast_path_parts.py` measures the gains by switching each part off: medians of 8 rounds of slices of
half a second, each beside one with all parts, 16 connections, 10,000 tunings in SQLite, on 2 cores of an Intel Xeon
that were busy with other work. `benchmarks/results/fast_path_parts.json` has the quartiles. A part with a gain below
1.1 is removed.
"""
