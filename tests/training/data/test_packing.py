"""Records packed into sequences: every token once, whole documents, and updates that no division changes."""

import itertools
import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchwright.errors import SpecError
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import RunOutcome
from batchwright.schemas.workload import WorkloadSpec, parse_spec
from batchwright.training.data.files import DataFolders
from batchwright.training.data.sources.packing import PackedSamples, best_fit_decreasing, pack
from batchwright.training.evaluation.held_out_data import build_run_data
from batchwright.workloads.base import IGNORED_LABEL, Samples
from batchwright.workloads.build import build_workload
from tests.support.factories import recommendation
from tests.support.faults import relative_distance
from tests.support.sources import built, problem
from tests.support.whole_runs import ENVIRONMENT, run_to_end, weights_of
from tests.training.test_adapters import stop
from tests.training.test_trained_model import GPT2, UPDATES, spec_of, train

pytestmark = pytest.mark.usefixtures("own_datasets_cache")

LENGTH = 16
WRAPPED = {"sequence_length": LENGTH, "packing": "wrapped"}
TEXTS = [f"{number} " + "word " * (number * 7 % 5) for number in range(60)]


def records_spec(directory: Path, texts: list[str], **changes: Any) -> WorkloadSpec:
    """A small GPT-2 on records of bytes, which are packed."""
    (directory / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = {"kind": "records", "paths": [str(directory / "rows.jsonl")]}
    changes = {"batch": {"sequence_length": LENGTH, "packing": "bfd"}, "data": data, **changes}
    return spec_of({"config": GPT2}, **changes)


def packed_samples(spec: WorkloadSpec) -> PackedSamples:
    """The sequences of a spec's data."""
    samples = built(spec).samples
    assert isinstance(samples, PackedSamples)
    return samples


def parts_of(packed: Samples) -> list[list[list[int]]]:
    """The documents, or their parts, of each sequence, divided where positions restart."""
    sequences = []
    for index in range(len(packed)):
        sample = packed[index]
        assert isinstance(sample, dict)
        starts = [*(sample["position_ids"] == 0).nonzero().flatten().tolist(), len(sample["input_ids"])]
        sequences.append([sample["input_ids"][a:b].tolist() for a, b in itertools.pairwise(starts)])
    return sequences


def some_documents(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Random documents of 2 to ``longest`` tokens."""
    generator = random.Random(seed)
    return [[generator.randrange(256) for _ in range(generator.randint(2, longest))] for _ in range(count)]


# --- packing ---


@pytest.mark.parametrize("seed", range(4))
def test_best_fit_decreasing_is_its_definition(seed: int) -> None:
    """Each item, the largest first, goes into the fullest bin that has room."""
    sizes = [random.Random(seed).randint(1, 20) for _ in range(200)]
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [room for room in rooms if room >= size]
        if fitting:
            rooms[rooms.index(min(fitting))] -= size
        else:
            rooms.append(20 - size)
    order, bounds = best_fit_decreasing(np.array(sizes), 20)
    bins = [order[a:b].tolist() for a, b in itertools.pairwise(bounds)]
    assert sorted(item for one in bins for item in one) == list(range(200))
    assert sorted(20 - sum(sizes[item] for item in one) for one in bins) == sorted(rooms)


def test_whole_documents_share_sequences() -> None:
    """No document is cut, none is lost, no sequence is too long, and the packing is equal when it is made again."""
    documents = some_documents(200, LENGTH)
    packed = pack(documents, LENGTH, "bfd")
    sequences = parts_of(packed)
    assert sorted(part for sequence in sequences for part in sequence) == sorted(documents)
    assert max(sum(map(len, sequence)) for sequence in sequences) <= LENGTH
    assert parts_of(pack(documents, LENGTH, "bfd")) == sequences
    tokens = sum(map(len, documents))
    assert packed.share == pytest.approx(tokens / len(packed) / LENGTH)
    assert packed.unpacked_share == pytest.approx(tokens / 200 / LENGTH)
    assert packed.share > 0.97


def test_wrapped_documents_fill_every_sequence() -> None:
    """All tokens are there in their order; only the last sequence is short, and parts are documents of their own."""
    documents = some_documents(50, 40)
    packed = pack(documents, LENGTH, "wrapped")
    sequences = parts_of(packed)
    assert [token for sequence in sequences for part in sequence for token in part] == list(itertools.chain(*documents))
    assert {sum(map(len, sequence)) for sequence in sequences[:-1]} == {LENGTH}
    ends = {sum(map(len, documents[:count])) for count in range(1, 51)}
    cuts = [len(part) for sequence in sequences for part in sequence]
    assert ends <= {sum(cuts[:count]) for count in range(1, len(cuts) + 1)}


@pytest.mark.parametrize("packing", ["bfd", "wrapped"])
def test_labels_do_not_cross_documents(packing: Any) -> None:
    """The first label of each document is ignored, so that the last token before predicts nothing."""
    packed = pack(some_documents(30, LENGTH), LENGTH, packing)
    for index in range(len(packed)):
        sample = packed[index]
        starts = sample["position_ids"] == 0
        assert (sample["labels"][starts] == IGNORED_LABEL).all()
        assert torch.equal(sample["labels"][~starts], sample["input_ids"][~starts])


@pytest.mark.parametrize("packing", ["bfd", "wrapped"])
def test_documents_without_a_next_token_are_left_out(packing: Any) -> None:
    """They have neither a loss nor a gradient."""
    packed = pack([[1], [], [2, 3], [4]], LENGTH, packing)
    assert parts_of(packed) == [[[2, 3]]]
    assert packed.documents == 1


def test_packing_takes_little_more_than_what_stays() -> None:
    """Fewer than 100 bytes a document at the peak, above its tokens in int32: no array or list is kept for it."""
    documents = 30_000
    tracemalloc.start()
    try:
        packed = pack(([7] * 20 for _ in range(documents)), 64, "bfd")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(packed.stream) == 20 * documents
    assert peak < (4 * 20 * 17 / 16 + 100) * documents  # an array has room for a sixteenth more


# --- data ---


def test_records_are_packed(tmp_path: Path) -> None:
    """Longer ones are cut, padding is ignored, and the share of padding that is saved is noted."""
    spec = records_spec(tmp_path, ["a" * 40, "bb", "ccc", "d", "eeee"])
    data = built(spec)
    assert parts_of(packed_samples(spec)) == [[[97] * LENGTH], [[101] * 4, [99] * 3, [98] * 2]]
    batch = data.batch([0, 1])
    assert batch["position_ids"][1].tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, *[0] * 7]
    assert batch["labels"][1].tolist() == [-100, 101, 101, 101, -100, 99, 99, -100, 98, *[-100] * 7]
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    note = "4 records are packed into 2 sequences of 16 tokens: 78.1% of the positions hold tokens, and 39.1% without"
    assert data.notes == (f"{note} packing",)


def test_wrapped_records_are_cut_in_parts(tmp_path: Path) -> None:
    """No token of a longer record is lost."""
    spec = records_spec(tmp_path, ["a" * 40, "bb"], batch={"sequence_length": LENGTH, "packing": "wrapped"})
    assert parts_of(packed_samples(spec)) == [[[97] * 16], [[97] * 16], [[97] * 8, [98] * 2]]


def test_a_probed_batch_is_as_large_as_a_packed_one(tmp_path: Path) -> None:
    """Equal names, types and shapes, and two documents in each sample, for which attention needs a mask."""
    spec = records_spec(tmp_path, ["a" * 8] * 8)
    data = built(spec)
    probed, batch = build_workload(spec).make_batch(4), data.batch(range(4))
    assert {name: (value.shape, value.dtype) for name, value in probed.items()} == {
        name: (value.shape, value.dtype) for name, value in batch.items()
    }
    assert torch.equal(probed["position_ids"], batch["position_ids"])
    ignored = [labels[:, 1:] == IGNORED_LABEL for labels in (probed["labels"], batch["labels"])]
    assert torch.equal(*ignored)


def test_records_without_two_tokens_are_refused(tmp_path: Path) -> None:
    """Nothing would train."""
    assert problem(records_spec(tmp_path, ["a", "b"]))[0] == "data.paths"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": {"kind": "text", "paths": ["a"]}}, "needs `records`, whose rows are the documents, and `data` is of"),
        ({"evaluation": {"data": {"kind": "text", "paths": ["a"]}}}, "and `evaluation.data` is of the kind `text`"),
        ({"batch": {"sequence_length": 3, "packing": "bfd"}}, "is 3, and `batch.packing` needs at least 4"),
        ({"batch": {"sequence_length": 16, "packing": "ffd"}}, "packing"),
        ({"batch": WRAPPED, "evaluation": {"fraction": 0.1}}, "Give `evaluation.data`, or pack with `bfd`"),
        ({"batch": WRAPPED, "evaluation": {"count": 2}}, "Give `evaluation.data`, or pack with `bfd`"),
    ],
)
def test_what_cannot_be_packed_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    """Before anything is built, with the field and the remedy."""
    with pytest.raises(SpecError, match=words):
        records_spec(tmp_path, TEXTS, **changes)


@pytest.mark.parametrize(
    "model",
    [
        {"kind": "transformers", "task": "masked-lm", "config": {"model_type": "bert"}},
        {"kind": "transformers", "task": "seq2seq-lm", "config": {"model_type": "t5"}},
        {"kind": "transformers", "task": "image-classification", "config": {"model_type": "vit"}},
        {"kind": "reference", "architecture": {"name": "gpt"}},
        {"kind": "python", "target": "package.module:build"},
    ],
    ids=lambda model: str(model.get("task", model["kind"])),
)
def test_other_models_are_refused(model: dict[str, Any]) -> None:
    """Only causal language models of transformers are packed."""
    with pytest.raises(SpecError, match="is for `causal-lm` models of transformers, and this is "):
        parse_spec({"model": model, "batch": {"sequence_length": 16, "packing": "bfd"}})


# --- runs ---


@pytest.mark.parametrize("packing", ["bfd", "wrapped"])
def test_the_division_of_updates_changes_nothing(tmp_path: Path, packing: str) -> None:
    """Weights after updates of 10 sequences are equal for micro-batches of 1, 3, 7 and 10."""
    spec = records_spec(tmp_path, TEXTS, batch={"sequence_length": LENGTH, "packing": packing})
    for size in (10, 1, 3, 7):
        trainer, _ = train(tmp_path / str(size), spec, size)
        assert relative_distance(weights_of(tmp_path / str(size)), weights_of(tmp_path / "10")) < 1e-6
    assert [note for note in trainer.notes if "records are packed into" in note]


def test_a_stopped_run_resumes_to_equal_weights(tmp_path: Path) -> None:
    """To the bit, with the sequences packed again."""
    spec = records_spec(tmp_path, TEXTS)
    _, undisturbed = train(tmp_path / "whole", spec)
    stop(tmp_path / "run", spec)
    assert train(tmp_path / "run", spec)[1] == undisturbed


def test_no_record_is_on_both_sides_of_a_split(tmp_path: Path) -> None:
    """Sequences of whole records are held out at random; the parts of a wrapped one need data of their own."""
    spec = records_spec(tmp_path, [f"r{number:04}" for number in range(60)], evaluation={"fraction": 0.3})
    found = build_run_data(spec, build_workload(spec), DataFolders())
    assert found.held_out is not None
    trained, held_out = (
        {bytes(part) for sequence in parts_of(each.samples) for part in sequence}
        for each in (found.training, found.held_out)
    )
    assert (len(trained) + len(held_out), trained & held_out) == (60, set())
    own = {"data": {"kind": "records", "paths": [str(tmp_path / "held_out.jsonl")]}}
    assert records_spec(tmp_path, TEXTS, batch=WRAPPED, evaluation=own).evaluation is not None


def test_an_evaluation_is_that_of_the_records(tmp_path: Path) -> None:
    """Held-out records have the same loss and as many labels in packed sequences as one by one."""
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps({"text": text * 2}) + "\n" for text in TEXTS[:20]))
    held_out = {"data": {"kind": "records", "paths": [str(tmp_path / "held_out.jsonl")]}, "metrics": ["accuracy"]}
    reports = []
    for batch in ({"sequence_length": LENGTH}, {"sequence_length": LENGTH, "packing": "bfd"}):
        spec = records_spec(tmp_path, TEXTS, batch=batch, evaluation=held_out)
        trainer, _ = train(tmp_path / str(len(batch)), spec)
        assert trainer.evaluation is not None
        reports.append(trainer.evaluation.summary().first)
    alone, packed = reports
    assert alone is not None
    assert packed is not None
    assert packed.samples < alone.samples
    assert packed.weights == alone.weights
    assert packed.loss == pytest.approx(alone.loss, rel=1e-6)
    assert packed.metrics["accuracy"] == pytest.approx(alone.metrics["accuracy"])


@pytest.mark.thorough
@pytest.mark.usefixtures("forked")
def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    """Each packs all records, and takes its share of the same sequences."""
    spec, request = records_spec(tmp_path, TEXTS), TrainingRequest(updates=UPDATES)
    for ranks in (1, 2):
        found = recommendation(spec.with_world_size(ranks), 10, 3, world_size=ranks, environment=ENVIRONMENT)
        result = run_to_end(tmp_path / str(ranks), found, request)
        assert result.outcome is RunOutcome.SUCCEEDED, result.message
    assert relative_distance(weights_of(tmp_path / "2"), weights_of(tmp_path / "1")) < 1e-6
