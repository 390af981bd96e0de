"""Tiny models of transformers without a head for the task, as pretrained ones are, and runs that give them one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import _plain_loops as plain
from _tiny_models import make_model, padding_side


def save_without_head(task: str, kind: str, folder: Path) -> None:
    """Write a tiny model of an architecture, without the weights outside its base model.

    Raises:
        ValueError: The class of the task defines no base model.
    """
    import transformers

    auto = plain.TASKS[task].auto
    images = task == "image-classification"
    make_model(kind, auto, None if images else plain.make_tokenizer(padding_side(kind)), folder)
    model: Any = getattr(transformers, auto).from_pretrained(folder)
    if model.base_model is model:
        raise ValueError(f"{type(model).__name__} defines no base model")
    model.base_model.save_pretrained(folder)


def linear_layers(model: nn.Module) -> list[str]:
    """Names of the linear and convolutional layers of the base model, for ``target_modules``."""
    inside = {id(module) for module in model.base_model.modules()}  # type: ignore[operator]
    names = []
    for name, module in model.named_modules():
        is_layer = type(module) in (nn.Linear, nn.Conv2d, Conv1D) and getattr(module, "groups", 1) == 1
        if is_layer and id(module) in inside:
            names.append(name)
    return names


def head_recipe(task: str, data: Path, model: Path, output: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The recipe of a run of one epoch with ``lora``.

    Args:
        data: The folder that ``write_data`` wrote.
        options: Those of ``lora``.
    """
    files = {split: str(data / f"{split}.jsonl") for split in ("train", "validation")}
    source = {"images": str(data / "images")} if task == "image-classification" else {"files": files}
    return {
        "model": {"name": str(model)},
        "data": plain.TASKS[task].data | source,
        "train": {"epochs": 1, "batch_size": 8, "lr": 0.01, "device": "cpu", "save_every": None},
        "plugins": [task, {"lora": options}, {"log": False}, {"progress": False}, {"speed-check": False}],
        "output": str(output),
    }


def inputs(task: str, data: Path, model: Path) -> dict[str, Tensor]:
    """The model's inputs for the validation split."""
    from transformers import AutoTokenizer

    if task == "image-classification":
        return {"pixel_values": torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))}
    rows = plain.read_rows(data, "validation", images=False)
    tokenizer = AutoTokenizer.from_pretrained(model)
    return plain.text_inputs(rows, tokenizer)


def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The model's logits in eval mode. Random numbers that it draws are the same in each call."""
    torch.manual_seed(0)
    with torch.no_grad():
        found: Tensor = model.eval()(**batch).logits
    return found
