"""Reads exports with the parsers of their formats, and compares two of them for what strings may change."""

import ast
import json
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from batchwright.exports.base import Export, ExportedFile

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SAFE = re.compile(r"[A-Za-z0-9._:+,/=@-]*")
"""Strings without meaning to a shell, to YAML inside a value, or to a scheduler."""


def documents(file: ExportedFile) -> Any:
    """Parse a file with the parser of its format."""
    if file.media_type == "application/json":
        return json.loads(file.content)
    if file.media_type == "application/yaml":
        return list(yaml.load_all(file.content, _LOADER))
    if file.media_type == "text/x-python":
        return _constants(ast.parse(file.content))
    return shlex.split(file.content, comments=True)


# --- figures ---


def figures(export: Export) -> dict[str, int]:
    """The batch sizes in the files: `micro`, `steps`, `world` and `effective`, as far as this target does."""
    reader = _FIGURES.get(export.format)
    return reader(export) if reader else _in_environment(export)


def _in_environment(export: Export) -> dict[str, int]:
    """Of a launcher: the variables, and the topology of `torchrun`."""
    text = "\n".join([*(file.content for file in export.files), shlex.join(export.command)])
    names = {"effective": "EFFECTIVE_BATCH_SIZE", "world": "WORLD_SIZE", "micro": "MICRO_BATCH_SIZE"}
    names["steps"] = "GRADIENT_ACCUMULATION_STEPS"
    found = {
        key: _only(rf"BATCHWRIGHT_{name}[\\\"']*\s*[:=]?\s*(?:value:)?\s*[\\\"']*(\d+)", text)
        for key, name in names.items()
    }
    nodes = _only(r"(?:--nnodes=|numNodes: )(\d+)", text, default=1)
    assert nodes * _only(r"--nproc-per-node=(\d+)", text) == found["world"]
    return found


def _only(pattern: str, text: str, default: int | None = None) -> int:
    """The one number that matches, however often."""
    numbers = {int(item) for item in re.findall(pattern, text)}
    if not numbers and default is not None:
        return default
    (number,) = numbers
    return number


def _flags(words: list[str]) -> dict[str, str]:
    return dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--") and "=" in word)


def _first(export: Export) -> Any:
    found = documents(export.files[0])
    return found[0] if export.files[0].media_type == "application/yaml" else found


def _pytorch(export: Export) -> dict[str, int]:
    names = {"effective": "EFFECTIVE_BATCH_SIZE", "micro": "MICRO_BATCH_SIZE", "world": "WORLD_SIZE"}
    return {key: _assigned(export, name) for key, name in names.items()}


def _assigned(export: Export, name: str) -> Any:
    """The value of a constant of a module."""
    for node in ast.parse(export.files[0].content).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
            return eval(compile(ast.Expression(node.value), "", "eval"))  # noqa: S307 - a literal that we wrote
    raise AssertionError(name)


def _hugging_face(export: Export) -> dict[str, int]:
    read = _first(export)
    return {"micro": read["per_device_train_batch_size"], "steps": read["gradient_accumulation_steps"]}


def _accelerate(export: Export) -> dict[str, int]:
    (script,) = [file.content for file in export.files if file.media_type == "text/x-shellscript"]
    variables = dict(
        part.split("=", 1) for part in shlex.split(script, comments=True) if part.startswith("BATCHWRIGHT_")
    )
    assert _first(export)["num_processes"] == int(variables["BATCHWRIGHT_WORLD_SIZE"])
    steps = export.environment["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"]
    assert steps == variables["BATCHWRIGHT_GRADIENT_ACCUMULATION_STEPS"]
    names = {"effective": "EFFECTIVE_BATCH_SIZE", "micro": "MICRO_BATCH_SIZE", "world": "WORLD_SIZE"}
    return {"steps": int(steps), **{key: int(variables[f"BATCHWRIGHT_{name}"]) for key, name in names.items()}}


def _lightning(export: Export) -> dict[str, int]:
    read = _first(export)
    trainer = read["trainer"]
    return {
        "micro": read["data"]["batch_size"],
        "steps": trainer["accumulate_grad_batches"],
        "world": trainer["devices"] * trainer["num_nodes"],
    }


def _deepspeed(export: Export) -> dict[str, int]:
    read = _first(export)
    return {
        "effective": read["train_batch_size"],
        "micro": read["train_micro_batch_size_per_gpu"],
        "steps": read["gradient_accumulation_steps"],
    }


def _megatron(export: Export) -> dict[str, int]:
    read = _flags(_first(export))
    return {"micro": int(read["micro-batch-size"]), "effective": int(read["global-batch-size"])}


