"""Training over two virtual cards: a process with its context on each."""

import pytest

from batchwright.schemas.training import TrainingResult
from tests.support.service.processes import wait_until
from tests.virtual_gpu.conftest import Host, StartHost
from tests.virtual_gpu.test_main_path import SMALL

pytestmark = pytest.mark.virtual_gpu


def processes_on_cards(host: Host) -> tuple[int, ...]:
    """The number of processes that hold memory of each card."""
    return tuple(len(host.session.processes(gpu)) for gpu in range(len(host.session.host.gpus)))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_train_on_a_card_each(start_host: StartHost, strategy: str) -> None:
    """The tuning plans for both, and the run has a process on each card, and none afterwards."""
    host = start_host("T4", "T4")
    spec = SMALL.model_copy(
        update={"parallelism": SMALL.parallelism.model_copy(update={"world_size": 2, "strategy": strategy})}
    )
    found = host.tuned(spec, 50, "--max-micro-batch-size", "10", "-o", host.folder / "rec.json")
    assert found.plan is not None
    assert [sum(sizes) for sizes in found.plan.micro_batch_sizes] == [25, 25]
    options = ("--recommendation", host.folder / "rec.json", "--output-dir", host.folder / "run", "--updates", "3")
    seen: list[tuple[int, ...]] = []

    def has_ended() -> bool:
        seen.append(processes_on_cards(host))
        return process.poll() is not None

    with host.started("train", host.written(spec), *options, "--json") as process:
        wait_until(has_ended)
        output, errors = process.communicate()
    assert process.returncode == 0, output + errors
    assert TrainingResult.model_validate_json(output).samples_seen == 150
    assert max(seen) == (1, 1)
    assert processes_on_cards(host) == (0, 0)
