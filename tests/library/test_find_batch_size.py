"""``find_batch_size``: functions of one's own, in processes of their own, tuned as by the command line."""

import json
import os
import re
import tempfile
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import batchwright
from batchwright import Recommendation, find_batch_size
from batchwright.errors import SpecError, StorageError, TuningFailedError, WorkloadError
from batchwright.library.find_batch_size import _pickled
from batchwright.library.functions import Functions, FunctionWorkload, OptimizingFunctionWorkload, load_functions
from batchwright.planning.accumulation import balanced_plan
from batchwright.units import parse_bytes
from batchwright.workloads.build import build_model
from tests.support import heavy_samples
from tests.support.command import called
from tests.support.factories import python_spec
from tests.support.heavy_samples import MEMORY_LIMIT, VALUES, Scaled, loss, make_batch
from tests.support.scarce import small_disk

SAMPLES = 30
"""Of an update. On the CPU the samples of the whole update are held in memory: 60 MiB."""
pytestmark = pytest.mark.usefixtures("forked")
SPEC = {"model": {"kind": "python", "target": "tests.support.heavy_samples:Workload"}}


def found(**changes: Any) -> Recommendation:
    """A recommendation for the heavy samples on the CPU, with lambdas around a class."""
    functions = {"build_model": lambda: Scaled(), "make_batch": lambda size: make_batch(size), "loss": loss}  # noqa: PLW0108 - a lambda is what is tested
    options = {"memory_limit": MEMORY_LIMIT, "device": "cpu", "progress": False}
    return find_batch_size(**{**functions, **options, **changes})


@pytest.fixture(scope="module")
def heavy(forked: None) -> Recommendation:
    """The recommendation of one tuning of the heavy samples, for the tests that compare with it."""
    del forked
    return found(effective_batch_size=SAMPLES)


def assert_one_sample_apart(first: Recommendation, second: Recommendation) -> None:
    """Two tunings measure in processes of their own, whose memory may differ by a MiB or two: less than a sample."""
    assert first.largest_micro_batch_size
    assert second.largest_micro_batch_size
    assert abs(first.largest_micro_batch_size - second.largest_micro_batch_size) <= 1


def test_the_plan_is_that_of_the_command_line(heavy: Recommendation, tmp_path: Path) -> None:
    """Lambdas are tuned as the same model as a ``python`` target is, within the difference of two measurements."""
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(SPEC))
    options = ["--effective-batch-size", str(SAMPLES), "--memory-limit", MEMORY_LIMIT, "--device", "cpu"]
    done = called("tune", spec, *options, "--json")
    assert done.returncode == 0, done.stderr
    theirs = Recommendation.model_validate_json(done.stdout)
    assert_one_sample_apart(heavy, theirs)
    for recommendation in (heavy, theirs):
        assert recommendation.plan == balanced_plan(SAMPLES, 1, recommendation.largest_micro_batch_size or 0)
        assert recommendation.evidence.proof.shows_larger_fail


def test_a_spec_is_tuned_as_by_the_command_line() -> None:
    """``tune`` takes a spec, and sizes as text."""
    ours = batchwright.tune(SPEC, 4, memory_limit=MEMORY_LIMIT, device="cpu", progress=False)
    assert ours.request.memory_limit_bytes == parse_bytes(MEMORY_LIMIT)
    assert ours.plan is not None
    assert sum(map(sum, ours.plan.micro_batch_sizes)) == 4


def test_a_closure_over_a_local_class(heavy: Recommendation) -> None:
    """Everything that a function refers to is copied with it, a class of this function included."""
    values = VALUES // 8

    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.ones(values))

        def forward(self, samples: Tensor) -> Tensor:
            return samples * self.weights

    smaller = found(build_model=Local, make_batch=lambda size: torch.randn(size, values), effective_batch_size=SAMPLES)
    assert (smaller.largest_micro_batch_size or 0) > (heavy.largest_micro_batch_size or 0)


