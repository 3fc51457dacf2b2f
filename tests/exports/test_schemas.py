"""Exports to frameworks that are not installed match the schemas recorded from their sources."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from batchwright.exports.base import Export
from batchwright.exports.registry import TARGETS, export
from batchwright.schemas.workload import WorkloadSpec
from tests.support.exports.plans import plan
from tests.support.factories import gpt_spec, transformers_spec

SCHEMAS = Path(__file__).parent / "schemas"

_PRECISIONS = ("fp32", "bf16-mixed", "fp16-mixed", "bf16")


def _flags(given: Export) -> Any:
    """The words of a bash array of `--name=value`."""
    words = given.files[0].content.split("BATCH_ARGS=(")[1].split()[:-1]
    return {name: yaml.safe_load(value) for name, _, value in (word.partition("=") for word in words)}


def _sections(given: Export) -> Any:
    """The dictionaries of a Python module; infinity, which JSON lacks, as a word."""
    names: dict[str, Any] = {}
    exec(given.files[0].content, names)  # noqa: S102 - a module that we wrote
    return _without_infinity({"training": names["TRAINING"], "parallelism": names["PARALLELISM"]})


def _yaml(given: Export) -> Any:
    return _without_infinity(yaml.safe_load(given.files[0].content))


def _without_infinity(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_infinity(part) for name, part in value.items()}
    return "inf" if value == math.inf else value


_READERS: dict[str, Callable[[Export], Any]] = {
    "megatron": _flags,
    "torchtitan": _sections,
    "axolotl": _yaml,
    "llama-factory": _yaml,
    "nemo-automodel": _yaml,
}
_RECORDED = [(name, version) for name in _READERS for version in TARGETS[name].versions]


def _specs() -> list[WorkloadSpec]:
    return (
        [
            gpt_spec(precision=precision, activation_checkpointing=recompute, gradient_clipping=limit)
            for precision in _PRECISIONS
            for recompute, limit in ((False, None), (True, 0.5))
        ]
        + [
            transformers_spec("causal-lm", {"model_type": "gpt2"}, batch={"sequence_length": 8}, adapter=adapter)
            for adapter in (
                {"kind": "lora", "alpha": 16, "target_modules": ["c_attn"], "modules_to_save": ["lm_head"]},
                {"kind": "lora", "dropout": 0.1, "target_modules": "all-linear", "use_rslora": True},
                {"kind": "lora", "target_modules": "all-linear", "quantization": {"kind": "nf4"}},
                {"kind": "lora", "target_modules": "all-linear", "quantization": {"kind": "int8"}},
            )
        ]
        + [gpt_spec(optimizer={"name": name}) for name in ("adamw8bit", "lion8bit")]
        + [transformers_spec("causal-lm", {"model_type": "gpt2"}, batch={"sequence_length": 8, "packing": "bfd"})]
    )


@pytest.mark.parametrize(("name", "version"), _RECORDED)
def test_what_is_written_is_in_the_recorded_schema(name: str, version: str) -> None:
    """Names, types and allowed values are those of the target's own sources, whatever the spec."""
    schema = json.loads((SCHEMAS / f"{name}-{version}.json").read_text("utf-8"))
    validator = jsonschema_rs.Draft202012Validator(schema)

    for spec in _specs():
        given = export(plan(64, world_size=2, spec=spec), name, version=version)
        assert [str(error) for error in validator.iter_errors(_READERS[name](given))] == []


def test_every_recorded_schema_says_where_it_was_read_and_belongs_to_a_target() -> None:
    """A schema names its sources, and none is left of a version that is gone."""
    schemas = {path.stem: json.loads(path.read_text("utf-8")) for path in SCHEMAS.glob("*.json")}

    assert set(schemas) >= {f"{name}-{version}" for name, version in _RECORDED}
    assert all(schemas[f"{name}-{version}"]["x-sources"] for name, version in _RECORDED)
