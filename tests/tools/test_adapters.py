"""Adapters that ``lora`` exports alone: evaluated, predicted with, continued and merged; those of peft, too.

Modules:
    core/fastloop/export/earlier_files.py
    plugins/fastloop_plugins/models/adapters.py
    plugins/fastloop_plugins/training/_adapter_files.py
    plugins/fastloop_plugins/training/_lora_options.py
"""

from __future__ import annotations

import csv
import json
import math
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from inference_runs import CLASSES, TRAIN, train, write_recipe
from safetensors.torch import load_file
from text_helpers import TINY_GPT
from training_runs import execute

from fastloop import CheckpointError, PluginError, RecipeError
from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop.testing import assert_problem, expect_problem

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # peft uses this name of transformers
LORA = {"r": 2, "target_modules": ["q_lin", "v_lin"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base model without a head, in ``base``, and the run of an adapter of it, in ``run``."""
    place = tmp_path_factory.mktemp("adapters")
    train(write_recipe(place, train=TRAIN | {"epochs": 1}, output=str(place / "scratch")))
    transformers.AutoModel.from_pretrained(place / "scratch" / "model").save_pretrained(place / "base")
    transformers.AutoTokenizer.from_pretrained(place / "scratch" / "model").save_pretrained(place / "base")
    shutil.rmtree(place / "scratch")
    summary = train(write_recipe(place, [{"lora": LORA | {"merge": False}}], model={"name": str(place / "base")}))
    (place / "expected.json").write_text(json.dumps(summary))
    return place


@pytest.fixture
def place(folder, tmp_path, monkeypatch):
    """A copy of the folder, to work in."""
    shutil.copytree(folder, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


def recipe_of(place, lora=None, model="run/model", epochs=1, **changes):
    """The recipe of the folder with another model; ``lora``: its options, or None to train the whole model."""
    tree = yaml.safe_load((place / "recipe.yaml").read_text())
    plugins = [] if lora is None else [{"lora": lora}]
    data = tree["data"] | {"files": {split: str(place / file) for split, file in tree["data"]["files"].items()}}
    settings = tree["train"] | {"epochs": epochs, "lr": 1e-3}
    tree |= {"model": {"name": str(place / model)}, "data": data, "train": settings, "plugins": plugins}
    return tree | {"output": str(place / "out")} | changes


def built(recipe, **arguments):
    return build(resolve(make_recipe(recipe)), **arguments)


def trained(place, recipe):
    path = place / "other.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return train(path)


def metrics_of(cli, run, split="test"):
    code, out, err = cli("evaluate", str(run), "--split", split, "--json", "-")
    assert code == 0, err
    return json.loads(out)["metrics"]


def initial_loss(recipe):
    """The loss of a run's model on the validation split before training."""
    run = built(recipe)
    return run.hooks.evaluate(run=run, split="validation")["loss"]


def test_an_adapter_is_evaluated_with_its_base_and_its_head(place, cli):
    expected = json.loads((place / "expected.json").read_text())["test"]
    found = metrics_of(cli, "run")
    assert found.keys() == expected.keys()
    assert all(math.isclose(found[name], expected[name], rel_tol=1e-5) for name in expected)


def test_an_adapter_predicts(place, cli):
    """The share of right labels is the accuracy that the run reports."""
    code, _, err = cli("predict", "run", "test.csv", "--out", "predicted.jsonl")
    assert code == 0, err
    labels = [json.loads(line)["label"] for line in Path("predicted.jsonl").read_text().splitlines()]
    with Path("test.csv").open() as file:
        right = [label == row["label"] for label, row in zip(labels, csv.DictReader(file), strict=True)]
    expected = json.loads((place / "expected.json").read_text())["test"]["accuracy"]
    assert math.isclose(sum(right) / len(right), expected, rel_tol=1e-5)


def test_an_adapter_whose_base_has_moved_uses_the_model_of_the_recipe(place, cli):
    """The adapter names the folder of the first run, which is gone."""
    settings = json.loads(Path("run/model/adapter_config.json").read_text())
    Path("run/model/adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": "/gone/base"}))
    recipe = yaml.safe_load(Path("run/recipe.yaml").read_text())
    Path("run/recipe.yaml").write_text(yaml.safe_dump(recipe | {"model": {"name": str(place / "base")}}))
    expected = json.loads((place / "expected.json").read_text())["test"]["loss"]
    assert math.isclose(metrics_of(cli, "run")["loss"], expected, rel_tol=1e-5)
    with pytest.raises(RecipeError, match="/gone/base"):
        built(recipe_of(place, {}))


