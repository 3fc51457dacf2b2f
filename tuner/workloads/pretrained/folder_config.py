"""Read the config of a pretrained model into a spec. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner.errors import DataOutsideRootsError, FieldProblem, SpecError
from tuner.schemas.base import parse_document
from tuner.schemas.workload import TransformersModel, WorkloadSpec
from tuner.system.data_roots import ANY_FILE, DataRoots

CONFIG = "config.json"
_LARGEST_CONFIG = 16 * 2**20
"""Bytes of a config that are read: a hundred times those of a model with a name for each of 20,000 classes."""
_NOT_OF_THE_MODEL = {"dtype", "gradient_checkpointing", "torch_dtype", "transformers_version"}
"""Fields that the spec decides itself (its precision, activation checkpointing), and the writer's version."""


def with_pretrained_config(spec: WorkloadSpec, roots: DataRoots = ANY_FILE) -> WorkloadSpec:
    """Return ``spec`` with the whole config of its pretrained model, in which the fields of the spec take precedence.

    From then on the spec describes the model without its folder, which only a run needs again.

    Args:
        spec: any spec; one without a pretrained model is returned unchanged.
        roots: the folders that may be read.

    Raises:
        SpecError: when the folder has no usable config, or one of another type of model than the spec says.
        DataOutsideRootsError: when the folder, or a link in it, leads outside the roots.
    """
    model = spec.model
    if not isinstance(model, TransformersModel) or model.pretrained is None:
        return spec
    folder = Path(model.pretrained).expanduser().absolute()
    found = _fields(_read(folder, roots), folder)
    if model.model_type and found["model_type"] != model.model_type:
        message = f"is {model.model_type}, but {folder} holds a model of type {found['model_type']}"
        raise SpecError([FieldProblem("model.config.model_type", message)])
    complete = {"config": _merged(found, model.config), "pretrained": str(folder)}
    document = spec.model_dump(mode="json")
    return parse_document(WorkloadSpec, {**document, "model": {**document["model"], **complete}}, "spec")


def _read(folder: Path, roots: DataRoots) -> Any:  # noqa: ANN401 - parsed JSON
    path = folder / CONFIG
    try:
        with roots.open(path) as stream:
            content = stream.read(_LARGEST_CONFIG + 1)
        if len(content) > _LARGEST_CONFIG:
            raise _problem(f"{path} has more than {_LARGEST_CONFIG >> 20} MiB, which is no config")
        return json.loads(content)
    except DataOutsideRootsError:
        raise
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}"
        raise _problem(f"{path} {reason}; give the folder of a model that `save_pretrained` wrote") from None
    except ValueError as error:
        raise _problem(f"{path} is not JSON: {error}") from None


def _fields(config: Any, folder: Path) -> dict[str, Any]:  # noqa: ANN401 - parsed JSON
    """The fields of a config that describe the model."""
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise _problem(f"{folder / CONFIG} names no `model_type`: it is not the config of a transformers model")
    if config.get("quantization_config"):
        raise _problem(f"{folder} holds quantised weights, which cannot be trained: give the unquantised model")
    return _described(config)


def _described(fields: Mapping[str, Any]) -> dict[str, Any]:
    """``fields`` without those that say nothing of the model, at any depth."""
    return {
        name: _described(value) if isinstance(value, dict) else value
        for name, value in fields.items()
        if name not in _NOT_OF_THE_MODEL and not name.startswith("_")
    }


def _merged(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``fields`` with ``changes``, also within nested configs."""
    merged = dict(fields)
    for name, value in changes.items():
        nested = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = _merged(merged[name], value) if nested else value
    return merged


def _problem(message: str) -> SpecError:
    return SpecError([FieldProblem("model.pretrained", message)])
