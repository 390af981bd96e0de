"""A task that classifies shapes in images.

The images are drawn with numpy when the run begins, so nothing is downloaded.

    plugins:
      - drawn-shapes: {size: 16, count: 2000, classes: 5}

Each image shows one gray shape of random size, brightness and position, with noise. The classes are, in this order,
disc, square, triangle, cross and ring. The model is a small convolutional network; another plugin's ``build_model``
replaces it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastloop import Output, Plugin, RecipeError, hookimpl, option

if TYPE_CHECKING:
    import numpy as np
    from fastloop.recipe import Recipe
    from torch import Tensor, nn
    from torchmetrics import MetricCollection

SHAPES = ("disc", "square", "triangle", "cross", "ring")
NOISE = 0.1
"""Standard deviation of the noise, where black is 0 and white is 1."""


class DrawnShapes(Plugin):
    """Trains a classifier of drawn shapes."""

    name = "drawn-shapes"
    slot = "task"
    fallback_hooks = ("build_model", "compute_loss")  # another plugin may answer these instead

    size: int = option("Height and width of an image in pixels.", default=16, ge=8)
    count: int = option(
        "Training images. The validation and the test split have a quarter as many each.", default=2000, ge=4
    )
    classes: int = option("Number of shapes to use.", default=len(SHAPES), ge=2, le=len(SHAPES))
    channels: int = option("Channels of the first convolution; the second has twice as many.", default=16, ge=1)
    seed: int = option("Seed of the images, independent of train.seed.", default=0, ge=0)

    @hookimpl
    def check_recipe(self, recipe: Recipe) -> None:
        for section in ("model", "data"):
            if getattr(recipe, section):
                raise RecipeError(
                    f"{recipe.where}: {section}: 'drawn-shapes' has its own. "
                    f"Remove the section; see `fastloop plugins drawn-shapes`."
                )

    @hookimpl
    def build_datasets(self) -> Mapping[str, Any]:
        import numpy as np
        import torch
        from torch.utils.data import TensorDataset

        datasets = {}
        for number, (split, count) in enumerate(
            {"train": self.count, "validation": self.count // 4, "test": self.count // 4}.items()
        ):
            rng = np.random.default_rng((self.seed, number))  # a split does not depend on the sizes of the others
            labels = rng.integers(self.classes, size=count)
            datasets[split] = TensorDataset(torch.from_numpy(draw(labels, self.size, rng)), torch.from_numpy(labels))
        return datasets

    @hookimpl
    def build_model(self) -> nn.Module:
        from torch import nn

        channels = self.channels
        return nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(4),
            nn.Flatten(),
            nn.Linear(2 * channels * 16, self.classes),
        )

    @hookimpl
    def build_metrics(self) -> MetricCollection:
        from torchmetrics import MetricCollection
        from torchmetrics.classification import MulticlassAccuracy

        return MetricCollection({"accuracy": MulticlassAccuracy(self.classes, average="micro")})

    @hookimpl
    def compute_loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Output:
        from torch.nn.functional import cross_entropy

        images, labels = batch
        logits = model(images)
        return Output(cross_entropy(logits.float(), labels), logits, labels)


def draw(labels: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Draw the shapes with indices ``labels``, of shape (n,): returns (n, 1, size, size) float32, black 0 and white
    1."""
    import numpy as np

    def some(low: float, high: float) -> np.ndarray:
        return rng.uniform(low, high, (len(labels), 1, 1))

    radius = some(0.22, 0.4) * size
    middle = (some(0.4, 0.6) * size, some(0.4, 0.6) * size)
    down, right = np.mgrid[:size, :size] + 0.5  # centres of the pixels
    # the shape extends from -1 to 1
    y = (down - middle[0]) / radius
    x = (right - middle[1]) / radius
    distance = np.hypot(x, y)
    far = np.maximum(abs(x), abs(y))
    near = np.minimum(abs(x), abs(y))
    inside = np.select(
        [labels[:, None, None] == index for index in range(len(SHAPES))],
        [
            distance <= 1,
            far <= 0.9,
            (abs(y) <= 0.9) & (abs(x) <= (y + 0.9) / 2),
            (near <= 0.3) & (far <= 1),
            (distance >= 0.6) & (distance <= 1),
        ],
    )
    images = inside * some(0.5, 1.0) + rng.normal(0.0, NOISE, inside.shape)
    return images[:, None].astype(np.float32)
