"""Loading windows of samples: by this process or by others, bit for bit the same."""

import multiprocessing
import multiprocessing.queues
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from batchwright.errors import TrainingError
from batchwright.training.data.base import TrainingData
from batchwright.training.data.build import build_data
from batchwright.training.data.loading import AccumulationWindow, SampleRange, WindowLoader
from batchwright.workloads.build import build_workload
from tests.support.command import is_running
from tests.support.factories import gpt_spec, mlp_spec

WINDOWS: tuple[AccumulationWindow, ...] = (
    (SampleRange(0, (3, 1)), SampleRange(0, (4,))),
    (),
    (SampleRange(0, (1,)), SampleRange(1, (5, 9, 2))),
    (),
)


@dataclass
class Augmented:
    """Samples of a user's that are another on every call: they draw from all three generators."""

    length: int = 10

    def __len__(self) -> int:
        """Samples."""
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        """The index, and three random numbers."""
        drawn = (random.random(), float(np.random.rand()), float(torch.rand(())))  # noqa: NPY002 - as users do
        return torch.tensor([index, *drawn], dtype=torch.float64)


def noisy(samples: list[Tensor]) -> dict[str, Tensor]:
    """A collation of a user's that draws as well."""
    return {"x": torch.stack(samples), "noise": torch.rand(len(samples))}


def augmented() -> TrainingData:
    """Data of a user's code."""
    return TrainingData(Augmented(), noisy, may_be_random=True)


def loader(data: TrainingData, workers: int, windows: tuple[AccumulationWindow, ...] = WINDOWS) -> WindowLoader:
    """A loader with a seed."""
    return WindowLoader(data, windows, workers=workers, seed=5)


def random_numbers() -> tuple[float, float, float]:
    """The next of each generator."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002 - what user code uses


def equal(ours: Any, theirs: Any) -> bool:
    """Return whether two windows' batches are equal to the last bit."""
    return len(ours) == len(theirs) and all(
        mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)
        for mine, other in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("kind", ["own", "synthetic", "text"])
