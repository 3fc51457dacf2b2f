"""Check that a built transformers configuration does not refer to code or files outside of transformers."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import nn

from batchwright.suggestions import misspelt
from batchwright.workloads.config_fields import (
    IMPLEMENTATIONS,
    TransformersConfig,
    known_fields,
    model_problem,
    named_values,
)

_REMOTE = ("auto_map", "trust_remote_code", "custom_pipelines", "quantization_config", "use_pretrained_backbone")
_TIMM = {"timm_backbone": "backbone", "timm_wrapper": "architecture"}
"""The field with timm's name of a model, by type of model."""
_TIMM_LOADS = {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"}
"""Arguments of ``timm.create_model`` that name weights or files."""
_PLAIN_NAME = re.compile(r"[A-Za-z]\w*(\.\w+)?")
"""Name of a timm model that is built without files; `hf-hub:...` and `local-dir:...` load weights."""


@contextmanager
def offline() -> Iterator[None]:
    """Forbid access to a hub in this block: an attempt raises an error."""
    from huggingface_hub import constants  # noqa: PLC0415 - comes with transformers

    with patch.object(constants, "HF_HUB_OFFLINE", new=True):
        yield


def check_config(config: TransformersConfig) -> None:
    """Check a built configuration and all nested configurations, including fields that the spec did not set.

    Raises:
        SpecError: naming the field that refers to code or files.
    """
    for path, inner in configs_within(config):
        _check_single(path, inner)


def check_model(model: nn.Module) -> None:
    """Check the configurations of a built model, and that no parameter is empty.

    Raises:
        SpecError: naming the field, or the parameter.
    """
    seen = {id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None}
    for config in seen.values():
        check_config(config)
    for name, parameter in model.named_parameters():
        if not parameter.numel():
            shape = "x".join(map(str, parameter.shape))
            raise model_problem("config", f"describes an invalid model: its parameter `{name}` is empty ({shape})")


def undeclared_fields(config: TransformersConfig, fields: Mapping[str, Any], *, published: bool) -> list[str]:
    """Return the fields of a spec that a built configuration keeps though its class declares none of that name.

    Fields that the class has converted, and empty ones, are not among them.

    Args:
        config: the configuration, built from ``fields``.
        fields: the fields of the spec.
        published: whether the fields are those of a published config: then only misspelt names are returned.
    """
    given = {name for name, value, _ in named_values(fields, "") if value}
    found = []
    for path, inner in configs_within(config):
        known = known_fields(type(inner)())
        names = sorted(given.intersection(vars(inner)) - known)
        found += [f"`{path}.{name}`" for name in names if not published or misspelt(name, known)]
    return found


def configs_within(config: TransformersConfig) -> Iterator[tuple[str, TransformersConfig]]:
    """Yield ``config`` and every configuration nested in its fields, lists and dicts, with its path."""
    from transformers import PreTrainedConfig  # noqa: PLC0415 - takes a second to import

    def walk(value: object, at: str) -> Iterator[tuple[str, TransformersConfig]]:
        if isinstance(value, PreTrainedConfig):
            yield at, value
            for name, inner in vars(value).items():
                yield from walk(inner, f"{at}.{name}")
        elif isinstance(value, dict):
            for name, inner in value.items():
                yield from walk(inner, f"{at}.{name}")
        elif isinstance(value, (list, tuple)):
            for index, inner in enumerate(value):
                yield from walk(inner, f"{at}.{index}")

    return walk(config, "config")


def _check_single(path: str, config: TransformersConfig) -> None:
    fields = vars(config)
    for name, allowed in IMPLEMENTATIONS.items():
        found = fields.get(f"_{name}_internal")
        if found is not None and found not in allowed:
            raise model_problem(f"{path}.{name}", f"must be one of {', '.join(allowed)}", found)
    if fields.get("_name_or_path"):
        raise model_problem(f"{path}.name_or_path", "names a model to load; leave it out", fields["_name_or_path"])
    for name in _REMOTE:
        if fields.get(name):
            raise model_problem(f"{path}.{name}", "refers to code or weights outside of transformers; leave it out")
    shadowed = [name for name in fields if callable(getattr(type(config), name, None))]
    if shadowed:
        raise model_problem(f"{path}.{shadowed[0]}", f"replaces a method of {type(config).__name__}; leave it out")
    _check_timm(path, config)


def _check_timm(path: str, config: TransformersConfig) -> None:
    field = _TIMM.get(config.model_type)
    if field is None:
        return
    name = getattr(config, field, None)
    if name is not None and not _PLAIN_NAME.fullmatch(str(name)):
        raise model_problem(f"{path}.{field}", "must be the plain name of a timm model", name)
    loading = _TIMM_LOADS.intersection(getattr(config, "model_args", None) or ())
    if loading:
        raise model_problem(f"{path}.model_args.{min(loading)}", "makes timm load weights or files; leave it out")
