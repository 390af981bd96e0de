"""Settings of ``accelerate launch`` for a strategy are taken over into the recipe, or refused by name.

Modules:
    plugins/fastloop_plugins/strategies/_fsdp_launcher.py
    plugins/fastloop_plugins/strategies/_launcher.py
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import yaml
from safetensors.torch import load_file

from fastloop import PluginError
from fastloop.cli import launch
from fastloop.recipe import Recipe, make_recipe
from fastloop.runtime import hardware
from fastloop.testing import assert_problem, expect_problem
from fastloop_plugins.strategies.deepspeed import DeepSpeed
from fastloop_plugins.strategies.fsdp import FSDP

FSDP_1 = {"FSDP_VERSION": "1"}
FSDP_2 = {"FSDP_VERSION": "2"}
DEFAULTS = {
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_USE_ORIG_PARAMS": "true",
}
"""The variables of a configuration that only says FSDP."""


def require_deepspeed() -> None:
    """Skip a test if deepspeed is not installed: a recipe without it is refused before."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")


def checked(
    monkeypatch: pytest.MonkeyPatch, name: str, environment: dict[str, str], *others: Any, **options: Any
) -> Recipe:
    """The recipe after ``check_recipe`` of a strategy under the launcher's variables."""
    train = options.pop("train", {})
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    recipe = make_recipe({"train": train, "plugins": [{name: options}, *others]})
    for _ in range(2):  # the second check finds its own changes
        plugin = {"deepspeed": DeepSpeed, "fsdp": FSDP}[name](**(recipe.plugins[name] or {}))
        plugin.check_recipe(recipe)
    assert recipe.plugins[name] == {
        key: value for key, value in plugin.option_values().items() if key in (recipe.plugins[name] or {})
    }
    return recipe


