"""The workload spec: a declarative description of what is trained. Pure data, no torch.

A spec describes the *worst case* of a run (the longest sequence, the largest image), because that is what has to fit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, JsonValue, ValidationInfo, field_validator, model_validator

from batchwright.schemas.base import STORABLE, Document, load_document, parse_document
from batchwright.schemas.dataset.batch_spec import BatchSpec
from batchwright.schemas.dataset.data_spec import OF_THE_MODEL, DataSpec
from batchwright.schemas.dataset.evaluation_spec import EvaluationSpec
from batchwright.schemas.dataset.preference_spec import PreferenceSpec
from batchwright.schemas.model.adapter import QUANTIZED, LoraAdapter
from batchwright.schemas.model.hub import HUB_ID, REVISION, HubModel
from batchwright.schemas.optimizer import OptimizerSpec, ScheduleSpec

Precision = Literal["fp32", "bf16-mixed", "fp16-mixed", "bf16"]
"""Number formats of computation and parameters: see ``WorkloadSpec.precision``."""

# --- models ----------------------------------------------------------------------------------------------------------

TransformersTask = Literal[
    "causal-lm",
    "masked-lm",
    "seq2seq-lm",
    "sequence-classification",
    "token-classification",
    "image-classification",
    "speech-seq2seq",
    "ctc",
    "contrastive",
]

_TASKS_WITHOUT_CLASSES = {"ctc", "contrastive"}
"""Tasks whose loss is no cross-entropy over labels."""
LONGEST_MODEL_NAME = 300
"""Characters of a `model_type` or target, which lists show."""
_MODEL_TYPE = rf"^[ -~]{{1,{LONGEST_MODEL_NAME}}}$"
_HAS_MODEL_TYPE: dict[str, JsonValue] = {
    "properties": {"model_type": {"type": "string", "pattern": _MODEL_TYPE, "examples": ["gpt2"]}},
}
"""JSON schema of a config, whose other fields are free."""
_LONGEST_PATH = 4096
"""Characters of a path: Linux's PATH_MAX."""


class TransformersModel(Document):
    """A Hugging Face transformers architecture, from a config or from a pretrained model."""

    ABSENT_FIELDS: ClassVar[Mapping[str, str]] = QUANTIZED

    kind: Literal["transformers"]
    """Selects this kind of model."""
    task: TransformersTask
    """The head on the model, and so the batch and the loss: an `AutoModelFor...` class. `speech-seq2seq` writes the
    text of audio (Whisper), `ctc` labels raw audio (wav2vec 2.0), `contrastive` matches images and texts (CLIP)."""
    pretrained: Annotated[str, Field(min_length=1, max_length=_LONGEST_PATH)] | None = None
    """Folder of a model that `save_pretrained` wrote, `config.json` and safetensors, or name of a model on the Hugging
    Face hub (`openai-community/gpt2`), if no folder has that name. Training starts from its weights; probes have
    random weights of the same shapes. Default: random weights."""
    revision: Annotated[str, Field(pattern=REVISION)] | None = None
    """Branch, tag or commit of the model on the hub. Default: `main`. A recommendation has the commit."""
    config: Annotated[
        dict[str, JsonValue], STORABLE, Field(json_schema_extra=_HAS_MODEL_TYPE, validate_default=True)
    ] = Field(default_factory=dict)
    """Arguments of `AutoConfig.for_model`: `model_type`, any field of that configuration, and `attn_implementation`
    (`eager`, `sdpa`, ...), which determines the memory of long sequences. With `pretrained`, the fields to change."""

    @field_validator("config")
    @classmethod
    def _names_a_model_type(cls, config: dict[str, JsonValue], others: ValidationInfo) -> dict[str, JsonValue]:
        if others.data.get("pretrained") is not None and "model_type" not in config:
            return config
        named = config.get("model_type")
        if not isinstance(named, str) or not named:
            raise ValueError(
                "must name a `model_type`, for example `gpt2`, `bert`, `llama` or `vit`; or give `pretrained`, the "
                "folder of a model"
            )
        if not re.fullmatch(_MODEL_TYPE, named):
            raise ValueError(
                f"has a `model_type` of {len(named)} characters, {named[:20]!r}: use at most {LONGEST_MODEL_NAME} "
                "printable ASCII characters, for example `gpt2`"
            )
        return config

    @model_validator(mode="after")
    def _revises_a_model_of_the_hub(self) -> Self:
        if self.revision is not None and self.hub_model is None:
            raise ValueError("`revision` is for models on the hub: name one in `pretrained`, or leave `revision` out")
        return self

    @property
    def hub_model(self) -> HubModel | None:
        """The model on the hub that `pretrained` names; None for a folder, which a path shows from `/`, `.` or `~`."""
        if self.pretrained is None or not HUB_ID.fullmatch(self.pretrained):
            return None
        return HubModel(self.pretrained, self.revision)

    @property
    def model_type(self) -> str:
        """The type of the model; empty for a pretrained model whose config was not read yet."""
        return str(self.config.get("model_type", ""))


