"""Pairs of texts and words with their classes, by transformers' own tokenizers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, PreTrainedTokenizerFast

from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.data.build import build_data
from batchwright.workloads.base import IGNORED_LABEL
from batchwright.workloads.build import build_model, build_workload
from tests.support.sources import built, problem
from tests.training.data.test_data import LENGTH, records, text_model
from tests.training.test_trained_model import train

pytestmark = pytest.mark.usefixtures("own_datasets_cache")

PAIRS: list[dict[str, Any]] = [
    {"text": "ab", "other": "b", "label": "no"},
    {"text": "abbaabbaab", "other": "abab", "label": "yes"},
    {"text": "", "other": "a", "label": "no"},
]
WORDS: list[dict[str, Any]] = [
    {"tokens": ["abba", "a", "b"], "tags": [2, 0, -100]},
    {"tokens": ["ab"] * 10, "tags": [1] * 10},
    {"tokens": [], "tags": []},
]


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """Letters, as BERT's tokenizer puts texts and pairs between its tokens."""
    vocabulary = {name: number for number, name in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b"])}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="[UNK]"))  # noqa: S106 - a token of text
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    return str(path)


def pairs(directory: Path, tokenizer: str, rows: list[dict[str, Any]] | None = None, **config: Any) -> WorkloadSpec:
    """A small classifier of pairs."""
    data = records(directory, tokenizer, rows or PAIRS, text_pair_field="other")
    return text_model("sequence-classification", data, **config)


def words(directory: Path, tokenizer: str, rows: list[dict[str, Any]] | None = None) -> WorkloadSpec:
    """A small classifier of words."""
    data = records(directory, tokenizer, rows or WORDS, text_field="tokens", label_field="tags")
    return text_model("token-classification", data)


# --- pairs of texts ---


def test_a_pair_is_tokenised_as_by_transformers(tmp_path: Path, tokenizer: str) -> None:
    """With the types of its tokens, the longer text cut first; rows without one of the texts are left out."""
    data = built(pairs(tmp_path, tokenizer))
    oracle = PreTrainedTokenizerFast(tokenizer_file=tokenizer, pad_token="[PAD]")  # noqa: S106 - a token of text
    texts = ([row[name] for row in PAIRS[:2]] for name in ("text", "other"))
    wanted = oracle(*texts, truncation=True, max_length=LENGTH, padding=True, return_token_type_ids=True)
    batch = data.batch([0, 1])
    assert set(batch) == {"input_ids", "token_type_ids", "attention_mask", "labels"}
    assert len(data) == 2
    assert data.classes == ("no", "yes")
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        assert batch[name].tolist() == wanted[name]
    assert batch["token_type_ids"].sum() > 0
    assert batch["labels"].tolist() == [0, 1]


def test_a_model_without_types_gets_none(tmp_path: Path, tokenizer: str) -> None:
    """As RoBERTa, whose embeddings of types have a single row."""
    assert "token_type_ids" not in built(pairs(tmp_path, tokenizer, type_vocab_size=1)).batch([0])


@pytest.mark.parametrize("rows", ["pairs", "words"])
def test_the_model_takes_what_is_read(tmp_path: Path, tokenizer: str, rows: str) -> None:
    """And trains on it."""
    spec = {"pairs": pairs, "words": words}[rows](tmp_path, tokenizer)
    workload = build_workload(spec)
    batch = build_data(spec, workload).batch([0, 1])
    (total, weight) = workload.loss_terms(build_model(spec, workload), batch)["cross_entropy"]
    assert torch.isfinite(total)
    assert weight == int((batch["labels"] != IGNORED_LABEL).sum())
    assert train(tmp_path / "run", spec, 1)[1]


def test_names_of_classes_are_those_of_the_model(tmp_path: Path, tokenizer: str) -> None:
    """Names that the model has keep their numbers, others are numbered in sorted order; the trained model has them."""
    numbers = {"yes": 0, "maybe": 1, "no": 2}
    ours: dict[str, Any] = {"id2label": {str(number): name for name, number in numbers.items()}, "label2id": numbers}
    known = pairs(tmp_path, tokenizer, **ours)
    assert built(known).classes == ("yes", "maybe", "no")
    assert built(known).batch([0, 1])["labels"].tolist() == [2, 0]
    for spec, names in ((known, ["yes", "maybe", "no"]), (pairs(tmp_path, tokenizer), ["no", "yes", "LABEL_2"])):
        train(tmp_path / names[0], spec, 1)
        config = AutoConfig.from_pretrained(tmp_path / names[0] / "pretrained")
        assert config.id2label == dict(enumerate(names))
        assert config.label2id == {name: number for number, name in enumerate(names)}


# --- words ---


def test_the_first_token_of_a_word_has_its_class(tmp_path: Path, tokenizer: str) -> None:
    """By the words of transformers' tokenizer; further tokens, added ones and negative labels are ignored."""
    data = built(words(tmp_path, tokenizer))
    oracle = PreTrainedTokenizerFast(tokenizer_file=tokenizer, pad_token="[PAD]")  # noqa: S106 - a token of text
    assert len(data) == 2
    for index, row in enumerate(WORDS[:2]):
        wanted = oracle(row["tokens"], is_split_into_words=True, truncation=True, max_length=LENGTH)
        numbers, labels = wanted.word_ids(), []
        for place, number in enumerate(numbers):
            is_first = number is not None and number not in numbers[:place]
            label = row["tags"][number] if is_first else IGNORED_LABEL
            labels.append(label)
        sample: dict[str, torch.Tensor] = data.samples[index]
        assert sample["input_ids"].tolist() == wanted["input_ids"]
        assert sample["labels"].tolist() == labels
    ignored = IGNORED_LABEL
    assert data.batch([0])["labels"].tolist() == [[ignored, 2, ignored, ignored, ignored, 0, ignored, ignored]]


def test_words_may_be_bytes_and_classes_names(tmp_path: Path) -> None:
    """A space between words is of none."""
    rows = [{"tokens": ["ab", "c"], "tags": ["O", "B-PER"]}]
    spec = words(tmp_path, "bytes", rows)
    data = built(spec)
    assert data.classes == ("B-PER", "O")
    batch = data.batch([0])
    assert batch["input_ids"].tolist() == [[*b"ab c"]]
    assert batch["labels"].tolist() == [[1, IGNORED_LABEL, IGNORED_LABEL, 0]]


@pytest.mark.parametrize(
    ("row", "field", "expected"),
    [
        ({"tokens": ["a", "b"], "tags": [0]}, "data.label_field", "1 labels for 2 words"),
        ({"tokens": "a b", "tags": [0]}, "data.text_field", "must hold lists"),
        ({"tokens": ["a"], "tags": 0}, "data.label_field", "must hold lists"),
        ({"tokens": ["a"], "tags": [3]}, "data.label_field", "the label 3, and the model has 3 classes"),
        ({"tokens": ["a"], "tags": [0.5]}, "data.label_field", "whole numbers or names"),
        ({"tokens": [1], "tags": [0]}, "data.text_field", "must hold lists of words"),
        ({"tokens": ["a", None], "tags": [0, 1]}, "data.text_field", "must hold lists of words"),
        ({"words": ["a"], "tags": [0]}, "data.text_field", "not a field of these rows"),
    ],
)
def test_words_without_classes_are_refused(
    tmp_path: Path, tokenizer: str, row: dict[str, Any], field: str, expected: str
) -> None:
    """The field at fault is named."""
    found, message = problem(words(tmp_path, tokenizer, [row]))
    assert found == field
    assert expected in message


def test_pairs_are_refused_where_they_mean_nothing(tmp_path: Path, tokenizer: str) -> None:
    """For other tasks, and for bytes, which have nothing to put between two texts."""
    assert problem(pairs(tmp_path, "bytes"))[0] == "data.tokenizer"
    data = records(tmp_path, tokenizer, PAIRS, text_pair_field="other")
    assert problem(text_model("causal-lm", data))[0] == "data.text_pair_field"
    short = pairs(tmp_path, tokenizer)
    short = short.model_copy(update={"batch": short.batch.model_copy(update={"sequence_length": 4})})
    assert "leaves no room" in problem(short)[1]
