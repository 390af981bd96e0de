"""Folders of images: hidden folders, names that are alike, images that repeat, and values that fill 12 of 16 bits.

Modules:
    plugins/fastloop_plugins/tasks/image/classes.py
    plugins/fastloop_plugins/tasks/image/repeats.py
"""

from __future__ import annotations

import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from image_helpers import make_run, write_image, write_images
from log_lines import find_lines
from PIL import Image

from fastloop import RecipeError
from fastloop.testing import assert_problem, expect_problem, find_problems
from fastloop_plugins.tasks.image import repeats
from fastloop_plugins.tasks.image.batches import Transform
from fastloop_plugins.tasks.image.classes import class_of_model
from fastloop_plugins.tasks.image.data import MAX_PIXELS, Augment, ImageFiles, InputFormat
from fastloop_plugins.tasks.image.processors import TransformersProcessor
from fastloop_plugins.tasks.image.reading import check_images, read_image
from fastloop_plugins.tasks.image.repeats import find_repeated_images
from fastloop_plugins.text.label_names import written_label

CLASSES = ("cat", "dog")


@pytest.mark.parametrize("folder", ["train/red/.ipynb_checkpoints", "train/red/deep/.git", "test/blue/.thumbnails"])
def test_hidden_folders_are_not_read(folder, caplog):
    caplog.set_level("INFO", "fastloop")
    write_images(Path("images"))
    write_image(Path("images/train/red/deep/1.png"), (200, 70, 60))
    write_image(Path("images", folder, "1.png"), (200, 70, 60))
    names = {split: dataset.files.names for split, dataset in make_run().datasets.items()}
    assert {split: len(listed) for split, listed in names.items()} == {"train": 37, "validation": 15, "test": 18}
    assert "red/deep/1.png" in names["train"]
    assert find_lines(caplog, f"data: hidden 1 images/{folder}")


def test_a_hidden_folder_is_not_predicted(tmp_path):
    from fastloop.recipe import make_recipe
    from fastloop_plugins.tasks.image.data import ImageData

    write_image(tmp_path / "new" / "1.png", (200, 70, 60))
    write_image(tmp_path / "new" / ".ipynb_checkpoints" / "1.png", (200, 70, 60))
    data = ImageData(make_recipe({"data": {"images": str(tmp_path / "new")}}, Path("recipe.yaml")))
    (files,) = data.to_predict(tmp_path / "new", 0, 10)
    assert files.names == ["1.png"]


# -- classes -----------------------------------------------------------------------------------------------------------

CAFE = "caf\N{LATIN SMALL LETTER E WITH ACUTE}"
CAFE_OF_TWO = "cafe\N{COMBINING ACUTE ACCENT}"


@pytest.mark.parametrize(("name", "other"), [("Cat", "cat"), (CAFE, CAFE_OF_TWO), ("cat", "cat ")])
def test_folders_that_are_probably_one_class_warn(name, other, caplog):
    write_images(Path("images"), classes=[name, other, "dog"])
    make_run()
    assert_problem(caplog, "doubtful-labels images/train: move")
    assert written_label(name) in caplog.text
    assert written_label(other) in caplog.text


def test_different_folders_do_not_warn(caplog):
    write_images(Path("images"), classes=["cat", "cats", "dog"])
    make_run()
    assert not find_problems(caplog, "doubtful-labels")


@pytest.mark.parametrize(("name", "other"), [("Cat", "cat"), (CAFE, CAFE_OF_TWO)])
def test_a_folder_of_validation_that_is_written_in_another_way_proposes_the_name_in_train(name, other):
    write_images(Path("images"), classes=[name, "dog"])
    Path("images/validation", name).rename(Path("images/validation", other))
    with expect_problem(f"unknown-label images/validation/{other} rename", RecipeError) as raised:
        make_run()
    assert f"the class {written_label(name)}, rename its folder, {written_label(other)}" in str(raised.value)


def test_a_folder_that_is_evaluated_may_be_written_in_another_way():
    folder = Path("test")
    assert class_of_model("Cat", ["cat", "dog"], folder) == 0
    assert class_of_model(CAFE_OF_TWO, ["bar", CAFE], folder) == 1
    assert class_of_model("Cat", ["Cat", "cat"], folder) == 0
    for name, classes in (("cats", ["cat", "dog"]), ("CAT", ["Cat", "cat"])):
        with expect_problem(f"unknown-label test/{name} Rename", RecipeError):
            class_of_model(name, classes, folder)