def test_workers_change_no_bit(kind: str, tmp_path: Path) -> None:
    """Two workers load bit-equal batches: parts in order, empty windows, and a user's random choices."""
    (tmp_path / "corpus.txt").write_bytes(b"some text to learn, " * 40)
    text = {"kind": "text", "paths": [f"{tmp_path}/*.txt"]}
    specs = {"text": gpt_spec(data=text), "synthetic": mlp_spec()}
    data = augmented() if kind == "own" else build_data(specs[kind], build_workload(specs[kind]))
    here, there = list(loader(data, 0)), list(loader(data, 2))
    assert [len(window) for window in here] == [2, 0, 2, 0]
    assert [len(window) for window in there] == [2, 0, 2, 0]
    assert all(equal(ours, theirs) for ours, theirs in zip(here, there, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_uses_up_no_random_number(workers: int) -> None:
    """Loading does not change the random numbers of dropout."""
    results = []
    for load in (False, True):
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002 - what user code uses
        torch.manual_seed(1)
        if load:
            list(loader(augmented(), workers))
        results.append(random_numbers())
    assert results[0] == results[1]


def test_random_choices_depend_on_seed_epoch_and_sample_alone() -> None:
    """Random choices do not depend on the split; another epoch or seed makes other choices."""
    data = augmented()
    whole = data.load(3, (4, 7), 5)["x"]
    halves = torch.cat([data.load(3, (index,), 5)["x"] for index in (4, 7)])
    assert torch.equal(whole, halves)
    for epoch, seed in ((2, 5), (3, 6)):
        assert not (data.load(epoch, (4, 7), seed)["x"][:, 1:] == whole[:, 1:]).any()


def drawn(count: list[int]) -> Iterator[AccumulationWindow]:
    """Windows that count how many were drawn."""
    for index in range(1000):
        count.append(index)
        yield (SampleRange(0, (index % 10,)),)


def test_windows_are_drawn_when_requested() -> None:
    """Without workers the plan of the next update may still change."""
    count: list[int] = []
    windows = iter(WindowLoader(augmented(), drawn(count), workers=0, seed=0))
    next(windows)
    assert count == [0]
    next(windows)
    assert count == [0, 1]


def test_workers_read_ahead_but_not_far() -> None:
    """Windows are drawn some parts ahead of use, not all of them; closing leaves no process."""
    count: list[int] = []
    loading = WindowLoader(augmented(), drawn(count), workers=2, seed=0)
    windows = iter(loading)
    next(windows)
    assert 1 < len(count) < 20
    assert len(multiprocessing.active_children()) == 2
    loading.close()
    loading.close()
    assert multiprocessing.active_children() == []


class SampleError(Exception):
    """An error of a user's that pickling would break."""

    def __init__(self, index: int, reason: str) -> None:
        self.index = index
        super().__init__(f"sample {index}: {reason}")


class Faulty:
    """Samples that cannot all be read."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __len__(self) -> int:
        """Samples."""
        return 10

    def __getitem__(self, index: int) -> Tensor:
        """Sample 4 has the fault."""
        if index == 4:
            self.fail(index)
        return torch.tensor(index)

    def fail(self, index: int) -> None:
        """Fail in the way that was asked for."""
        match self.fault:
            case "key":
                raise KeyError("label")
            case "own":
                raise SampleError(index, "is broken")
            case "exit":
                sys.exit("no more")
            case _:
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("key", KeyError, "label"),
        ("own", TrainingError, r"SampleError: sample 4: is broken"),
        ("exit", SystemExit, "no more"),
    ],
)
def test_an_error_in_a_worker_arrives_as_it_is(fault: str, kind: type[BaseException], words: str) -> None:
    """The error keeps its type, or is a TrainingError if it cannot be pickled, with the worker's traceback as cause."""
    with pytest.raises(kind, match=words) as caught:
        list(loader(TrainingData(Faulty(fault), torch.stack), 2))
    assert "in fail" in str(caught.value.__cause__)
    assert multiprocessing.active_children() == []


def test_a_worker_that_is_killed_is_an_error_with_a_remedy() -> None:
    """The kernel kills processes when memory runs out: the message recommends fewer workers."""
    with pytest.raises(TrainingError, match="fewer workers"):
        list(loader(TrainingData(Faulty("kill"), torch.stack), 2))
    assert multiprocessing.active_children() == []


def test_a_batch_that_cannot_be_sent_is_an_error() -> None:
    """A worker that cannot send a batch ends, and so does the run, which would otherwise wait forever."""
    data = TrainingData(range(10), lambda samples: {"x": samples, "unsendable": lambda: None})
    with pytest.raises(TrainingError, match="a data-loading worker ended"):
        list(loader(data, 1))
    assert multiprocessing.active_children() == []


_LOADS_ONCE = """
import torch
from batchwright.training.data.base import TrainingData
from batchwright.training.data.loading import SampleRange, WindowLoader
data = TrainingData(range(10), torch.tensor)
print(list(WindowLoader(data, [(SampleRange(0, (1, 2)),)], workers=1, seed=0)))
"""


def test_a_long_name_of_the_temporary_folder_leaves_room_for_sockets(tmp_path: Path) -> None:
    """Addresses of sockets have at most 107 bytes; the workers use another folder and send their batches."""
    folder = tmp_path / ("long-" * 20) / ("name-" * 20)
    folder.mkdir(parents=True)
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", _LOADS_ONCE], env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.strip() == "[[tensor([1, 2])]]"


class Surroundings:
    """Samples that tell of the process that reads them."""

    def __len__(self) -> int:
        """Samples."""
        return 10

    def __getitem__(self, _index: int) -> Tensor:
        """Process, parent, soft memory limit, and whether SIGTERM and SIGINT are ignored or blocked."""
        ignored = [signal.getsignal(number) is signal.SIG_IGN for number in (signal.SIGTERM, signal.SIGINT)]
        blocked = len(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
        return torch.tensor([os.getpid(), os.getppid(), limit, all(ignored), blocked])


def test_a_worker_is_free_of_the_limit_and_leaves_signals_to_its_parent() -> None:
    """Only this process has the memory limit, and only this process reacts to SIGTERM to the group."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    used = 16 * 1024**3
    resource.setrlimit(resource.RLIMIT_DATA, (used, before[1]))
    try:
        ((batch,),) = loader(TrainingData(Surroundings(), torch.stack), 1, ((SampleRange(0, (0,)),),))
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    process, parent, limit, ignored, blocked = batch[0].tolist()
    assert process != os.getpid() == parent
    assert (limit, ignored, blocked) == (before[1], 1, 0)


_LOADS_FOR_EVER = """
import multiprocessing, itertools, time, torch
from batchwright.training.data.base import TrainingData
from batchwright.training.data.loading import SampleRange, WindowLoader
data = TrainingData(range(10), torch.tensor)
windows = iter(WindowLoader(data, (((SampleRange(0, (1,))),) for _ in itertools.count()), workers=2, seed=0))
next(windows)
print(*(child.pid for child in multiprocessing.active_children()), flush=True)
time.sleep(600)
"""


def test_workers_end_with_a_killed_parent() -> None:
    """SIGKILL of the training process leaves no worker."""
    with subprocess.Popen([sys.executable, "-c", _LOADS_FOR_EVER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        workers = [int(word) for word in process.stdout.readline().split()]
        process.kill()
    assert len(workers) == 2
    deadline = time.monotonic() + 60.0
    while any(is_running(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_window_may_have_more_parts_than_a_process_may_open_files() -> None:
    """Batches are copied out of the memory shared with the worker, which takes a descriptor per tensor."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
    try:
        (batches,) = loader(TrainingData(range(10), torch.tensor), 1, ((SampleRange(0, (1,)),) * 400,))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert len(batches) == 400


def test_workers_that_cannot_be_shut_down_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's shutdown starts threads, for which memory may not suffice: workers are killed without a wait."""

    def fail(_self: object) -> None:
        raise RuntimeError("can't start new thread")

    loading = loader(augmented(), 2)
    windows = iter(loading)
    next(windows)
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    monkeypatch.setattr("torch.utils.data.dataloader._MultiProcessingDataLoaderIter._shutdown_workers", fail)
    loading.close()
    assert [worker.exitcode for worker in workers] == [-signal.SIGKILL] * 2


def test_workers_of_a_loader_that_cannot_start_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If memory does not suffice for the threads that feed the workers, an error is raised and no process is left."""
    started: list[object] = []
    start = multiprocessing.queues.Queue._start_thread  # type: ignore[attr-defined]

    def fail_later(queue: object) -> None:
        started.append(queue)
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        start(queue)

    monkeypatch.setattr("multiprocessing.queues.Queue._start_thread", fail_later)
    with pytest.raises(TrainingError, match="use fewer workers"):
        next(iter(loader(augmented(), 2)))
    assert multiprocessing.active_children() == []
