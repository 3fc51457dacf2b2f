"""Checks of where the values of callers may stand: whole words, and whole values of configuration files."""

import json
import re
import secrets
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import yaml

from batchwright.schemas.command import ARGUMENT_PREFIX, placeholders_in, substitute
from batchwright.yaml_loader import Loader

_AROUND = re.compile(r"[A-Za-z0-9_./:=,%+-]*")
"""Text beside a value in a word of `argv`: enough for options, paths and lists, and not for code."""
_TAKES_CODE = re.compile(r"-[A-Za-z]*[cemES]|--(eval|exec|command|split-string|print|import|require)|-exec(dir)?")
"""Options after which shells, interpreters, `env` and `find` take code, a module or a command."""
_SHELL = re.compile(r"(ba|da|z|k|mk|a|fi|c|tc|pw)?sh|busybox")
_SHELL_CODE = re.compile(r"-[A-Za-z]*c|--command")
_RUNS_OTHERS = re.compile(
    r"python[\d.]*|pypy\d*|perl|ruby|node|Rscript|julia|lua|env|torchrun|accelerate|deepspeed|composer|mpirun|mpiexec"
    r"|horovodrun|srun|ray|uv|uvx|poetry|pdm|hatch|pipx|conda|mamba|micromamba|pixi|docker|podman|apptainer|singularity"
    r"|nohup|nice|ionice|time|timeout|stdbuf|setsid|xargs|find|sudo|su|doas|numactl|taskset|chroot|unshare|ssh|make|git"
)
"""Programs that run another one, or code, which their first arguments name."""
_SCRIPT = re.compile(r"\S+\.(py|pyz|sh|pl|rb|js|mjs|R|jl|lua)")
_STEERS_INTERPRETER = re.compile(
    r"LD_\w*|PATH|IFS|ENV|BASH_\w*|SHELLOPTS|PS4|PYTHON\w*|PERL\w*|RUBY\w*|NODE_\w*|GLIBC_\w*|GCONV_PATH|MALLOC_\w*"
    r"|BATCHWRIGHT_\w*|GIT_\w*|EDITOR|PAGER|SHELL"
)
"""Variables by which a text becomes code, or changes how probes are measured."""


@dataclass(frozen=True)
class Placement:
    """The names of arguments that may stand in some places only.

    Attributes:
        selecting: booleans that select a word of `argv`.
        free: texts and paths, which callers choose freely.
        partial: arguments that may have no value.
    """

    selecting: Collection[str]
    free: Collection[str]
    partial: Collection[str]


def arguments_in(text: str) -> list[str]:
    """Return the names of the arguments in a text, in order."""
    return [name.removeprefix(ARGUMENT_PREFIX) for name in placeholders_in(text) if name.startswith(ARGUMENT_PREFIX)]


# --- words ---


def check_words(
    argv: Sequence[Sequence[str]], of_probes: Mapping[str, str], environment: Mapping[str, str], placement: Placement
) -> None:
    """Check the places of values in a command line and its environment.

    Args:
        argv: the words of the command line, in their groups.
        of_probes: words and variables that only probes have, by their fields.
        environment: the environment variables.
        placement: the arguments, by what they may do.

    Raises:
        ValueError: naming the field and the remedy.
    """
    if arguments_in(argv[0][0]):
        raise ValueError("`argv.0` is the program, which no caller may choose: write its name")
    words = [word for group in argv for word in group]
    _check_no_shell_code(words, environment.values(), placement)
    for number, word in enumerate(words):
        for name in arguments_in(word):
            _check_word(words, number, name, placement)
            if name in placement.free:
                _check_names_no_program(words, number, name)
    for field, word in of_probes.items():
        if arguments_in(word):
            raise ValueError(f"`{field}` has a value of a caller: only `argv` may have one")
    for variable, text in environment.items():
        free = [name for name in arguments_in(text) if name in placement.free]
        if free and _STEERS_INTERPRETER.fullmatch(variable):
            raise ValueError(
                f"`environment.{variable}` changes how programs are found or run, so no caller may set it: "
                f"take `{{argument:{free[0]}}}` out"
            )


def _check_no_shell_code(words: Sequence[str], variables: Collection[str], placement: Placement) -> None:
    """Refuse texts of callers beside code for a shell, which may expand them."""
    shells = [number for number, word in enumerate(words) if _SHELL.fullmatch(PurePath(word).name)]
    if not shells or not any(_SHELL_CODE.fullmatch(word) for word in words[shells[0] :]):
        return
    for text in (*words, *variables):
        for name in arguments_in(text):
            if name in placement.free:
                raise ValueError(
                    f"`argv` has code for a shell, which no text of a caller may reach: write the program and its "
                    f"arguments without `{words[shells[0]]} -c`, or take `{{argument:{name}}}` out"
                )