# -- repeats -----------------------------------------------------------------------------------------------------------


def write_split(split: str, *names: str) -> ImageFiles:
    """Write different images ``CLASS/N.png`` of a split."""
    for name in names:
        write_image(Path(split, name), (90, 90, 90), (8, 8))
    return ImageFiles(Path(split), list(names), [CLASSES.index(name.split("/")[0]) for name in names])


def two_splits() -> dict[str, ImageFiles]:
    return {
        "train": write_split("train", "cat/1.png", "cat/2.png", "dog/1.png"),
        "validation": write_split("validation", "cat/3.png", "dog/3.png"),
    }


def test_different_images_are_no_repeats():
    assert find_repeated_images(two_splits(), CLASSES) == []


def test_images_of_equal_size_are_no_repeats():
    splits = two_splits()
    for number, files in enumerate(splits.values()):
        for index, name in enumerate(files.names):
            Image.fromarray(np.full((4, 4, 3), 10 * number + index, np.uint8)).save(files.root / name, format="BMP")
    assert find_repeated_images(splits, CLASSES) == []


def test_an_image_of_validation_in_train_is_reported():
    splits = two_splits()
    shutil.copy("train/dog/1.png", "validation/dog/3.png")
    (problem,) = find_repeated_images(splits, CLASSES)
    assert_problem(problem, "repeated-rows 1 2 validation train validation/dog/3.png")


def test_an_image_that_repeats_in_train_is_reported():
    splits = two_splits()
    shutil.copy("train/cat/1.png", "train/cat/2.png")
    (problem,) = find_repeated_images(splits, CLASSES)
    assert_problem(problem, "repeated-rows 1 3 train train/cat/2.png")


def test_an_image_in_the_folders_of_two_classes_is_reported():
    splits = two_splits()
    shutil.copy("train/cat/1.png", "train/dog/1.png")
    (problem,) = find_repeated_images(splits, CLASSES)
    assert_problem(problem, "several-labels 1 train/dog/1.png 'cat' 'dog'")


def test_a_bounded_number_of_bytes_is_read(monkeypatch, caplog):
    caplog.set_level("INFO", "fastloop")
    splits = two_splits()
    shutil.copy("train/dog/1.png", "validation/dog/3.png")
    sizes = [(files.root / name).stat().st_size for files in splits.values() for name in files.names]
    assert len(set(sizes)) == 1
    monkeypatch.setattr(repeats, "READ_BYTES", sum(sizes))
    assert len(find_repeated_images(splits, CLASSES)) == 1
    monkeypatch.setattr(repeats, "READ_BYTES", sum(sizes) - 1)
    assert find_repeated_images(splits, CLASSES) == []
    assert find_lines(caplog, "data: 5 MiB")


def test_a_run_reports_images_that_repeat(caplog):
    write_images(Path("images"))
    shutil.copy("images/train/red/00.png", "images/validation/red/01.png")
    make_run()
    assert_problem(caplog, "repeated-rows 1 15 validation train")


# -- 12 bits in files for 16 -------------------------------------------------------------------------------------------


def write_png(path: Path, pixels: np.ndarray) -> None:
    """Write a PNG of 16 bits a channel: (height, width, 1 or 3) uint16."""
    height, width, channels = pixels.shape
    kind = {1: 0, 3: 2}[channels]
    lines = b"".join(b"\0" + line.astype(">u2").tobytes() for line in pixels)
    content = b"\x89PNG\r\n\x1a\n"
    for name, data in (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0)),
        (b"IDAT", zlib.compress(lines)),
        (b"IEND", b""),
    ):
        content += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("channels", "highest", "is_reported"),
    [(1, 4095, True), (1, 255, True), (1, 4096, False), (1, 65535, False), (1, 0, False)]
    + [(3, 4095, True), (3, 4096, False), (3, 0, False)],
)
def test_12_bits_in_a_file_for_16_are_reported(channels, highest, is_reported, caplog):
    pixels = np.linspace(0, highest, 64 * channels).astype(np.uint16).reshape(8, 8, channels)
    write_png(Path("scan.png"), pixels)
    write_image(Path("other.png"), (1, 1, 1), (8, 8))
    assert (np.asarray(read_image(Path("scan.png"))) == (pixels >> 8)).all()
    check_images([ImageFiles(Path(), ["other.png", "scan.png"], [0, 1])])
    assert bool(find_problems(caplog, "dark-images scan.png: 4095 16")) == is_reported
    is_gray = channels == 1
    assert bool(find_problems(caplog, "clipped-elsewhere scan.png: 16 255")) == is_gray
    assert len(caplog.records) == is_reported + is_gray


