"""Build transformers architectures from a config, with random or pretrained weights. Nothing is downloaded."""

import difflib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from batchwright.errors import FieldProblem, SpecError
from batchwright.schemas.dataset.batch_spec import BatchSpec
from batchwright.schemas.dataset.preference_spec import PreferenceSpec
from batchwright.schemas.model.adapter import LoraAdapter
from batchwright.schemas.workload import TransformersModel, TransformersTask, WorkloadSpec
from batchwright.workloads.adapters.lora import inject_lora
from batchwright.workloads.adapters.quantized_base import quantize_base
from batchwright.workloads.base import (
    IGNORED_LABEL,
    LabelScores,
    LossTerms,
    Workload,
    count_labels,
    random_tokens,
    summed_cross_entropy,
)
from batchwright.workloads.causal.decoders import CausalWorkload, PackedWorkload, RoutedWorkload, vocabulary_size_of
from batchwright.workloads.causal.document_masks import require_separate_documents
from batchwright.workloads.causal.preference_pairs import PreferenceWorkload
from batchwright.workloads.causal.reference_policy import keep_reference
from batchwright.workloads.causal.routers import (
    require_router_fields,
    require_router_loss,
    router_loss_error,
    wants_router_loss,
)
from batchwright.workloads.config_fields import TransformersConfig, check_fields, model_problem
from batchwright.workloads.config_safety import (
    check_config,
    check_model,
    configs_within,
    offline,
    undeclared_fields,
)
from batchwright.workloads.contrastive import ContrastiveWorkload
from batchwright.workloads.preload import forbid_hub_kernels
from batchwright.workloads.pretrained.starting_weights import StartingWeights
from batchwright.workloads.required_packages import require_model_packages
from batchwright.workloads.speech import CtcWorkload, speech_seq2seq_inputs

TransformersObject: TypeAlias = Any
"""A ``transformers.PreTrainedModel``; transformers ships no usable types."""

_AUTO_CLASSES: dict[TransformersTask, str] = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "image-classification": "AutoModelForImageClassification",
    "speech-seq2seq": "AutoModelForSpeechSeq2Seq",
    "ctc": "AutoModelForCTC",
    "contrastive": "AutoModelForZeroShotImageClassification",
}

_POSITIONS = ("max_position_embeddings", "max_target_positions")
"""Longest text of a model; the second is that of a decoder which reads speech."""
LAYER_DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
"""Probabilities with which training leaves out a layer: fields of configs, and attributes of modules."""
_FEWEST_CLASSES = 2
_MOST_NAMES = 8
"""Names in one note."""
_MASKLESS = {"fnet"}
"""Text encoders without an attention mask: of the 316 in transformers 5.23 for the supported tasks, only FNet."""


