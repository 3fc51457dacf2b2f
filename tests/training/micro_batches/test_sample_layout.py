"""What a batch's samples are: batches of many structures follow a plan, and give the gradient of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence
from torch.utils.data import DataLoader

import batchwright
from batchwright import GradientAccumulation, MicroBatch
from batchwright.errors import OutOfMemoryError, WorkloadError
from batchwright.training.coupling.check import check_coupling
from batchwright.training.micro_batches.nested_batches import copied
from batchwright.training.micro_batches.splitting import as_micro_batch, made_micro_batch, windows
from tests.support.faults import out_of_memory

CPU = torch.device("cpu")
SAMPLES, WIDTH = 8, 3
PLAN = batchwright.plan(SAMPLES, 3)  # 3 + 3 + 2
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
Embed = Callable[[Any], list[Tensor]]
"""The rows of each sample of a batch."""


class GraphBatch:
    """Graphs joined as PyTorch Geometric joins them, with the interface of its ``Batch``."""

    def __init__(self, nodes: Tensor, edges: Tensor, graph_of_node: Tensor, num_graphs: int) -> None:
        self.nodes, self.edges, self.graph_of_node, self.num_graphs = nodes, edges, graph_of_node, num_graphs

    def __len__(self) -> int:
        """Attributes, as of the real class: not the number of graphs."""
        return 4

    @classmethod
    def from_data_list(cls, graphs: list[tuple[Tensor, Tensor]]) -> GraphBatch:
        """Number the nodes of all graphs anew."""
        counts = [len(nodes) for nodes, _ in graphs]
        firsts = torch.tensor([0, *counts]).cumsum(0).tolist()
        edges = [edges + first for (_, edges), first in zip(graphs, firsts, strict=False)]
        graph_of_node = torch.arange(len(graphs)).repeat_interleave(torch.tensor(counts))
        return cls(torch.cat([nodes for nodes, _ in graphs]), torch.cat(edges, 1), graph_of_node, len(graphs))

    def to_data_list(self) -> list[tuple[Tensor, Tensor]]:
        """The graphs, each with its own numbers."""
        graphs = []
        for graph in range(self.num_graphs):
            rows = (self.graph_of_node == graph).nonzero()[:, 0]
            inside = self.edges[:, torch.isin(self.edges[0], rows)] - rows[0]
            graphs.append((self.nodes[rows], inside))
        return graphs


def ragged(samples: int = SAMPLES) -> list[Tensor]:
    """Samples of 1 to 4 rows."""
    generator = torch.Generator().manual_seed(samples)
    return [torch.randn(1 + number % 4, WIDTH, generator=generator) for number in range(samples)]


def even(samples: int = SAMPLES, rows: int = 4) -> list[Tensor]:
    """Samples of equally many rows."""
    return list(torch.randn(samples, rows, WIDTH, generator=torch.Generator().manual_seed(samples)))


def graphs(samples: int) -> GraphBatch:
    """Rings of 1 to 4 nodes."""
    rings = [
        (rows, torch.stack([torch.arange(len(rows)), torch.arange(len(rows)).roll(1)])) for rows in ragged(samples)
    ]
    return GraphBatch.from_data_list(rings)


def neighbours(batch: GraphBatch) -> list[Tensor]:
    """Each node with its neighbour."""
    sums = batch.nodes + batch.nodes[batch.edges[1]][batch.edges[0].argsort()]
    return [sums[batch.graph_of_node == graph] for graph in range(batch.num_graphs)]


@dataclass
class Detection:
    """Images and targets, each a list."""

    images: list[Tensor]
    targets: list[dict[str, Tensor]]


STRUCTURES: dict[str, tuple[Callable[[int], Any], Embed]] = {
    "list": (ragged, lambda batch: batch),
    "tuple": (lambda n: tuple(ragged(n)), list),
    "tuple of lists": (
        lambda n: (tuple(ragged(n)), tuple({"boxes": one} for one in ragged(n))),
        lambda batch: [x + target["boxes"] for x, target in zip(*batch, strict=True)],
    ),
    "dict of lists": (lambda n: {"x": ragged(n), "id": list(range(n))}, lambda batch: batch["x"]),
    "list of dicts": (lambda n: [{"x": one, "scale": 2.0} for one in ragged(n)], lambda b: [2 * one["x"] for one in b]),
    "images and a list of targets": (
        lambda n: {"images": torch.stack(even(n)), "targets": [{"boxes": one} for one in ragged(n)]},
        lambda batch: [
            torch.cat([x, target["boxes"]]) for x, target in zip(batch["images"], batch["targets"], strict=True)
        ],
    ),
    "dataclass": (lambda n: Detection(ragged(n), [{} for _ in range(n)]), lambda batch: batch.images),
    "time first": (lambda n: torch.stack(even(n), 1), lambda batch: list(batch.unbind(1))),
    "time first, with labels": (
        lambda n: (torch.stack(even(n), 1), torch.arange(1.0, n + 1)),
        lambda batch: [x * y for x, y in zip(batch[0].unbind(1), batch[1], strict=True)],
    ),
    "channels first, samples last": (lambda n: torch.stack(even(n), 2), lambda batch: list(batch.unbind(2))),
    "nested": (lambda n: torch.nested.nested_tensor(ragged(n)), lambda batch: list(batch.unbind())),
    "jagged": (
        lambda n: {"x": torch.nested.nested_tensor(ragged(n), layout=torch.jagged), "y": torch.ones(n)},
        lambda batch: list(batch["x"].unbind()),
    ),
    "packed": (lambda n: pack_sequence(ragged(n), enforce_sorted=False), unpack_sequence),
    "sparse": (
        lambda n: torch.stack(even(n, 1))[:, 0].to_sparse(),
        lambda batch: list(batch.to_dense()[:, None]),
    ),
    "graphs": (graphs, neighbours),
}
all_structures = pytest.mark.parametrize("kind", STRUCTURES)


def loss_of(embed: Embed) -> Any:
    """The mean over the samples of a loss that a batch of other samples would change."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return torch.stack([model(rows).square().mean().sqrt() for rows in embed(batch)]).mean()

    return loss


