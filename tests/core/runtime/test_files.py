"""Files that fastloop writes have the mode that the user's umask gives.

Modules:
    core/fastloop/runtime/files.py
"""

from __future__ import annotations

import csv
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from text_helpers import TINY, rows
from training_runs import execute

from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import load_recipe


@pytest.fixture(params=[0o027, 0o002], ids=oct)
def umask(request) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder: str) -> dict[str, int]:
    """The permissions of each file in a folder."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path): stat.S_IMODE(path.stat().st_mode) for path in files}


def train(plugins: list[object], output: str = "run", name: str | None = None) -> None:
    """Train from scratch, or the exported model ``name``."""
    with Path("a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["text", "label"])
        writer.writeheader()
        writer.writerows(rows())
    recipe = {
        "model": {"config": TINY, "tokenizer": {"kind": "word"}} if name is None else {"name": name},
        "data": {"files": {"train": "a.csv", "validation": "a.csv"}, "label": "label", "max_length": 16},
        "train": {"epochs": 1, "batch_size": 8, "device": "cpu"},
        "plugins": ["checkpoint-best", *plugins],
        "output": output,
    }
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    execute(build(resolve(load_recipe("recipe.yaml"))))


def assert_usual(folder: str, umask: int, some: str) -> None:
    found = modes(folder)
    assert any(path.endswith(some) for path in found), found
    assert {path: mode for path, mode in found.items() if mode != 0o666 & ~umask} == {}


def test_a_run_and_its_exports_have_the_mode_of_new_files(umask, cli):
    train([])
    assert_usual("run/checkpoints", umask, "model.safetensors")
    assert_usual("run/model", umask, "model.safetensors")
    assert_usual("run", umask, "summary.json")
    Path("run/model/model.safetensors").chmod(0o600)  # as earlier versions wrote it
    code, out, err = cli("export", "run", "--to", "safetensors", "--out", "copy")
    assert code == 0, out + err
    assert_usual("copy", umask, "model.safetensors")
    code, out, err = cli("export", "run", "--checkpoint", "last", "--to", "safetensors", "--out", "last")
    assert code == 0, out + err
    assert_usual("last", umask, "model.safetensors")


def test_adapters_have_the_mode_of_new_files(umask):
    pytest.importorskip("peft")
    train([], output="base")
    train([{"lora": {"r": 2, "merge": False, "target_modules": ["q_lin"]}}], name="base/model")
    assert_usual("run", umask, "adapter_model.safetensors")


def test_what_the_trainer_saves_has_the_mode_of_new_files(umask):
    import torch
    from torch.utils.data import TensorDataset

    from fastloop import Trainer

    data = TensorDataset(torch.randn(16, 4), torch.randint(2, (16,)))
    trainer = Trainer(torch.nn.Linear(4, 2), data, loss=torch.nn.CrossEntropyLoss(), epochs=1, output="run")
    trainer.fit()
    Path("saved").mkdir()
    Path("saved/private.txt").touch(mode=0o600)
    trainer.save_pretrained("saved")
    found = modes("saved")
    assert found.pop("saved/private.txt") == 0o600
    assert found["saved/model.safetensors"] == 0o666 & ~umask
    assert {*found.values()} == {0o666 & ~umask}
