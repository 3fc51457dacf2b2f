"""Plugin of pytest: the processor time of each test, its child processes included, and a budget that fails by itself.

Processor time, because wall time depends on what else the machine does. A slow or busy machine needs more of both, so
the limits are those of a reference machine: before a limit is judged, the seconds are divided by how much slower than
there a fixed computation is here. Printed figures are as measured. The seconds by test are kept in pytest's cache, and
``python -m tests.support.processor_time`` prints them by group.
"""

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

TEST_LIMIT_SECONDS = 6.0
"""Longest processor time of a test in `make test`, without shared fixtures and first imports.

Twice what a test should take on a quiet machine: other work made tests up to 1.9 times dearer (2-core AMD
EPYC), which the fixed computation, small as it is, does not show.
"""
REFERENCE_SECONDS = 0.0116
"""Time of ``_computation`` on the reference machine: Intel Xeon (Sapphire Rapids, 2.3 GHz), Python 3.11."""
RUN_ELSEWHERE = ("thorough", "exports", "fleet", "gpu", "image", "cuda_image", "virtual_gpu")
"""Markers of the tests that `make test` does not run. No limit holds for them."""
FIRST_IMPORTS = 100
"""A test that is the first to import more modules than this also pays for the tests after it, so it is not judged."""
DEAREST = 10
"""Number of files that are named when a session exceeds its budget."""
CACHE_KEY = "batchwright/processor_seconds"
"""Where pytest's cache has the seconds of the last session, by test."""
_TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")
_TESTS_PER_SAMPLE = 200
"""Tests between two samples of the machine's speed. A sample takes about 40 ms."""


def processor_seconds() -> float:
    """Return the processor time of this process and of all its descendants until now.

    Ended descendants count if their parents waited for them. The time of an orphan is lost when the orphan ends.
    """
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system + _of_descendants(os.getpid())


def _own_seconds() -> float:
    """Return the processor time of this process alone."""
    spent = os.times()
    return spent.user + spent.system


