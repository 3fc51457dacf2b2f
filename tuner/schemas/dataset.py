"""Samples of a workload: their worst case, pairs of them, the data that trains, and that of an evaluation. No torch."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from tuner.schemas.base import Document, NonNegativeInt, PositiveInt

OF_THE_MODEL = "pretrained"
"""The tokenizer in the folder of the pretrained model."""


def _names_a_tokenizer(tokenizer: str) -> str:
    if tokenizer not in {"bytes", OF_THE_MODEL} and not tokenizer.endswith(".json"):
        raise ValueError("must be `bytes`, `pretrained`, or the path of a Hugging Face `tokenizer.json`")
    return tokenizer


Tokenizer = Annotated[str, AfterValidator(_names_a_tokenizer)]
"""`bytes`, where ids 0 to 255 are the UTF-8 bytes of the text, `pretrained`, or the path of a `tokenizer.json`."""


class PathRead(NamedTuple):
    """A path in a spec, with the files that a run reads."""

    field: str
    """Name of the field with the path."""
    path: str
    """The path as written in the spec."""
    pattern: str
    """Glob pattern of the files."""


class TextData(Document):
    """Files read as one stream of tokens, cut into samples of the worst-case sequence length."""

    kind: Literal["text"]
    """Selects this kind of data."""
    paths: Annotated[tuple[str, ...], Field(min_length=1)]
    """Files, or glob patterns such as `corpus/**/*.txt`. Relative paths start at the working directory."""
    tokenizer: Tokenizer = "bytes"
    """`bytes`: token ids 0 to 255 are the UTF-8 bytes of the text. Or the path of a Hugging Face `tokenizer.json`, or
    `pretrained` for that of `model.pretrained`."""

    def paths_read(self) -> list[PathRead]:
        """Every path that a run reads."""
        return [*_each("paths", self.paths), *_tokenizer_read(self.tokenizer)]


class RecordsData(Document):
    """Rows of local files, each a sample; for causal, masked and seq2seq language models, and classifiers of texts.

    A text is cut at `batch.sequence_length` tokens, those that the tokenizer adds included; shorter ones are padded on
    the right, or packed (`batch.packing`). Rows without text are left out. With `preference` a row is a pair: the
    prompt with each of its two completions, cut likewise. Pairs whose prompt leaves no room are left out.

    Supervised fine-tuning of a `causal-lm` learns completions: `completion_field` or `messages_field` names them.
    """

    kind: Literal["records"]
    """Selects this kind of data."""
    paths: Annotated[tuple[str, ...], Field(min_length=1)]
    """Files of one format, or glob patterns such as `rows/*.jsonl`; relative paths start at the working directory."""
    format: Literal["json", "csv", "parquet", "text"] | None = None
    """Format of the files: `json` takes JSON lines and arrays, `text` has a row per line. By suffix when absent."""
    text_field: str = "text"
    """Field with the text of a row. A row of plain text has only this field, named `text`. For `token-classification`
    it holds the words of a text, a list."""
    text_pair_field: str | None = None
    """Field with the second text of a row, for `sequence-classification` of pairs. The longer text is cut first."""
    label_field: str = "label"
    """Field with the class of a row: a number or a name. Names have the numbers of the model's `id2label`, if it has
    all of them, else they are numbered in sorted order. For `token-classification` it holds the classes of the words, a
    list; a negative number is no class."""
    target_field: str | None = None
    """Field with the target text, for `seq2seq-lm`."""
    completion_field: str | None = None
    """Field with the completion of the prompt of a row: a text, or a list of messages, as the prompt is. The loss is
    over the completion alone. For `causal-lm`."""
    messages_field: str | None = None
    """Field with a conversation: a list of messages with `role` and `content` (or `from` and `value`, as ShareGPT has
    them). The loss is over the messages of the assistant, each with the special token behind it. For `causal-lm`."""
    tools_field: str | None = None
    """Field with the tools that the assistant may call, for the chat template: a list of their JSON schemas, or that
    list as JSON text. A row may have none."""
    train_on_prompts: bool = False
    """Whether the loss is over all tokens of completions and conversations, those of their prompts included."""
    chat_template: str | None = None
    """Path of the Jinja template that makes a text of messages. When absent `chat_template.jinja` beside the tokenizer,
    or else the `chat_template` of its `tokenizer_config.json`."""
    prompt_field: str = "prompt"
    """Field with the prompt of a row, for `completion_field`, and for `preference`, where it may be absent: then the
    prompt is what both completions begin with."""
    chosen_field: str = "chosen"
    """Field with the completion that is preferred, for `preference`."""
    rejected_field: str = "rejected"
    """Field with the other completion, for `preference`."""
    tokenizer: Tokenizer = "bytes"
    """`bytes`: token ids 0 to 255 are the UTF-8 bytes of the text. Or the path of a Hugging Face `tokenizer.json`, or
    `pretrained` for that of `model.pretrained`."""

    @model_validator(mode="after")
    def _learns_one_way(self) -> Self:
        if self.completion_field is not None and self.messages_field is not None:
            raise ValueError("give `completion_field` or `messages_field`, not both: the rows have one of the two")
        if self.train_on_prompts and not self.has_completions:
            raise ValueError("`train_on_prompts` needs `completion_field` or `messages_field`: a `text_field` has none")
        return self

    @property
    def has_completions(self) -> bool:
        """True if rows have completions to learn, or conversations with some."""
        return self.completion_field is not None or self.messages_field is not None

    def paths_read(self) -> list[PathRead]:
        """Every path that a run reads."""
        template = [] if self.chat_template is None else [_file("chat_template", self.chat_template)]
        return [*_each("paths", self.paths), *_tokenizer_read(self.tokenizer), *template]


class ImagesData(Document):
    """Images in one folder per class, for image classification.

    Each image is resized to the model's image size, without keeping proportions, converted to the model's channels,
    scaled to 0 to 1, and normalised with mean 0.5 and standard deviation 0.5: values from -1 to 1.
    """

    kind: Literal["images"]
    """Selects this kind of data."""
    path: str
    """Folder with one folder per class, numbered as the names of `records` are. A relative path starts at the working
    directory."""

    def paths_read(self) -> list[PathRead]:
        """Every path that a run reads."""
        return [PathRead("path", self.path, f"{glob.escape(self.path)}/*/*")]


class ArraysData(Document):
    """Arrays in a file, with the samples along the first dimension of each.

    They must be shaped like a batch of the model. Floating-point arrays are read as 32-bit numbers, integer arrays as
    64-bit ones. A causal language model needs `input_ids` alone; an `attention_mask` that is missing is all ones.
    """

    kind: Literal["arrays"]
    """Selects this kind of data."""
    path: str
    """A `.npz` or `.safetensors` file. A relative path starts at the working directory."""
    names: dict[str, str] = Field(default_factory=dict)
    """Names of arrays, by key of the model's batch, where the names differ: `{"inputs": "x_train"}`."""

    @field_validator("path")
    @classmethod
    def _has_a_known_suffix(cls, path: str) -> str:
        if not path.endswith((".npz", ".safetensors")):
            raise ValueError("must be a `.npz` or `.safetensors` file")
        return path

    def paths_read(self) -> list[PathRead]:
        """Every path that a run reads."""
        return [_file("path", self.path)]


