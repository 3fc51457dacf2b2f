"""Check the fields that a spec sets in a transformers configuration: their names and their numbers.

A configuration object accepts any name and most values: private names, names of its own methods, negative numbers of
layers. Here every name must be a field of its class, at every depth, and no field may refer to a file or a hub.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from batchwright.errors import FieldProblem, SpecError
from batchwright.workloads.published_fields import changes_nothing, is_published

ConfigClass: TypeAlias = Any
"""A subclass of ``transformers.PreTrainedConfig``; transformers ships no usable types."""
Fields: TypeAlias = "Mapping[str, Any]"
"""Names and values of the spec."""

ATTENTION, EXPERTS = "attn_implementation", "experts_implementation"
IMPLEMENTATIONS = {
    ATTENTION: ("eager", "sdpa", "flex_attention"),
    EXPERTS: ("eager", "batched_mm", "grouped_mm"),
}
"""Implementations that come with torch. For others transformers may download kernels from a hub."""
_LOADS = "would load code, weights or files that the spec does not hold; leave it out"
_THROUGH_TIMM = "would load a backbone through timm or a hub: describe it under `backbone_config` instead"
_PRECISION = "is decided by the spec's `precision`; leave it out"
_QUANTIZED = (
    "has no effect on a model with random weights, which is built unquantised; for a quantised one write a `python` "
    "workload"
)
_REFUSED = {
    "auto_map": _LOADS,
    "trust_remote_code": _LOADS,
    "code_revision": _LOADS,
    "custom_pipelines": _LOADS,
    "name_or_path": _LOADS,
    "pretrained_model_name_or_path": _LOADS,
    "pretrained_cfg": _LOADS,
    "checkpoint_path": _LOADS,
    "kernel_config": _LOADS,
    "use_kernels": _LOADS,
    "model_args": _THROUGH_TIMM,
    "backbone": _THROUGH_TIMM,
    "backbone_kwargs": _THROUGH_TIMM,
    "timm_kwargs": _THROUGH_TIMM,
    "use_timm_backbone": _THROUGH_TIMM,
    "use_pretrained_backbone": _THROUGH_TIMM,
    "quantization_config": _QUANTIZED,
    "compression_config": _QUANTIZED,
    "dtype": _PRECISION,
    "torch_dtype": _PRECISION,
    "gradient_checkpointing": "is decided by the spec's `activation_checkpointing`; leave it out",
}
"""Fields refused at any depth, unless the value is null, false or empty."""
_IGNORED_VALUES = (("dtype", "float32"), ("torch_dtype", "float32"), ("_name_or_path", ""))
"""Values without effect: the type that a model is built in before `precision` applies, and transformers' empty name."""
_TIMM_BACKBONE = ("timm_backbone", "backbone")
"""A type of model and its field that names an architecture of timm, not weights. The built configuration is checked."""
_LABELS = {"id2label", "label2id"}
"""Fields whose keys are the user's own words."""
_PER_LAYER = "per_layer_config"
_SETTABLE = {"num_labels", "output_attentions", "rope_scaling", _PER_LAYER}
"""Properties of every configuration that can be set like a field."""
_ALWAYS_ACCEPTED = {"decoder_start_token_id", ATTENTION, EXPERTS, "model_type", "tie_word_embeddings"}
"""Fields that every configuration accepts, though not all have such an attribute by default."""
_UNDECLARED = {"head_dim", "rope_theta", "partial_rotary_factor"}
"""Fields that some models read (Qwen3-MoE, DBRX) though their configurations do not declare them."""
_FIELD_READ = re.compile(r"(?:(?:getattr|hasattr)\(\s*(?:self\.)?config,|kwargs\.(?:pop|get)\()\s*\"([a-z]\w*)\"")
"""Pattern of code in a model or its configuration that reads an undeclared field: DeBERTa-v2's `position_buckets`,
GPT-NeoX's `rotary_pct`."""
_CODE = re.compile(r"(configuration|modeling)_")
_SIMILARITY = 0.5

_LARGEST = 2**31 - 1
"""Largest size of any field: kernels index with 32 bits."""
_MAX_LAYERS = 10_000
"""Ten times the depth of the deepest published transformer (DeepNet, 1000 layers, 2022)."""
_MAX_LABELS = 1_000_000
"""Largest number of labels: a configuration stores a name for each."""
_IDENTIFIER = re.compile(r"(_ids?|_index|_idx|_indices|_indexes)$")
_LAYERS = re.compile(r"^(n|num)_((encoder|decoder|hidden|transformer)_)?(layers?|blocks)$|^(encoder|decoder)_layers$")
_SIZE = re.compile(
    r"^(n|num)_(\w+_)?(heads?|embd|embed|inner|positions|channels|experts(_per_tok)?|local_experts|classes|labels)$"
    r"|^(encoder|decoder)_(attention_heads|ffn_dim)$"
    r"|(^|_)(size|dim|d_model|d_ff|d_inner|d_kv|ffn_dim|head_dim)$|^(vocab_size|max_position_embeddings)$"
)
_MAY_BE_ZERO = re.compile(r"experts|shared|bucket|cache|chunk|window|type_vocab_size|crop|pad|rotary")
"""Sizes that may be zero: the model then lacks the part."""


