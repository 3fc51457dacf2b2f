"""Files of an export as text: every value is written by the format's own quoting, so that no value can end it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping

import yaml
from pydantic import JsonValue

from tuner.errors import ExportError
from tuner.exports.base import ExportedFile, Order
from tuner.hardware.allocator_env import CUDA_ALLOCATOR_VARIABLES

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class _Dumper(yaml.SafeDumper):
    """Writes lines as lines, not as one line with escapes."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """What PyYAML would not read back as it was (`U+0085` in a plain text, say) is quoted and escaped."""
        plain = text.replace("\n", "").isprintable()
        lines = "\n" in text and not text[0].isspace()
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=("|" if lines else None) if plain else '"')


_Dumper.add_representer(str, _Dumper.represent_text)


def json_file(name: str, document: Mapping[str, JsonValue]) -> ExportedFile:
    """A JSON file, in the order of ``document``."""
    text = json.dumps(document, indent=2, ensure_ascii=False)
    return ExportedFile(name=name, media_type="application/json", content=text + "\n")


def yaml_file(
    name: str, order: Order, *documents: Mapping[str, JsonValue], comments: tuple[str, ...] = ()
) -> ExportedFile:
    """A YAML file that begins with where it comes from, and with ``comments``, a line each."""
    head = origin(order) + "".join(f"# {one_line(line)}\n" for line in comments)
    parts = [yaml_text(it) for it in documents]
    return ExportedFile(name=name, media_type="application/yaml", content=head + "---\n".join(parts))


def yaml_text(document: Mapping[str, JsonValue]) -> str:
    """A YAML document, in the order of ``document``; a text of several lines stands there as such, where YAML can."""
    return yaml.dump(dict(document), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def script_file(name: str, content: str) -> ExportedFile:
    """A shell script."""
    return ExportedFile(name=name, media_type="text/x-shellscript", content=content)


def python_file(name: str, content: str) -> ExportedFile:
    """A Python module."""
    return ExportedFile(name=name, media_type="text/x-python", content=content)


def origin(order: Order) -> str:
    """Comment lines (`#`) that say where the figures of a file come from."""
    figures, recommendation = order.figures, order.recommendation
    smallest = min(min(rank) for rank in figures.micro_batch_sizes)
    size = figures.micro_batch_size
    sizes = f"{size}" if smallest == size else f"{smallest} to {size}"
    plan = f"{figures.world_size} rank(s) x {figures.gradient_accumulation_steps} micro-batch(es) of {sizes} samples"
    lines = [
        f"Made by Batchwright from recommendation {recommendation.id}.",
        f"Effective batch {figures.effective_batch_size}: {plan}.",
    ]
    if not figures.exact:
        lines.append(figures.change)
    return "".join(f"# {one_line(line)}\n" for line in lines)


def one_line(text: str) -> str:
    """Text that stays in a comment: what would break the line, or cannot be printed, is escaped."""
    return "".join(it if it.isprintable() else it.encode("unicode_escape").decode() for it in text)


def program_path(script: str) -> str:
    """A path that what starts it does not take for one of its own options."""
    return f"./{script}" if script.startswith("-") else script


def shell_words(words: tuple[str, ...]) -> str:
    """Words as a POSIX shell reads them back."""
    return shlex.join(words)


def exports_of(environment: Mapping[str, str]) -> str:
    """``export`` lines of a POSIX shell."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in checked(environment).items())


def variables_to_unset(order: Order) -> tuple[str, ...]:
    """Allocator settings which the probes did not have: a job must not find them in its environment."""
    recommendation = order.recommendation
    if recommendation.device.kind != "cuda":
        return ()
    return tuple(name for name in CUDA_ALLOCATOR_VARIABLES if name not in recommendation.environment)


def unset_of(order: Order) -> str:
    """A line of a POSIX shell that takes them away."""
    strange = variables_to_unset(order)
    return f"unset {' '.join(strange)}\n" if strange else ""


def checked(environment: Mapping[str, str]) -> Mapping[str, str]:
    """The variables, if every shell and scheduler can set them.

    Raises:
        ExportError: naming the variable that cannot be set.
    """
    for name, value in environment.items():
        if not _VARIABLE.fullmatch(name) or "\0" in value:
            raise ExportError(
                "wrong-environment", f"{name!r} is no name of an environment variable, or its value holds NUL"
            )
    return environment


def figures_in_environment(order: Order) -> dict[str, str]:
    """The recommendation's variables, and the plan.

    Effective batch, world size and the largest micro-batch tell it whole; the steps are there for loops that count.
    """
    figures = order.figures
    return {
        **checked(order.recommendation.environment),
        "BATCHWRIGHT_EFFECTIVE_BATCH_SIZE": str(figures.effective_batch_size),
        "BATCHWRIGHT_WORLD_SIZE": str(figures.world_size),
        "BATCHWRIGHT_MICRO_BATCH_SIZE": str(figures.micro_batch_size),
        "BATCHWRIGHT_GRADIENT_ACCUMULATION_STEPS": str(figures.gradient_accumulation_steps),
    }
