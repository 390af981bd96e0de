"""The inputs of image models: they equal those of the image processor or transform of the model's own library.

Modules:
    plugins/fastloop_plugins/tasks/image/processors.py
    plugins/fastloop_plugins/tasks/image/transforms.py
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_helpers import RESNET, VIT, make_run, watched, write_image, write_images
from image_libraries import importable, needs_timm, needs_torchvision
from PIL import Image

from fastloop import RecipeError
from fastloop.testing import expect_problem
from fastloop_plugins.models.hub import quiet
from fastloop_plugins.tasks.image.batches import Transform
from fastloop_plugins.tasks.image.data import Augment, InputChanges
from fastloop_plugins.tasks.image.processors import SIZE_CHANGES, TransformersProcessor

SHAPES = {"square": (60, 60), "wide": (100, 40), "tall": (37, 83)}
"""Width and height."""
SQUARE = {"height": 32, "width": 32}
CASES: dict[str, dict[str, Any]] = {
    "Beit": {"size": SQUARE},
    "Beit, cropped": {"size": {"height": 40, "width": 40}, "crop_size": SQUARE, "do_center_crop": True},
    "Bit": {"size": {"shortest_edge": 36}, "crop_size": SQUARE},
    "CLIP": {"size": {"shortest_edge": 32}, "crop_size": SQUARE},
    "ConvNext": {"size": {"shortest_edge": 32}, "crop_pct": 0.8},
    "ConvNext, whole": {"size": {"shortest_edge": 384}},
    "DeiT": {"size": {"height": 37, "width": 37}, "crop_size": SQUARE},
    "Donut": {"size": {"height": 32, "width": 24}},
    "EfficientNet": {"size": SQUARE},
    "EfficientNet, -1 to 1": {
        "size": SQUARE,
        "rescale_factor": 1 / 127.5,
        "rescale_offset": True,
        "include_top": False,
    },
    "Gemma3": {"size": SQUARE},
    "Levit": {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}},
    "MobileNetV1": {"size": {"shortest_edge": 37}, "crop_size": SQUARE},
    "MobileNetV2": {"size": {"shortest_edge": 37}, "crop_size": SQUARE},
    "MobileViT": {"size": {"shortest_edge": 36}, "crop_size": SQUARE},
    "MobileViT, larger crop": {"size": {"shortest_edge": 28}, "crop_size": SQUARE},
    "MobileViT, RGB": {"size": {"shortest_edge": 36}, "crop_size": SQUARE, "do_flip_channel_order": False},
    "Perceiver": {"size": SQUARE, "crop_size": {"height": 36, "width": 36}},
    "PoolFormer": {"size": {"shortest_edge": 32}, "crop_size": SQUARE},
    "PPLCNet": {},
    "Pvt": {"size": SQUARE},
    "Segformer": {"size": SQUARE},
    "Siglip": {"size": SQUARE},
    "TextNet": {"size": {"shortest_edge": 64}, "crop_size": SQUARE, "do_center_crop": True},
    "ViT": {"size": SQUARE},
    "ViT, rectangular": {"size": {"height": 32, "width": 48}},
    "ViT, not normalized": {"size": SQUARE, "do_normalize": False},
    "ViT, not rescaled": {"size": SQUARE, "do_rescale": False},
    "ViT, bytes": {"size": SQUARE, "do_rescale": False, "do_normalize": False},
    "ViT, nearest": {"size": SQUARE, "resample": 0},
    "ViT, lanczos": {"size": SQUARE, "resample": 1},
}
"""Image processors of transformers, and settings of them."""
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "TextNet": ({"size": {"shortest_edge": 64}}, "do_center_crop"),
    "CLIP": ({"do_center_crop": False}, "do_center_crop"),
    "Siglip2": ({}, "shape"),
    "ImageGPT": ({"clusters": [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]}, "input_ids"),
}
"""Those whose results are no inputs of one size, and what their error names."""
TORCHVISION_ONLY = {"PPLCNet"}


def settings_of(case: str) -> dict[str, Any]:
    """``preprocessor_config.json`` of a case."""
    name = case.partition(",")[0]
    if name in TORCHVISION_ONLY:
        pytest.importorskip("torchvision")
    return {"image_processor_type": f"{name}ImageProcessor", **CASES[case]}


def write_settings(folder: Path, settings: dict[str, Any]) -> Any:
    """Write the settings, and load transformers' processor of them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return load(folder)