def check_fields(fields: Fields, config_class: ConfigClass, default: Any, path: str = "config") -> None:  # noqa: ANN401 - a config
    """Refuse fields that the configuration does not have, that refer to code or files, or whose numbers are invalid.

    Args:
        fields: the fields of the spec, without ``model_type`` at the top.
        config_class: the class of the configuration.
        default: a configuration with default values.
        path: path of the fields in the spec's model.

    Raises:
        SpecError: naming the first invalid field.
    """
    _refuse_loading(fields, path)
    for name, value in fields.items():
        at = f"{path}.{name}"
        if _has_no_effect(name, fields, config_class, default):
            continue
        _require_field(name, value, config_class, default, path)
        if name == _PER_LAYER and isinstance(value, Mapping):
            for layer, inner in value.items():
                _check_layer(inner, config_class, default, f"{at}.{layer}")
        else:
            default_value = _value_of(default, name)
            _check_numbers(name, value, default_value, at)
            _check_nested(value, default_value, at)


def without_unread(fields: Fields, config_class: ConfigClass, default: object) -> dict[str, Any]:
    """Return the fields of a published config without those that no code reads (Qwen2.5's `use_mrope`), at any depth.

    So transformers loads it too. Fields that are known to describe another model stay, to be refused.

    Args:
        fields: the fields, without ``model_type`` at the top.
        config_class: the class of the configuration.
        default: a configuration with default values.
    """
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        nested = _nested_class(value, _value_of(default, name))
        if nested is not None:
            kept[name] = without_unread(value, *nested)
        elif (
            _is_field(name, value, config_class, default)
            or _is_part_of_class(name, config_class)
            or is_published(name, config_class.model_type)
        ):
            kept[name] = value
    return kept


def _value_of(config: object, name: str) -> object:
    """A field's value; None without one, or if each layer has its own."""
    with suppress(AttributeError, RuntimeError):
        return getattr(config, name)
    return None


def _check_layer(fields: object, config_class: ConfigClass, default: object, path: str) -> None:
    """Check the fields of one layer; `skip` lists the parts that the layer leaves out."""
    if isinstance(fields, Mapping):
        check_fields({name: value for name, value in fields.items() if name != "skip"}, config_class, default, path)


def _problem(field: str, message: str, value: object = "") -> SpecError:
    return SpecError([FieldProblem(f"model.{field}", message, "" if isinstance(value, (dict, list)) else str(value))])


# --- names -----------------------------------------------------------------------------------------------------------


def _refuse_loading(value: object, path: str) -> None:
    """Refuse private names, and names that refer to code or files, at any depth."""
    for name, inner, at in _named_values(value, path):
        if (name, inner) in _IGNORED_VALUES:
            continue
        if name.startswith("_"):
            raise _problem(at, "is private to transformers: leave it out", inner)
        if name in _REFUSED and inner:
            raise _problem(at, _REFUSED[name], inner)
        if name in IMPLEMENTATIONS:
            _check_implementation(name, inner, at)


