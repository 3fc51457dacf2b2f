"""Probes that count the updates of a plan, and end within the last one where nothing more is to be seen."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchwright.commands.command_supervisor import CommandSupervisor, proves_fresh_start
from batchwright.hardware.inventory import find_device
from batchwright.schemas.requests import ProbeRequest
from batchwright.schemas.results import Outcome, ProbeResult
from tests.support.factories import probe_result

pytestmark = pytest.mark.torch

SIZE, STEPS = 4, 5
MEBIBYTE = 1024**2
PROGRAM = """
import sys, torch
way, size, steps = open(sys.argv[1]).read(), int(sys.argv[2]), int(sys.argv[3])
model = torch.nn.Linear(1024, 1024)
optimizers = [torch.optim.AdamW(model.parameters())]
if way == "second-optimizer":
    critic = torch.nn.Linear(1024, 1024)
    optimizers.append(torch.optim.AdamW(critic.parameters()))
if way == "process-group":
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
loader = torch.utils.data.DataLoader(torch.randn(4096, 1024), batch_size=size)
kept = []
for number, batch in enumerate(loader, 1):
    if way == "zeroes-before-backward":
        loss = model(batch).sum()
        if number % steps == 1:
            optimizers[0].zero_grad()
        loss.backward()
    else:
        model(batch).sum().backward()
    if way == "keeps":
        kept.append(torch.ones(8 * 2**18))
    if way == "keeps-little":
        kept.append(torch.ones(2**14))
    if number % steps == 0:
        kept.clear()
        optimizers[0].step()
        if way != "zeroes-before-backward":
            optimizers[0].zero_grad()
"""


class Probes:
    """Probes of the program by one supervisor. The command is the same for all ways, so that it is imported once."""

    def __init__(self, folder: Path) -> None:
        self._script, self._way = folder / "program.py", folder / "way"
        self._script.write_text(PROGRAM)
        self.supervisor = CommandSupervisor(find_device("cpu"))

    def run(self, way: str, *, steps: int = STEPS, **fields: Any) -> ProbeResult:
        """Probe one way of the program."""
        self._way.write_text(way)
        words = (
            sys.executable,
            str(self._script),
            str(self._way),
            "{micro_batch_size}",
            "{gradient_accumulation_steps}",
        )
        data = {
            "spec": {"model": {"kind": "command", "argv": words, "environment": {"OMP_NUM_THREADS": "1"}}},
            "micro_batch_size": SIZE,
            "samples_per_window": steps * SIZE,
            "device": "cpu",
            "counts_plan": True,
        }
        return self.supervisor.run(ProbeRequest.model_validate({**data, **fields}))


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probes]:
    """Probes of the program."""
    made = Probes(tmp_path_factory.mktemp("counted"))
    assert made.run("plain").forked
    yield made
    made.supervisor.close()


def passes(result: ProbeResult) -> tuple[int, ...]:
    """The backward passes of each whole update."""
    assert result.counted is not None, result
    assert result.counted.of_plan
    return result.counted.ranks[0].backward_passes


@pytest.mark.parametrize("way", ["plain", "zeroes-before-backward", "keeps-little"])
def test_a_plan_ends_in_its_second_update(probes: Probes, way: str) -> None:
    """The update is counted, and its second holds the optimizer's state and gradients as every later one will.

    A step of glibc's heap, of 2 MiB, is no growth: one that keeps 0.25 MiB within an update takes at most one of these.
    """
    result = probes.run(way)
    assert (result.outcome, passes(result)) == (Outcome.FIT, (STEPS,))
    assert f"{STEPS} backward passes of {SIZE} samples per update: {STEPS * SIZE}, as planned" in result.message
    assert "the beginning of the next" in result.message
    assert result.timing is not None
    assert len(result.timing.micro_batch_sizes) == STEPS
    assert result.timing.update_seconds >= (result.timing.micro_batch_seconds or 0.0) > 0.0


def test_its_peak_is_that_of_two_whole_updates(probes: Probes) -> None:
    """The first update alone takes less, since the optimizer's state is created at its end."""
    short, whole = probes.run("plain"), probes.run("plain", counts_plan=False, runs_plan=True)
    assert passes(whole) == (STEPS, STEPS)
    assert abs((short.process_peak_bytes or 0) - (whole.process_peak_bytes or 0)) <= 3 * MEBIBYTE


