"""Commands on a CUDA device: their answer against fresh runs, and OOMs that a program survives."""

import pytest

from batchwright.schemas.results import Outcome
from tests.commands.program_list import Program, misbehaving
from tests.commands.trials import probe, tune_program

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # other versions deprecate other things

MIB = 1024**2
CARD = "cuda:0"
LIMIT = 1536 * MIB
"""The context of any card, and some 60 samples of 12 MiB."""


def outcome(program: Program, size: int) -> Outcome:
    """That of one probe under the limit, in fresh processes."""
    return probe(program, size, LIMIT, device=CARD).outcome


def test_the_answer_for_a_command_is_that_of_fresh_runs() -> None:
    """The allocator's limit holds in the command's process as soon as it uses the card."""
    program = misbehaving("well-behaved")

    found = tune_program(program, LIMIT, device=CARD)

    size = found.largest_micro_batch_size
    assert size is not None
    assert (outcome(program, size), outcome(program, size + 1)) == (Outcome.FIT, Outcome.OOM)
    (last,) = [it for it in found.evidence.probes if it.micro_batch_size == size and not it.verifies_plan]
    assert last.peak_reserved_bytes is not None
    assert last.peak_reserved_bytes <= LIMIT
    assert "as planned" in (found.evidence.plan_proof or "")


def test_an_oom_on_the_card_that_the_program_survives_is_no_fit() -> None:
    """The allocator's observer reports it, also where the program catches the error."""
    program = misbehaving("swallows-oom")

    assert outcome(program, 400) is Outcome.OOM
    assert outcome(program, 20) is Outcome.FIT


def test_the_limit_holds_behind_a_shell_and_another_interpreter() -> None:
    """The limit is set in the process that trains."""
    assert outcome(misbehaving("starts-a-shell"), 400) is Outcome.OOM
    assert outcome(misbehaving("executes-another-interpreter"), 400) is Outcome.OOM