def _named_values(value: object, path: str) -> Iterator[tuple[str, object, str]]:
    """Yield every name in nested dicts and lists with its value and its path, except labels and timm's own names."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if (value.get("model_type"), name) != _TIMM_BACKBONE:
                yield str(name), inner, f"{path}.{name}"
            if name not in _LABELS:
                yield from _named_values(inner, f"{path}.{name}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _named_values(inner, f"{path}.{index}")


def _require_field(name: str, value: object, config_class: ConfigClass, default: object, path: str) -> None:
    if _is_accepted(name, value, config_class):
        return
    if _is_part_of_class(name, config_class):
        raise _problem(
            f"{path}.{name}", f"is not a field but a part of the class {config_class.__name__}: leave it out"
        )
    if _is_field(name, value, config_class, default):
        return
    near = difflib.get_close_matches(name, known_fields(config_class, default), n=3, cutoff=_SIMILARITY)
    hint = f"; did you mean {' or '.join(near)}?" if near else ", and no code of its models reads it: leave it out"
    raise _problem(f"{path}.{name}", f"is not a field of {config_class.__name__}{hint}", value)


def _is_accepted(name: str, value: object, config_class: ConfigClass) -> bool:
    """Return whether a field is one of every configuration, or another name of one of this class."""
    return name in {*_ALWAYS_ACCEPTED, *_REFUSED, *config_class.attribute_map} or (name, value) in _IGNORED_VALUES


def _is_field(name: str, value: object, config_class: ConfigClass, default: object) -> bool:
    """Return whether the class has a field, or code of its models reads it."""
    if _is_accepted(name, value, config_class):
        return True
    if name in known_fields(config_class, default) or name in _SETTABLE:
        return True
    if isinstance(inspect.getattr_static(config_class, name, None), property):
        return True  # one that the class has a setter for
    if name in _UNDECLARED and not hasattr(config_class, name):
        return True
    return not isinstance(value, (Mapping, list)) and name in _read_by_models(config_class)


def _has_no_effect(name: str, fields: Fields, config_class: ConfigClass, default: object) -> bool:
    """Return whether a field is none of the class, and leaves the model as it is."""
    value = fields[name]
    if hasattr(config_class, name) or name in known_fields(config_class, default):
        return False
    if name in _generation_parameters() and not isinstance(value, Mapping):
        return True

    def value_of(other: str) -> object:
        return fields.get(other, _value_of(default, other))

    return changes_nothing(name, value, config_class.model_type, value_of)


@cache
def _generation_parameters() -> frozenset[str]:
    """The parameters of generation, which transformers 4 wrote into configurations; training reads none."""
    from transformers import GenerationConfig  # noqa: PLC0415 - takes a second to import

    return frozenset(name for name in vars(GenerationConfig()) if not name.startswith("_"))


@cache
def _read_by_models(config_class: ConfigClass) -> frozenset[str]:
    """The undeclared fields that the code of a configuration or its models reads."""
    folder = Path(inspect.getfile(config_class)).parent
    codes = (path.read_text(encoding="utf-8") for path in folder.glob("*_*.py") if _CODE.match(path.name))
    return frozenset(name for code in codes for name in _FIELD_READ.findall(code))


def known_fields(config_class: ConfigClass, default: object) -> list[str]:
    """The public fields of a configuration and their aliases, declared fields first."""
    declared = [field.name for field in dataclasses.fields(config_class)]
    names = dict.fromkeys([*declared, *vars(default), *config_class.attribute_map, "num_labels", ATTENTION])
    return [name for name in names if not name.startswith("_")]


def _is_part_of_class(name: str, config_class: ConfigClass) -> bool:
    """Return whether a name is a method, constant or read-only property of the class, which a value would overwrite."""
    attribute = inspect.getattr_static(config_class, name, None)
    if isinstance(attribute, property):
        private = name not in _SETTABLE and _owner(name, config_class).__module__ in _BASE_MODULES
        return attribute.fset is None or private
    declared = {field.name for field in dataclasses.fields(config_class)}
    return name not in declared and hasattr(config_class, name)


_BASE_MODULES = ("transformers.configuration_utils", "transformers.integrations.heterogeneity.configuration_utils")


def _owner(name: str, config_class: ConfigClass) -> type:
    return next(base for base in inspect.getmro(config_class) if name in vars(base))


def _check_implementation(name: str, value: object, at: str) -> None:
    """Check the implementation for all parts of the model, or for each part by the name of its configuration."""
    requested = value.values() if isinstance(value, Mapping) else [value]
    for choice in requested:
        if choice is not None and choice not in IMPLEMENTATIONS[name]:
            raise _problem(at, f"must be one of {', '.join(IMPLEMENTATIONS[name])}", choice)


def _check_nested(value: object, default: object, path: str) -> None:
    """Check the fields of a nested configuration."""
    nested = _nested_class(value, default)
    if nested is not None and isinstance(value, Mapping):
        check_fields(value, *nested, path)


def _nested_class(value: object, default: object) -> tuple[ConfigClass, object] | None:
    """Return the class of a nested configuration, and one with default values; None if ``value`` is something else."""
    if not isinstance(value, Mapping):
        return None
    from transformers import CONFIG_MAPPING, PreTrainedConfig  # noqa: PLC0415 - takes a second to import

    named = value.get("model_type")
    if isinstance(named, str) and named in CONFIG_MAPPING:
        config_class = CONFIG_MAPPING[named]
        return config_class, default if type(default) is config_class else config_class()
    return (type(default), default) if isinstance(default, PreTrainedConfig) else None


# --- numbers ---------------------------------------------------------------------------------------------------------


def _check_numbers(name: str, value: object, default: object, path: str) -> None:
    """Refuse invalid numbers, in lists of numbers too. The class's default values are valid."""
    if value == default:
        return
    numbers = value if isinstance(value, list) else [value]
    for number in numbers:
        if isinstance(number, int) and not isinstance(number, bool):
            _check_number(name, number, default, path)


def _check_number(name: str, number: int, default: object, path: str) -> None:
    layers, size = bool(_LAYERS.search(name)), bool(_SIZE.search(name))
    maximum = _MAX_LAYERS if layers else _MAX_LABELS if name == "num_labels" else _LARGEST
    if abs(number) > maximum:
        raise _problem(path, f"must be at most {maximum}", number)
    if _IDENTIFIER.search(name):
        return
    minimum = 1 if (layers or size) and not _MAY_BE_ZERO.search(name) and not _is_zero(default) else 0
    if number < minimum and (layers or size or _is_count(default)):
        raise _problem(path, f"must be at least {minimum}", number)


def _is_zero(default: object) -> bool:
    return isinstance(default, int) and default <= 0


def _is_count(default: object) -> bool:
    """Return whether a field's default is a count: an integer that is not negative, or a list of such integers."""
    values = default if isinstance(default, (list, tuple)) and default else [default]
    return all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in values)