class LabelledWorkload:
    """Cross-entropy of a transformers model over labels: per sample, per token, or per masked token.

    ``labels`` makes them from the inputs, with ``IGNORED_LABEL`` for positions to ignore.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        inputs: Callable[[int], dict[str, Tensor]],
        labels: Callable[[dict[str, Tensor]], Tensor],
        config: TransformersConfig,
        label_smoothing: float = 0.0,
    ) -> None:
        self.build_model = build
        self._label_smoothing = label_smoothing
        self._inputs = inputs
        self._labels = labels
        self.config = config
        self.takes_mask = config.model_type not in _MASKLESS
        """True if batches of text have an ``attention_mask``."""

    def make_batch(self, size: int) -> dict[str, Tensor]:
        """Random samples of the worst case, with labels.

        Texts have the full length but for one padding token: some attention implementations drop a mask without a zero,
        and then take less memory than with real, ragged data.
        """
        inputs = self._inputs(size)
        return {**inputs, "labels": self._labels(inputs)}

    def loss_terms(self, model: nn.Module, batch: Mapping[str, Tensor]) -> LossTerms:
        """One term, ``cross_entropy``."""
        return self.score(model, batch).terms

    def score(self, model: nn.Module, batch: Mapping[str, Tensor]) -> LabelScores:
        """Score the classes of each sample or token."""
        inputs, labels = {name: value for name, value in batch.items() if name != "labels"}, batch["labels"]
        logits = model(**inputs).logits
        loss = summed_cross_entropy(logits, labels, self._label_smoothing)
        return LabelScores({"cross_entropy": (loss, count_labels(labels))}, logits, labels)

    def loss_weights(self, batch: Mapping[str, Tensor]) -> Mapping[str, float]:
        """Number of labels that are not ignored."""
        return {"cross_entropy": float(count_labels(batch["labels"]))}


def build_config(model: TransformersModel, batch: BatchSpec) -> TransformersConfig:
    """Build the transformers configuration of ``model``.

    Raises:
        SpecError: for an unknown model type or field, a field that refers to code or files, an invalid value, a
            sequence longer than the model's positions, or a single class.
    """
    forbid_hub_kernels()
    from transformers import CONFIG_MAPPING, AutoConfig  # noqa: PLC0415 - takes a second, and only this kind needs it

    if not model.model_type:
        raise model_problem("pretrained", "was not read: the command line, the service, `tune` and `estimate` do that")
    fields = dict(model.config)
    model_type = str(fields.pop("model_type"))
    with offline():
        try:
            default = AutoConfig.for_model(model_type)
        except ValueError:
            near = difflib.get_close_matches(model_type, list(CONFIG_MAPPING.keys()), n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else "for example gpt2, bert, llama, vit, resnet"
            raise model_problem("config.model_type", f"is not known to transformers; {hint}", model_type) from None
        check_fields(fields, default, published=model.pretrained is not None)
        try:
            config = AutoConfig.for_model(model_type, **fields)
        except Exception as error:  # noqa: BLE001 - each configuration class raises its own kinds of error
            raise model_problem("config", " ".join(str(error).split())) from None
    config.architectures = config.architectures or []  # of several models for a task (DeiT's) the first is used
    check_config(config)
    require_router_fields(fields, config)
    if model.task != "ctc":  # whose labels have no positions
        _check_positions(config, batch)
    if model.task.endswith("-classification") and config.num_labels < _FEWEST_CLASSES:
        message = f"must be at least {_FEWEST_CLASSES} for {model.task}, whose loss is cross-entropy over the classes"
        raise model_problem("config.num_labels", message, config.num_labels)
    return config


def config_notes(spec: WorkloadSpec) -> tuple[str, ...]:
    """Return a note on fields of the spec's config that may have no effect; none for other kinds of models.

    Raises:
        SpecError: as ``build_config``, and when transformers is missing.
    """
    if not isinstance(spec.model, TransformersModel):
        return ()
    require_model_packages(spec)
    config = build_config(spec.model, spec.batch)
    with offline():
        undeclared = undeclared_fields(config, spec.model.config, published=spec.model.pretrained is not None)
    if not undeclared:
        return ()
    shown = ", ".join(undeclared[:_MOST_NAMES]) + (", ..." if len(undeclared) > _MOST_NAMES else "")
    message = (
        f"transformers does not declare {shown}. Unless the model's code reads such a field, it has no "
        "effect: check the spelling."
    )
    return (message,)


def _check_dropped_layers(config: TransformersConfig, *, is_sharded: bool) -> None:
    """Refuse rates of leaving out layers where ranks hold shards of each layer."""
    if not is_sharded:
        return
    for path, inner in configs_within(config):
        for name in LAYER_DROPS:
            rate = getattr(inner, name, None) or 0.0
            if rate > 0.0:
                message = (
                    "would drop different layers on each rank, and ranks wait for each other in each layer: set it to 0"
                )
                raise model_problem(f"{path}.{name}", message, rate)


def _check_positions(config: TransformersConfig, batch: BatchSpec) -> None:
    path, text = "config", config
    if hasattr(config, "text_config"):
        path, text = "config.text_config", config.text_config
    for name in _POSITIONS:
        limit = getattr(text, name, None)
        if not isinstance(limit, int) or limit <= 0:  # xlnet says -1: any length
            continue
        if batch.sequence_length and batch.sequence_length > limit:
            message = f"is {limit} in this config, below batch.sequence_length {batch.sequence_length}"
            raise model_problem(f"{path}.{name}", message)


def _build_model(
    config: TransformersConfig,
    task: TransformersTask,
    load: StartingWeights | None,
    *,
    recompute: bool,
    adapter: LoraAdapter | None,
) -> nn.Module:
    import transformers  # noqa: PLC0415 - see build_config

    auto_class = getattr(transformers, _AUTO_CLASSES[task])
    try:
        with offline():
            if load is None:
                model: nn.Module = auto_class.from_config(config, trust_remote_code=False)
            else:
                model = load(auto_class, config)
    except ImportError as error:  # a package that this kind of model needs is missing
        raise model_problem("config", " ".join(str(error).split())) from None
    except ValueError as error:
        message = " ".join(str(error).split())
        if "Unrecognized configuration class" in message:  # the auto class has no model for this config
            message = f"transformers has no {_AUTO_CLASSES[task]} for {type(config).__name__}"
            raise model_problem("task", message, task) from None
        raise model_problem("config", message) from None
    check_model(model)
    if wants_router_loss(config):
        require_router_loss(model)
    if adapter is not None:
        quantize_base(model, adapter, is_random=load is None)
        model = inject_lora(model, adapter, task)
    if recompute:  # not reentrant: gradients reach the adapter although no input of a block needs one
        _checkpoint_activations(model)
    return model.train()


def _checkpoint_activations(model: TransformersObject) -> None:
    """Turn activation checkpointing on, by its name since transformers 5.23 or its former name."""
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise SpecError([FieldProblem("activation_checkpointing", str(error), "True")]) from None


_MASKED_SHARE = 0.15
"""Share of the tokens a masked language model predicts (Devlin et al., 2018)."""


def _masked_labels(ids: Tensor) -> Tensor:
    """The ids at a random 15 % of the positions (at least one per sample), ignored elsewhere."""
    chosen = torch.rand(ids.shape) < _MASKED_SHARE
    chosen[:, 0] = True
    return torch.where(chosen, ids, IGNORED_LABEL)


def transformers_workload(  # noqa: PLR0913 - the parts of a spec that a workload is made from
    model: TransformersModel,
    batch: BatchSpec,
    *,
    recompute: bool,
    is_sharded: bool = False,
    load: StartingWeights | None = None,
    label_smoothing: float = 0.0,
    adapter: LoraAdapter | None = None,
    preference: PreferenceSpec | None = None,
) -> Workload:
    """The workload of a ``transformers`` model.

    Ranks that hold shards of each layer must run it at the same time. Labels of `ctc` and `contrastive` are not
    smoothed.

    Raises:
        SpecError: naming the field of the config that transformers refuses.
    """
    config = build_config(model, batch)
    _check_dropped_layers(config, is_sharded=is_sharded)
    length = batch.sequence_length or 0
    if model.task == "sequence-classification" and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0  # decoders find the last token of a sample by this id, and need it for batches

    def build() -> nn.Module:
        built = _build_model(config, model.task, load, recompute=recompute, adapter=adapter)
        return built if preference is None or adapter is not None else keep_reference(built)

    if model.task != "causal-lm" and wants_router_loss(config):
        raise router_loss_error(config, f"only causal-lm trains a router loss, not {model.task}")
    if preference is not None:
        if wants_router_loss(config):
            raise router_loss_error(config, "`preference` has no such term")
        return PreferenceWorkload(build, length, config, preference)
    if model.task == "causal-lm":
        return _causal_kind(config, batch)(build, length, config, label_smoothing)
    if model.task == "ctc":
        return CtcWorkload(build, config, batch)
    if model.task == "contrastive":
        return ContrastiveWorkload(build, config, batch)
    inputs = _inputs(model.task, config, batch)
    return LabelledWorkload(build, inputs, _labels(model.task, config.num_labels), config, label_smoothing)


def _inputs(task: TransformersTask, config: TransformersConfig, batch: BatchSpec) -> Callable[[int], dict[str, Tensor]]:
    """The function that makes a task's random inputs."""
    if task == "image-classification":
        side = batch.image_size or getattr(config, "image_size", None)
        if not isinstance(side, int):
            raise SpecError([FieldProblem("batch.image_size", "is required: this config states no image size")])
        channels = int(getattr(config, "num_channels", 3))
        return lambda size: {"pixel_values": torch.randn(size, channels, side, side)}
    if task == "speech-seq2seq":
        return speech_seq2seq_inputs(config, batch)
    inputs = _text_inputs(config, batch.sequence_length or 0, paired=task == "seq2seq-lm")
    is_classified = task == "sequence-classification" and config.is_encoder_decoder
    return _with_single_eos(inputs, config) if is_classified else inputs


