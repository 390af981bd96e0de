"""A run that resumes with a changed setting is refused, or the setting takes effect and a line of the log names it.

``TRAIN`` and ``OPTIONS`` change each key of ``train`` and each option of fastloop's own plugins, one at a time. To add
an option, add it here. Each case resumes a complete run, so it builds the run and loads the checkpoint, but trains
nothing.

Modules:
    core/fastloop/checkpoint/settings_record.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from image_helpers import VIT, write_images
from recipe_runs import make_run
from text_helpers import TINY, rows, write_rows
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR, StepLR
from training_runs import execute

from fastloop import CheckpointError, Plugin, Trainer, checkpoint, hookimpl
from fastloop.checkpoint.settings_record import plain
from fastloop.checks.resumed_run import FIXED, FREE
from fastloop.plugins.declared_options import options_of
from fastloop.plugins.installed import installed, is_own, load
from fastloop.recipe import Train
from fastloop.testing import expect_problem, tiny_data, tiny_model, train

BASE = {"max_steps": 2, "epochs": 2, "save_every": 2, "evaluate_every": None, "log_every": 1}

TRAIN: dict[str, Any] = {
    "epochs": 3, "batch_size": 16, "micro_batch_size": 4, "eval_batch_size": 16, "lr": 0.1, "optimizer": "SGD",
    "weight_decay": 0.1, "decay_biases_and_norms": False, "layer_lr_decay": 0.9, "drop_last": True,
    "parameter_groups": [{"match": "head.*", "lr": 0.2}], "seed": 8, "max_steps": None, "max_grad_norm": 1.0,
    "log_every": 2, "evaluate_every": 1, "save_every": 1, "keep_checkpoints": 2, "on_save_error": "stop",
    "on_data_change": "warn", "device": "auto"
}  # fmt: skip
"""Key of ``train`` -> another value than that of the run that saved the checkpoint."""

OPTIONS: dict[str, dict[str, tuple[Any, Any]]] = {
    "activation-checkpointing": {"blocks": (["Sequential"], ["LayerNorm"]), "every": (1, 2)},
    "amp": {
        "dtype": ("bf16", "auto"),
        "init_scale": (65536.0, 1024.0),
        "growth_interval": (2000, 5),
        "fp32_matmul": (None, None),  # another value needs CUDA
        "tf32_convolutions": (True, False),
    },
    "auto-micro-batch": {"snapshot": (True, False), "limit_gib": (None, 500.0)},
    "checkpoint-best": {"monitor": ("loss", "accuracy"), "mode": ("min", "max"), "keep_checkpoints": (1, 2)},
    "dataloader-workers": {
        "num_workers": (0, 1),
        "persistent_workers": (True, False),
        "prefetch_factor": (2, 3),
        "timeout": (600.0, 500.0),
        "multiprocessing_context": (None, "fork"),
    },
    "early-stopping": {
        "monitor": ("loss", "accuracy"),
        "mode": ("min", "max"),
        "patience": (3, 4),
        "min_delta": (0.0, 0.1),
        "threshold": (None, 0.1),
    },
    "ema": {
        "decay": (0.9, 0.8),
        "update_every": (1, 2),
        "warmup": (True, False),
        "mean": (False, True),
        "start": (0, 1),
        "batch_norm_batches": (0, 1),
    },
    "folds": {"number": (0, 1), "of": (3, 4)},
    "freeze": {"match": ("embed.*", "blocks.*")},
    "fused-optimizer": {"implementation": ("fused", "foreach")},
    "lr-scheduler": {
        "schedule": ("linear", "cosine"),
        "warmup": (0, 1),
        "min_ratio": (0.0, 0.1),
        "arguments": ({}, {}),
    },
    "module": {
        "loss": ("cross_entropy", "multi_margin_loss"),
        "metrics": ({}, {"f1": {"type": "MulticlassF1Score", "num_classes": 3}}),
        "collate": (None, "torch.utils.data:default_collate"),
    },
    "nan-guard": {
        "action": ("stop", "skip"),
        "limit": (5, 6),
        "every": (10, 11),
        "spike": (8.0, 9.0),
        "window": (100, 50),
        "max_loss": (None, 50.0),
        "max_loss_patience": (3, 4),
        "max_loss_action": ("stop", "error"),
    },
    "progress": {"every": (1.0, 2.0), "refresh": (1.0, 2.0)},
    "profile": {
        "wait": (0, 1), "warmup": (1, 2), "active": (1, 2), "repeat": (1, 2), "memory": (False, True),
        "shapes": (False, True), "stacks": (False, True)
    },
    "sample-audit": {"on_violation": ("error", "warn")},
    "skip-unreadable": {"limit": (100, 99)},
    "watchdog": {"timeout": (600.0, 500.0)},
}  # fmt: skip
"""Plugin -> option -> its value in the run that saved the checkpoint, and another one."""

ELSEWHERE = {
    "allocator": "needs a new process",
    "attention": "needs an architecture of transformers",
    "auto": "is replaced by the plugins that it selects",
    "causal-lm": "a task: its options are declared as those of module are",
    "compile": "needs a compiler",
    "context-parallel": "needs several processes",
    "cpu-affinity": "needs a new process",
    "ddp": "needs several processes",
    "deepspeed": "needs several processes",
    "fsdp": "needs several processes",
    "fused-loss": "needs a vocabulary",
    "image-classification": "a task: its options are declared as those of module are",
    "int8-linears": "has no effect on training",
    "length-bucketing": "needs texts",
    "lora": "needs a model with linear layers that peft knows",
    "muon-optimizer": "has one option, which moves parameters between groups",
    "neftune": "needs token ids",
    "remote-output": "needs a server",
    "seq2seq": "a task: its options are declared as those of module are",
    "step-graph": "needs CUDA",
    "tensor-parallel": "needs several processes",
    "text-classification": "a task: its options are declared as those of module are",
    "token-cache": "needs texts",
    "token-classification": "a task: its options are declared as those of module are",
    "torchao-fp8": "needs an accelerator",
    "trackers": "needs a tracker",
    "transformers-callbacks": "needs a callback",
}
"""Plugin -> why its options are not changed here."""

METRICS = {"metrics": {"accuracy": {"type": "MulticlassAccuracy", "num_classes": 3}}}


def test_each_key_of_train_is_fixed_or_free_and_is_changed_here():
    keys = {field.name for field in dataclasses.fields(Train)}
    assert {*FIXED, *FREE} == keys
    assert not {*FIXED} & {*FREE}
    assert TRAIN.keys() == keys


def test_each_option_of_each_plugin_is_changed_here_or_listed_with_a_reason():
    own = {name: load(name) for name, point in installed().items() if is_own(point)}
    missing = []
    for name, plugin in own.items():
        options = {field.name for field in dataclasses.fields(options_of(plugin))} - {"on_error"}
        assert plugin.on_resume.keys() <= options, name
        if name not in ELSEWHERE and options != OPTIONS.get(name, {}).keys():
            missing.append(name)
    assert missing == []
    assert {*OPTIONS, *ELSEWHERE} <= own.keys()


PROGRESS = ("lr", "initial_lr", "scale", "_growth_tracker")
"""Values that a run changes while it trains."""


def build(plugins: list[Any], task: dict[str, Any], resume: Path | None = None, **train: Any) -> Any:
    """A run of three samples' classes, with an accuracy."""
    return make_run("output=run", plugins=plugins, task={**METRICS, **task}, resume=resume, **{**BASE, **train})


