"""The data of a training job: every kind, its order, and data that does not fit a model."""

import csv
import json
import socket
import sys
import textwrap
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import datasets
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from batchwright.errors import SpecError
from batchwright.schemas.dataset.data_spec import DataSpec, TextData
from batchwright.schemas.dataset.evaluation_spec import EvaluationSpec
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.batch_schedule import BatchSchedule, Position
from batchwright.training.data.build import SOURCES, build_data
from batchwright.training.data.files import DataFolders
from batchwright.training.data.loading import SampleRange, WindowLoader
from batchwright.training.data.seeding import epoch_order
from batchwright.training.evaluation.held_out_data import build_run_data
from batchwright.workloads.build import build_model, build_workload
from tests.support.factories import gpt_spec, mlp_spec, transformers_spec
from tests.support.sources import built, problem

STANDARD_LIBRARY = Path(textwrap.__file__).read_text(encoding="utf-8")
SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = 400
LENGTH = 12
BERT: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": VOCABULARY,
    "num_labels": 3,
}
T5: dict[str, Any] = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
T5 |= {"vocab_size": VOCABULARY}
GPT2: dict[str, Any] = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": VOCABULARY}
VIT: dict[str, Any] = {"model_type": "vit", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VIT |= {"intermediate_size": 16, "image_size": 16, "patch_size": 8, "num_labels": 3}
CONFIGS = {"causal-lm": GPT2, "masked-lm": BERT, "seq2seq-lm": T5, "sequence-classification": BERT}
CONFIGS |= {"token-classification": BERT, "image-classification": VIT}
WINDOWS = [(SampleRange(0, (0, 3)), SampleRange(0, (1,))), (), (SampleRange(1, (2,)),)]
ROWS = [{"text": line, "label": index % 3} for index, line in enumerate(STANDARD_LIBRARY.splitlines()[:60]) if line]


@pytest.fixture(autouse=True)
def _offline_with_a_cache_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the network and the user's cache of `datasets` from the tests."""
    connect = socket.socket.connect

    def within_the_host(one: socket.socket, address: str) -> None:
        assert one.family == socket.AF_UNIX, "data is read offline"
        connect(one, address)

    monkeypatch.setattr(socket.socket, "connect", within_the_host)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A byte-level BPE, trained on the standard library, that puts a text between `[CLS]` and `[SEP]`."""
    made = Tokenizer(models.BPE(unk_token="[UNK]"))  # noqa: S106 - a token of text
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([STANDARD_LIBRARY], trainer)
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return str(path)


def text_model(task: str, data: dict[str, Any], **config: Any) -> WorkloadSpec:
    """A small transformers model over texts of 12 tokens."""
    return transformers_spec(task, CONFIGS[task] | config, batch={"sequence_length": LENGTH}, data=data)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A file of rows, in the format of its suffix."""
    match path.suffix:
        case ".json":
            path.write_text(json.dumps(rows))
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case ".csv":
            with path.open("w", newline="") as stream:
                writer = csv.DictWriter(stream, rows[0])
                writer.writeheader()
                writer.writerows(rows)
        case ".parquet":
            datasets.Dataset.from_list(rows).to_parquet(path)
        case _:
            path.write_text("".join(row["text"] + "\n" for row in rows))
    return path


def records(directory: Path, tokenizer: str, rows: list[dict[str, Any]] | None = None, **fields: Any) -> dict[str, Any]:
    """Records in a file of JSON lines."""
    write_rows(directory / "rows.jsonl", rows or ROWS)
    return {"kind": "records", "paths": [str(directory / "*.jsonl")], "tokenizer": tokenizer, **fields}


# --- order and text ---


def text_spec(directory: Path, text: bytes = b"some text to learn, " * 40) -> WorkloadSpec:
    """A GPT over a file of text."""
    (directory / "corpus.txt").write_bytes(text)
    return gpt_spec(data={"kind": "text", "paths": [str(directory / "*.txt")]})


def test_an_epoch_is_a_permutation_that_depends_on_seed_and_epoch_alone() -> None:
    """The order has every sample once, is equal on every host, and differs in the next epoch."""
    first, again, *others = [epoch_order(*key, 50).tolist() for key in ((1, 0), (1, 0), (1, 1), (2, 0))]
    assert sorted(first) == list(range(50))
    assert first == again
    assert first not in others
    assert others[0] != others[1]


def test_the_samples_of_an_update_are_grouped_by_length() -> None:
    """On each rank, the first micro-batch is as drawn, and the others have the longest samples first."""
    lengths = torch.randint(1, 500, (40,), generator=torch.Generator().manual_seed(0))
    drawn = epoch_order(3, 0, 40)[:24].tolist()
    seen: list[int] = []
    for rank in range(2):
        schedule = BatchSchedule(3, 40, 24, rank, 2, lengths)
        first, *others = [samples.indices for samples in schedule.window(Position(), 3)]
        assert list(first) == drawn[12 * rank : 12 * rank + 3]
        assert [len(part) for part in others] == [3, 3, 3]
        found = [int(lengths[index]) for part in others for index in part]
        assert found == sorted(found, reverse=True)
        seen += [*first, *(index for part in others for index in part)]
    assert sorted(seen) == sorted(drawn)


def test_text_is_cut_into_samples_without_losing_a_byte(tmp_path: Path) -> None:
    """The last sample has the remainder."""
    text = bytes(range(256)) * 2 + b"tail!"
    spec = text_spec(tmp_path, text)
    data = build_data(spec, build_workload(spec))
    joined = torch.cat([data.samples[index] for index in range(len(data))])
    assert bytes(joined.tolist()) == text
    assert [len(data.samples[index]) for index in (0, len(data) - 1)] == [16, 5]


def test_ragged_samples_are_padded_with_ignored_labels(tmp_path: Path) -> None:
    """Padding is excluded from the loss and its weight."""
    spec = text_spec(tmp_path, b"x" * 20)
    workload = build_workload(spec)
    batch = build_data(spec, workload).batch([0, 1])
    assert batch["input_ids"].shape == (2, 16)
    assert int((batch["labels"] == -100).sum()) == 12
    assert workload.loss_weights(batch) == {"next_token": 15.0 + 3.0}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"data": None}, "data"),
        ({"data": {"kind": "text", "paths": ["/nowhere/*.txt"]}}, "data.paths"),
        ({"data": {"kind": "workload"}}, "data.kind"),
    ],
)
def test_missing_data_names_the_field(changes: dict[str, object], field: str) -> None:
    """The field is named before the run trains."""
    spec = gpt_spec(**changes)
    with pytest.raises(SpecError) as caught:
        build_data(spec, build_workload(spec))
    assert caught.value.problems[0].field == field


