"""Files of images, decoded as red, green and blue, and the check of them before training."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import ExifTags, Image, ImageOps
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile

from fastloop import Problem, RecipeError
from fastloop.problem import clause
from fastloop_plugins.tasks.image.data import MAX_PIXELS

if TYPE_CHECKING:
    from fastloop_plugins.tasks.image.data import ImageFiles

warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # read_image reports such an image as an error

logger = logging.getLogger("fastloop")

TRIED = 4096
"""Images to decode before training at most. With ``TRIED_BYTES``, this takes about three seconds on one CPU core."""
TRIED_BYTES = 2**26
"""Bytes of their files at most."""


class TooLarge(ValueError):
    """An image with too many pixels. The message does not say where it is."""


def check_size(size: tuple[int, int], max_pixels: int, resized: int) -> None:
    """Raise ``TooLarge`` for an image with more pixels than ``data.max_pixels``, or with more when its shorter side is
    ``resized``."""
    width, height = size
    longer = resized * max(size) // max(min(size), 1)
    for pixels, resizing in ((width * height, ""), (resized * longer, f", and resized {resized} x {longer}")):
        if pixels > max_pixels:
            raise TooLarge(
                f"has {width} x {height} pixels{resizing}, expected at most {max_pixels} in all (data.max_pixels). Cut "
                "or shrink the image, remove it, or set the option higher."
            )


def read_image(
    path: Path, max_pixels: int = MAX_PIXELS, resized: int = 1, least: tuple[int, int] | None = None
) -> Image.Image:
    """Decode an image as red, green and blue: see ``open_image`` and ``to_rgb``.

    Raises:
        ValueError: The file cannot be read as an image of 8 bits a channel.
    """
    with open_image(path, max_pixels, resized, least) as image:
        return to_rgb(image)


@contextmanager
def open_image(path: Path, max_pixels: int, resized: int, least: tuple[int, int] | None) -> Iterator[ImageFile]:
    """Open an image, which is decoded in the block. A GIF gives its first picture.

    Args:
        max_pixels: Pixels of the image at most, as it is and resized. Checked before either.
        resized: Pixels of the shorter side when it is resized.
        least: Width and height that suffice. A JPEG is decoded at the smallest of 1/8, 1/4, 1/2 and 1 of its size that
            has them, which is faster and finds the same damage. None: at its size.

    Raises:
        ValueError: The file cannot be opened, or an error of the block, which decodes it.
    """
    try:
        Image.MAX_IMAGE_PIXELS = max(max_pixels, Image.MAX_IMAGE_PIXELS or 0)
        with Image.open(path) as image:
            check_size(image.size, max_pixels, resized)
            if least is not None and isinstance(image, JpegImageFile):
                image.draft("RGB", least[::-1] if _is_turned(image) else least)
            yield image
    except TooLarge as error:
        raise ValueError(f"{path}: {error}") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(
            f"{path}: {str(error).partition(',')[0]}. See data.max_pixels, which is {max_pixels}."
        ) from None
    except Exception as error:  # decoders raise errors of any type
        raise ValueError(f"{path}: cannot be read as an image: {clause(error)}. Replace or remove the file.") from None


def to_rgb(image: ImageFile) -> Image.Image:
    """Decode an open image as red, green and blue. Applies the orientation in its EXIF data.

    An alpha channel is dropped. One transparent color of a PNG or GIF stays in ``info["transparency"]``, as in
    transformers' ``load_image``: see ``ImageProcessor.opaque``. A grayscale PNG of 16 bits is scaled to 8 bits, as
    Pillow scales one in color, and its transparent shade is dropped.

    Raises:
        ValueError: Its channels have other than 8 bits, and it is no PNG.
        Exception: It is damaged. Decoders raise errors of any type.
    """
    image.load()
    if image.mode[0] in "IF" and image.format != "PNG":  # a conversion to 8 bits would clip the values
        raise ValueError(f"its pixels have mode {image.mode}, expected 8 bits a channel: convert it")
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode[0] == "I":
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if isinstance(image.info.get("transparency"), bytes):  # an alpha value for each entry of a palette
        return image.convert("RGBA").convert("RGB")
    return image.convert("RGB")


def _is_turned(image: Image.Image) -> bool:
    """Whether the EXIF data swaps width and height."""
    orientation: int = image.getexif().get(ExifTags.Base.Orientation, 1)
    return orientation >= 5


def header_size(path: Path) -> tuple[int, int] | None:
    """Width and height as ``read_image`` returns them, without decoding; None: the file cannot be read."""
    try:
        with Image.open(path) as image:
            return image.size[::-1] if _is_turned(image) else image.size
    except Exception:  # decoders raise errors of any type; read_image reports them
        return None


@dataclass(frozen=True)
class TriedImage:
    """An image that was decoded before training.

    Attributes:
        problem: Why it cannot be read.
        is_dark: Whether it has 16 bits a channel, of which it uses at most 12.
        is_clipped: Whether its shades of gray have 16 bits, which Pillow cuts off at 255 when it converts to colors.
    """

    path: Path
    problem: str | None = None
    is_dark: bool = False
    is_clipped: bool = False


def check_images(splits: Iterable[ImageFiles], resized: int = 1, skip_unreadable: bool = False) -> None:
    """Decode images, so that a damaged one does not end a run that has trained for hours: all, or evenly spaced ones of
    many. Warns of images with 12 bits a channel in files for 16: their pixels would be nearly black. Warns of images in
    gray of 16 bits, too: other libraries read them as nearly white.

    Args:
        resized: Pixels of the shorter side in evaluation.
        skip_unreadable: Leave damaged images to the run.

    Raises:
        RecipeError: One of them cannot be read.
    """
    splits = list(splits)
    paths: list[Path] = []
    for files in splits:
        paths += [files.root / name for name in files.names]
    most = max(files.max_pixels for files in splits)
    tried = _evenly_spaced(paths)

    with ThreadPoolExecutor(4) as pool:  # decoders release the GIL
        images = list(pool.map(lambda path: _try_image(path, most, resized), tried))
    problems = [image.problem for image in images if image.problem is not None]
    if problems and not skip_unreadable:
        message = problems[0]
        if len(problems) > 1:
            message += f" {len(problems) - 1} more of the {len(tried)} images that were tried cannot be read."
        raise RecipeError(message + splits[0].advice, code="image-unreadable")
    dark = [image.path for image in images if image.is_dark]
    if dark:
        logger.warning(
            Problem(
                "its values are at most 4095 of 65535, as of 12 bits a channel in a file for 16 bits: "
                f"the model sees nearly black images.{_count_others(dark, tried)}",
                code="dark-images",
                place=str(dark[0]),
                remedy="Multiply the values by 16, or convert the images to 8 bits.",
            )
        )
    clipped = [image.path for image in images if image.is_clipped]
    if clipped:
        logger.warning(
            Problem(
                "its shades of gray have 16 bits. fastloop scales them to 8 bits, and a pipeline of transformers cuts "
                f"them off at 255: there, the exported model sees a nearly white image.{_count_others(clipped, tried)}",
                code="clipped-elsewhere",
                place=str(clipped[0]),
                remedy="Convert the images to 8 bits before you give them to a pipeline.",
            )
        )


def _evenly_spaced(paths: list[Path]) -> list[Path]:
    """Some of the files of images, at most ``TRIED`` with ``TRIED_BYTES``: of 10,000 small ones, every third."""
    step = math.ceil(len(paths) / TRIED)
    chosen = paths[:: max(1, step)]
    size = sum(path.stat().st_size for path in chosen)
    step = math.ceil(size / TRIED_BYTES)
    return chosen[:: max(1, step)]


def _count_others(alike: list[Path], tried: list[Path]) -> str:
    """A sentence for the images beside the first one that a message is about; empty if there are none."""
    if len(alike) == 1:
        return ""
    return f" So have {len(alike) - 1} more of the {len(tried)} images that were tried."


def _try_image(path: Path, max_pixels: int, resized: int) -> TriedImage:
    """Decode an image at the smallest size that finds damage. The arguments are those of ``read_image``."""
    try:
        with open_image(path, max_pixels, resized, least=(1, 1)) as image:
            has_16_bits = image.format == "PNG" and ";16" in str(image.tile[0].args)
            is_clipped = image.mode[0] == "I"
            in_color = to_rgb(image)
            is_dark = has_16_bits and _is_dark(image, in_color)
    except ValueError as error:
        return TriedImage(path, problem=str(error))
    return TriedImage(path, is_dark=is_dark, is_clipped=is_clipped)


def _is_dark(image: Image.Image, in_color: Image.Image) -> bool:
    """Whether all values of an image of 16 bits a channel are below 2**12, which become 0 to 15 of 255. An image that
    is black in the file is not dark.

    Args:
        image: The image of the file.
        in_color: The same with 8 bits a channel, from ``to_rgb``.
    """
    return bool(np.asarray(in_color).max() < 2**4 and np.asarray(image).max() > 0)
