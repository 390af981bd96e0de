"""``fastloop import``: configs of Axolotl, TRL and transformers become recipes."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fastloop import RecipeError
from fastloop.cli import app
from fastloop.plugins.resolve import resolve
from fastloop.recipe import Recipe, load_recipe
from text_helpers import TINY_GPT
from transformers.trainer_pt_utils import LabelSmoother
from typer.testing import CliRunner

from fastloop_migrate import keys


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def imported(config: Any, *arguments: str, name: str = "config.yml") -> tuple[Recipe, str]:
    """The recipe that the command writes, as fastloop's own parser reads it, and the command's output."""
    text = json.dumps(config) if name.endswith(".json") else yaml.safe_dump(config, sort_keys=False)
    Path(name).write_text(text)
    result = CliRunner().invoke(app, ["import", name, "--output", "recipe.yaml", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    written = yaml.safe_load(Path("recipe.yaml").read_text())
    filled_in = []
    for section, key in (("model", "name"), ("data", "files")):
        if written.get(section, {}).get(key) == "???":
            filled_in.append(f"{section}.{key}=filled-in")
    return load_recipe("recipe.yaml", filled_in), result.output


LORA = {
    "base_model": "some/llama-1b",
    "load_in_8bit": False,
    "load_in_4bit": False,
    "strict": False,
    "datasets": [{"path": "some/instructions", "type": "alpaca"}],
    "val_set_size": 0.05,
    "output_dir": "./outputs/lora",
    "adapter": "lora",
    "lora_model_dir": None,
    "sequence_len": 2048,
    "sample_packing": True,
    "eval_sample_packing": False,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "lora_target_modules": ["q_proj", "v_proj"],
    "wandb_project": "owls",
    "wandb_name": "first",
    "gradient_accumulation_steps": 4,
    "micro_batch_size": 2,
    "num_epochs": 1,
    "optimizer": "adamw_8bit",
    "lr_scheduler": "cosine",
    "learning_rate": "2e-4",
    "bf16": "auto",
    "tf32": False,
    "gradient_checkpointing": True,
    "logging_steps": 1,
    "flash_attention": True,
    "warmup_steps": 10,
    "evals_per_epoch": 4,
    "saves_per_epoch": 1,
    "weight_decay": 0.1,
    "seed": 7,
    "special_tokens": {"pad_token": "<|end|>"},
    "tokens": ["<call>"],
}
QLORA = {
    "base_model": "some/gemma-1b",
    "load_in_4bit": True,
    "adapter": "qlora",
    "lora_r": 32,
    "lora_alpha": 16,
    "lora_dropout": 0,
    "lora_target_linear": True,
    "chat_template": "chatml",
    "datasets": [
        {
            "path": "chats.jsonl",
            "ds_type": "json",
            "type": "chat_template",
            "field_messages": "conversations",
            "message_property_mappings": {"role": "from", "content": "value"},
        }
    ],
    "val_set_size": 0,
    "sequence_len": 1024,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 4,
    "num_epochs": 4,
    "optimizer": "paged_adamw_8bit",
    "lr_scheduler": "constant_with_warmup",
    "learning_rate": 0.0002,
    "bf16": True,
    "warmup_ratio": 0.1,
    "flex_attention": True,
}
FSDP = {
    "base_model": "some/llama-70b",
    "datasets": [{"path": "some/instructions", "type": "alpaca", "split": "train[:50%]"}],
    "micro_batch_size": 1,
    "learning_rate": 1e-5,
    "optimizer": "adamw_torch_fused",
    "train_on_inputs": True,
    "fsdp": ["full_shard", "auto_wrap"],
    "fsdp_config": {
        "fsdp_offload_params": True,
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "fsdp_sharding_strategy": "FULL_SHARD",
    },
}
DEEPSPEED = {
    "base_model": "some/llama-8b",
    "deepspeed": "deepspeed_configs/zero3_bf16.json",
    "datasets": [{"path": "books.parquet", "type": "completion", "field": "chapter"}],
    "micro_batch_size": 2,
    "optimizer": "adamw_torch",
    "adam_beta2": 0.95,
    "adam_epsilon": "1e-6",
    "learning_rate": 2e-5,
    "plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"],
    "sequence_parallel_degree": 8,
}
PRETRAIN = {
    "base_model": "some/tiny",
    "pretraining_dataset": [{"path": "some/web", "name": "en", "type": "pretrain", "text_column": "body"}],
    "max_steps": 200,
    "sequence_len": 2048,
    "micro_batch_size": 2,
    "learning_rate": 3e-4,
    "lr_scheduler": "cosine",
    "cosine_min_lr_ratio": 0.1,
    "save_steps": 50,
    "eval_steps": 0.25,
}
SHAREGPT = {
    "base_model": "some/mistral",
    "datasets": [{"path": "some/chats", "type": "sharegpt"}, {"path": "some/more", "type": "sharegpt"}],
    "chat_template": "llama3",
    "micro_batch_size": 1,
    "learning_rate": 5e-6,
    "lr_scheduler": "rex",
    "optimizer": "lion_pytorch",
    "early_stopping_patience": 3,
    "group_by_length": True,
}
OWN_FORMAT = {
    "base_model": "some/phi",
    "datasets": [
        {
            "path": "questions.jsonl",
            "type": {"field_instruction": "question", "field_output": "answer", "format": "Q: {instruction} A:"},
        }
    ],
    "test_datasets": [{"path": "held.jsonl", "ds_type": "json"}],
    "micro_batch_size": 4,
    "learning_rate": 1e-4,
    "fp16": True,
    "bf16": False,
    "attention": "sdpa",
    "num_epochs": 2.5,
}
LEGACY = {
    "base_model": "some/pythia",
    "model_type": "GPTNeoXForCausalLM",
    "datasets": [{"path": "some/jeopardy", "type": "jeopardy"}],
    "adapter": None,
    "xformers_attention": True,
    "optimizer": "adafactor",
    "micro_batch_size": 1,
    "learning_rate": "0.00003",
    "val_set_size": 200,
    "tf32": True,
    "hub_model_id": "me/model",
}
COMPILED = {
    "base_model": "some/qwen",
    "trust_remote_code": True,
    "revision_of_model": "v2",
    "tokenizer_config": "some/tokenizer",
    "datasets": [{"path": "json", "data_files": ["a.jsonl", "b.jsonl"], "type": "chat_template"}],
    "micro_batch_size": 8,
    "learning_rate": 1e-3,
    "torch_compile": True,
    "torch_compile_mode": "reduce-overhead",
    "dataloader_num_workers": 4,
    "save_total_limit": 2,
    "mlflow_experiment_name": "owls",
    "plugins": ["axolotl.integrations.liger.LigerPlugin", "my.plugins.Noise"],
    "liger_rope": True,
}
MUON = {
    "base_model": "some/smol",
    "datasets": [{"path": "texts.txt", "type": "completion"}],
    "optimizer": "muon",
    "micro_batch_size": 16,
    "learning_rate": 1e-2,
    "lr_scheduler": "linear",
    "use_tensorboard": True,
    "pad_to_sequence_len": True,
    "neftune_noise_alpha": 5,
    "max_grad_norm": 0,
}
CONFIGS = {
    "lora": LORA,
    "qlora": QLORA,
    "fsdp": FSDP,
    "deepspeed": DEEPSPEED,
    "pretrain": PRETRAIN,
    "sharegpt": SHAREGPT,
    "own format": OWN_FORMAT,
    "legacy": LEGACY,
    "compiled": COMPILED,
    "muon": MUON,
}
"""Reduced forms of the kinds of configs in Axolotl's examples."""