OFFLOAD_OPTIMIZER = {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}
TAKEN: list[tuple[str, dict[str, str], dict[str, Any]]] = [
    ("deepspeed", {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, {"stage": 3}),
    ("deepspeed", OFFLOAD_OPTIMIZER, {"offload_optimizer": True}),
    ("deepspeed", OFFLOAD_OPTIMIZER | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "none"}, {"offload_optimizer": True}),
    (
        "deepspeed",
        {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu"},
        {"stage": 3, "offload_parameters": True},
    ),
    ("deepspeed", {"ACCELERATE_DEEPSPEED_ZERO3_INIT": "true"}, {}),  # without stage 3, Accelerate ignores it, too
    ("fsdp", FSDP_2 | DEFAULTS, {}),
    ("fsdp", FSDP_1 | DEFAULTS, {}),
    ("fsdp", FSDP_2 | DEFAULTS | {"FSDP_RESHARD_AFTER_FORWARD": "false"}, {"reshard_after_forward": False}),
    ("fsdp", FSDP_1 | DEFAULTS | {"FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"}, {"reshard_after_forward": False}),
    ("fsdp", FSDP_1 | DEFAULTS | {"FSDP_SHARDING_STRATEGY": "4", "LOCAL_WORLD_SIZE": "4"}, {"shard_within": 4}),
    ("fsdp", FSDP_2 | {"FSDP_TRANSFORMER_CLS_TO_WRAP": "Block,Head"}, {"blocks": ["Block", "Head"]}),
    ("fsdp", FSDP_2 | {"FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}, {"blocks": []}),
]


@pytest.mark.parametrize(("name", "environment", "options"), TAKEN)
def test_a_setting_is_taken_over_and_saved_with_the_recipe(monkeypatch, name, environment, options):
    if name == "deepspeed":
        require_deepspeed()
    assert checked(monkeypatch, name, environment).to_dict()["plugins"] == [{name: options} if options else name]


def test_clipping_is_taken_over(monkeypatch):
    require_deepspeed()
    recipe = checked(monkeypatch, "deepspeed", {"ACCELERATE_GRADIENT_CLIPPING": "0.001"})
    assert recipe.to_dict()["train"]["max_grad_norm"] == 0.001
    assert checked(monkeypatch, "deepspeed", {"ACCELERATE_GRADIENT_CLIPPING": "0.0"}).train.max_grad_norm is None


def test_a_json_file_of_the_launcher_is_read(monkeypatch):
    require_deepspeed()
    Path("ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    assert checked(monkeypatch, "deepspeed", {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"}).plugins["deepspeed"] == {
        "config": "ds.json"
    }
    with expect_problem("conflicting-values zero_optimization.stage 1 plugins.deepspeed.stage 2", PluginError):
        checked(monkeypatch, "deepspeed", {}, stage=2)


def test_offload_is_taken_over_on_a_device_that_has_it(monkeypatch):
    environment = FSDP_2 | DEFAULTS | {"FSDP_OFFLOAD_PARAMS": "true"}
    with expect_problem("launcher-differs 'true' FSDP_OFFLOAD_PARAMS plugins.fsdp.cpu_offload", PluginError):
        checked(monkeypatch, "fsdp", environment, train={"device": "cpu"})
    machine = hardware.this_machine("cpu")
    monkeypatch.setattr(hardware, "this_machine", lambda device: type(machine)(**{**vars(machine), "device": "cuda"}))
    assert checked(monkeypatch, "fsdp", environment).plugins["fsdp"] == {"cpu_offload": True}


REFUSED: list[tuple[str, dict[str, str], dict[str, Any], str]] = [
    ("deepspeed", {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, {"stage": 2}, "launcher-differs plugins.deepspeed.stage 2"),
    (
        "deepspeed",
        {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none"},
        {"offload_optimizer": True},
        "launcher-differs offload_optimizer",
    ),
    (
        "deepspeed",
        {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "nvme"},
        {},
        "launcher-differs zero_optimization.offload_optimizer plugins.deepspeed",
    ),
    (
        "deepspeed",
        {"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "nvme"},
        {},
        "launcher-differs zero_optimization.offload_param plugins.deepspeed.config",
    ),
    (
        "deepspeed",
        {"ACCELERATE_GRADIENT_CLIPPING": "1.0"},
        {"train": {"max_grad_norm": 0.5}},
        "launcher-differs train.max_grad_norm 0.5",
    ),
    (
        "deepspeed",
        {"ACCELERATE_GRADIENT_CLIPPING": "0"},
        {"train": {"max_grad_norm": 0.5}},
        "launcher-differs train.max_grad_norm 0.5",
    ),
    ("deepspeed", {"ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "Block"}, {}, "launcher-differs"),
    ("deepspeed", {"ACCELERATE_DEEPSPEED_ZERO3_INIT": "true"}, {"stage": 3}, "launcher-differs zero3_init_flag"),
    (
        "fsdp",
        FSDP_2 | {"FSDP_RESHARD_AFTER_FORWARD": "false"},
        {"reshard_after_forward": True},
        "launcher-differs reshard_after_forward",
    ),
    ("fsdp", FSDP_2 | {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, {}, "launcher-differs 'activation-checkpointing'"),
    (
        "fsdp",
        FSDP_2 | {"FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true"},
        {},
        "launcher-differs fsdp_activation_checkpointing_offload",
    ),
    ("fsdp", FSDP_2 | {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"}, {}, "launcher-differs plugins.fsdp.blocks"),
    ("fsdp", FSDP_2 | {"FSDP_IGNORED_MODULES": "head"}, {}, "launcher-differs fsdp_ignored_modules"),
    ("fsdp", FSDP_1 | {"FSDP_SHARDING_STRATEGY": "NO_SHARD"}, {}, "launcher-differs 'ddp' 'fsdp'"),
    ("fsdp", FSDP_1 | {"FSDP_FORWARD_PREFETCH": "true"}, {}, "launcher-differs fsdp_forward_prefetch"),
    ("fsdp", FSDP_1 | {"FSDP_BACKWARD_PREFETCH": "BACKWARD_POST"}, {}, "launcher-differs BACKWARD_PRE"),
]


@pytest.mark.parametrize(("name", "environment", "options", "expected"), REFUSED)
def test_a_setting_without_an_option_or_against_the_recipe_is_refused(
    monkeypatch, name, environment, options, expected
):
    with pytest.raises(PluginError) as caught:
        checked(monkeypatch, name, environment, **options)
    variable, value = list(environment.items())[-1]
    assert_problem(caught.value.problem, f"{expected} {value!r} ({variable})")


def test_checkpointing_that_the_recipe_lists_is_no_difference(monkeypatch):
    environment = FSDP_2 | {"FSDP_ACTIVATION_CHECKPOINTING": "true"}
    assert checked(monkeypatch, "fsdp", environment, "activation-checkpointing").plugins["fsdp"] == {}


CODE = """
import torch
from torch import nn

def data():
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    return {"train": torch.utils.data.TensorDataset(inputs, inputs.argmax(1))}

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_a_configuration_file_trains_what_the_recipe_would():
    Path("net.py").write_text(CODE)
    train = {"batch_size": 8, "lr": 0.1, "optimizer": "SGD", "epochs": 1, "device": "cpu", "save_every": None}
    tree = {"model": {"module": "net.py:Net"}, "data": {"module": "net.py:data"}, "train": train}
    Path("r.yaml").write_text(yaml.safe_dump(tree | {"plugins": [{"module": {"loss": "cross_entropy"}}, "deepspeed"]}))
    settings = {
        "gradient_clipping": 0.01,
        "zero_stage": 1,
        "offload_optimizer_device": "none",
        "gradient_accumulation_steps": 1,
    }
    file = {
        "distributed_type": "DEEPSPEED",
        "num_processes": 2,
        "num_machines": 1,
        "use_cpu": True,
        "mixed_precision": "no",
    }
    Path("accelerate.yaml").write_text(
        yaml.safe_dump(file | {"compute_environment": "LOCAL_MACHINE", "deepspeed_config": settings})
    )
    launcher = [
        "accelerate.commands.launch",
        "--config_file",
        "accelerate.yaml",
        "--main_process_port",
        str(launch.free_port()),
    ]
    recipe = ["r.yaml", "plugins.deepspeed.stage=1"]
    starts = {
        "launched": [*launcher, "-m", "fastloop", "train", "r.yaml"],
        "same": ["fastloop", "train", *recipe, "train.max_grad_norm=0.01", "--nproc", "2"],
        "unclipped": ["fastloop", "train", *recipe, "--nproc", "2"],
    }
    weights = {}
    for name, command in starts.items():
        ended = forked.run("-m", *command, f"output={name}")
        assert ended.returncode == 0, ended.stderr
        weights[name] = load_file(Path(name, "model", "model.safetensors"))
    assert yaml.safe_load(Path("launched/recipe.yaml").read_text())["train"]["max_grad_norm"] == 0.01
    for key, weight in weights["launched"].items():
        assert torch.equal(weight, weights["same"][key])
        assert not torch.allclose(weight, weights["unclipped"][key])
