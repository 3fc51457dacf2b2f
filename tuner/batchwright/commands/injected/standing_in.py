"""Stand in for a rank that its fork server forks: the process that a launcher started waits, and ends as the rank does.

A launcher starts each rank in a process of its own. This process asks the fork server of that program for a fork with
its own arguments, environment, working directory and output. From then on it passes signals on to the rank, and ends
with the rank's status. Where the server refuses, or there is none, this process goes on as the rank itself.

A request is a file in the folder of the probe. It stays there where the server refuses, so that the supervisor can
start a server that is alike.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from typing import Any

REQUESTS = "ranks"
"""Folder of the requests, below that of the probe."""
PROBLEM = ".problem"
"""End of the name of the file in which a server says why it forks nothing: it follows that of its socket."""
_LONGEST_MESSAGE = 8192
_STANDARD_DESCRIPTORS = (0, 1, 2)
_LIMITS = ("AS", "CORE", "CPU", "FSIZE", "MEMLOCK", "NOFILE", "NPROC", "RSS", "STACK")
"""Limits that a process has of its parent, but for that of data: a launcher that is armed has one of its own."""
_SIGNALS_PASSED_ON = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTERM", "SIGCONT")


def stand_in(address: str, folder: str) -> str | None:
    """Have the server fork the rank, and end with it. Return only where there is no fork, with the reason.

    Args:
        address: the socket of the server.
        folder: the folder of the probe.

    Returns:
        The reason; none where this process is no program of a file or module, which no server can fork.
    """
    words, count = command_line()
    if not words or is_passed_descriptors():
        return None
    path = os.path.join(folder, REQUESTS, str(os.getpid()) + ".json")
    try:
        with open(path, "w", encoding="utf-8") as stream:
            json.dump(request(words, count), stream)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            server.connect(address)
            socket.send_fds(server, [os.fsencode(path)], _STANDARD_DESCRIPTORS)
            answer = json.loads(server.recv(_LONGEST_MESSAGE) or b"{}")
            if "forked" in answer:
                os.unlink(path)
                _await(server)
    except OSError as error:
        return _problem(address) or "no fork server answered (" + str(error.strerror) + ")"
    return str(answer.get("refused") or _problem(address) or "the fork server has ended")


def _problem(address: str) -> str | None:
    try:
        with open(address + PROBLEM, encoding="utf-8") as stream:
            return stream.read()
    except OSError:
        return None


def command_line() -> tuple[list[str], int]:
    """The command line of this process, and how many of its words are the program's arguments.

    Empty where the program is neither a file nor a module.
    """
    if sys.argv[0] != "-m" and not os.path.isfile(sys.argv[0]):
        return [], 0
    with open("/proc/self/cmdline", "rb") as stream:
        words = stream.read().decode(errors="surrogateescape").split("\0")[:-1]
    return words, len(sys.argv) - 1


def is_passed_descriptors() -> bool:
    """Return whether this process was given descriptors that a server does not have."""
    for entry in os.listdir("/proc/self/fd"):
        number = int(entry)
        if number not in _STANDARD_DESCRIPTORS:
            try:
                if os.get_inheritable(number):
                    return True
            except OSError:  # that of the listing
                continue
    return False


def request(words: list[str], count: int) -> dict[str, Any]:
    """Return a request: the figures and settings of the rank, and the state that its server has to share."""
    return {
        "argv": words,
        "arguments": count,
        "working_directory": os.getcwd(),
        "environment": dict(os.environ),
        "ignored_signals": ignored_signals(),
        "alike": state_of_process(words[1 : len(words) - count]),
    }


def state_of_process(words: list[str]) -> dict[str, Any]:
    """Return the state that a forked process inherits from its server, and a fresh one from its launcher.

    Args:
        words: the options of the interpreter, and the program.
    """
    umask = os.umask(0)
    os.umask(umask)
    return {
        "program": words,
        "interpreter": [sys.executable, sys.version, sys.prefix],
        "working directory": os.getcwd(),
        "umask": umask,
        "limits": [list(resource.getrlimit(getattr(resource, "RLIMIT_" + name))) for name in _LIMITS],
        "processors": sorted(os.sched_getaffinity(0)),
        "nice value": os.getpriority(os.PRIO_PROCESS, 0),
        "signal mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "user": [os.getuid(), os.geteuid(), os.getgid(), os.getegid()],
    }


def ignored_signals() -> list[int]:
    """Return the signals that this process ignores. `nohup` has its command ignore SIGHUP; torchrun's ranks do not."""
    return sorted(int(number) for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN)


def _await(server: socket.socket) -> None:
    """Pass signals on until the rank has ended, and end as it did."""

    def pass_on(number: int, _frame: object) -> None:
        try:
            server.send(str(number).encode())
        except OSError:  # the rank has ended
            return

    for name in _SIGNALS_PASSED_ON:
        signal.signal(getattr(signal, name), pass_on)
    for descriptor in _STANDARD_DESCRIPTORS:
        os.close(descriptor)  # a launcher that reads to the end of the output waits for the rank alone
    message = server.recv(_LONGEST_MESSAGE)
    status = int(message) if message else -signal.SIGKILL
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