TRL = {
    "model_name_or_path": "some/qwen-0.5b",
    "attn_implementation": "flash_attention_2",
    "dataset_name": "some/chats",
    "dataset_config": "en",
    "dataset_train_split": "train_sft",
    "dataset_test_split": "test_sft",
    "output_dir": "sft",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 8,
    "max_length": 2048,
    "packing": True,
    "assistant_only_loss": True,
    "eval_strategy": "steps",
    "eval_steps": 100,
    "use_peft": True,
    "lora_r": 64,
    "lora_target_modules": "all-linear",
    "load_in_4bit": True,
    "warmup_ratio": 0.03,
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    "report_to": ["wandb", "tensorboard", "azure_ml"],
    "use_liger_kernel": True,
    "loss_type": "dft",
    "push_to_hub": True,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_recipe_of_axolotl_loads_and_resolves(name):
    recipe, _ = imported(CONFIGS[name])
    assert recipe.model["name"] == CONFIGS[name]["base_model"]
    resolved = resolve(recipe, any_machine=True)
    assert resolved.plugins.in_slot("task") == "causal-lm"


def test_values_of_lora():
    recipe, shown = imported(LORA)
    train = recipe.train
    assert (train.epochs, train.batch_size, train.micro_batch_size, train.lr) == (1, 8, 2, 2e-4)
    assert (train.optimizer, train.weight_decay, train.decay_biases_and_norms, train.seed) == ("AdamW", 0.1, False, 7)
    assert (train.max_grad_norm, train.log_every, train.evaluate_every, train.save_every) == (1.0, 1, "epoch", "epoch")
    assert recipe.model["tokens"] == ["<call>"]
    assert recipe.data == {
        "name": "some/instructions",
        "messages": ["instruction", "input", "output"],
        "max_length": 2048,
        "validation_fraction": 0.05,
    }
    assert recipe.plugins == {
        "activation-checkpointing": {},
        "packing": {},
        "attention": {"implementation": "flash_attention_2"},
        "trackers": {"trackers": ["wandb"], "project": "owls"},
        "fused-optimizer": {"implementation": "8bit"},
        "lr-scheduler": {"schedule": "cosine", "warmup": 10},
        "amp": {"dtype": "auto"},
        "lora": {"r": 16, "alpha": 32, "dropout": 0.05, "target_modules": ["q_proj", "v_proj"]},
    }
    assert recipe.output == "runs/lora"
    noted = [line.partition(": ")[0] for line in shown.splitlines() if ": " in line]
    assert noted == ["evals_per_epoch", "datasets", "micro_batch_size", "wandb_name", "special_tokens"]
    assert "Next steps:\n  fastloop plan recipe.yaml\n  fastloop train recipe.yaml\n" in shown
    comments = Path("recipe.yaml").read_text()
    assert "#   wandb_name: set W&B's environment variable, such as WANDB_ENTITY or WANDB_NAME\n" in comments


def test_values_of_qlora():
    recipe, shown = imported(QLORA)
    assert recipe.plugins["lora"] == {
        "r": 32,
        "alpha": 16,
        "dropout": 0,
        "target_modules": "all-linear",
        "quantize": "nf4",
    }
    assert recipe.plugins["lr-scheduler"] == {"schedule": "constant", "warmup": 0.1}
    assert recipe.plugins["amp"] == {"dtype": "bf16"}
    assert recipe.plugins["attention"] == {"implementation": "flex_attention"}
    assert recipe.data == {
        "files": {"train": "chats.jsonl"},
        "messages": "conversations",
        "chat_template": "chatml",
        "validation_fraction": 0.0,
        "max_length": 1024,
    }
    assert "message_property_mappings" not in shown


@pytest.mark.parametrize(
    ("config", "plugin", "options"),
    [
        (FSDP, "fsdp", {"blocks": ["LlamaDecoderLayer"], "cpu_offload": True, "meta_device": True}),
        (FSDP | {"fsdp": ["shard_grad_op"], "fsdp_config": None}, "fsdp", {"reshard_after_forward": False}),
        ({**FSDP, "fsdp": None, "fsdp_version": 2}, "fsdp", None),
        (DEEPSPEED, "deepspeed", {"stage": 3}),
        (DEEPSPEED, "fused-loss", {}),
        (PRETRAIN, "lr-scheduler", {"schedule": "cosine", "min_ratio": 0.1}),
        (DEEPSPEED | {"deepspeed": {"zero_optimization": {"stage": 1}}}, "deepspeed", {"stage": 1}),
        (SHAREGPT, "early-stopping", {"monitor": "loss", "patience": 3}),
        (SHAREGPT, "length-bucketing", {}),
        (OWN_FORMAT, "amp", {"dtype": "fp16"}),
        (OWN_FORMAT, "attention", {"implementation": "sdpa"}),
        (LEGACY | {"bf16": False}, "amp", {"dtype": "fp32", "fp32_matmul": "high"}),
        (LEGACY | {"bf16": True}, "amp", {"dtype": "bf16", "fp32_matmul": "high"}),
        (COMPILED, "compile", {"mode": "reduce-overhead"}),
        (COMPILED, "dataloader-workers", {"num_workers": 4}),
        (COMPILED, "trackers", {"trackers": ["mlflow"], "project": "owls"}),
        (COMPILED, "liger", {}),
        (MUON, "tensorboard", {}),
        (MUON | {"cut_cross_entropy": True}, "fused-loss", {}),
    ],
)
def test_plugins_of_axolotl(config, plugin, options):
    recipe, _ = imported(config)
    if options is None:
        options = {"blocks": ["LlamaDecoderLayer"], "cpu_offload": True, "meta_device": True}
    assert recipe.plugins[plugin] == options


@pytest.mark.parametrize(
    ("config", "dotted", "value"),
    [
        (FSDP, "data.train_on", "all"),
        (FSDP, "data.splits", {"train": "train[:50%]"}),
        (DEEPSPEED, "data.files", {"train": "books.parquet"}),
        (DEEPSPEED, "data.text", "chapter"),
        (DEEPSPEED, "train.optimizer", {"name": "AdamW", "betas": [0.9, 0.95], "eps": 1e-6}),
        (PRETRAIN, "data.subset", "en"),
        (PRETRAIN, "data.text", "body"),
        (PRETRAIN, "train.max_steps", 200),
        (PRETRAIN, "train.save_every", 50),
        (PRETRAIN, "train.evaluate_every", "epoch"),
        (SHAREGPT, "data.messages", "conversations"),
        (OWN_FORMAT, "data.messages", ["question", "answer"]),
        (OWN_FORMAT, "data.files", {"train": "questions.jsonl", "validation": "held.jsonl"}),
        (OWN_FORMAT, "train.epochs", 3),
        (LEGACY, "train.optimizer", "Adafactor"),
        (LEGACY, "train.lr", 3e-5),
        (COMPILED, "model.revision", "v2"),
        (COMPILED, "model.tokenizer", "some/tokenizer"),
        (COMPILED, "model.trust_remote_code", True),
        (COMPILED, "data.files", {"train": ["a.jsonl", "b.jsonl"]}),
        (COMPILED, "train.keep_checkpoints", 2),
        (MUON, "train.optimizer", "Muon"),
        (MUON, "train.max_grad_norm", None),
        (MUON, "data.padding", "max_length"),
        (MUON, "train.seed", 42),
        (MUON | {"saves_per_epoch": 0}, "train.save_every", None),
    ],
)
def test_keys_of_axolotl(config, dotted, value):
    recipe, _ = imported(config)
    section, key = dotted.split(".")
    assert recipe.to_dict()[section][key] == value


@pytest.mark.parametrize(
    ("config", "note"),
    [
        (DEEPSPEED, "deepspeed: deepspeed_configs/zero3_bf16.json: no such file here"),
        (DEEPSPEED, "sequence_parallel_degree: list the plugin context-parallel"),
        (PRETRAIN, "eval_steps: 0.25 is a share of the run; set train.evaluate_every"),
        (SHAREGPT, "datasets: some/more: a recipe reads one data set"),
        (SHAREGPT, "chat_template: llama3: save it as a Jinja file"),
        (SHAREGPT, "optimizer: lion_pytorch: name its class, train.optimizer: package.module:Class"),
        (SHAREGPT, "lr_scheduler: rex: cosine stands for it"),
        (OWN_FORMAT, "num_epochs: 2.5 is rounded up"),
        (QLORA | {"fsdp": ["full_shard"]}, "fsdp: 4-bit weights cannot be sharded"),
        (LEGACY, "val_set_size: 200 rows; set data.validation_fraction"),
        (LEGACY, "xformers_attention: list the plugin attention"),
        (LEGACY, "datasets: type: jeopardy: set data.text, data.messages or data.prompt"),
        (LEGACY, "hub_model_id: upload the model after the run"),
        (COMPILED, "plugins: my.plugins.Noise: fastloop has none; write a plugin"),
        (COMPILED, "liger_rope: the plugin liger chooses the kernels"),
        (MUON, "neftune_noise_alpha: list the plugin neftune"),
        ({**MUON, "owls": 3}, "owls: fastloop has no such key"),
    ],
)
def test_a_key_without_a_counterpart_is_listed_with_a_reason(config, note):
    _, shown = imported(config)
    assert note in shown
    assert f"#   {note}" in Path("recipe.yaml").read_text()


def test_values_of_trl():
    recipe, shown = imported(TRL, "--nproc", "2")
    train = recipe.train
    assert (train.batch_size, train.micro_batch_size, train.lr, train.evaluate_every) == (64, 4, 2e-5, 100)
    assert (train.save_every, train.log_every, train.optimizer) == (500, 10, "AdamW")
    assert recipe.data == {
        "name": "some/chats",
        "subset": "en",
        "splits": {"train": "train_sft", "validation": "test_sft"},
        "messages": "messages",
        "train_on": "assistant",
        "max_length": 2048,
    }
    assert recipe.plugins == {
        "activation-checkpointing": {},
        "packing": {},
        "liger": {},
        "attention": {"implementation": "flash_attention_2"},
        "trackers": {"trackers": ["wandb"]},
        "tensorboard": {},
        "fused-optimizer": {"implementation": "fused"},
        "lr-scheduler": {"schedule": "cosine", "warmup": 0.03, "min_ratio": 0.1},
        "amp": {"dtype": "bf16"},
        "lora": {"r": 64, "alpha": 32, "dropout": 0.05, "target_modules": "all-linear", "quantize": "nf4"},
        "ddp": {},
    }
    resolve(recipe, any_machine=True)
    for note in ("report_to: azure_ml", "loss_type: fastloop has no such key", "push_to_hub: upload the model"):
        assert note in shown
    assert "fastloop train recipe.yaml --nproc 2" in shown


def test_every_default_of_training_arguments_needs_no_note():
    """the JSON of ``TrainingArguments``, with three fields that differ from the defaults"""
    from transformers import TrainingArguments

    args = TrainingArguments(
        "out", use_cpu=True, optim="sgd", eval_strategy="epoch", neftune_noise_alpha=5.0, load_best_model_at_end=False
    )
    recipe, shown = imported(json.loads(args.to_json_string()), name="args.json")
    noted = [line.partition(": ")[0] for line in shown.splitlines() if ": " in line]
    assert noted == ["data", "model", "neftune_noise_alpha"]
    assert "Next steps:\n  fill in model.name and data.files\n  fastloop plan recipe.yaml\n" in shown
    assert (recipe.train.optimizer, recipe.train.evaluate_every, recipe.train.device) == ("SGD", "epoch", "cpu")
    assert (recipe.train.lr, recipe.train.batch_size, recipe.train.max_grad_norm) == (5e-5, 8, 1.0)
    assert recipe.plugins == {"lr-scheduler": {"schedule": "linear"}}
    assert recipe.output == "runs/out"


@pytest.mark.parametrize(
    ("old", "expected"),
    [
        ("runs/lora/", "runs/lora-fastloop"),
        ("/data/hf/", "runs/hf"),
        ("./runs/a", "runs/a-fastloop"),
        (None, "runs/args"),
    ],
)
def test_a_run_gets_a_folder_of_its_own(old, expected):
    """The old trainer's folder may hold its files, or get them later."""
    config = {"learning_rate": 1e-3, "num_train_epochs": 2, "per_device_train_batch_size": 4}
    recipe, _ = imported(config | ({"output_dir": old} if old else {}), name="args.json")
    assert recipe.output == expected
    (line,) = [line for line in Path("recipe.yaml").read_text().splitlines() if line.startswith("output: ")]
    assert ("#" in line) == (old is not None)
    assert old is None or old in line.partition("#")[2]


def test_best_model_and_schedules_of_transformers():
    config = {
        "output_dir": "out",
        "learning_rate": 1e-3,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_accuracy",
        "greater_is_better": True,
        "lr_scheduler_type": "polynomial",
        "lr_scheduler_kwargs": {"power": 2.0},
        "adam_beta1": 0.8,
        "train_sampling_strategy": "group_by_length",
    }
    recipe, _ = imported(config)
    assert recipe.plugins["checkpoint-best"] == {"monitor": "accuracy", "mode": "max"}
    assert recipe.plugins["lr-scheduler"] == {"schedule": "polynomial", "arguments": {"power": 2.0}}
    assert recipe.plugins["length-bucketing"] == {}
    assert recipe.train.optimizer == {"name": "AdamW", "betas": [0.8, 0.999]}


@pytest.mark.parametrize(("metric", "has_note"), [("eval_loss", False), ("f1", False), ("eval_f1_macro", True)])
@pytest.mark.parametrize("key", ["load_best_model_at_end", "early_stopping_patience", None])
def test_a_metric_of_compute_metrics_has_a_note(metric, has_note, key):
    """The script computes it, and the task may not: then ``fastloop train`` refuses the recipe."""
    config = {"output_dir": "out", "learning_rate": 1e-3, "metric_for_best_model": metric}
    if key is not None:
        config[key] = 1
    _, shown = imported(config)
    assert ("metric_for_best_model: " in shown) == (has_note and key is not None)


DPO_OF_TRL = {
    "model_name_or_path": "nano",
    "beta": 0.2,
    "loss_type": "sigmoid",
    "precompute_ref_log_probs": True,
    "per_device_train_batch_size": 4,
    "learning_rate": 5e-7,
}


@pytest.mark.parametrize(
    ("config", "arguments", "task", "lr"),
    [
        (DPO_OF_TRL, (), {"dpo": {"loss": "sigmoid", "beta": 0.2}}, 5e-7),
        (DPO_OF_TRL | {"loss_type": ["ipo"], "learning_rate": None}, (), {"dpo": {"loss": "ipo", "beta": 0.2}}, 1e-6),
        (
            {"model_name_or_path": "a", "loss_type": "robust", "label_smoothing": 0.1},
            (),
            {"dpo": {"loss": "robust", "label_smoothing": 0.1}},
            1e-6,
        ),
        (
            {"model_name_or_path": "a", "desirable_weight": 0.5, "beta": 0.3},
            (),
            {"kto": {"beta": 0.3, "desirable_weight": 0.5}},
            1e-6,
        ),
        ({"model_name_or_path": "a", "beta": 0.3}, ("--trainer", "orpo"), {"dpo": {"loss": "orpo", "beta": 0.3}}, 1e-6),
        ({"model_name_or_path": "a", "center_rewards_coefficient": 0.01}, (), {"reward-model": {"center": 0.01}}, 1e-4),
        ({"model_name_or_path": "a"}, ("--trainer", "reward"), {"reward-model": {}}, 1e-4),
        ({"base_model": "a", "rl": "dpo", "rl_beta": 0.2}, (), {"dpo": {"loss": "sigmoid", "beta": 0.2}}, 5e-5),
        ({"base_model": "a", "rl": "ipo"}, (), {"dpo": {"loss": "ipo"}}, 5e-5),
        ({"base_model": "a", "rl": "orpo", "orpo_alpha": 0.2}, (), {"dpo": {"loss": "orpo", "beta": 0.2}}, 5e-5),
        (
            {"base_model": "a", "rl": "kto", "rl_beta": 0.5, "kto_undesirable_weight": 0.2},
            (),
            {"kto": {"beta": 0.5, "undesirable_weight": 0.2}},
            5e-5,
        ),
        ({"base_model": "a", "reward_model": True}, (), {"reward-model": {}}, 5e-5),
        (
            DPO_OF_TRL | {"disable_dropout": False},
            (),
            {"dpo": {"loss": "sigmoid", "beta": 0.2, "disable_dropout": False}},
            5e-7,
        ),
        (
            {"model_name_or_path": "a", "disable_dropout": False},
            ("--trainer", "orpo"),
            {"dpo": {"loss": "orpo", "disable_dropout": False}},
            1e-6,
        ),
        (
            {"model_name_or_path": "a", "desirable_weight": 0.5, "disable_dropout": True},
            (),
            {"kto": {"desirable_weight": 0.5, "disable_dropout": True}},
            1e-6,
        ),
        (
            {"model_name_or_path": "a", "disable_dropout": False},
            ("--trainer", "reward"),
            {"reward-model": {"disable_dropout": False}},
            1e-4,
        ),
    ],
)
def test_preference_tuning_becomes_a_recipe_of_the_package(config, arguments, task, lr):
    """The package is not needed to write its recipe. None of them trains on the texts alone."""
    recipe, output = imported(config, *arguments)
    ((name, options),) = task.items()
    assert next(iter(recipe.plugins)) == name
    assert recipe.plugins[name] == options
    assert recipe.train.lr == pytest.approx(lr)
    assert "text" not in recipe.data
    assert "fastloop has no such key" not in output


@pytest.mark.parametrize(
    ("kind", "columns"),
    [
        ("chatml.intel", {"system": "system", "prompt": "question", "chat_template": "chatml"}),
        ("chatml.ultra", {"prompt": None, "chat_template": "chatml"}),
        ("chat_template.default", {"prompt": "messages"}),
        ({"field_prompt": "q", "field_chosen": "good", "field_rejected": "bad"}, {"prompt": "q", "chosen": "good"}),
        ("llama3.intel", {}),
    ],
)
def test_pairs_of_axolotl_keep_their_columns(kind, columns):
    config = {"base_model": "a", "rl": "dpo", "datasets": [{"path": "pairs.jsonl", "type": kind}]}
    recipe, output = imported(config)
    assert recipe.data["files"] == {"train": "pairs.jsonl"}
    assert {key: recipe.data[key] for key in columns} == columns
    assert ("llama3.intel" in output) == (not columns)


def test_packed_rows_of_trl_are_counted_apart():
    """Its batch size counts packed rows, and a recipe's counts samples."""
    _, output = imported({"model_name_or_path": "a", "dataset_text_field": "text", "packing": True})
    assert "per_device_train_batch_size: with packing, TRL counts rows of max_length tokens" in output
    _, output = imported({"model_name_or_path": "a", "dataset_text_field": "text"})
    assert "counts rows" not in output


@pytest.mark.parametrize(("more", "noted"), [({}, True), ({"packing": False}, False), ({"loss_type": "nll"}, False)])
def test_a_file_that_names_no_trainer_says_that_it_was_taken_as_sft(more, noted):
    _, output = imported({"model_name_or_path": "a", "learning_rate": 1e-5, **more})
    assert ("trainer: " in output) == noted


SCRIPT = {
    "model_name_or_path": "start",
    "train_file": "train.csv",
    "validation_file": "valid.csv",
    "text_column_name": "body",
    "label_column_name": "verdict",
    "max_seq_length": 96,
    "learning_rate": 1e-3,
    "output_dir": "hf",
}
"""Arguments of run_classification.py of transformers."""


@pytest.mark.parametrize("left_out", [(), ("validation_file",), ("max_seq_length", "text_column_name")])
def test_arguments_of_an_example_script_of_transformers_are_none_of_trl(left_out):
    recipe, output = imported({key: value for key, value in SCRIPT.items() if key not in left_out})
    assert "activation-checkpointing" not in recipe.plugins
    assert "amp" not in recipe.plugins
    files = {"train": "train.csv", "validation": "valid.csv"}
    expected = {"files": files, "text": "body", "label": "verdict", "max_length": 96}
    for key, name in (("text_column_name", "text"), ("max_seq_length", "max_length")):
        if key in left_out:
            del expected[name]
    if "validation_file" in left_out:
        del files["validation"]
    assert recipe.data == expected
    assert "no such key" not in output


def test_keys_with_a_plugin_name_it():
    _, output = imported(SCRIPT | {"neftune_noise_alpha": 5})
    assert "the plugin neftune" in output


def test_label_smoothing_of_a_script_becomes_the_loss_of_the_classifier():
    recipe, output = imported(SCRIPT | {"label_smoothing_factor": 0.1})
    assert recipe.plugins["text-classification"] == {"loss": {"name": "cross_entropy", "label_smoothing": 0.1}}
    assert "for another task" in output
    resolve(recipe)
    recipe, output = imported(SCRIPT | {"label_smoothing_factor": 0.0})
    assert "text-classification" not in recipe.plugins
    assert "label_smoothing" not in output
    recipe, output = imported(LORA | {"label_smoothing_factor": 0.1})
    assert "text-classification" not in recipe.plugins
    assert "label_smoothing_factor: causal-lm has no label smoothing" in output


@pytest.mark.parametrize(
    ("config", "noted"),
    [
        (SCRIPT | {"gradient_accumulation_steps": 4}, True),
        (SCRIPT | {"gradient_accumulation_steps": 1}, False),
        (SCRIPT | {"gradient_accumulation_steps": 4, "label_smoothing_factor": 0.1}, False),
        (LORA, False),
        (TRL, False),
    ],
)
def test_accumulated_losses_of_the_hf_trainer_have_a_note(config, noted):
    """Its classifiers alone ignore ``num_items_in_batch``: the language models of TRL and Axolotl divide by it."""
    _, output = imported(config)
    line = "gradient_accumulation_steps: for a classifier, the HF Trainer logs 4 times fastloop's loss"
    assert (line in output) == noted


def test_the_smoothed_loss_of_the_hf_trainer_is_that_of_the_recipe():
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2, 3, 1, 0])
    theirs = LabelSmoother(epsilon=0.1)({"logits": logits}, labels)
    ours = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
    assert float(theirs) == pytest.approx(float(ours), rel=1e-6)


