"""The task ``image-classification``: image folders, random changes by seed, epoch and image, and exported models.

Modules:
    plugins/fastloop_plugins/datasets/digit_images.py
    plugins/fastloop_plugins/tasks/image/batches.py
    plugins/fastloop_plugins/tasks/image/data.py
    plugins/fastloop_plugins/tasks/image/libraries.py
    plugins/fastloop_plugins/tasks/image/model.py
    plugins/fastloop_plugins/tasks/image/reading.py
    plugins/fastloop_plugins/tasks/image/stored_datasets.py
    plugins/fastloop_plugins/tasks/image_classification.py
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_helpers import (
    COLORS,
    COUNTS,
    RESNET,
    Watch,
    all_of,
    make_run,
    watched,
    write_image,
    write_images,
    write_recipe,
)
from image_libraries import importable, needs_timm, needs_torchvision
from log_lines import find_lines
from PIL import ExifTags, Image
from training_runs import execute

from fastloop import RecipeError
from fastloop.errors import DataError, UsageError
from fastloop.plugins.resolve import resolve
from fastloop.recipe import load_recipe
from fastloop.testing import assert_problem, expect_problem
from fastloop_plugins.datasets.digit_images import digit_images
from fastloop_plugins.tasks.image import reading
from fastloop_plugins.tasks.image.batches import Transform
from fastloop_plugins.tasks.image.data import Augment, InputFormat
from fastloop_plugins.tasks.image.processors import TransformersProcessor
from fastloop_plugins.tasks.image.reading import read_image

ROOT = Path(__file__).parents[3]
OFF = {"crop": False, "flip": 0}
SWIN = {
    "config": {
        "model_type": "swin",
        "embed_dim": 8,
        "depths": [1],
        "num_heads": [2],
        "window_size": 2,
        "patch_size": 4,
        "drop_path_rate": 0.0,
    }
}
RESNET18 = {"name": "torchvision/resnet18", "pretrained": False}
WORKERS = {"dataloader-workers": {"num_workers": 2}}


def test_it_learns_colors_and_exports_the_classes():
    _, summary = watched("train.epochs=6")
    assert summary["validation"]["accuracy"] > 0.7
    assert "top5_accuracy" not in summary["validation"]
    exported = json.loads(Path("out/model/image_classification.json").read_text())
    assert exported["classes"] == ["blue", "green", "red"]
    assert exported.keys() == {"classes"}
    processor = json.loads(Path("out/model/preprocessor_config.json").read_text())
    assert processor["crop_size"] == {"height": 16, "width": 16}
    assert processor["size"] == {"shortest_edge": 18}


def plain_loop(model: Any, train: Any, test: Any, lr: float) -> tuple[list[float], float]:
    """Losses and the accuracy of a loop that a person would write."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=lr), []
    for epoch in range(2):
        for ids in torch.randperm(len(train), generator=torch.Generator().manual_seed(7 + epoch)).split(6):
            images, labels = torch.utils.data.default_collate([train[int(index)] for index in ids])
            logits = model(images)
            loss = torch.nn.functional.cross_entropy(getattr(logits, "logits", logits), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    with torch.no_grad():
        images, labels = torch.utils.data.default_collate(list(test))
        logits = model.eval()(images)
        return losses, (getattr(logits, "logits", logits).argmax(1) == labels).float().mean().item()


@pytest.mark.skipif(importable("torchvision"), reason="transformers then resizes images with torchvision, not Pillow")
def test_losses_equal_those_of_a_plain_loop():
    from transformers import AutoConfig, AutoModelForImageClassification

    watch, summary = watched(
        model=RESNET, data={"image_size": 16, "crop_fraction": 0.5, "augment": OFF}, optimizer="SGD"
    )

    def samples(split: str) -> list[Any]:
        found = []
        for path in sorted(Path("images", split).rglob("*.png")):
            with Image.open(path) as file:
                image = file.resize(
                    (32 * file.width // min(file.size), 32 * file.height // min(file.size)), Image.Resampling.BILINEAR
                )
            left, top = (image.width - 16) // 2, (image.height - 16) // 2
            pixels = (
                torch.tensor(list(image.crop((left, top, left + 16, top + 16)).tobytes()))
                .view(16, 16, 3)
                .permute(2, 0, 1)
                / 255
            )
            mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
            found.append(((pixels - mean[:, None, None]) / std[:, None, None], list(COLORS).index(path.parent.name)))
        return found

    torch.manual_seed(7)
    model = AutoModelForImageClassification.from_config(AutoConfig.for_model(**RESNET["config"], num_labels=3))
    losses, accuracy = plain_loop(model.train(), samples("train"), samples("test"), lr=1e-2)
    assert watch.losses == pytest.approx(losses, rel=1e-4)
    assert summary["test"]["accuracy"] == pytest.approx(accuracy, abs=1e-6)


@needs_torchvision
def test_losses_equal_those_of_a_plain_torchvision_loop():
    from torchvision import models
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    # A model without batch norm, which adds noise.
    model = {"name": "torchvision/squeezenet1_1", "pretrained": False, "arguments": {"dropout": 0.0}}
    settings: dict[str, Any] = {
        "model": model,
        "data": {"image_size": 32, "augment": OFF},
        "optimizer": "SGD",
        "lr": 1e-3,
    }
    watch, summary = watched(**settings)
    steps = [v2.Resize(37), v2.CenterCrop(32), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
    transform = v2.Compose([*steps, v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))])
    train, test = (ImageFolder(f"images/{split}", transform) for split in ("train", "test"))
    ours = make_run(**settings).datasets["test"]
    for index, (image, label) in enumerate(test):
        torch.testing.assert_close(ours[index][0], image, rtol=0, atol=1e-5)
        assert ours[index][1] == label
    torch.manual_seed(7)
    losses, accuracy = plain_loop(models.squeezenet1_1(num_classes=3, dropout=0.0), train, test, lr=1e-3)
    assert watch.losses == pytest.approx(losses, rel=1e-4)
    assert summary["test"]["accuracy"] == pytest.approx(accuracy, abs=1e-6)


# -- random changes ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_augmentation_depends_on_seed_epoch_and_image_only():
    first, _ = watched()
    assert len(first.pixels) == 2 * 36
    assert len(set(first.pixels.values())) == 2 * 36, "each image changes in each epoch"
    assert watched()[0].pixels == first.pixels
    assert watched(batch_size=9, lr=1e-3)[0].pixels == first.pixels, "neither the batch nor the weights matter"
    assert not set(watched("train.seed=8")[0].pixels.values()) & set(first.pixels.values())


@pytest.mark.slow
def test_augmentation_does_not_depend_on_the_workers():
    runs = [watched(plugins=plugins)[0] for plugins in ([], [WORKERS], [{"dataloader-workers": {"num_workers": 1}}])]
    assert runs[1].pixels == runs[2].pixels == runs[0].pixels
    assert runs[1].losses == runs[2].losses == runs[0].losses


@pytest.mark.parametrize(
    "plugins", [[], pytest.param([WORKERS], marks=pytest.mark.slow)], ids=["no workers", "workers"]
)
def test_a_resumed_run_sees_the_same_images(plugins):
    whole, _ = watched("train.epochs=3", plugins=plugins)
    watched("train.epochs=3", "train.max_steps=8", "output=cut", plugins=plugins)
    rest = Watch()
    execute(make_run("train.epochs=3", "output=cut", resume=Path("cut"), plugins=plugins, objects=[rest]))
    assert len(rest.losses) == 10
    assert rest.losses == whole.losses[8:]
    assert rest.pixels == {key: whole.pixels[key] for key in rest.pixels}


@pytest.mark.slow
def test_processes_see_the_same_images_and_compute_the_same(processes, tmp_path):
    folder = tmp_path / "two"
    write_recipe(folder_made(folder))
    weights = {"loss": {"class_weights": [1.0, 2.0, 4.0]}}
    specs = [{"model": SWIN, "plugins": ["ddp"]}, {"model": SWIN, "plugins": ["ddp", WORKERS], "task": weights}]
    first, second = (process.result for process in processes(2, all_of, specs, folder=folder))
    for spec, one, other in zip(specs, first, second, strict=True):
        watch, summary = watched(**spec | {"plugins": []})
        both = one["pixels"] | other["pixels"]
        assert both == {f"{epoch} {index}": value for (epoch, index), value in watch.pixels.items()}
        assert len(one["pixels"]) < len(both)
        assert one["losses"] == pytest.approx(watch.losses, rel=1e-4)
        for split in ("validation", "test"):
            assert one[split] == pytest.approx(summary[split], rel=1e-4)


def folder_made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.slow
def test_augmentation_can_be_turned_off():
    watch, _ = watched(data={"augment": OFF})
    assert {watch.pixels[0, index] == watch.pixels[1, index] for index in range(36)} == {True}
    flipped, _ = watched(data={"augment": {"crop": False, "flip": 1.0}})
    assert not set(flipped.pixels.values()) & set(watch.pixels.values())


def test_parts_and_flips_are_those_computed_by_hand():
    pixels = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    image = Image.fromarray(pixels)
    form = InputFormat(image_size=4, crop_fraction=1.0, mean=(0.0, 0.5, 0.0), std=(1.0, 1.0, 2.0))
    processor = TransformersProcessor.from_format(form)
    center = torch.tensor(pixels[:, 1:5]).permute(2, 0, 1) / 255
    expected = torch.stack([center[0], center[1] - 0.5, center[2] / 2])
    random = torch.Generator().manual_seed(0)
    torch.testing.assert_close(Transform(processor)(image, random), expected)
    always = Augment(crop=False, flip=1.0)
    torch.testing.assert_close(Transform(processor, always)(image, random), expected.flip(2))
    whole = Augment(scale=[1.0, 1.0], ratio=[1.5, 1.5], flip=0.0)
    resized = torch.tensor(np.array(image.resize((4, 4), Image.Resampling.BILINEAR))).permute(2, 0, 1) / 255
    torch.testing.assert_close(Transform(processor, whole)(image, random)[0], resized[0])


def test_random_parts_have_the_area_and_shape_of_the_recipe():
    random = torch.Generator().manual_seed(0)
    transform, parts = Transform(TransformersProcessor.from_format(InputFormat()), Augment()), []
    for _ in range(500):
        left, top, right, bottom = transform._random_part(
            (400, 300), Augment(scale=[0.2, 0.6], ratio=[0.5, 2.0]), random
        )
        assert 0 <= left < right <= 400
        assert 0 <= top < bottom <= 300
        parts.append(((right - left) * (bottom - top) / 120_000, (right - left) / (bottom - top), left, top))
    areas, ratios, lefts, tops = (np.array(values) for values in zip(*parts, strict=True))
    assert 0.19 < areas.min() < 0.22
    assert 0.55 < areas.max() < 0.61
    assert 0.49 < ratios.min() < 0.6
    assert 1.7 < ratios.max() < 2.02
    assert (np.log(ratios) > 0).mean() == pytest.approx(0.5, abs=0.15)
    assert lefts.min() == tops.min() == 0
    never = transform._random_part((100, 10), Augment(scale=[1.0, 1.0], ratio=[0.5, 2.0]), random)
    assert never == (40, 0, 60, 10), "no part fits: the largest one at the center"


@pytest.mark.parametrize("orientation", [1, 6], ids=["upright", "turned"])
def test_a_large_jpeg_decoded_at_a_reduced_size_gives_nearly_the_same_inputs(orientation, monkeypatch):
    """One of 1,600 x 1,200 pixels, for inputs of 64 x 64 pixels."""
    coarse = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    Image.fromarray(coarse).resize((1600, 1200), Image.Resampling.BICUBIC).save("photo.jpg", exif=exif)
    processor = TransformersProcessor.from_format(InputFormat(image_size=64))
    sizes = []
    resize = Image.Image.resize

    def recorded(image: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.append(image.size)
        return resize(image, *args, **kwargs)

    monkeypatch.setattr(Image.Image, "resize", recorded)
    for seed in range(5):
        inputs = []
        for is_reduced in (False, True):
            transform = Transform(processor, Augment(scale=[0.3, 1.0], reduced_decoding=is_reduced))
            random = torch.Generator().manual_seed(seed)
            inputs.append(transform.read(Path("photo.jpg"), 2**24, random))
        plain, reduced = inputs
        assert (plain - reduced).abs().mean() < 0.02  # of a deviation of 1
        width, height = sizes[-1]
        assert max(width, height) <= 800
        assert (width < height) == (orientation == 6)


def test_a_file_without_a_reduced_size_gives_the_same_inputs():
    pixels = np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8)
    Image.fromarray(pixels).save("large.png")
    processor = TransformersProcessor.from_format(InputFormat(image_size=32))
    inputs = []
    for is_reduced in (False, True):
        transform = Transform(processor, Augment(reduced_decoding=is_reduced))
        inputs.append(transform.read(Path("large.png"), 2**24, torch.Generator().manual_seed(0)))
    assert torch.equal(*inputs)
    with pytest.raises(ValueError, match="missing"):
        transform.read(Path("missing.jpg"), 2**24, torch.Generator())


@pytest.mark.slow
def test_training_draws_the_same_numbers_with_and_without_augmentation():
    states = []
    for augment in (OFF, {}):
        execute(make_run(data={"augment": augment}))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


# -- folders -----------------------------------------------------------------------------------------------------------


def broken(name: str) -> None:
    """Change the folder ``images`` in the way that a case names."""
    images = Path("images")
    if name == "no train":
        (images / "train").rename(images / "training")
    elif name == "unknown split":
        shutil.copytree(images / "validation", images / "val")
    elif name == "empty class":
        (images / "train" / "yellow").mkdir()
        for file in ("notes.txt", "1.heic", "2.HEIC"):
            (images / "train" / "yellow" / file).write_text("no image")
    elif name == "class not in train":
        write_image(images / "test" / "yellow" / "1.png", (200, 200, 0))
    elif name == "image beside classes":
        write_image(images / "train" / "1.png", (200, 200, 0))
    elif name == "no classes":
        shutil.rmtree(images / "test")
        (images / "test").mkdir()
    elif name == "one class":
        shutil.rmtree(images)
        write_images(images, {"train": 3}, ["red"])


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("no train", "unknown-split 'train'"),
        (
            "unknown split",
            "unknown-split 'val' data.splits.validation=val",
        ),
        (
            "empty class",
            "empty-class images/train/yellow 'yellow' 2 1",
        ),
        ("class not in train", "unknown-label images/test/yellow 'yellow'"),
        (
            "image beside classes",
            "wrong-folder images/train/1.png train/CLASS/1.png",
        ),
        ("no classes", "wrong-folder images/test test/CLASS/IMAGE"),
        ("one class", "one-class images/train 'red'"),
    ],
)
def test_folder_error_names_the_place(case, expected):
    write_images(Path("images"))
    broken(case)
    with expect_problem(expected, RecipeError):
        make_run()
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.images=nowhere"], "file-missing data.images"),
        (["data.images=r.yaml"], "file-missing r.yaml data.images"),
        (["data.images=null", "data.name=mnist"], "wrong-format data.name: mnist CLASS docs/tasks"),
        (["data.images=null", "data.files={train: a.parquet}"], "wrong-format data.files a.parquet"),
        (["data.images=null"], "exclusive-options"),
        (
            ["data.splits.test=exam"],
            "unknown-split data.splits.test 'exam'",
        ),
        (["data.mean=[1,2]"], "wrong-type data.mean [1.0 2.0]"),
        (["data.std=[1,0,1]"], "wrong-type data.std [1.0 0.0 1.0] 0"),
        (["data.augment.scale=[1]"], "invalid-value data.augment [1.0]"),
        (["data.augment.colour=1"], "unknown-option data.augment.colour"),
        (["data.arguments={a: 1}"], "unknown-option data.arguments data.module"),
        (["model.name=null"], "exclusive-options"),
        (
            ["model.name=null", "model.config={model_type: resnett}"],
            "unknown-model model.config.model_type 'resnett'",
        ),
        (
            ["model.name=null", "model.config={model_type: resnet, deep: 1}"],
            "unknown-option model.config.deep",
        ),
        (
            ["model.name=null", "model.config={model_type: gpt2}"],
            "unsupported-model model.config 'gpt2'",
        ),
        (
            ["model.name=null", "model.config={model_type: swin, num_heads: [3]}"],
            "invalid-value model.config IndexError",
        ),
        (["model.name=vit/config.json"], "file-missing model.name vit/config.json"),
        (["model.name=images"], "file-missing model.name config.json"),
        (["model.arguments={a: 1}"], "unknown-option model.arguments torchvision/NAME timm/NAME"),
        (
            ["data.image_size=24"],
            "unsupported-model ViTForImageClassification data.image_size 24",
        ),
        (
            ["plugins.image-classification.loss.class_weights=[1,2]"],
            "wrong-weights 0 3",
        ),
        (
            ["plugins.image-classification.metrics.recal={type: Recal}"],
            "unknown-metric metrics.recal.type 'Recal'",
        ),
    ],
)
def test_recipe_error_names_the_key(overrides, expected):
    with expect_problem(expected, RecipeError):
        make_run(*overrides)