def _torchtitan(export: Export) -> dict[str, int]:
    training, parallelism = _assigned(export, "TRAINING"), _assigned(export, "PARALLELISM")
    world = parallelism["data_parallel_replicate_degree"] * parallelism["data_parallel_shard_degree"]
    if "local_batch_size" in training:
        return {"micro": training["local_batch_size"], "effective": training["global_batch_size"], "world": world}
    length = training["max_context_length"]
    tokens = training["num_tokens_per_microbatch_per_dp_rank"], training["num_tokens_per_train_step"]
    assert [token % length for token in tokens] == [0, 0]
    return {"micro": tokens[0] // length, "effective": tokens[1] // length, "world": world}


def _nemo_automodel(export: Export) -> dict[str, int]:
    read = _first(export)["step_scheduler"]
    return {"micro": read["local_batch_size"], "effective": read["global_batch_size"]}


def _axolotl(export: Export) -> dict[str, int]:
    read = _first(export)
    return {"micro": read["micro_batch_size"], "steps": read["gradient_accumulation_steps"]}


def _llama_factory(export: Export) -> dict[str, int]:
    read = _first(export)
    if "micro_batch_size" in read:
        return {"micro": read["micro_batch_size"], "effective": read["global_batch_size"]}
    return _hugging_face_of(read)


def _hugging_face_of(read: Any) -> dict[str, int]:
    return {"micro": read["per_device_train_batch_size"], "steps": read["gradient_accumulation_steps"]}


_FIGURES: Mapping[str, Callable[[Export], dict[str, int]]] = {
    "pytorch": _pytorch,
    "hugging-face": _hugging_face,
    "accelerate": _accelerate,
    "lightning": _lightning,
    "deepspeed": _deepspeed,
    "megatron": _megatron,
    "torchtitan": _torchtitan,
    "nemo-automodel": _nemo_automodel,
    "axolotl": _axolotl,
    "llama-factory": _llama_factory,
}


# --- what strings may change ---


def differences(plain: Export, hostile: Export, swaps: Mapping[str, str]) -> list[str]:
    """Differences between the second export and the first with its strings swapped; empty if strings stayed values."""
    found = []
    for one, other in zip(plain.files, hostile.files, strict=True):
        found += _unlike(f"{one.name}:", documents(one), documents(other), swaps)
        if one.media_type == "text/x-shellscript":
            found += _unlike(f"{one.name} as a script:", _active(one.content), _active(other.content), {})
    found += _unlike("command:", list(plain.command), list(hostile.command), swaps)
    return found + _unlike("environment:", plain.environment, hostile.environment, swaps)


def _unlike(where: str, one: Any, other: Any, swaps: Mapping[str, str]) -> list[str]:
    if isinstance(one, str) and isinstance(other, str):
        return [] if _same_text(one, other, swaps) else [f"{where} {one!r} became {other!r}"]
    if isinstance(one, dict) and isinstance(other, dict) and _names(one) == _names(other):
        return [item for name in _names(one) for item in _unlike(f"{where}.{name}", one[name], other[name], swaps)]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [
            item
            for n, pair in enumerate(zip(one, other, strict=True))
            for item in _unlike(f"{where}[{n}]", *pair, swaps)
        ]
    return [] if one == other else [f"{where} {one!r} became {other!r}"]


def _names(mapping: dict[str, Any]) -> list[str]:
    """The keys but the one for devices whose name makes a label; what that holds cannot be anything but a label."""
    assert all(_SAFE.fullmatch(item) for item in mapping.get("nodeSelector", {}).values())
    return [item for item in mapping if item != "nodeSelector"]


def _same_text(one: str, other: str, swaps: Mapping[str, str]) -> bool:
    """Whether a text holds the hostile strings in place of the plain ones.

    As they are, as Kubernetes expands them, inside YAML or a shell's words, or made harmless.
    """
    swapped = _swapped(one, swaps)
    if swapped in {other, other.replace("$$", "$")} or _SAFE.fullmatch(other):
        return True
    return _same_nested_yaml(one, other, swaps) or _same_words(one, other, swaps)


def _swapped(text: str, swaps: Mapping[str, str]) -> str:
    for plain, hostile in swaps.items():
        text = text.replace(plain, hostile)
    return text


def _same_nested_yaml(one: str, other: str, swaps: Mapping[str, str]) -> bool:
    try:
        parsed = [yaml.load(item, _LOADER) for item in (one, other)]  # noqa: S506 - a safe loader
    except yaml.YAMLError:
        return False
    return isinstance(parsed[0], (dict, list)) and not _unlike("", parsed[0], parsed[1], swaps)


def _same_words(one: str, other: str, swaps: Mapping[str, str]) -> bool:
    try:
        words = [shlex.split(item, comments=True) for item in (one, other)]
    except ValueError:
        return False
    return [_swapped(word, swaps) for word in words[0]] == words[1] and _active(one) == _active(other)


def _active(script: str) -> str:
    """The text that a shell interprets: the script without comments and without what stands in single quotes."""
    text = re.sub(r"'[^']*'|\"(?:[^\"\\]|\\.)*\"|(?:^|(?<=\s))#[^\n]*", _outside_single_quotes, script)
    while 'Q"\'"Q' in text:
        text = text.replace('Q"\'"Q', "Q")
    return text


def _outside_single_quotes(found: re.Match[str]) -> str:
    kind = found[0][0]
    return {"'": "Q", "#": ""}.get(kind, found[0])


def _constants(tree: ast.Module) -> Any:
    """A module as nested lists, so that its strings can be compared one by one."""
    return _node(tree)


def _node(node: Any) -> Any:
    if isinstance(node, ast.Constant):
        return [node.value]
    if isinstance(node, ast.AST):
        return {type(node).__name__: {name: _node(value) for name, value in ast.iter_fields(node)}}
    if isinstance(node, list):
        return [_node(item) for item in node]
    return node
