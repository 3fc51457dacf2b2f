"""The code blocks of the documents, and a reader who follows a page line by line in a folder of its own.

- A block with ``title="NAME"`` after its language is written to that file.
- ``console``: the lines after ``$ `` are commands of one shell, which must succeed. The lines below a command are what
  it prints, where ``...`` stands for any lines, and any number for any other. A command without such lines may print
  anything. ``$ batchwright serve`` is the service that the tests share, and the address in the page is its address.
- ``bash`` and ``python`` without a title are programs, which must succeed. ``yaml`` and ``json`` are parsed.
- A block after the line ``<!-- not run: REASON -->`` is left out.
- A line ``--8<-- "PATH"`` in a block is the file at that path of the repository, as on the built page.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from batchwright.system.processes import kill_group
from tests.support.paths import ROOT

ADDRESS = "http://127.0.0.1:8000"
"""The service's address in the documents."""
SERVE = "batchwright serve"
_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>.+?) -->\n)?"
    r"```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```",
    re.MULTILINE | re.DOTALL,
)
_INCLUDED = re.compile(r'^--8<-- "(?P<path>[^"]+)"\n', re.MULTILINE)
_SECONDS = 300
"""Longest time of a block, so that a hang fails the test."""
_MARK = "\x1e"
"""Separates what the commands of a block print."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, text and file name, its line in the document, and why it is not run."""

    language: str
    text: str
    title: str | None
    line: int
    reason: str | None


@dataclass(frozen=True)
class Command:
    """A command of a console block, and the lines that it prints; none when the document shows none."""

    line: str
    prints: str


def blocks_of(document: str) -> list[Block]:
    """Return the fenced blocks of a document in order."""
    return [
        Block(it["language"], included(it["text"]), it["title"], document[: it.start("text")].count("\n"), it["reason"])
        for it in _BLOCK.finditer(document)
    ]


def included(text: str) -> str:
    """Replace each line that includes a file by the file's text."""
    return _INCLUDED.sub(lambda it: (ROOT / it["path"]).read_text(), text)


def commands_of(text: str) -> Iterator[Command]:
    """Yield the commands of a console block; one with an open quote, backslash or here-document goes on."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        lines = part.splitlines()
        length = next(count for count in range(1, len(lines) + 1) if _is_complete("\n".join(lines[:count])))
        yield Command("\n".join(lines[:length]), "".join(f"{line}\n" for line in lines[length:]))


def _is_complete(command: str) -> bool:
    """Return whether a shell would run these lines, and not read on."""
    document = re.search(r"<<'(\w+)'", command)
    if document is not None:
        return command.endswith(f"\n{document[1]}")
    try:
        shlex.split(command)
    except ValueError:
        return False
    return not command.endswith("\\")


def normalized(text: str) -> str:
    """Return printed text with every number as 0, runs of spaces and of rules as one, and lines without indent."""
    text = re.sub(r"\d[\d.,]*", "0", text)
    text = re.sub(r"─+", "─", re.sub(r"[ \t]+", " ", text))
    return "\n".join(line.strip() for line in text.strip().splitlines())


def matches(shown: str, printed: str) -> bool:
    """Return whether a command printed what the document shows."""
    lines = [normalized(line) for line in shown.strip().splitlines()]
    pattern = "".join(r"(?:.*\n)*?" if line == "..." else f"{re.escape(line)}\n" for line in lines)
    return re.fullmatch(pattern, normalized(printed) + "\n") is not None


class Reader:
    """Follow the blocks of a page in a folder.

    Args:
        folder: the empty folder where the reader begins.
        service: returns the address of a running service; called when a block needs one.
    """

    def __init__(self, folder: Path, service: Callable[[], str]) -> None:
        self._folder = folder
        self._service = service
        self._environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "BATCHWRIGHT_DATA_DIR": str(folder / "data"),
            "COLUMNS": "80",
        }

    def assert_works(self, block: Block) -> None:
        """Write, run or parse a block.

        Raises:
            AssertionError: naming what failed, or what was printed instead of what the document shows.
        """
        if block.title is not None:
            path = self._folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self._addressed(block.text))
        elif block.language == "console":
            self._type(block.text)
        elif block.language == "bash":
            self._run(["bash", "-euo", "pipefail", "-c", self._addressed(block.text)])
        elif block.language == "python":
            self._run([sys.executable, "-c", self._addressed(block.text)])
        elif block.language == "yaml":
            yaml.safe_load(block.text)
        elif block.language == "json":
            json.loads(block.text)

    def _addressed(self, text: str) -> str:
        return text.replace(ADDRESS, self._service()) if ADDRESS in text else text

    def _type(self, text: str) -> None:
        """Run the commands of a block in one shell, and compare what they print."""
        commands = list(commands_of(text))
        assert commands, text
        typed = [it for it in commands if it.line != SERVE]
        script = "".join(f"{it.line}\nprintf '{_MARK}%d{_MARK}' $?\n" for it in typed)
        output = self._run(["bash", "-c", self._addressed(script)]) if typed else ""
        if ADDRESS in text:
            output = output.replace(self._service(), ADDRESS)
        ends = output.split(_MARK)
        assert len(ends) == 2 * len(typed) + 1, f"the shell ended early:\n{output}"
        for command, printed, status in zip(typed, ends[::2], ends[1::2], strict=False):
            assert status == "0", f"$ {command.line}\nended with {status}:\n{printed}"
            shown = command.prints
            assert not shown or matches(shown, printed), f"$ {command.line}\nprinted\n{printed}\ninstead of\n{shown}"

    def _run(self, command: list[str]) -> str:
        with subprocess.Popen(
            command,
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                printed, _ = process.communicate(timeout=_SECONDS)
            finally:
                kill_group(process.pid)  # what a block that is too slow has started
        assert process.returncode == 0, f"{command[-1]}\nended with {process.returncode}:\n{printed}"
        return printed
