"""The ``data`` section of ``image-classification``: a folder of images per class, and how they become inputs."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fastloop import RecipeError, option
from fastloop.errors import did_you_mean
from fastloop.options import parse
from fastloop.recipe.paths import nothing_at
from fastloop.splits import SPLITS
from fastloop_plugins._cache import digest
from fastloop_plugins._names import list_names
from fastloop_plugins.rows.held_out import divide
from fastloop_plugins.rows.options import Limit, Splits
from fastloop_plugins.rows.source import call_source, check_source
from fastloop_plugins.tasks.image.classes import class_of_model, class_of_train, warn_about_alike_folders
from fastloop_plugins.tasks.image.stored_datasets import refuse_datasets

if TYPE_CHECKING:
    from fastloop.recipe import Recipe

logger = logging.getLogger("fastloop")

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""Suffixes of images: those of torchvision's ImageFolder, and ``.gif``."""
SOURCES = {"images": "images (a folder)", "module": "module (a function that returns one)"}
"""Option of ``data`` that names the source of the images -> the option in messages."""
IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Mean of ImageNet's red, green and blue values from 0 to 1."""
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Standard deviation of these values."""
MAX_PIXELS = 89_478_485
"""Pixels of an image at most, as in Pillow, which warns about more."""


@dataclass(kw_only=True)
class ImageDataOptions:
    """The ``data`` section."""

    images: str | None = option(
        "Folder with train, validation and test, each with a folder of images for each class; or only with the latter.",
        default=None,
    )
    module: str | None = option(
        "Instead of images: a function that returns the folder: package.module:name or file.py:name.", default=None
    )
    arguments: dict[str, Any] | None = option("Arguments of that function.", default=None)
    splits: dict[str, Any] | None = option(
        "Names of the splits' folders, such as {validation: val}; null: leave out.", default=None
    )
    validation_fraction: float = option(
        "Share of train to evaluate on where there is no validation split.", default=0.1, ge=0, lt=1
    )
    limit: dict[str, Any] | None = option(
        "Split -> how many images to keep, drawn at random, always the same.", default=None
    )
    image_size: int | None = option(
        "Height and width of the model's input in pixels; null: as pretrained, else 224.", default=None, ge=1
    )
    crop_fraction: float | None = option(
        "In evaluation, the share of the shorter side that is kept at the center; null: as pretrained, else 0.875.",
        default=None,
        gt=0,
        le=1,
    )
    interpolation: Literal["bilinear", "bicubic"] | None = option(
        "How images are resized; null: as pretrained, else bilinear.", default=None
    )
    mean: list[float] | None = option(
        "Of red, green and blue from 0 to 1; null: as pretrained, else ImageNet's.", default=None
    )
    std: list[float] | None = option(
        "Of red, green and blue from 0 to 1; null: as pretrained, else ImageNet's.", default=None
    )
    max_pixels: int = option(
        "Pixels of an image at most, as it is and resized: a small file may claim any size.", default=MAX_PIXELS, ge=1
    )
    augment: dict[str, Any] | None = option(
        "Random changes of training images: {crop: true, scale: [0.08, 1], flip: 0.5}.", default=None
    )


@dataclass(kw_only=True)
class Augment:
    """``data.augment``."""

    crop: bool = option("train on a random part of an image; false: on the same part as in evaluation", default=True)
    scale: list[float] = option(
        "smallest and largest area of the part, as a share of the image", default_factory=lambda: [0.08, 1.0]
    )
    ratio: list[float] = option(
        "smallest and largest width of the part, divided by its height", default_factory=lambda: [0.75, 1.3333]
    )
    flip: float = option("probability of a horizontal flip", default=0.5, ge=0, le=1)
    reduced_decoding: bool = option(
        "decode a large JPEG at 1/2, 1/4 or 1/8 of its size if the part keeps as many pixels as the input has",
        default=False,
    )

    def __post_init__(self) -> None:
        for key in ("scale", "ratio"):
            bounds = getattr(self, key)
            if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1]:
                raise ValueError(
                    f"{key}: found {list(bounds)}, expected the smallest and the largest value, such as [0.5, 1]."
                )


@dataclass(frozen=True)
class InputChanges:
    """The keys of ``data`` that say how an image becomes the input of a model; None: as pretrained."""

    image_size: int | None = None
    crop_fraction: float | None = None
    interpolation: str | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None


@dataclass(frozen=True)
class InputFormat:
    """How an image becomes the input of a model from scratch, (3, ``image_size``, ``image_size``) float32.

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

    def updated(self, changes: InputChanges) -> InputFormat:
        """With the values that are not None."""
        return replace(self, **{key: value for key, value in asdict(changes).items() if value is not None})


