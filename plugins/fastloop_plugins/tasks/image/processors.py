"""How an image becomes the input of a model: by the image processor or the transform of the model's own library.

transformers makes the inputs of its models: ``AutoImageProcessor`` picks the class and its backend, torchvision if that
is installed, else Pillow. We do not choose the backend: transformers' pipeline of the exported model makes the same
choice, so on each machine it computes what fastloop evaluated. Between the two backends, resized values of 0 to 255
differ by about 1. torchvision and timm make the inputs of their models by their own transforms.

Training resizes random parts itself. ``ValueTable`` then does the rest as the library does.
"""

from __future__ import annotations

import json
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fastloop import RecipeError
from fastloop.problem import clause
from fastloop_plugins.models.hub import FAILURES, quiet
from fastloop_plugins.tasks.image.data import InputChanges, InputFormat

SETTINGS = "preprocessor_config.json"
"""transformers' file of an image processor."""
SIZE_CHANGES = ("do_resize", "do_center_crop", "do_pad", "do_thumbnail", "do_align_long_axis", "do_crop_margin")
"""Options of transformers' image processors that change the size of an image."""
SHAPES = ((64, 64), (96, 48), (48, 96))
"""Width and height of a square, a wide and a tall image: a processor makes inputs of one size from them."""
RAMP_SIDE = 16
"""Pixels of a side of the image that has all 256 values of a channel."""
COLOR = (12, 130, 250)
"""Red, green and blue of an image that has one color in any size."""
TIMM = "timm_wrapper"
"""The ``model_type`` of models of timm in transformers, whose config.json has the settings of the transform."""


class ValueTable:
    """Turns the pixels of an image into the values of a model's input, without resizing: (3, height, width) float32.

    After they have resized an image, image processors compute each value of an input from one channel of one pixel:
    they scale, normalize, and reorder channels. So a table of 256 values a channel, which the processor has made,
    gives exactly its results. It takes a fifth of the time of transformers' processors.

    Args:
        compute: The image processor, without changes of the size.

    Raises:
        ValueError: A value of its result depends on several channels, or on none.
    """

    def __init__(self, compute: Callable[[Image.Image], Tensor]) -> None:
        self.channels: dict[int, int] = {}
        self.values = np.zeros((3, 256), np.float32)
        for channel in range(3):
            pixels = np.zeros((RAMP_SIDE, RAMP_SIDE, 3), np.uint8)
            pixels[..., channel] = np.arange(256).reshape(RAMP_SIDE, RAMP_SIDE)
            results = compute(Image.fromarray(pixels)).reshape(-1, 256).numpy()
            for output, values in enumerate(results):
                if values.min() < values.max():
                    if output in self.channels:
                        raise ValueError("it mixes the channels of an image")
                    self.channels[output] = channel
                    self.values[output] = values
        if sorted(self.channels) != [0, 1, 2]:
            raise ValueError(f"its results have the channels {sorted(self.channels)}, expected three")

    def __call__(self, image: Image.Image) -> Tensor:
        pixels = np.asarray(image)
        inputs = np.empty((3, *pixels.shape[:2]), np.float32)
        for output, channel in self.channels.items():
            np.take(self.values[output], pixels[..., channel], out=inputs[output], mode="clip")
        return torch.from_numpy(inputs)

    def normalizes(self, mean: Sequence[float], std: Sequence[float]) -> bool:
        """Whether it scales values to 0 to 1, subtracts the mean of red, green and blue, and divides by their
        deviation."""
        scaled = np.arange(256) / 255
        for output, channel in self.channels.items():
            if not np.allclose(self.values[output], (scaled - mean[channel]) / std[channel], atol=1e-5):
                return False
        return True


