"""The cards that a command sees, by the ranks that it starts and the devices that it holds."""

from pathlib import Path

import pytest

from batchwright.commands.environment import cards_of_ranks, injected_environment
from batchwright.planning.search_space import rank_devices
from batchwright.schemas.requests import TuningRequest
from tests.support.factories import CPU, CUDA

SPEC = {"model": {"kind": "command", "argv": ["train", "{micro_batch_size}"]}, "parallelism": {"world_size": 2}}


@pytest.mark.parametrize(
    ("ranks", "held", "seen"),
    [
        pytest.param(1, (), ("cuda:0",), id="one rank sees its device alone"),
        pytest.param(2, ("cuda:3", "cuda:1"), ("cuda:3", "cuda:1"), id="a card for each rank"),
        pytest.param(2, ("cuda:3", "cuda:1", "cuda:2"), ("cuda:3", "cuda:1"), id="no more cards than ranks"),
        pytest.param(2, ("cuda:0",), (), id="all cards of a host that is left to the command"),
    ],
)
def test_a_command_sees_a_card_for_each_rank(ranks: int, held: tuple[str, ...], seen: tuple[str, ...]) -> None:
    """In the order of the ranks, as launchers number them."""
    assert cards_of_ranks(CUDA, ranks, held) == seen
    assert cards_of_ranks(CPU, ranks, ("cpu",) * ranks) == ()


@pytest.mark.parametrize(("outside", "inside"), [({}, "3,1"), ({"CUDA_VISIBLE_DEVICES": "4,5,6,GPU-7"}, "GPU-7,5")])
def test_the_other_cards_are_hidden(outside: dict[str, str], inside: str, tmp_path: Path) -> None:
    """Also where this process sees a part of the host's cards itself."""
    found = injected_environment(outside, "cuda", tmp_path, ("cuda:3", "cuda:1"))
    assert found["CUDA_VISIBLE_DEVICES"] == inside
    everything = injected_environment(outside, "cuda", tmp_path, ())
    assert everything.get("CUDA_VISIBLE_DEVICES") == outside.get("CUDA_VISIBLE_DEVICES")


def test_the_probes_of_a_command_run_on_the_held_cards() -> None:
    """On the CPU the ranks share the host, whose memory each rank's budget is a part of."""
    request = TuningRequest.model_validate({"spec": SPEC, "effective_batch_size": 8})
    assert rank_devices(request, CUDA, 1, ("cuda:5", "cuda:6")) == ("cuda:0", "cuda:5")
    assert rank_devices(request, CUDA, 1) == ()
    assert rank_devices(request, CPU, 1, ("cpu",)) == ()
