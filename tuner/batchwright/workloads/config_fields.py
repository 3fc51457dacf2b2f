"""Check the fields that a spec sets in a transformers configuration: their names and their numbers.

A configuration object accepts any name and most values: private names, names of its own methods, negative numbers of
layers. Here no field may refer to a file or a hub, replace a part of the class, or be a misspelt name of one of its
fields, at any depth. Other names are accepted, since code of a model may read fields that no class declares (DeBERTa-v3
is published with `position_buckets`): ``config_safety.undeclared_fields`` lists them. The installed release of
transformers is asked for the fields of a class, so this module has no list of them. No torch.
"""

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, TypeAlias

from batchwright.errors import FieldProblem, SpecError
from batchwright.suggestions import misspelt

TransformersConfig: TypeAlias = Any
"""A ``transformers.PreTrainedConfig``; transformers ships no usable types."""
Fields: TypeAlias = "Mapping[str, Any]"
"""Names and values of the spec."""

ATTENTION, EXPERTS = "attn_implementation", "experts_implementation"
IMPLEMENTATIONS = {
    ATTENTION: ("eager", "sdpa", "flex_attention"),
    EXPERTS: ("eager", "batched_mm", "grouped_mm"),
}
"""Implementations that come with torch. For others transformers may download kernels from a hub."""
_LOADS = "would load code, weights or files from outside the spec; leave it out"
_OF_LOADED = "would change a model only when its weights are loaded; leave it out"
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
    "transformers_weights": _LOADS,
    "fusion_config": _OF_LOADED,
    "distributed_config": _OF_LOADED,
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
_OF_EVERY_CONFIG = {ATTENTION, EXPERTS, "model_type"}
"""Fields that every configuration accepts, though it has no parameter or attribute of that name."""

_LARGEST = 2**31 - 1
"""Largest size of any field: kernels index with 32 bits."""
_MAX_LAYERS = 10_000
"""Ten times the depth of the deepest published transformer (DeepNet, 1000 layers, 2022)."""
_MAX_LABELS = 1_000_000
"""Largest number of labels: a configuration stores a name for each."""
_IDENTIFIER = re.compile(r"(_ids?|_index|_idx|_indices|_indexes)$")
"""Fields that may be negative, as -1 means none."""
_LAYERS = re.compile(r"^(n|num)_((encoder|decoder|hidden|transformer)_)?(layers?|blocks)$|^(encoder|decoder)_layers$")
"""Numbers of layers. Of -1 layers transformers builds a model without layers, which always fits."""


def check_fields(fields: Fields, default: TransformersConfig, path: str = "config", *, published: bool = False) -> None:
    """Refuse fields that refer to code or files, replace a part of the class, are misspelt, or are invalid numbers.

    Args:
        fields: the fields of the spec, without ``model_type`` at the top.
        default: a configuration of the same class with default values.
        path: path of the fields in the spec's model.
        published: whether the names are those of a published config, so that none is a typing error.

    Raises:
        SpecError: naming the first invalid field.
    """
    _refuse_loading(fields, path)
    known = known_fields(default)
    for name, value in fields.items():
        at = f"{path}.{name}"
        if name not in {*known, *_generation_parameters()} and (name, value) not in _IGNORED_VALUES:
            config_class = type(default)
            if hasattr(config_class, name):
                raise model_problem(at, f"is not a field but a part of the class {config_class.__name__}: leave it out")
            if near := misspelt(name, () if published else known):
                raise model_problem(at, f"is not a field of {config_class.__name__}; did you mean {near}?", value)
        if name == _PER_LAYER and isinstance(value, Mapping):
            for layer, inner in value.items():  # `skip` lists the parts that the layer leaves out
                if isinstance(inner, Mapping):
                    named = {field: number for field, number in inner.items() if field != "skip"}
                    check_fields(named, default, f"{at}.{layer}", published=published)
            continue
        default_value = None  # also if each layer has its own
        with suppress(AttributeError, RuntimeError):
            default_value = getattr(default, name)
        _check_numbers(name, value, default_value, at, is_declared=name in known)
        if isinstance(value, Mapping) and (nested := _nested_default(value, default_value)) is not None:
            check_fields(value, nested, at, published=published)