def settings(run: Any) -> list[dict[str, Any]]:
    """The live settings of the optimizer, without those that a schedule changes, and of the loss scaler."""
    live = [{name: value for name, value in group.items() if name != "params"} for group in run.optimizer.param_groups]
    if run.accelerator.scaler is not None:
        live.append(run.accelerator.scaler.state_dict())
    return [{name: value for name, value in plain(group).items() if name not in PROGRESS} for group in live]


def assert_refused_or_applied(key: str, before: Any, now: Any, caplog: Any, **changed: Any) -> None:
    """Resume the run with a changed setting."""
    caplog.clear()
    try:
        run = build(resume=Path("run"), **changed)
    except CheckpointError as error:
        message = str(error)
    else:
        built = settings(run)
        execute(run)
        assert settings(run) == built, f"{key}: the checkpoint's setting replaced it"
        message = caplog.text
    assert key in message
    for value in (before, now):
        if not isinstance(value, dict | list):  # whose keys may have another order
            assert repr(value) in message


@pytest.fixture
def logged(caplog):
    caplog.set_level(logging.INFO, logger="fastloop")
    return caplog


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """The folder of a complete run."""
    folder = tmp_path_factory.mktemp("complete")
    with contextlib.chdir(folder):
        execute(build([], {}))
    return folder / "run"


@pytest.mark.parametrize("key", TRAIN)
def test_a_changed_key_of_train_is_refused_or_applied(logged, complete, key):
    shutil.copytree(complete, "run")
    before = {**dataclasses.asdict(Train()), **BASE, "lr": 0.05, "batch_size": 8, "seed": 7, "device": "cpu"}[key]
    now = TRAIN[key]
    assert_refused_or_applied(f"train.{key}", before, now, logged, plugins=[], task={}, **{key: now})


