"""Folders of small images, models that learn them in a second, and runs of several processes."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image
from training_runs import execute

from fastloop import Plugin, hookimpl
from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import load_recipe
from fastloop.run import Run

COLORS = {"blue": (60, 80, 200), "green": (70, 180, 90), "red": (200, 70, 60)}
COUNTS = {"train": 12, "validation": 5, "test": 6}
"""Images of each class."""
VIT = {
    "model_type": "vit",
    "architectures": ["ViTForImageClassification"],
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 16,
    "patch_size": 8,
}
"""Configuration of a vision transformer without dropout and batch norm: processes compute the same as one."""
RESNET = {
    "config": {
        "model_type": "resnet",
        "embedding_size": 8,
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "layer_type": "basic",
    }
}
"""A model that takes images of any size."""


def write_image(path: Path, color: tuple[int, int, int], size: tuple[int, int] = (24, 20)) -> Path:
    """Write an image of one color with noise, which depends on the path's last three parts."""
    rng = np.random.default_rng(zlib.crc32("/".join(path.parts[-3:]).encode()))
    noise = rng.normal(0, 70, (size[1], size[0], 3))
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((np.array(color) + noise).clip(0, 255).astype(np.uint8)).save(path)
    return path


def write_images(folder: Path, counts: Mapping[str, int] = COUNTS, classes: Iterable[str] = COLORS) -> Path:
    """Write ``SPLIT/CLASS/N.png``. A tenth of the images has the color of another class, so that metrics are not 1."""
    colors = list(COLORS.values())
    for split, count in counts.items():
        for number, name in enumerate(classes):
            for index in range(count):
                color = colors[(number + (index % 10 == 3)) % 3]
                write_image(folder / split / name / f"{index:02}.png", color, (24, 20) if index % 2 else (18, 30))
    return folder


def write_vit(folder: Path, **changes: Any) -> Path:
    """Write the configuration of a tiny vision transformer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(VIT | changes))
    return folder


def write_recipe(
    folder: Path = Path(),
    plugins: Iterable[Any] = (),
    model: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    task: Mapping[str, Any] | None = None,
    **train: Any,
) -> Path:
    """Write ``r.yaml``, and unless they are there, the images and the configuration that it uses by default.

    Args:
        task: Options of ``image-classification``.
    """
    if not (folder / "images").exists():
        write_images(folder / "images")
    write_vit(folder / "vit")
    tree = {
        "model": dict(model or {"name": "vit", "pretrained": False}),
        "data": {"images": "images", "image_size": 16, **(data or {})},
        "train": {"epochs": 2, "batch_size": 6, "lr": 1e-2, "seed": 7, "device": "cpu", **train},
        "plugins": [{"image-classification": dict(task or {})}, *plugins],
        "output": str(folder / "out"),
    }
    path = folder / "r.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def make_run(*overrides: str, resume: Path | None = None, objects: Iterable[Plugin] = (), **parts: Any) -> Run:
    """Build the run of ``write_recipe`` in the current folder."""
    recipe = load_recipe(str(write_recipe(**parts)), overrides)
    recipe.plugins |= {"progress": False}
    return build(resolve(recipe, objects=objects), resume=resume)


class Watch(Plugin):
    """Records each step: its loss, and for each sample, its epoch, id and a hash of its pixels."""

    name = "watch"

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.pixels: dict[tuple[int, int], str] = {}

    @hookimpl
    def before_step(self, run: Run, batches: list[Any]) -> None:
        for batch in batches:
            for index, image in zip(batch.ids, batch.inputs[0], strict=True):
                self.pixels[run.state.epoch, index] = hashlib.sha256(image.numpy().tobytes()).hexdigest()

    @hookimpl
    def after_step(self, loss: Any) -> None:
        self.losses.append(loss.item())


def watched(*overrides: str, **parts: Any) -> tuple[Watch, dict[str, Any]]:
    """Train the run of ``make_run``. Returns what ``Watch`` recorded, and the summary."""
    watch = Watch()
    return watch, execute(make_run(*overrides, objects=[watch], **parts))


def all_of(specs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train specs of ``watched``: their losses, pixels and metrics."""
    results = []
    for spec in specs:
        watch, summary = watched(**spec)
        pixels = {f"{epoch} {index}": value for (epoch, index), value in watch.pixels.items()}
        results.append(
            {"losses": watch.losses, "pixels": pixels, "validation": summary["validation"], "test": summary["test"]}
        )
    return results
