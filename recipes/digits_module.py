"""Model and data of digits_module.yaml: scikit-learn's 1,797 handwritten digits of 8 x 8 pixels."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset


class Digits(nn.Module):
    """Two convolutions and a linear layer: images (batch, 1, 8, 8) float32 -> logits (batch, 10)."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(channels * 16, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


def digits(validation_fraction: float = 0.2, seed: int = 0) -> dict[str, Dataset]:
    """The train, validation and test splits. Validation and test share ``validation_fraction`` of the images
    equally."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("scikit-learn is not installed. Install it: pip install 'fastloop-train[digits]'") from error

    images, targets = load_digits(return_X_y=True)
    inputs = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16  # pixel values are 0 to 16
    labels = torch.tensor(targets)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    tail = int(len(labels) * validation_fraction)
    parts = {"train": order[tail:], "validation": order[: tail // 2], "test": order[tail // 2 : tail]}
    return {split: TensorDataset(inputs[ids], labels[ids]) for split, ids in parts.items()}