Size = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""A width or a number of classes: kernels index with 32 bits."""
Depth = Annotated[int, Field(ge=1, le=10_000)]
"""A number of layers: ten times the deepest transformer that was published (DeepNet, 1000 layers, 2022)."""


class Mlp(Document):
    """Linear layers with ReLU between them, and cross-entropy over the classes."""

    name: Literal["mlp"]
    """Selects this architecture."""
    input_features: Size = 784
    """Features of one sample."""
    hidden_features: Size = 1024
    """Width of the hidden layers."""
    hidden_layers: Depth = 2
    """Number of hidden layers."""
    classes: Annotated[Size, Field(ge=2)] = 10
    """Number of classes."""


class ResNet(Document):
    """A residual convolutional network with BatchNorm: four stages of basic blocks, as in ResNet-18 and ResNet-34."""

    name: Literal["resnet"]
    """Selects this architecture."""
    width: Size = 64
    """Channels of the first stage; each further stage doubles them."""
    blocks_per_stage: Depth = 2
    """Basic blocks in each of the four stages (2 makes ResNet-18)."""
    channels: Size = 3
    """Channels of the input images."""
    classes: Annotated[Size, Field(ge=2)] = 1000
    """Number of classes."""


class Gpt(Document):
    """A decoder-only transformer: pre-norm blocks, learned positions, tied input and output embeddings."""

    name: Literal["gpt"]
    """Selects this architecture."""
    layers: Depth = 4
    """Transformer blocks."""
    heads: Size = 4
    """Attention heads; must divide `width`."""
    width: Size = 256
    """Embedding width."""
    vocabulary_size: Annotated[Size, Field(ge=2)] = 256
    """Number of token ids; 256 for bytes."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Dropout probability after attention and after the feed-forward layer."""

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"`heads` must divide `width`: {self.width} is not a multiple of {self.heads}")
        return self


class ReferenceModel(Document):
    """A small model in plain torch, for tests and first steps."""

    kind: Literal["reference"]
    """Selects this kind of model."""
    architecture: Annotated[Mlp | ResNet | Gpt, Field(discriminator="name")]
    """The model with its sizes."""


class PythonModel(Document):
    """Your own code: a factory that returns a workload (see `batchwright.workloads.base.Workload`)."""

    kind: Literal["python"]
    """Selects this kind of model."""
    target: Annotated[str, Field(max_length=LONGEST_MODEL_NAME)]
    """`package.module:factory`. The service runs only targets that its operator has allow-listed."""
    arguments: Annotated[dict[str, JsonValue], STORABLE] = Field(default_factory=dict)
    """Keyword arguments of the factory."""

    @field_validator("target")
    @classmethod
    def _is_module_and_name(cls, target: str) -> str:
        if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", target):
            raise ValueError("must be `package.module:factory`, for example `my_project.workloads:build`")
        return target


ModelSpec = Annotated[TransformersModel | ReferenceModel | PythonModel, Field(discriminator="kind")]

# --- the rest of a workload ------------------------------------------------------------------------------------------


LARGEST_WORLD_SIZE = 65_536
"""Upper bound on ranks, above the number of devices of any cluster."""


class RanksSpec(Document):
    """The ranks of a run."""

    world_size: Annotated[int, Field(ge=1, le=LARGEST_WORLD_SIZE)] = 1
    """Data-parallel ranks: one per device."""


class ParallelismSpec(RanksSpec):
    """Data parallelism of the run."""

    strategy: Literal["ddp", "fsdp"] = "ddp"
    """Distribution of the model: a full copy on each rank (`ddp`), or shards (`fsdp`)."""


