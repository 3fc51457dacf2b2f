"""What a training job reads, in which order, and how it becomes batches."""

from __future__ import annotations

from tuner.training.data.base import TrainingData
from tuner.training.data.build import build_data
from tuner.training.data.files import DataFolders, matching_files
from tuner.training.data.loading import WORKER_BYTES, Part, Window, WindowLoader
from tuner.training.data.order import epoch_order
from tuner.training.data.sources.own import SyntheticSamples, join_batches

__all__ = [
    "WORKER_BYTES",
    "DataFolders",
    "Part",
    "SyntheticSamples",
    "TrainingData",
    "Window",
    "WindowLoader",
    "build_data",
    "epoch_order",
    "join_batches",
    "matching_files",
]
