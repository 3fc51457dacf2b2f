"""Runs the workers of this host in a process of their own, so that no peer of the API takes what work needs."""

from __future__ import annotations

import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from prometheus_client.core import Metric

from service import errors
from service.errors import ConfigurationError, ServiceError
from service.observability.metrics import families_from
from service.settings import Settings
from service.worker.hosting.channel import Channel
from tuner.system.processes import reap, zombies

_log = logging.getLogger(__name__)

ENTRY = "service.entrypoints.hosted_worker"
_FIRST_DELAY_SECONDS = 0.2
_LONGEST_DELAY_SECONDS = 30.0
_STABLE_SECONDS = 60.0
"""A process that has lived for longer did not fail at its start: the next is started after the first delay again."""
_FORCED_SECONDS = 15.0
"""After a second signal the process has this long to hand back what it runs. It is killed then; a lease frees that."""
_MEASURE_SECONDS = 2.0
_ORPHAN_SECONDS = 5.0


class WorkerProcess:
    """Workers in a process of their own, which is started again when it dies. Safe to share between threads.

    Args:
        settings: of the service.
        entry: the module that is the process.
    """

    def __init__(self, settings: Settings, entry: str = ENTRY) -> None:
        self._settings = settings.model_copy(update={"worker": True, "metrics_port": None})
        self._entry = entry
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._forced = False
        self._awaited = False
        self._child: _Child | None = None
        self._supervisor: threading.Thread | None = None
        self._first: queue.SimpleQueue[ServiceError | None] = queue.SimpleQueue()
        self._measuring = threading.Lock()
        self._measured: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.slots: list[str] = []

    @property
    def pid(self) -> int | None:
        """Id of the process, while there is one."""
        child = self._child
        return None if child is None else child.process.pid

    def begin(self) -> None:
        """Start the process, without waiting for it. Does nothing when it was started."""
        if self._supervisor is None:
            # The kernel ends the process with the thread that starts it: this one lasts as long.
            self._supervisor = threading.Thread(target=self._supervise, name="worker-process", daemon=True)
            self._supervisor.start()

    def start(self) -> None:
        """Start the process, and wait until its workers run. Does nothing when they were started.

        Raises:
            ServiceError: the one for which its workers could not be started.
        """
        if self._awaited:
            return
        self._awaited = True
        self.begin()
        refusal = self._first.get()
        if refusal is not None:
            self.stop()
            raise refusal

    def notify(self) -> None:
        """Have the workers look for work and for cancellations now. Never blocks."""
        self._send("wake")

    def request_stop(self) -> None:
        """Begin to end gracefully. Returns at once."""
        self._stopping.set()
        self._send("stop")

    def force_stop(self) -> None:
        """End running work now, and the process if that takes long. Returns at once."""
        self._stopping.set()
        self._send("force_stop")
        with self._lock:
            child, first = self._child, not self._forced
            self._forced = True
        if child is not None and first:
            killing = threading.Timer(_FORCED_SECONDS, child.kill)
            killing.daemon = True
            killing.start()

    def stop(self) -> None:
        """End gracefully, and wait for that. Idempotent."""
        self.request_stop()
        if self._supervisor is not None:
            self._supervisor.join()

    def families(self) -> list[Metric]:
        """The measurements of the process; none when it does not answer."""
        with self._measuring:
            number = time.monotonic_ns()
            if self._send("measure", number=number):
                return self._answer(number)
        return []

    def _answer(self, number: int) -> list[Metric]:
        deadline = time.monotonic() + _MEASURE_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            try:
                answer = self._measured.get(timeout=left)
            except queue.Empty:
                break
            if answer["number"] == number:
                return families_from(answer["families"])
        _log.warning("the metrics are without the workers': their process does not answer")
        return []

    def _send(self, what: str, **more: int) -> bool:
        child = self._child
        return child is not None and child.channel.send({"do": what, **more})

    # --- the supervisor's thread ---

    def _supervise(self) -> None:
        delay = _FIRST_DELAY_SECONDS
        while True:
            began = time.monotonic()
            ended, started = self._run_once()
            if not self._report_first(ended, started=started) or self._stopping.is_set():
                return
            delay = _FIRST_DELAY_SECONDS if time.monotonic() - began > _STABLE_SECONDS else delay
            _log.error("%s; it is started again in %.1f s", ended, delay)
            threading.Thread(target=self._reap_orphans, name="orphans", daemon=True).start()
            if self._stopping.wait(delay):
                return
            delay = min(2 * delay, _LONGEST_DELAY_SECONDS)

    def _report_first(self, ended: ServiceError, *, started: bool) -> bool:
        """Report a first start that failed; return whether the workers ran at any time."""
        if started or self.slots:
            return True
        self._first.put(ended)
        return False

    def _reap_orphans(self) -> None:
        """Wait for what the dead process had started: as process 1 of a container this one has become its parent.

        A process that this one has started itself, and not waited for since, is no loss: its end is known.
        """
        if not self._stopping.wait(_ORPHAN_SECONDS):
            seen = zombies()
            if not self._stopping.wait(_ORPHAN_SECONDS):
                reap(seen & zombies())

    def _run_once(self) -> tuple[ServiceError, bool]:
        """One life of the process: how it ended, and whether its workers ran."""
        try:
            child = _Child(self._settings, self._entry)
        except OSError as error:
            return ConfigurationError(f"the process of the workers cannot be started: {error}"), False
        with self._lock:
            self._child = child
        if self._stopping.is_set():
            self._send("force_stop" if self._forced else "stop")
        refusal, started = None, False
        while (message := child.channel.receive()) is not None:
            if "started" in message:
                started = True
                first, self.slots = not self.slots, message["started"]
                if first:
                    self._first.put(None)
            elif "refused" in message:
                refusal = _error_of(message)
            else:
                self._measured.put(message)
        with self._lock:
            self._child = None
        status = child.end()
        return refusal or ConfigurationError(f"the process of the workers {_in_words(status)}"), started


class _Child:
    """A running process with its settings. It leads a session: a terminal's signals are the service's alone.

    Raises:
        OSError: when it cannot be started.
    """

    def __init__(self, settings: Settings, entry: str) -> None:
        self.channel, theirs = Channel.pair()
        with theirs:
            number = theirs.fileno()
            try:
                self.process = subprocess.Popen(  # noqa: S603 - our own module, in the interpreter that runs this
                    [sys.executable, "-P", "-m", entry, str(number), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(number,),
                    start_new_session=True,
                )
            except OSError:
                self.channel.close()
                raise
        self.channel.send({"settings": settings.model_dump(mode="json")})

    def kill(self) -> None:
        """End it now; nothing happens when it has ended."""
        self.process.kill()

    def end(self) -> int:
        """Wait for its end; its exit status."""
        status = self.process.wait()
        self.channel.close()
        return status


def _error_of(message: dict[str, Any]) -> ServiceError:
    kind: Callable[[str], ServiceError] = getattr(errors, message["refused"], ConfigurationError)
    return kind(message["message"])


def _in_words(status: int) -> str:
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
