"""Arm a process of a command once torch is imported: limit, hooks, counter, and the end after the wanted updates."""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import time
from types import FrameType
from typing import Any
from weakref import WeakSet

from .counting import UpdateCounter
from .evaluations import Evaluations
from .longest_first import LongestFirst
from .memory import StartMemory, load_libraries_without_limit, memory_of, start_children_without_limit
from .oom_watch import OomWatch
from .reporting import read_settings, report, stacks_path
from .torch_hooks import ModelCall, Observer, TorchHooks, rank_and_world_size
from .torch_internals import trains_batch_norms
from .watching import WatchedProcess

_PASSES_OF_LAST_UPDATE = 2
"""Backward passes of the last update of a plan: the second one runs with gradients, and with the optimizer's state."""
_LARGEST_GROWTH = 0.01
"""Share by which the memory held between two micro-batches may grow within an update, where the last one is cut off."""

_TRIAL_SECONDS, _TRIAL_UPDATES = 2.0, 4.0
"""Longest time that a micro-batch without the limit is waited for: seconds, and so often those of an update."""

_HELPERS = ("--multiprocessing-fork", ".forkserver import main", ".loky.backend.", "/torch/_inductor/")
"""Parts of the command lines of processes that multiprocessing (spawn and forkserver), joblib and torch's compiler
start: they load data or compile, and some train."""


