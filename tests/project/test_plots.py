"""The two pictures of a run: files that open offline and show what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchwright.plots import fitted_line, plot_loss, plot_memory
from batchwright.schemas.recommendation import Evidence, Proof, Recommendation
from batchwright.schemas.results import Outcome
from batchwright.schemas.training import TrainingProgress
from tests.support.factories import probe_result, recommendation

MIB = 1024**2


def evidence(*sizes: int, largest: int) -> Evidence:
    """Probes of these sizes on a device that holds ``largest`` at 10 MiB a sample above 100."""
    probes = tuple(
        probe_result(size, Outcome.FIT, (100 + 10 * size) * MIB, limit_bytes=500 * MIB)
        if size <= largest
        else probe_result(size, Outcome.OOM, None, limit_bytes=500 * MIB)
        for size in sizes
    )
    return Evidence(probes=probes, proof=Proof(fits=largest, stopped_by="oom", statement="for a test"))


def found(*sizes: int, largest: int) -> Recommendation:
    """A recommendation from such evidence."""
    if largest:
        return recommendation(largest_micro_batch_size=largest, evidence=evidence(*sizes, largest=largest))
    nothing = {"plan": None, "feasible": False, "largest_micro_batch_size": None}
    return recommendation().model_copy(update={**nothing, "evidence": evidence(*sizes, largest=0)})


def test_the_line_goes_through_the_two_largest_fits() -> None:
    """10 MiB a sample above 100 MiB."""
    line = fitted_line(evidence(1, 20, 40, 41, largest=40).probes)
    assert line is not None
    assert line.slope == pytest.approx(10 * MIB)
    assert line.intercept == pytest.approx(100 * MIB)
    assert fitted_line(evidence(1, largest=1).probes) is None


@pytest.mark.parametrize("sizes", [(1, 20, 40, 41), (1,), (1, 500)])
def test_memory_pictures_are_written(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """PNG and self-contained HTML, for much evidence and for little."""
    png, page = plot_memory(found(*sizes, largest=40), tmp_path)
    assert png.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "limit less margin" in text
    assert "<script src=" not in text


def test_an_infeasible_answer_has_a_picture_too(tmp_path: Path) -> None:
    """With no fit there is no line, and nothing breaks."""
    png, _ = plot_memory(found(1, largest=0), tmp_path)
    assert png.exists()


def test_the_loss_is_drawn_without_what_is_not_finite(tmp_path: Path) -> None:
    """A skipped update leaves a gap, not an error."""
    updates = [
        TrainingProgress(
            update=number, updates=3, loss=loss, terms={}, learning_rate=0.1, gradient_norm=1.0, skipped=loss is None,
            samples=4, micro_batch_sizes=(4,), samples_seen=4 * number, epoch=0, seconds=0.1, peak_bytes=None,
        )
        for number, loss in enumerate((3.0, None, 2.0), start=1)
    ]  # fmt: skip
    png, page = plot_loss(updates, tmp_path)
    assert png.exists()
    assert "Loss over 3 optimizer updates" in page.read_text()
