"""Images and arrays as data, and what the workload itself makes."""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from PIL import Image

from batchwright.errors import SpecError
from batchwright.training.data.build import build_data
from batchwright.training.data.loading import SampleRange, WindowLoader
from batchwright.training.data.sources.workload_samples import join_batches
from batchwright.workloads.build import build_model, build_workload
from tests.support.factories import gpt_spec, mlp_spec, resnet_spec, transformers_spec
from tests.support.sources import built, problem

pytestmark = pytest.mark.usefixtures("own_datasets_cache")

VIT: dict[str, Any] = {"model_type": "vit", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VIT |= {"intermediate_size": 16, "image_size": 16, "patch_size": 8, "num_labels": 3}

BERT: dict[str, Any] = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
BERT |= {"vocab_size": 64, "num_labels": 3}


# --- images ---


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images of one grey each, in folders `cat`, `dog` and `test`: 0, 51, 102, ... of 255."""
    for number, name in enumerate(["cat/1.png", "cat/2.png", "dog/1.png", "test/a.jpg"]):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L" if number % 2 else "RGB", (20 + number, 30), (51 * number,) * (1 if number % 2 else 3)).save(path)
    return tmp_path / "images"


@pytest.mark.parametrize("key", ["inputs", "pixel_values"])
def test_images_are_resized_and_normalised(folder: Path, key: str) -> None:
    """Of the model's size and channels, from -1 (black) to 1 (white), with the folders' numbers as labels."""
    data = {"kind": "images", "path": str(folder)}
    spec = resnet_spec(data=data) if key == "inputs" else transformers_spec("image-classification", VIT, data=data)
    workload = build_workload(spec)
    read = build_data(spec, workload)
    batch = read.batch(range(len(read)))
    assert batch["labels"].tolist() == [0, 0, 1, 2]
    assert batch[key].shape == workload.make_batch(4)[key].shape
    wanted = torch.tensor([51 * number / 127.5 - 1 for number in range(4)])
    torch.testing.assert_close(batch[key].mean(dim=(1, 2, 3)), wanted, atol=0.01, rtol=0.0)
    assert float(batch[key].std(dim=(1, 2, 3)).max()) < 0.01
    (loss, _), *_ = workload.loss_terms(build_model(spec, workload), batch).values()
    assert torch.isfinite(loss)


def test_images_keep_their_channels_and_rows(tmp_path: Path) -> None:
    """Red above blue keeps its position: channels first, then height, then width."""
    pixels = np.zeros((32, 32, 3), dtype=np.uint8)
    pixels[:16, :, 0], pixels[16:, :, 2] = 255, 255
    (tmp_path / "only").mkdir()
    Image.fromarray(pixels).save(tmp_path / "only" / "flag.png")
    image = built(resnet_spec(data={"kind": "images", "path": str(tmp_path)})).samples[0]["inputs"]
    assert image[:, 4, 4].tolist() == [1.0, -1.0, -1.0]
    assert image[:, 28, 4].tolist() == [-1.0, -1.0, 1.0]


def test_images_that_do_not_fit_the_model_are_refused(folder: Path, tmp_path: Path) -> None:
    """A model that takes no images, an empty folder, and more classes than the model has are refused."""
    data = {"kind": "images", "path": str(folder)}
    assert problem(mlp_spec(data=data))[0] == "data.kind"
    assert problem(resnet_spec(data=data | {"path": str(tmp_path / "nowhere")}))[0] == "data.path"
    two = transformers_spec("image-classification", VIT | {"num_labels": 2}, data=data)
    assert "3 folders" in problem(two)[1]


def test_a_broken_image_is_named(folder: Path) -> None:
    """The error names the path of the image."""
    (folder / "dog" / "1.png").write_bytes(b"no image")
    data = built(resnet_spec(data={"kind": "images", "path": str(folder)}))
    with pytest.raises(SpecError, match=r"cannot be read: .*dog/1\.png"):
        list(WindowLoader(data, [(SampleRange(0, (2,)),)], workers=1, seed=0))


def test_workers_read_images_as_this_process_does(folder: Path) -> None:
    """Decoded images are equal to the last bit."""
    data = built(resnet_spec(data={"kind": "images", "path": str(folder)}))
    windows = [(SampleRange(0, (0, 3)), SampleRange(0, (1,))), (SampleRange(1, (2,)),)]
    here, there = (list(WindowLoader(data, windows, workers=workers, seed=0)) for workers in (0, 2))
    for ours, theirs in zip(chain(*here), chain(*there), strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# --- arrays ---


def write_arrays(path: Path, **arrays: Any) -> dict[str, Any]:
    """Arrays in a file of either format, as data of a spec."""
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        safetensors.numpy.save_file(arrays, path)
    return {"kind": "arrays", "path": str(path)}


NUMBERS = np.arange(5 * 32).reshape(5, 32)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_arrays_are_the_samples_of_any_model(tmp_path: Path, suffix: str) -> None:
    """Samples are slices along the first dimension, as fp32 and int64, with names of the user's choice."""
    labels = np.array([0, 1, 2, 3, 0], dtype=np.uint8)
    data = write_arrays(tmp_path / f"a{suffix}", x_train=NUMBERS.astype(np.float16), labels=labels, other=NUMBERS)
    read = built(mlp_spec(data=data | {"names": {"inputs": "x_train"}}))
    batch = read.batch([4, 1])
    assert len(read) == 5
    assert torch.equal(batch["inputs"], torch.tensor(NUMBERS[[4, 1]], dtype=torch.float32))
    assert torch.equal(batch["labels"], torch.tensor([0, 1]))


@pytest.mark.parametrize("kind", [">i4", "uint16", "int64"])
def test_token_ids_alone_train_a_causal_model(tmp_path: Path, kind: str) -> None:
    """Token ids are their own labels, for any integer type."""
    ids = (np.arange(3 * 16).reshape(3, 16) % 256).astype(kind)
    batch = built(gpt_spec(data=write_arrays(tmp_path / "a.npz", input_ids=ids))).batch([2, 0])
    assert torch.equal(batch["input_ids"], torch.tensor(ids[[2, 0]].astype(np.int64)))
    assert torch.equal(batch["labels"], batch["input_ids"])


def test_a_mask_that_is_missing_masks_nothing(tmp_path: Path) -> None:
    """Arrays of texts of full length need no mask."""
    ids = np.ones((2, 12), dtype=np.int64)
    data = write_arrays(tmp_path / "a.npz", input_ids=ids, labels=np.array([0, 2]))
    assert (
        built(transformers_spec("sequence-classification", BERT, batch={"sequence_length": 12}, data=data))
        .batch([0, 1])["attention_mask"]
        .tolist()
        == ids.tolist()
    )


GOOD = {"inputs": np.zeros((4, 32), dtype=np.float32), "labels": np.array([0, 1, 2, 3])}


@pytest.mark.parametrize(
    ("arrays", "names", "field", "words"),
    [
        ({"labels": None}, {}, "data.path", "no array `labels`"),
        ({}, {"inputs": "x"}, "data.names.inputs", "no array `x` for the batch's `inputs`; it has inputs, labels"),
        ({}, {"x": "inputs"}, "data.names", "keys of the model's batch: inputs, labels"),
        ({"inputs": np.zeros((4, 31), dtype=np.float32)}, {}, "data.path (inputs)", "(samples, 32)"),
        ({"inputs": np.zeros((4, 32), dtype=np.int64)}, {}, "data.path (inputs)", "must hold floating-point numbers"),
        ({"labels": np.zeros(4, dtype=np.float32)}, {}, "data.path (labels)", "must hold integers"),
        ({"labels": np.zeros(4, dtype=np.bool_)}, {}, "data.path (labels)", "must hold integers"),
        ({"labels": np.array([0, 1, 2, 4])}, {}, "data.path (labels)", "numbers from 0 to 3 (got 0 to 4)"),
        ({"labels": np.array([0, 1, 2, -100])}, {}, "data.path (labels)", "numbers from 0 to 3 (got -100 to 2)"),
        ({"labels": np.zeros(5, dtype=np.int64)}, {}, "data.path", "inputs 4, labels 5"),
        ({"labels": np.array(["a", "b", "c", "d"])}, {}, "data.path", "cannot be read"),
    ],
)
def test_arrays_that_do_not_fit_the_model_are_refused(
    tmp_path: Path, arrays: dict[str, Any], names: dict[str, str], field: str, words: str
) -> None:
    """The array at fault is named, with what the model takes."""
    given = {name: array for name, array in (GOOD | arrays).items() if array is not None}
    found, message = problem(mlp_spec(data=write_arrays(tmp_path / "a.npz", **given) | {"names": names}))
    assert found == field
    assert words in message


@pytest.mark.parametrize(("labels", "accepted"), [([5, -100, 255], True), ([5, -1, 255], False), ([5, 0, 256], False)])
def test_token_labels_are_ids_or_ignored(tmp_path: Path, labels: list[int], *, accepted: bool) -> None:
    """A label of -100 is ignored; any other negative number would be read out of bounds."""
    ids = np.zeros((1, 16), dtype=np.int64)
    given = np.array([labels + [0] * 13])
    spec = gpt_spec(data=write_arrays(tmp_path / "a.npz", input_ids=ids, labels=given))
    if accepted:
        assert built(spec).batch([0])["labels"].tolist() == given.tolist()
    else:
        assert problem(spec)[0] == "data.path (labels)"


def test_a_file_without_arrays_is_named(tmp_path: Path) -> None:
    """A missing file, and a file without arrays, are refused by name."""
    assert "cannot be read" in problem(mlp_spec(data={"kind": "arrays", "path": "/nowhere/a.npz"}))[1]
    (tmp_path / "a.safetensors").write_bytes(b"{}")
    assert "cannot be read" in problem(mlp_spec(data={"kind": "arrays", "path": f"{tmp_path}/a.safetensors"}))[1]


# --- samples that the workload makes ---


def test_synthetic_samples_join_into_batches() -> None:
    """Batches of any structure are joined along the first dimension."""
    one = {"x": torch.ones(1, 2), "pair": (torch.zeros(1), [torch.zeros(1, 3)])}
    joined = join_batches([one, one])
    assert joined["x"].shape == (2, 2)
    assert joined["pair"][1][0].shape == (2, 3)