def load(folder: str | Path) -> Any:
    """transformers' image processor of a folder."""
    from transformers import AutoImageProcessor

    with quiet():
        return AutoImageProcessor.from_pretrained(folder)


def noise(width: int, height: int) -> Image.Image:
    """An image whose neighboring pixels differ, so that each rule of resizing gives other values."""
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_the_table_has_each_image_processor_of_image_classifiers():
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

    known = {f"{case.partition(',')[0]}ImageProcessor" for case in [*CASES, *REFUSED]} | {"TimmWrapperImageProcessor"}
    used = set()
    for kind in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:
        for name in IMAGE_PROCESSOR_MAPPING_NAMES.get(kind, {}).values():
            used.add(name.removesuffix("Pil").removesuffix("Fast"))
    assert used - known == set()


@pytest.mark.parametrize("case", CASES)
def test_inputs_equal_those_of_the_image_processor(case, tmp_path):
    settings = settings_of(case)
    theirs = write_settings(tmp_path, settings)
    transform = Transform(pickle.loads(pickle.dumps(TransformersProcessor.from_settings(settings))))
    for size in SHAPES.values():
        image = noise(*size)
        expected = theirs(image, return_tensors="pt")["pixel_values"][0]
        assert torch.equal(transform(image, random()), expected.float()), size


@pytest.mark.parametrize("case", CASES)
def test_training_ends_in_the_values_channels_and_size_of_an_evaluation(case, tmp_path):
    settings = settings_of(case)
    theirs = write_settings(tmp_path, settings)
    processor = TransformersProcessor.from_settings(settings)
    image = noise(processor.width, processor.height)
    shape = processor.width / processor.height
    whole = Augment(scale=[1.0, 1.0], ratio=[shape, shape], flip=0.0)  # the random part is the image
    resizing = {key: False for key in SIZE_CHANGES if getattr(theirs, key, None)}
    expected = theirs(image, return_tensors="pt", **resizing)["pixel_values"][0].float()
    assert torch.equal(Transform(processor, whole)(image, random()), expected)
    assert torch.equal(Transform(processor, Augment(crop=False, flip=1.0))(image, random()), processor(image).flip(2))
    assert Transform(processor, Augment())(noise(90, 50), random()).shape == processor(image).shape


@pytest.mark.parametrize("name", REFUSED)
def test_an_image_processor_without_inputs_of_one_size_is_refused(name):
    settings, message = REFUSED[name]
    write_checkpoint(Path("model"), {"image_processor_type": f"{name}ImageProcessor", **settings})
    with expect_problem(f"file-unreadable model.name ImageProcessor {name} {message}", RecipeError):
        make_run(**recipe())
    assert not Path("out").exists()


@pytest.mark.skipif(importable("torchvision"), reason="torchvision is installed")
def test_an_image_processor_that_needs_torchvision_is_refused_without_it():
    (name,) = TORCHVISION_ONLY
    write_checkpoint(Path("model"), {"image_processor_type": f"{name}ImageProcessor"})
    with expect_problem("file-unreadable model.name", RecipeError):
        make_run(**recipe())


# -- runs --------------------------------------------------------------------------------------------------------------


def write_checkpoint(folder: Path, settings: dict[str, Any] | None, **model: Any) -> Path:
    """Write a small model, by default a ResNet, which takes images of any size, and its image processor."""
    from transformers import AutoConfig, AutoModelForImageClassification

    config = AutoConfig.for_model(**(model or RESNET["config"]), num_labels=3)
    AutoModelForImageClassification.from_config(config).save_pretrained(folder)
    if settings is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def recipe(**data: Any) -> dict[str, Any]:
    """A recipe with the checkpoint ``model`` as it is."""
    return {"model": {"name": "model"}, "data": {"image_size": None, **data}}


def write_wide_images(folder: Path) -> None:
    """Images whose center is not the whole, of few pixels."""
    for split, count in (("train", 3), ("validation", 2), ("test", 2)):
        for name, color in (("blue", (60, 80, 200)), ("green", (70, 180, 90)), ("red", (200, 70, 60))):
            for index in range(count):
                write_image(folder / split / name / f"{index}.png", color, (60, 30) if index else (30, 50))