class ImportedTorch:
    """The module torch at the end of its import: hooked, so that later imports find it as the program will."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._start = StartMemory()
        self._hooks = TorchHooks(torch)
        self._hooks.install()

    def before_fork(self) -> None:
        """Record the memory of the process that is forked."""
        self._start.before_fork()

    def arm(self, folder: str) -> None:
        """Arm this process for the probe of a folder, or watch it for the job of one."""
        settings = read_settings(folder)
        report(folder, "torch", pid=os.getpid(), torch=str(self._torch.__version__))
        self._start.after_fork()
        limit_bytes = settings["limit_bytes"]
        if limit_bytes is not None and self._start.earlier_peak_bytes > limit_bytes:
            os._exit(1)  # a fresh process would run out of memory in its imports: the probe is repeated in one
        kind = ArmedProcess if settings["ends"] else WatchedProcess
        armed = kind(self._torch, folder, settings, self._start, self._hooks.data_sets)
        armed.start()
        self._hooks.observers.append(armed)
        if isinstance(armed, ArmedProcess) and settings["longest_first"]:
            self._hooks.choose = armed.longest_first.choose


class ArmedProcess(Observer):
    """This process, from the import of torch to its end.

    The limit counts from the memory at the ``start``; ``data_sets`` are the identities of those that were read.
    """

    def __init__(
        self, torch: Any, folder: str, settings: dict[str, Any], start: StartMemory, data_sets: set[int]
    ) -> None:
        self._torch = torch
        self._data_sets = data_sets
        self._folder = folder
        self._settings = settings
        self._memory = memory_of(torch, settings, start)
        self._counter = self._new_counter()
        self._ooms = OomWatch(settings["oom_texts"], self._report_oom)
        self._starts: list[float] = []
        """Times at which the first call before each backward pass of the current update began."""
        self._gaps: list[float] = []
        self._resident_bytes: int | None = None
        """Bytes held between two micro-batches after the first update, which created the optimizer's state."""
        self._held: list[int] = []
        """Bytes held before the second and before the last micro-batch of the current update."""
        self._growth: tuple[int, int] | None = None
        """Those of the last whole update of several micro-batches."""
        self._last_seconds = 0.0
        """Seconds from the start of the last micro-batch of an update to the end of the update."""
        self._optimizers: WeakSet[Any] = WeakSet()
        self._trained: set[int] = set()
        """The parameters of optimizers that had a gradient at a step."""
        self._calls: dict[frozenset[str], set[tuple[tuple[str, int], ...]]] = {}
        """The numbers of calls that backward passes reached of each model, by the models that they reached."""
        self._shapes: dict[str, tuple[list[int], list[int]]] = {}
        """The smallest and the largest size of each dimension of what models were called with, by its name."""
        self._evaluations = Evaluations()
        self.longest_first = LongestFirst(torch)
        self._first_at: float | None = None
        self._ran = False
        self._is_done = False
        """True once everything was reported, also while a micro-batch without the limit is waited for."""
        self._is_suspended = False
        """True from an error of the program until it trains again, without the limit."""
        self._is_helper = any(part in word for word in getattr(sys, "orig_argv", sys.argv) for part in _HELPERS)
        """True in a process that the program started for a purpose of its own, until it is seen to train. On the CPU
        it has no limit until then."""
        self._read_early = _variables_of_torch() if start.is_of_server else None
        """Variables that the imports of a fork server have read, and a fresh process reads later."""

    def start(self) -> None:
        """Install everything, and set the limit last."""
        self._stacks = open(stacks_path(self._folder), "w")  # noqa: SIM115 - open as long as the process
        faulthandler.register(self._settings["stacks_signal"], self._stacks, all_threads=True)
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self._report_exit)
        self._ooms.watch_uncaught()
        self._evaluations.watch(self._torch)
        if self._memory.is_of_card:
            self._ooms.watch_card(self._torch)
        else:
            self._ooms.watch_own_code()
            start_children_without_limit()
            load_libraries_without_limit()
        if self._memory.is_of_card or not self._is_helper:
            self._memory.limit()

    def _forked(self) -> None:
        """Count anew in a forked process, which is a helper until it trains."""
        self._memory.lift()
        self._counter = self._new_counter()
        self._ran, self._is_done, self._is_suspended, self._is_helper = False, False, False, True
        self._starts, self._gaps, self._held = [], [], []

    def _trains(self) -> None:
        """Take it that this process trains: a helper has the limit from here on."""
        if self._is_helper:
            self._is_helper = False
            if not self._memory.is_of_card:
                self._memory.limit()
            if self._ran:
                self._report("forward")

    # --- what the hooks see ---

    def called(self) -> None:
        """Prepare for a micro-batch, which a call of a model begins."""
        self._begin()
        if len(self._starts) == self._counter.waiting_passes:
            self._starts.append(time.monotonic())
            held = self._memory.held_bytes() if self._settings["counts_plan"] and self._counter.waiting_passes else None
            if held is not None:
                self._held[1:] = [held]
        if self._resident_bytes is None and self._counter.updates and self._counter.waiting_passes:
            self._resident_bytes = self._memory.held_bytes()

    def evaluated(self, *, in_training_mode: bool) -> None:
        """Take a call of a model without gradients."""
        has_trained = bool(self._counter.updates or self._counter.waiting_passes)
        self._evaluations.saw(in_training_mode=in_training_mode, has_trained=has_trained)

    def iterated(self) -> None:
        """Count the epochs of data loaders."""
        self._counter.iterate()

    def _begin(self) -> None:
        if self._is_suspended:
            self._is_suspended = False
            self._memory.limit()
        if self._ran:
            return
        self._ran = True
        self._memory.check_devices()
        if not self._is_helper:
            self._report("forward")

    def went_backward(self, call: ModelCall | None, drawn: dict[str, int | None], reached: dict[str, int]) -> None:
        """Count a backward pass."""
        self._trains()
        self._begin()
        self._counter.backward(call.shape if call else None, drawn)
        self._calls.setdefault(frozenset(reached), set()).add(tuple(sorted(reached.items())))
        named = {call.model + "." + name: shape for name, shape in call.shapes.items()} if call else {}
        for name, shape in named.items():
            smallest, largest = self._shapes.setdefault(name, (list(shape), list(shape)))
            smallest[:], largest[:] = map(min, smallest, shape), map(max, largest, shape)
        # Ever more rarely.
        waiting = self._counter.waiting_passes
        if waiting & (waiting - 1) == 0 or waiting == self._settings["most_passes"]:
            self._report("backward", waiting=waiting, optimizers=len(self._optimizers))
        if self._is_done:
            self._finish()
        elif self._settings["counts_plan"] and self._has_held_all():
            self._memory.synchronize()
            self._finish()

    def _has_held_all(self) -> bool:
        """Return whether this process has held, in its last update, the memory of every later one.

        The whole updates before were counted, and created the optimizers' state. Then the second micro-batch holds all
        that any later one does, with two exceptions. What the program keeps of each micro-batch is seen in the whole
        updates, and has to be small and to find room. A process group reduces gradients in the last micro-batch, so
        that with one, of a single rank too, every update is made whole.
        """
        counter = self._counter
        if counter.waiting_passes < _PASSES_OF_LAST_UPDATE or not counter.is_in_last(map(id, self._idle_optimizers())):
            return False
        distributed = self._torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            return False
        if self._growth is None or counter.updates[-1].backward_passes <= _PASSES_OF_LAST_UPDATE:
            return False
        before, after = self._growth
        if after - before - self._memory.held_step_bytes > _LARGEST_GROWTH * before:
            return False
        peaks = self._memory.peaks()
        used, limit = peaks.get("reserved_bytes", peaks.get("process_peak_bytes")), peaks.get("limit_bytes")
        return limit is None or used is None or used + after - before <= limit

    def constructed(self, optimizer: Any) -> None:
        """Keep an optimizer in mind, as long as the program has it."""
        self._trains()
        self._optimizers.add(optimizer)

    def discarded(self, optimizer: Any) -> None:
        """Count gradients that are set to zero, which Lightning does between a forward pass and its backward pass."""
        if self._counter.waiting_passes:
            self._starts.clear()
            self._held.clear()
        self._counter.discard(id(optimizer))

    def stepped(self, optimizer: Any) -> None:
        """Count a step, and end after the wanted ones."""
        if self._is_done:
            return
        self._memory.synchronize()
        now = time.monotonic()
        self._first_at = self._first_at or now
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self._trained.update(id(each) for each in parameters if each.grad is not None)
        if self._counter.step(id(optimizer), now):
            self._gaps.extend(later - earlier for earlier, later in zip(self._starts, self._starts[1:]))  # noqa: B905 - Python 3.9 has neither
            self._last_seconds = now - self._starts[-1] if self._starts else 0.0
            self._growth = (self._held[0], self._held[-1]) if self._held else None
            self._starts, self._held = [], []
            self._memory.follow_contexts()
            self._report_update(optimizer)
        elif self._counter.steps <= self._settings["updates"]:
            self._report("idle-step", optimizer=_name(optimizer))
        waits = self._settings["awaits_optimizers"] and now - self._first_at < self._settings["patience_seconds"]
        awaited = map(id, self._idle_optimizers()) if waits else ()
        if self._counter.is_exhausted or self._counter.is_complete(awaited):
            self._finish()

    def _idle_optimizers(self) -> list[Any]:
        """The optimizers that the program has, of whose parameters none had a gradient at a step of any optimizer."""
        found = [(optimizer, _trainable(optimizer)) for optimizer in self._optimizers]
        return [it for it, parameters in found if parameters and not any(id(p) in self._trained for p in parameters)]

    def failed(self, error: BaseException, where: str) -> None:
        """Look at an exception that passes a hooked function.

        After an error that is no OOM the program has no limit until it trains again: what it does then, such as saving
        its state, takes memory that no update takes, and an OOM would hide the error.
        """
        if not self._ooms.saw(error, where):
            self._is_suspended = self._memory.suspend() or self._is_suspended

    # --- reports ---

    def _report(self, event: str, **fields: object) -> None:
        report(self._folder, event, pid=os.getpid(), **fields)

    def _report_update(self, optimizer: Any) -> None:
        rank, world_size = self._rank()
        update = self._counter.updates[-1]
        self._report(
            "update",
            rank=rank,
            world_size=world_size,
            number=len(self._counter.updates),
            optimizer=_name(optimizer),
            optimizer_number=list(dict.fromkeys(each.optimizer for each in self._counter.updates)).index(id(optimizer)),
            backward_passes=update.backward_passes,
            samples=update.samples,
            ended_at=update.ended_at,
        )

    def _report_oom(self, kind: str, message: str, where: str) -> None:
        self._memory.lift()
        self._check_variables()
        rank, _ = self._rank()
        fields = {"type": kind, "message": message, "where": where, "rank": rank}
        self._report("oom", **fields, evaluation=self._evaluation(where), **self._memory.peaks())

    def _evaluation(self, where: str) -> str | None:
        """Return whether an OOM came `in` or `after` a call of a module without gradients; none without any."""
        call = self._torch.nn.Module._call_impl.__code__  # noqa: SLF001
        frame: FrameType | None = sys._getframe()  # noqa: SLF001
        while where != "forward" and frame is not None:
            where = "forward" if frame.f_code is call else where
            frame = frame.f_back
        if where == "forward" and not self._torch.is_grad_enabled():
            return "in"
        return "after" if self._evaluations.ran_without_gradients else None

    def _report_exit(self) -> None:
        """Report what a process that ends by itself has done, and its peaks, which show whether memory is the reason.

        It may end while more than the wanted updates are waited for.
        """
        if self._is_helper:
            return
        self._memory.lift()
        if self._counter.steps >= self._settings["updates"] and not self._is_done:
            self._report_done()
        self._report("exit", **self._memory.peaks())

    def _check_variables(self) -> None:
        """End this process where its program has set a variable too late: the probe is repeated in a fresh one."""
        if self._read_early is not None and self._read_early != _variables_of_torch():
            os._exit(1)

    def _rank(self) -> tuple[int, int]:
        return rank_and_world_size(self._torch)

    def _finish(self) -> None:
        """Report everything, and wait for the end: this process does nothing of its program any more.

        Near the limit of the CPU one more micro-batch runs without it first, for some time at most: math libraries
        take less where an allocation fails, and the job has no limit. Ranks would wait for each other.
        """
        goes_on = not self._is_done and self._rank()[1] == 1 and self._memory.begin_trial(self._torch.get_num_threads())
        self._memory.lift()
        self._check_variables()
        if self._is_done:
            self._report("done", trial_seconds=0.0, was_tried=True, **self._memory.peaks())
        else:
            self._report_done(_TRIAL_SECONDS + _TRIAL_UPDATES * self._last_seconds if goes_on else 0.0)
        self._is_done = True
        if not goes_on:
            sys.settrace(None)
            while True:
                time.sleep(3600.0)

    def _report_done(self, trial_seconds: float = 0.0) -> None:
        """Report everything that was seen, and for how long a micro-batch without the limit is waited for."""
        rank, world_size = self._rank()
        idle = self._idle_optimizers()
        groups = [group for it in self._optimizers if it not in idle for group in it.param_groups]
        held = {id(p): int(p.numel()) for group in groups for p in group["params"]}
        gaps = sorted(self._gaps)
        middle = gaps[len(gaps) // 2] if gaps else None
        passes = self._counter.updates[-1].backward_passes if self._counter.updates else 1
        peaks = self._memory.peaks()
        self._report(
            "done",
            rank=rank,
            world_size=world_size,
            skipped=self._counter.skipped,
            epoch_ends=sorted(self._counter.epoch_ends),
            shapes=self._shapes,
            idle_optimizers=[[_name(it), sum(p.numel() for p in _trainable(it))] for it in idle],
            calls_vary=any(len(counts) > 1 for counts in self._calls.values()),
            idle_parameters=sum(count for key, count in held.items() if key not in self._trained),
            held_parameters=sum(held.values()),
            later_evaluation=self._evaluations.later(self._data_sets),
            micro_batch_seconds=middle,
            update_seconds=self._last_seconds + (passes - 1) * (middle or 0.0),
            resident_bytes=self._resident_bytes,
            python=".".join(str(part) for part in sys.version_info[:3]),
            longest_first=self.longest_first.drawn,
            batch_norms=trains_batch_norms(self._torch),  # takes memory, and so follows the peaks
            trial_seconds=trial_seconds,
            was_tried=False,
            **peaks,
        )

    def _new_counter(self) -> UpdateCounter:
        return UpdateCounter(self._settings["updates"], self._settings["passes"])


def _variables_of_torch() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("TORCH")}


def _trainable(optimizer: Any) -> list[Any]:
    return [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]


def _name(optimizer: Any) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
