"""Datasets with a column of images, which `image-classification` does not read: found, and refused with the remedy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastloop import RecipeError

KEYS = ("name", "files", "sources")
"""Keys of ``data`` that name a dataset in other tasks."""
SUFFIXES = (".arrow", ".parquet")
"""Suffixes of files that may have a column of images."""
SAVED = ("dataset_dict.json", "state.json")
"""Files in a folder that ``save_to_disk`` of `datasets` has written."""


def refuse_datasets(data: Mapping[str, Any], images: Path | None, where: str) -> None:
    """Refuse a ``data`` section that names a dataset instead of a folder of images.

    Args:
        images: The path that ``data.images`` names.
        where: The place of the section in messages.

    Raises:
        RecipeError: The section names a dataset.
    """
    for key in KEYS:
        if data.get(key) is not None:
            raise _refusal(f"{where}.{key}: {data[key]}")
    if images is not None and _holds_dataset(images):
        raise _refusal(f"{where}.images: {data['images']}")


def _holds_dataset(path: Path) -> bool:
    if path.suffix.lower() in SUFFIXES:
        return path.is_file()
    return any((path / name).is_file() for name in SAVED) or any(path.glob("*.parquet"))


def _refusal(place: str) -> RecipeError:
    return RecipeError(
        "a dataset, and image-classification reads folders of images.",
        code="wrong-format",
        place=place,
        expected="data.images with the path of FOLDER, for images at FOLDER/train/CLASS/IMAGE",
        remedy="Write the images of the dataset there: docs/tasks/image-classification.md has a script.",
    )
