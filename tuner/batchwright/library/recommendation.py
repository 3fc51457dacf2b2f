"""A recommendation with methods: its exports, its plot, its view in a notebook. No torch."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from batchwright.exports.base import Export, ExportOptions
from batchwright.schemas import recommendation
from batchwright.schemas.base import load_document, parse_document

if TYPE_CHECKING:
    import plotly.graph_objects as go

_PAGE = '<pre style="white-space:pre;overflow-x:auto;line-height:normal;font-family:monospace">{code}</pre>'
_WIDTH = 110
"""Columns of a recommendation in a notebook."""


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

    def plot(self) -> go.Figure:
        """Plot the peak of every probe against its micro-batch size, with the limit, as an interactive figure."""
        from batchwright.plots import memory_figure  # noqa: PLC0415 - plots are an extra

        return memory_figure(self)

    def _repr_html_(self) -> str:
        """The panel that ``batchwright tune`` prints, for a notebook."""
        from rich.console import Console  # noqa: PLC0415 - only a notebook needs it

        from batchwright.cli.display import recommendation_panel  # noqa: PLC0415 - as above

        console = Console(record=True, file=io.StringIO(), width=_WIDTH, force_jupyter=False)
        console.print(recommendation_panel(self))
        return console.export_html(inline_styles=True, code_format=_PAGE)