def _check_names_no_program(words: Sequence[str], number: int, name: str) -> None:
    """Refuse a text of a caller before the script of an interpreter or launcher, whose options it would be."""
    program = PurePath(words[0]).name
    if not (_RUNS_OTHERS.fullmatch(program) or _SHELL.fullmatch(program)):
        return
    before = words[1:number]
    if not any(_SCRIPT.fullmatch(word) or previous == "-m" for previous, word in zip(words, before, strict=False)):
        raise ValueError(
            f"`argv` gives `{{argument:{name}}}` to `{words[0]}` itself, which runs what its arguments name: write it "
            "after the script (`train.py`) or module (`-m train`)"
        )


def _check_word(words: Sequence[str], number: int, name: str, placement: Placement) -> None:
    """Check a word with the value of an argument."""
    word, value = words[number], f"{{{ARGUMENT_PREFIX}{name}}}"
    if name in placement.selecting and word != value:
        raise ValueError(f"`argv`: `{value}` selects a whole word, but is in `{word}`: write `{value}` alone")
    if not _AROUND.fullmatch(substitute(word, lambda _: "")):
        raise ValueError(
            f"`argv` has `{value}` within other text, in which a caller's value could become code: make the value a "
            f"word of its own, or write `--{name}={value}`"
        )
    head = word[: word.index(value)]
    if head.startswith("-") and "=" not in head:
        raise ValueError(f"`argv` makes an option of a caller's value, `{word}`: write `--{name}={value}`")
    before = words[number - 1]
    if not head and name in placement.free and _TAKES_CODE.fullmatch(before):
        raise ValueError(
            f"`argv` has `{value}` after `{before}`, after which shells and interpreters take code: use a long option, "
            f"such as `--{name}={value}`"
        )


# --- configuration files ---


def check_files(files: Mapping[str, str], arguments: Collection[str], placement: Placement) -> None:
    """Check that every value of a caller is a whole value of its configuration file.

    Values are written as JSON, which is a scalar of YAML and TOML too. So a template is parsed with a distinct text for
    each value, and every one must be found as a value: not in a comment, a key, or a part of another text.

    Raises:
        ValueError: naming the file, the argument and the remedy.
    """
    for file, template in files.items():
        names = [name for name in arguments_in(template) if name in arguments]
        if not names:
            continue
        if partial := [name for name in names if name in placement.partial]:
            raise ValueError(
                f"`files.{file}` has `{{argument:{partial[0]}}}`, which may have no value: give it a `default`, or set "
                "`required`"
            )
        _check_file(file, template, names)


def _check_file(file: str, template: str, names: Sequence[str]) -> None:
    parse = _PARSERS.get(PurePath(file).suffix)
    if parse is None:
        raise ValueError(
            f"`files.{file}` has values of callers, which are quoted: its name must end with one of "
            f"{', '.join(_PARSERS)}"
        )
    marks: list[str] = []

    def marked(name: str) -> str:
        if not name.startswith(ARGUMENT_PREFIX):
            return "1"
        marks.append(f"{name}:{secrets.token_hex(8)}")
        return json.dumps(marks[-1])

    text = substitute(template, marked)
    try:
        found = list(_values(parse(text)))
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(
            f"`files.{file}` cannot be read with values in the places of `{{argument:{names[0]}}}`, which are quoted "
            f"texts: {str(error).splitlines()[0]}"
        ) from None
    for mark in marks:
        if found.count(mark) != 1:
            name = mark.partition(":")[2].partition(":")[0]
            raise ValueError(
                f"`files.{file}` has `{{argument:{name}}}` within other text, a comment or a key: it must be a whole "
                "value, without quotes of its own, such as `name: {argument:" + name + "}`"
            )


def _values(part: object) -> Iterator[object]:
    """Yield the scalars of a parsed file, apart from keys."""
    if isinstance(part, Mapping):
        for inner in part.values():
            yield from _values(inner)
    elif isinstance(part, list):
        for inner in part:
            yield from _values(inner)
    else:
        yield part


def _yaml_documents(text: str) -> Any:  # noqa: ANN401 - parsed data
    return list(yaml.load_all(text, Loader))


_PARSERS: dict[str, Callable[[str], Any]] = {
    ".json": json.loads,
    ".toml": tomllib.loads,
    ".yaml": _yaml_documents,
    ".yml": _yaml_documents,
}