def test_other_names_of_splits_and_a_limit(caplog):
    caplog.set_level("INFO", "fastloop")
    write_images(Path("images"))
    Path("images/validation").rename("images/val")
    for name in ("notes.txt", ".hidden.png"):
        Path("images/train/red", name).write_text("no image")
    run = make_run("data.splits={validation: val, test: null}", "data.limit={train: 10}")
    assert {split: len(dataset) for split, dataset in run.datasets.items()} == {"train": 10, "validation": 15}
    assert (
        "2 files that are no images, or hidden, are ignored (.txt 1, hidden 1), such as images/train/red/.hidden.png"
        in caplog.text
    )
    assert find_lines(caplog, "data: train 10, validation 15; blue")


def test_a_folder_of_classes_is_split_by_share():
    write_images(Path("all"), {"": 10})
    run = make_run("data.images=all", "data.validation_fraction=0.2")
    sizes = {split: len(dataset) for split, dataset in run.datasets.items()}
    assert sizes == {"train": 24, "validation": 6}
    names = [set(dataset.files.names) for dataset in run.datasets.values()]
    assert not names[0] & names[1]
    again = make_run("data.images=all", "data.validation_fraction=0.2", "train.seed=9")
    assert [set(dataset.files.names) for dataset in again.datasets.values()] == names


