"""Batches of any type keep their type on the device and in parts."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from transformers import BatchEncoding
from transformers.modeling_outputs import ModelOutput

from batchwright.errors import OutOfMemoryError, WorkloadError
from batchwright.training.accumulation.engine import GradientAccumulation
from batchwright.training.accumulation.gradient_sums import Gathering
from batchwright.training.micro_batches.nested_batches import named_tensors, to_device
from batchwright.training.micro_batches.splitting import sliced
from tests.support.faults import out_of_memory

META = torch.device("meta")
CPU = torch.device("cpu")


def _rows() -> Tensor:
    return torch.arange(6.0).view(3, 2)


@dataclass
class Plain:
    """Three samples, and a field that cannot be given to the constructor."""

    x: Tensor
    names: list[str]
    total: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        """Count how often it ran."""
        self.total += 1.0


@dataclass(frozen=True, slots=True)
class Frozen:
    """A batch whose fields and attributes cannot be set."""

    x: Tensor
    task: str = "translate"


@dataclass
class Output(ModelOutput):  # type: ignore[misc] # untyped in transformers
    """A mapping that is a dataclass too."""

    x: Tensor | None = None


def _encoding() -> BatchEncoding:
    return BatchEncoding({"x": _rows()}, encoding=None, n_sequences=1)


MAKERS: dict[str, Any] = {
    "dict": lambda: {"x": _rows()},
    "BatchEncoding": _encoding,
    "UserDict": lambda: UserDict(x=_rows()),
    "OrderedDict": lambda: OrderedDict(x=_rows()),
    "defaultdict": lambda: defaultdict(_rows, x=_rows()),
    "ModelOutput": lambda: Output(x=_rows()),
    "dataclass": lambda: Plain(_rows(), ["a", "b", "c"]),
    "frozen dataclass": lambda: Frozen(_rows()),
}


def _x(batch: Any) -> Tensor:
    return cast("Tensor", batch["x"] if hasattr(batch, "keys") else batch.x)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_batch_goes_to_the_device_as_what_it_is(kind: str) -> None:
    """The tensors are moved in a new object of the same type, and the batch is not changed."""
    batch = MAKERS[kind]()
    moved = to_device(batch, META)
    assert type(moved) is type(batch)
    assert moved is not batch
    assert (_x(moved).device, _x(batch).device) == (META, CPU)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_batch_is_divided_into_what_it_is(kind: str) -> None:
    """The parts have the batch's type and their own samples."""
    batch = MAKERS[kind]()
    first, second = sliced(batch).divide((2, 1))
    assert type(first.batch) is type(second.batch) is type(batch)
    assert (_x(first.batch).tolist(), _x(second.batch).tolist()) == ([[0, 1], [2, 3]], [[4, 5]])
    assert torch.equal(_x(batch), _rows())


def test_an_encoding_keeps_its_attribute_access_and_its_samples_encodings() -> None:
    """A tokenizer's ``BatchEncoding`` has an attribute with an encoding for each sample."""
    batch = _encoding()
    batch._encodings = ["first", "second", "third"]
    (_, last) = sliced(batch).divide((2, 1))
    assert last.batch.x.tolist() == [[4, 5]]
    assert (last.batch._encodings, last.batch._n_sequences) == (["third"], 1)
    assert batch._encodings == ["first", "second", "third"]


def test_a_dataclass_is_neither_checked_nor_counted_again() -> None:
    """Copies keep fields that the constructor does not take, and lists of a value for each sample are cut."""
    batch = Plain(_rows(), ["a", "b", "c"])
    (_, last) = sliced(to_device(batch, CPU)).divide((2, 1))
    assert (last.batch.names, last.batch.total) == (["c"], 1.0)


def test_a_mapping_that_cannot_be_filled_becomes_a_dict() -> None:
    """A read-only view has no copy to put moved tensors into."""
    moved = to_device(MappingProxyType({"x": _rows()}), META)
    assert type(moved) is dict
    assert moved["x"].device == META