def known_fields(config: TransformersConfig) -> set[str]:
    """Return the names of the public fields that a configuration has or its class declares, aliases included."""
    return {name for name in {*vars(config), *_declared(config.__class__)} if not name.startswith("_")}


@cache
def _declared(config_class: TransformersConfig) -> frozenset[str]:
    """Return the parameters of a class of configurations, their other names, and its properties with a setter."""
    parameters = inspect.signature(config_class).parameters.values()
    names = {each.name for each in parameters if each.kind is not each.VAR_KEYWORD}
    members = ((name, inspect.getattr_static(config_class, name)) for name in dir(config_class))
    settable = {name for name, member in members if isinstance(member, property) and member.fset is not None}
    return frozenset({*names, *settable, *config_class.attribute_map, *_OF_EVERY_CONFIG})


@cache
def _generation_parameters() -> frozenset[str]:
    """Return the parameters of generation, which transformers 4 wrote into configurations."""
    from transformers import GenerationConfig  # noqa: PLC0415 - takes a second to import

    return frozenset(vars(GenerationConfig()))


def model_problem(field: str, message: str, value: object = "") -> SpecError:
    """Make the error for a field of the spec's model, with its value unless that is a whole part of the config."""
    return SpecError([FieldProblem(f"model.{field}", message, "" if isinstance(value, (dict, list)) else str(value))])


# --- names -----------------------------------------------------------------------------------------------------------


def _refuse_loading(value: object, path: str) -> None:
    """Refuse private names, and names that refer to code or files, at any depth."""
    for name, inner, at in named_values(value, path):
        if (name, inner) in _IGNORED_VALUES:
            continue
        if name.startswith("_"):
            raise model_problem(at, "is private to transformers: leave it out", inner)
        if name in _REFUSED and inner:
            raise model_problem(at, _REFUSED[name], inner)
        if name in IMPLEMENTATIONS:
            requested = inner.values() if isinstance(inner, Mapping) else [inner]  # for the model, or by part
            wrong = [choice for choice in requested if choice not in (None, *IMPLEMENTATIONS[name])]
            if wrong:
                raise model_problem(at, f"must be one of {', '.join(IMPLEMENTATIONS[name])}", wrong[0])


def named_values(value: object, path: str) -> Iterator[tuple[str, object, str]]:
    """Yield every name in nested dicts and lists with its value and its path, except labels and timm's own names."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if (value.get("model_type"), name) != _TIMM_BACKBONE:
                yield str(name), inner, f"{path}.{name}"
            if name not in _LABELS:
                yield from named_values(inner, f"{path}.{name}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from named_values(inner, f"{path}.{index}")


def _nested_default(fields: Fields, default: object) -> TransformersConfig | None:
    """Return a configuration of the class of a nested one, with default values; None if ``fields`` are none."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig  # noqa: PLC0415 - takes a second to import

    named = fields.get("model_type")
    if isinstance(named, str) and named in CONFIG_MAPPING:
        config_class = CONFIG_MAPPING[named]
        return default if type(default) is config_class else config_class()
    return default if isinstance(default, PreTrainedConfig) else None


# --- numbers ---------------------------------------------------------------------------------------------------------


def _check_numbers(name: str, value: object, default: object, path: str, *, is_declared: bool) -> None:
    """Refuse invalid numbers, in lists of numbers too. The class's default values are valid.

    A field whose default is a count takes no negative number. A size of 0 is left to ``config_safety.check_model``,
    which refuses empty parameters.
    """
    if value == default:
        return
    is_layers = _LAYERS.search(name) is not None
    maximum = _MAX_LAYERS if is_layers else _MAX_LABELS if name == "num_labels" else _LARGEST
    counts = default if isinstance(default, (list, tuple)) and default else [default]
    is_count = all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in counts)
    minimum = -_LARGEST
    if is_declared and (is_layers or is_count) and not _IDENTIFIER.search(name):
        minimum = 1 if is_layers and default != 0 else 0
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, int) and not isinstance(number, bool) and not minimum <= number <= maximum:
            limit = f"at most {maximum}" if number > maximum else f"at least {minimum}"
            raise model_problem(path, f"must be {limit}", number)