def test_a_function_returns_the_folder():
    Path("code.py").write_text("def folder(name):\n    return name\n")
    assert (
        len(
            make_run("data.images=null", "data.module=code.py:folder", "data.arguments={name: images}").datasets["test"]
        )
        == 18
    )
    with expect_problem("wrong-result data.module code.py:folder 'nowhere'", RecipeError):
        make_run("data.images=null", "data.module=code.py:folder", "data.arguments={name: nowhere}")


# -- images ------------------------------------------------------------------------------------------------------------


def damage(path: str) -> None:
    """Cut a file in half."""
    content = Path(path).read_bytes()
    Path(path).write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("plugins", [[], [WORKERS]], ids=["no workers", "workers"])
def test_truncated_image_is_named(plugins, monkeypatch):
    monkeypatch.setattr("fastloop_plugins.tasks.image.reading.TRIED", 1)
    write_images(Path("images"))
    damage("images/train/red/01.png")
    with expect_problem("reading-failed ValueError images/train/red/01.png", DataError):
        watched(plugins=plugins)


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_damaged_images_end_the_run_before_training(suffix):
    write_images(Path("images"))
    for name in ("train/red/01.png", "test/blue/03.png"):
        path = Path("images", name)
        Image.open(path).resize((200, 200)).save(path.with_suffix(f".{suffix}"))
        damage(str(path.with_suffix(f".{suffix}")))
        if suffix != "png":
            path.unlink()
    with pytest.raises(RecipeError) as caught:
        make_run()
    assert_problem(caught.value.problem, "image-unreadable 1 69")
    assert caught.value.problem.proposals == ["--with skip-unreadable"]
    assert str(caught.value).startswith((f"images/train/red/01.{suffix}: ", f"images/test/blue/03.{suffix}: "))
    assert not Path("out").exists()


