"""A folder of images, one folder per class."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from batchwright.schemas.dataset.data_spec import ImagesData
from batchwright.schemas.workload import ReferenceModel, ResNet, TransformersModel, WorkloadSpec
from batchwright.training.data.base import TrainingData, class_numbers, data_problem, import_optional
from batchwright.training.data.files import DataFolders
from batchwright.training.data.foreign import ForeignFailure, foreign_errors, try_in_child
from batchwright.training.data.source import DataSource
from batchwright.training.micro_batches.rng_state import preserved_random_state
from batchwright.workloads.base import Workload

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""Pillow's name for images by number of channels."""
_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow's names of the formats that are read, for any suffix: some other formats start programs or refer to files."""
_SECONDS = 60.0
"""Time limit of decoding the first image."""
_HALF_RANGE = 127.5
"""Bytes divided by this, less one: scaled to 0 to 1, then normalised with mean 0.5 and standard deviation 0.5."""


@dataclass(frozen=True)
class ImageSamples:
    """Images, decoded on access."""

    files: np.ndarray
    """Paths as bytes of one length: a list of as many objects would be copied into each worker."""
    labels: Tensor
    """Classes of the images, as numbers."""
    key: str
    """Key of the images in a batch."""
    shape: tuple[int, int, int]
    """Channels, height, width."""
    folders: DataFolders
    """Folders that may be read."""

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self.files):
            raise IndexError(index)
        return {self.key: self._decoded(self.place(index)), "labels": self.labels[index].clone()}

    def place(self, index: int) -> str:
        """Path of the image."""
        return os.fsdecode(self.files[index])

    def _decoded(self, path: str) -> Tensor:
        image = import_optional("PIL.Image", "data.kind", "images")
        channels, height, width = self.shape
        with (
            foreign_errors("data.path", lambda: path),
            self.folders.open("data.path", path) as file,
            image.open(file, formats=_FORMATS) as opened,
        ):
            pixels = opened.convert(_MODES[channels]).resize((width, height), image.Resampling.BILINEAR)
        values = torch.from_numpy(np.array(pixels, dtype=np.float32)).reshape(height, width, channels)
        return values.permute(2, 0, 1).contiguous() / _HALF_RANGE - 1.0


class ImagesSource(DataSource[ImagesData]):
    """Images in one folder per class."""

    def files(self) -> set[Path]:
        """Return the real paths of the images."""
        return {file.resolve() for file in _image_files(self.data.path, self.folders)}

    def _read(self, spec: WorkloadSpec, workload: Workload) -> TrainingData:
        """Use the images of a folder as samples of an image classifier.

        Raises:
            SpecError: when there are no images, more classes than the model has, or when the model takes none.
        """
        data, folders = self.data, self.folders
        key, classes = _images_of(data, spec, workload)
        with preserved_random_state():
            _, channels, height, width = workload.make_batch(1)[key].shape
        if channels not in _MODES:
            raise data_problem(
                "data.kind", f"an image has {', '.join(map(str, _MODES))} channels, the model {channels}"
            )
        import_optional("PIL.Image", "data.kind", data.kind)
        files = _image_files(data.path, folders)
        names = class_numbers({file.parent.name for file in files}, getattr(workload, "config", None))
        if len(names) > classes:
            raise data_problem("data.path", f"has {len(names)} folders, one per class, and the model {classes} classes")
        labels = torch.tensor([names[file.parent.name] for file in files])
        paths = np.array([os.fsencode(file.absolute()) for file in files])
        samples = ImageSamples(paths, labels, key, (channels, height, width), folders)
        try:
            try_in_child(partial(samples.__getitem__, 0), _SECONDS)
        except ForeignFailure as failure:
            raise data_problem("data.path", f"cannot be read: {failure}", files[0]) from None
        return TrainingData(samples, default_collate, classes=tuple(names))


def _images_of(data: ImagesData, spec: WorkloadSpec, workload: Any) -> tuple[str, int]:  # noqa: ANN401 - one of ours
    """Key of the images in the model's batch, and its number of classes."""
    model = spec.model
    if isinstance(model, ReferenceModel) and isinstance(model.architecture, ResNet):
        return "inputs", model.architecture.classes
    if isinstance(model, TransformersModel) and model.task == "image-classification":
        return "pixel_values", int(workload.config.num_labels)
    message = "`images` trains the reference `resnet` and transformers image-classification; use `arrays` or `workload`"
    raise data_problem("data.kind", message, data.kind)


def _image_files(folder: str, folders: DataFolders) -> list[Path]:
    """List the images in the classes' folders. A link belongs to the class of its own folder."""
    files = folders.files_in_subfolders("data.path", folder, _SUFFIXES)
    if not files:
        message = f"holds no folders with images ({', '.join(sorted(_SUFFIXES))}), one folder per class"
        raise data_problem("data.path", message, folder)
    return files