def test_peft_loads_the_adapter_by_its_auto_class(place):
    from peft import AutoPeftModelForSequenceClassification

    found = AutoPeftModelForSequenceClassification.from_pretrained("run/model", num_labels=3)
    head = load_file("run/model/adapter_model.safetensors")["base_model.model.classifier.weight"]
    assert torch.equal(found.get_base_model().classifier.weight, head)
    config = transformers.AutoConfig.from_pretrained("run/model/base_config.json")
    assert tuple(config.id2label.values()) == CLASSES


@pytest.mark.slow
def test_a_resumed_run_exports_the_other_form_without_files_of_the_earlier_one(place, cli):
    """transformers reads a whole model beside an adapter, and an adapter beside a whole model."""
    recipe = recipe_of(place, LORA | {"merge": False}, model="base")
    recipe["train"]["save_every"] = 8
    execute(built(recipe))
    for epochs, merge in ((2, True), (3, False)):
        recipe["train"]["epochs"] = epochs
        recipe["plugins"] = [{"lora": LORA | {"merge": merge}}]
        summary = execute(built(recipe, resume=Path("out")))
        assert summary["model_step"] == 8 * epochs
        assert math.isclose(metrics_of(cli, "out")["loss"], summary["test"]["loss"], rel_tol=1e-5)
        assert Path("out/model/config.json").exists() is merge
        assert Path("out/model/adapter_config.json").exists() is not merge
        assert ("PeftModel" in Path("out/model/README.md").read_text()) is not merge


@pytest.mark.parametrize(
    ("lora", "model"),
    [({"merge": False}, "run/model"), ({"adapter": "run/model"}, "base"), (None, "run/model")],
    ids=["model.name", "lora.adapter", "merged into the base"],
)
def test_training_goes_on_from_an_adapter(place, lora, model):
    """A run that starts from the adapter has the validation loss at which the first run ended."""
    if lora and "adapter" in lora:
        lora = {"adapter": str(place / lora["adapter"])}
        # the classes of the base model are not named, and those of the data have the order of the adapter's
    last = json.loads((place / "expected.json").read_text())["validation"]["loss"]
    assert math.isclose(initial_loss(recipe_of(place, lora, model)), last, rel_tol=1e-5)