@pytest.mark.parametrize("plugin", OPTIONS)
def test_a_changed_option_of_a_plugin_is_refused_or_applied(logged, plugin):
    usual = {option: before for option, (before, _) in OPTIONS[plugin].items()}

    def recipe(options: dict[str, Any]) -> dict[str, Any]:
        if plugin == "module":
            return {"plugins": [], "task": options}
        return {"plugins": [{plugin: options}], "task": {}}

    execute(build(**recipe(usual)))
    for option, (before, now) in OPTIONS[plugin].items():
        if before == now:
            continue
        key = f"plugins.{plugin}.{option}"
        assert_refused_or_applied(key, before, now, logged, **recipe({**usual, option: now}))


def resumed_trainer(first: dict[str, Any], second: dict[str, Any]) -> Trainer:
    """Train two steps with some arguments, and resume the run with others."""
    usual = {"loss": nn.functional.cross_entropy, "batch_size": 8, "output": "run", "max_steps": 2, "epochs": 1}
    Trainer(tiny_model(), tiny_data(), **usual, **first).fit()
    trainer = Trainer(tiny_model(), tiny_data(), resume=True, **{**usual, "max_steps": 4}, **second)
    trainer.fit()
    return trainer


def adam(**arguments: Any) -> Any:
    return lambda model: torch.optim.Adam(model.parameters(), **arguments)


@pytest.mark.parametrize(
    ("first", "second", "key"),
    [
        ({"optimizer": adam(lr=0.1)}, {"optimizer": adam(lr=0.2)}, "lr"),
        ({"optimizer": adam(betas=(0.9, 0.99))}, {"optimizer": adam(betas=(0.8, 0.99))}, "betas"),
        (
            {"scheduler": lambda optimizer: StepLR(optimizer, 2)},
            {"scheduler": lambda optimizer: StepLR(optimizer, 3)},
            "step_size",
        ),
        (
            {"scheduler": lambda optimizer: MultiStepLR(optimizer, [1, 3])},
            {"scheduler": lambda optimizer: MultiStepLR(optimizer, [1, 2])},
            "milestones",
        ),
        (
            {"scheduler": lambda optimizer: CosineAnnealingLR(optimizer, 4)},
            {"scheduler": lambda optimizer: CosineAnnealingLR(optimizer, 4, eta_min=0.01)},
            "eta_min",
        ),
        (
            {"plugins": [{"lr-scheduler": {"schedule": "StepLR", "arguments": {"step_size": 2}}}]},
            {"plugins": [{"lr-scheduler": {"schedule": "StepLR", "arguments": {"step_size": 3}}}]},
            "arguments",
        ),
    ],
)
def test_a_setting_in_a_state_is_compared_also_where_no_recipe_names_it(first, second, key):
    with pytest.raises(CheckpointError, match=key):
        resumed_trainer(first, second)


def test_the_code_of_a_step_is_that_of_the_resumed_run():
    trainer = resumed_trainer({"optimizer": adam(foreach=True)}, {"optimizer": adam(foreach=False)})
    assert trainer.run.optimizer.param_groups[0]["foreach"] is False
    assert trainer.run.state.step == 4


class Scales(Plugin):
    """Loss scaling as fp16 has it, on the CPU."""

    name = "scales"

    def __init__(self, interval: int) -> None:
        super().__init__()
        self.interval = interval

    @hookimpl
    def after_prepare(self, run: Any) -> None:
        from accelerate.optimizer import AcceleratedOptimizer

        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=self.interval)
        run.accelerator.scaler = scaler
        run.optimizer = AcceleratedOptimizer(run.optimizer, device_placement=False, scaler=scaler)


def test_a_loss_scaler_keeps_its_scale_and_has_the_growth_of_the_resumed_run():
    trainer = resumed_trainer({"plugins": [Scales(1)]}, {"plugins": [Scales(1000)]})
    state = trainer.run.accelerator.scaler.state_dict()
    assert state["scale"] == 1024.0, "doubled in each of the first two steps, and in none of the others"
    assert state["growth_interval"] == 1000


def frozen(*names: str) -> nn.Module:
    """Three layers of equal shapes, some of them frozen."""
    model = nn.Sequential(OrderedDict(a=nn.Linear(8, 8), b=nn.Linear(8, 8), c=nn.Linear(8, 8), head=nn.Linear(8, 3)))
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("before", "now"),
    [(["a"], ["c"]), (["a"], []), ([], ["a"]), (["a", "b"], ["c"])],
    ids=["other", "fewer", "more", "several"],
)
def test_other_frozen_layers_are_refused_by_name(before, now):
    usual = {"loss": nn.functional.cross_entropy, "batch_size": 8, "output": "run", "epochs": 1}
    Trainer(frozen(*before), tiny_data(), **usual).fit()
    with pytest.raises(CheckpointError) as raised:
        Trainer(frozen(*now), tiny_data(), resume=True, **{**usual, "epochs": 2}).fit()
    for layer in {*before} ^ {*now}:
        assert f"{layer}.weight" in str(raised.value)


