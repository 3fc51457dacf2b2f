"""Probes of commands on a card: the allocator's limit, its out-of-memory observer, and its peaks."""

import sys
import time
from pathlib import Path

import pytest

from batchwright.commands.command_job import CommandJob
from batchwright.commands.command_supervisor import CommandSupervisor
from batchwright.hardware.inventory import devices, find_device
from batchwright.schemas.command import CommandSpec
from batchwright.schemas.requests import ProbeRequest
from batchwright.schemas.results import Outcome, ProbeResult
from batchwright.schemas.training import RunOutcome
from tests.support.exports.plans import command_plan

pytestmark = pytest.mark.gpu

LIMIT = 2 * 1024**3
PROGRAM = """
import sys, torch
size, steps = int(sys.argv[1]), int(sys.argv[2])
model = torch.nn.Sequential(torch.nn.Linear(256, 8192), torch.nn.ReLU(), torch.nn.Linear(8192, 256)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
number = 0
while True:
    try:
        (model(torch.randn(size, 1024, 256, device="cuda")).square().mean() / steps).backward()
    except torch.OutOfMemoryError:
        size //= 2
        continue
    number += 1
    if number % steps == 0:
        optimizer.step(); optimizer.zero_grad()
"""
"""Its activations take 64 MiB a sample, and it lowers its batch where they do not fit."""


def probe(tmp_path: Path, size: int) -> ProbeResult:
    """Probe the program at a size, with two micro-batches in an update."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    argv = (sys.executable, str(script), "{micro_batch_size}", "{gradient_accumulation_steps}")
    spec = CommandSpec.model_validate({"model": {"kind": "command", "argv": argv}})
    request = ProbeRequest(
        spec=spec, micro_batch_size=size, samples_per_window=2 * size, device="cuda:0", limit_bytes=LIMIT
    )
    with CommandSupervisor(find_device("cuda:0")) as supervisor:
        return supervisor.run(request)


def test_a_command_fits_within_the_limit_of_its_card(tmp_path: Path) -> None:
    """Its peaks are the allocator's, and the context is outside of them."""
    result = probe(tmp_path, 4)
    assert result.outcome is Outcome.FIT, result
    assert result.counted is not None
    assert result.counted.statement == "2 backward passes of 4 samples per update: 8, as planned"
    assert 0 < (result.peak_allocated_bytes or 0) <= (result.peak_reserved_bytes or 0) < LIMIT
    assert (result.context_bytes or 0) > 0
    assert (result.limit_bytes or 0) == LIMIT - (result.context_bytes or 0)


def test_an_oom_that_the_command_catches_is_observed(tmp_path: Path) -> None:
    """The allocator's observer reports the OOM: the program itself would go on with half of its batch."""
    result = probe(tmp_path, 64)
    assert result.outcome is Outcome.OOM, result
    assert result.message.startswith("asked for ")


TWO_RANKS = """
import os, sys, torch
size, steps, local = int(sys.argv[1]), int(sys.argv[2]), int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
torch.distributed.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256).cuda(), device_ids=[local])
optimizer = torch.optim.AdamW(model.parameters())
with open(sys.argv[3], "a") as stream:
    stream.write(os.environ["CUDA_VISIBLE_DEVICES"] + "\\n")
for number in range(1, 4 * steps + 1):
    model(torch.randn(size, 1024, 256, device="cuda")).square().mean().backward()
    if number % steps == 0:
        optimizer.step(); optimizer.zero_grad()
torch.distributed.destroy_process_group()
"""


def test_the_ranks_of_a_command_have_the_held_cards(tmp_path: Path) -> None:
    """In a probe and in a job, in the order in which they are held, and no other card."""
    cards = [device.id for device in devices() if device.kind == "cuda"]
    if len(cards) < 2:
        pytest.skip(f"two ranks need two cards, and here is {len(cards)}")
    held = (cards[-1], cards[0])
    (tmp_path / "program.py").write_text(TWO_RANKS)
    torchrun = (str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node=2")
    script = (str(tmp_path / "program.py"), "{micro_batch_size}", "{gradient_accumulation_steps}")
    argv = (*torchrun, *script, str(tmp_path / "seen"))
    spec = CommandSpec.model_validate({"model": {"kind": "command", "argv": argv}, "parallelism": {"world_size": 2}})
    request = ProbeRequest(
        spec=spec,
        micro_batch_size=8,
        samples_per_window=16,
        device=held[0],
        limit_bytes=4 * 1024**3,
        rank_devices=held,
    )
    with CommandSupervisor(find_device(held[0])) as supervisor:
        result = supervisor.run(request)
    assert result.outcome is Outcome.FIT, result
    assert result.counted is not None
    assert result.counted.world_size == 2

    with CommandJob(tmp_path / "job") as job:
        job.start(command_plan(*argv, world_size=2, device=find_device(held[0])), 4, held)
        while (ended := job.poll()) is None:
            time.sleep(0.1)
    assert ended.outcome is RunOutcome.SUCCEEDED, ended
    assert ended.updates == 4

    seen = (tmp_path / "seen").read_text().split()
    assert set(seen) == {",".join(card.partition(":")[2] for card in held)}