def test_a_module_is_the_callers(heavy: Recommendation, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of a sample is a variable of a module, which the program has set: 64 times fewer values, and all fit."""
    monkeypatch.setattr(heavy_samples, "VALUES", VALUES // 64)
    assert (found(effective_batch_size=SAMPLES).largest_micro_batch_size or 0) > (heavy.largest_micro_batch_size or 0)


def test_settings_of_torch_are_the_callers(heavy: Recommendation) -> None:
    """Values of twice the size, and a function that touches torch's backends."""

    def make_any_batch(size: int) -> Tensor:
        torch.backends.cudnn.benchmark = False
        return torch.randn(size, 1).expand(size, VALUES).contiguous()

    torch.set_default_dtype(torch.float64)
    try:
        doubled = found(make_batch=make_any_batch, effective_batch_size=SAMPLES // 3, memory_limit="128MiB")
    finally:
        torch.set_default_dtype(torch.float32)
    assert (doubled.largest_micro_batch_size or 0) < (heavy.largest_micro_batch_size or 0)


class Normalized(Scaled):
    """A model that couples the samples of a batch in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def forward(self, samples: Tensor) -> Tensor:
        """Change one value of each sample."""
        changed: Tensor = self.norm(samples[:, :1])
        return super().forward(samples) + changed


def test_a_model_is_copied_in_its_modes() -> None:
    """An object instead of a function: the caller's model is not trained, and frozen statistics stay so."""
    model = Normalized().eval()
    recommended = found(build_model=model, effective_batch_size=SAMPLES)
    assert recommended.plan is not None
    assert recommended.evidence.coupling is not None
    assert recommended.evidence.coupling.verdict == "separate"
    assert [advice.code for advice in recommended.warnings] == ["model-in-eval-mode"]
    assert torch.equal(model.weights, torch.ones(VALUES))


class Larger(Scaled):
    """A model of 10 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.zeros(4 * VALUES))

    def forward(self, samples: Tensor) -> Tensor:
        """As that of fewer weights."""
        return super().forward(samples) + 0 * self.more.sum()


@pytest.fixture(scope="module")
def of_optimizers(forked: None) -> tuple[Recommendation, Recommendation]:
    """The recommendations of a larger model for an optimizer without a state and for one with 20 MiB."""
    del forked
    options: dict[str, Any] = {"build_model": Larger, "memory_limit": "110MiB", "effective_batch_size": 8}
    return found(optimizer=torch.optim.SGD, **options), found(optimizer=torch.optim.NAdam, **options)


def test_an_optimizer_of_ones_own_counts(of_optimizers: tuple[Recommendation, Recommendation]) -> None:
    """Fewer samples fit beside the state of an optimizer that keeps more of it."""
    stateless, stateful = of_optimizers
    assert (stateless.largest_micro_batch_size or 0) > (stateful.largest_micro_batch_size or 0) > 0
    assert "own-optimizer" in {advice.code for advice in stateless.to_hugging_face().warnings}


def test_a_mean_is_a_loss(heavy: Recommendation) -> None:
    """One tensor is the mean over the samples, tuned as the sum is."""
    mean = found(loss=lambda model, batch: loss(model, batch)[0] / len(batch), effective_batch_size=SAMPLES)
    assert mean.evidence.coupling is not None
    assert mean.evidence.coupling.verdict == "separate"
    assert_one_sample_apart(mean, heavy)


def test_a_sum_that_is_returned_as_a_mean_is_refused() -> None:
    """Its weight would be that of a mean."""
    with pytest.raises(TuningFailedError, match=r"loss term `loss`.*it grows with the batch, like a sum"):
        found(loss=lambda model, batch: loss(model, batch)[0], effective_batch_size=SAMPLES)


def test_without_an_effective_batch_the_largest_is_planned() -> None:
    """One micro-batch of the largest size, which needs no sum over samples: BatchNorm is allowed."""
    single = found(build_model=lambda: nn.Sequential(Scaled(), nn.Unflatten(1, (1, VALUES)), nn.BatchNorm1d(1)))
    assert single.plan is not None
    assert single.plan.micro_batch_sizes == ((single.largest_micro_batch_size,),)
    assert single.plan.effective_batch_size == single.request.effective_batch_size == single.largest_micro_batch_size
    assert [plan.micro_batch_size for plan in single.alternatives] == [single.largest_micro_batch_size]
    assert single.evidence.proof.shows_larger_fail


def test_nothing_that_fits_is_a_recommendation() -> None:
    """With its reason, as for the command line."""
    nothing = found(memory_limit="16MiB", effective_batch_size=4)
    assert not nothing.feasible
    assert nothing.plan is None
    assert nothing.infeasible_reason


def test_the_error_of_a_function_has_its_traceback() -> None:
    """The exception's note names the line of the user's function."""

    def make_batch_from_nothing(size: int) -> Tensor:
        raise LookupError(f"no {size} samples here")

    with pytest.raises(TuningFailedError, match=r"LookupError: no \d+ samples here") as raised:
        found(make_batch=make_batch_from_nothing, effective_batch_size=4)
    assert "in make_batch_from_nothing" in "".join(raised.value.__notes__)


def test_a_loss_of_another_type_is_refused() -> None:
    """The message says what a loss may be."""
    with pytest.raises(TuningFailedError, match=r"must return the mean loss, or \(loss_sum, weight\)"):
        found(loss=lambda model, batch: [model(batch).sum()], effective_batch_size=4)


def test_a_loss_for_each_sample_is_refused() -> None:
    """Also by the probe of one sample, whose vector of one value would otherwise pass as a scalar."""
    with pytest.raises(TuningFailedError, match=r"returned a tensor of shape \(\d+,\): return a scalar"):
        found(loss=lambda model, batch: loss(model, batch)[0].expand(len(batch)), effective_batch_size=4)


def test_a_batch_that_ignores_the_size_is_refused() -> None:
    """Every size would fit, which proves nothing."""
    with pytest.raises(TuningFailedError, match=r"return tensors of the same shapes \(\(3, \d+\)"):
        found(make_batch=lambda _: make_batch(3), effective_batch_size=16)


def test_a_packed_batch_has_no_dimension_of_the_size() -> None:
    """Samples of 5 tokens in one row: the shapes grow with the size."""
    workload = FunctionWorkload(Functions(Scaled, lambda size: torch.zeros(1, 5 * size), loss))
    assert isinstance(batch := workload.make_batch(3), Tensor)
    assert batch.shape == (1, 15)


def test_lazy_modules_get_their_shapes_from_a_sample() -> None:
    """In the modes that their model has; the statistics of a BatchNorm are not of that sample."""
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.Dropout().eval(), nn.LazyLinear(1))
    workload = FunctionWorkload(
        Functions(lambda: model, lambda size: torch.ones(size, 5), lambda net, batch: net(batch).mean())
    )
    built = build_model(python_spec("models:Net"), workload)  # type: ignore[arg-type] # a loss of any form
    assert [tuple(parameter.shape) for parameter in built.parameters()] == [(3, 5), (3,), (3,), (3,), (1, 3), (1,)]
    assert model[1].num_batches_tracked == 0
    assert built.training


def test_lazy_modules_whose_pass_fails_are_named() -> None:
    """With the error of the pass."""
    workload = FunctionWorkload(Functions(lambda: nn.LazyLinear(3), torch.ones, lambda net, batch: net(batch.bool())))
    with pytest.raises(WorkloadError, match=r"Linear has lazy modules, and a pass of make_batch\(1\).*failed"):
        build_model(python_spec("models:Net"), workload)  # type: ignore[arg-type] # a loss of any form


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    """It would leave the model as it is, with a state of another size."""
    others = list(Scaled().parameters())
    workload = OptimizingFunctionWorkload(Functions(Scaled, make_batch, loss, lambda _: torch.optim.SGD(others)))
    with pytest.raises(WorkloadError, match="an optimizer of the parameters it is given"):
        workload.build_optimizer(iter(Scaled().parameters()))


def test_an_optimizer_of_another_type_is_refused() -> None:
    """The message says what the function has to return."""
    with pytest.raises(TuningFailedError, match="must return a torch optimizer, not dict"):
        found(optimizer=lambda _: {}, effective_batch_size=4)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"memory_limit": "much"}, "memory_limit"),
        ({"memory_limit": 5}, "memory_limit"),
        ({"optimizer": "adamx"}, "spec.optimizer.name"),
        ({"precision": "fp12"}, "spec.precision"),
        ({"effective_batch_size": 0}, "effective_batch_size"),
        ({"micro_batch": 4}, "micro_batch"),
        ({"effective_batch_size": None, "objective": "fastest"}, "objective"),
        ({"effective_batch_size": None, "parallelism": {"world_size": 4}}, "parallelism"),
        ({"model": SPEC["model"]}, "model"),
        ({"memory_limit_bytes": 2**28}, "memory_limit_bytes"),
        ({"make_batch": [1, 2]}, "make_batch"),
        ({"build_model": Scaled().to("meta")}, "build_model"),
        ({"build_model": None}, "build_model"),
        ({"build_model": nn.Linear}, "build_model"),
        ({"make_batch": make_batch(1)}, "make_batch"),
        ({"make_batch": lambda: make_batch(1)}, "make_batch"),
        ({"loss": lambda model: model}, "loss"),
        ({"optimizer": lambda: None}, "optimizer"),
        ({"optimizer": torch.optim.SGD(Scaled().parameters())}, "optimizer"),
        ({"optimizer": None}, "spec.optimizer"),
        ({"effective_batch_size": 2.5}, "effective_batch_size"),
        ({"effective_batch_size": True}, "effective_batch_size"),
        ({"effective_batch_size": float("nan")}, "effective_batch_size"),
        ({"memory_limit": float("nan")}, "memory_limit"),
        ({"memory_limit": -5}, "memory_limit"),
        ({"device": "tpu"}, "device"),
        ({"device": torch.device("cpu")}, "device"),
        ({"precision": torch.bfloat16}, "spec.precision"),
        ({"memory_margin": 2}, "memory_margin"),
        ({"granularity": 0}, "granularity"),
        ({"gradient_clipping": float("nan")}, "spec.gradient_clipping"),
        ({"compile": "max-autotune"}, "spec.compile"),
        ({"probe_timeout_seconds": -1}, "probe_timeout_seconds"),
    ],
    ids=[
        "limit",
        "low limit",
        "optimizer",
        "precision",
        "effective batch",
        "unknown",
        "objective",
        "ranks",
        "model",
        "limit twice",
        "no function",
        "model on a device",
        "no model",
        "class with arguments",
        "batch",
        "batch without a size",
        "loss of a model",
        "optimizer of nothing",
        "built optimizer",
        "no optimizer",
        "fraction",
        "truth value",
        "not a number",
        "limit that is no number",
        "negative limit",
        "device of another kind",
        "device of torch",
        "type of torch",
        "margin",
        "granularity",
        "clipping",
        "mode of the compiler",
        "timeout",
    ],
)
def test_a_wrong_argument_is_named(changes: dict[str, Any], field: str) -> None:
    """Before any process starts."""
    with pytest.raises(SpecError) as raised:
        found(**changes)
    assert [problem.field for problem in raised.value.problems] == [field]


WRONG_CALLS: list[tuple[Callable[[], Any], str]] = [
    (lambda: batchwright.plan(8.5, 2), "effective_batch_size"),  # type: ignore[arg-type] # what is tested
    (lambda: batchwright.plan("8", 2), "effective_batch_size"),  # type: ignore[arg-type] # as above
    (lambda: batchwright.plan(8, None), "micro_batch_size"),  # type: ignore[arg-type] # as above
    (lambda: batchwright.plan(8, 2, True), "world_size"),
    (lambda: batchwright.tune(None, 4), "spec"),  # type: ignore[arg-type] # as above
    (lambda: batchwright.tune("no-such.yaml", 4), "no-such.yaml"),
    (lambda: batchwright.tune({}, 4), "spec.model"),
    (lambda: batchwright.tune(SPEC, 0), "effective_batch_size"),
    (lambda: batchwright.tune(SPEC, 4, memory_limit=object()), "memory_limit"),  # type: ignore[arg-type] # as above
    (lambda: batchwright.tune(SPEC, 4, objectives="fastest"), "objectives"),
    (lambda: batchwright.estimate(SPEC, "T4"), "gpus"),
    (lambda: batchwright.estimate(SPEC, None), "gpus"),  # type: ignore[arg-type] # as above
    (lambda: batchwright.estimate(SPEC, []), "gpus"),
    (lambda: batchwright.estimate(SPEC, ["T4"], engine="fast"), "engine"),  # type: ignore[arg-type] # as above
    (lambda: batchwright.estimate(SPEC, ["T4"], effective_batch_size=-1), "effective_batch_size"),
    (lambda: batchwright.estimate(SPEC, ["T4"], batch=1), "batch"),
    (lambda: batchwright.with_batch_size(lambda recommendation: recommendation), "with_batch_size"),
    (batchwright.with_batch_size, "with_batch_size"),
    (lambda: batchwright.with_batch_size(Scaled, make_batch, loss)(None), "train"),  # type: ignore[arg-type] # as above
    (lambda: batchwright.with_batch_size(Scaled, make_batch, loss)(lambda: 1), "train"),
    (
        batchwright.with_batch_size(Scaled, make_batch, loss, effective_batch_size=0)(print),
        "effective_batch_size",
    ),
]


@pytest.mark.parametrize(("call", "field"), WRONG_CALLS)
def test_a_wrong_argument_of_another_function_is_named(call: Callable[[], Any], field: str) -> None:
    """As those of ``find_batch_size`` are."""
    with pytest.raises(SpecError) as raised:
        call()
    assert [problem.field for problem in raised.value.problems][:1] == [field]


def test_whole_numbers_of_other_libraries_are_numbers() -> None:
    """A count from an array."""
    assert batchwright.plan(np.int64(8), np.int32(3)).micro_batch_sizes == ((3, 3, 2),)  # type: ignore[arg-type] # integers all the same


def test_what_cannot_be_pickled_is_named() -> None:
    """A lock belongs to this process."""
    lock = threading.Lock()
    with pytest.raises(SpecError, match="cannot be sent to another process") as raised:
        found(make_batch=lambda size: lock.locked() or make_batch(size))
    assert [problem.field for problem in raised.value.problems] == ["make_batch"]


def test_a_full_disk_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 2 MiB has no room on the disk for temporary files; nothing of it stays there."""
    with small_disk(tmp_path / "disk", 64 * 1024) as disk:
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        with pytest.raises(StorageError, match=r"functions\.pickle cannot be written: the disk is full") as raised:
            found(build_model=Scaled())
        assert list(disk.iterdir()) == []
    assert re.search(r"2\.0\d MiB needed", str(raised.value))
    assert "set TMPDIR to a folder on another disk" in str(raised.value)


def test_functions_are_not_kept_in_memory_beside_their_file() -> None:
    """A model of gigabytes would otherwise take its size a second time, for as long as its tuning lasts."""
    content = os.urandom(8 * 1024**2)
    tracemalloc.start()
    try:
        with _pickled({"make_batch": lambda _: content}) as (target, _):
            held, _ = tracemalloc.get_traced_memory()
            assert Path(target["file"]).stat().st_size > len(content)
    finally:
        tracemalloc.stop()
    assert held < len(content) // 2


def test_another_content_is_not_unpickled(tmp_path: Path) -> None:
    """The file is what the parent process wrote, or it is not loaded."""
    file = tmp_path / "functions.pickle"
    file.write_bytes(b"cos\nabort\n(tR.")
    with pytest.raises(WorkloadError, match="has changed since the tuning began"):
        load_functions(str(file), "0" * 64)


def test_functions_do_not_outlive_their_tuning(tmp_path: Path) -> None:
    """The file of the functions is gone, and the error of loading it names the remedy."""
    with pytest.raises(WorkloadError, match="only during its tuning"):
        load_functions(str(tmp_path / "functions.pickle"), "0" * 64)


def test_a_training_function_gets_the_recommendation_once() -> None:
    """The decorator tunes at the first call."""
    updates_of_calls: list[int] = []

    @batchwright.with_batch_size(
        Scaled, make_batch, loss, effective_batch_size=1, device="cpu", memory_limit=MEMORY_LIMIT, progress=False
    )
    def train(recommendation: Recommendation, updates: int) -> str:
        updates_of_calls.append(updates)
        return recommendation.id

    assert train(1) == train(updates=2)
    assert updates_of_calls == [1, 2]


def test_a_method_gets_its_object_and_the_recommendation() -> None:
    """Two objects of a class share what was found."""

    class Trainer:
        @batchwright.with_batch_size(
            Scaled, make_batch, loss, effective_batch_size=1, device="cpu", memory_limit=MEMORY_LIMIT, progress=False
        )
        def fit(self, recommendation: Recommendation, updates: int = 1) -> tuple[object, str, int]:
            return self, recommendation.id, updates

    first, second = Trainer(), Trainer()
    found_first, found_second = first.fit(), second.fit(updates=2)
    assert (found_first[0], found_second[0]) == (first, second)
    assert found_first[1] == found_second[1]
    assert (found_first[2], found_second[2]) == (1, 2)


def test_a_function_is_not_called_where_nothing_fits() -> None:
    """It would train without a plan."""

    @batchwright.with_batch_size(
        Scaled, make_batch, loss, effective_batch_size=4, device="cpu", memory_limit="16MiB", progress=False
    )
    def train(recommendation: Recommendation) -> None:
        raise AssertionError(recommendation.plan)

    with pytest.raises(TuningFailedError, match=r"train was not called: A micro-batch of 1 does not fit"):
        train()
