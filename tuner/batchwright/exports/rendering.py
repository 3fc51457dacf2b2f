"""Rendering of export files: every value is quoted by the rules of the format, so that no value can end its string."""

import json
import re
import shlex
from collections.abc import Mapping

import yaml
from pydantic import JsonValue

from batchwright.errors import ExportError
from batchwright.exports.advice import how_to_verify
from batchwright.exports.base import ExportContext, ExportedFile
from batchwright.units import counted

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class _Dumper(yaml.SafeDumper):
    """YAML dumper that writes texts of several lines as literal blocks."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Quote and escape texts that PyYAML would not read back unchanged, for example with `U+0085`."""
        plain = text.replace("\n", "").isprintable()
        lines = "\n" in text and not text[0].isspace()
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=("|" if lines else None) if plain else '"')


_Dumper.add_representer(str, _Dumper.represent_text)


def json_file(name: str, document: Mapping[str, JsonValue]) -> ExportedFile:
    """Build a JSON file with the keys in the order of ``document``."""
    text = json.dumps(document, indent=2, ensure_ascii=False)
    return ExportedFile(name=name, media_type="application/json", content=text + "\n")


def yaml_file(
    name: str, context: ExportContext, *documents: Mapping[str, JsonValue], comments: tuple[str, ...] = ()
) -> ExportedFile:
    """Build a YAML file that begins with its origin and with ``comments``, a line each."""
    head = origin(context) + "".join(f"# {one_line(line)}\n" for line in comments)
    parts = [yaml_text(document) for document in documents]
    return ExportedFile(name=name, media_type="application/yaml", content=head + "---\n".join(parts))


def yaml_text(document: Mapping[str, JsonValue]) -> str:
    """Render a YAML document with the keys in the order of ``document``, and texts of several lines as blocks."""
    return yaml.dump(dict(document), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def script_file(name: str, content: str) -> ExportedFile:
    """Build a shell script."""
    return ExportedFile(name=name, media_type="text/x-shellscript", content=content)


def python_file(name: str, content: str) -> ExportedFile:
    """Build a Python module."""
    return ExportedFile(name=name, media_type="text/x-python", content=content)


def origin(context: ExportContext) -> str:
    """Comment lines (`#`) with the recommendation and the plan of a file."""
    plan, recommendation = context.plan, context.recommendation
    smallest = min(min(rank) for rank in plan.micro_batch_sizes)
    size = plan.micro_batch_size
    sizes = f"{size}" if smallest == size else f"{smallest} to {size}"
    layout = (
        f"{counted(plan.world_size, 'rank')} x {counted(plan.gradient_accumulation_steps, 'step')} of {sizes} samples"
    )
    lines = [
        f"Made by Batchwright from recommendation {recommendation.id}.",
        f"Effective batch {plan.effective_batch_size}: {layout}.",
    ]
    if not plan.exact:
        lines.append(plan.change)
    lines.append(how_to_verify(context))
    return "".join(f"# {one_line(line)}\n" for line in lines)


def one_line(text: str) -> str:
    """Escape line breaks and unprintable characters, so that the text stays on one line."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def program_path(script: str) -> str:
    """The path of a script, written so that no launcher parses it as an option."""
    return f"./{script}" if script.startswith("-") else script


def export_lines(environment: Mapping[str, str]) -> str:
    """``export`` lines of a POSIX shell script."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in checked_environment(environment).items())


def variables_to_unset(context: ExportContext) -> tuple[str, ...]:
    """Names of allocator settings that the probes did not have, which the job must not have either."""
    recommendation = context.recommendation
    variables = recommendation.device.traits.allocator_variables
    return tuple(name for name in variables if name not in recommendation.environment)


def unset_line(context: ExportContext) -> str:
    """The ``unset`` line of a POSIX shell script for ``variables_to_unset``; empty without any."""
    names = variables_to_unset(context)
    return f"unset {' '.join(names)}\n" if names else ""


def checked_environment(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Check that every shell and scheduler can set the variables, and return them.

    Raises:
        ExportError: naming the variable that cannot be set.
    """
    for name, value in environment.items():
        if not _VARIABLE.fullmatch(name) or "\0" in value:
            raise ExportError(
                "wrong-environment",
                f"{name!r} is not a valid name of an environment variable, or its value contains NUL",
            )
    return environment


def plan_variables(context: ExportContext) -> dict[str, str]:
    """The recommendation's variables, and the plan in `BATCHWRIGHT_*`.

    Effective batch, world size and the largest micro-batch define the plan; the steps are for loops that count.
    """
    plan = context.plan
    return {
        **checked_environment(context.recommendation.environment),
        "BATCHWRIGHT_EFFECTIVE_BATCH_SIZE": str(plan.effective_batch_size),
        "BATCHWRIGHT_WORLD_SIZE": str(plan.world_size),
        "BATCHWRIGHT_MICRO_BATCH_SIZE": str(plan.micro_batch_size),
        "BATCHWRIGHT_GRADIENT_ACCUMULATION_STEPS": str(plan.gradient_accumulation_steps),
    }


def json_word(value: JsonValue) -> str:
    """Return a value as an argument of a command line: a text as it is, any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value)
