"""Weights that a pretrained model lacks: ``lora`` trains them in full, and a run reports those that stay frozen.

Modules:
    plugins/fastloop_plugins/guards/_new_weights.py
    plugins/fastloop_plugins/training/_lora_modules.py
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import transformers
from headless_models import head_recipe, inputs, linear_layers, logits, plain, save_without_head
from recipe_runs import make_run, user_code
from safetensors.torch import load_file, save_file
from training_runs import execute

from fastloop import RecipeError, lifecycle
from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop.testing import TEXTS, expect_problem, find_problems, write_texts
from fastloop_plugins.training._lora_modules import owning_modules
from fastloop_plugins.training._patterns import parameters_by_name

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers' models, which other tests cover

QUICK = [
    ("text-classification", "bart"),
    ("text-classification", "xlnet"),
    ("token-classification", "bert"),
    ("image-classification", "vit"),
]
SLOW = [
    *(
        ("text-classification", kind)
        for kind in (
            "albert", "bert", "big_bird", "canine", "deberta-v2", "distilbert", "electra", "funnel", "gpt2", "llama",
            "luke", "mbart", "mobilebert", "modernbert", "mpnet", "nystromformer", "opt", "qwen3",
            "rembert", "roberta", "squeezebert", "t5", "tapas", "umt5", "xlm", "xmod",
        )
    ),
    *(
        ("token-classification", kind)
        for kind in ("deberta-v2", "distilbert", "gpt2", "llama", "modernbert", "roberta", "t5", "xlnet")
    ),
    *(
        ("image-classification", kind)
        for kind in ("beit", "convnext", "convnextv2", "deit", "dinov2", "focalnet", "poolformer", "segformer", "swin")
    ),
]  # fmt: skip
EVERY = [*QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    plain.write_data(folder)
    return folder


@pytest.fixture
def new_weight_warnings(caplog):
    """The warnings about frozen random weights."""
    caplog.set_level(logging.WARNING, "fastloop")
    return lambda: [str(problem) for problem in find_problems(caplog, "random-weights-frozen")]


@pytest.mark.parametrize(("task", "kind"), EVERY)
def test_new_weights_are_trained_and_exported(task, kind, data, tmp_path, monkeypatch, new_weight_warnings):
    """The exported model gives the logits of the trained one: as an adapter, loaded by peft, and merged."""
    from peft import PeftModel

    base, auto = tmp_path / "base", getattr(transformers, plain.TASKS[task].auto)
    save_without_head(task, kind, base)
    options = {"r": 2, "target_modules": linear_layers(auto.from_pretrained(base)), "merge": False}
    run = build(resolve(make_recipe(head_recipe(task, data, base, tmp_path / "run", options))))
    new = {name: parameters_by_name(run.unwrap_model())[name] for name in run.new_weights}
    initial = {name: weight.detach().clone() for name, weight in new.items()}
    batch, trained = inputs(task, data, base), {}

    def export_twice(run):
        trained["logits"] = logits(run.unwrap_model(), batch)
        run.hooks.export_model(run=run, folder=run.folder / "model")
        next(plugin for plugin in run.plugins if plugin.name == "lora").set_option("merge", True)
        run.hooks.export_model(run=run, folder=run.folder / "merged")

    monkeypatch.setattr(lifecycle, "_export", export_twice)
    execute(run)
    assert new, "the base model has the head, so nothing is tested"
    assert all(weight.requires_grad for weight in new.values())
    assert [name for name in new if torch.equal(new[name], initial[name])] == []
    assert new_weight_warnings() == []
    saved = load_file(tmp_path / "run" / "model" / "adapter_model.safetensors")
    assert {f"base_model.model.{name}" for name in new} <= saved.keys()

    config = transformers.AutoConfig.from_pretrained(tmp_path / "run" / "model" / "base_config.json")
    adapted = PeftModel.from_pretrained(auto.from_pretrained(base, config=config), tmp_path / "run" / "model")
    assert torch.allclose(logits(adapted, batch), trained["logits"], rtol=1e-4, atol=1e-3)
    merged = auto.from_pretrained(tmp_path / "run" / "merged")
    assert torch.allclose(logits(merged, batch), trained["logits"], rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_an_adapter_alone_does_not_lose_the_statistics_of_batch_norm(data, tmp_path):
    save_without_head("image-classification", "resnet", tmp_path / "base")
    options = {"r": 2, "target_modules": ["layer.0.convolution"], "merge": False}

    def build_run():
        return build(
            resolve(
                make_recipe(head_recipe("image-classification", data, tmp_path / "base", tmp_path / "run", options))
            )
        )

    with expect_problem("conflicting-values plugins.lora.merge", RecipeError):
        build_run()
    options["modules_to_save"] = ["classifier", "normalization"]
    execute(build_run())
    saved = load_file(tmp_path / "run" / "model" / "adapter_model.safetensors")
    assert any(name.endswith("running_mean") for name in saved)


@pytest.fixture
def headless(tmp_path):
    """The recipe of a tiny BERT whose checkpoint has no pooler and no head."""
    write_texts(Path.cwd())
    first = build(resolve(make_recipe({**TEXTS, "train": {"device": "cpu", "max_steps": 1}, "output": "first"})))
    execute(first)
    model = transformers.AutoModel.from_pretrained("first/model", add_pooling_layer=False)
    model.save_pretrained("base")
    transformers.AutoTokenizer.from_pretrained("first/model").save_pretrained("base")
    return {**TEXTS, "model": {"name": "base"}, "train": {"device": "cpu", "max_steps": 2, "lr": 0.01}, "output": "out"}


def built(recipe, *plugins):
    return build(resolve(make_recipe({**recipe, "plugins": list(plugins)})))


POOLER = {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
HEAD = {"classifier.weight", "classifier.bias"}


def test_a_pooler_inside_the_base_model_is_new_too(headless, new_weight_warnings):
    run = built(headless, {"lora": {"merge": False}})
    assert run.new_weights == POOLER | HEAD
    assert run.unwrap_model().peft_config["default"].modules_to_save == ["bert.pooler", "classifier"]
    assert new_weight_warnings() == []


@pytest.mark.parametrize(
    ("plugin", "frozen"),
    [
        ({"lora": {"modules_to_save": ["classifier"]}}, POOLER),
        ({"lora": {"modules_to_save": []}}, POOLER | HEAD),
        ({"freeze": {"match": "classifier.*"}}, HEAD),
        ({"freeze": {"match": "bert.encoder.*"}}, set()),
    ],
)
def test_new_weights_that_a_plugin_freezes_are_reported(headless, new_weight_warnings, plugin, frozen):
    built(headless, plugin)
    warnings = new_weight_warnings()
    assert len(warnings) == bool(frozen)
    for warning in warnings:
        assert warning.startswith(f"{len(frozen)} frozen weights")
        assert {name for name in POOLER | HEAD if name in warning} == frozen


def test_a_model_from_scratch_has_no_new_weights(headless):
    run = built({**headless, "model": TEXTS["model"]}, {"freeze": {"match": "classifier.*"}})
    assert run.new_weights == set()


def test_weights_of_a_warm_start_are_not_new(headless):
    model = {"name": "base", "weights": "first"}
    assert built({**headless, "model": model}).new_weights == set()


def test_a_head_of_other_classes_is_new_again(headless):
    """The checkpoint has a head of the same shape, which is reinitialized for classes of other names."""
    config = transformers.AutoConfig.from_pretrained("first/model")
    config.id2label, config.label2id = {0: "cold", 1: "warm"}, {"cold": 0, "warm": 1}
    config.save_pretrained("first/model")
    rows = Path("texts/train.jsonl").read_text() + Path("texts/validation.jsonl").read_text()
    for split in ("train", "validation"):
        path = Path(f"texts/{split}.jsonl")
        path.write_text(path.read_text().replace('"label": 0', '"label": "no"').replace('"label": 1', '"label": "yes"'))
    assert '"label": 0' in rows
    run = built({**headless, "model": {"name": "first/model"}}, {"lora": {"merge": False}})
    assert run.new_weights == HEAD


def test_an_unused_pooler_is_not_reported(headless, new_weight_warnings):
    """The task freezes it, because its loss does not read it."""
    files = {"train": "texts/train.jsonl", "validation": "texts/validation.jsonl"}
    tags = [{"words": ["a", "b"], "tags": ["X", "O"]}] * 8
    for path in files.values():
        Path(path).write_text("".join(f"{row}\n" for row in map(str, tags)).replace("'", '"'))
    data = {"files": files, "words": "words", "tags": "tags", "max_length": 8}
    run = built({**headless, "data": data}, {"lora": {"merge": False}})
    assert run.new_weights == HEAD
    assert new_weight_warnings() == []


def test_a_model_of_user_code_that_is_warm_started_reports_its_frozen_head(new_weight_warnings):
    weights = user_code()["Net"]().state_dict()
    save_file({name: tensor for name, tensor in weights.items() if "head" not in name}, "weights.safetensors")
    run = make_run(model={"weights": "weights.safetensors"}, plugins=[{"freeze": {"match": "head.bias"}}])
    assert run.new_weights == {"head.weight", "head.bias"}
    assert len(new_weight_warnings()) == 1
    assert "head.bias" in new_weight_warnings()[0]


class Shares(torch.nn.Module):
    """``head`` has new weights only; ``last`` shares one with ``first``; ``mixed`` has a pretrained one."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.head = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
        self.last = torch.nn.Linear(3, 3)
        self.last.weight = self.first.weight
        self.mixed = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)])


def test_the_largest_modules_without_pretrained_weights():
    model = Shares()
    new = {name for name, _ in model.named_parameters(remove_duplicate=False) if name.startswith(("head", "last"))}
    assert owning_modules(model, new) == ["head"]
    assert owning_modules(model, {*new, "mixed.0.weight", "mixed.0.bias", "mixed.1.bias"}) == ["head", "mixed.0"]
    assert owning_modules(model, {name for name in new if name != "head.0.bias"}) == ["head.1"]
    assert owning_modules(model, {"last.bias"}) == []