def test_arrays_are_divided_with_the_tensors() -> None:
    """A numpy array with a value for each sample is sliced, or every part would get the whole array."""
    batch = {"x": _rows(), "y": np.array([1, 2, 3]), "classes": np.array([0.5, 0.5])}
    (_, last) = sliced(batch).divide((2, 1))
    assert (last.batch["y"].tolist(), last.batch["classes"].tolist()) == ([3], [0.5, 0.5])


def test_tensors_are_named_by_how_they_are_reached() -> None:
    """Names contain keys, indices, fields, and the attributes of an object of unknown type."""
    batch = {"ids": _rows(), "parts": [Frozen(_rows()), Graph(_rows())]}
    assert [name for name, _ in named_tensors(batch)] == [
        "batch['ids']",
        "batch['parts'][0].x",
        "batch['parts'][1].nodes",
    ]


# --- types that nothing is known of -----------------------------------------------------------------------------------


class Graph:
    """A batch of a library's own type."""

    def __init__(self, nodes: Tensor) -> None:
        self.nodes = nodes

    def to(self, device: torch.device) -> Graph:
        """A copy on ``device``."""
        return Graph(self.nodes.to(device))


def _update(batches: list[Any], loss: Any, gathering: Gathering = "scratch") -> tuple[nn.Module, Any]:
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    accumulation = GradientAccumulation(model, torch.optim.SGD(model.parameters(), lr=0.5), gathering=gathering)
    return model, accumulation.update(batches, loss)


def test_an_object_of_unknown_type_reaches_the_loss_unchanged() -> None:
    """The loss gets the object itself on the CPU, or its own ``to`` on another device; the update is exact."""
    seen: list[Any] = []

    def loss(model: nn.Module, graph: Graph) -> tuple[Tensor, float]:
        seen.append(graph)
        return model(graph.nodes).sum(), len(graph.nodes)

    graphs = [Graph(torch.ones(3, 2)), Graph(torch.zeros(1, 2))]
    model, report = _update(graphs, loss)
    assert all(one is other for one, other in zip(seen[-2:], graphs, strict=True))
    assert model.get_parameter("weight").tolist() == [[1 - 0.5 * 3 / 4] * 2]
    assert report.weights == {"loss": 4.0}
    assert to_device(graphs[0], META).nodes.device == META


def test_packed_sequences_reach_the_loss_whole() -> None:
    """Batch sizes stay on the CPU, as torch requires, and samples are sequences."""
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])

    def loss(model: nn.Module, batch: PackedSequence) -> tuple[Tensor, float]:
        padded, lengths = pad_packed_sequence(batch, batch_first=True)
        return model(padded).sum(), float(lengths.sum())

    model, report = _update([packed], loss)
    assert model.get_parameter("weight").tolist() == [[0.5, 0.5]]
    assert report.micro_batch_sizes == (2,)
    assert to_device(packed, META).batch_sizes.device == CPU


def test_texts_are_a_batch() -> None:
    """A loss may create tensors."""
    model, _ = _update([["ab", "c"]], lambda m, texts: (m(torch.ones(len(texts), 2)).sum(), len(texts)))
    assert model.get_parameter("weight").tolist() == [[0.5, 0.5]]


def test_only_dividing_an_unknown_batch_is_refused() -> None:
    """The error names the device's message, the type and the remedy."""

    def loss(*_: Any) -> Any:
        raise out_of_memory()

    with pytest.raises(OutOfMemoryError, match=r"out of memory.*type Graph cannot be divided.*`divide`"):
        _update([Graph(torch.ones(4, 2))], loss)


def test_tensors_hidden_in_an_object_are_not_given_to_every_part() -> None:
    """Dividing the rest of the batch would pair each part with all of the object's samples."""
    with pytest.raises(WorkloadError, match=r"batch\['graph'\]\.nodes is inside an object"):
        sliced({"x": _rows(), "graph": Graph(_rows())}).divide((2, 1))