def test_text_needs_a_language_model(tmp_path: Path) -> None:
    """A classifier cannot learn from a stream of bytes."""
    spec = mlp_spec(data=text_spec(tmp_path).data.model_dump())  # type: ignore[union-attr]
    with pytest.raises(SpecError, match="causal language model"):
        build_data(spec, build_workload(spec))


def test_text_is_tokenised_without_losing_a_word(tmp_path: Path, tokenizer: str) -> None:
    """The samples' tokens, decoded, are the files' text; only the last sample is short, and no token is added."""
    half = len(STANDARD_LIBRARY) // 2
    for name, text in (("a.txt", STANDARD_LIBRARY[:half]), ("b.txt", STANDARD_LIBRARY[half:])):
        (tmp_path / name).write_text(text, encoding="utf-8")
    data = built(text_model("causal-lm", {"kind": "text", "paths": [f"{tmp_path}/*.txt"], "tokenizer": tokenizer}))
    samples = [data.samples[index] for index in range(len(data))]
    text = Tokenizer.from_file(tokenizer).decode(torch.cat(samples).tolist(), skip_special_tokens=False)
    assert text == f"{STANDARD_LIBRARY[:half]}\n{STANDARD_LIBRARY[half:]}"
    assert {len(sample) for sample in samples[:-1]} == {LENGTH}