def test_a_continued_adapter_is_exported_and_improves(place, cli):
    before = json.loads((place / "expected.json").read_text())
    summary = trained(place, recipe_of(place, {"merge": False, "dropout": 0.1}))
    assert summary["validation"]["loss"] < before["validation"]["loss"]
    settings = json.loads(Path("out/model/adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["lora_dropout"]) == (2, 16, 0.1)
    assert settings["base_model_name_or_path"].endswith("base")
    assert math.isclose(metrics_of(cli, "out")["loss"], summary["test"]["loss"], rel_tol=1e-5)
    code, _, err = cli("export", "out", "--to", "adapter", "--out", "again")
    assert code == 0, err
    assert (
        load_file("again/adapter_model.safetensors").keys() == load_file("run/model/adapter_model.safetensors").keys()
    )
    assert "base_config.json" in Path("again/README.md").read_text()


def test_an_adapter_of_peft_is_continued(place, caplog):
    """It has other names of modules_to_save, and does not name its classes."""
    from peft import LoraConfig, TaskType, get_peft_model

    model = transformers.AutoModelForSequenceClassification.from_pretrained("base", num_labels=3)
    options = LoraConfig(task_type=TaskType.SEQ_CLS, r=4, lora_alpha=12, target_modules=["k_lin"])
    wrapped = get_peft_model(model, options)
    torch.nn.init.normal_(wrapped.get_base_model().classifier.weight)
    wrapped.save_pretrained("theirs")
    run = built(recipe_of(place, {}, "theirs"))
    ours = run.unwrap_model()
    assert torch.equal(ours.get_base_model().classifier.weight, wrapped.get_base_model().classifier.weight)
    trained_names = {name for name, parameter in ours.named_parameters() if parameter.requires_grad}
    assert {name.split(".")[-4 if "lora_" in name else -5] for name in trained_names if "lora_" in name} == {"k_lin"}
    assert_problem(caplog, "classes-without-names theirs")


CONTRADICTIONS = {
    "r": {"r": 8},
    "alpha": {"alpha": 4},
    "target_modules": {"target_modules": ["k_lin"]},
    "use_rslora": {"use_rslora": True},
}


@pytest.mark.parametrize("option", CONTRADICTIONS)
def test_options_that_contradict_the_adapter_are_refused(place, option):
    with expect_problem(f"conflicting-values plugins.lora.{option}:", RecipeError):
        built(recipe_of(place, CONTRADICTIONS[option]))
    assert not Path("out").exists()


def test_options_that_repeat_the_adapter_are_accepted(place):
    built(recipe_of(place, {"r": 2, "alpha": 16, "target_modules": ["v_lin", "q_lin"], "use_dora": False}))


def test_other_classes_than_the_adapters_are_refused(place):
    for split in ("train", "validation", "test"):
        path = Path(f"{split}.csv")
        path.write_text(path.read_text().replace(",good", ",great"))
    with expect_problem("labels-differ bad, fine, great,", RecipeError):
        built(recipe_of(place, {}))


def test_a_classifier_cannot_start_from_the_adapter_of_a_language_model_and_can_from_the_merged_one(tmp_path, cli):
    """The error proposes to merge it by a command."""
    files = {"train": "train.csv", "validation": "validation.csv", "test": "test.csv"}
    data = {"files": files, "text": "text", "max_length": 16}
    tokenizer = {"kind": "bpe", "vocab_size": 300}
    base = {"model": {"config": TINY_GPT, "tokenizer": tokenizer}, "data": data}
    train(write_recipe(tmp_path, **base, train=TRAIN | {"epochs": 1}, output="base"))
    lora = {"lora": {"r": 2, "target_modules": ["c_attn"], "merge": False}}
    train(write_recipe(tmp_path, [lora], model={"name": "base/model"}, data=data, output="adapted"))
    sections = {"data": data | {"label": "label"}, "train": TRAIN | {"epochs": 1}}
    recipe = yaml.safe_load(write_recipe(tmp_path, model={"name": "adapted/model"}, **sections).read_text())
    with expect_problem("labels-differ adapted/model is the adapter of a model without classes", RecipeError) as caught:
        built(recipe)
    assert "by `fastloop export RUN --out FOLDER`" in str(caught.value)
    code, _, err = cli("export", "adapted", "--out", "merged")
    assert code == 0, err
    summary = trained(tmp_path, recipe | {"model": {"name": "merged"}})
    assert summary["test"]["loss"] > 0


@pytest.mark.parametrize(
    ("classes", "remedy"), [(("good", "fine", "bad"), "model.name"), (("bad", "fine", "great"), "Rename")]
)
def test_a_base_model_with_other_classes_than_the_adapters_is_refused(place, classes, remedy):
    names = dict(enumerate(classes))
    model = transformers.AutoModelForSequenceClassification.from_pretrained("base", id2label=names, num_labels=3)
    model.save_pretrained("base")
    for split in ("train", "validation", "test"):
        path = Path(f"{split}.csv")
        path.write_text(path.read_text().replace(",good", f",{max(classes)}"))
    with expect_problem(f"labels-differ plugins.lora: run/model 'good' '{max(classes)}' {remedy}", RecipeError):
        built(recipe_of(place, {"adapter": str(place / "run" / "model")}, "base"))
    if remedy == "model.name":
        assert built(recipe_of(place, {})).unwrap_model().config.id2label == {0: "bad", 1: "fine", 2: "good"}


def not_an_adapter(place):
    return recipe_of(place, {"adapter": str(place / "base")}, "base")


def two_adapters(place):
    return recipe_of(place, {"adapter": str(place / "run" / "model")})


def another_base(place):
    config = transformers.AutoConfig.from_pretrained("base")
    config.dim, config.hidden_dim = config.dim * 2, config.hidden_dim * 2
    transformers.AutoModel.from_config(config).save_pretrained("wide")
    transformers.AutoTokenizer.from_pretrained("base").save_pretrained("wide")
    return recipe_of(place, {"adapter": str(place / "run" / "model")}, "wide")


def another_kind(place):
    path = place / "run" / "model" / "adapter_config.json"
    path.write_text(path.read_text().replace('"peft_type": "LORA"', '"peft_type": "IA3"'))
    return recipe_of(place, {})


def invoked(place):
    path = place / "run" / "model" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"alora_invocation_tokens": [5, 6]}))
    return recipe_of(place, {})


def half_a_pattern(place):
    path = place / "run" / "model" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layers_pattern": ["layer"]}))
    return recipe_of(place, {})


