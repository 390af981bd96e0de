"""The callbacks of docs/write-a-plugin.md: fastloop's is not longer than others, and those of installed ones run."""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastloop.testing import tiny_data, tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "write-a-plugin.md"
FILES = dict(re.findall(r'(?ms)^```python title="(perplexity\w*\.py)"\n(.*?)^```$', PAGE.read_text(encoding="utf-8")))
FRAMEWORKS = {"fastloop": "perplexity.py", "HF Trainer": "perplexity_hf.py", "Lightning": "perplexity_lightning.py"}
FRAMEWORKS |= {"Composer": "perplexity_composer.py"}


def made(file: str) -> Any:
    """The class that a file defines."""
    namespace: dict[str, Any] = {"__name__": "callbacks"}
    exec(compile(FILES[file], file, "exec"), namespace)
    return namespace["Perplexity"]


def lines(file: str) -> int:
    ast.parse(FILES[file])
    assert max(map(len, FILES[file].splitlines())) < 100
    return sum(bool(line.strip()) for line in FILES[file].splitlines())


def test_ours_is_not_longer_and_the_table_has_the_counts():
    counts = [lines(file) for file in FRAMEWORKS.values()]
    assert counts[0] == min(counts)
    text = PAGE.read_text(encoding="utf-8")
    assert f"| | {' | '.join(FRAMEWORKS)} |" in text
    assert f"| lines of code | {' | '.join(map(str, counts))} |" in text


def test_ours_logs_and_stops(tiny_run):
    result = tiny_run([made("perplexity.py")()], epochs=60, lr=3e-2, log_every=1)
    assert result.summary["reason"] == "the validation loss is below 0.5"
    assert result.summary["steps"] < 60 * 9
    assert result.summary["validation"]["loss"] < 0.5
    log = (result.trainer.run.folder / "metrics.jsonl").read_text()
    found = [float(value) for value in re.findall(r'"perplexity": ([\d.]+)', log)]
    assert found == pytest.approx([math.exp(loss) for loss in result.losses], rel=1e-4)


class Model(nn.Module):
    """The tiny model as transformers' Trainer calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = tiny_model()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.layers(inputs)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


@pytest.mark.slow
def test_that_of_transformers_logs_and_stops(tmp_path):
    from transformers import Trainer, TrainingArguments

    train, validation = ([{"inputs": x, "labels": y} for x, y in data] for data in (tiny_data(), tiny_data(32, seed=1)))
    settings = {
        "per_device_train_batch_size": 8,
        "learning_rate": 3e-2,
        "num_train_epochs": 60,
        "logging_steps": 1,
        "eval_strategy": "epoch",
    }
    quiet = {
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    trainer = Trainer(
        Model(), TrainingArguments(tmp_path, **settings, **quiet), train_dataset=train, eval_dataset=validation
    )
    trainer.add_callback(made("perplexity_hf.py")(trainer))
    trainer.train()
    history = trainer.state.log_history
    losses, found = ([entry[name] for entry in history if name in entry] for name in ("loss", "perplexity"))
    assert found == pytest.approx([math.exp(float(loss)) for loss in losses], rel=1e-3)
    assert trainer.state.global_step < 60 * 9
    evaluated = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    assert evaluated[-1] < 0.5 <= min(evaluated[:-1])
