"""``lora: {quantize: nf4}``: 4-bit weights in memory, in checkpoints and under ddp, and an export without them.

Modules:
    plugins/fastloop_plugins/training/_four_bit.py
"""

from __future__ import annotations

import contextlib
import gc
import json
import shutil
import signal
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from strategy_helpers import same
from strategy_runs import all_of
from training_runs import execute

from fastloop import Plugin, PluginError, RecipeError, hookimpl, loop
from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop.runtime.hardware import Machine
from fastloop.testing import ProcessResult, expect_problem, find_problems
from fastloop.testing.runs import DIES_AT, SAVES_EVERY, KillAtStep, Trained, train
from fastloop.testing.starting import start
from fastloop_plugins.training.lora import LoRA

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

GPT = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": 64}
GPT |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
BYTES = {"kind": "bpe", "vocab_size": 300}
TEXTS = {"files": {"train": "rows.jsonl", "validation": "rows.jsonl"}, "max_length": 32}
TRAIN = {"epochs": 2, "batch_size": 4, "lr": 1e-2, "device": "cpu", "save_every": None}
NF4 = {"r": 4, "quantize": "nf4", "target_modules": "all-linear"}
BODY = 2 * 12 * 64 * 64
"""Weights in the linear layers of two blocks of ``GPT``."""


