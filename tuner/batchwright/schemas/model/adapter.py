"""Adapters of frozen models, and the quantisation of the frozen base. Pure data, no torch."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from batchwright.schemas.base import Document

_HOW_TO_QUANTIZE = (
    "a frozen base in 4 bits is `adapter: {kind: lora, quantization: {kind: nf4}}`, and in 8 bits it has "
    "`kind: int8`; quantised weights cannot be trained"
)
"""The remedy for a spec that requests a quantised model in the words of transformers."""
QUANTIZED: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("load_in_4bit", "load_in_8bit", "quantization", "quantization_config"), _HOW_TO_QUANTIZE)
)
"""Fields of that, where a spec has none."""
_LARGEST_RANK = 65_536
"""Above the width of any published model, where a rank would save nothing."""
_MOST_NAMES = 256
_LONGEST_NAME = 200
ModuleName = Annotated[str, Field(min_length=1, max_length=_LONGEST_NAME)]
ModuleNames = Annotated[tuple[ModuleName, ...], Field(min_length=1, max_length=_MOST_NAMES)]


class BaseQuantization(Document):
    """The linear layers of a frozen base in 4 or 8 bits, by the package `bitsandbytes`.

    In 4 bits (QLoRA, Dettmers et al. 2023) a weight takes half a byte and each 64 of them a scale; in 8 bits a weight
    takes a byte and each row a scale (LLM.int8(), Dettmers et al. 2022). They are unpacked layer by layer as they are
    used. The output layer, embeddings, norms and `modules_to_save` keep their type.
    """

    ABSENT_FIELDS: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "bnb_4bit_quant_type": "did you mean `kind`?",
            "bnb_4bit_use_double_quant": "did you mean `double_quantization`?",
            "bnb_4bit_compute_dtype": "it is the type of `precision`",
            "llm_int8_threshold": "inputs are not quantised, so they have no outlier columns",
        }
    )

    kind: Literal["nf4", "fp4", "int8"]
    """The values of a code: 16 quantiles of a normal distribution (`nf4`), 16 floating-point numbers (`fp4`), or the
    integers from -127 to 127 (`int8`)."""
    double_quantization: bool = False
    """Keep the scales of `nf4` or `fp4` in 8 bits too, with a scale in fp32 for each 256: `bnb_4bit_use_double_quant`
    of transformers."""

    @model_validator(mode="after")
    def _quantizes_scales_of_4_bits_alone(self) -> Self:
        if self.double_quantization and self.kind == "int8":
            raise ValueError("`double_quantization` is for `nf4` and `fp4`: `int8` has few scales, one for each row")
        return self


class LoraAdapter(Document):
    """Low-rank updates of a frozen model (LoRA, Hu et al. 2021), by the package `peft`."""

    ABSENT_FIELDS: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "r": "did you mean `rank`?",
            "task_type": "it follows from `model.task`",
            "base_model_name_or_path": "the model is in `model.pretrained` or `model.config`",
            **dict.fromkeys(("load_in_4bit", "load_in_8bit", "quantization_config"), _HOW_TO_QUANTIZE),
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
    Default: those that `peft` has for the type of model."""
    modules_to_save: Annotated[tuple[ModuleName, ...], Field(max_length=_MOST_NAMES)] = ()
    """Modules that are trained whole, as copies: the ends of their names. The head of a classifier is one of them."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """The biases that are trained: none, all of the model, or those of the adapted modules."""
    use_rslora: bool = False
    """Scale by `alpha / sqrt(rank)` instead (Kalajdzievski 2023)."""
    init_lora_weights: Literal["kaiming", "gaussian"] = "kaiming"
    """How the first matrix starts, as the second is zero: as linear layers do (`true` of `peft`), or normal with a
    standard deviation of `1 / rank`."""
    quantization: BaseQuantization | None = None
    """Keep the linear layers of the frozen base in 4 bits (QLoRA) or 8. Default: in the type of `precision`."""

    @field_validator("target_modules", mode="before")
    @classmethod
    def _is_all_linear_or_a_list(cls, value: object) -> object:
        if isinstance(value, str) and value != "all-linear":
            raise ValueError("must be `all-linear` or a list of names of modules, for example [q_proj, v_proj]")
        return value

    @property
    def is_in_4_bits(self) -> bool:
        """True if the linear layers of the base are in 4 bits: QLoRA."""
        return self.quantization is not None and self.quantization.kind != "int8"