class SyntheticData(Document):
    """Random samples of the worst-case shape: for a dry run of the whole path."""

    kind: Literal["synthetic"]
    """Selects this kind of data."""
    samples: PositiveInt = 1024
    """Number of different samples."""

    def paths_read(self) -> list[PathRead]:
        """Return no path: nothing is read."""
        return []


class WorkloadData(Document):
    """Data that the workload's own `dataset()` returns. For `python` models."""

    kind: Literal["workload"]
    """Selects this kind of data."""

    def paths_read(self) -> list[PathRead]:
        """Return no path: only the workload's code knows the files."""
        return []


def _each(field: str, paths: tuple[str, ...]) -> list[PathRead]:
    return [PathRead(field, path, path) for path in paths]


def _tokenizer_read(tokenizer: str) -> list[PathRead]:
    return [] if tokenizer in {"bytes", OF_THE_MODEL} else [_file("tokenizer", tokenizer)]


def _file(field: str, path: str) -> PathRead:
    return PathRead(field, path, glob.escape(path))


DataSpec = Annotated[
    TextData | RecordsData | ImagesData | ArraysData | SyntheticData | WorkloadData, Field(discriminator="kind")
]

# --- the worst case of a sample --------------------------------------------------------------------------------------

Packing = Literal["bfd", "wrapped"]
"""How records fill a sequence: see ``BatchSpec.packing``."""
_SHORTEST_PACKED = 4
"""Two documents with a next token to predict in each."""
_PACKED_DATA = {"records", "synthetic"}