def exact(model: nn.Module, batch: Any, loss: Any) -> list[Tensor]:
    """The gradient of one pass over the whole batch."""
    return list(torch.autograd.grad(loss(model, batch), list(model.parameters())))


def accumulation(**options: Any) -> GradientAccumulation:
    """A loop over a small model in fp64."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 2)
    return GradientAccumulation(model, torch.optim.SGD(model.parameters(), lr=0.0), **options)


def assert_exact(loop: GradientAccumulation, batch: Any, loss: Any) -> None:
    """The gradient in ``.grad`` is that of the whole batch."""
    for parameter, wanted in zip(loop.parameters, exact(loop.model, batch, loss), strict=True):
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-5, atol=1e-6)


@all_structures
@pytest.mark.parametrize("checks", [True, False], ids=["checked", "unchecked"])
def test_a_batch_of_any_structure_follows_the_plan(kind: str, *, checks: bool) -> None:
    """8 samples as 3 + 3 + 2, then a last batch of 5 as 3 + 2; a mean over the samples is exact."""
    make, embed = STRUCTURES[kind]
    loop, loss = accumulation(plan=PLAN, checks_coupling=checks), loss_of(embed)
    for samples, sizes in ((SAMPLES, (3, 3, 2)), (5, (3, 2))):
        batch = make(samples)
        report = loop.accumulate([batch], loss)
        assert report.micro_batch_sizes == sizes
        assert report.samples == samples
        assert_exact(loop, batch, loss)


@all_structures
def test_a_batch_of_any_structure_is_divided_when_it_does_not_fit(kind: str) -> None:
    """Without a plan the structure, and where that leaves two readings the loss, says what the samples are."""
    make, embed = STRUCTURES[kind]
    loop, loss = accumulation(samples=lambda batch: len(embed(batch))), loss_of(embed)

    def scarce(model: nn.Module, batch: Any) -> Tensor:
        if len(embed(batch)) > 4:
            raise out_of_memory()
        mean: Tensor = loss(model, batch)
        return mean

    report = loop.accumulate([make(SAMPLES)], scarce)
    assert report.micro_batch_sizes == (4, 4)
    assert_exact(loop, make(SAMPLES), loss)


@all_structures
def test_the_growth_of_a_batch_shows_its_samples(kind: str) -> None:
    """The check of a tuning finds a sum over samples to be one, and divides into parts of the batch's own type."""
    make, embed = STRUCTURES[kind]
    made = made_micro_batch(make, 6)
    assert made.guess is None
    first, second = made.divide((4, 2))
    assert type(first.batch) is type(second.batch) is type(made.batch)
    wanted, got = embed(made.batch), [*embed(first.batch), *embed(second.batch)]
    assert all(torch.equal(one, other) for one, other in zip(wanted, got, strict=True))