class ImageProcessor(ABC):
    """Makes the input of a model, (3, ``height``, ``width``) float32, from an image in red, green and blue.

    Args:
        settings: JSON values, from which the library makes the processor again.
        resample: How training resizes random parts: an interpolation of Pillow.

    Attributes:
        table: Makes the same values from an image that has the size already.
        paints_white: Whether it paints the transparent color of an image white, as transformers' CLIPImageProcessor.
        shorter_side: Pixels of an image's shorter side after resizing, before a part is cropped; 1: an image is not
            larger than the input.

    Raises:
        ValueError: The processor does not make one such input of each image.
    """

    def __init__(self, settings: Mapping[str, Any], resample: int) -> None:
        self.settings = dict(settings)
        self.resample = Image.Resampling(resample)
        self.height, self.width = self._find_size()
        self.table = self._make_table()
        self.paints_white = self._paints_white()
        square = self._kept_share(256, 256)
        wide = self._kept_share(512, 256)
        crops_sides = wide < 0.75 * square
        self.shorter_side = round(self.width / square) if crops_sides else 1

    def _find_size(self) -> tuple[int, int]:
        """Height and width of the inputs."""
        shapes = [tuple(self(Image.new("RGB", size)).shape) for size in SHAPES]
        if len(set(shapes)) > 1 or len(shapes[0]) != 3 or shapes[0][0] != 3:
            raise ValueError(
                f"{self.name} makes inputs of the shapes {', '.join(map(str, shapes))} from a square, a wide and a "
                f"tall image, expected one shape (3, height, width): set do_center_crop and crop_size in {SETTINGS}"
            )
        return shapes[0][1], shapes[0][2]

    def _make_table(self) -> ValueTable:
        try:
            table = ValueTable(self.without_resizing)
        except ValueError as error:
            raise ValueError(f"{self.name} cannot be used: {error}") from None
        image = Image.new("RGB", (self.width, self.height), COLOR)
        center = (slice(None), self.height // 2, self.width // 2)  # a larger crop than the size has a black frame
        if not torch.equal(self(image)[center], table(image)[center]):
            raise ValueError(f"{self.name} cannot be used: it changes more than the size, the values and the channels")
        return table

    def _paints_white(self) -> bool:
        size = (RAMP_SIDE, RAMP_SIDE)
        transparent = Image.new("RGB", size, "black")
        transparent.info["transparency"] = (0, 0, 0)
        white = Image.new("RGB", size, "white")
        return torch.equal(self.without_resizing(transparent), self.without_resizing(white))

    def opaque(self, image: Image.Image) -> Image.Image:
        """An image in red, green and blue, for ``table``, whose transparent color is white if the processor paints it
        white."""
        if not self.paints_white or "transparency" not in image.info:
            return image
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")

    @property
    def name(self) -> str:
        """The processor in messages."""
        return type(self).__name__

    @abstractmethod
    def __call__(self, image: Image.Image) -> Tensor: ...

    @abstractmethod
    def without_resizing(self, image: Image.Image) -> Tensor:
        """The same values of an image of ``RAMP_SIDE`` x ``RAMP_SIDE`` pixels, which keeps its size."""

    @abstractmethod
    def _changed(self, changes: InputChanges) -> ImageProcessor:
        """A processor with other settings."""

    def changed(self, changes: InputChanges, where: str) -> ImageProcessor:
        """A processor that does what the recipe says.

        Args:
            where: The section ``data`` of the recipe, for messages.

        Raises:
            RecipeError: It has rules that the recipe cannot change.
        """
        changed = [key for key, value in asdict(changes).items() if value is not None]
        if not changed:
            return self
        remedy = f"Leave the key out, or change {SETTINGS} in a copy of the model's folder."
        try:
            with quiet():
                processor = self._changed(changes)
        except FAILURES as error:
            keys = ", ".join(changed)
            raise RecipeError(
                f"{self.name} cannot use this: {clause(error)}.",
                code="invalid-value",
                place=f"{where}: {keys}",
                remedy=remedy,
            ) from None
        size = changes.image_size
        if size is not None and (processor.height, processor.width) != (size, size):
            raise RecipeError(
                f"{self.name} would make inputs of {processor.height} x {processor.width} pixels by a rule of its own.",
                code="unsupported-model",
                place=f"{where}.image_size: {size}",
                remedy=remedy,
            )
        if changes.crop_fraction is not None:
            share = processor._kept_share(256, 256)
            if abs(share - changes.crop_fraction) > 0.02 + 1.5 / processor.width:
                raise RecipeError(
                    f"{self.name} would keep {share:.2f} of the shorter side by a rule of its own.",
                    code="unsupported-model",
                    place=f"{where}.crop_fraction: {changes.crop_fraction:g}",
                    remedy=remedy,
                )
        if changes.mean is not None or changes.std is not None:
            mean, std = mean_and_std(changes, self.settings)
            if not processor.table.normalizes(mean, std):
                key = "mean" if changes.mean is not None else "std"
                raise RecipeError(
                    f"{self.name} normalizes by a rule of its own.",
                    code="unsupported-model",
                    place=f"{where}.{key}",
                    remedy=remedy,
                )
        return processor

    def _kept_share(self, width: int, height: int) -> float:
        """The share of an image's width that the input shows, within about 0.01."""
        ramp = np.linspace(0, 255, width).round().astype(np.uint8)
        image = Image.fromarray(np.broadcast_to(ramp[None, :, None], (height, width, 3)).copy())
        row = self(image)[0, self.height // 2].numpy()
        shown = [int(np.abs(self.table.values[0] - value).argmin()) for value in row]
        # The centers of the first and the last pixel are one pixel less apart than the edges: 224 pixels of the input
        # show 223 steps of the ramp, and the 255 steps of a ramp of 256 pixels are 255/256 of its width.
        steps = (max(shown) - min(shown)) / 255 * (width - 1) / width
        return steps * self.width / max(self.width - 1, 1)


def mean_and_std(changes: InputChanges, settings: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Mean and deviation that a recipe sets. One that it leaves out is the processor's, else ImageNet's."""
    default = InputFormat()
    mean = changes.mean or settings.get("image_mean") or settings.get("mean") or default.mean
    std = changes.std or settings.get("image_std") or settings.get("std") or default.std
    return np.broadcast_to(mean, 3).tolist(), np.broadcast_to(std, 3).tolist()


# -- transformers ------------------------------------------------------------------------------------------------------


class TransformersProcessor(ImageProcessor):
    """An image processor of transformers.

    Args:
        processor: As ``AutoImageProcessor.from_pretrained`` has returned it.
    """

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        settings = json.loads(processor.to_json_string())
        super().__init__(settings, settings.get("resample", Image.Resampling.BILINEAR))

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> TransformersProcessor:
        """The processor of a folder with these settings.

        Raises:
            ValueError: transformers has no such processor, or cannot use the settings.
        """
        from transformers import AutoImageProcessor

        auto: Any = AutoImageProcessor
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, SETTINGS).write_text(json.dumps(settings), encoding="utf-8")
            return cls(auto.from_pretrained(folder))

    @classmethod
    def from_format(cls, form: InputFormat) -> TransformersProcessor:
        """A processor for a model that has none."""
        return cls.from_settings(
            {
                "image_processor_type": "CLIPImageProcessor",
                "do_convert_rgb": True,
                "do_resize": True,
                "size": {"shortest_edge": form.resized},
                "resample": int(Image.Resampling[form.interpolation.upper()]),
                "do_center_crop": True,
                "crop_size": {"height": form.image_size, "width": form.image_size},
                "do_rescale": True,
                "rescale_factor": 1 / 255,
                "do_normalize": True,
                "image_mean": list(form.mean),
                "image_std": list(form.std),
            }
        )

    @property
    def name(self) -> str:
        return type(self.processor).__name__

    def __call__(self, image: Image.Image) -> Tensor:
        return self._compute(image)

    def without_resizing(self, image: Image.Image) -> Tensor:
        return self._compute(image, **{name: False for name in SIZE_CHANGES if getattr(self.processor, name, None)})

    def _compute(self, image: Image.Image, **options: bool) -> Tensor:
        outputs = self.processor(image, return_tensors="pt", **options)
        if "pixel_values" not in outputs:
            raise ValueError(f"{self.name} makes {', '.join(outputs)} of an image, expected pixel_values")
        pixels: Tensor = outputs["pixel_values"][0]
        return pixels.float()

    def _changed(self, changes: InputChanges) -> ImageProcessor:
        settings = dict(self.settings)
        height = changes.image_size or self.height
        width = changes.image_size or self.width
        for key in ("size", "crop_size"):
            if settings.get(key):
                settings[key] = self._scaled(settings[key], height / self.height, width / self.width)
        if changes.crop_fraction is not None:
            if "crop_pct" in settings:
                settings["crop_pct"] = changes.crop_fraction
            elif height != width:
                raise ValueError(f"its inputs of {height} x {width} pixels are not square")
            else:
                settings["size"] = {"shortest_edge": round(width / changes.crop_fraction)}
                settings["crop_size"] = {"height": height, "width": width}
                settings["do_center_crop"] = True
        if changes.interpolation is not None:
            settings["resample"] = int(Image.Resampling[changes.interpolation.upper()])
        if changes.mean is not None or changes.std is not None:
            mean, std = mean_and_std(changes, settings)
            settings |= {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
            settings |= {"image_mean": mean, "image_std": std}
        return self.from_settings(settings)

    @staticmethod
    def _scaled(size: Mapping[str, int], height_ratio: float, width_ratio: float) -> dict[str, int]:
        """A size of transformers, such as {"shortest_edge": 256} or {"height": 224, "width": 224}, of other inputs."""
        ratios = {"height": height_ratio, "width": width_ratio}
        edge_ratio = min(height_ratio, width_ratio)
        return {key: round(value * ratios.get(key, edge_ratio)) for key, value in size.items()}

    def save(self, folder: Path) -> None:
        """Write the processor for transformers' ``from_pretrained``."""
        self.processor.save_pretrained(folder)


def find_processor(source: str, config: Any, local: bool) -> ImageProcessor | None:
    """The image processor of a checkpoint of transformers; None: the checkpoint has no file of one.

    Args:
        source: A folder, or an id of the hub.
        config: The checkpoint's configuration.
        local: Do not ask the hub.

    Raises:
        OSError: A file cannot be read.
        ValueError: transformers has no such processor or cannot use its settings, or it makes no inputs of one size.
        ImportError: It needs torchvision or timm.
    """
    from transformers import AutoImageProcessor
    from transformers.models.auto.image_processing_auto import get_image_processor_config

    if config.model_type == TIMM:
        from fastloop_plugins.tasks.image.transforms import TimmProcessor

        return TimmProcessor.from_weights(config.pretrained_cfg)
    if not get_image_processor_config(source, local_files_only=local):
        return None
    auto: Any = AutoImageProcessor
    return TransformersProcessor(auto.from_pretrained(source, local_files_only=local, trust_remote_code=False))