def test_a_damaged_image_proposes_no_plugin_that_the_recipe_leaves_out():
    write_images(Path("images"))
    damage("images/train/red/01.png")
    with pytest.raises(RecipeError) as caught:
        make_run(plugins=[{"skip-unreadable": False}])
    assert str(caught.value).startswith("images/train/red/01.png: cannot be read as an image: ")
    assert str(caught.value).endswith("Replace or remove the file.")


def test_few_of_many_images_are_decoded_before_training_and_each_is_opened_once(monkeypatch):
    write_images(Path("images"))
    opened: list[Path] = []
    real_open = Image.open

    def recording_open(path: Path) -> Image.Image:
        opened.append(path)
        return real_open(path)

    monkeypatch.setattr(Image, "open", recording_open)
    splits = make_run().datasets.values()
    assert len(opened) == len(set(opened)) == 69
    size = sum(path.stat().st_size for path in opened)
    for limits, expected in (((10, 2**26), 10), ((4096, size // 3 + 1), 23)):
        opened.clear()
        for name, value in zip(("TRIED", "TRIED_BYTES"), limits, strict=True):
            monkeypatch.setattr(reading, name, value)
        reading.check_images(dataset.files for dataset in splits)
        assert len(opened) == len(set(opened)) == expected


def test_unreadable_images_are_skipped_with_the_plugin(caplog):
    write_images(Path("images"))
    damage("images/train/red/01.png")
    Path("images/train/red/02.png").write_text("no image")
    watch, summary = watched(plugins=["skip-unreadable"])
    assert summary["unreadable_samples"] == 2
    assert len(watch.pixels) == 2 * 34
    assert_problem(caplog, "sample-unreadable images/train/red/02.png")


def test_images_of_all_modes_are_red_green_and_blue():
    pixels = torch.zeros(2, 3, 3, dtype=torch.uint8)
    pixels[..., 0] = 204  # a color of the palette
    colored = Image.fromarray(pixels.numpy())
    for mode in ("RGB", "RGBA", "P", "L", "1", "CMYK"):
        image = colored.convert(mode)
        path = Path(f"{mode}.tiff" if mode == "CMYK" else f"{mode}.png")
        image.save(path, **({"transparency": b"\x00\x10"} if mode == "P" else {}))
        found = read_image(path)
        assert (found.mode, found.size) == ("RGB", (3, 2))
        if mode not in ("L", "1"):
            assert found.tobytes() == colored.tobytes(), mode
    rotated = Image.Exif()
    rotated[0x0112] = 6  # to be shown rotated by 90 degrees
    colored.save("rotated.jpg", exif=rotated)
    assert read_image(Path("rotated.jpg")).size == (2, 3)
    levels = np.arange(0, 2**16, 2**10, dtype=np.uint16).reshape(8, 8)
    Image.fromarray(levels).save("gray.png")
    Image.fromarray(levels).save("gray.tiff")
    assert (np.asarray(read_image(Path("gray.png"))) == (levels >> 8)[..., None]).all()
    with pytest.raises(
        ValueError, match=r"gray\.tiff: .*its pixels have mode I;16, expected 8 bits a channel: convert it"
    ):
        read_image(Path("gray.tiff"))
    frames = [colored, Image.new("RGB", (3, 2), "blue")]
    frames[0].save("moving.gif", save_all=True, append_images=frames[1:])
    assert read_image(Path("moving.gif")).tobytes() == colored.tobytes()
    colored.convert("F").save("float.tiff")
    with pytest.raises(ValueError, match=r"float\.tiff: .*its pixels have mode F, expected 8 bits a channel"):
        read_image(Path("float.tiff"))


# -- models ------------------------------------------------------------------------------------------------------------


@needs_timm
def test_models_of_timm():
    model = {"name": "timm/test_resnet", "pretrained": False}
    _, summary = watched("train.epochs=1", model=model, data={"image_size": 32})
    assert summary["status"] == "completed"
    arguments = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
    run = make_run(model={"name": "timm/test_vit", "pretrained": False, "arguments": arguments})
    assert sum(parameter.numel() for parameter in run.model.parameters()) < 10_000
    with expect_problem("unknown-model model.name 'resnet19'", RecipeError):
        make_run("model.name=timm/resnet19")
    with expect_problem("call-failed model.arguments timm/test_vit 'dept'", RecipeError):
        make_run(model={"name": "timm/test_vit", "pretrained": False, "arguments": {"dept": 1}})


@needs_torchvision
def test_models_of_torchvision():
    with expect_problem("unknown-model model.name 'resnet19'", RecipeError):
        make_run("model.name=torchvision/resnet19")
    with expect_problem("call-failed model.arguments torchvision/resnet18", RecipeError):
        make_run("model.arguments={depth: 1}", model=RESNET18)


WEIGHTS = r"model\.pretrained: the weights of {} cannot be loaded .*model\.weights=FILE"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "google/vit-base-patch16-224",
            "file-unreadable 'google/vit-base-patch16-224' model.name=FOLDER",
        ),
        pytest.param("timm/resnet18.a1_in1k", WEIGHTS.format("timm/resnet18.a1_in1k"), marks=needs_timm),
        pytest.param("torchvision/resnet18", WEIGHTS.format("torchvision/resnet18"), marks=needs_torchvision),
    ],
)
def test_pretrained_weights_without_a_network(name, expected, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # nothing listens there
    with expect_problem(expected, RecipeError):
        make_run("model.pretrained=true", f"model.name={name}", "data.image_size=32")


@needs_torchvision
def test_pretrained_torchvision_weights_get_a_new_head(monkeypatch, tmp_path, caplog):
    from torchvision import models
    from torchvision.models import ResNet18_Weights

    caplog.set_level("INFO", "fastloop")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    torch.manual_seed(1)
    original = models.resnet18()
    file = tmp_path / "torch" / "hub" / "checkpoints" / Path(ResNet18_Weights.DEFAULT.url).name
    file.parent.mkdir(parents=True)
    torch.save(original.state_dict(), file)
    run = make_run(model={"name": "torchvision/resnet18"}, data={"image_size": None})
    assert torch.equal(run.unwrap_model().layer4[1].conv2.weight, original.layer4[1].conv2.weight)
    assert run.unwrap_model().fc.weight.shape == (3, 512)
    assert find_lines(caplog, "torchvision/resnet18, fc.bias, fc.weight")
    assert run.datasets["test"][0][0].shape == (3, 224, 224), "as pretrained"


def test_a_checkpoint_keeps_its_head_for_its_classes_only(caplog):
    caplog.set_level("INFO", "fastloop")
    first = make_run()
    execute(first)
    weights = first.unwrap_model().classifier.weight
    model = {"name": "out/model"}
    same = make_run("output=same", model=model)
    assert torch.equal(same.unwrap_model().classifier.weight, weights)
    assert not find_lines(caplog, "classifier.weight")
    Path("images").rename("before")
    write_images(Path("images"), COUNTS, ("apple", "pear", "plum"))
    other = make_run("output=other", model=model)
    assert not torch.equal(other.unwrap_model().classifier.weight, weights)
    assert torch.equal(other.unwrap_model().vit.layernorm.weight, first.unwrap_model().vit.layernorm.weight)
    assert_problem(caplog, "head-reinitialized (classifier.bias, classifier.weight)")
    assert other.unwrap_model().config.id2label == {0: "apple", 1: "pear", 2: "plum"}


DEIT = {
    "model_type": "deit",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "patch_size": 8,
}
"""transformers has two classes of image classifiers for it."""
PVT = {
    "model_type": "pvt",
    "num_encoder_blocks": 2,
    "sequence_reduction_ratios": [2, 1],
    "num_attention_heads": [1, 2],
    "depths": [1, 1],
    "hidden_sizes": [16, 16],
    "patch_sizes": [4, 2],
    "strides": [4, 2],
    "mlp_ratios": [2, 2],
    "image_size": 16,
}
"""Its configuration has ``num_labels`` as an option, 1000 by default, and no ``id2label``."""


@pytest.mark.parametrize("config", [DEIT, PVT], ids=["deit", "pvt"])
def test_models_with_unusual_configurations_are_evaluated_as_they_were_trained(cli, config):
    summary = execute(make_run(model={"config": config}, epochs=1))
    exported = json.loads(Path("out/model/config.json").read_text())
    assert exported.get("num_labels", 3) == 3
    assert list(exported["id2label"].values()) == sorted(COLORS)
    code, _, err = cli("evaluate", "out", "--json", "found.json")
    assert (code, json.loads(Path("found.json").read_text())["metrics"]) == (0, summary["test"]), err


def test_micro_batches_of_one_image_are_refused_where_batch_norm_needs_two():
    """The last stage of this ResNet has one pixel."""
    small = {"data": {"image_size": 8}, "model": RESNET}
    with expect_problem("unsupported-model train.micro_batch_size 1 ResNet", RecipeError):
        make_run("train.micro_batch_size=1", **small)
    make_run("train.micro_batch_size=2", **small)


def test_initial_weights_of_a_file():
    run = make_run(model=RESNET, data={"image_size": 32})
    torch.save(run.unwrap_model().state_dict(), "weights.pt")
    again = make_run("train.seed=1", model=RESNET | {"weights": "weights.pt"}, data={"image_size": 32})
    for name, tensor in run.unwrap_model().state_dict().items():
        assert torch.equal(again.unwrap_model().state_dict()[name], tensor), name


def test_missing_or_broken_torchvision_is_an_error_with_a_remedy(monkeypatch):
    with monkeypatch.context() as context:
        context.setitem(sys.modules, "torchvision", None)
        with expect_problem("not-installed", RecipeError):
            make_run(model=RESNET18)
    Path("site/torchvision").mkdir(parents=True)
    Path("site/torchvision/__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend("site")
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    with expect_problem("import-failed torchvision RuntimeError: operator torchvision::nms torch 2.", RecipeError):
        make_run(model=RESNET18)


def test_missing_pillow_is_an_error_with_the_command(monkeypatch):
    installed = importlib.metadata.version

    def version(name: str) -> str:
        if name == "pillow":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with expect_problem("requirement-missing pillow>=11 'fastloop-train[vision]'", UsageError):
        make_run()


# -- losses, metrics and other plugins ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_metrics_equal_scikit_learns_on_the_predictions(cli):
    from sklearn.metrics import accuracy_score, f1_score, recall_score, top_k_accuracy_score

    names = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu")
    write_images(Path("images"), {"train": 3, "test": 4}, names)
    metrics = {"recall": {"type": "MulticlassRecall", "average": "macro"}}
    _, summary = watched("train.epochs=1", "data.validation_fraction=0.0", task={"metrics": metrics})
    found = predicted(cli, "out", "--split", "test")
    labels = [row["file"].split("/")[0] for row in found]
    guesses = [row["label"] for row in found]
    scores = [[row[f"probability_{name}"] for name in names] for row in found]
    expected = {
        "accuracy": accuracy_score(labels, guesses),
        "f1": f1_score(labels, guesses, average="macro"),
        "recall": recall_score(labels, guesses, average="macro"),
        "top5_accuracy": top_k_accuracy_score(labels, scores, k=5, labels=list(names)),
    }
    assert {name: summary["test"][name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_class_weights_do_not_depend_on_micro_batches():
    task = {"loss": {"name": "cross_entropy", "class_weights": "balanced", "label_smoothing": 0.1}}
    write_images(Path("images"))
    for index in range(8):
        Path(f"images/train/red/{index:02}.png").unlink()
    whole, whole_summary = watched(task=task)
    parts, parts_summary = watched("train.micro_batch_size=2", task=task)
    assert parts.losses == pytest.approx(whole.losses, rel=1e-4)
    assert parts_summary["test"] == pytest.approx(whole_summary["test"], rel=1e-4)
    assert whole.losses != pytest.approx(watched(task={})[0].losses, rel=1e-2)


@pytest.mark.slow
def test_channels_last_gives_the_same_losses():
    settings: dict[str, Any] = {"model": RESNET, "data": {"image_size": 32}}
    plain, _ = watched("train.lr=1e-3", **settings)
    fast, summary = watched("train.lr=1e-3", plugins=["channels-last"], **settings)
    assert "channels-last" in summary["plugins"]
    assert fast.losses == pytest.approx(plain.losses, rel=1e-3)


def test_the_example_mixup_mixes_images(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples" / "mixup" / "src")
    from mixup import Mixed, Mixup

    class Mixes(Watch):
        def before_step(self, run: Any, batches: list[Any]) -> None:
            assert all(isinstance(batch.inputs, Mixed) for batch in batches)

    Mixes.before_step.fastloop_impl = Watch.before_step.fastloop_impl  # type: ignore[attr-defined]
    watch = Mixes()
    summary = execute(make_run(objects=[Mixup(alpha=1.0), watch]))
    plain, _ = watched()
    assert watch.losses != plain.losses
    assert summary["test"]["accuracy"] > 0.3
    sys.modules.pop("mixup")


# -- exported models ---------------------------------------------------------------------------------------------------


def predicted(cli: Any, *arguments: Any) -> list[dict[str, Any]]:
    code, out, err = cli("predict", *map(str, arguments))
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with images, a recipe and its run, whose images are resized by another method than the default."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = load_recipe(
        str(
            write_recipe(
                folder, data={"interpolation": "bicubic", "mean": [0.5, 0.5, 0.5]}, plugins=[{"progress": False}]
            )
        )
    )
    from fastloop.lifecycle import build

    execute(build(resolve(recipe)))
    return folder


@pytest.mark.slow
def test_evaluate_equals_training_with_the_names_of_the_classes(trained, cli):
    summary = json.loads((trained / "out" / "summary.json").read_text())
    for split in ("test", "validation"):
        code, _, err = cli("evaluate", str(trained / "out"), "--split", split, "--json", "found.json")
        assert code == 0, err
        found = json.loads(Path("found.json").read_text())
        assert found["metrics"] == summary[split]
        assert [row["name"] for row in found["classes"]] == list(COLORS)


@pytest.mark.slow
def test_classes_and_inputs_are_those_of_the_exported_model(trained, cli, monkeypatch):
    write_images(Path("new"), {"test": 4}, ["red"])
    code, out, err = cli(
        "evaluate", str(trained / "out"), "data.images=new", "data.mean=[0,0,0]", "--json", "found.json"
    )
    assert code == 0, err
    monkeypatch.setenv("COLUMNS", "300")
    shown = " ".join(out.split())
    assert all(fact in shown for fact in ("data.mean: ", "image_mean=[0.5, 0.5, 0.5]", "[0.0, 0.0, 0.0]"))
    confusion = json.loads(Path("found.json").read_text())["confusion"]
    assert [sum(row) for row in confusion] == [0, 0, 4]
    write_images(Path("new"), {"test": 4}, ["yellow"])
    code, _, err = cli("evaluate", str(trained / "out"), "data.images=new")
    assert code == 2
    assert_problem(err, "unknown-label new/test/yellow: 'yellow' blue, green, red")


def test_predictions_equal_those_of_transformers(trained, cli):
    from transformers import pipeline

    classify = pipeline("image-classification", model=str(trained / "out" / "model"), device="cpu", top_k=3)
    names = sorted(
        path.relative_to(trained / "images" / "test").as_posix()
        for path in (trained / "images" / "test").rglob("*.png")
    )
    expected = [
        {item["label"]: item["score"] for item in classify(str(trained / "images" / "test" / name))} for name in names
    ]
    found = predicted(cli, trained / "out", trained / "images" / "test", "--chunk", 7)
    assert [row["file"] for row in found] == names
    for row, scores in zip(found, expected, strict=True):
        assert list(row) == ["file", "label", "probability", "probability_blue", "probability_green", "probability_red"]
        assert {name: row[f"probability_{name}"] for name in COLORS} == pytest.approx(scores, abs=1e-5)
        assert row["label"] == max(scores, key=scores.__getitem__)
        assert row["probability"] == pytest.approx(max(scores.values()), abs=1e-5)


def test_predict_images_by_path_and_from_an_exported_model(trained, cli, monkeypatch):
    images = sorted((trained / "images" / "test").rglob("*.png"))
    whole = predicted(cli, trained / "out", trained / "images" / "test")
    model = shutil.copytree(trained / "out" / "model", "model")
    (single,) = predicted(cli, model, images[3], trained / "r.yaml")
    assert (single["file"], single["label"]) == (str(images[3]), whole[3]["label"])
    assert single["probability"] == pytest.approx(whole[3]["probability"])
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(map(str, images[:2]))))
    assert [row["probability"] for row in predicted(cli, trained / "out", "-")] == pytest.approx(
        [row["probability"] for row in whole[:2]]
    )
    split = predicted(
        cli,
        trained / "out",
        "--split",
        "test",
        "--with",
        "dataloader-workers",
        "plugins.dataloader-workers.num_workers=2",
    )
    assert split == whole


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("nowhere.png", "file-missing nowhere.png"),
        ("empty", "nothing-to-predict"),
    ],
)
def test_nothing_to_predict_is_an_error(trained, cli, source, expected):
    Path("empty").mkdir()
    Path("empty/notes.txt").write_text("no image")
    code, _, err = cli("predict", str(trained / "out"), source)
    assert code == 2
    assert_problem(err, expected)


