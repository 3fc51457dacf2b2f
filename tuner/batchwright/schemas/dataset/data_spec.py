"""The kinds of data that a run reads."""

import glob
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import AfterValidator, Field, field_validator, model_validator
from typing_extensions import override

from batchwright.schemas.base import Document, PositiveInt

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

    @property
    def has_samples(self) -> bool:
        """True if the files hold samples, and not what reads them."""
        return self.field not in {"tokenizer", "chat_template"}


class _Data(Document):
    def paths_read(self) -> list[PathRead]:
        """Every path that a run reads; of the workload's own data only its code knows them."""
        return []


class TextData(_Data):
    """Files read as one stream of tokens, cut into samples of the worst-case sequence length."""

    kind: Literal["text"]
    """Selects this kind of data."""
    paths: Annotated[tuple[str, ...], Field(min_length=1)]
    """Files, or glob patterns such as `corpus/**/*.txt`. Relative paths start at the working directory."""
    tokenizer: Tokenizer = "bytes"
    """`bytes`: token ids 0 to 255 are the UTF-8 bytes of the text. Or the path of a Hugging Face `tokenizer.json`, or
    `pretrained` for that of `model.pretrained`."""

    @override
    def paths_read(self) -> list[PathRead]:
        return [*_each("paths", self.paths), *_tokenizer_read(self.tokenizer)]


class RecordsData(_Data):
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
    """Format of the files: `json` takes JSON lines and arrays, `text` has a row per line. Default: by suffix."""
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
    """True if the loss is over all tokens of completions and conversations, those of their prompts included."""
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

    @override
    def paths_read(self) -> list[PathRead]:
        template = [] if self.chat_template is None else [_file("chat_template", self.chat_template)]
        return [*_each("paths", self.paths), *_tokenizer_read(self.tokenizer), *template]


class ImagesData(_Data):
    """Images in one folder per class, for image classification.

    Each image is resized to the model's image size, without keeping proportions, converted to the model's channels,
    scaled to 0 to 1, and normalised with mean 0.5 and standard deviation 0.5: values from -1 to 1.
    """

    kind: Literal["images"]
    """Selects this kind of data."""
    path: str
    """Folder with one folder per class, numbered as the names of `records` are. A relative path starts at the working
    directory."""

    @override
    def paths_read(self) -> list[PathRead]:
        return [PathRead("path", self.path, f"{glob.escape(self.path)}/*/*")]


class ArraysData(_Data):
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

    @override
    def paths_read(self) -> list[PathRead]:
        return [_file("path", self.path)]


class SyntheticData(_Data):
    """Random samples of the worst-case shape: for a dry run of the whole path."""

    kind: Literal["synthetic"]
    """Selects this kind of data."""
    samples: PositiveInt = 1024
    """Number of different samples."""


class WorkloadData(_Data):
    """Data that the workload's own `dataset()` returns. For `python` models."""

    kind: Literal["workload"]
    """Selects this kind of data."""


def _each(field: str, paths: tuple[str, ...]) -> list[PathRead]:
    return [PathRead(field, path, path) for path in paths]


def _tokenizer_read(tokenizer: str) -> list[PathRead]:
    return [] if tokenizer in {"bytes", OF_THE_MODEL} else [_file("tokenizer", tokenizer)]


def _file(field: str, path: str) -> PathRead:
    return PathRead(field, path, glob.escape(path))


DataSpec = Annotated[
    TextData | RecordsData | ImagesData | ArraysData | SyntheticData | WorkloadData, Field(discriminator="kind")
]
HeldOutData = Annotated[TextData | RecordsData | ImagesData | ArraysData | WorkloadData, Field(discriminator="kind")]
"""Data of an evaluation. Synthetic data has no kind of its own here: a split holds some of it out."""
