"""Run the workers of this host in a child process, whose memory and descriptors API clients cannot use up."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from prometheus_client.core import Metric

from batchwright.system.fork_server.spawn import ChildProcess
from batchwright.system.processes import reap, zombies
from batchwright_service import errors
from batchwright_service.errors import ConfigurationError, ServiceError
from batchwright_service.observability.metrics import families_from
from batchwright_service.settings import Settings

_log = logging.getLogger(__name__)

ENTRY = "batchwright_service.entrypoints.hosted_worker"
DISPATCHER = "batchwright_service.entrypoints.hosted_dispatcher"
_FIRST_DELAY_SECONDS = 0.2
_MAX_DELAY_SECONDS = 30.0
_STABLE_SECONDS = 60.0
"""After a process that lived for longer, the restart delay begins at its first value again."""
_FORCED_SECONDS = 15.0
"""Time of a forced shutdown to hand the work back. The process is killed then, and the work's lease expires."""
_MEASURE_SECONDS = 2.0
_LONGEST_MESSAGE = 2**20
"""Bytes; the kernel's buffers hold about 200 KiB of metrics."""
_ORPHAN_SECONDS = 5.0


class WorkerProcess:
    """Workers in a child process, which is restarted when it dies. Safe to share between threads."""

    def __init__(self, settings: Settings, entry: str = ENTRY) -> None:
        self._settings = settings.model_copy(update={"worker": True, "metrics_port": None})
        self._entry = entry
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._forced = False
        self._awaited = False
        self._child: ChildProcess | None = None
        self._supervisor: threading.Thread | None = None
        self._first: queue.SimpleQueue[ServiceError | None] = queue.SimpleQueue()
        self._measuring = threading.Lock()
        self._measured: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.slots: list[str] = []

    @property
    def pid(self) -> int | None:
        """Id of the running process, or None."""
        child = self._child
        return None if child is None else child.process.pid

    def begin(self) -> None:
        """Start the process without waiting for its workers. Does nothing when it was started."""
        if self._supervisor is None:
            # The kernel ends the process with the thread that started it, so this thread lives as long.
            self._supervisor = threading.Thread(target=self._supervise, name="worker-process", daemon=True)
            self._supervisor.start()

    def start(self) -> None:
        """Start the process, and wait until its workers run. Does nothing when they were started.

        Raises:
            ServiceError: the error that prevented the start of its workers.
        """
        if self._awaited:
            return
        self._awaited = True
        self.begin()
        refusal = self._first.get()
        if refusal is not None:
            self.stop()
            raise refusal

    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return self._child is not None

    def notify(self) -> None:
        """Wake the workers to check for work and for cancellations. Never blocks."""
        self._send("wake")

    def request_stop(self) -> None:
        """Begin a graceful stop. Returns at once."""
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
            killing = threading.Timer(_FORCED_SECONDS, child.process.kill)
            killing.daemon = True
            killing.start()

    def stop(self) -> None:
        """Stop gracefully, and wait for the end. Idempotent."""
        self.request_stop()
        if self._supervisor is not None:
            self._supervisor.join()

    def families(self) -> list[Metric]:
        """Return the metrics of the process; empty when it does not respond."""
        with self._measuring:
            number = time.monotonic_ns()
            if self._send("measure", number=number):
                return self._receive_families(number)
        return []

    def _receive_families(self, number: int) -> list[Metric]:
        deadline = time.monotonic() + _MEASURE_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            try:
                message = self._measured.get(timeout=left)
            except queue.Empty:
                break
            if message["number"] == number:
                return families_from(message["families"])
        _log.warning("the metrics of the workers are missing: their process does not respond")
        return []

    def _send(self, command: str, **arguments: int) -> bool:
        child = self._child
        return child is not None and child.channel.send(do=command, **arguments)

    # --- the supervisor's thread ---

    def _supervise(self) -> None:
        delay = _FIRST_DELAY_SECONDS
        while True:
            began = time.monotonic()
            ended, started = self._run_once()
            if not started and not self.slots:  # the first start has failed
                self._first.put(ended)
                return
            if self._stopping.is_set():
                return
            delay = _FIRST_DELAY_SECONDS if time.monotonic() - began > _STABLE_SECONDS else delay
            _log.error("%s; restarting it in %.1f s", ended, delay)
            threading.Thread(target=self._reap_orphans, name="orphans", daemon=True).start()
            if self._stopping.wait(delay):
                return
            delay = min(2 * delay, _MAX_DELAY_SECONDS)

    def _reap_orphans(self) -> None:
        """Reap the children of the dead process: as process 1 of a container, this one has become their parent.

        Reaping a child of this process itself does no harm, since its end is known.
        """
        if not self._stopping.wait(_ORPHAN_SECONDS):
            seen = zombies()
            if not self._stopping.wait(_ORPHAN_SECONDS):
                reap(seen & zombies())

    def _run_once(self) -> tuple[ServiceError, bool]:
        """Run the process to its end; return the error of its end, and whether its workers ran."""
        try:
            child = ChildProcess(self._entry, keeps_output=False, longest_bytes=_LONGEST_MESSAGE)
        except OSError as error:
            return ConfigurationError(f"the process of the workers cannot be started: {error}"), False
        # The settings are in no environment, because what the workers run inherits theirs.
        child.channel.send(settings=self._settings.model_dump(mode="json"))
        with self._lock:
            self._child = child
        if self._stopping.is_set():
            self._send("force_stop" if self._forced else "stop")
        refusal, started = None, False
        with suppress(EOFError):
            while (message := child.channel.receive()) is not None:
                if "started" in message:
                    started = True
                    first, self.slots = not self.slots, message["started"]
                    if first:
                        self._first.put(None)
                elif "refused" in message:
                    kind: Callable[[str], ServiceError] = getattr(errors, message["refused"], ConfigurationError)
                    refusal = kind(message["message"])
                else:
                    self._measured.put(message)
        with self._lock:
            self._child = None
        status = child.process.wait()
        child.close()
        ending = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return refusal or ConfigurationError(f"the process of the workers {ending}"), started
