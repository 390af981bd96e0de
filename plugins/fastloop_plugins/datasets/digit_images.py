"""Scikit-learn's 1,797 handwritten digits as PNG files, for a recipe of images that must run offline.

    data: {module: "fastloop_plugins.datasets.digit_images:digit_images"}

The images of 8 x 8 pixels are enlarged to 32 x 32. The first call writes them into fastloop's part of the user's cache,
in the layout of ``image-classification``: ``train/0/0000.png``.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

from fastloop_plugins._cache import user_cache

VERSION = 1
"""Increase it when the same arguments give other files."""


def digit_images(
    train: int = 1297, validation: int = 200, test: int = 300, size: int = 32, folder: str | None = None
) -> str:
    """Write three splits of the given numbers of images, unless they are there. Returns their folder.

    The test split does not change with the other two numbers.

    Args:
        size: Height and width of an image in pixels.
        folder: Where to write; None: the user's cache.

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: There are not as many images.
    """
    home = Path(folder) if folder is not None else user_cache("images")
    target = home / f"digits-{VERSION}-{train}-{validation}-{test}-{size}"
    if target.is_dir():
        return str(target)
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("scikit-learn is not installed. Install it: pip install 'fastloop-train[digits]'") from error
    from PIL import Image

    pixels, labels = load_digits(return_X_y=True)
    if train + validation + test > len(labels):
        raise ValueError(f"there are {len(labels)} images, and the splits need {train + validation + test}")
    order = random.Random(0).sample(range(len(labels)), len(labels))
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    made = Path(tempfile.mkdtemp(prefix=".", dir=home))
    try:
        for split, first, count in (
            ("test", 0, test),
            ("validation", test, validation),
            ("train", test + validation, train),
        ):
            for index in order[first : first + count]:
                file = made / split / str(labels[index]) / f"{index:04}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                gray = (pixels[index].reshape(8, 8) * (255 / 16)).round().astype("uint8")  # pixel values are 0 to 16
                Image.fromarray(gray).resize((size, size), Image.Resampling.BICUBIC).save(file)
        made.rename(target)
    except OSError:
        if not target.is_dir():  # otherwise another process has just written the same
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return str(target)
