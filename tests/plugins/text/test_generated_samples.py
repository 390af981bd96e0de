"""The option ``samples``: fixed validation prompts with the texts that the model generates while it trains.

Modules:
    plugins/fastloop_plugins/text/generated_samples.py
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from generation_runs import LLAMA
from text_helpers import TINY_GPT, make_run
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import execute
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from fastloop import Plugin, RecipeError, hookimpl
from fastloop_plugins.data.packing import Packing
from fastloop_plugins.observe.log import Log
from fastloop_plugins.precision.amp import Amp
from fastloop_plugins.text.generated_samples import shorten, spread
from fastloop_plugins.text.generation import casting_once
from fastloop_plugins.training.ema import EMA
from fastloop_plugins.training.lora import LoRA

GPT = TINY_GPT | {"n_positions": 64}
BART = {
    "model_type": "bart", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 64,
    "dropout": 0.5, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}  # fmt: skip
FILES = {"files": {"train": "rows.jsonl", "validation": "rows.jsonl"}, "max_length": 48}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "chat": ("causal-lm", GPT, FILES | {"messages": "messages", "chat_template": "chatml", "max_length": 64}),
    "completions": ("causal-lm", GPT, FILES | {"prompt": "text", "completion": "short"}),
    "texts": ("causal-lm", GPT, FILES | {"text": "text", "max_length": 16}),
    "llama": ("causal-lm", LLAMA, FILES | {"prompt": "text", "completion": "short"}),
    "seq2seq": ("seq2seq", BART, FILES | {"target": "short", "max_target_length": 12}),
}
"""Kind of data -> task, model and data."""
TOKENS = 8
"""New tokens of an answer at most."""


@pytest.fixture(autouse=True)
def _rows():
    write_rows(Path())


def write_rows(folder: Path) -> None:
    rows = []
    for index in range(10):
        asked, answer = f"write {index}", f"{index}" + " now" * (index % 3)
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        rows.append({"text": asked, "short": answer, "messages": messages})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


class Watch(Plugin):
    """Keeps the rows of samples with their steps, and the loss of each step."""

    name = "watch"

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[dict[str, Any]] = []
        self.losses: list[float] = []
        self.training: list[bool] = []

    @hookimpl
    def log_rows(self, name: str, rows: Sequence[dict[str, Any]], step: int) -> None:
        assert name == "samples"
        self.samples += [{"step": step, **row} for row in rows]

    @hookimpl
    def after_step(self, run: Any, loss: Any) -> None:
        self.losses.append(float(loss))
        self.training.append(run.model.training)


def trained(kind: str, *plugins: Plugin, train: dict[str, Any] | None = None, **options: Any) -> Watch:
    """A run that evaluates after steps 2, 4 and 5."""
    watch = Watch()
    task, config, data = KINDS[kind]
    model = {"config": config, "tokenizer": {"kind": "bpe", "vocab_size": 300}}
    settings = {"batch_size": 4, "max_steps": 5, "epochs": 5, "evaluate_every": 2} | (train or {})
    options = {"max_new_tokens": TOKENS} | options
    execute(make_run({task: options}, model, data, [watch, *plugins], **settings))
    return watch


def exported_answers(kind: str, samples: Sequence[dict[str, Any]]) -> list[str]:
    """The answers of the exported model to the prompts of samples, by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained("run/model")
    auto = AutoModelForSeq2SeqLM if kind == "seq2seq" else AutoModelForCausalLM
    model = auto.from_pretrained("run/model")
    answers = []
    for sample in samples:
        if kind == "chat":
            messages = [{"role": "user", "content": re.findall(r"write \d+", sample["prompt"])[-1]}]
            inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt",
                                                   return_dict=True)  # fmt: skip
        else:
            inputs = tokenizer(sample["prompt"], return_tensors="pt")
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=TOKENS, pad_token_id=tokenizer.pad_token_id)
        ids = ids[0, 0 if kind == "seq2seq" else inputs["input_ids"].shape[1] :]
        answers.append(tokenizer.decode(ids, skip_special_tokens=True))
    return answers


@pytest.mark.parametrize("kind", ["chat", "completions", "texts", "seq2seq"])
def test_samples_are_the_answers_of_the_model_at_each_evaluation(kind):
    samples = trained(kind, samples=2).samples
    assert [sample["step"] for sample in samples] == [2, 2, 4, 4, 5, 5]
    assert [sample["prompt"] for sample in samples[:2]] == [sample["prompt"] for sample in samples[4:]]
    assert [sample["answer"] for sample in samples[4:]] == exported_answers(kind, samples[4:])
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    if kind != "texts":  # the prompts are rows 0 and 5
        for sample, row in zip(samples, [rows[0], rows[5]], strict=False):
            assert row["text"] in sample["prompt"]
            assert sample["expected"] == row["short"], "without the line break that ChatML writes after an answer"
    else:
        whole = " ".join(row["text"] for row in rows).replace(" ", "")
        for sample in samples:
            assert "<|endoftext|>" in sample["prompt"], "it stands between two texts"
            prompt = sample["prompt"].replace("<|endoftext|>", "")
            assert (prompt + sample["expected"]).replace(" ", "") in whole