BOMB = "a: &a [x, x, x, x]\n" + "".join(
    f"{after}: &{after} [*{before}, *{before}, *{before}, *{before}]\n" for before, after in pairwise("abcdefgh")
)
"""Lists of lists: 87,380 values, with expanded aliases."""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "found a list, expected a mapping"),
        ("a: [1", "config.yml, line 2: not valid YAML: "),
        ("seed: 1\nbase_model: 007\n", "config.yml, line 2: YAML reads 007 as a number with a leading zero"),
        ("seed: 1\nseed: 2\n", "the key 'seed' appears twice, first in line 1"),
        (BOMB, "more than 10,000 values, with expanded aliases"),
        ("learning: 1\n", "no key of a known format. Expected one such as base_model (axolotl)"),
        ("base_model: a\nrl: simpo\n", "rl: found simpo, expected one of dpo, ipo, orpo, kto"),
        ("base_model: a\nrl: grpo\n", "rl: found grpo"),
        ("base_model: a\nprocess_reward_model: true\n", "process_reward_model: found true"),
        ("base_model: a\nrl: dpo\ndpo_use_weighting: true\n", "dpo_use_weighting: found True"),
        ("base_model: a\nrl: dpo\nrpo_alpha: 1.0\n", "rpo_alpha: found 1.0"),
        ("base_model: a\nrl: dpo\ndpo_loss_type: [sigmoid, sft]\n", "dpo_loss_type: found sft, sigmoid"),
        ("model_name_or_path: a\nbeta: 0.2\n", "--trainer dpo, --trainer kto or --trainer orpo"),
        ("model_name_or_path: a\nbeta: 0.2\nnum_generations: 8\n", "num_generations: found a key of GRPO"),
        ("model_name_or_path: a\nloss_type: hinge\n", "loss_type: found hinge, expected one of sigmoid, robust, ipo"),
        ("model_name_or_path: a\nloss_type: apo_zero_unpaired\n", "loss_type: found apo_zero_unpaired"),
        ("model_name_or_path: a\nloss_type: sigmoid\nlabel_smoothing: 0.1\n", "label_smoothing: found 0.1"),
        ("model_name_or_path: a\nreference_free: true\n", "reference_free: found True"),
        ("model_name_or_path: a\nf_divergence_type: js_divergence\n", "f_divergence_type: found 'js_divergence'"),
        ("model_name_or_path: a\nloss_type: ipo\nsync_ref_model: true\n", "sync_ref_model: found True"),
        ("base_model: a\nmicro_batch_size: auto\n", "micro_batch_size: found 'auto', expected a number"),
        ("base_model: a\ndatasets: [some/name]\n", "a value has another form than in configs of axolotl"),
        ("base_model: a\nfsdp_config: full\n", "a value has another form than in configs of axolotl"),
        ("base_model: a\nlearning_rate: -1\n", "train.lr: found -1 "),
    ],
)
def test_a_wrong_file_is_refused(text, message):
    Path("config.yml").write_text(text)
    result = CliRunner().invoke(app, ["import", "config.yml", "--output", "recipe.yaml"])
    assert result.exit_code != 0
    assert message in f"{result.output} {result.exception}"
    assert not Path("recipe.yaml").exists()