@pytest.mark.parametrize("channels", [1, 3])
def test_images_that_a_pipeline_reads_otherwise_are_reported(channels, caplog):
    """Only gray of 16 bits: Pillow cuts its values off, also in `load_image` of transformers."""
    from transformers.image_utils import load_image

    pixels = np.linspace(0, 65535, 64 * channels).astype(np.uint16).reshape(8, 8, channels)
    write_png(Path("scan.png"), pixels)
    own = np.asarray(read_image(Path("scan.png")))
    with Image.open("scan.png") as file:
        is_same = bool((np.asarray(load_image(file)) == own).all())
    assert is_same == (channels == 3)
    check_images([ImageFiles(Path(), ["scan.png"], [0])])
    assert bool(find_problems(caplog, "clipped-elsewhere")) != is_same


@pytest.mark.filterwarnings("ignore:Palette images with Transparency:UserWarning")
def test_other_modes_of_images_are_read_as_a_pipeline_reads_them(caplog):
    from transformers.image_utils import load_image

    draw = np.random.default_rng(0)
    colors = Image.fromarray(draw.integers(0, 255, (8, 8, 3), dtype=np.uint8))
    palette = colors.quantize(16)
    transparent = colors.convert("RGBA")
    transparent.putalpha(Image.fromarray(draw.integers(0, 255, (8, 8), dtype=np.uint8)))
    colors.save("colors.png")
    gray = colors.convert("L")
    colors.save("one-transparent-color.png", transparency=colors.getpixel((2, 2)))
    gray.save("gray.png", transparency=gray.getpixel((2, 2)))
    colors.convert("1").save("two-colors.png", transparency=0)
    colors.convert("CMYK").save("print.jpg")
    palette.save("palette.png")
    palette.save("one-transparent-entry.png", transparency=3)
    palette.save("transparent-entries.png", transparency=bytes(range(0, 160, 10)))
    palette.save("picture.gif", transparency=3)
    transparent.save("transparent.png")
    transparent.convert("LA").save("transparent-gray.png")
    transparent.save("transparent.webp", lossless=True)
    names = sorted(path.name for path in Path().iterdir())
    assert len(names) == 12
    processor = TransformersProcessor.from_format(InputFormat(image_size=8, crop_fraction=1))
    whole = Augment(scale=[1, 1], ratio=[1, 1], flip=0)
    for name in names:
        with Image.open(name) as file:
            expected = load_image(file)
        assert np.array_equal(np.asarray(expected), np.asarray(read_image(Path(name)))), name
        for augment in (None, whole):  # evaluation, training
            inputs = Transform(processor, augment).read(Path(name), MAX_PIXELS, torch.Generator())
            assert torch.equal(inputs, processor(expected)), name
    check_images([ImageFiles(Path(), names, [0] * len(names))])
    assert not find_problems(caplog, "clipped-elsewhere")


def test_a_dark_image_of_8_bits_is_not_reported(caplog):
    Image.fromarray(np.full((8, 8), 9, np.uint8)).save("dark.png")
    check_images([ImageFiles(Path(), ["dark.png"], [0])])
    assert caplog.text == ""


def test_12_bits_are_reported_where_unreadable_images_are_skipped(caplog):
    write_images(Path("images"))
    write_png(Path("images/train/red/01.png"), np.full((8, 8, 1), 4000, np.uint16))
    Path("images/train/red/02.png").write_text("no image")
    make_run(plugins=["skip-unreadable"])
    assert_problem(caplog, "dark-images images/train/red/01.png 4095")