def _causal_kind(config: TransformersConfig, batch: BatchSpec) -> type[CausalWorkload]:
    """The workload of a causal language model."""
    if batch.packing is not None:
        require_separate_documents(config, batch.sequence_length or 0)
        return PackedWorkload
    return RoutedWorkload if wants_router_loss(config) else CausalWorkload


def _text_inputs(config: TransformersConfig, length: int, *, paired: bool) -> Callable[[int], dict[str, Tensor]]:
    names = ("input_ids", "decoder_input_ids") if paired else ("input_ids",)
    vocabulary_size = vocabulary_size_of(config)

    def make(size: int) -> dict[str, Tensor]:
        inputs = {name: random_tokens(size, length, vocabulary_size) for name in names}
        if config.model_type in _MASKLESS:
            return inputs
        mask = torch.ones(size, length, dtype=torch.int64)
        mask[0, 1:][-1:] = 0  # but a text of one token is not all padding
        padding = getattr(config, "pad_token_id", None) or 0
        return {name: torch.where(mask > 0, ids, padding) for name, ids in inputs.items()} | {"attention_mask": mask}

    return make


def _with_single_eos(inputs: Callable[[int], dict[str, Tensor]], config: TransformersConfig) -> Callable[..., Any]:
    """Make texts with one end-of-sequence token, the last: BART and similar models classify a text by that token."""
    end, vocabulary_size = getattr(config, "eos_token_id", None), vocabulary_size_of(config)
    if not isinstance(end, int) or end >= vocabulary_size:
        return inputs

    def make(size: int) -> dict[str, Tensor]:
        batch_inputs = inputs(size)
        ids, last = batch_inputs["input_ids"], batch_inputs["attention_mask"].sum(1) - 1
        ids = torch.where(ids == end, (end + 1) % vocabulary_size, ids)
        ids[torch.arange(size), last] = end
        return {**batch_inputs, "input_ids": ids}

    return make


def _labels(task: TransformersTask, classes: int) -> Callable[[dict[str, Tensor]], Tensor]:
    """The function that makes a task's random labels from its random inputs."""
    makers: dict[TransformersTask, Callable[[dict[str, Tensor]], Tensor]] = {
        "masked-lm": lambda inputs: _masked_labels(inputs["input_ids"]),
        "seq2seq-lm": lambda inputs: inputs["decoder_input_ids"],
        "token-classification": lambda inputs: inputs["input_ids"] % classes,
    }
    if task == "speech-seq2seq":
        return lambda inputs: inputs["decoder_input_ids"].clone()  # the mask is that of the audio
    maker = makers.get(task)
    if maker is None:
        return lambda inputs: torch.randint(0, classes, (len(next(iter(inputs.values()))),))
    return lambda inputs: _without_padding(maker(inputs), inputs.get("attention_mask"))


def _without_padding(labels: Tensor, mask: Tensor | None) -> Tensor:
    """``labels`` in memory of their own, ignored where the mask is zero."""
    return labels.clone() if mask is None else torch.where(mask > 0, labels, IGNORED_LABEL)