def test_the_recipe_trains_by_the_proposed_commands():
    """a tiny model of a folder and a file of texts: import, plan and train"""
    texts = [f"owl number {number} sings a song of {number % 7} notes" for number in range(40)]
    Path("texts.txt").write_text("\n".join(texts))
    model = {"config": TINY_GPT, "tokenizer": {"kind": "bpe", "vocab_size": 300}}
    start = {"model": model, "data": {"files": {"train": "texts.txt"}, "max_length": 16}, "train": {"max_steps": 1}}
    Path("start.yaml").write_text(yaml.safe_dump(start | {"output": "start"}))
    config = {
        "base_model": "start/model",
        "datasets": [{"path": "texts.txt", "type": "completion"}],
        "sequence_len": 16,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "learning_rate": "1e-3",
        "optimizer": "adamw_torch",
        "bf16": False,
        "val_set_size": 0.2,
        "output_dir": "run",
    }
    assert CliRunner().invoke(app, ["train", "start.yaml"]).exit_code == 0
    _, shown = imported(config)
    proposed = [line.split()[1:] for line in shown.splitlines() if line.startswith("  fastloop ")]
    assert [command[0] for command in proposed] == ["plan", "train"]
    for command in proposed:
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
    assert json.loads(Path("runs/run/summary.json").read_text())["steps"] == 3


