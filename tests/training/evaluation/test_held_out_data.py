"""Held-out samples: a split of the data, or data of their own, and what is refused."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from batchwright.errors import SpecError
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.data.base import SelectedSamples, TrainingData
from batchwright.training.data.files import DataFolders
from batchwright.training.evaluation.held_out_data import RunData, build_run_data
from batchwright.workloads.build import build_workload
from tests.support.factories import gpt_spec, mlp_spec, resnet_spec, transformers_spec

CLASSIFIER = {
    "model_type": "bert",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 256,
    "max_position_embeddings": 16,
}


def divided(spec: WorkloadSpec, ranks: int = 1) -> RunData:
    """The data of a spec."""
    return build_run_data(spec, build_workload(spec), DataFolders(), ranks)


def texts(data: TrainingData | None) -> list[bytes]:
    """The samples of a stream of bytes."""
    assert data is not None
    return [bytes(data.samples[index].tolist()) for index in range(len(data))]


def refusal(spec: WorkloadSpec, ranks: int = 1) -> tuple[str, str]:
    """The field at fault and the message."""
    with pytest.raises(SpecError) as caught:
        divided(spec, ranks)
    (problem,) = caught.value.problems
    return problem.field, problem.message


def stream(directory: Path, **evaluation: Any) -> WorkloadSpec:
    """Twenty samples of 16 bytes, all different."""
    (directory / "text.txt").write_bytes(b"".join(b"sample %09d" % number for number in range(20)))
    return gpt_spec(data={"kind": "text", "paths": [str(directory / "text.txt")]}, evaluation=evaluation)


@pytest.mark.parametrize(
    ("evaluation", "count"), [({"fraction": 0.25}, 5), ({"count": 7}, 7), ({"fraction": 0.001}, 1)]
)
def test_a_split_has_every_sample_once(tmp_path: Path, evaluation: dict[str, Any], count: int) -> None:
    """In one of its two parts, and at least one is held out."""
    found = divided(stream(tmp_path, **evaluation))
    training, held_out = texts(found.training), texts(found.held_out)
    assert len(held_out) == count
    assert sorted(training + held_out) == [b"sample %09d" % number for number in range(20)]


def test_the_seed_chooses_the_samples(tmp_path: Path) -> None:
    """Equal seeds hold out equal samples, other seeds others."""
    first, again, other = (texts(divided(stream(tmp_path, count=5, seed=seed)).held_out) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_split_must_leave_samples_to_train(tmp_path: Path) -> None:
    """The field and the number of samples are named."""
    field, message = refusal(stream(tmp_path, count=20))
    assert field == "evaluation.count"
    assert "leaves none of the 20 samples" in message


def test_without_evaluation_all_samples_train(tmp_path: Path) -> None:
    """Nothing is held out."""
    found = divided(stream(tmp_path, count=1).model_copy(update={"evaluation": None}))
    assert found.held_out is None
    assert len(found.training) == 20


def test_each_rank_needs_a_sample(tmp_path: Path) -> None:
    """Fewer held-out samples than ranks are refused."""
    field, message = refusal(stream(tmp_path, count=2), ranks=3)
    assert field == "evaluation"
    assert "holds out 2 samples, fewer than the 3 ranks" in message


def test_files_of_their_own_leave_the_training_data_whole(tmp_path: Path) -> None:
    """The held-out files are read with the same worst case."""
    (tmp_path / "other.txt").write_bytes(b"held out, all of it, in 2 samples")
    spec = stream(tmp_path, data={"kind": "text", "paths": [str(tmp_path / "other.txt")]})
    found = divided(spec)
    assert len(found.training) == 20
    assert b"".join(texts(found.held_out)).startswith(b"held out, all of it")


def test_a_training_file_is_not_held_out(tmp_path: Path) -> None:
    """A file that both parts would read is named, however its path is written."""
    (tmp_path / "link.txt").symlink_to(tmp_path / "text.txt")
    field, message = refusal(stream(tmp_path, data={"kind": "text", "paths": [str(tmp_path / "link.txt")]}))
    assert field == "evaluation.data"
    assert "is also training data" in message


def test_a_training_image_is_not_held_out(tmp_path: Path) -> None:
    """Folders of links to training images, in folders of their own, are found by what they link to."""
    for part, kind in itertools.product(("training", "held-out", "links"), ("cat", "dog")):
        (tmp_path / part / kind).mkdir(parents=True)
    for kind in ("cat", "dog"):
        for number in range(3):
            Image.new("RGB", (8, 8)).save(tmp_path / "training" / kind / f"{number}.png")
        Image.new("RGB", (8, 8)).save(tmp_path / "held-out" / kind / "0.png")
        (tmp_path / "links" / kind / "other.png").symlink_to(tmp_path / "training" / kind / "1.png")

    def spec(held_out: str) -> WorkloadSpec:
        training, own = ({"kind": "images", "path": str(tmp_path / part)} for part in ("training", held_out))
        return resnet_spec(data=training, evaluation={"data": own})

    assert len(divided(spec("held-out")).held_out or ()) == 2
    field, message = refusal(spec("links"))
    assert field == "evaluation.data"
    assert "is also training data" in message


def test_a_missing_held_out_file_is_named_as_such(tmp_path: Path) -> None:
    """The field is the evaluation's, and not that of the training data."""
    field, _ = refusal(stream(tmp_path, data={"kind": "text", "paths": [str(tmp_path / "none.txt")]}))
    assert field == "evaluation.data.paths"


