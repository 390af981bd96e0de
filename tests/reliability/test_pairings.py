"""Plugins and tasks that are drawn together: a resumed run equals a whole one to the bit, and an export the run.

Each seed draws a task, up to four plugins with their options, and settings of training. With the variable
``FASTLOOP_RELIABILITY=10``, ten times as many are drawn.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fault_runs import times
from interrupted_runs import Case, check_interrupted
from round_trip_data import Base, Bases, write_data

pytestmark = pytest.mark.slow

FILES = {"files": {split: f"{split}.jsonl" for split in ("train", "validation", "test")}, "max_length": 32}
WEIGHTED = {
    "loss": {"name": "cross_entropy", "class_weights": {"bad": 1.0, "fine": 2.0, "good": 0.5}, "label_smoothing": 0.1}
}


@dataclass(frozen=True)
class Task:
    """A task of the table.

    Attributes:
        base: The pretrained model.
        data: The section ``data``.
        plugin: The task's plugin and its options.
        targets: Layers that get adapters.
        kind: ``text``, ``language`` (predicts each next token), or ``other``: the plugins that fit.
    """

    base: Base
    data: Mapping[str, Any]
    plugin: Mapping[str, Any]
    targets: Sequence[str] = ("q_lin", "v_lin")
    kind: str = "text"


ENCODER = Base("distilbert", "")
DECODER = Base("llama", "ForCausalLM")
LINEAR = ("q_proj", "v_proj")
TASKS = {
    "classes": Task(ENCODER, {**FILES, "label": "label"}, {"text-classification": {}}),
    "weighted classes": Task(ENCODER, {**FILES, "label": "label"}, {"text-classification": WEIGHTED}),
    "topics": Task(ENCODER, {**FILES, "label": "topics", "label_type": "classes"}, {"text-classification": {}}),
    "scores": Task(ENCODER, {**FILES, "label": "score", "label_type": "number"}, {"text-classification": {}}),
    "pairs": Task(
        Base("bert", ""),
        {**FILES, "text": ["text", "other"], "label": "label"},
        {"text-classification": {}},
        ("query", "value"),
    ),
    "tags": Task(ENCODER, {**FILES, "words": "words", "tags": "tags"}, {"token-classification": {}}),
    "documents": Task(DECODER, {**FILES, "text": "document"}, {"causal-lm": {}}, LINEAR, "language"),
    "completions": Task(
        DECODER, {**FILES, "prompt": "prompt", "completion": "completion"}, {"causal-lm": {}}, LINEAR, "language"
    ),
    "chats": Task(
        Base("tied-llama", "ForCausalLM"),
        {**FILES, "messages": "messages", "chat_template": "chatml"},
        {"causal-lm": {}},
        LINEAR,
        "language",
    ),
    "answers": Task(
        Base("t5", "ForSeq2SeqLM"),
        {**FILES, "text": "prompt", "target": "completion", "max_target_length": 16},
        {"seq2seq": {}},
        ("q", "v"),
    ),
    "images": Task(
        Base("vit", ""),
        {"images": "images", "image_size": 16, "augment": None},
        {"image-classification": {}},
        ("q_proj", "v_proj", "query", "value"),  # names of several versions of transformers
        "other",
    ),
}
PLUGINS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "ema": ({"decay": 0.8}, {"mean": True, "start": 1}, {"decay": 0.9, "update_every": 2}),
    "lora": ({"r": 4}, {"r": 4, "merge": True}, {"r": 4, "use_dora": True}),
    "freeze": ({"match": "*embed*"}, {"match": "*norm*"}, {"match": "*0*"}),
    "lr-scheduler": (
        {"schedule": "linear", "warmup": 2},
        {"schedule": "cosine", "warmup": 0},
        {"schedule": "constant", "warmup": 3},
    ),
    "checkpoint-best": ({"monitor": "loss"},),
    "early-stopping": ({"monitor": "loss", "patience": 2},),
    "nan-guard": ({"action": "skip"},),
    "amp": ({"dtype": "bf16"},),
    "activation-checkpointing": ({},),
    "async-save": ({},),
    "device-prefetch": ({},),
    "neftune": ({},),
    "folds": ({"number": 1, "of": 3},),
    "fused-optimizer": ({},),
    "length-bucketing": ({"window": 2},),
    "token-cache": ({"folder": "tokens"},),
    "packing": ({},),
    "target-logits": ({},),
    "fused-loss": ({"chunk_tokens": 16},),
}
"""Plugin -> options to draw from."""
ONLY = {"language": ("target-logits", "fused-loss"), "text": ("length-bucketing", "token-cache", "neftune", "packing")}
"""Kind of task -> plugins for it alone. Tasks of the kind ``language`` are of texts, too."""
CLASHES = (("target-logits", "fused-loss"), ("packing", "length-bucketing"))
ROUNDED = 2e-2
"""Largest relative difference of metrics in bf16, whose export computes in float32; else 1e-4."""


@dataclass(frozen=True)
class Pairing:
    """The run of a seed."""

    task: str
    plugins: dict[str, dict[str, Any]]
    train: dict[str, Any]

    def case(self, bases: Bases) -> Case:
        task = TASKS[self.task]
        sections = {"model": {"name": str(bases.find(task.base))}, "data": task.data, "plugins": [task.plugin]}
        plugins = [{name: options} for name, options in self.plugins.items()]
        return Case(sections, plugins, self.train, write=lambda: write_data(Path.cwd()))


def draw(seed: str) -> Pairing:
    """The pairing of a seed."""
    rng = random.Random(seed)
    name = rng.choice(sorted(TASKS))
    task = TASKS[name]
    unfit: list[str] = []
    if task.kind != "language":
        unfit += ONLY["language"]
    if task.kind == "other":
        unfit += ONLY["text"]
    if name in ("answers", "images"):
        unfit.append("packing")
    names = rng.sample([plugin for plugin in sorted(PLUGINS) if plugin not in unfit], rng.randint(1, 4))
    for first, second in CLASHES:
        if first in names and second in names:
            names.remove(second)
    plugins = {}
    for plugin in names:
        options = dict(rng.choice(PLUGINS[plugin]))
        if plugin == "lora":
            options["target_modules"] = list(task.targets)
        plugins[plugin] = options
    train = {
        "epochs": 3,
        "batch_size": rng.choice([6, 10]),
        "lr": rng.choice([1e-2, 3e-2]),
        "max_grad_norm": rng.choice([None, 0.5]),
        "weight_decay": rng.choice([0.0, 0.1]),
        "optimizer": rng.choice(["AdamW", "SGD"]),
        "evaluate_every": rng.choice(["epoch", 2, 3]),
        "seed": rng.randrange(5),
    }
    return Pairing(name, plugins, train)


def pairings(kind: str, count: int) -> list[Any]:
    """``count`` pairings, whose ids show the seed, the task and the plugins."""
    drawn = []
    for number in range(count):
        pairing = draw(f"{kind} {number}")
        drawn.append(pytest.param(pairing, id=f"{number}-{pairing.task}-{'-'.join(pairing.plugins)}".replace(" ", "_")))
    return drawn


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    return Bases(tmp_path_factory.mktemp("bases"))


@pytest.mark.parametrize("pairing", pairings("resume", times(6)))
def test_a_drawn_run_resumes_to_the_bit(pairing: Pairing, bases: Bases):
    """a signal in a run of a task and plugins that are drawn: the resumed run equals a whole one"""
    check_interrupted(pairing.case(bases), "SIGTERM", 4)


@pytest.mark.parametrize("pairing", pairings("export", times(6)))
def test_a_drawn_export_evaluates_as_its_run(pairing: Pairing, bases: Bases, cli: Any):
    """a task and plugins that are drawn: `fastloop evaluate` of the export has the metrics of the run"""
    trained = pairing.case(bases).fit("run")
    summary = trained.summary["test"]
    assert cli("evaluate", "run", "--split", "test", "--json", "metrics.json")[0] == 0
    evaluated = json.loads(Path("metrics.json").read_text(encoding="utf-8"))["metrics"]
    largest = ROUNDED if "amp" in pairing.plugins else 1e-4
    for name, value in summary.items():
        assert evaluated[name] == pytest.approx(value, rel=largest, abs=largest, nan_ok=True), name
