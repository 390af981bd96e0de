"""A model, data and a recipe for tests of ``fastloop sweep --trials``."""

from __future__ import annotations

from typing import Any

CODE = """
import time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import Dataset

class Net(nn.Sequential):
    def __init__(self, width=4):
        if width == 13:
            raise ValueError("no width of 13")
        super().__init__(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3))

class Rows(Dataset):
    def __init__(self, wait=False):
        self.x, self.wait = torch.randn(48, 8, generator=torch.Generator().manual_seed(0)), wait
    def __len__(self):
        return 48
    def __getitem__(self, index):
        if self.wait and Path("run/trial-0001").exists() and not Path("free").exists():
            Path("waiting").touch()   # in the second trial
            time.sleep(0.05)
        return self.x[index], int(self.x[index, :3].argmax())

def rows(wait=False):
    return {"train": Rows(wait), "validation": Rows()}
"""
RECIPE: dict[str, Any] = {
    "model": {"module": "code.py:Net"},
    "data": {"module": "code.py:rows"},
    "train": {"epochs": 2, "batch_size": 8, "lr": 1e-2, "device": "cpu"},
    "plugins": [
        {
            "module": {
                "loss": "cross_entropy",
                "metrics": {"accuracy": {"type": "MulticlassAccuracy", "num_classes": 3}},
            }
        },
        {"checkpoint-best": {"monitor": "accuracy", "mode": "max"}},
    ],
    "output": "run",
}
