"""How images become inputs of a model, and the same settings in the form of transformers' image processors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's red, green and blue values from 0 to 1."""
WHOLE_FROM = 384
"""Pixels of an image from which transformers' ConvNextImageProcessor ignores its ``crop_pct``."""
MAX_PIXELS = 89_478_485
"""Pixels of an image at most, as in Pillow, which warns about more."""
INTERPOLATIONS = ("bilinear", "bicubic")


@dataclass(frozen=True)
class InputFormat:
    """How an image becomes the input of a model, (3, ``image_size``, ``image_size``) float32.

    In evaluation: resize the shorter side to ``image_size / crop_fraction`` pixels, crop the center, divide by 255,
    subtract ``mean``, and divide by ``std``.
    """

    image_size: int = 224
    crop_fraction: float = 0.875
    interpolation: str = "bilinear"
    mean: Sequence[float] = IMAGENET_MEAN
    std: Sequence[float] = IMAGENET_STD

    @property
    def resized(self) -> int:
        """Pixels of the shorter side before the center is cropped."""
        return round(self.image_size / self.crop_fraction)

    def updated(self, changes: Mapping[str, Any]) -> InputFormat:
        """With the values that are not None. Ignores keys of other names."""
        known = asdict(self)
        return replace(self, **{key: value for key, value in changes.items() if key in known and value is not None})


def supported(interpolation: str) -> str | None:
    """The name of an interpolation, if ``data.interpolation`` has it."""
    return interpolation if interpolation in INTERPOLATIONS else None


def processor(form: InputFormat) -> dict[str, Any]:
    """``preprocessor_config.json`` for transformers' image processor that computes ``form``."""
    from PIL.Image import Resampling

    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": form.resized},
        "resample": int(Resampling[form.interpolation.upper()]),
        "do_center_crop": True,
        "crop_size": {"height": form.image_size, "width": form.image_size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(form.mean),
        "image_std": list(form.std),
    }


def processor_format(found: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``InputFormat`` in the settings of an image processor. An image that it resizes without a crop is
    kept whole."""
    from PIL.Image import Resampling

    size, crop = found.get("size"), found.get("crop_size")
    side = size if isinstance(size, int) else next(iter((size or {}).values()), None)
    cropped = crop if isinstance(crop, int) else next(iter((crop or {}).values()), None)
    fraction = found.get("crop_pct") if side and side < WHOLE_FROM else None
    kept = cropped if found.get("do_center_crop", cropped is not None) and cropped else side
    resample = found.get("resample")
    return {
        "image_size": kept,
        "crop_fraction": fraction or (min(1.0, kept / side) if kept and side else None),
        "interpolation": supported(Resampling(resample).name.lower()) if resample is not None else None,
        "mean": found.get("image_mean"),
        "std": found.get("image_std"),
    }
