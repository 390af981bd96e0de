"""The model and data of recipe.yaml: linear layers, and scikit-learn's 1,797 handwritten digits of 8 x 8 pixels."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset, TensorDataset


def network(width: int = 128) -> nn.Module:
    """Images (batch, 64) float32 -> logits (batch, 10)."""
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def digits(train: int = 600, wrong: int = 240) -> dict[str, Dataset]:
    """The train, validation and test splits: ``train`` images of 1,197, 300 and 300. ``wrong`` training labels are
    random."""
    images, targets = load_digits(return_X_y=True)
    inputs = torch.tensor(images, dtype=torch.float32) / 16  # pixel values are 0 to 16
    labels = torch.tensor(targets)
    random = torch.Generator().manual_seed(0)
    order = torch.randperm(len(labels), generator=random)
    labels[order[600 : 600 + wrong]] = torch.randint(10, (wrong,), generator=random)
    parts = {"validation": order[:300], "test": order[300:600], "train": order[600 : 600 + train]}
    return {split: TensorDataset(inputs[ids], labels[ids]) for split, ids in parts.items()}