def test_predictions_continue_unless_a_file_of_the_folder_changed(trained, cli):
    shutil.copytree(trained / "images" / "test", "new")
    command = ["predict", str(trained / "out"), "new", "--out", "out.csv"]
    assert cli(*command)[0] == 0
    first = Path("out.csv").read_text()
    assert first.splitlines()[0] == "file,label,probability,probability_blue,probability_green,probability_red"
    write_image(Path("new/blue/00.png"), (200, 70, 60), (40, 40))
    Path("out.csv").unlink()
    assert cli(*command)[0] == 0
    assert Path("out.csv").read_text() != first


@needs_torchvision
def test_a_model_of_torchvision_is_read_from_its_folder(cli):
    from safetensors.torch import load_file
    from torchvision import models

    _, summary = watched("train.epochs=1", model=RESNET18, data={"image_size": 32})
    model = models.resnet18(num_classes=3)
    model.load_state_dict(load_file("out/model/model.safetensors"))
    code, _, err = cli("evaluate", "out", "--json", "found.json")
    assert code == 0, err
    found = json.loads(Path("found.json").read_text())
    assert found["metrics"] == summary["test"]
    assert [row["name"] for row in found["classes"]] == list(COLORS)
    Path("out/model/image_classification.json").unlink()
    code, _, err = cli("evaluate", "out")
    assert code == 2
    assert_problem(err, "wrong-format image_classification.json:")


# -- digits ------------------------------------------------------------------------------------------------------------


def test_digits_are_written_once(tmp_path):
    folder = Path(digit_images(train=40, validation=10, test=10, folder=str(tmp_path)))
    files = sorted(folder.rglob("*.png"))
    assert len(files) == 60
    assert read_image(files[0]).size == (32, 32)
    before = {path: path.stat().st_mtime_ns for path in files}
    assert Path(digit_images(train=40, validation=10, test=10, folder=str(tmp_path))) == folder
    assert {path: path.stat().st_mtime_ns for path in files} == before
    larger = Path(digit_images(train=50, validation=10, test=10, folder=str(tmp_path)))
    assert {path.name for path in (larger / "test").rglob("*.png")} == {
        path.name for path in (folder / "test").rglob("*.png")
    }
    with pytest.raises(ValueError, match="there are 1797 images, and the splits need 2020"):
        digit_images(train=2000, validation=10, test=10, folder=str(tmp_path))
    assert not list(tmp_path.glob(".*")), "nothing unfinished is left"
