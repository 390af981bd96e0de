"""Every exported model has a README, whose code loads it with its head.

Modules:
    core/fastloop/export/card.py
    core/fastloop/export/text_inputs.py
    core/fastloop/export/model.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cards import load_by_card
from inference_runs import train
from safetensors.torch import load_file, save_file
from text_helpers import TINY, TINY_GPT

from fastloop.export.card import ModelCard
from fastloop.testing import tiny_model

LANGUAGE = {"config": TINY_GPT | {"n_positions": 256}, "tokenizer": {"kind": "bpe", "vocab_size": 300}}
ENCODER = {"config": TINY, "tokenizer": {"kind": "word"}}
T5 = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
COLORS = ["red", "green", "blue"]
CHATS = [
    {"messages": [{"role": "user", "content": f"say {name}"}, {"role": "assistant", "content": name}]}
    for name in COLORS * 8
]
CLASSIFIED = [{"text": f"a {name} owl {number}", "label": name} for number, name in enumerate(COLORS * 8)]
TAGGED = [{"words": ["an", "owl"], "tags": ["O", "B-bird"]}] * 24
PAIRS = [{"text": f"owl {number}", "target": f"bird {number}"} for number in range(24)]
TASKS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any], str]] = {
    "causal-lm": (CHATS, LANGUAGE, {"messages": "messages", "chat_template": "chatml"}, "GPT2LMHeadModel"),
    "text-classification": (
        CLASSIFIED,
        ENCODER,
        {"text": "text", "label": "label"},
        "DistilBertForSequenceClassification",
    ),
    "token-classification": (TAGGED, ENCODER, {"words": "words", "tags": "tags"}, "DistilBertForTokenClassification"),
    "seq2seq": (
        PAIRS,
        {"config": T5, "tokenizer": {"kind": "word"}},
        {"text": "text", "target": "target", "max_target_length": 8, "prefix": "name : "},
        "T5ForConditionalGeneration",
    ),
}
"""Task -> rows, ``model``, ``data`` and the class that the card must load."""


def run_task(folder: Path, task: str, *plugins: Any, **changes: Any) -> Path:
    rows, model, data, _ = TASKS[task]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "model": model,
        "data": {"files": {"train": "rows.jsonl"}, "max_length": 32, "validation_fraction": 0.0, **data},
        "train": {"max_steps": 1, "batch_size": 4, "lr": 1e-3, "device": "cpu", "save_every": None},
        "plugins": [task, *plugins],
        "output": str(folder / "run"),
        **changes,
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    train(folder / "recipe.yaml")
    return folder / "run" / "model"


@pytest.mark.parametrize("task", list(TASKS))
def test_the_code_of_the_card_loads_the_model_with_its_head(tmp_path, capsys, task):
    model = run_task(tmp_path, task)
    capsys.readouterr()
    loaded = load_by_card(model)
    weights, expected = loaded["model"].state_dict(), load_file(model / "model.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    expected_class = TASKS[task][3]
    assert type(loaded["model"]).__name__ == expected_class
    assert loaded["tokenizer"].vocab_size
    page = (model / "README.md").read_text()
    assert f"Task: {task}" in page
    assert "from scratch" in page
    if task == "causal-lm":  # the example has run, and its answer was printed
        assert loaded["inputs"]["input_ids"].shape[1] > 3
        assert capsys.readouterr().out.endswith("\n")
    if task == "seq2seq":
        assert loaded["tokenizer"].decode(loaded["inputs"]["input_ids"][1]).startswith("name :")
        assert 'begin with "name : " (`data.prefix`)' in page
        assert capsys.readouterr().out.startswith("[")
    if task == "text-classification":
        lines = capsys.readouterr().out.splitlines()
        labels = [line.split()[0] for line in lines]
        probabilities = [float(line.split()[1]) for line in lines]
        assert len(labels) == 2, "one for each text of the example"
        assert set(labels) <= set(COLORS)
        assert all(1 / 3 < probability <= 1 for probability in probabilities)
    assert ("| red |" in page) == (task == "text-classification")


@pytest.mark.parametrize("bias", [9.0, -9.0])
def test_the_code_of_the_card_prints_each_of_several_labels(tmp_path, capsys, bias):
    rows = [{"text": row["text"], "label": [row["label"], "owl"]} for row in CLASSIFIED]
    data = {"files": {"train": "sets.jsonl"}, "label": "label", "label_type": "classes", "validation_fraction": 0.0}
    (tmp_path / "sets.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = run_task(tmp_path, "text-classification", data={**data, "max_length": 32})
    weights = load_file(model / "model.safetensors")
    weights["classifier.bias"].fill_(bias)
    weights["classifier.weight"].zero_()
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    capsys.readouterr()
    load_by_card(model)
    labels = ["blue", "green", "owl", "red"] if bias > 0 else []
    assert capsys.readouterr().out == f"{labels}\n" * 2


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft calls it
def test_an_adapter_is_loaded_on_its_base(tmp_path):
    pytest.importorskip("peft")
    (tmp_path / "base").mkdir()
    base = run_task(tmp_path / "base", "text-classification")
    lora = {"lora": {"r": 2, "target_modules": ["q_lin", "v_lin"], "merge": False}}
    adapter = run_task(tmp_path, "text-classification", lora, model={"name": str(base)})
    loaded = load_by_card(adapter)
    assert loaded["model"].get_base_model().num_labels == 3
    saved = load_file(adapter / "adapter_model.safetensors")
    state = loaded["model"].state_dict()
    for name, tensor in saved.items():
        if "lora_" in name:
            head, _, end = name.rpartition(".")
            assert torch.equal(state[f"{head}.default.{end}"], tensor)
    page = (adapter / "README.md").read_text()
    assert "library_name: peft" in page
    assert str(base) in page


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft calls it
def test_an_adapter_of_a_chat_model_answers_by_its_card(tmp_path, capsys):
    pytest.importorskip("peft")
    (tmp_path / "base").mkdir()
    base = run_task(tmp_path / "base", "causal-lm")
    lora = {"lora": {"r": 2, "target_modules": "all-linear", "merge": False}}
    loaded = load_by_card(run_task(tmp_path, "causal-lm", lora, model={"name": str(base)}))
    assert type(loaded["model"]).__name__.startswith("Peft")
    assert loaded["inputs"]["input_ids"].shape[1] > 3
    assert capsys.readouterr().out.endswith("\n")


def test_a_model_of_torch_loads_its_weights(tiny_run):
    result = tiny_run(epochs=1, lr=0.1)
    model = tiny_model()
    folder = result.trainer.run.folder / "model"
    load_by_card(folder, model=model)
    assert all(torch.equal(tensor, result.weights[name]) for name, tensor in model.state_dict().items())
    assert "library_name: pytorch" in (folder / "README.md").read_text()


def test_labels_stay_in_their_row_and_column_of_the_table(tmp_path):
    labels = {0: "a|b", 10: "two\nlines", 2: "plain"}
    page = ModelCard(title="run", name="run/model", labels=labels).render(tmp_path)
    table = [line for line in page.splitlines() if line.startswith("| ")]
    assert table == ["| id | label |", "| 0 | a\\|b |", "| 2 | plain |", "| 10 | two lines |"]


MODULE = """
import torch
from transformers import AutoModelForSequenceClassification, BertConfig

def make():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    return AutoModelForSequenceClassification.from_config(BertConfig(vocab_size=9, **sizes))

def data():
    rows = [{"input_ids": torch.tensor([index % 9, 3]), "labels": index % 2} for index in range(8)]
    return {"train": rows, "validation": rows}
"""
"""A model of transformers that the task `module` trains."""


def test_an_export_and_an_evaluation_draw_no_bars_of_transformers(tmp_path, cli, capsys):
    (tmp_path / "code.py").write_text(MODULE)
    recipe = {
        "model": {"module": "code.py:make"},
        "data": {"module": "code.py:data"},
        "train": {"max_steps": 1, "batch_size": 4, "lr": 1e-3, "device": "cpu", "save_every": None},
        "plugins": ["module"],
        "output": str(tmp_path / "run"),
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    train(tmp_path / "recipe.yaml")
    assert "%|" not in capsys.readouterr().err
    code, _, err = cli("evaluate", str(tmp_path / "run"), "--split", "validation")
    assert code == 0, err
    assert "%|" not in err