@pytest.mark.parametrize(
    "case",
    [
        "MobileViT",
        "ViT, rectangular",
        pytest.param("EfficientNet", marks=pytest.mark.slow),
        pytest.param("Levit", marks=pytest.mark.slow),
        pytest.param("Perceiver", marks=pytest.mark.slow),
    ],
)
def test_evaluations_predictions_and_exports_have_the_inputs_of_the_checkpoint(case, cli):
    from transformers import pipeline

    write_wide_images(Path("images"))
    write_checkpoint(Path("model"), settings_of(case))
    theirs = load("model")
    run = make_run(**recipe())
    for dataset in (run.datasets["validation"], run.datasets["test"]):
        for index, name in enumerate(dataset.files.names):
            image = Image.open(dataset.files.root / name)
            expected = theirs(image, return_tensors="pt")["pixel_values"][0]
            assert torch.equal(dataset[index][0], expected), name
    _, summary = watched("train.epochs=1", **recipe())
    exported = load("out/model")
    image = noise(90, 50)
    assert torch.equal(
        exported(image, return_tensors="pt")["pixel_values"], theirs(image, return_tensors="pt")["pixel_values"]
    )
    code, _, err = cli("evaluate", "out", "--json", "metrics.json")
    assert code == 0, err
    assert json.loads(Path("metrics.json").read_text())["metrics"] == summary["test"]
    code, out, err = cli("predict", "out/model", "images/test")
    assert code == 0, err
    classify = pipeline("image-classification", model="out/model", device="cpu", top_k=3)
    for row in map(json.loads, out.splitlines()):
        scores = {item["label"]: item["score"] for item in classify(f"images/test/{row['file']}")}
        assert {name: row[f"probability_{name}"] for name in scores} == pytest.approx(scores, abs=1e-6)


def test_a_checkpoint_without_an_image_processor_has_the_default():
    write_checkpoint(Path("model"), None)
    run = make_run(**recipe())
    assert run.datasets["test"][0][0].shape == (3, 224, 224)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        '{"image_processor_type": "NoImageProcessor"}',
        '{"image_processor_type": "ViTImageProcessor", "size": {"edge": 3}}',
    ],
    ids=["damaged", "unknown type", "unknown size"],
)
def test_an_image_processor_that_cannot_be_loaded_is_an_error(content):
    write_checkpoint(Path("model"), None)
    Path("model/preprocessor_config.json").write_text(content)
    with expect_problem("file-unreadable model.name", RecipeError):
        make_run(**recipe())


def test_an_adapter_has_the_image_processor_that_it_was_trained_with(cli):
    pytest.importorskip("peft")
    write_wide_images(Path("images"))
    write_checkpoint(Path("model"), settings_of("MobileViT"), **VIT | {"image_size": 48})
    lora = {"lora": {"target_modules": "all-linear", "merge": False}}
    _, summary = watched("train.epochs=1", plugins=[lora], **recipe(image_size=48))
    assert Path("out/model/adapter_config.json").is_file()
    code, _, err = cli("evaluate", "out", "--json", "metrics.json")
    assert code == 0, err
    assert json.loads(Path("metrics.json").read_text())["metrics"] == pytest.approx(summary["test"], rel=1e-5)
    again = make_run("output=again", model={"name": "out/model"}, data={"image_size": None})
    assert again.datasets["test"][0][0].shape == (3, 48, 48)


# -- keys of the recipe ------------------------------------------------------------------------------------------------