@dataclass
class ImageFiles:
    """The images of one split: paths relative to ``root``, and the class of each.

    Attributes:
        names: Paths with forward slashes, in sorted order.
        labels: Ids of the classes.
        max_pixels: ``data.max_pixels``.
        advice: Proposal after the error of an image that cannot be read, with a space before it; may be empty.
    """

    root: Path
    names: list[str]
    labels: list[int]
    max_pixels: int = MAX_PIXELS
    advice: str = ""

    def __len__(self) -> int:
        return len(self.names)

    def keep(self, ids: Iterable[int]) -> ImageFiles:
        """The images with these ids."""
        return replace(self, names=[self.names[index] for index in ids], labels=[self.labels[index] for index in ids])

    def fingerprint(self) -> str:
        """A hash of names, sizes in bytes and classes."""
        sizes = (f"{name} {(self.root / name).stat().st_size}" for name in self.names)
        return digest([*sizes, *map(str, self.labels)])


class ImageData:
    """The ``data`` section of a recipe. The constructor checks it, ``load`` lists the images.

    Attributes:
        classes: Names of the classes, sorted, after ``load``; in inference: set before it, from the model.
        ignored: Files that are no images, from the last call of ``load`` or ``to_predict``.

    Raises:
        RecipeError: An option is invalid, or the folder does not exist.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.where = f"{recipe.where}: data"
        self.inference = recipe.inference
        images = recipe.data.get("images")
        refuse_datasets(recipe.data, recipe.find(images) if isinstance(images, str) else None, self.where)
        self.options = parse(ImageDataOptions, recipe.data, self.where)
        self.splits = parse(Splits, self.options.splits, f"{self.where}.splits")
        self.limit = parse(Limit, self.options.limit, f"{self.where}.limit")
        self.augment = parse(Augment, self.options.augment, f"{self.where}.augment")
        self.classes: list[str] = []
        self.ignored: list[Path] = []
        for key in ("mean", "std"):
            values = getattr(self.options, key)
            if values is None:
                continue
            if len(values) != 3 or (key == "std" and min(values) <= 0):
                raise RecipeError(
                    code="wrong-type",
                    place=f"{self.where}.{key}",
                    found=str(values),
                    expected="three numbers above 0" if key == "std" else "three numbers",
                )
        if self.inference is not None and self.inference.source is not None:
            return  # the images come from there
        check_source(self.options, SOURCES, recipe)
        if self.options.images is not None:
            self._check_folder(recipe.find(self.options.images))

    def _check_folder(self, folder: Path) -> None:
        if folder.is_dir():
            return
        raise RecipeError(
            "a file, expected a folder." if folder.is_file() else f"{nothing_at(folder, 'folder')}.",
            code="file-missing",
            place=f"{self.where}.images: {self.options.images}",
            expected="FOLDER/train/CLASS/IMAGE",
        )

    def input_changes(self) -> InputChanges:
        """The keys of the recipe that say how an image becomes the input of the model."""
        return InputChanges(**{key.name: getattr(self.options, key.name) for key in fields(InputChanges)})

    # -- listing images ------------------------------------------------------------------------------------------------

    def load(self) -> dict[str, ImageFiles]:
        """List the images of ``train``, and of ``validation`` and ``test`` if they exist; in inference, of the
        evaluated split.

        Raises:
            RecipeError: A split or class is missing, unknown or empty.
        """
        self.ignored = []
        root = self._root()
        folders = self._folders(root, check=self.inference is None)
        fraction = self.options.validation_fraction if "validation" not in folders else 0.0
        needed = set(SPLITS) if self.inference is None else {self.inference.split}
        if "validation" in needed and fraction:
            needed.add("train")
        images = {split: self._list(folder) for split, folder in folders.items() if split in needed}
        if self.inference is None:
            self.classes = sorted(images["train"])
            if len(self.classes) < 2:
                raise RecipeError(
                    code="one-class",
                    place=str(folders["train"]),
                    found=f"one class, {self.classes[0]!r}",
                    expected="a folder for each of two or more classes",
                    remedy="Add a folder with the images of another class.",
                )
            warn_about_alike_folders(self.classes, folders["train"])
        files = {split: self._files(folders[split], of_class) for split, of_class in images.items()}
        labels = files["train"].labels if "train" in files else None
        files, suffix = divide(files, fraction, labels, self.limit, self.where)
        if "train" in files:
            suffix += f"; images of each class in train: {self._count(files['train'])}"
        if self.inference is not None:
            files = {split: of_split for split, of_split in files.items() if split == self.inference.split}
        self._log_ignored()
        numbers = ", ".join(f"{split} {len(of_split.names)}" for split, of_split in files.items())
        logger.info("data: %s%s", numbers, suffix)
        return files

    def _root(self) -> Path:
        if self.options.module is None:
            return self.recipe.find(str(self.options.images))
        result = call_source(self.options, self.recipe)
        if not isinstance(result, str | Path) or not Path(result).is_dir():
            raise RecipeError(
                f"{self.options.module} returned {result!r:.80}, expected an existing folder.",
                code="wrong-result",
                place=f"{self.where}.module",
            )
        return Path(result)

    def _folders(self, root: Path, check: bool) -> dict[str, Path]:
        """Split -> folder. A folder without a split's folder holds the classes of ``train``.

        Args:
            check: Whether to raise an error for a folder that is not a split's.
        """
        names = {split: name for split, name in vars(self.splits).items() if name is not None}
        subfolders = list[str]()
        for path in sorted(root.iterdir()):
            if path.is_dir() and not path.name.startswith("."):
                subfolders.append(path.name)
        folders = {split: root / name for split, name in names.items() if name in subfolders}
        listed = list_names(subfolders, 8) or "none"
        for split in self.options.splits or {}:
            if split in names and split not in folders and (self.inference is None or split == self.inference.split):
                raise RecipeError(
                    f"there is no folder {names[split]!r}. There are: {listed}.",
                    code="unknown-split",
                    place=f"{self.where}.splits.{split}: {root}",
                )
        if not folders:
            return {"train": root}
        if self.inference is None and "train" not in folders:
            raise RecipeError(
                f"there is no folder {names['train']!r} to train on. There are: {listed}. See data.splits.",
                code="unknown-split",
                place=str(root),
            )
        known = {*names.values(), *SPLITS}
        unknown = [name for name in subfolders if name not in known]
        if check and unknown:
            name = unknown[0]
            raise RecipeError(
                f"unknown split {name!r}.",
                code="unknown-split",
                place=str(root),
                remedy=(
                    f"{did_you_mean(name, names.values())} If it is a split, name it, such as "
                    f"data.splits.validation={name}. Otherwise move it elsewhere."
                ),
            )
        return folders

    def _list(self, folder: Path) -> dict[str, list[str]]:
        """Class -> its images, relative to the folder of the split."""
        paths = sorted(folder.iterdir())
        for path in paths:
            if path.is_file() and path.suffix.lower() in SUFFIXES:
                raise RecipeError(
                    "an image outside of the folders of classes.",
                    code="wrong-folder",
                    place=str(path),
                    expected=f"{folder.name}/CLASS/{path.name}",
                )
        by_class: dict[str, list[str]] = {}
        for path in paths:
            if path.is_dir() and path.name[0] != ".":
                by_class[path.name] = self._walk(path, folder)
        if not by_class:
            raise RecipeError(
                "holds no folder of a class.",
                code="wrong-folder",
                place=str(folder),
                expected=f"{folder.name}/CLASS/IMAGE",
            )
        for name, images in by_class.items():
            if not images:
                others = [path for path in self.ignored if path.is_relative_to(folder / name)]
                raise RecipeError(
                    f"the class {name!r} has no images ({' '.join(SUFFIXES)}). Found there: "
                    f"{_count_suffixes(others) or 'no file'}.",
                    code="empty-class",
                    place=str(folder / name),
                    remedy="Add or convert images, or remove the folder.",
                )
        return by_class

    def _walk(self, folder: Path, root: Path) -> list[str]:
        """The images below a folder, sorted by path, relative to ``root``. Adds other files and hidden folders, such as
        ``.ipynb_checkpoints``, to ``ignored``."""
        images = []
        for place, folders, names in os.walk(folder, followlinks=True):
            hidden = [name for name in folders if name.startswith(".")]
            self.ignored += [Path(place) / name for name in hidden]
            folders[:] = [name for name in folders if name not in hidden]  # os.walk enters these
            for name in names:
                path = Path(place) / name
                if path.suffix.lower() in SUFFIXES and path.name[0] != ".":
                    images.append(path.relative_to(root).as_posix())
                else:
                    self.ignored.append(path)
        return sorted(images)

    def _files(self, folder: Path, by_class: Mapping[str, list[str]]) -> ImageFiles:
        """The images of a split.

        Args:
            by_class: Class -> its images, relative to ``folder``.

        Raises:
            RecipeError: A class is not known.
        """
        find_class = class_of_train if self.inference is None else class_of_model
        names: list[str] = []
        labels: list[int] = []
        for name, images in by_class.items():
            names += images
            labels += [find_class(name, self.classes, folder)] * len(images)
        return ImageFiles(folder, names, labels, self.options.max_pixels, self._advice())

    def _advice(self) -> str:
        """Proposes ``skip-unreadable``, unless the recipe lists it or leaves it out."""
        if "skip-unreadable" in self.recipe.plugins:
            return ""
        return " To skip such images: --with skip-unreadable"

    def _count(self, files: ImageFiles) -> str:
        """The number of images of the first classes: ``cat 12, dog 10``."""
        counts = Counter(files.labels)
        return list_names([f"{name} {counts[index]}" for index, name in enumerate(self.classes)], 8)

    def _log_ignored(self) -> None:
        if self.ignored:
            logger.info(
                "data: %d files that are no images, or hidden, are ignored (%s), such as %s",
                len(self.ignored),
                _count_suffixes(self.ignored),
                min(self.ignored),
            )

    # -- images to predict ---------------------------------------------------------------------------------------------

    def to_predict(self, source: Path | Iterable[str], start: int, size: int) -> Iterator[ImageFiles]:
        """The images of a folder in sorted order, one image, or images by path: ``size`` at a time, from image
        ``start``.

        Raises:
            RecipeError: A path does not exist, or a folder holds no image.
        """
        root = Path()
        if isinstance(source, Path) and source.is_dir():
            root = source
            self.ignored = []
            names = iter(self._walk(source, source))
            self._log_ignored()
        else:
            names = self._existing([str(source)] if isinstance(source, Path) else source)
        names = islice(names, start, None)
        is_empty = start == 0
        for first in names:
            is_empty = False
            chunk = [first, *islice(names, size - 1)]
            yield ImageFiles(root, chunk, [0] * len(chunk), self.options.max_pixels, self._advice())
        if is_empty:
            raise RecipeError(
                f"found no image ({' '.join(SUFFIXES)}) to predict.",
                code="nothing-to-predict",
                place=str(source if isinstance(source, Path) else "predict"),
            )

    def _existing(self, names: Iterable[str]) -> Iterator[str]:
        for name in names:
            if not Path(name).is_file():
                problem = "a folder, expected an image" if Path(name).is_dir() else nothing_at(Path(name))
                raise RecipeError(
                    f"{problem}.",
                    code="file-missing",
                    place=f"{name:.200}",
                    expected="the path of an image, or one folder of images",
                )
            yield name


def _count_suffixes(paths: Iterable[Path]) -> str:
    """The most frequent suffixes of files and their numbers: ``.heic 10, .txt 2``."""
    counts = Counter[str]()
    for path in paths:
        suffix = path.suffix.lower() or "no suffix"
        if path.name[0] == ".":
            suffix = "hidden"
        counts[suffix] += 1
    most_frequent = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:5]
    return ", ".join(f"{suffix} {count}" for suffix, count in most_frequent)