def test_text_of_a_config_cannot_leave_its_comment():
    recipe, _ = imported({**MUON, "chat_template": "x\noutput: elsewhere", "owls\u2028output": 3})
    assert recipe.output == "runs/config"
    assert "#   owls output: fastloop has no such key" in Path("recipe.yaml").read_text()


def test_a_recipe_on_stdout_is_the_same():
    imported(LORA)
    result = CliRunner().invoke(app, ["import", "config.yml", "--format", "axolotl"])
    assert result.stdout == Path("recipe.yaml").read_text()


def test_tables_name_each_key_once():
    converted = keys.DIRECT.keys() | keys.PLUGINS.keys()
    assert not converted & keys.REASONS.keys()
    assert not converted & keys.IRRELEVANT
    assert not keys.REASONS.keys() & keys.IRRELEVANT


def test_what_a_file_does_not_name_is_written_as_a_value_to_fill_in():
    Path("args.json").write_text(json.dumps({"output_dir": "out", "per_device_train_batch_size": 4}))
    result = CliRunner().invoke(app, ["import", "args.json", "--output", "recipe.yaml"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    written = yaml.safe_load(Path("recipe.yaml").read_text())
    assert (written["model"]["name"], written["data"]["files"]) == ("???", "???")
    assert Path("recipe.yaml").read_text().count("# fill this in") == 2
    with pytest.raises(RecipeError, match=r"^recipe.yaml: data.files, model.name: found '\?\?\?'"):
        load_recipe("recipe.yaml")


@pytest.mark.slow
def test_the_command_prints_nothing_of_the_libraries_that_it_imports():
    """Transformers' arguments import bitsandbytes, which logs advice for inference."""
    pytest.importorskip("bitsandbytes")
    Path("args.json").write_text(json.dumps({"output_dir": "out", "per_device_train_batch_size": 4}))
    command = [sys.executable, "-m", "fastloop", "import", "args.json", "--output", "recipe.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
