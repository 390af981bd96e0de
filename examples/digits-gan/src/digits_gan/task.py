"""The networks and the data: scikit-learn's 1,797 handwritten digits of 8 x 8 pixels."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import Dataset, TensorDataset

LATENT = 16
"""Numbers that the generator makes an image from."""


class Networks(nn.Module):
    """A generator and a discriminator of images of 64 pixels, values 0 to 1."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(LATENT, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 64), nn.Sigmoid()
        )
        self.discriminator = nn.Sequential(
            nn.Linear(64, width),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.3),
            nn.Linear(width, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, 1),
        )

    def sample(self, count: int) -> Tensor:
        """Generated images, (count, 64) float32."""
        return self.generator(torch.randn(count, LATENT, device=self.generator[0].weight.device))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Images (batch, 64) -> scores (batch, 1) of them, and of as many generated ones. A high score means: real."""
        return self.discriminator(images), self.discriminator(self.sample(len(images)))


def digits(train: int = 1497, validation: int = 300) -> dict[str, Dataset]:
    """Images (64,) float32 and their labels, in random order. ``train``, ``validation``: how many to take."""
    images, labels = load_digits(return_X_y=True)
    # pixel values are 0 to 16
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    parts = {"train": order[:train], "validation": order[-validation:]}
    return {split: TensorDataset(*data[ids]) for split, ids in parts.items()}


def discriminator_loss(scores: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """The loss of the discriminator alone, for a run without ``gan``. ``labels`` are not used."""
    real, fake = scores
    return softplus(-real).mean() + softplus(fake).mean()