def recipe_of(model: dict[str, Any], options: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    """A recipe as its YAML has it, with LoRA if ``options`` are given."""
    plugins = [{"lora": options}] if options is not None else []
    quiet = [{"log": False}, {"progress": False}]
    tree = {"model": model, "data": TEXTS, "train": TRAIN, "plugins": [*plugins, *quiet], "output": "run"}
    return tree | sections


def make(folder: Path, name: str, recipe: dict[str, Any]) -> Path:
    """Train a small model from scratch. Returns the folder of the exported one."""
    output = {"output": str(folder / name), "data": at(folder, recipe["data"])}
    execute(build(resolve(make_recipe(recipe | output))))
    return folder / name / "model"


def at(folder: Path, data: dict[str, Any]) -> dict[str, Any]:
    return data | {"files": {split: str(folder / file) for split, file in data["files"].items()}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows for every task, and a pretrained language model."""
    folder = tmp_path_factory.mktemp("qlora")
    rows = [
        {
            "text": f"{('dull dreadful', 'lovely fine')[i % 2]} film {i}" + " indeed" * (i * 7 % 5),
            "label": i % 2,
            "short": f"{i} now",
        }
        for i in range(48)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    make(folder, "gpt", recipe_of({"config": GPT, "tokenizer": BYTES}))
    return folder


@pytest.fixture
def tuned(folder: Path) -> Callable[..., dict[str, Any]]:
    """A recipe that fine-tunes the pretrained language model."""

    def recipe(options: dict[str, Any] | None = NF4, **sections: Any) -> dict[str, Any]:
        return recipe_of({"name": str(folder / "gpt/model")}, options, data=at(folder, TEXTS), **sections)

    return recipe


def built(recipe: dict[str, Any], *objects: Plugin) -> Any:
    made = make_recipe(recipe)
    return build(resolve(made, objects=objects))


class Logits(Plugin):
    """The logits of the trained model for the inputs of the first validation batch, before the export."""

    name = "logits"

    @hookimpl
    def after_fit(self, run: Any) -> None:
        batch = next(iter(loop.evaluation_batches(run, run.eval_loaders["validation"]))).inputs
        self.inputs = {name: value for name, value in batch.items() if name not in ("targets", "labels")}
        if run.unwrap_model().config.is_encoder_decoder:
            self.inputs["decoder_input_ids"] = self.inputs["input_ids"]
        with torch.no_grad():
            self.logits = run.unwrap_model().eval()(**self.inputs).logits


def four_bit_layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__ == "FourBitLinear"]


def live_bytes() -> int:
    """Bytes of the distinct storages of all tensors in this process."""
    gc.collect()
    sizes = {0: 0}
    for tensor in [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]:
        # Earlier tests may leave fake and functional tensors. They have no memory, and raise when asked for its
        # address.
        with contextlib.suppress(RuntimeError, UserWarning):
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values()) - sizes[0]


# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_frozen_layers_take_an_eighth_of_the_memory(tuned):
    sizes = []
    for quantize in (None, "nf4"):
        before = live_bytes()
        run = built(tuned(NF4 | {"quantize": quantize}))
        sizes.append(live_bytes() - before)
        layers = four_bit_layers(run.unwrap_model())
        trained = {parameter.dtype for parameter in run.model.parameters() if parameter.requires_grad}
        assert trained == {torch.float32}
        del run
    assert len(layers) == 8
    assert sum(layer.weight.nbytes for layer in layers) == BODY // 2
    assert sizes[0] - sizes[1] == pytest.approx(BODY * (4 - 0.52), rel=0.03), "4 bits and an 8-bit scale for 64 weights"


@pytest.mark.slow
def test_each_layer_has_the_weights_of_the_base_within_the_error_of_four_bits(tuned, folder):
    weights, run = load_file(folder / "gpt/model/model.safetensors"), built(tuned())
    found = 0
    for name, module in run.unwrap_model().named_modules():
        if type(module).__name__ == "FourBitLinear":
            base = weights[f"{name.removeprefix('base_model.model.').removesuffix('.base_layer')}.weight"]
            restored = module.dequantized()
            assert type(restored).__name__ == "Conv1D"
            # rounding to NF4 of normal numbers: 0.09
            assert 0.05 < (restored.weight - base).norm() / base.norm() < 0.11, name
            found += 1
    assert found == 8


def test_the_exported_model_equals_the_trained_one_without_four_bits(tuned, folder):
    from transformers import AutoModelForCausalLM

    kept = Logits()
    summary = execute(built(tuned(), kept))
    exported = AutoModelForCausalLM.from_pretrained("run/model").eval()
    assert not hasattr(exported.config, "quantization_config")
    assert {tensor.dtype for tensor in exported.state_dict().values()} == {torch.float32}
    with torch.no_grad():
        logits = exported(**kept.inputs).logits
        base = AutoModelForCausalLM.from_pretrained(folder / "gpt/model").eval()(**kept.inputs).logits
    assert torch.allclose(logits, kept.logits, atol=1e-5)
    assert (logits - base).abs().max() > 0.1
    assert summary["validation"]["loss"] < json.loads((folder / "gpt/summary.json").read_text())["validation"]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["text-classification", "seq2seq", "seq2seq bart", "llama"])
def test_other_tasks_and_architectures(folder, task):
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

    bert = {
        "model_type": "distilbert",
        "dim": 64,
        "n_layers": 1,
        "n_heads": 2,
        "hidden_dim": 128,
        "max_position_embeddings": 32,
    }
    t5 = {
        "model_type": "t5",
        "d_model": 64,
        "d_kv": 32,
        "d_ff": 128,
        "num_layers": 1,
        "num_heads": 2,
        "dropout_rate": 0.0,
    }
    bart = {
        "model_type": "bart",
        "d_model": 64,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "max_position_embeddings": 64,
        "dropout": 0.0,
    }
    bart |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
    llama = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    pairs = TEXTS | {"target": "short", "max_target_length": 12}
    config, data, auto, layers = {
        "text-classification": (bert, TEXTS | {"label": "label"}, AutoModelForSequenceClassification, 6),
        # 3 attentions and 2 of `wi`; transformers keeps `wo` in float32
        "seq2seq": (t5, pairs, AutoModelForSeq2SeqLM, 14),
        "seq2seq bart": (bart, pairs, AutoModelForSeq2SeqLM, 16),
        "llama": (llama | {"max_position_embeddings": 64}, TEXTS, AutoModelForCausalLM, 7),
    }[task]
    base = make(folder, task, recipe_of({"config": config, "tokenizer": BYTES}, data=data))
    options = NF4 | {"target_modules": ["q_lin", "v_lin"]} if task == "text-classification" else NF4
    run = built(recipe_of({"name": str(base)}, options, data=at(folder, data)), kept := Logits())
    assert len(four_bit_layers(run.unwrap_model())) == layers
    execute(run)
    with torch.no_grad():
        logits = auto.from_pretrained("run/model").eval()(**kept.inputs).logits
    assert torch.allclose(logits, kept.logits, atol=1e-5)


@pytest.mark.slow
def test_it_learns_chats_as_lora_in_float32(folder):
    data = {
        "module": "fastloop_plugins.datasets.chats:chats",
        "messages": "messages",
        "chat_template": "chatml",
        "max_length": 96,
    }
    tree = {"data": data, "train": TRAIN | {"epochs": 1, "batch_size": 16, "lr": 4e-3}}
    execute(
        built(
            recipe_of(
                {"config": GPT | {"n_positions": 96}, "tokenizer": BYTES | {"vocab_size": 500}}, output="base", **tree
            )
        )
    )
    losses = [json.loads(Path("base/summary.json").read_text())["validation"]["loss"]]
    for quantize in (None, "nf4"):
        losses.append(
            execute(built(recipe_of({"name": "base/model"}, NF4 | {"r": 8, "quantize": quantize}, **tree)))[
                "validation"
            ]["loss"]
        )
        shutil.rmtree("run")
    base, plain, ours = losses
    assert plain < base - 0.05
    assert ours < base - 0.05
    assert ours == pytest.approx(plain, abs=0.02)


# -- checkpoints and commands ------------------------------------------------------------------------------------------


def killed(recipe: dict[str, Any]) -> Trained:
    return train(recipe, KillAtStep())


@pytest.mark.slow
def test_a_killed_run_resumes_from_its_own_weights(tuned, folder):
    shutil.copytree(folder / "gpt/model", "base")
    options = NF4 | {"merge": False, "dropout": 0.1}
    recipe = tuned(options, train=TRAIN | {"epochs": 5, "save_every": SAVES_EVERY}) | {"model": {"name": "base"}}
    whole = train(recipe | {"output": "whole"})
    (ended,) = start(1, killed, recipe, folder=Path.cwd())
    assert ended.code == -signal.SIGKILL
    weights = load_file("base/model.safetensors")
    save_file(
        {name: tensor + 1 for name, tensor in weights.items()}, "base/model.safetensors", metadata={"format": "pt"}
    )
    resumed = train(recipe, resume=Path("run"))
    saved = (DIES_AT - 1) // SAVES_EVERY * SAVES_EVERY
    assert resumed.losses == whole.losses[saved:], (
        "the checkpoint has the 4-bit weights: the base model is not read again"
    )
    assert resumed.weights.keys() == whole.weights.keys()
    assert all(torch.equal(resumed.weights[name], whole.weights[name]) for name in whole.weights)
    assert any(name.endswith("absmax") for name in whole.weights)


def test_layers_that_are_trained_in_full_stay_in_float32(tuned):
    run = built(tuned({"r": 4, "quantize": "nf4", "modules_to_save": ["1.mlp.c_proj"]}))
    layers = {
        name: module for name, module in run.unwrap_model().named_modules() if type(module).__name__ == "FourBitLinear"
    }
    assert len(layers) == 7
    assert "1.mlp.c_proj" not in " ".join(layers)
    trained = [
        name for name, parameter in run.model.named_parameters() if parameter.requires_grad and "lora" not in name
    ]
    assert [name.partition("modules_to_save.")[2] for name in trained] == ["default.weight", "default.bias"]
    assert {layer.compute_dtype for layer in layers.values()} == {torch.float32}


@pytest.mark.parametrize("merge", [True, False])
def test_a_warning_says_that_an_adapter_alone_computes_other_numbers(tuned, caplog, merge):
    built(tuned(NF4 | {"merge": merge}))
    assert bool(find_problems(caplog, "other-precision plugins.lora")) is not merge


def test_a_checkpoint_without_scales_is_not_loaded(tuned):
    run = built(tuned())
    state = run.unwrap_model().state_dict()
    scales = [name for name in state if name.endswith(".absmax")]
    assert len(scales) == 8
    run.unwrap_model().load_state_dict(state)
    plain = {name: tensor for name, tensor in state.items() if ".base_layer.weight." not in name}
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*c_attn\.base_layer\.weight\.absmax"):
        run.unwrap_model().load_state_dict(plain)


def call(cli: Any, *arguments: Any) -> str:
    code, out, err = cli(*map(str, arguments))
    assert code == 0, err
    printed: str = out
    return printed


@pytest.mark.slow
def test_commands_on_a_run(tuned, cli):
    from transformers import AutoModelForCausalLM

    recipe = tuned(train=TRAIN | {"save_every": "epoch"})
    summary = execute(built(recipe))
    call(cli, "evaluate", "run", "--split", "validation")
    found = json.loads(Path("run/evaluation/validation.json").read_text())
    assert found["metrics"]["loss"] == pytest.approx(summary["validation"]["loss"], rel=1e-5)
    assert json.loads(call(cli, "predict", "run", "a lovely", "plugins.causal-lm.max_new_tokens=4"))["text"]

    weights = load_file("run/model/model.safetensors")
    call(cli, "export", "run", "--checkpoint", "last", "--out", "merged")
    again = load_file("merged/model.safetensors")
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[name], again[name]) for name in weights)

    call(cli, "export", "run", "--checkpoint", "last", "--to", "adapter", "--out", "adapter")
    execute(built(tuned(NF4 | {"merge": False}, output="apart")))
    adapter, apart = (load_file(f"{folder}/adapter_model.safetensors") for folder in ("adapter", "apart/model"))
    assert all(".lora_" in name for name in apart)
    assert adapter.keys() == apart.keys()
    assert all(torch.equal(adapter[name], apart[name]) for name in apart)
    call(cli, "export", "apart", "--to", "safetensors", "--out", "remerged")
    remerged = load_file("remerged/model.safetensors")
    assert all(torch.equal(weights[name], remerged[name]) for name in weights)
    assert AutoModelForCausalLM.from_pretrained("remerged").config.model_type == "gpt2"


# -- other plugins -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_are_one_run(tuned, processes: Callable[..., list[ProcessResult]]):
    recipe = {name: section for name, section in tuned().items() if name in ("model", "data")}
    runs = [
        {
            "name": name,
            "recipe": recipe,
            "plugins": ["causal-lm", {"lora": NF4}, *strategy],
            "train": TRAIN | {"max_grad_norm": 0.5},
        }
        for name, strategy in (("plain", []), ("ddp", ["ddp"]))
    ]
    plain = processes(1, all_of, runs[:1], folder=Path.cwd())[0].result["plain"]
    ours = processes(2, all_of, runs[1:], folder=Path.cwd())[0].result["ddp"]
    same(ours, plain, 2e-5)
    weights, expected = (load_file(f"{name}/model/model.safetensors") for name in ("ddp", "plain"))
    assert all(torch.allclose(weights[name], expected[name], atol=1e-5) for name in expected)


@pytest.mark.slow
def test_activation_checkpointing_computes_the_same_bits(tuned):
    plain = train(tuned(NF4 | {"dropout": 0.1}))
    ours = tuned(NF4 | {"dropout": 0.1}, output="ours")
    ours["plugins"].append("activation-checkpointing")
    assert train(ours).losses == plain.losses


@pytest.mark.slow
def test_bf16_computes_close_to_float32_and_keeps_biases(tuned):
    plain = train(tuned())
    ours = tuned(output="ours")
    ours["plugins"].append({"amp": {"dtype": "bf16"}})
    assert train(ours).losses == pytest.approx(plain.losses, rel=0.02)
    weights, expected = (load_file(f"{name}/model/model.safetensors") for name in ("ours", "run"))
    frozen = "transformer.h.0.mlp.c_fc.bias"
    assert torch.equal(weights[frozen], expected[frozen])
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:<class 'torch.autograd.function.Function'> should not be instantiated:DeprecationWarning"
)
def test_compile(tuned):
    plain = train(tuned(train=TRAIN | {"max_steps": 4}))
    ours = tuned(output="ours", train=TRAIN | {"max_steps": 4})
    ours["plugins"].append({"compile": {"backend": "aot_eager", "on_failure": "error"}})
    compiled = train(ours)
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-4)
    assert compiled.summary["compile"]["graphs"] > 0


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed"])
def test_strategies_that_shard_are_refused(tuned, strategy):
    recipe = tuned()
    recipe["plugins"].append(strategy)
    with expect_problem(f"excluded-plugin 'lora' {strategy}", PluginError):
        built(recipe)


def test_training_from_scratch_is_refused():
    with expect_problem("conflicting-values plugins.lora.quantize model.config model.name model.weights", RecipeError):
        built(recipe_of({"config": GPT, "tokenizer": BYTES}, NF4))


def test_a_model_without_a_suitable_layer_is_refused(folder):
    make(folder, "narrow", recipe_of({"config": GPT | {"n_embd": 12}, "tokenizer": BYTES}, train=TRAIN | {"epochs": 1}))
    narrow = recipe_of({"name": str(folder / "narrow/model")}, NF4, data=at(folder, TEXTS))
    with expect_problem("unsupported-model GPT2LMHeadModel 8 64", PluginError):
        built(narrow)


def test_a_missing_extra_names_the_command(tuned, monkeypatch):
    version = metadata.version

    def missing(name: str) -> str:
        if name == "bitsandbytes":
            raise metadata.PackageNotFoundError
        return version(name)

    monkeypatch.setattr(metadata, "version", missing)
    with expect_problem("requirement-missing bitsandbytes>=0.50 'fastloop-train[qlora]'", PluginError):
        built(tuned())
    needs = [need.missing(LoRA(quantize="nf4"), Machine("mps", "", ("fp32",))) for need in LoRA.requirements]
    assert all(name in needs[1] for name in ("cpu", "cuda", "xpu", "mps"))
    assert [need.missing(LoRA(), Machine("mps", "", ("fp32",))) for need in LoRA.requirements] == [None, None, None]
