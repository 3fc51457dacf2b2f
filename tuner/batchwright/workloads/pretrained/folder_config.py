"""Read the config of a pretrained model into a spec. No torch."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from batchwright.errors import DataOutsideRootsError, FieldProblem, SpecError
from batchwright.schemas.base import DEEPEST_JSON, check_json, parse_document
from batchwright.schemas.model.hub import HubModel
from batchwright.schemas.workload import TransformersModel, WorkloadSpec
from batchwright.suggestions import misspelt
from batchwright.system.data_roots import ANY_FILE, DataRoots
from batchwright.system.host_failures import disk_failure_of
from batchwright.workloads.pretrained.hub_files import cache_roots, fetch_config

CONFIG = "config.json"
_LARGEST_CONFIG = 2**20
"""Bytes of a config that are read, which go into the spec: as many as a body of a request may have."""
_MOST_COMPARISONS = 50_000
"""Names of the spec times names of the config among which misspelt ones are looked for, which takes about a second."""
_NOT_OF_THE_MODEL = {"auto_map", "dtype", "gradient_checkpointing", "torch_dtype", "transformers_version"}
"""Code beside the weights, which is never run; fields that the spec decides itself (its precision, activation
checkpointing); and the writer's version."""


def with_pretrained_config(
    spec: WorkloadSpec, roots: DataRoots = ANY_FILE, fetch: Callable[[HubModel, str], Path] = fetch_config
) -> WorkloadSpec:
    """Return ``spec`` with the whole config of its pretrained model, in which the fields of the spec take precedence.

    From then on the spec describes the model without its folder, which only a run needs again. A model on the hub has
    its commit as revision.

    Args:
        spec: any spec; one without a pretrained model is returned unchanged.
        roots: the folders that may be read.
        fetch: fetches a file of a model on the hub.

    Raises:
        SpecError: when the folder has no usable config, one of another type of model than the spec says, or a field
            that the spec changes by a similar name; when the model cannot be had from the hub.
        HubUnavailableError: when the hub cannot be read.
        HostFailureError: when a disk fails.
        DataOutsideRootsError: when the folder, or a link in it, leads outside the roots.
    """
    model = spec.model
    if not isinstance(model, TransformersModel) or model.pretrained is None:
        return spec
    hub_model = model.hub_model
    if hub_model is not None and (model.revision is not None or not Path(model.pretrained).is_dir()):
        folder = fetch(hub_model, CONFIG).parent
        roots = cache_roots(folder)
        place = {"pretrained": hub_model.id, "revision": folder.name}
    else:
        folder = Path(model.pretrained).expanduser().absolute()
        place = {"pretrained": str(folder)}
    found = _fields(_read(folder, roots), folder)
    if model.model_type and found["model_type"] != model.model_type:
        message = f"is {model.model_type}, but {folder} holds a model of type {found['model_type']}"
        raise SpecError([FieldProblem("model.config.model_type", message)])
    _check_names(model.config, found)
    document = spec.model_dump(mode="json")
    complete = {**document["model"], "config": _merged(found, model.config), **place}
    return parse_document(WorkloadSpec, {**document, "model": complete}, "spec")


def _check_names(changes: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Refuse a misspelt field of the config. Others that the config lacks are accepted."""
    added = changes.keys() - found.keys()
    if len(added) * len(found) > _MOST_COMPARISONS:
        message = f"has {len(added)} fields that the config of the pretrained model, with {len(found)}, lacks: too many"
        raise SpecError([FieldProblem("model.config", message)])
    for name in added:
        if near := misspelt(name, found):
            message = f"is not in the config of the pretrained model; did you mean {near}?"
            raise SpecError([FieldProblem(f"model.config.{name}", message, str(changes[name]))])


def _read(folder: Path, roots: DataRoots) -> Any:  # noqa: ANN401 - parsed JSON
    path = folder / CONFIG
    try:
        with roots.open(path) as stream:
            content = stream.read(_LARGEST_CONFIG + 1)
        if len(content) > _LARGEST_CONFIG:
            raise _problem(f"{path} has more than {_LARGEST_CONFIG >> 20} MiB, too large for a config")
        config = json.loads(content)
        check_json(config)
    except DataOutsideRootsError:
        raise
    except RecursionError:
        raise _problem(f"{path} is nested more than {DEEPEST_JSON} levels deep") from None
    except (OSError, RuntimeError) as error:  # RuntimeError of links that go in circles
        if (failure := disk_failure_of(error)) is not None:
            raise failure from None
        reason = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise _problem(f"{path} {reason}; give the folder of a model that `save_pretrained` wrote") from None
    except UnicodeDecodeError as error:
        raise _problem(f"{path} is not JSON: byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _problem(f"{path} is not JSON: {error}") from None
    except ValueError as error:
        raise _problem(f"{path} {error}") from None
    return config


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