def biased(place):
    """An adapter with biases, on layers of Llama, which have none."""
    from peft import LoraConfig, TaskType, get_peft_model

    tokenizer = transformers.AutoTokenizer.from_pretrained("base")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **sizes)
    transformers.AutoModel.from_config(config).save_pretrained("llama")
    tokenizer.save_pretrained("llama")
    model = transformers.AutoModelForSequenceClassification.from_pretrained("llama", num_labels=3)
    options = LoraConfig(task_type=TaskType.SEQ_CLS, target_modules=["q_proj"], lora_bias=True)
    with warnings.catch_warnings(action="ignore"):  # peft warns that it cannot merge them
        get_peft_model(model, options).save_pretrained("biased")
    return recipe_of(place, {}, "biased")


def from_scratch(place):
    model = {"config": {"model_type": "distilbert"}, "tokenizer": {"kind": "word"}}
    return recipe_of(place, LORA | {"merge": False}, model=".") | {"model": model}


def warm_start(place):
    model = {"name": str(place / "base"), "weights": str(place / "base")}
    return recipe_of(place, LORA | {"merge": False}, model=".") | {"model": model}


REFUSED = {
    "file-missing plugins.lora.adapter: adapter_config.json": not_an_adapter,
    "exclusive-options plugins.lora.adapter: model.name": two_adapters,
    "adapter-differs DistilBert": another_base,
    "unsupported-adapter IA3 LORA": another_kind,
    "unsupported-adapter alora_invocation_tokens": invoked,
    "file-unreadable run/model layers_pattern": half_a_pattern,
    "unsupported-adapter lora_bias: true q_proj": biased,
    "conflicting-values merge: false model.config.": from_scratch,
    "conflicting-values merge: false model.weights.": warm_start,
}


@pytest.mark.parametrize("expected", REFUSED)
def test_adapters_that_do_not_fit_are_refused_before_training(place, expected):
    with expect_problem(expected, RecipeError):
        built(REFUSED[expected](place))
    assert not Path("out").exists()


# -- options that are passed on to peft --------------------------------------------------------------------------------


def settings_of(place, **options):
    return built(recipe_of(place, LORA | options, "base")).unwrap_model().peft_config["default"]


def test_options_have_their_effect(place):
    run = built(recipe_of(place, LORA | {"use_rslora": True, "layers_to_transform": [0], "alpha": 8}, "base"))
    model = run.unwrap_model()
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    assert layers
    assert all(".layer.0." in name for name in layers)
    assert {module.scaling["default"] for module in layers.values()} == {8 / math.sqrt(2)}
    assert settings_of(place, use_dora=True).use_dora
    assert settings_of(place, layers_to_transform=0).layers_to_transform == 0


@pytest.mark.parametrize("value", ["gaussian", "orthogonal", "olora", "pissa", "pissa_niter_2", False])
def test_initial_values_of_peft_keep_the_model(place, value):
    """All but random values of both factors begin with the output of the base model."""
    torch.manual_seed(0)
    base = initial_loss(recipe_of(place, LORA, "base"))
    changed = initial_loss(recipe_of(place, LORA | {"init_lora_weights": value}, "base"))
    if value is False:
        assert not math.isclose(changed, base, rel_tol=1e-6)
    else:  # the head has drawn its values before the adapters do
        assert math.isclose(changed, base, rel_tol=1e-6)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"use_rslora": True}, {"init_lora_weights": "pissa"}])
def test_the_export_of_other_adapters_has_the_loss_of_the_run(place, cli, options):
    summary = trained(place, recipe_of(place, LORA | options, "base"))
    assert math.isclose(metrics_of(cli, "out")["loss"], summary["test"]["loss"], rel_tol=1e-4)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"init_lora_weights": "pisa"}, RecipeError),
        ({"init_lora_weights": "eva"}, RecipeError),
        ({"init_lora_weights": "pissa", "merge": False}, RecipeError),
        ({"init_lora_weights": "orthogonal", "r": 3}, RecipeError),
        ({"layers_to_transform": [0, 7]}, PluginError),
        ({"layers_to_transform": [0], "target_modules": "all-linear"}, RecipeError),
    ],
)
def test_values_that_peft_cannot_use_are_refused(place, options, error):
    with pytest.raises(error, match=r"lora"):
        built(recipe_of(place, LORA | options, "base"))
    assert not Path("out").exists()


def test_a_run_does_not_resume_with_another_scale(place):
    first = recipe_of(place, LORA, "base")
    first["train"] |= {"save_every": "epoch"}
    trained(place, first)
    with pytest.raises(CheckpointError, match=r"plugins\.lora\.use_rslora"):
        built(recipe_of(place, LORA | {"use_rslora": True}, "base", epochs=2), resume=place / "out")
