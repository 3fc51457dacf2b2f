"""A recommendation with methods: its exports, its plot, its view in a notebook. No torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from batchwright.cli.display import facts_of, rows_of
from batchwright.exports.base import Export, ExportOptions
from batchwright.html_view import html_view
from batchwright.schemas import recommendation
from batchwright.schemas.base import load_document, parse_document
from batchwright.units import counted

if TYPE_CHECKING:
    from batchwright.plots import MemoryFigure

_WIDTH = 100
"""Columns of a fact of a printed recommendation."""
_NAME_WIDTH = 16
_MAIN_FACTS = ("reason", "largest", "memory", "gain", "device", "proof", "plan proof", "took")
"""Facts that are printed, and shown unfolded in a notebook."""


def _exporting(target: str, result: str) -> Callable[..., Export]:
    """Make the method that exports to a target."""

    def export(self: Recommendation, **options: Any) -> Export:  # noqa: ANN401 - as for export
        return self.export(target, **options)

    export.__doc__ = f"Export as {result}. Arguments and errors are those of ``export``."
    return export


class Recommendation(recommendation.Recommendation):
    """The durable result of a tuning: plan, proof and evidence. Its fields are those of the document."""

    @classmethod
    def of(cls, document: recommendation.Recommendation) -> Recommendation:
        """Give a document of the service or of a tuning these methods."""
        return cls.model_construct(**dict(document))

    @classmethod
    def load(cls, path: Path | str) -> Recommendation:
        """Read the file that ``batchwright tune --output`` wrote.

        Raises:
            SpecError: when the file is missing, or is no recommendation.
        """
        return load_document(cls, Path(path), "recommendation")

    def export(self, target: str, *, version: str | None = None, **options: Any) -> Export:  # noqa: ANN401 - fields of ExportOptions, which checks them
        """Export to a framework or a launcher: files that it reads as they are.

        Args:
            target: one of those that ``batchwright formats`` lists, such as ``slurm``.
            version: one of the target's versions; its newest when left out.
            options: fields of ``batchwright.exports.base.ExportOptions``, such as ``script`` or ``queue``.

        Raises:
            SpecError: when an option is wrong, naming it.
            ExportError: when the target is unknown, nothing fits, or the target would change the effective batch.
        """
        from batchwright.exports.registry import export  # noqa: PLC0415 - every target, which importing the SDK need not load

        return export(self, target, version=version, options=parse_document(ExportOptions, options, "options"))

    to_pytorch: ClassVar[Callable[..., Export]] = _exporting("pytorch", "a training program of PyTorch alone")
    to_hugging_face: ClassVar[Callable[..., Export]] = _exporting(
        "hugging-face", "``TrainingArguments`` of transformers"
    )
    to_accelerate: ClassVar[Callable[..., Export]] = _exporting("accelerate", "a configuration of Accelerate")
    to_lightning: ClassVar[Callable[..., Export]] = _exporting("lightning", "arguments of Lightning's ``Trainer``")
    to_deepspeed: ClassVar[Callable[..., Export]] = _exporting("deepspeed", "a configuration of DeepSpeed")
    to_megatron: ClassVar[Callable[..., Export]] = _exporting("megatron", "command-line arguments of Megatron-LM")
    to_torchtitan: ClassVar[Callable[..., Export]] = _exporting("torchtitan", "a configuration of torchtitan")
    to_slurm: ClassVar[Callable[..., Export]] = _exporting("slurm", "a batch script of Slurm")
    to_kubernetes: ClassVar[Callable[..., Export]] = _exporting("kubernetes", "a Job of Kubernetes")

    def plot(self) -> MemoryFigure:
        """Plot the peak of every probe against its micro-batch size, with the limit: interactive, and as a picture."""
        from batchwright.plots import memory_figure  # noqa: PLC0415 - plots are an extra

        return memory_figure(self)

    @override
    def __str__(self) -> str:
        """The recommendation in ten lines: what to train with, the proof, and where the rest is."""
        facts = {name: value for name, value in facts_of(self) if isinstance(value, str)}
        lines = [f"{name:<{_NAME_WIDTH}}{shorten(facts[name], _WIDTH)}" for name in _MAIN_FACTS if name in facts]
        codes = ", ".join(dict.fromkeys(warning.code for warning in self.warnings))
        warned = [f"{counted(len(self.warnings), 'warning')}: {codes}"] if codes else []
        return "\n".join([shorten(self.headline, _WIDTH + _NAME_WIDTH), *lines, *warned])

    @override
    def _repr_html_(self) -> str:
        """The answer and its proof, with the other facts that ``batchwright tune`` prints folded."""
        facts = facts_of(self)
        main = {name: value for name, value in facts if name in _MAIN_FACTS}
        warned = [{"warning": warning.code, "": warning.message} for warning in self.warnings]
        others = [(name, rows_of(value)) for name, value in facts if name not in {*main, "plan", "warning"}]
        return html_view(self.headline, {**main, "warnings": warned, "more": dict(others)})