class WorkloadSpec(Document):
    """A workload: model, worst-case batch, optimizer, precision and memory options."""

    ABSENT_FIELDS: ClassVar[Mapping[str, str]] = QUANTIZED

    model: ModelSpec
    """The model."""
    adapter: LoraAdapter | None = None
    """Train an adapter of a frozen `transformers` model. Default: train the whole model."""
    preference: PreferenceSpec | None = None
    """Train a `causal-lm` model on preference pairs (DPO). Default: on texts."""
    batch: BatchSpec = BatchSpec()
    """The worst case of one sample."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """The optimizer."""
    schedule: ScheduleSpec = ScheduleSpec()
    """The learning-rate schedule. Does not change memory."""
    precision: Precision = "fp32"
    """`*-mixed`: fp32 parameters under autocast (fp16 with a loss scaler). `bf16`: parameters and gradients in bf16,
    except the matrices of an adapter, which stay in fp32."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    gradient_clipping: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    """Clip the L2 norm of the whole gradient to this, once per update. Default: no clipping."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of each label's probability that is spread evenly over all classes (Szegedy et al., 2016), as
    `label_smoothing` of torch's `cross_entropy`. Of models whose loss is a cross-entropy over labels."""
    ema_decay: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Decay per update of a moving average of the weights, kept in fp32 and written beside them. Default: none."""
    gradient_gathering: Literal["auto", "scratch", "in-place"] = "auto"
    """`scratch`: the gradients of a micro-batch are added to the sums when it has ended, so running out of memory costs
    only that micro-batch. `in-place`: they are added directly, which saves up to one set of gradients, but running out
    of memory costs the whole update. `auto`: `scratch` on a GPU, `in-place` on the CPU, where scratch takes up to a
    third more time."""
    compile: bool = False
    """Run the model through `torch.compile`."""
    parallelism: ParallelismSpec = ParallelismSpec()
    """Data parallelism."""
    data: DataSpec | None = None
    """Data of a training job. Probes need none: they use random samples of the worst case."""
    evaluation: EvaluationSpec | None = None
    """Evaluation of a training job on held-out samples. Default: none. Does not change what fits."""

    @model_validator(mode="after")
    def _has_labels_to_smooth(self) -> Self:
        if self.label_smoothing and self.preference is not None:
            raise ValueError("`label_smoothing` is for a cross-entropy: use `preference.label_smoothing`")
        if self.label_smoothing and self._task in _TASKS_WITHOUT_CLASSES:
            raise ValueError(f"`label_smoothing` is for a cross-entropy over labels, which {self._task} does not have")
        if self.label_smoothing and self.model.kind == "python":
            raise ValueError("`label_smoothing` is for the losses of Batchwright: a `python` target has its own loss")
        return self

    @model_validator(mode="after")
    def _has_labels_to_evaluate(self) -> Self:
        if self.evaluation is not None:
            self.evaluation.require_use(
                unlabelled=self._task if self._task in _TASKS_WITHOUT_CLASSES else "",
                has_vocabulary=self._is_text and not self._task.endswith("-classification"),
                has_averages=self.ema_decay is not None,
                has_pairs=self.preference is not None,
            )
        return self

    @model_validator(mode="after")
    def _has_the_tokenizer_of_its_model(self) -> Self:
        if self.reads_tokenizer_of_model and not self.is_pretrained:
            raise ValueError("`tokenizer: pretrained` needs `model.pretrained`, which the spec does not set")
        return self

    @property
    def reads_tokenizer_of_model(self) -> bool:
        """True if the tokenizer of training or held-out texts is in the folder of the pretrained model."""
        return any(getattr(data, "tokenizer", None) == OF_THE_MODEL for data in self.data_by_field.values())

    @property
    def data_by_field(self) -> dict[str, DataSpec]:
        """The data that a run reads: of `data` and of `evaluation.data`, where the spec has them."""
        held_out = None if self.evaluation is None else self.evaluation.data
        return {field: read for field, read in (("data", self.data), ("evaluation.data", held_out)) if read is not None}

    def with_files_of_data(self) -> WorkloadSpec | None:
        """Return the spec without held-out data of the user's code; None if its data is not read from files."""
        files = {field for field, data in self.data_by_field.items() if data.paths_read()}
        if "data" not in files:
            return None
        if "evaluation.data" in self.data_by_field and "evaluation.data" not in files:
            return self.model_copy(update={"evaluation": None})
        return self

    @model_validator(mode="after")
    def _adapts_a_transformers_model(self) -> Self:
        if self.adapter is not None and not isinstance(self.model, TransformersModel):
            raise ValueError(
                f"`adapter` is for `transformers` models, and this one is `{self.model.kind}`: in a `python` workload, "
                "`build_model` can return the model that `peft.get_peft_model` makes"
            )
        return self

    @model_validator(mode="after")
    def _quantizes_a_base_that_can_be(self) -> Self:
        if self.adapter is None or self.adapter.quantization is None or not isinstance(self.model, TransformersModel):
            return self
        subject = "`adapter.quantization`"
        if self.model.task != "causal-lm":
            raise ValueError(f"{subject} is for decoders: the task must be `causal-lm`, not `{self.model.task}`")
        if self.data is not None and self.model.pretrained is None:
            raise ValueError(f"{subject} needs `model.pretrained` to train: a base of random codes is for probes alone")
        if self.parallelism.strategy == "fsdp":
            raise ValueError(f"{subject} needs whole weights on each rank: `parallelism.strategy` must be `ddp`")
        if self.compile:
            raise ValueError(f"{subject} cannot be compiled: leave `compile` out")
        return self

    @model_validator(mode="after")
    def _has_samples_of_a_decoder(self) -> Self:
        described = self.model.task if isinstance(self.model, TransformersModel) else f"a `{self.model.kind}` model"
        if self.preference is not None:
            self.preference.require_use(described, self.batch, self.data_by_field)
            if self.adapter is not None and self.adapter.bias != "none":
                raise ValueError("`adapter.bias` must be `none`: the model itself is the reference of `preference`")
        self.batch.require_packing(described, self.data_by_field, self.evaluation)
        return self

    @model_validator(mode="after")
    def _has_what_its_model_and_optimizer_need(self) -> Self:
        model, length = self.model, self.batch.sequence_length
        self.optimizer.require_strategy(self.parallelism.strategy)
        if self._is_text and length is None:
            raise ValueError(
                "`batch.sequence_length` is required by a text model: the number of tokens of the longest sample"
            )
        if isinstance(model, ReferenceModel) and isinstance(model.architecture, ResNet) and not self.batch.image_size:
            raise ValueError("`batch.image_size` is required by `resnet`: the side of the largest image, in pixels")
        if length == 1 and self._task == "causal-lm":
            raise ValueError("`batch.sequence_length` is 1, but predicting the next token needs at least 2")
        if length is not None and (limit := self._longest_position) is not None and length > limit:
            raise ValueError(f"`batch.sequence_length` is {length}, but the model's config allows {limit} positions")
        return self

    @property
    def _task(self) -> str:
        """The task of a transformers model; `causal-lm` of the reference `gpt`, empty of another model."""
        if isinstance(self.model, TransformersModel):
            return self.model.task
        return "causal-lm" if isinstance(getattr(self.model, "architecture", None), Gpt) else ""

    @property
    def _is_text(self) -> bool:
        return self._task not in {"", "image-classification"}

    @property
    def _longest_position(self) -> int | None:
        """The position limit, where the spec itself states one (the config's default is checked when it is built)."""
        config = self.model.config if isinstance(self.model, TransformersModel) else {}
        limits = [config.get(name) for name in ("n_positions", "max_position_embeddings")]
        return next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)

    @property
    def is_pretrained(self) -> bool:
        """True if a run starts from pretrained weights."""
        return isinstance(self.model, TransformersModel) and self.model.pretrained is not None

    @property
    def needs_bitsandbytes(self) -> bool:
        """True if the state of the optimizer or the base of an adapter is quantised by the package `bitsandbytes`."""
        is_quantized = self.adapter is not None and self.adapter.quantization is not None
        return is_quantized or self.optimizer.package == "bitsandbytes"

    def with_world_size(self, world_size: int) -> WorkloadSpec:
        """Return this workload over ``world_size`` ranks."""
        return self.model_copy(update={"parallelism": self.parallelism.model_copy(update={"world_size": world_size})})


def parse_spec(data: object) -> WorkloadSpec:
    """Validate ``data`` (parsed YAML or JSON) as a spec.

    Raises:
        SpecError: naming every wrong field, its value and what is allowed.
    """
    return parse_document(WorkloadSpec, data, "spec")


def load_spec(path: Path) -> WorkloadSpec:
    """Read a spec from a YAML or JSON file.

    Raises:
        SpecError: when the file cannot be read or does not describe a workload.
    """
    return load_document(WorkloadSpec, path, "spec")
