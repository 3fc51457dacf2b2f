"""Recommendations with methods: exports, plot, the view in a notebook."""

from pathlib import Path

import pytest

from batchwright import Recommendation
from batchwright.errors import ExportError, SpecError
from batchwright.exports.registry import TARGETS, export
from batchwright.planning.accumulation import balanced_plan
from batchwright.schemas.base import Document
from batchwright.schemas.recommendation import Advice
from tests.support import factories

FOUND = factories.recommendation()


def test_every_method_exports_to_its_target() -> None:
    """``to_x`` is the export to target ``x``."""
    methods = [name for name in dir(Recommendation) if name.startswith("to_")]
    assert len(methods) >= 8
    for name in methods:
        target = name.removeprefix("to_").replace("_", "-")
        assert getattr(Recommendation.of(FOUND), name)() == export(FOUND, target)


def test_an_option_reaches_the_export() -> None:
    """Options are fields of ``ExportOptions``."""
    assert "pretrain.py" in Recommendation.of(FOUND).to_slurm(script="pretrain.py").files[0].content


def test_a_wrong_option_is_named() -> None:
    """An unknown option and an unknown target are errors that name them."""
    with pytest.raises(SpecError, match="scrpt"):
        Recommendation.of(FOUND).to_slurm(scrpt="pretrain.py")
    with pytest.raises(ExportError, match=r"'slrum'.*'slurm'"):
        Recommendation.of(FOUND).export("slrum")


def test_all_targets_can_be_exported_to() -> None:
    """Those without a method of their own by name."""
    for name in TARGETS:
        assert Recommendation.of(FOUND).export(name).format == name


def test_a_notebook_shows_the_answer_first() -> None:
    """Then the proof; a user's text is escaped."""
    device = FOUND.device.model_copy(update={"name": "<script>alert(1)</script>"})
    shown = Recommendation.of(FOUND.model_copy(update={"device": device}))._repr_html_()
    assert shown.startswith("<div><b>Train with 4 + 3 + 3 = 10 samples per update, exactly as requested</b>")
    assert "a micro-batch of 4 fits" in shown
    assert "&lt;script&gt;" in shown
    assert "<script" not in shown


def test_a_printed_recommendation_is_ten_lines() -> None:
    """The answer first, and each line as wide as a terminal; of warnings the codes."""
    warnings = tuple(Advice(code=f"code-{place}", message="words " * 50) for place in range(9))
    lines = str(Recommendation.of(FOUND.model_copy(update={"warnings": warnings}))).splitlines()
    assert lines[0].startswith("Train with 4 + 3 + 3 = 10 samples")
    assert len(lines) <= 10
    assert max(map(len, lines)) <= 120
    assert lines[-1].startswith("9 warnings: code-0, code-1")


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        (FOUND.plan, "4 + 3 + 3 = 10 samples per update"),
        (Recommendation.of(FOUND).to_slurm(), "#SBATCH --requeue"),
        (balanced_plan(1000, 3, 7), "1 rank x (46 x 7 + 2 x 6) and 2 ranks x (45 x 7 + 3 x 6) = 1,000 samples"),
        (FOUND.evidence, "<th"),
    ],
)
def test_every_document_has_a_view(shown: Document, words: str) -> None:
    """With its answer as the heading, and tables of what it lists."""
    assert words in shown._repr_html_()


def test_the_plot_has_a_picture() -> None:
    """Every fit is a point of it: an exported notebook runs no script."""
    figure = Recommendation.of(FOUND).plot()
    points = sum(len(trace.x) for trace in figure.data if trace.mode == "markers")
    picture = figure.to_svg()
    assert picture.count("<circle") == points > 0
    assert "Peak memory against micro-batch" in picture


def test_the_plot_has_every_fit() -> None:
    """Each fit is a point at its size."""
    figure = Recommendation.of(FOUND).plot()
    sizes = {size for trace in figure.data if trace.mode == "markers" for size in trace.x}
    fits = {probe.micro_batch_size for probe in FOUND.evidence.probes if probe.outcome == "FIT"}
    assert fits
    assert sizes >= fits


def test_a_file_is_loaded(tmp_path: Path) -> None:
    """A recommendation that the command line wrote is loaded with the methods."""
    file = tmp_path / "recommendation.json"
    file.write_text(FOUND.model_dump_json())
    assert Recommendation.load(file).model_dump() == FOUND.model_dump()
    with pytest.raises(SpecError):
        Recommendation.load(tmp_path / "missing.json")