class BatchSpec(Document):
    """The worst case of one sample. The required fields depend on the model."""

    sequence_length: PositiveInt | None = None
    """Tokens of the longest sample, after tokenisation. Needed by models with texts, also as the labels of speech."""
    packing: Packing | None = None
    """Pack `records` into sequences of `sequence_length` tokens, for causal language models of transformers: a sample
    is such a sequence, and without packing a record. Attention, positions and labels are those of each record alone.
    `bfd` (best-fit decreasing): whole records, each into the fullest sequence that has room. `wrapped`: all records one
    after the other, cut where a sequence is full."""
    image_size: PositiveInt | None = None
    """Height and width of the largest image, in pixels. Needed by image models."""
    audio_length: PositiveInt | None = None
    """Length of the longest recording: values of the waveform for models of raw audio (16,000 per second at 16 kHz),
    frames for models of spectrograms (100 per second where they are 10 ms apart). Whisper's follows from its config."""

    def require_packing(self, model: str, data: DataSpec | None, evaluation: EvaluationSpec | None) -> None:
        """Check that the records of a workload can be packed, if they are to be.

        Args:
            model: the task of a transformers model, or the kind of another one.
            data: the data of the spec.
            evaluation: the evaluation of the spec.

        Raises:
            ValueError: when the model is no causal language model of transformers, a sequence has no room for two
                documents, data has no records, or a split would divide records.
        """
        if self.packing is None:
            return
        if model != "causal-lm":
            raise ValueError(f"`batch.packing` is for `causal-lm` models of transformers, and this is {model}")
        if self.sequence_length is not None and self.sequence_length < _SHORTEST_PACKED:
            raise ValueError(
                f"`batch.sequence_length` is {self.sequence_length}, and `batch.packing` needs at least "
                f"{_SHORTEST_PACKED}: two documents with a next token in each"
            )
        held_out = None if evaluation is None else evaluation.data
        for field, used in (("data", data), ("evaluation.data", held_out)):
            if used is not None and used.kind not in _PACKED_DATA:
                raise ValueError(
                    f"`batch.packing` needs `records`, whose rows are the documents, and `{field}` is of the kind "
                    f"`{used.kind}`: leave packing out, or read the files as records"
                )
        is_split = evaluation is not None and evaluation.is_split and not isinstance(data, SyntheticData)
        if self.packing == "wrapped" and is_split:
            raise ValueError(
                "`evaluation` holds out some of the sequences, and with `batch.packing: wrapped` a record goes on in "
                "other sequences, which would train: give `evaluation.data` of its own, or pack by `bfd`"
            )


# --- preference pairs ------------------------------------------------------------------------------------------------

_SHORTEST_PAIR = 2
"""A prompt of one token, and one token of a completion."""
_PAIRED_DATA = {"arrays", "records", "synthetic"}