@pytest.mark.parametrize("way", ["keeps", "process-group"])
def test_an_update_that_may_take_more_is_made_whole(probes: Probes, way: str) -> None:
    """Memory is kept of each micro-batch, or ranks reduce gradients."""
    result = probes.run(way)
    assert (result.outcome, passes(result)) == (Outcome.FIT, (STEPS, STEPS))


def test_an_optimizer_that_never_steps_is_awaited_and_named(probes: Probes) -> None:
    """Its state would take memory. After one probe that waited in vain the next ones do not."""
    first, second = (probes.run("second-optimizer", steps=1) for _ in range(2))
    assert set(passes(first)) == {1}
    assert (len(passes(first)), len(passes(second))) == (66, 2)
    for result in (first, second):
        assert result.counted is not None
        assert "AdamW (1,049,600 parameters)" in result.counted.unseen["optimizer-did-not-step"]


def test_memory_that_is_kept_of_each_micro_batch_runs_out_in_the_second_update(probes: Probes) -> None:
    """The first update ends below the limit, which the optimizer's state then leaves too little of."""
    peak = probes.run("keeps").process_peak_bytes or 0
    result = probes.run("keeps", limit_bytes=peak - 4 * MEBIBYTE)
    assert result.outcome is Outcome.OOM
    assert result.message.endswith("after the first update")


def test_an_update_of_two_micro_batches_is_made_whole(probes: Probes) -> None:
    """Nothing would be saved."""
    assert passes(probes.run("plain", steps=2)) == (2, 2)


@pytest.mark.thorough
def test_a_fit_that_leaves_little_room_is_no_proof_of_its_plan(probes: Probes) -> None:
    """Peaks of forked and fresh processes differ a little. The plan's own run is fresh at once."""
    limit = (probes.run("plain").process_peak_bytes or 0) + 3 * MEBIBYTE
    searched = probes.run("plain", limit_bytes=limit)
    assert (searched.outcome, searched.forked) == (Outcome.FIT, True)
    assert searched.counted is not None
    assert not searched.counted.of_plan
    plan = probes.run("plain", limit_bytes=limit, runs_plan=True)
    assert (plan.outcome, plan.forked, passes(plan)) == (Outcome.FIT, False, (STEPS,))


@pytest.mark.parametrize(
    ("outcome", "limit", "peak", "of_plan", "proven"),
    [
        pytest.param(Outcome.FIT, 100, 96, True, True, id="4 MiB are left"),
        pytest.param(Outcome.FIT, 100, 97, True, False, id="less is left"),
        pytest.param(Outcome.FIT, 1000, 991, True, False, id="less than a hundredth is left"),
        pytest.param(Outcome.FIT, None, 97, True, True, id="without a limit"),
        pytest.param(Outcome.FIT, 100, 97, False, True, id="a fit of a search"),
        pytest.param(Outcome.OOM, 100, 97, False, True, id="an OOM of a search"),
        pytest.param(Outcome.OOM, 100, 97, True, False, id="an OOM of a plan"),
        pytest.param(Outcome.ERROR, 100, 10, False, False, id="an error"),
    ],
)
def test_a_forked_fit_proves_a_plan_that_leaves_room(
    outcome: Outcome, limit: int | None, peak: int, *, of_plan: bool, proven: bool
) -> None:
    """The peaks of a forked and of a fresh process differ by up to 4 MiB, or a hundredth of the limit."""
    fields = {"limit_bytes": limit and limit * MEBIBYTE, "verifies_plan": of_plan}
    assert proves_fresh_start(probe_result(4, outcome, peak * MEBIBYTE, **fields)) is proven
