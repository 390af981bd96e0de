"""deepspeed: errors in its options or the JSON are reported before anything is loaded.

Modules:
    plugins/fastloop_plugins/strategies/_deepspeed_config.py
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastloop import Plugin, PluginError, hookimpl
from fastloop.recipe import make_recipe
from fastloop.testing import assert_problem, expect_problem, tiny_data, tiny_model
from fastloop_plugins.strategies.deepspeed import DeepSpeed


def check(
    config: Any = None, train: dict[str, Any] | None = None, plugins: dict[str, Any] | None = None, **options: Any
) -> DeepSpeed:
    """The plugin after ``check_recipe``; ``config`` goes into ds.json."""
    if config is not None:
        Path("ds.json").write_text(config if isinstance(config, str) else json.dumps(config))
        options["config"] = "ds.json"
    plugin = DeepSpeed(**options)
    listed = [{name: given} for name, given in (plugins or {}).items()]
    plugin.check_recipe(make_recipe({"train": {"batch_size": 16, "lr": 0.01, **(train or {})}, "plugins": listed}))
    return plugin


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"train_batch_size": 32}, "conflicting-values ds.json train_batch_size 32 train.batch_size 16"),
        ({"gradient_clipping": 1.0}, "conflicting-values gradient_clipping 1.0 train.max_grad_norm 0.0"),
        ({"zero_optimization": {"stage": 3}}, "conflicting-values zero_optimization.stage 3 plugins.deepspeed.stage 1"),
        ({"optimizer": {"type": "Lamb"}}, "conflicting-values optimizer.type 'Lamb' train.optimizer 'AdamW'"),
        ({"optimizer": {"params": {"lr": 0.1}}}, "conflicting-values optimizer.params.lr 0.1 train.lr 0.01"),
        ({"optimizer": {"params": {"betas": [0.8, 0.9]}}}, "conflicting-values optimizer.params.betas 0.8 0.9"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}},
            "conflicting-values scheduler.params.warmup_num_steps 9",
        ),
        ({"zero_optimisation": {}}, "unknown-key 'zero_optimisation' 'zero_optimization'"),
        ("{", "file-unreadable ds.json"),
        ("[]", "wrong-type ds.json"),
    ],
)
def test_a_json_that_contradicts_the_recipe_is_refused_with_file_key_and_both_values(config, expected):
    with pytest.raises(PluginError) as caught:
        check(config, stage=1)
    assert_problem(caught.value.problem, expected)
    assert "ds.json" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "options", "plugins", "expected"),
    [
        (
            {"zero_optimization": {"offload_optimizer": {"device": "none"}}},
            {"offload_optimizer": True},
            {},
            "conflicting-values 'none'",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            {"offload_optimizer": True},
            {},
            "conflicting-values 'nvme'",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            {"offload_optimizer": False},
            {},
            "conflicting-values 'cpu'",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
            {"offload_parameters": False},
            {},
            "conflicting-values 'cpu'",
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "cpu"}}},
            {},
            {},
            "unsupported-stage offload_param 3 2",
        ),
        ({"zero_optimization": {"overlap_comm": True}}, {"overlap_comm": False}, {}, "conflicting-values overlap_comm"),
        (
            {"zero_optimization": {"reduce_bucket_size": 5}},
            {"bucket_size": 6},
            {},
            "conflicting-values reduce_bucket_size 5",
        ),
        (
            {"zero_optimization": {"allgather_bucket_size": 5}},
            {"bucket_size": 6},
            {},
            "conflicting-values allgather_bucket_size 5",
        ),
        ({"scheduler": {"type": "WarmupLR"}}, {}, {}, "conflicting-values scheduler.type 'WarmupLR'"),
        (
            {"fp16": {"initial_scale_power": 8}},
            {},
            {"amp": {"init_scale": 65536.0}},
            "conflicting-values initial_scale_power 8",
        ),
        (
            {"fp16": {"loss_scale_window": 9}},
            {},
            {"amp": {"growth_interval": 8}},
            "conflicting-values loss_scale_window 9",
        ),
    ],
)
def test_a_json_that_contradicts_an_option_is_refused(config, options, plugins, expected):
    with pytest.raises(PluginError) as caught:
        check(config, plugins=plugins, **options)
    assert f"ds.json: {next(iter(config))}." in str(caught.value)
    assert_problem(caught.value.problem, expected)


def test_a_json_and_options_that_agree_are_taken():
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "overlap_comm": False, "reduce_bucket_size": 6}
    fp16 = {"initial_scale_power": 8}
    options = {"offload_optimizer": True, "overlap_comm": False, "bucket_size": 6}
    assert (
        check(
            {"zero_optimization": zero, "fp16": fp16}, plugins={"amp": {"init_scale": 256.0}}, **options
        ).configuration.stage
        == 2
    )
    assert check({"zero_optimization": zero, "fp16": fp16}, plugins={"amp": {}}).configuration.stage == 2


def test_a_json_that_says_auto_or_the_same_is_taken():
    auto = {"params": {"lr": "auto", "betas": "auto"}}
    config = {
        "train_batch_size": 16,
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 3},
        "optimizer": auto,
        "scheduler": auto,
    }
    assert check(config).configuration.stage == 3
    assert check({"train_batch_size": "auto"}).configuration.stage == 2


def test_a_file_that_is_not_there_is_named():
    with expect_problem("file-unreadable nowhere.json", PluginError):
        DeepSpeed(config="nowhere.json").check_recipe(make_recipe({}))


def test_a_stage_that_does_not_exist_is_refused():
    with expect_problem("unknown-choice ds.json: zero_optimization.stage: 4 0, 1, 2 or 3", PluginError):
        check({"zero_optimization": {"stage": 4}})


def test_a_key_that_is_not_known_is_passed_on_with_a_warning(caplog):
    check({"quantum_entanglement": True})
    assert_problem(caplog, "unknown-key deepspeed: 'quantum_entanglement'")


@pytest.mark.parametrize(
    ("options", "train", "expected"),
    [
        ({"stage": 0, "offload_optimizer": True}, {}, "unsupported-stage offload_optimizer 1 0"),
        ({"stage": 2, "offload_parameters": True}, {}, "unsupported-stage offload_parameters 3 2"),
        ({"stage": 1}, {"optimizer": "Adafactor"}, "unsupported-optimizer"),
    ],
)
def test_options_that_cannot_be_together_are_refused(options, train, expected):
    with pytest.raises(PluginError) as caught:
        check(None, train, **options)
    assert_problem(caught.value.problem, expected)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_steps_that_another_plugin_splits_are_refused(tiny_run):
    data: Any = tiny_data()
    data.lengths = [1 + index % 9 for index in range(len(data))]
    with expect_problem("unsupported-batches plugins.deepspeed 'length-bucketing'", PluginError):
        tiny_run(["deepspeed", {"length-bucketing": {"max_tokens": 20}}], data=data, device="cpu")


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_without_dimensions_are_refused_by_name(tiny_run, stage):
    model = tiny_model()
    model.scale = nn.Parameter(torch.tensor(1.0), requires_grad=False)
    with expect_problem("unsupported-parameters plugins.deepspeed", PluginError):
        tiny_run([{"deepspeed": {"stage": stage}}], model=model)


class Half(Plugin):
    """Sets the precision, as ``amp`` does where the device can compute in fp16."""

    name = "half"

    @hookimpl
    def configure(self) -> dict[str, Any]:
        return {"mixed_precision": "fp16"}


class EmptyGroup(Plugin):
    """Gives the optimizer a group without parameters."""

    name = "empty-group"

    @hookimpl
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": []}, {"params": list(model.parameters())}])


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.parametrize(
    ("stage", "plugins", "expected"),
    [
        (0, [Half()], "unsupported-stage plugins.deepspeed.stage: 0 stage 1"),
        (1, [EmptyGroup()], "empty-group plugins.deepspeed: build_optimizer"),
        (1, [], "no-launcher plugins.deepspeed: fastloop train RECIPE --nproc 1"),
    ],
    ids=["fp16", "empty group", "no launcher"],
)
def test_runs_that_deepspeed_cannot_start_are_refused(tiny_run, stage, plugins, expected):
    with expect_problem(expected, PluginError):
        tiny_run([{"deepspeed": {"stage": stage}}, *plugins], device="cpu")
