"""The private names of torch that ``_watched_loader`` and ``fastloop.data.iterables`` use are there.

Modules:
    plugins/fastloop_plugins/data/_watched_loader.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker

from fastloop_plugins.data._watched_loader import CHECKED_WITH, PRIVATE, PRIVATE_OF_ITERATOR


def gone(name: str) -> str:
    return (
        f"torch {torch.__version__} has no {name}, which fastloop uses since torch {CHECKED_WITH}. Adapt "
        "_watched_loader.py or streams.py."
    )


def test_torch_has_the_private_names_that_watch_workers():
    assert hasattr(worker, "_worker_info"), gone("worker._worker_info")
    for owner, names in PRIVATE.items():
        for name in names:
            assert hasattr(owner, name), gone(f"{owner.__name__}.{name}")
    loader = DataLoader([1, 2], num_workers=1)
    batches = iter(loader)
    for name in PRIVATE_OF_ITERATOR:
        assert hasattr(batches, name), gone(f"{type(batches).__name__}.{name}")
    assert hasattr(loader, "_iterator"), gone("DataLoader._iterator")


def test_the_checked_release_is_the_pinned_one():
    pins = (Path(__file__).parents[3] / "constraints.txt").read_text()
    assert f"\ntorch=={CHECKED_WITH}." in pins, (
        "constraints.txt pins another release of torch: read torch/utils/data/dataloader.py of it, and then set "
        "CHECKED_WITH"
    )