class Recurrent:
    """A time-first recurrent net, and its loss."""

    def build_model(self) -> nn.Module:
        """Of one layer."""
        torch.manual_seed(0)
        return nn.LSTM(WIDTH, 4)

    def make_batch(self, size: int) -> dict[str, Tensor]:
        """Sequences of four steps, of shape (4, size, width), and one target for each."""
        generator = torch.Generator().manual_seed(0)
        return {"x": torch.randn(4, size, WIDTH, generator=generator), "y": torch.randn(size, 4, generator=generator)}

    def loss_terms(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        """The mean over the samples."""
        errors: Tensor = model(batch["x"])[0][-1] - batch["y"]
        return errors.square().mean()


@pytest.mark.parametrize("options", [{"plan": PLAN}, {"samples": lambda batch: len(batch["y"])}, {}])
def test_a_time_first_net_is_no_coupled_loss(options: dict[str, Any]) -> None:
    """Neither for a tuning nor in a loop, with a plan, a count, or by the shapes alone."""
    net = Recurrent()
    report = check_coupling(net.build_model(), net, made_micro_batch(net.make_batch, 4), CPU)
    assert report.verdict == "separate", report.message
    model, batch = net.build_model(), net.make_batch(SAMPLES)
    loop = GradientAccumulation(model, torch.optim.SGD(model.parameters(), lr=0.0), **options)
    assert loop.accumulate([batch], net.loss_terms).samples == SAMPLES
    assert_exact(loop, batch, net.loss_terms)


# --- two readings -----------------------------------------------------------------------------------------------------


def pairs_loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    """The loss of inputs and targets of equal shapes."""
    inputs, targets = batch
    return (model(inputs).sum(1) - targets.sum(1)).square().sum(), len(inputs)


def test_the_loss_decides_between_two_readings() -> None:
    """Inputs and targets of equal shapes are no list of two samples, which the loss could not unpack."""
    loop = accumulation()
    batch = [torch.randn(6, WIDTH), torch.randn(6, WIDTH)]
    assert as_micro_batch(batch).indivisible is not None
    report = loop.accumulate([batch, [tensor[:2] for tensor in batch]], pairs_loss)
    assert report.micro_batch_sizes == (6, 2)


def test_the_loss_decides_between_items_and_rows() -> None:
    """As many samples in the list as rows in each of them, and as in the plan."""
    loop, loss = accumulation(plan=PLAN), loss_of(lambda batch: batch)
    assert loop.accumulate([even(SAMPLES, rows=SAMPLES)], loss).micro_batch_sizes == (3, 3, 2)
    assert_exact(loop, even(SAMPLES, rows=SAMPLES), loss)


def test_the_loss_decides_along_which_dimension_the_samples_are() -> None:
    """Time first, as many steps as samples in the plan: only the parts along dimension 1 have the batch's loss."""
    steps_first = torch.stack(even(SAMPLES, rows=SAMPLES), 1)
    loop = accumulation(plan=PLAN)
    loss = loss_of(lambda batch: list(batch.cumsum(0).unbind(1)))
    assert loop.accumulate([steps_first], loss).micro_batch_sizes == (3, 3, 2)
    assert_exact(loop, steps_first, loss)


def test_the_batch_size_of_a_loader_decides() -> None:
    """Two readings remain without it, and without a check of the loss."""
    images = even(6, rows=3)
    loader: DataLoader[Tensor] = DataLoader(images, batch_size=2, collate_fn=list)  # type: ignore[arg-type] # a list is a data set
    loss = loss_of(lambda batch: batch)
    loop = accumulation(checks_coupling=False)
    (window,) = windows(loader, 3)
    assert loop.accumulate(window, loss).micro_batch_sizes == (2, 2, 2)
    assert_exact(loop, images, loss)
    with pytest.raises(WorkloadError, match=r"number of samples of the batch is not known.*`samples=`"):
        accumulation(checks_coupling=False).accumulate(list(loader), loss)


def test_two_readings_that_remain_are_named() -> None:
    """A batch of three images of three channels under a plan, without a check of the loss: the error asks."""
    loop = accumulation(plan=batchwright.plan(3, 2), checks_coupling=False)
    words = r"3 samples as the items of `batch` or 3 samples along dimension 0 of `batch\[0\]`: pass `samples=`"
    with pytest.raises(WorkloadError, match=words):
        loop.update([even(3, rows=3)], lambda model, batch: (model(torch.stack(batch)).sum(), len(batch)))


def test_two_readings_by_which_the_loss_differs_are_warned_of() -> None:
    """A guess is no proof that the loss couples samples."""

    def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
        outputs = model(torch.cat([rows.flatten(0, -2) for rows in batch]))
        return (outputs - outputs.mean(0)).square().sum(), 1

    with pytest.warns(UserWarning, match="could not be compared with that of its parts: the batch may be"):
        assert not accumulation().update([even(6)], loss).skipped


def boxes(samples: int) -> dict[str, Tensor]:
    """Images of three channels, and two rows for each: the index of the image, and a box of two numbers."""
    index = torch.arange(samples).repeat_interleave(2)
    return {"x": torch.randn(samples, WIDTH, 4), "boxes": torch.cat([index[:, None], torch.randn(2 * samples, 2)], 1)}


def box_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over the boxes, which are two for each image."""
    found = model(batch["x"].transpose(1, 2)).mean(1)[batch["boxes"][:, 0].long(), :2]
    errors: Tensor = found - batch["boxes"][:, 1:]
    return errors.square().mean()


def test_channels_are_no_samples_where_the_parts_do_not_run() -> None:
    """Three channels and three numbers in each row of a table, which a mean would weigh all batches by."""
    batches = [boxes(6), boxes(2)]
    with (
        pytest.warns(UserWarning, match="sum over the samples, because it fails on a part"),
        pytest.raises(WorkloadError, match=r"number of samples of the batch is not known.*`samples=`"),
    ):
        accumulation().accumulate(batches, box_loss)
    loop = accumulation(samples=lambda batch: len(batch["x"]))
    assert loop.accumulate(batches, box_loss).micro_batch_sizes == (6, 2)


def mixed_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A loss of positions that a table mixes, the same for all samples."""
    mixed: Tensor = model(torch.einsum("ntw,ts->nsw", batch["x"], batch["table"]))
    return mixed.square().mean()


@pytest.mark.parametrize("rows", [5, 1])
def test_a_tensor_without_rows_of_samples_is_shared(rows: int) -> None:
    """A table by position, or one row for all; without a check of the loss nothing shows that the samples share it."""
    batch = {"x": torch.randn(SAMPLES, rows, WIDTH), "table": torch.randn(rows, 5)}
    loop = accumulation(plan=PLAN)
    assert loop.accumulate([batch], mixed_loss).micro_batch_sizes == (3, 3, 2)
    assert_exact(loop, batch, mixed_loss)
    with pytest.raises(WorkloadError, match=r"plan cannot be followed: .*`batch\['table'\]` has the shape"):
        accumulation(plan=PLAN, checks_coupling=False).accumulate([batch], mixed_loss)


def test_a_tensor_of_other_rows_of_samples_is_not_shared() -> None:
    """Three boxes of eight images, by which parts have another loss."""
    index = torch.tensor([0.0, 3.0, 7.0])
    batch = {"x": torch.randn(SAMPLES, WIDTH), "boxes": torch.stack([index, torch.randn(3)], 1)}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        inside = batch["boxes"][batch["boxes"][:, 0] < len(batch["x"])]
        return (model(batch["x"])[inside[:, 0].long(), 0] - inside[:, 1]).square().sum(), len(batch["x"])

    with pytest.raises(WorkloadError, match=r"plan cannot be followed: .*`batch\['boxes'\]` has the shape \(3, 2\)"):
        accumulation(plan=PLAN).accumulate([batch], loss)


# --- batches that cannot be divided -----------------------------------------------------------------------------------


def joined(samples: int) -> dict[str, Tensor]:
    """Graphs of three nodes in a dict of tensors, as loaders without a library join them."""
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    return {
        "nodes": torch.ones(3 * samples, WIDTH),
        "edges": torch.cat([edges + 3 * graph for graph in range(samples)], 1),
        "y": torch.zeros(samples),
    }


INDIVISIBLE: dict[str, tuple[Callable[[int], Any], str]] = {
    "edges": (joined, r"`batch\['edges'\]` seems to hold positions in the whole batch"),
    "rows of other numbers": (
        lambda n: {"tokens": torch.ones(n * n + 1), "y": torch.zeros(n)},
        r"`batch\['tokens'\]` has the shape \(17,\) for 4 samples and \(26,\) for 5",
    ),
    "fixed": (lambda _: torch.ones(3, 2), "return batches of the same shapes"),
    "hidden": (lambda n: {"x": torch.ones(n, 2), "graph": Hidden(n)}, r"batch\['graph'\].rows is inside an object"),
}


class Hidden:
    """An object of unknown type with a tensor."""

    def __init__(self, samples: int) -> None:
        self.rows = torch.ones(samples, 2)


@pytest.mark.parametrize("kind", INDIVISIBLE)
def test_what_cannot_be_divided_is_named_and_not_compared(kind: str) -> None:
    """The error of the check, which is no verdict, names the tensor and the remedy."""
    make, words = INDIVISIBLE[kind]
    made = made_micro_batch(make, 4)
    net = Recurrent()
    with pytest.raises(WorkloadError, match=words):
        check_coupling(net.build_model(), net, made, CPU)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("make", [joined, Hidden, lambda n: {"x": torch.eye(n).to_sparse_csr()}])
def test_a_plan_that_cannot_be_followed_is_an_error(make: Callable[[int], Any]) -> None:
    """8 samples never run at once under 3 + 3 + 2."""
    loop = accumulation(plan=PLAN, samples=lambda _: SAMPLES)
    with pytest.raises(WorkloadError, match=r"the plan cannot be followed: .*`batchwright.MicroBatch`"):
        loop.update([make(SAMPLES)], lambda *_: pytest.fail("the loss was called"))


def test_samples_of_ones_own_are_collated_again() -> None:
    """The remedy for a batch that cannot be cut: the parts of a ``MicroBatch`` are made anew."""
    batch = MicroBatch.collated(ragged(), lambda rows: {"rows": torch.cat(list(rows)), "counts": [*map(len, rows)]})
    loop, loss = accumulation(plan=PLAN), loss_of(lambda batch: list(batch["rows"].split(batch["counts"])))
    assert loop.accumulate([batch], loss).micro_batch_sizes == (3, 3, 2)
    assert_exact(loop, batch.batch, loss)


# --- guesses ----------------------------------------------------------------------------------------------------------


def views(samples: int) -> Tensor:
    """Seven views of each sample."""
    return torch.randn(7 * samples, WIDTH, generator=torch.Generator().manual_seed(0))


class OfViews(Recurrent):
    """A workload of several rows for each sample."""

    def __init__(self, loss: Any) -> None:
        self.loss_terms = loss  # type: ignore[method-assign] # of this case


@pytest.mark.parametrize(
    ("model", "loss", "verdict"),
    [
        (nn.Linear(WIDTH, 2), lambda model, batch: model(batch).square().mean(), "separate"),
        (nn.Linear(WIDTH, 2), lambda model, batch: model(batch).std(), "not-compared"),
        (nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2)), lambda m, b: m(b).square().mean(), "coupled"),
    ],
    ids=["sum", "guessed", "batch norm"],
)
def test_a_guessed_division_proves_only_what_holds_for_any(model: nn.Module, loss: Any, verdict: str) -> None:
    """Which rows are a sample's is not shown: equal losses are equal, others may come from the division."""
    made = made_micro_batch(views, 4)
    assert (made.guess, made.size) == ("`batch` has 7 rows or items for each sample", 4)
    report = check_coupling(model, OfViews(loss), made, CPU)
    assert report.verdict == verdict, report.message
    assert verdict != "not-compared" or "division was guessed" in report.message


