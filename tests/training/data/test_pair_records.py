"""Rows as preference pairs: where a completion begins, what is cut, and which pairs are left out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.data.files import DataFolders
from batchwright.training.data.sources.pair_records import PairSamples
from batchwright.training.evaluation.held_out_data import build_run_data
from batchwright.workloads.base import IGNORED_LABEL
from batchwright.workloads.build import build_workload
from tests.support.sources import built, problem
from tests.training.data.test_data import write_rows
from tests.training.test_adapters import LLAMA
from tests.training.test_trained_model import spec_of

pytestmark = pytest.mark.usefixtures("own_datasets_cache")

LENGTH = 10
BEGIN, END = 0, 1
ROWS = [
    {"prompt": "ab", "chosen": "cd", "rejected": "c"},
    {"prompt": "abc", "chosen": "defghijklmn", "rejected": "x"},
]


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """Bytes, with a token of its own for `bc`, between a token of the beginning and one of the end."""
    vocabulary = {"<s>": BEGIN, "</s>": END, **{letter: place + 2 for place, letter in enumerate("abcdefghijklmnopqx")}}
    made = Tokenizer(models.BPE({**vocabulary, "bc": 20}, [("b", "c")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", BEGIN), ("</s>", END)]
    )
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    return str(path)


def pairs_spec(directory: Path, rows: list[dict[str, Any]], **fields: Any) -> WorkloadSpec:
    """A small Llama on pairs of ten tokens."""
    path = write_rows(directory / "rows.jsonl", rows)
    data = {"kind": "records", "paths": [str(path)], **fields}
    return spec_of({"config": LLAMA}, batch={"sequence_length": LENGTH}, preference={"kind": "dpo"}, data=data)


def sides(spec: WorkloadSpec, index: int) -> list[tuple[list[int], list[int]]]:
    """The ids of both sequences of a pair, and the labels that are not ignored."""
    samples = built(spec).samples
    assert isinstance(samples, PairSamples)
    found = []
    for side in samples[index]:
        ids, labels = side["input_ids"].tolist(), side["labels"]
        kept = labels[labels != IGNORED_LABEL].tolist()
        assert kept == ids[len(ids) - len(kept) :]  # a completion ends its sequence
        found.append((ids, kept))
    return found


def test_the_loss_counts_the_completions(tmp_path: Path) -> None:
    """Of bytes: each sequence is the prompt and one completion."""
    assert sides(pairs_spec(tmp_path, ROWS), 0) == [([*b"abcd"], [*b"cd"]), ([*b"abc"], [*b"c"])]


def test_what_a_tokenizer_adds_is_at_the_ends_of_a_sequence(tmp_path: Path, tokenizer: str) -> None:
    """The beginning is of the prompt, the end of each completion, and none is between them."""
    rows = [{"prompt": "a", "chosen": "de", "rejected": "f"}]
    found = sides(pairs_spec(tmp_path, rows, tokenizer=tokenizer), 0)
    assert found == [([BEGIN, 2, 5, 6, END], [5, 6, END]), ([BEGIN, 2, 7, END], [7, END])]


def test_a_token_of_both_is_of_the_completion(tmp_path: Path, tokenizer: str) -> None:
    """Where the prompt's last letter joins the completion's first one, both completions begin before that letter."""
    rows = [{"prompt": "ab", "chosen": "c", "rejected": "d"}]
    found = sides(pairs_spec(tmp_path, rows, tokenizer=tokenizer), 0)
    assert found == [([BEGIN, 2, 20, END], [20, END]), ([BEGIN, 2, 3, 5, END], [3, 5, END])]


@pytest.mark.parametrize("kind", ["bytes", "file"])
def test_a_sequence_is_cut_at_its_end(tmp_path: Path, tokenizer: str, kind: str) -> None:
    """The prompt keeps its first token, and an added end is cut too."""
    (ids, kept), (other, _) = sides(pairs_spec(tmp_path, ROWS, tokenizer=tokenizer if kind == "file" else kind), 1)
    assert len(ids) == LENGTH
    assert ids[0] == (BEGIN if kind == "file" else ord("a"))
    assert END not in ids
    assert len(kept) == 7
    assert len(other) == (5 if kind == "file" else 4)


@pytest.mark.parametrize(("kind", "longest"), [("bytes", 9), ("file", 8)])
def test_pairs_without_room_are_left_out(tmp_path: Path, tokenizer: str, kind: str, longest: int) -> None:
    """A prompt must leave room for a token of a completion, besides what is added before it; a note counts the rest."""
    rows = [{"prompt": "d" * length, "chosen": "e", "rejected": "f"} for length in range(longest - 2, longest + 3)]
    data = built(pairs_spec(tmp_path, rows, tokenizer=tokenizer if kind == "file" else kind))
    assert len(data) == 3
    assert data.notes == ("2 of 5 pairs are left out: their prompts have 10 tokens (batch.sequence_length) or more",)
    longest_pair = data.samples[2]
    assert [int((side["labels"] != IGNORED_LABEL).sum()) for side in longest_pair] == [1, 1]
    assert not built(pairs_spec(tmp_path, rows[:1])).notes


def test_completions_may_hold_their_prompt(tmp_path: Path, tokenizer: str) -> None:
    """Without a field of the prompt it is the tokens that both begin with, as TRL takes the characters."""
    rows = [{"chosen": "abcd", "rejected": "abx"}, {"chosen": "d" * 10 + "a", "rejected": "d" * 10 + "b"}]
    spec = pairs_spec(tmp_path, rows, tokenizer=tokenizer)
    assert sides(spec, 0) == [([BEGIN, 2, 20, 5, END], [20, 5, END]), ([BEGIN, 2, 3, 19, END], [3, 19, END])]
    assert built(spec).notes == (
        "1 of 2 pairs are left out: their prompts have 10 tokens (batch.sequence_length) or more",
    )


@pytest.mark.parametrize("kind", ["prompt", "text", "none"])
def test_pairs_may_be_conversations(tmp_path: Path, kind: str) -> None:
    """With a prompt of messages, or with one that both conversations begin with, beside a text of it or without."""
    (tmp_path / "chat").write_text(
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }}.{% endfor %}{% if add_generation_prompt %}a{% endif %}"
    )
    question = [{"role": "user", "content": "q"}]
    answers = [[{"role": "assistant", "content": text}] for text in ("yes", "no")]
    begin = [] if kind == "prompt" else question
    row: dict[str, Any] = {"chosen": [*begin, *answers[0]], "rejected": [*begin, *answers[1]]}
    if kind != "none":
        row["prompt"] = question if kind == "prompt" else "q"
    found = sides(pairs_spec(tmp_path, [row], chat_template=str(tmp_path / "chat")), 0)
    assert found == [([*b"uq.ayes."], [*b"yes."]), ([*b"uq.ano."], [*b"no."])]


def test_a_batch_has_both_sides_of_each_pair(tmp_path: Path) -> None:
    """Padded on the right to the longest sequence; a compiled model sees one shape."""
    spec = pairs_spec(tmp_path, ROWS)
    batch = built(spec).batch([1, 0, 0])
    assert batch["input_ids"].shape == batch["labels"].shape == (3, 2, LENGTH)
    assert batch["input_ids"][1, 1].tolist() == [*b"abc", *[0] * 7]
    assert batch["labels"][1, 1].tolist() == [IGNORED_LABEL, IGNORED_LABEL, ord("c"), *[IGNORED_LABEL] * 7]
    assert built(spec).batch([0])["input_ids"].shape == (1, 2, 4)
    assert built(spec.model_copy(update={"compile": True})).batch([0])["input_ids"].shape == (1, 2, LENGTH)


def test_fields_have_the_names_that_rows_give_them(tmp_path: Path) -> None:
    """Rows without one of the three texts are left out."""
    rows: list[dict[str, Any]] = [{"question": "a", "good": "b", "bad": text} for text in ("c", None)]
    fields = {"prompt_field": "question", "chosen_field": "good", "rejected_field": "bad"}
    data = built(pairs_spec(tmp_path, rows, **fields))
    assert len(data) == 1
    assert data.batch([0])["input_ids"].tolist() == [[[*b"ab"], [*b"ac"]]]


@pytest.mark.parametrize(
    ("row", "fields", "field", "words"),
    [
        ({"text": "a"}, {}, "data.chosen_field", "is not a field of these rows, which have text"),
        (ROWS[0], {"prompt_field": "question"}, "data.prompt_field", "which have prompt, chosen, rejected"),
        ({"prompt": "a", "chosen": "b"}, {}, "data.rejected_field", "which have prompt, chosen"),
        (
            {"prompt": "a", "chosen": [{"role": "x"}], "rejected": "b"},
            {},
            "data.rejected_field",
            "no lists, as of messages",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": [{"role": "x"}]}, {}, "data.rejected_field", "not text"),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, {}, "data.paths", "no row has text in prompt and chosen"),
        ({"prompt": "a" * 10, "chosen": "b", "rejected": "c"}, {}, "data.paths", "every prompt has batch.seq"),
        (ROWS[0], {"tokenizer": "/nowhere/tokenizer.json"}, "data.tokenizer", "cannot be read"),
    ],
)
def test_rows_without_pairs_are_refused(
    tmp_path: Path, row: dict[str, Any], fields: dict[str, Any], field: str, words: str
) -> None:
    """The field at fault is named."""
    found, message = problem(pairs_spec(tmp_path, [row], **fields))
    assert found == field
    assert words in message


def test_some_pairs_are_held_out(tmp_path: Path) -> None:
    """A split holds out whole pairs."""
    spec = pairs_spec(tmp_path, ROWS * 5)
    spec = WorkloadSpec.model_validate({**spec.model_dump(), "evaluation": {"count": 3}})
    data = build_run_data(spec, build_workload(spec), DataFolders())
    assert data.held_out is not None
    assert (len(data.training), len(data.held_out)) == (7, 3)
    assert data.held_out.batch([0, 1, 2])["input_ids"].shape[:2] == (3, 2)


def test_arrays_may_hold_pairs(tmp_path: Path) -> None:
    """Both sides of each pair along the second dimension, with labels of the completions."""
    ids = np.arange(4 * 2 * LENGTH).reshape(4, 2, LENGTH)
    labels = np.where(np.arange(LENGTH) < 5, IGNORED_LABEL, ids)
    np.savez(tmp_path / "pairs.npz", input_ids=ids, labels=labels)
    data = {"kind": "arrays", "path": str(tmp_path / "pairs.npz")}
    spec = pairs_spec(tmp_path, ROWS)
    spec = WorkloadSpec.model_validate({**spec.model_dump(), "data": data})
    assert torch.equal(built(spec).batch([2])["labels"], torch.from_numpy(labels[2:3]))
