"""Transforms of torchvision and timm, which make the inputs of their models."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from PIL import Image
from torch import Tensor

from fastloop_plugins.tasks.image.data import InputChanges
from fastloop_plugins.tasks.image.processors import RAMP_SIDE, ImageProcessor, mean_and_std


class TorchvisionProcessor(ImageProcessor):
    """The transform of weights of torchvision.

    Args:
        make: ``weights.transforms``: makes the transform of these weights, with other settings if they are given.
        settings: ``crop_size``, ``resize_size``, ``interpolation``, ``mean`` and ``std`` of that function; those that
            are missing are as in the weights.
    """

    def __init__(self, make: Callable[..., Any], settings: Mapping[str, Any]) -> None:
        self.make = make
        self.transform = self._transform(settings)
        transform = self.transform
        complete = {
            "crop_size": transform.crop_size[0],
            "resize_size": transform.resize_size[0],
            "interpolation": transform.interpolation.value,
            "mean": list(transform.mean),
            "std": list(transform.std),
        }
        super().__init__(complete, Image.Resampling[transform.interpolation.value.upper()])

    @property
    def name(self) -> str:
        return "torchvision's transform of the weights"

    def _transform(self, settings: Mapping[str, Any]) -> Any:
        from torchvision.transforms import InterpolationMode

        arguments = dict(settings)
        if "interpolation" in arguments:
            arguments["interpolation"] = InterpolationMode(arguments["interpolation"])
        return self.make(**arguments)

    def __call__(self, image: Image.Image) -> Tensor:
        inputs: Tensor = self.transform(image)
        return inputs

    def without_resizing(self, image: Image.Image) -> Tensor:
        size = {"crop_size": RAMP_SIDE, "resize_size": RAMP_SIDE}
        inputs: Tensor = self._transform(self.settings | size)(image)
        return inputs

    def _changed(self, changes: InputChanges) -> ImageProcessor:
        settings = dict(self.settings)
        fraction = changes.crop_fraction or settings["crop_size"] / settings["resize_size"]
        settings["crop_size"] = changes.image_size or settings["crop_size"]
        settings["resize_size"] = round(settings["crop_size"] / fraction)
        settings |= _normalization_and_interpolation(changes, settings)
        return TorchvisionProcessor(self.make, settings)


class TimmProcessor(ImageProcessor):
    """The evaluation transform of timm.

    Args:
        settings: Arguments of ``timm.data.create_transform``, as ``resolve_data_config`` returns them.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from timm.data import create_transform

        self.transform = create_transform(**settings, is_training=False)
        interpolation = settings["interpolation"].upper()
        resample = getattr(Image.Resampling, interpolation, Image.Resampling.BILINEAR)
        super().__init__(json.loads(json.dumps(settings)), resample)

    @classmethod
    def from_weights(cls, weights: Mapping[str, Any]) -> TimmProcessor:
        """The transform of a ``pretrained_cfg`` of timm."""
        from timm.data import resolve_data_config

        return cls(resolve_data_config(pretrained_cfg=weights))

    @property
    def name(self) -> str:
        return "timm's transform of the weights"

    def __call__(self, image: Image.Image) -> Tensor:
        inputs: Tensor = self.transform(image)
        return inputs

    def without_resizing(self, image: Image.Image) -> Tensor:
        from timm.data import create_transform

        size = {"input_size": (3, RAMP_SIDE, RAMP_SIDE), "crop_pct": 1.0, "crop_mode": "center"}
        inputs: Tensor = create_transform(**(self.settings | size), is_training=False)(image)
        return inputs

    def _changed(self, changes: InputChanges) -> ImageProcessor:
        settings = dict(self.settings)
        if changes.image_size is not None:
            settings["input_size"] = [3, changes.image_size, changes.image_size]
        if changes.crop_fraction is not None:
            settings["crop_pct"] = changes.crop_fraction
        settings |= _normalization_and_interpolation(changes, settings)
        return TimmProcessor(settings)


def _normalization_and_interpolation(changes: InputChanges, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Changed settings that torchvision and timm give the same names."""
    mean, std = mean_and_std(changes, settings)
    return {"mean": mean, "std": std, "interpolation": changes.interpolation or settings["interpolation"]}