def classified(directory: Path, training: list[Any], held_out: list[Any]) -> WorkloadSpec:
    """Rows of a text and a label in two files."""
    for name, labels in (("training", training), ("held-out", held_out)):
        rows = [json.dumps({"text": f"text {number}", "label": label}) for number, label in enumerate(labels)]
        (directory / f"{name}.jsonl").write_text("\n".join(rows))
    records = {"kind": "records", "paths": [str(directory / "training.jsonl")]}
    own = {"data": {"kind": "records", "paths": [str(directory / "held-out.jsonl")]}}
    return transformers_spec(
        "sequence-classification", CLASSIFIER, batch={"sequence_length": 16}, data=records, evaluation=own
    )


def test_names_of_classes_must_have_the_same_numbers(tmp_path: Path) -> None:
    """Names are numbered in sorted order: a class that one part lacks would shift the others."""
    field, message = refusal(classified(tmp_path, ["bad", "good"], ["good"]))
    assert field == "evaluation.data"
    assert "bad in only one of them" in message
    found = divided(classified(tmp_path, ["bad", "good"], ["good", "bad"]))
    assert found.held_out is not None
    assert found.held_out.samples[0]["labels"] == 1


@pytest.mark.parametrize(("training", "held_out"), [(["bad", "good"], [0, 1]), ([0, 1], ["bad", "good"])])
def test_names_and_numbers_are_not_the_same_classes(tmp_path: Path, training: list[Any], held_out: list[Any]) -> None:
    """The numbers of names may be others than those that the other part gives."""
    field, message = refusal(classified(tmp_path, training, held_out))
    assert field == "evaluation.data"
    assert "bad, good in only one of them" in message


def test_numbers_are_classes_of_their_own(tmp_path: Path) -> None:
    """A held-out part may lack a class whose label is a number."""
    found = divided(classified(tmp_path, [0, 1], [1]))
    assert found.held_out is not None
    assert found.held_out.samples[0]["labels"] == 1


def test_a_workload_brings_its_own_held_out_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `evaluation_dataset()`; a workload without one is refused."""
    (tmp_path / "own_sets.py").write_text(
        "import torch\n"
        "class W:\n"
        "    def build_model(self): return torch.nn.Linear(2, 1)\n"
        "    def make_batch(self, size): return torch.randn(size, 2)\n"
        "    def loss_terms(self, model, batch): return {'loss': (model(batch).sum(), len(batch))}\n"
        "    def dataset(self): return [torch.zeros(2)] * 16\n"
        "class Both(W):\n"
        "    def evaluation_dataset(self): return [torch.ones(2)] * 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def spec(factory: str) -> WorkloadSpec:
        model = {"kind": "python", "target": f"own_sets:{factory}"}
        return mlp_spec(model=model, data={"kind": "workload"}, evaluation={"data": {"kind": "workload"}})

    found = divided(spec("Both"))
    assert found.held_out is not None
    assert (len(found.training), len(found.held_out)) == (16, 3)
    assert refusal(spec("W")) == ("evaluation.data.kind", "W has no evaluation_dataset()")


def test_selected_samples_end(tmp_path: Path) -> None:
    """Iterating over them stops at their number."""
    found = divided(stream(tmp_path, count=3)).held_out
    assert found is not None
    assert isinstance(found.samples, SelectedSamples)
    with pytest.raises(IndexError):
        found.samples[3]