def test_an_added_and_a_removed_plugin_that_changes_training_are_reported(logged):
    usual = {"loss": nn.functional.cross_entropy, "batch_size": 8, "output": "run"}
    Trainer(tiny_model(), tiny_data(), epochs=1, plugins=["skip-unreadable"], **usual).fit()
    logged.clear()
    Trainer(tiny_model(), tiny_data(), epochs=2, plugins=["ema"], resume=True, **usual).fit()
    warnings = [record.getMessage() for record in logged.records if record.levelno == logging.WARNING]
    assert [("ema" in line, "skip-unreadable" in line) for line in warnings] == [(True, False), (False, True)]


def test_a_checkpoint_of_an_early_version_without_a_record_resumes():
    usual = {"loss": nn.functional.cross_entropy, "batch_size": 8, "output": "run"}
    Trainer(tiny_model(), tiny_data(), epochs=1, **usual).fit()
    path, _ = checkpoint.find_newest(Path("run"))
    model, state = checkpoint.read(path)
    del state["build"]
    checkpoint.write(path, model, state)
    assert Trainer(tiny_model(), tiny_data(), epochs=2, resume=True, **usual).fit()["epochs"] == 2


@pytest.mark.parametrize("streaming", [False, True])
def test_files_of_data_may_move_if_their_rows_stay(streaming: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fastloop")
    section = {"label": "label", "max_length": 16, "validation_fraction": 0, "streaming": streaming}

    def fit(files: str, steps: int, output: str = "run", resume: Path | None = None, **data: Any) -> list[float]:
        tree = {
            "model": {"config": TINY, "tokenizer": {"kind": "word"}},
            "data": section | {"files": {"train": files}} | data,
            "train": BASE | {"max_steps": steps, "batch_size": 8, "lr": 1e-2, "device": "cpu"},
            "plugins": {"log": False, "progress": False},
            "output": output,
        }
        return train(tree, resume=resume).losses

    write_rows("a.jsonl", rows(40))
    whole = fit("a.jsonl", 4, "whole")
    assert fit("a.jsonl", 2) == whole[:2]
    Path("moved").mkdir()
    Path("a.jsonl").rename("moved/b.jsonl")
    run = Path("run")
    with expect_problem("resume-differs data 'moved/*.jsonl' 8", CheckpointError):
        fit("moved/*.jsonl", 4, resume=run, max_length=8)
    write_rows("other.jsonl", rows(40)[::-1])
    with expect_problem("data-changed train:", CheckpointError):
        fit("other.jsonl", 4, resume=run)
    assert fit("moved/*.jsonl", 4, resume=run) == whole[2:]
    assert "data.files.train = 'moved/*.jsonl' (was 'a.jsonl')" in caplog.text


def read_rows(file: str) -> list[Any]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


@pytest.mark.parametrize("key", ["images", "name"])
def test_a_folder_of_data_may_move_if_its_samples_stay(key: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fastloop")
    for folder, count in (("first", 6), ("other", 5)):
        if key == "images":
            write_images(Path(folder), {"train": count})
        else:
            write_rows(f"{folder}.jsonl", rows(6 * count))
            Dataset.from_list(read_rows(f"{folder}.jsonl")).save_to_disk(folder)
    section = {"image_size": 16} if key == "images" else {"label": "label", "max_length": 16, "validation_fraction": 0}

    def fit(folder: str, steps: int, output: str = "run", resume: Path | None = None) -> list[float]:
        tree = {
            "model": {"config": VIT} if key == "images" else {"config": TINY, "tokenizer": {"kind": "word"}},
            "data": section | {key: folder},
            "train": BASE | {"max_steps": steps, "batch_size": 8, "lr": 1e-2, "device": "cpu"},
            "plugins": {"log": False, "progress": False},
            "output": output,
        }
        return train(tree, resume=resume).losses

    whole = fit("first", 4, "whole")
    assert fit("first", 2) == whole[:2]
    Path("first").rename("moved")
    run = Path("run")
    with expect_problem("data-changed train:", CheckpointError):
        fit("other", 4, resume=run)
    assert fit("moved", 4, resume=run) == whole[2:]
    assert f"data.{key} = 'moved' (was 'first')" in caplog.text