def _of_descendants(parent: int) -> float:
    """Return the processor time of the living descendants of a process, and of the children they waited for."""
    seconds = 0.0
    for child in _children(parent):
        try:
            fields = Path(f"/proc/{child}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:  # has ended since
            continue
        seconds += sum(map(int, fields[11:15])) * _TICK_SECONDS + _of_descendants(child)
    return seconds


def _children(parent: int) -> Iterable[int]:
    """Return the living children of a process; none if the kernel lacks CONFIG_PROC_CHILDREN (proc(5))."""
    found: list[int] = []
    with suppress(OSError):  # the process has ended since
        for thread in Path(f"/proc/{parent}/task").iterdir():
            with suppress(OSError):  # the thread has: the children of the others count all the same
                found += map(int, (thread / "children").read_bytes().split())
    return found


def slowness() -> float:
    """Return how many times slower than the reference machine this one is now; at least 1."""
    return max(1.0, min(_computation() for _ in range(3)) / REFERENCE_SECONDS)


def _computation() -> float:
    """Return the processor time of a fixed amount of Python."""
    before = time.thread_time()
    counts: dict[int, int] = {}
    for number in range(100_000):
        counts[number % 1000] = counts.get(number % 1000, 0) + number
    return time.thread_time() - before


def too_long(seconds: float) -> str:
    """Return the sentence that a test fails with if it took too many seconds."""
    return (
        f"This test took {seconds:.1f} s of processor time. The limit in `make test` is {TEST_LIMIT_SECONDS:g} s. "
        "Make the test cheaper, or mark it `thorough` and keep a cheaper witness of what it shows."
    )


def by_group(tests: Mapping[str, float], parts: int) -> dict[str, tuple[int, float]]:
    """Return the number and the seconds of tests by the first parts of their path, dearest first."""
    groups: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for name, seconds in tests.items():
        path, _, test = name.partition("::")
        group = "/".join(path.split("/")[:parts])
        number, sum_so_far = groups[group]
        groups[group] = (number + bool(test), sum_so_far + seconds)
    return dict(sorted(groups.items(), key=lambda group: -group[1][1]))


class ProcessorTime:
    """Measures the tests of this process, and adds up what the processes of pytest-xdist have measured."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._mark = 0.0
        self._shared = 0.0
        self._of_test = 0.0
        self._modules = 0
        self._measured = 0
        self._slowness: list[float] = []
        self._tests: dict[str, float] = defaultdict(float)
        self._own = 0.0
        self._outside = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        """Begin to measure a test."""
        if self._measured % _TESTS_PER_SAMPLE == 0:
            self._slowness.append(slowness())
        self._measured += 1
        self._add_outside()
        self._mark, self._modules, self._of_test = processor_seconds(), len(sys.modules), 0.0
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        """Count a shared fixture apart from the test that happens to be the first to use it."""
        if fixturedef.scope == "function":
            return (yield)
        before, others = processor_seconds(), self._shared
        try:
            return (yield)
        finally:
            self._shared = max(self._shared, others + processor_seconds() - before)  # fixtures within this one included

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Put the seconds of a phase into its report, and fail a test that took too many."""
        report = yield
        now = processor_seconds()
        seconds = max(0.0, now - self._mark)
        shared = min(self._shared, seconds)
        self._mark, self._shared = now, 0.0
        report.__dict__.update(processor_seconds=seconds - shared, shared_processor_seconds=shared)  # xdist sends these
        self._of_test += seconds - shared
        self._own = _own_seconds()
        if report.when == "call" and report.passed and self._of_test > TEST_LIMIT_SECONDS and self._is_judged(item):
            judged = self._of_test / slowness()
            if judged > TEST_LIMIT_SECONDS:
                report.outcome, report.longrepr = "failed", too_long(judged)
        return report

    def _add_outside(self) -> None:
        """Count what this process took since the last phase of a test, or since it began."""
        self._own, before = _own_seconds(), self._own
        self._outside += self._own - before

    def _is_judged(self, item: pytest.Item) -> bool:
        """Return whether `make test` runs the test and the test did not pay for later ones."""
        elsewhere = any(item.get_closest_marker(marker) for marker in RUN_ELSEWHERE)
        return not elsewhere and len(sys.modules) - self._modules < FIRST_IMPORTS

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the seconds of a phase, in whichever process the phase ran."""
        self._tests[report.nodeid] += getattr(report, "processor_seconds", 0.0)
        self._tests[report.nodeid.partition("::")[0]] += getattr(report, "shared_processor_seconds", 0.0)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add what a process of pytest-xdist took outside of tests."""
        seconds, samples = getattr(node, "workeroutput", {}).get("processor_time", (0.0, []))
        self._outside += seconds
        self._slowness += samples

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Hand on what this process took outside of tests, or fail a session that took more than its budget."""
        self._add_outside()
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["processor_time"] = (self._outside, self._slowness)
            return
        if not self._tests:
            return
        if (cache := getattr(self._config, "cache", None)) is not None:  # absent with `-p no:cacheprovider`
            cache.set(CACHE_KEY, {**self._tests, "outside of tests": self._outside})
        if self._is_over() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _seconds(self) -> float:
        """Return the seconds of the whole session."""
        return self._outside + sum(self._tests.values())

    def _mean_slowness(self) -> float:
        return sum(self._slowness) / len(self._slowness) if self._slowness else 1.0

    def _is_over(self) -> bool:
        """Return whether the session took more than its budget."""
        budget = self._config.getoption("processor_budget")
        return budget is not None and self._seconds() / self._mean_slowness() > budget

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what the session took, and name the dearest files if that is too much."""
        if not self._tests:
            return
        budget = self._config.getoption("processor_budget")
        terminalreporter.write_line(
            f"Processor time: {self._seconds():.0f} s, {self._outside:.0f} s of it outside of tests"
            + (f". The budget is {budget:.0f} s" if budget is not None else "")
            + (f" (this machine is {slower:.2f} times slower)" if (slower := self._mean_slowness()) >= 1.05 else "")
            + "."
        )
        if self._is_over():
            terminalreporter.write_line("FAILED: over the budget of processor time. The dearest files:", red=True)
            for path, (number, seconds) in list(by_group(self._tests, 99).items())[:DEAREST]:
                terminalreporter.write_line(f"  {seconds:7.1f} s  {number:4} tests  {path}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the budget of a session."""
    parser.addoption(
        "--processor-budget", type=float, metavar="SECONDS", help="fail a session that takes more processor time"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Begin to measure."""
    config.pluginmanager.register(ProcessorTime(config))


def main() -> None:
    """Print the seconds of the last session by folder of tests."""
    tests = json.loads(Path(".pytest_cache/v", CACHE_KEY).read_text())
    for group, (number, seconds) in by_group(tests, int(sys.argv[1]) if len(sys.argv) > 1 else 2).items():
        print(f"| {group} | {number} | {seconds:.0f} |")  # noqa: T201


if __name__ == "__main__":
    main()
