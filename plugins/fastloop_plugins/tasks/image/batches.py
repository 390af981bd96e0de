"""Inputs of a model from images: random changes that depend only on seed, epoch and image, and batches."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Generator, Tensor
from torch.utils.data import Dataset, default_collate

from fastloop import Batch
from fastloop.problem import clause
from fastloop_plugins.tasks.image.reading import header_size, read_image

if TYPE_CHECKING:
    from fastloop_plugins.tasks.image.data import Augment, ImageFiles
    from fastloop_plugins.tasks.image.processors import ImageProcessor
    from fastloop_plugins.tasks.shared.losses import ClassLoss

CROP_ATTEMPTS = 10
"""Random parts to draw until one lies within the image, as in torchvision."""


class Transform:
    """Makes inputs of the model, (3, height, width) float32, from images: as in evaluation, or with ``augment``, as in
    training. Both have the size, the values and the channels that the processor gives them.
    """

    def __init__(self, processor: ImageProcessor, augment: Augment | None = None) -> None:
        self.processor = processor
        self.augment = augment

    def read(self, path: Path, max_pixels: int, random: Generator) -> Tensor:
        """The input that the image of a file makes.

        Args:
            max_pixels: ``data.max_pixels``.

        Raises:
            ValueError: See ``read_image``.
        """
        augment = self.augment
        shorter_side = self.processor.shorter_side
        size = None
        if augment is not None and augment.crop and augment.reduced_decoding:
            size = header_size(path)
        if augment is None or size is None:
            return self(read_image(path, max_pixels, shorter_side), random)
        part = self._random_part(size, augment, random)
        image = read_image(path, max_pixels, shorter_side, self._sufficient_size(size, part))
        return self._flip(self._resize_part(image, size, part), augment, random)

    def __call__(self, image: Image.Image, random: Generator) -> Tensor:
        augment = self.augment
        if augment is None:
            return self.processor(image)
        if augment.crop:
            inputs = self._resize_part(image, image.size, self._random_part(image.size, augment, random))
        else:
            inputs = self.processor(image)
        return self._flip(inputs, augment, random)

    def _sufficient_size(self, size: tuple[int, int], part: tuple[int, int, int, int]) -> tuple[int, int]:
        """Width and height of the whole image at which a part has as many pixels as the input.

        If the input has 224 x 224 pixels, a part of 1000 x 500 in an image of 4000 x 3000 has them at 896 x 1344.
        """
        left, top, right, bottom = part
        width = math.ceil(size[0] * self.processor.width / (right - left))
        height = math.ceil(size[1] * self.processor.height / (bottom - top))
        return width, height

    def _resize_part(self, image: Image.Image, size: tuple[int, int], part: tuple[int, int, int, int]) -> Tensor:
        """The input that a part of an image makes.

        Args:
            size: Width and height of the image in which ``part`` lies. The decoded image may be smaller.
        """
        processor = self.processor
        image = processor.opaque(image)
        input_size = (processor.width, processor.height)
        if image.size == size:
            return processor.table(image.crop(part).resize(input_size, processor.resample))
        horizontal = image.width / size[0]
        vertical = image.height / size[1]
        left, top, right, bottom = part
        box = (
            left * horizontal,
            top * vertical,
            min(right * horizontal, image.width),
            min(bottom * vertical, image.height),
        )
        return processor.table(image.resize(input_size, processor.resample, box))

    @staticmethod
    def _flip(inputs: Tensor, augment: Augment, random: Generator) -> Tensor:
        return inputs.flip(2) if torch.rand((), generator=random) < augment.flip else inputs

    def _random_part(self, size: tuple[int, int], augment: Augment, random: Generator) -> tuple[int, int, int, int]:
        """A part of a random area and shape of an image with this width and height: left, top, right, bottom in pixels.

        Method: Szegedy et al., "Going Deeper with Convolutions", 2015, as in torchvision's ``RandomResizedCrop``.
        """

        def uniform(low: float, high: float) -> float:
            return low + (high - low) * float(torch.rand((), generator=random, dtype=torch.float64))

        width, height = size
        for _ in range(CROP_ATTEMPTS):
            area = width * height * uniform(*augment.scale)
            ratio = math.exp(uniform(*map(math.log, augment.ratio)))
            w = round(math.sqrt(area * ratio))
            h = round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                left = int(uniform(0, width - w + 1))
                top = int(uniform(0, height - h + 1))
                return left, top, left + w, top + h
        ratio = min(max(width / height, augment.ratio[0]), augment.ratio[1])
        w = min(width, max(1, round(height * ratio)))
        h = min(height, max(1, round(width / ratio)))
        left = (width - w) // 2
        top = (height - h) // 2
        return left, top, left + w, top + h


def new_epoch() -> Tensor:
    """The number of an epoch, 0: (1,) int64 in shared memory."""
    return torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-any-return, no-untyped-call]


class ImageDataset(Dataset[tuple[Any, ...]]):
    """Samples ``(image, class)`` of a split, decoded when they are read.

    The random changes of an image are a function of seed, epoch and index. They depend neither on the worker or the
    process that reads the image, nor on the images read before. They use no global generator, so training's random
    numbers do not depend on them.

    Args:
        transform: Makes the inputs of a sample.
        training: Makes them where the samples are trained on: see ``as_split``; None: ``transform`` does.
        epoch: Counts the epochs, (1,) int64 in shared memory, so that workers see changes; None: a new one.
        named: Whether samples are ``(image, class, path)``.

    Attributes:
        labels: The class of each sample.
    """

    def __init__(
        self,
        files: ImageFiles,
        transform: Transform,
        training: Transform | None = None,
        seed: int = 0,
        epoch: Tensor | None = None,
        named: bool = False,
    ) -> None:
        self.files = files
        self.transform = transform
        self.plain = transform
        self.training = training or transform
        self.seed = seed
        self.named = named
        self.labels = files.labels
        self.epoch: Tensor = new_epoch() if epoch is None else epoch

    def as_split(self, split: str) -> ImageDataset:
        """See ``DatasetProtocol``."""
        dataset = copy.copy(self)
        dataset.transform = self.training if split == "train" else self.plain
        return dataset

    def place_of(self, index: int) -> str:
        """The path of an image."""
        return str(self.files.root / self.files.names[index])

    def __len__(self) -> int:
        return len(self.files.names)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        name = self.files.names[index]
        label = self.files.labels[index]
        random = Generator().manual_seed(hash((self.seed, int(self.epoch), index)) % 2**32)
        try:
            image = self.transform.read(self.files.root / name, self.files.max_pixels, random)
        except ValueError as error:
            raise ValueError(f"{clause(error)}.{self.files.advice}") from None
        return (image, label, name) if self.named else (image, label)

    def fingerprint(self) -> str:
        """See ``DatasetProtocol``."""
        return self.files.fingerprint()


class Collator:
    """Stacks samples to ``(images, classes)``: (N, 3, height, width) float32 and (N,) int64; with paths, also a list of
    them."""

    def __init__(self, loss: ClassLoss) -> None:
        self.loss = loss

    def __call__(self, samples: list[tuple[Any, ...]]) -> Any:
        inputs = tuple(default_collate(samples))
        if self.loss.weights is None:
            return inputs
        return Batch(inputs, loss_weight=self.loss.weight_of(inputs[1]))