class PreferenceSpec(Document):
    """Training on preference pairs by direct preference optimization (DPO, Rafailov et al. 2023), for `causal-lm`.

    A sample is a pair: a prompt with a chosen and a rejected completion, two sequences of at most
    `batch.sequence_length` tokens each. The reward of a completion is `beta` times the logarithm of its probability
    over that which the reference policy gives it. The reference is the model that the run starts from: the base of an
    adapter, which takes no memory of its own, or a frozen copy of the weights.
    """

    ABSENT_FIELDS: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "loss_type": "did you mean `loss`?",
            "ref_model": "the reference is the model that the run starts from",
            "max_length": "it is `batch.sequence_length`",
            "max_prompt_length": "prompts are not cut: a pair whose prompt leaves no room is left out",
            "precompute_ref_log_probs": "the reference runs beside the model for each micro-batch",
            "reference_free": "there is always a reference: the model that the run starts from",
        }
    )

    kind: Literal["dpo"]
    """Selects this kind of training."""
    beta: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 0.1
    """How much the policy is kept near its reference: larger is nearer. The paper's tau with the loss `ipo`."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """`sigmoid`: the negative log-likelihood that the chosen completion is preferred, by the difference of the rewards
    (Bradley-Terry). `ipo`: the squared distance of the mean log-ratios per token from `1 / (2 * beta)` (Azar et al.
    2023)."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """Probability that a pair is the wrong way round (conservative DPO, Mitchell 2023), with the loss `sigmoid`."""

    @field_validator("kind", mode="before")
    @classmethod
    def _is_no_loss(cls, value: object) -> object:
        if value == "ipo":
            raise ValueError("must be 'dpo', with `loss: ipo`")
        return value

    @model_validator(mode="after")
    def _smooths_a_likelihood(self) -> Self:
        if self.label_smoothing and self.loss != "sigmoid":
            raise ValueError(f"`label_smoothing` is for the loss `sigmoid`, and this is `{self.loss}`: leave it out")
        return self

    @staticmethod
    def require_use(model: str, batch: BatchSpec, data: DataSpec | None, evaluation: EvaluationSpec | None) -> None:
        """Check that the parts of a spec have pairs; ``model`` is the task of a transformers model, or another kind.

        Raises:
            ValueError: when the model is no causal language model of transformers, records are packed, a sequence has
                no room for a completion, or data has no pairs.
        """
        if model != "causal-lm":
            raise ValueError(f"`preference` is for `causal-lm` models of transformers, and this is {model}")
        if batch.packing is not None:
            raise ValueError("`batch.packing` cannot be combined with `preference`, whose samples are pairs")
        if batch.sequence_length is not None and batch.sequence_length < _SHORTEST_PAIR:
            raise ValueError("`batch.sequence_length` is 1, and a prompt with a completion needs at least 2")
        held_out = None if evaluation is None else evaluation.data
        for field, used in (("data", data), ("evaluation.data", held_out)):
            if used is not None and used.kind not in _PAIRED_DATA:
                raise ValueError(
                    f"`preference` needs pairs, and `{field}` is of the kind `{used.kind}`: use `records` with the "
                    "fields `prompt`, `chosen` and `rejected`"
                )


# --- evaluation ------------------------------------------------------------------------------------------------------

HeldOutData = Annotated[TextData | RecordsData | ImagesData | ArraysData | WorkloadData, Field(discriminator="kind")]
"""Data of an evaluation. Synthetic data has no kind of its own here: a split holds some of it out."""
MetricName = Literal["accuracy", "perplexity", "f1", "precision", "recall", "reward_accuracy", "reward_margin"]
"""Figures of an evaluation beside its loss: see ``EvaluationSpec.metrics``."""
REWARD_METRICS = frozenset({"reward_accuracy", "reward_margin"})
"""Metrics of preference pairs, which have no others."""
Monitored = Literal["loss", "accuracy", "perplexity", "f1", "precision", "recall", "reward_accuracy", "reward_margin"]
"""Figures that choose the best weights."""
EvaluatedWeights = Literal["trained", "average", "both"]
"""The weights that an evaluation uses where moving averages are kept."""
_MOST_METRICS = 16


class EarlyStopping(Document):
    """The end of a run that no longer improves on held-out samples."""

    patience: PositiveInt
    """Evaluations in a row without an improvement, after which the run ends."""
    min_delta: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    """The change of the monitored figure above which it counts as improved."""


class EvaluationSpec(Document):
    """Evaluation of a run on held-out samples: a split of its data, or data of its own.

    The weights before the first update are evaluated, and those of the end; in between every `every` updates. Held-out
    samples never train.
    """

    fraction: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Share of the samples of `data` to hold out. Give this, `count` or `data`."""
    count: PositiveInt | None = None
    """Number of the samples of `data` to hold out."""
    data: HeldOutData | None = None
    """Data of its own, in files that `data` does not read. The kind `workload` is the workload's
    `evaluation_dataset()`."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the choice of samples that `fraction` or `count` holds out."""
    every: PositiveInt | None = None
    """Updates between two evaluations; none but those of the start and the end when absent."""
    micro_batch_size: PositiveInt | None = None
    """Samples per forward pass: those of the plan's largest micro-batch when absent. Halved where they do not fit."""
    metrics: Annotated[tuple[MetricName, ...], Field(max_length=_MOST_METRICS)] = ()
    """`accuracy`: share of the labels that have the highest logit. `perplexity`: the exponential of the mean of the
    first loss term, for a cross-entropy. `f1`, `precision` and `recall` are means over the classes of a classifier, by
    the package `torchmetrics`. Of preference pairs: `reward_accuracy`, the share with a larger reward of the chosen
    completion, and `reward_margin`, the mean difference of the two rewards."""
    monitor: Monitored = "loss"
    """The figure that chooses the best weights and ends a run early: `loss`, or one of `metrics`."""
    weights: EvaluatedWeights = "trained"
    """The weights that are evaluated, choose the best ones and end a run early: those that train (`trained`), or their
    moving averages of `ema_decay` (`average`). `both`: as `average`, and the trained ones are evaluated beside."""
    early_stopping: EarlyStopping | None = None
    """When to end the run before its last update; never when absent."""

    @model_validator(mode="after")
    def _holds_out_one_way(self) -> Self:
        if sum(given is not None for given in (self.fraction, self.count, self.data)) != 1:
            raise ValueError("give exactly one of `fraction`, `count` and `data`: the samples to evaluate on")
        if self.early_stopping is not None and self.every is None:
            raise ValueError("`early_stopping` needs `every`: the updates between two evaluations")
        if self.monitor != "loss" and self.monitor not in self.metrics:
            raise ValueError(f"`monitor` is `{self.monitor}`, which has to be one of `metrics` too")
        return self

    @property
    def uses_averages(self) -> bool:
        """True if the moving averages are evaluated, and choose the best weights."""
        return self.weights != "trained"

    def require_use(self, *, unlabelled: str, has_vocabulary: bool, has_averages: bool, has_pairs: bool) -> None:
        """Check that the metrics are of use for a model, and that the weights to evaluate are kept.

        Args:
            unlabelled: the task, if its loss is no cross-entropy over labels; empty otherwise.
            has_vocabulary: whether the classes of the labels are the tokens of a vocabulary.
            has_averages: whether moving averages of the weights are kept.
            has_pairs: whether the samples are preference pairs.

        Raises:
            ValueError: naming the first metric that is not of use, or the weights that are not kept.
        """
        if self.uses_averages and not has_averages:
            raise ValueError(
                f"`evaluation.weights` is `{self.weights}`, and no moving averages are kept: set `ema_decay` too"
            )
        for name in self.metrics:
            if has_pairs != (name in REWARD_METRICS):
                known = " and ".join(f"`{metric}`" for metric in sorted(REWARD_METRICS))
                raise ValueError(f"`{name}` cannot be had: {known} are the metrics of `preference`, and of it alone")
            if unlabelled:
                raise ValueError(f"`{name}` is for a cross-entropy over labels, which {unlabelled} does not have")
            if has_vocabulary and name not in {"accuracy", "perplexity", *REWARD_METRICS}:
                raise ValueError(
                    f"`{name}` is an average over the classes of a classifier, and this model has a vocabulary"
                )

    @property
    def is_split(self) -> bool:
        """True if the held-out samples are some of the training data."""
        return self.data is None

    def held_out_of(self, samples: int) -> NonNegativeInt:
        """Number of samples of a split to hold out, of the data's ``samples``; at least one."""
        return self.count if self.count is not None else max(1, round((self.fraction or 0.0) * samples))