CHANGES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("ViT", {"image_size": 16}, {"size": {"height": 16, "width": 16}}),
    ("ViT, rectangular", {"image_size": 16}, {"size": {"height": 16, "width": 16}}),
    ("DeiT", {"image_size": 64}, {"size": {"height": 74, "width": 74}, "crop_size": {"height": 64, "width": 64}}),
    ("CLIP", {"image_size": 64}, {"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}}),
    ("ConvNext", {"image_size": 64}, {"size": {"shortest_edge": 64}}),
    ("ConvNext", {"crop_fraction": 1.0}, {"crop_pct": 1.0}),
    ("Levit", {"image_size": 56}, {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}),
    ("Perceiver", {"image_size": 64}, {"size": {"height": 64, "width": 64}, "crop_size": {"height": 72, "width": 72}}),
    ("CLIP", {"crop_fraction": 0.5}, {"size": {"shortest_edge": 64}}),
    ("CLIP", {"image_size": 64, "crop_fraction": 0.5},
     {"size": {"shortest_edge": 128}, "crop_size": {"height": 64, "width": 64}}),
    ("ViT", {"crop_fraction": 0.5}, {"size": {"shortest_edge": 64}, "do_center_crop": True, "crop_size": SQUARE}),
    ("ViT", {"interpolation": "bicubic"}, {"resample": 3}),
    ("ViT", {"mean": [0.1, 0.2, 0.3]}, {"image_mean": [0.1, 0.2, 0.3]}),
    ("ViT, not normalized", {"std": [0.1, 0.2, 0.3]}, {"do_normalize": True, "image_std": [0.1, 0.2, 0.3]}),
    ("ViT, not rescaled", {"mean": [0.1, 0.2, 0.3]}, {"do_rescale": True, "image_mean": [0.1, 0.2, 0.3]}),
]  # fmt: skip
"""A case, the keys of ``data``, and the settings of transformers' processor that they stand for."""


@pytest.mark.parametrize(("case", "keys", "settings"), CHANGES)
def test_keys_of_the_recipe_change_the_image_processor(case, keys, settings, tmp_path):
    theirs = write_settings(tmp_path, settings_of(case) | settings)
    ours = TransformersProcessor.from_settings(settings_of(case)).changed(InputChanges(**keys), "r.yaml: data")
    for size in SHAPES.values():
        image = noise(*size)
        assert torch.equal(ours(image), theirs(image, return_tensors="pt")["pixel_values"][0]), size


@pytest.mark.parametrize(
    ("case", "keys"),
    [
        ("Levit", {"crop_fraction": 1.0}),
        ("ConvNext, whole", {"crop_fraction": 0.5}),
        ("Perceiver", {"crop_fraction": 0.5}),
        ("ViT, rectangular", {"crop_fraction": 0.5}),
        ("Segformer", {"crop_fraction": 0.5}),
        ("MobileViT", {"mean": [0.1, 0.2, 0.3]}),
        ("EfficientNet", {"mean": [0.1, 0.2, 0.3]}),
        ("EfficientNet, -1 to 1", {"std": [0.1, 0.2, 0.3]}),
    ],
)
def test_keys_that_an_image_processor_would_ignore_are_refused(case, keys):
    processor = TransformersProcessor.from_settings(settings_of(case))
    (key,) = keys
    with pytest.raises(RecipeError, match=rf"r\.yaml: data[.:] ?{key}: .*preprocessor_config\.json"):
        processor.changed(InputChanges(**keys), "r.yaml: data")


def test_changed_inputs_are_exported(cli):
    write_wide_images(Path("images"))
    write_checkpoint(Path("model"), settings_of("MobileViT"))
    _, summary = watched("train.epochs=1", **recipe(image_size=48))
    exported = load("out/model")
    pixels = exported(noise(90, 50), return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, 3, 48, 48)
    code, out, err = cli("evaluate", "out", "data.image_size=32", "--json", "metrics.json")
    assert code == 0, err
    assert "data.image_size: " in " ".join(out.split())
    assert json.loads(Path("metrics.json").read_text())["metrics"] == summary["test"]


@pytest.mark.parametrize(
    ("case", "shorter_side"),
    [("CLIP", 32), ("Bit", 36), ("ConvNext", 40), ("Levit", 32), ("ViT", 1), ("ViT, rectangular", 1), ("DeiT", 1)],
)
def test_the_resized_shorter_side_limits_the_pixels_of_an_image(case, shorter_side):
    assert TransformersProcessor.from_settings(settings_of(case)).shorter_side == shorter_side


# -- torchvision and timm ----------------------------------------------------------------------------------------------


@needs_torchvision
@pytest.mark.parametrize("name", ["resnet18", "vit_b_16", "efficientnet_b0"])
def test_inputs_equal_those_of_torchvisions_weights(name):
    from torchvision.models import get_model_weights

    from fastloop_plugins.tasks.image.libraries import LibraryModel

    theirs = get_model_weights(name).DEFAULT.transforms()
    model = LibraryModel(f"torchvision/{name}", {}, "r.yaml: model")
    ours = model.processor(True, InputChanges(), "r.yaml: data")
    again = pickle.loads(pickle.dumps(model.processor_from(json.loads(json.dumps(ours.settings)))))  # of an export
    for size in SHAPES.values():
        image = noise(*size)
        assert torch.equal(ours(image), theirs(image)), size
        assert torch.equal(again(image), theirs(image)), size
    small = noise(ours.width, ours.height)
    same = type(theirs)(crop_size=ours.height, resize_size=ours.height, mean=theirs.mean, std=theirs.std)
    assert torch.equal(ours.table(small), same(small))
    changed = model.processor(True, InputChanges(image_size=32, crop_fraction=0.5), "r.yaml: data")
    assert changed.settings["resize_size"] == 64
    assert changed(noise(90, 50)).shape == (3, 32, 32)


@needs_timm
@pytest.mark.parametrize("mode", ["center", "squash", "border"])
@pytest.mark.parametrize("size", [(3, 32, 32), (3, 32, 48)], ids=["square", "rectangular"])
def test_inputs_equal_those_of_timms_transforms(mode, size, monkeypatch):
    import timm
    from timm.data import create_transform, resolve_data_config

    from fastloop_plugins.tasks.image.libraries import LibraryModel

    weights = timm.get_pretrained_cfg("resnet18")
    for key, value in {"input_size": size, "crop_pct": 0.8, "crop_mode": mode}.items():
        setattr(weights, key, value)
    monkeypatch.setattr(timm, "get_pretrained_cfg", lambda name: weights)
    theirs = create_transform(**resolve_data_config(pretrained_cfg=weights.to_dict()), is_training=False)
    model = LibraryModel("timm/resnet18", {}, "r.yaml: model")
    ours = model.processor(True, InputChanges(), "r.yaml: data")
    again = pickle.loads(pickle.dumps(model.processor_from(json.loads(json.dumps(ours.settings)))))
    for image in [noise(*shape) for shape in SHAPES.values()]:
        assert torch.equal(ours(image), theirs(image))
        assert torch.equal(again(image), theirs(image))
    small = noise(size[2], size[1])
    assert torch.equal(Transform(ours, Augment(scale=[1, 1], ratio=[size[2] / size[1]] * 2, flip=0))(small, random()),
                       theirs.transforms[-1](theirs.transforms[-2](small)))  # fmt: skip
    assert model.processor(True, InputChanges(image_size=16), "r.yaml: data")(noise(90, 50)).shape == (3, 16, 16)


@needs_timm
def test_a_model_of_timm_in_transformers_keeps_its_transform(cli):
    from transformers import TimmWrapperConfig, TimmWrapperForImageClassification

    weights = {"input_size": [3, 32, 48], "crop_pct": 0.9, "crop_mode": "squash", "interpolation": "bicubic"}
    weights |= {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4]}
    config = {"architecture": "test_resnet", "num_classes": 3, "pretrained_cfg": weights}
    TimmWrapperForImageClassification(TimmWrapperConfig.from_dict(config)).save_pretrained("model")
    write_wide_images(Path("images"))
    theirs = load("model")
    run = make_run(**recipe())
    files = run.datasets["test"].files
    expected = theirs(Image.open(files.root / files.names[0]), return_tensors="pt")["pixel_values"][0]
    assert torch.equal(run.datasets["test"][0][0], expected)
    _, summary = watched("train.epochs=1", **recipe(image_size=64))
    assert load("out/model").data_config["input_size"] == (3, 64, 64)
    code, _, err = cli("evaluate", "out", "--json", "metrics.json")
    assert code == 0, err
    assert json.loads(Path("metrics.json").read_text())["metrics"] == summary["test"]


@needs_torchvision
def test_an_export_of_an_earlier_version_is_read(cli):
    """It has the fields of ``InputFormat``."""
    write_images(Path("images"))
    model = {"name": "torchvision/resnet18", "pretrained": False}
    _, summary = watched("train.epochs=1", model=model, data={"image_size": 32})
    file = Path("out/model/image_classification.json")
    form = {"image_size": 32, "crop_fraction": 0.875, "interpolation": "bilinear"}
    form |= {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
    file.write_text(json.dumps({"classes": json.loads(file.read_text())["classes"], "input": form}))
    code, _, err = cli("evaluate", "out", "--json", "metrics.json")
    assert code == 0, err
    assert json.loads(Path("metrics.json").read_text())["metrics"] == summary["test"]
