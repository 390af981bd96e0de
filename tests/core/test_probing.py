"""Forward passes on trial leave the model as it was: weights, buffers, configuration and attributes.

Modules:
    core/fastloop/probing.py
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from text_helpers import make_run, rows
from torch import Tensor, nn

from fastloop import Plugin
from fastloop.probing import probing
from fastloop.runtime.random_states import cpu_random_states
from fastloop_plugins.guards.metric_check import MetricCheck
from fastloop_plugins.tasks import _seq2seq_parts as _seq2seq_model
from fastloop_plugins.text import model as _text_model

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
CLASSIFY, TAG, LM, SEQ2SEQ = "text-classification", "token-classification", "causal-lm", "seq2seq"
BIG_BIRD = {"model_type": "big_bird", **SIZES, "block_size": 2, "num_random_blocks": 1}
"""Full attention for up to 12 tokens, block-sparse attention for more."""
ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
T5 = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
CASES = {
    "big_bird": (CLASSIFY, BIG_BIRD),
    "big_bird words": (TAG, BIG_BIRD),
    "bert": (CLASSIFY, {"model_type": "bert", **SIZES}),
    "longformer": (CLASSIFY, {"model_type": "longformer", **SIZES, "attention_window": 4}),
    "modernbert": (TAG, {"model_type": "modernbert", **SIZES, "num_hidden_layers": 3, "local_attention": 4}),
    "xlnet": (CLASSIFY, {"model_type": "xlnet", "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32}),
    "llama, dynamic rope": (
        LM,
        {"model_type": "llama", **SIZES, "max_position_embeddings": 32, "rope_parameters": ROPE},
    ),
    "mamba": (LM, {"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 2}),
    "t5": (SEQ2SEQ, T5),
}


def describe(
    value: Any, path: str = "model", found: dict[str, Any] | None = None, known: dict[int, str] | None = None
) -> dict[str, Any]:
    """Everything that a model consists of: where it is -> a value that ``==`` compares."""
    found, known = {} if found is None else found, {} if known is None else known
    if isinstance(value, Tensor):
        found[path] = (str(value.dtype), tuple(value.shape), value.detach().contiguous().numpy().tobytes())
    elif not isinstance(value, nn.Module | dict | list | tuple | set) and not hasattr(value, "to_dict"):
        found[path] = value if isinstance(value, int | float | str | bool | None) else (type(value), id(value))
    elif id(value) in known:
        found[path] = known[id(value)]
    else:
        known[id(value)] = path
        found[path] = (type(value), id(value), len(value) if isinstance(value, dict | list | tuple | set) else None)
        plain = vars(value) if not isinstance(value, dict | list | tuple | set) else value
        items = plain.items() if isinstance(plain, dict) else enumerate(plain)
        for name, item in items:
            describe(item, f"{path}.{name}", found, known)
    return found


class Changing(nn.Module):
    """Changes everything but its parameters in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("longest", torch.zeros(1), persistent=False)
        self.kind, self.sizes, self.cache, self.copies = (
            "sparse",
            [1, {"a": torch.ones(2)}],
            {"x": 1},
            (torch.zeros(1), [2]),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        self.kind, self.new, self.linear = "full", 3, nn.Linear(2, 2)
        self.seen += 1
        self.longest = torch.ones(3)
        self.sizes[1]["a"][0] = float("nan")  # type: ignore[index]
        self.sizes.append(4)
        self.cache.clear()
        self.copies[1].append(random.random())  # type: ignore[attr-defined]
        self.copies[0].add_(np.random.random() + torch.rand(1))
        self.register_forward_hook(lambda *_: None)
        self.extra = nn.Linear(1, 1)
        output: Tensor = self.linear(inputs)
        return output


@pytest.mark.parametrize("fails", [False, True])
def test_a_probe_restores_everything_that_a_forward_pass_changes(fails):
    model = Changing()
    model.linear.eval()
    before, states = describe(model), cpu_random_states()
    try:
        with probing(model):
            assert not torch.is_grad_enabled()
            assert not model.training
            for _ in range(2):
                model(torch.ones(1, 2))
            assert describe(model) != before
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert describe(model) == before
    for name, state in cpu_random_states().items():
        assert str(state) == str(states[name])
    assert model.training
    assert not model.linear.training


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A description of each model that a task builds, before it is tried."""
    found: list[dict[str, Any]] = []

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def build(*arguments: Any) -> Any:
            model = original(*arguments)
            model.train()
            found.append(describe(model))
            return model

        return build

    for owner in (_text_model.TextModel, _seq2seq_model.Seq2SeqModel):
        if "build" in vars(owner):
            monkeypatch.setattr(owner, "build", watched(owner.build))
    return found


def made(task: str, config: dict[str, Any], *plugins: Plugin) -> Any:
    """A run on texts of 4 to 20 words."""
    table = rows(16)
    Path("a.csv").write_text(
        "text,label,target\n" + "".join(f"{row['text']}{' so' * 8},{row['label']},fine\n" for row in table)
    )
    sentences = [
        "".join(f"{word} {'OB'[index % 2]}\n" for index, word in enumerate(row["text"].split())) for row in table
    ]
    Path("a.conll").write_text("\n".join(sentences))
    keys = {CLASSIFY: {"label": "label"}, LM: {}, SEQ2SEQ: {"target": "target", "max_target_length": 8}, TAG: {}}[task]
    file = "a.conll" if task == TAG else "a.csv"
    data = {"files": {"train": file, "validation": file}, "max_length": 24, **keys}
    kind = {"kind": "bpe", "vocab_size": 300} if task in (LM, SEQ2SEQ) else {"kind": "word"}
    return make_run(task, {"config": config, "tokenizer": kind}, data, plugins)


@pytest.mark.parametrize(("task", "config"), CASES.values(), ids=CASES)
def test_a_built_model_is_the_one_that_the_task_made(built, task, config):
    run = made(task, config, MetricCheck())
    (before,) = built
    after = describe(run.unwrap_model())
    assert {path: after.get(path) for path in before} == before


def test_big_bird_trains_with_its_sparse_attention():
    model = made(CLASSIFY, BIG_BIRD, MetricCheck()).unwrap_model()
    assert model.bert.attention_type == "block_sparse"
    assert type(model.bert.encoder.layer[0].attention.self).__name__ == "BigBirdBlockSparseAttention"
