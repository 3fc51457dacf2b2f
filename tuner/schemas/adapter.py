"""The adapter of a spec: what is trained beside a frozen model. Pure data, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from tuner.schemas.base import Document

_LARGEST_RANK = 65_536
"""Above the width of any published model, where a rank would save nothing."""
_MOST_NAMES = 256
_LONGEST_NAME = 200
ModuleName = Annotated[str, Field(min_length=1, max_length=_LONGEST_NAME)]
ModuleNames = Annotated[tuple[ModuleName, ...], Field(min_length=1, max_length=_MOST_NAMES)]

NO_QUANTIZATION = (
    "a base in 8 or 4 bits cannot be trained yet: use `precision: bf16` with an `adapter`, whose frozen base "
    "then takes half the bytes of fp32"
)
"""The remedy for a spec that requests a quantised base."""


class LoraAdapter(Document):
    """Low-rank updates of a frozen model (LoRA, Hu et al. 2021), by the package `peft`."""

    ABSENT_FIELDS: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "r": "did you mean `rank`?",
            "task_type": "it follows from `model.task`",
            "base_model_name_or_path": "the model is in `model.pretrained` or `model.config`",
            **dict.fromkeys(("load_in_4bit", "load_in_8bit", "quantization"), NO_QUANTIZATION),
        }
    )

    kind: Literal["lora"]
    """Selects this kind of adapter."""
    rank: Annotated[int, Field(ge=1, le=_LARGEST_RANK)] = 8
    """Rank of the update of each matrix: `r` of `peft`."""
    alpha: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 8.0
    """The update is scaled by `alpha / rank`: `lora_alpha` of `peft`."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Dropout probability of the adapter's inputs: `lora_dropout` of `peft`."""
    target_modules: Literal["all-linear"] | ModuleNames | None = None
    """The modules that are adapted: the ends of their names, such as `q_proj`, or all linear ones but the head.
    Those that `peft` has for the type of model when absent."""
    modules_to_save: Annotated[tuple[ModuleName, ...], Field(max_length=_MOST_NAMES)] = ()
    """Modules that are trained whole, as copies: the ends of their names. The head of a classifier is one of them."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """The biases that are trained: none, all of the model, or those of the adapted modules."""
    use_rslora: bool = False
    """Scale by `alpha / sqrt(rank)` instead (Kalajdzievski 2023)."""
    init_lora_weights: Literal["kaiming", "gaussian"] = "kaiming"
    """How the first matrix starts, as the second is zero: as linear layers do (`true` of `peft`), or normal with a
    standard deviation of `1 / rank`."""

    @field_validator("target_modules", mode="before")
    @classmethod
    def _is_all_linear_or_a_list(cls, value: object) -> object:
        if isinstance(value, str) and value != "all-linear":
            raise ValueError("must be `all-linear` or a list of names of modules, for example [q_proj, v_proj]")
        return value