def test_a_size_that_make_batch_refuses_is_not_needed() -> None:
    """Then the division is a guess by the batch alone."""

    def make_batch(size: int) -> Tensor:
        if size % 4:
            raise ValueError("groups of four")
        return torch.ones(size, 2)

    made = made_micro_batch(make_batch, 8)
    assert [part.size for part in made.divide((4, 4))] == [4, 4]
    assert made.guess == "make_batch(9) raised ValueError"


@pytest.mark.parametrize(("samples", "calls"), [(None, 2), (len, 1)])
def test_the_division_takes_one_more_batch_at_most(samples: Any, calls: int) -> None:
    """A batch may take seconds to make; with a count of the user's it is the only one."""
    sizes: list[int] = []

    def make_batch(size: int) -> Tensor:
        sizes.append(size)
        return torch.ones(size, 2)

    assert made_micro_batch(make_batch, 4, samples).size == 4
    assert len(sizes) == calls


def test_a_batch_of_other_samples_than_asked_for_is_refused() -> None:
    """By the user's own count, or that of a micro-batch."""
    with pytest.raises(WorkloadError, match=r"make_batch\(4\) returned a batch of 3 samples"):
        made_micro_batch(lambda _: torch.ones(3), 4, len)


def test_a_batch_that_does_not_fit_and_has_two_readings_asks() -> None:
    """The message has the device's error, both readings and the argument."""

    def loss(*_: Any) -> Any:
        raise out_of_memory()

    with pytest.raises(OutOfMemoryError, match=r"out of memory.* or 6 samples as the items of `batch`|`samples=`"):
        accumulation().update([even(6)], loss)


def test_a_nested_tensor_is_copied() -> None:
    """It has no deep copy of its own."""
    batch = {"x": torch.nested.nested_tensor(ragged())}
    assert torch.equal(copied(batch)["x"].unbind()[1], ragged()[1])
    assert copied(batch)["x"] is not batch["x"]
