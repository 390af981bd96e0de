"""Handwritten digits of scikit-learn, whose difficulty is the distance to the mean image of their class."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset


class Digits(TensorDataset):
    """Images (N, 64) and labels (N,), with the attribute ``difficulty``: a number for each image."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        super().__init__(images, labels)
        means = torch.stack([images[labels == label].mean(0) for label in range(10)])
        self.difficulty = (images - means[labels]).norm(dim=1).tolist()


def digits(train: int = 1200) -> dict[str, Digits]:
    """Training and validation images."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    pixels = torch.tensor(images, dtype=torch.float32)[order] / 16  # of 0 to 16
    targets = torch.tensor(labels)[order]
    return {"train": Digits(pixels[:train], targets[:train]), "validation": Digits(pixels[train:], targets[train:])}


def network() -> nn.Module:
    """A small classifier."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