def test_workers_forked_after_tokenising_are_silent(
    tmp_path: Path, tokenizer: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tokenizers` would warn of every fork after a tokenizer was opened."""
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(STANDARD_LIBRARY, encoding="utf-8")
    training, own = (
        {"kind": "text", "paths": [str(tmp_path / name)], "tokenizer": tokenizer} for name in ("a.txt", "b.txt")
    )
    spec = text_model("causal-lm", training).model_copy(update={"evaluation": EvaluationSpec(data=TextData(**own))})
    data = build_run_data(spec, build_workload(spec), DataFolders()).training
    assert len(list(WindowLoader(data, WINDOWS, workers=2, seed=0))) == len(WINDOWS)
    assert "parallelism" not in capfd.readouterr().err


# --- records ---


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv", ".parquet", ".txt"])
def test_every_format_gives_the_same_rows(tmp_path: Path, tokenizer: str, suffix: str) -> None:
    """A row is a sample, cut at the sequence length; rows without text are left out, and `NA` is a text."""
    rows = [*ROWS[:5], {"text": "", "label": 0}, {"text": "NA", "label": 1}]
    path = write_rows(tmp_path / f"[1] rows{suffix}", rows)
    pattern = str(path).replace("[1]", "?1]")
    data = built(text_model("causal-lm", {"kind": "records", "paths": [pattern], "tokenizer": tokenizer}))
    wanted = [Tokenizer.from_file(tokenizer).encode(row["text"]).ids for row in rows if row["text"]]
    found = [data.samples[index]["input_ids"].tolist() for index in range(len(data))]
    assert [len(ids) <= LENGTH for ids in found] == [True] * 6
    assert [ids if len(ids) < LENGTH else ids[:-1] for ids in found] == [
        ids if len(ids) < LENGTH else ids[: LENGTH - 1] for ids in wanted
    ]


def test_records_are_padded_little(tmp_path: Path, tokenizer: str) -> None:
    """An update has the same tokens in any order of its records; a compiled model has one shape, and needs no order."""
    rows = [{"text": "word " * (1 + 7 * number % 13)} for number in range(26)]
    spec = text_model("causal-lm", records(tmp_path, tokenizer, rows))
    data = built(spec)
    assert data.lengths is not None
    assert data.lengths.tolist() == [len(row["text"]) for row in rows]
    padding: list[int] = []
    for lengths in (None, data.lengths):
        window = BatchSchedule(0, len(data), len(data), lengths=lengths).window(Position(), 2)
        batches = [data.batch(samples.indices) for samples in window]
        tokens = sum(int((batch["labels"] != -100).sum()) for batch in batches)
        assert tokens == sum(len(data.samples[index]["input_ids"]) for index in range(len(data)))
        padding.append(sum(batch["labels"].numel() for batch in batches) - tokens)
    assert padding[1] < padding[0] / 2
    assert built(spec.model_copy(update={"compile": True})).lengths is None
    part = data.selected(torch.tensor([20, 3]))
    assert part.lengths is not None
    assert part.lengths.tolist() == [len(rows[3]["text"]), len(rows[20]["text"])]


def test_rows_are_read_offline_and_in_silence(
    tmp_path: Path, tokenizer: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run's output has no progress bars, and the former settings of `datasets` are restored."""
    rows: list[dict[str, Any]] = [*ROWS, {"text": "", "label": None}]
    assert len(built(text_model("sequence-classification", records(tmp_path, tokenizer, rows)))) == len(ROWS)
    assert capfd.readouterr() == ("", "")
    assert not datasets.are_progress_bars_disabled()
    assert not datasets.config.HF_HUB_OFFLINE


def test_changed_rows_are_read_again(tmp_path: Path) -> None:
    """The cache of `datasets` is not used for a changed file."""
    for count in (3, 5):
        assert len(built(gpt_spec(data=records(tmp_path, "bytes", ROWS[:count])))) == count


def test_classes_come_with_a_mask(tmp_path: Path, tokenizer: str) -> None:
    """Names are numbered in sorted order; the mask is 1 where the text is, and the rest is padding."""
    rows = [{"text": "a", "label": "red"}, {"text": "import textwrap", "label": "blue"}]
    batch = built(text_model("sequence-classification", records(tmp_path, tokenizer, rows))).batch([0, 1])
    assert batch["labels"].tolist() == [1, 0]
    lengths = [len(Tokenizer.from_file(tokenizer).encode(row["text"]).ids) for row in rows]
    assert batch["attention_mask"].sum(dim=1).tolist() == lengths
    assert torch.equal(batch["input_ids"] != 0, batch["attention_mask"] > 0)


@pytest.mark.parametrize(("config", "start"), [({}, 0), ({"decoder_start_token_id": 7}, 7)])
def test_a_decoder_sees_its_targets_shifted(tmp_path: Path, tokenizer: str, config: dict[str, Any], start: int) -> None:
    """The decoder starts with the config's start token (T5's is its padding) and predicts the target's tokens."""
    rows = [{"text": "def", "out": "import textwrap"}, {"text": "class", "out": "a"}]
    data = built(text_model("seq2seq-lm", records(tmp_path, tokenizer, rows, target_field="out"), **config))
    batch = data.batch([0, 1])
    for row, ids, labels in zip(rows, batch["decoder_input_ids"], batch["labels"], strict=True):
        wanted = Tokenizer.from_file(tokenizer).encode(row["out"]).ids
        assert labels[labels != -100].tolist() == wanted
        assert ids[: len(wanted)].tolist() == [start, *wanted[:-1]]


def test_masking_depends_on_the_sample_alone(tmp_path: Path, tokenizer: str) -> None:
    """About 15 % of the text's tokens are predicted, most of them masked; never an added token; always the same."""
    data = built(text_model("masked-lm", records(tmp_path, tokenizer, [{"text": STANDARD_LIBRARY[:200]}] * 300)))
    batch, again = data.batch(range(300)), data.batch(range(300))
    assert all(torch.equal(batch[name], again[name]) for name in batch)
    original = Tokenizer.from_file(tokenizer).encode(STANDARD_LIBRARY[:200]).ids[: LENGTH - 1]
    chosen = batch["labels"] != -100
    assert chosen.any(dim=1).all()
    assert not chosen[:, [0, -1]].any()
    assert 0.1 < chosen[:, 1:-1].float().mean() < 0.3
    assert 0.7 < (batch["input_ids"][chosen] == SPECIAL_TOKENS.index("[MASK]")).float().mean() < 0.9
    restored = torch.where(chosen, batch["labels"], batch["input_ids"])[:, : LENGTH - 1]
    assert restored.tolist() == [original] * 300


@pytest.mark.parametrize("task", ["causal-lm", "masked-lm", "seq2seq-lm", "sequence-classification"])
def test_a_batch_of_records_is_one_that_the_model_takes(tmp_path: Path, tokenizer: str, task: str) -> None:
    """Batches have the keys and types of the probes' batches, and a finite loss."""
    spec = text_model(task, records(tmp_path, tokenizer, target_field="text"))
    workload = build_workload(spec)
    batch, probed = build_data(spec, workload).batch(range(8)), workload.make_batch(8)
    assert {name: value.dtype for name, value in batch.items()} == {
        name: tensor.dtype for name, tensor in probed.items()
    }
    for loss, weight in workload.loss_terms(build_model(spec, workload), batch).values():
        assert torch.isfinite(loss)
        assert float(weight) > 0


def test_a_compiled_model_sees_one_shape(tmp_path: Path, tokenizer: str) -> None:
    """Batches are padded to the full sequence length, for any samples."""
    data = records(tmp_path, tokenizer, [{"text": "a", "label": 0}])
    spec = text_model("sequence-classification", data).model_copy(update={"compile": True})
    assert built(spec).batch([0])["input_ids"].shape == (1, LENGTH)


@pytest.mark.parametrize(
    ("task", "fields", "said"),
    [
        ("causal-lm", {"text_field": "body"}, ("data.text_field", "which have text, label")),
        ("causal-lm", {"text_field": "label"}, ("data.text_field", "holds int64, not text")),
        ("causal-lm", {"paths": ["/nowhere/*.jsonl"]}, ("data.paths", "no file matches")),
        ("causal-lm", {"format": "parquet"}, ("data.paths", "cannot be read as parquet")),
        ("causal-lm", {"tokenizer": "/nowhere/tokenizer.json"}, ("data.tokenizer", "cannot be read")),
        ("sequence-classification", {"label_field": "class"}, ("data.label_field", "not a field of these rows")),
        ("sequence-classification", {"label_field": "text"}, ("data.label_field", "the model has 3 classes")),
        ("seq2seq-lm", {}, ("data.target_field", "required for seq2seq-lm")),
        ("masked-lm", {"tokenizer": "bytes"}, ("data.tokenizer", "no mask token")),
        ("token-classification", {}, ("data.text_field", "must hold lists")),
        ("image-classification", {}, ("data.kind", "not image-classification")),
    ],
)
def test_records_that_do_not_fit_the_model_are_refused(
    tmp_path: Path, tokenizer: str, task: str, fields: dict[str, Any], said: tuple[str, str]
) -> None:
    """The field at fault is named, with what is allowed."""
    found, message = problem(text_model(task, records(tmp_path, tokenizer) | fields))
    assert found == said[0]
    assert said[1] in message


@pytest.mark.parametrize(
    ("label", "words"),
    [
        (3, "the label 3"),
        (-1, "the label -1"),
        (None, "is missing in a row with text (got row 2 of"),
        (0.5, "holds double"),
    ],
)
def test_labels_are_classes_of_the_model(tmp_path: Path, label: object, words: str) -> None:
    """All labels are checked before the run trains."""
    rows = [{"text": "a", "label": 0}, {"text": "b", "label": label}]
    found, message = problem(text_model("sequence-classification", records(tmp_path, "bytes", rows)))
    assert found == "data.label_field"
    assert words in message or words.replace("double", "float64") in message


@pytest.mark.parametrize(
    ("config", "length", "words"),
    [
        ({"vocab_size": 300}, LENGTH, "more than the model's 300"),
        ({"pad_token_id": 5}, LENGTH, "set model.config.pad_token_id to 0"),
        ({}, 2, "leaves no room in batch.sequence_length 2"),
    ],
)
def test_a_tokenizer_must_fit_its_model(
    tmp_path: Path, tokenizer: str, config: dict[str, Any], length: int, words: str
) -> None:
    """Enough token ids, the same padding, and room for a text beside the tokens it adds."""
    batch, data = {"sequence_length": length}, records(tmp_path, tokenizer)
    found, message = problem(transformers_spec("masked-lm", BERT | config, batch=batch, data=data))
    assert found == "data.tokenizer"
    assert words in message


@pytest.mark.parametrize(
    ("package", "kind"), [("datasets", "records"), ("tokenizers", "text"), ("PIL.Image", "images")]
)
def test_a_package_that_is_missing_is_named_with_its_extra(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch, package: str, kind: str
) -> None:
    """Not a traceback from deep inside."""
    fields: dict[str, dict[str, Any]] = {
        "records": records(tmp_path, tokenizer),
        "text": {"paths": [f"{tmp_path}/*.jsonl"], "tokenizer": tokenizer},
        "images": {"path": str(tmp_path)},
    }
    data = fields[kind] | {"kind": kind}
    spec = (
        transformers_spec("image-classification", VIT, data=data) if kind == "images" else text_model("causal-lm", data)
    )
    workload = build_workload(spec)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SpecError, match=r"batchwright\[data\]"):
        build_data(spec, workload)


def test_workers_read_rows_as_this_process_does(tmp_path: Path, tokenizer: str) -> None:
    """Tokenised and masked rows are equal to the last bit."""
    data = built(text_model("masked-lm", records(tmp_path, tokenizer)))
    here, there = (list(WindowLoader(data, WINDOWS, workers=workers, seed=0)) for workers in (0, 2))
    assert [len(window) for window in there] == [2, 0, 1]
    for ours, theirs in zip(chain(*here), chain(*there), strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_every_kind_of_data_has_a_source() -> None:
    """A document without a line of `SOURCES` could be submitted, and not read."""
    kinds = (get_args(document.model_fields["kind"].annotation) for document in get_args(get_args(DataSpec)[0]))
    assert sorted(chain(*kinds)) == sorted(SOURCES)