@pytest.mark.parametrize(
    ("kind", "plugins"),
    [
        ("chat", list),
        ("texts", list),
        ("seq2seq", list),
        ("completions", lambda: [LoRA(r=2)]),
        ("completions", lambda: [LoRA(r=2), Amp(dtype="bf16")]),
        ("completions", lambda: [Packing()]),
    ],
)
def test_losses_with_samples_are_those_without(kind, plugins):
    """Also if tokens are drawn. The models have dropout."""
    plain, with_samples = trained(kind, *plugins()), trained(kind, *plugins(), samples=3, temperature=1.5)
    assert with_samples.losses == plain.losses
    assert with_samples.training == plain.training
    assert len(with_samples.samples) in (6, 9)  # the texts are two blocks
    repeated = trained(kind, *plugins(), samples=3, temperature=1.5)
    assert repeated.samples == with_samples.samples


class Casts(TorchDispatchMode):
    """Counts the tensors that are cast to 16 bits, by shape."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16:
            self.shapes.append(tuple(result.shape))
        return result


def test_autocast_copies_a_frozen_weight_once_while_texts_are_generated():
    layer = torch.nn.Linear(4, 3).requires_grad_(False)
    inputs = torch.ones(2, 4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = layer(inputs)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), casting_once(layer), Casts() as casts:
        for _ in range(5):
            assert torch.equal(layer(inputs), expected)
    assert casts.shapes.count((3, 4)) == 1
    assert not layer.weight.requires_grad


def test_samples_are_of_the_weights_that_are_evaluated():
    """Those of `ema` are exported, too."""
    samples = trained("completions", EMA(decay=0.9), samples=2, train={"lr": 0.3}).samples
    assert [sample["answer"] for sample in samples[4:]] == exported_answers("completions", samples[4:])
    last = trained("completions", samples=2, train={"lr": 0.3}).samples
    assert [sample["answer"] for sample in samples[4:]] != [sample["answer"] for sample in last[4:]]


def test_samples_are_in_the_log_and_in_the_run_folder(caplog):
    caplog.set_level(logging.INFO, "fastloop")
    samples = trained("chat", Log(), samples=2).samples
    lines = Path("run/rows/samples.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == samples
    logged = [line for line in Path("run/log.txt").read_text().splitlines() if "samples: step" in line]
    assert len(logged) == len(samples)
    taken = re.findall(r"samples: 2 texts at step (\d+) took \d+\.\d s", Path("run/log.txt").read_text())
    assert taken == ["2", "4", "5"]
    for line, sample in zip(logged, samples, strict=True):
        assert f"step {sample['step']}: " in line
        assert shorten(sample["answer"]) in line


def test_samples_need_a_validation_split():
    task, config, data = KINDS["completions"]
    data = data | {"files": {"train": "rows.jsonl"}, "validation_fraction": 0}
    with pytest.raises(RecipeError, match="samples"):
        make_run({task: {"samples": 2}}, {"config": config, "tokenizer": {"kind": "byte"}}, data)


def test_a_long_prompt_leaves_room_for_the_answer():
    """The model has 64 positions."""
    rows = [{"text": "a b c d " * 20, "short": "e"} for _ in range(4)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    long = FILES | {"prompt": "text", "completion": "short", "max_length": 400}
    watch = Watch()
    model = {"config": TINY_GPT | {"n_positions": 400}, "tokenizer": {"kind": "byte"}}
    execute(make_run({"causal-lm": {"samples": 1, "max_new_tokens": 390}}, model, long, [watch], max_steps=1))
    assert len(watch.samples[0]["prompt"]) == 10


@pytest.mark.parametrize(
    ("total", "count", "expected"), [(10, 4, [0, 2, 5, 7]), (2, 4, [0, 1]), (5, 5, [0, 1, 2, 3, 4]), (0, 3, [])]
)
def test_prompts_are_evenly_spaced(total, count, expected):
    assert spread(total, count) == expected


def samples_by_strategy(strategies: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Strategy -> the samples, or the message of an error."""
    from fastloop.errors import FastloopError
    from fastloop.plugins.installed import entry_points

    results: dict[str, Any] = {}
    for name, options in strategies.items():
        kind, plugin = name.split(" ")[:2]
        strategy = entry_points("fastloop.plugins")[plugin].load()(**options)
        try:
            results[name] = trained(kind, strategy, samples=2, train={"lr": 1e-3}).samples
        except FastloopError as error:
            results[name] = str(error)
    return results


@pytest.mark.slow
def test_strategies_gather_weights_or_are_refused_by_name(processes, tmp_path):
    write_rows(tmp_path)
    strategies: dict[str, dict[str, Any]] = {
        "completions ddp": {},
        "completions fsdp": {},
        "completions deepspeed": {"stage": 3},
        "seq2seq ddp": {},
        "seq2seq fsdp": {},
        "seq2seq deepspeed": {"stage": 3},
        "llama tensor-parallel": {},
        "llama context-parallel": {},
    }
    first, second = processes(2, samples_by_strategy, strategies, folder=tmp_path)
    for name, found in first.result.items():
        if "parallel" in name:
            assert f"plugin {name.split(' ')[1]!r} divides" in found, name
            assert second.result[name] == found, "both processes refuse it"
            continue
        assert [sample["step"] for sample in found] == [2, 2, 4, 4, 5, 5], name
        assert second.result[name] == [], name
