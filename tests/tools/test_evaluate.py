"""`fastloop evaluate`: the metrics of training, from the exported model alone.

Modules:
    plugins/fastloop_tools/inference/class_scores.py
    plugins/fastloop_tools/inference/evaluate.py
    plugins/fastloop_tools/inference/target.py
    plugins/fastloop_tools/inference/weights.py
    plugins/fastloop_tools/shared/matrix_picture.py
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import forked
import pytest
import yaml
from inference_runs import CLASSES, TRAIN, texts, train, write_csv, write_recipe
from safetensors.torch import load_file, save_file
from text_helpers import TINY, TINY_GPT
from training_runs import execute

from fastloop import Plugin, Run, hookimpl
from fastloop.errors import FastloopError
from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import Inference, load_recipe
from fastloop.testing import assert_problem, find_problems
from fastloop_tools.shared.matrix_picture import draw

CODE = """
import torch

def data(splits=("train", "validation", "test")):
    rows = [(torch.full((4,), float(i % 3)) + torch.arange(4) / 10, i % 3) for i in range(30)]
    return {split: rows for split in splits}

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a recipe, its files and its run."""
    folder = tmp_path_factory.mktemp("trained")
    train(write_recipe(folder))
    return folder


def results(cli: Any, *arguments: Any) -> dict[str, Any]:
    code, _, err = cli("evaluate", *map(str, arguments), "--json", "results.json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(Path("results.json").read_text())
    return found


def near(metrics: Any) -> Any:
    """The metrics up to rounding, which the plugins that `auto` selects change."""
    return pytest.approx(metrics, rel=1e-6)


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def test_the_threshold_of_the_task_decides_every_metric_of_classes(tmp_path, cli):
    """Those of the task and of the recipe, the table of classes and the confusion matrix, as scikit-learn has them."""
    from sklearn.metrics import accuracy_score, cohen_kappa_score, confusion_matrix, recall_score, roc_auc_score

    metrics = {
        "recall": {"type": "MulticlassRecall", "average": "macro"},
        "kappa": {"type": "CohenKappa"},
        "auroc": {"type": "MulticlassAUROC"},
    }
    rows = [dict(row, label="good" if row["label"] == "good" else "bad") for row in texts(60)]
    data = {"files": {"train": "train.csv", "validation": "validation.csv"}, "label": "label", "max_length": 32}
    recipe = write_recipe(tmp_path, [{"text-classification": {"metrics": metrics}}], data=data)
    for split in data["files"]:
        write_csv(tmp_path / f"{split}.csv", rows)
    train(recipe)
    code, out, err = cli("predict", str(tmp_path / "run"), str(tmp_path / "validation.csv"))
    assert code == 0, err
    good = [json.loads(line)["probability_good"] for line in out.splitlines()]
    actual = [row["label"] == "good" for row in rows]
    ordered = sorted(good)
    for place in (15, 45):
        threshold = (ordered[place] + ordered[place + 1]) / 2
        predicted = [value > threshold for value in good]
        changed = f"plugins.text-classification.threshold={threshold}"
        found = results(cli, tmp_path / "run", "--split", "validation", changed)
        expected = {
            "accuracy": accuracy_score(actual, predicted),
            "recall": recall_score(actual, predicted, average="macro"),
            "kappa": cohen_kappa_score(actual, predicted),
            "auroc": roc_auc_score(actual, good),
        }
        assert {name: found["metrics"][name] for name in expected} == pytest.approx(expected, abs=2e-3)
        assert found["confusion"] == confusion_matrix(actual, predicted).tolist()


def copied(trained: Path, without: str = "") -> Path:
    """A copy of the run in the current folder; the recipe's file and one more are gone."""
    shutil.copytree(trained, "copy")
    for name in filter(None, ("recipe.yaml", without)):
        Path("copy", name).unlink()
    return Path("copy")


@pytest.mark.slow
@pytest.mark.parametrize("split", ["test", "validation"])
def test_metrics_equal_those_of_training(trained, cli, split):
    found = results(cli, trained / "run", "--split", split, "--without", "auto")
    assert found["metrics"] == summary(trained / "run")[split]
    assert 0.4 < found["metrics"]["accuracy"] < 1


def test_training_data_is_not_read(tmp_path, cli):
    recipe = write_recipe(tmp_path)
    train(recipe)
    (tmp_path / "train.csv").unlink()
    assert results(cli, tmp_path / "run")["metrics"] == near(summary(tmp_path / "run")["test"])


@pytest.mark.slow
@pytest.mark.parametrize("split", ["test", "validation"])
def test_a_limit_evaluates_that_many_samples(trained, cli, split):
    found = results(cli, trained / "run", "--split", split, f"data.limit.{split}=7")
    assert sum(row["samples"] for row in found["classes"]) == 7


def test_cached_labels_are_those_of_the_model(trained, tmp_path, cli):
    # with its own tokenizer, so that the cache holds the labels, too
    pretrained = {"name": str(trained / "run" / "model")}
    recipe = write_recipe(tmp_path, [{"token-cache": {"folder": str(tmp_path / "cache")}}], model=pretrained)
    train(recipe)
    assert results(cli, tmp_path / "run")["metrics"] == near(summary(tmp_path / "run")["test"])
    write_csv(
        tmp_path / "train.csv",
        [*texts(60), *({"text": f"an awful film {index}", "label": "awful"} for index in range(12))],
    )
    train(recipe)
    assert results(cli, tmp_path / "run")["metrics"] == near(summary(tmp_path / "run")["test"])


def test_a_warm_start_is_evaluated_with_its_trained_weights(trained, tmp_path, cli):
    weights = tmp_path / "initial.safetensors"
    shutil.copy(trained / "run" / "model" / "model.safetensors", weights)
    recipe = write_recipe(tmp_path, model={"config": TINY, "tokenizer": {"kind": "word"}, "weights": str(weights)})
    found = train(recipe)["test"]
    assert results(cli, tmp_path / "run")["metrics"] == near(found)
    weights.unlink()
    assert results(cli, tmp_path / "run")["metrics"] == near(found)
    initial = results(cli, trained / "run", "--file", tmp_path / "test.csv")["metrics"]
    assert abs(initial["loss"] - found["loss"]) > 1e-2, "training has changed the weights"


def test_held_out_rows_are_those_of_training(tmp_path, cli):
    recipe = write_recipe(tmp_path)
    tree = yaml.safe_load(recipe.read_text())
    del tree["data"]["files"]["validation"]
    drop = [{"column": "text", "shorter_than": 2}]
    changes = {"validation_fraction": 0.3, "drop": drop, "deduplicate": True}
    recipe.write_text(yaml.safe_dump(tree | {"data": tree["data"] | changes}))
    train(recipe)
    run = str(tmp_path / "run")
    code, out, err = cli("evaluate", run, "--split", "validation", "--json", "results.json")
    assert code == 0, err
    metrics = json.loads(Path("results.json").read_text())["metrics"]
    assert metrics == near(summary(tmp_path / "run")["validation"])
    assert "data: validation 18 (no validation split: 30% of train, of each class, held out)\n" in out
    assert "data: train" not in out, "the run has logged these lines"
    _, out, _ = cli("evaluate", run, "--split", "test")
    assert "(data.drop)" not in out, "no row of this split is left out"


@pytest.mark.parametrize(
    "plugins",
    [
        ["packing", "length-bucketing", "ema"],
        [{"amp": {"dtype": "bf16"}}, "attention", "cls-last-layer", "checkpoint-best"],
    ],
    ids=["packing", "amp"],
)
def test_metrics_equal_those_of_training_with_plugins(tmp_path, cli, plugins):
    train(write_recipe(tmp_path, plugins))
    found = results(cli, tmp_path / "run", "--without", "auto")
    assert found["metrics"] == summary(tmp_path / "run")["test"]


def test_metrics_with_listed_class_weights_equal_those_of_training(tmp_path, cli):
    loss = {"name": "cross_entropy", "class_weights": {"bad": 3.0, "fine": 1.0, "good": 0.5}}
    train(write_recipe(tmp_path, [{"text-classification": {"loss": loss}}]))
    assert results(cli, tmp_path / "run")["metrics"] == near(summary(tmp_path / "run")["test"])


def test_balanced_class_weights_need_the_training_split_for_the_loss_only(tmp_path, cli):
    train(write_recipe(tmp_path, [{"text-classification": {"loss": {"class_weights": "balanced"}}}]))
    code, out, err = cli("evaluate", str(tmp_path / "run"), "--json", "results.json")
    assert code == 0, err
    found, expected = json.loads(Path("results.json").read_text())["metrics"], summary(tmp_path / "run")["test"]
    assert {name: found[name] for name in ("accuracy", "f1")} == {name: expected[name] for name in ("accuracy", "f1")}
    assert_problem(out, "no-class-weights text-classification balanced loss differs")


def test_classes_are_those_of_scikit_learn(trained, cli):
    from sklearn.metrics import precision_recall_fscore_support

    found = results(cli, trained / "run")
    actual = [target for target, row in enumerate(found["confusion"]) for count in row for _ in range(count)]
    predicted = [index for row in found["confusion"] for index, count in enumerate(row) for _ in range(count)]
    expected = precision_recall_fscore_support(actual, predicted, labels=range(3), zero_division=0)
    assert [row["name"] for row in found["classes"]] == list(CLASSES)
    for column, values in zip(("precision", "recall", "f1", "samples"), expected, strict=True):
        assert [row[column] for row in found["classes"]] == pytest.approx(list(values))
    rows = texts(30, 200)
    assert [row["samples"] for row in found["classes"]] == [
        sum(row["label"] == name for row in rows) for name in CLASSES
    ]
    assert sum(row[index] for index, row in enumerate(found["confusion"])) / 30 == pytest.approx(
        found["metrics"]["accuracy"]
    )


def test_the_picture_shows_each_count(trained, cli):
    found = results(cli, trained / "run")
    picture = ElementTree.parse("results.svg").getroot()
    texts_of = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert texts_of[0] == f"{trained / 'run'} on test: 30 samples"
    counts = [
        element for element in picture.iter("{http://www.w3.org/2000/svg}text") if "count" in element.get("class", "")
    ]
    assert [element.text for element in counts] == [str(count) for row in found["confusion"] for count in row]
    shades = [
        float(element.get("fill-opacity", "nan")) for element in picture.iter("{http://www.w3.org/2000/svg}rect")
    ][:-1]
    assert shades == pytest.approx([count / sum(row) for row in found["confusion"] for count in row], abs=1e-3)


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are UTF-8 elsewhere")
def test_a_file_whose_name_is_not_utf8_is_evaluated_and_predicted(trained):
    name = os.fsdecode(b"caf\xe9.csv")
    shutil.copy(trained / "test.csv", name)
    run = str(trained / "run")
    with forked.Command("-m", "fastloop", "evaluate", run, "--file", name, "--json", "result.json") as process:
        assert process.wait(300) == 0, process.stderr
    assert json.loads(Path("result.json").read_text())["file"] == name
    assert "caf\\udce9.csv" in Path("result.svg").read_text()
    with forked.Command("-m", "fastloop", "predict", run, name, "--out", f"predicted-{name}") as process:
        assert process.wait(300) == 0, process.stderr
    assert len(Path(f"predicted-{name}").read_text().splitlines()) == 31


def test_a_picture_of_many_classes_is_small_and_escapes_names():
    names = [f"<{number}>" for number in range(60)]
    picture = ElementTree.fromstring(draw(names, [[1] * 60] * 60, "a & b"))
    assert int(picture.get("width", "0")) < 1200
    assert "<59>" in [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]


def test_a_file_and_an_exported_model(trained, cli):
    model = shutil.copytree(trained / "run" / "model", "model")
    found = results(cli, model, trained / "recipe.yaml", "--file", trained / "validation.csv")
    assert found["metrics"] == near(summary(trained / "run")["validation"])
    few = write_csv(Path("few.csv"), [row for row in texts(30) if row["label"] == "good"])
    found = results(cli, trained / "run", "--file", few)
    assert [row["samples"] for row in found["classes"]] == [0, 0, 10]
    streamed = ("data.streaming=true", "data.shuffle_buffer=10")  # as a run that trained on a stream
    assert results(cli, trained / "run", "--file", few, *streamed)["metrics"] == found["metrics"]
    numbers = write_csv(Path("numbers.csv"), [row | {"label": CLASSES.index(row["label"])} for row in texts(24, 100)])
    assert results(cli, trained / "run", "--file", numbers)["metrics"] == near(summary(trained / "run")["validation"])


def test_the_table_and_json_on_stdout(trained, cli):
    code, out, _ = cli("evaluate", str(trained / "run"))
    assert code == 0
    assert f"test accuracy  {summary(trained / 'run')['test']['accuracy']:.4f}" in out
    assert [line.split()[0] for line in out.splitlines()[-4:-1]] == list(CLASSES)
    assert "\ntest: loss " in out, "without a step: the run that evaluates has none"
    code, out, _ = cli("evaluate", str(trained / "run"), "--json", "-")
    assert json.loads(out[out.index("{\n") :])["metrics"] == near(summary(trained / "run")["test"])


def test_a_module(tmp_path, cli, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    (home / "code.py").write_text(CODE)
    metrics = {"accuracy": {"type": "MulticlassAccuracy", "num_classes": 3}}
    recipe = {
        "model": {"module": "code.py:Net"},
        "data": {"module": "code.py:data"},
        "train": {"epochs": 2, "batch_size": 8, "lr": 0.1, "device": "cpu"},
        "plugins": [{"module": {"loss": "cross_entropy", "metrics": metrics}}],
        "output": str(tmp_path / "run"),
    }
    (home / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    train(home / "recipe.yaml")
    found = results(cli, tmp_path / "run")
    assert found["metrics"] == near(summary(tmp_path / "run")["test"])
    assert [row["name"] for row in found["classes"]] == ["0", "1", "2"]
    code, _, err = cli("evaluate", str(tmp_path / "run"), "--file", str(home / "code.py"))
    assert code == 2
    assert_problem(err, "unsupported-task 'module'")
    code, _, err = cli("evaluate", str(tmp_path / "run"), "data.arguments={splits: [train]}")
    assert code == 2
    assert_problem(err, "unknown-split data: 'test'. train.")


def test_a_run_without_a_test_split_is_evaluated_on_validation(tmp_path, cli):
    recipe = write_recipe(tmp_path)
    settings = yaml.safe_load(recipe.read_text())
    del settings["data"]["files"]["test"]
    recipe.write_text(yaml.safe_dump(settings))
    train(recipe)
    result = results(cli, tmp_path / "run")
    assert result["split"] == "validation"
    assert result["metrics"] == near(summary(tmp_path / "run")["validation"])
    code, _, err = cli("evaluate", str(tmp_path / "run"), "--split", "test")
    assert code == 2
    assert_problem(err, "unknown-split 'test'")


TIED = """
import torch
from torch import nn

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.words.weight
        scales = torch.linspace(0, 1, 12)                  # two buffers are parts of one storage
        self.register_buffer("scales", scales[4:])
        self.register_buffer("first", scales[:3])

    def forward(self, ids):
        return self.head(self.words(ids).mean(1).tanh()) * self.scales

class Wide(Tied):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 9, bias=False)

def data():
    rows = [(torch.arange(3) + i % 5, i % 5) for i in range(20)]
    return {"train": rows, "validation": rows}
"""


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """The run of a module with tied weights."""
    folder = tmp_path_factory.mktemp("tied")
    (folder / "tied.py").write_text(TIED)
    recipe = {
        "model": {"module": "tied.py:Tied"},
        "data": {"module": "tied.py:data"},
        "train": {"epochs": 2, "batch_size": 5, "lr": 0.1, "device": "cpu"},
        "plugins": [{"module": {"loss": "cross_entropy"}}],
        "output": str(folder / "run"),
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    train(folder / "recipe.yaml")
    return folder / "run"


def test_tied_weights_of_a_module(tied, tmp_path, cli):
    expected = summary(tied)["validation"]
    assert results(cli, tied, "--split", "validation")["metrics"] == near(expected)
    folder = tmp_path / "model"
    folder.mkdir()
    weights = load_file(tied / "model" / "model.safetensors")
    # as safetensors' save_model writes it
    save_file({name: weights[name] for name in weights if name != "words.weight"}, folder / "model.safetensors")
    assert results(cli, folder, tied.parent / "recipe.yaml", "--split", "validation")["metrics"] == near(expected)
    save_file(weights | {"head.weight": weights["head.weight"] + 1}, folder / "model.safetensors")
    error = refused(cli, folder, tied.parent / "recipe.yaml", "--split", "validation")
    assert_problem(error, "weights-differ words.weight")


def test_weights_of_other_layers_are_named(tied, cli):
    error = refused(cli, tied, "model.module=tied.py:Wide", "--split", "validation")
    assert_problem(error, "weights-differ Wide head.weight")


def test_a_language_model(tmp_path, cli):
    recipe = write_recipe(tmp_path)
    tree = yaml.safe_load(recipe.read_text())
    tree["model"]["config"], tree["model"]["tokenizer"] = TINY_GPT, {"kind": "bpe", "vocab_size": 300}
    tree["data"] = {"files": tree["data"]["files"], "max_length": 16}
    recipe.write_text(yaml.safe_dump(tree))
    train(recipe)
    found = results(cli, tmp_path / "run")
    assert found["metrics"] == near(summary(tmp_path / "run")["test"])
    assert found["metrics"].keys() == {"loss", "perplexity", "bits_per_character"}
    assert found["classes"] == []


def refused(cli: Any, *arguments: Any) -> str:
    code, _, err = cli("evaluate", *map(str, arguments))
    assert code == 2
    error: str = err
    return error


def test_targets_that_are_refused(trained, cli):
    assert_problem(refused(cli, "nowhere"), "not-a-run nowhere")
    copy = copied(trained)
    shutil.rmtree(copy / "run" / "model")
    assert_problem(refused(cli, copy / "run"), "no-exported-model")
    Path("empty").mkdir()
    assert "neither a run folder" in refused(cli, "empty")
    shutil.copytree(trained / "run" / "model", "model")
    assert "Name the recipe" in refused(cli, "model")
    assert_problem(refused(cli, "model", "a", "b"), "several-recipes 2")
    shutil.copytree("model", "both")
    Path("both/adapter_config.json").write_text("{}")
    assert_problem(refused(cli, "both", "a"), "several-exports both: model.safetensors adapter_config.json.")
    Path("both/adapter_config.json").unlink()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    Path("both/model.safetensors.index.json").write_text(json.dumps(index))
    assert_problem(refused(cli, "both", "a"), "several-exports both: model.safetensors model.safetensors.index.json.")
    assert "weights are not those of Net" in refused(cli, "model", other_model(trained))


def other_model(trained: Path) -> Path:
    """A recipe of a module, which the exported classifier is not."""
    Path("code.py").write_text(CODE)
    recipe = {
        "model": {"module": "code.py:Net"},
        "data": {"module": "code.py:data"},
        "plugins": [{"module": {"loss": "cross_entropy"}}],
    }
    Path("other.yaml").write_text(yaml.safe_dump(recipe | {"train": {"device": "cpu"}}))
    return Path("other.yaml")


class EndsEarly(Plugin):
    """Fails at a step."""

    name = "ends-early"

    @hookimpl
    def after_step(self, run: Run) -> None:
        if run.state.step == 13:
            raise RuntimeError("too early")


@pytest.mark.slow
def test_a_model_from_before_the_run_was_resumed_is_a_warning(tmp_path, cli):
    path = write_recipe(tmp_path, train=TRAIN | {"epochs": 1, "save_every": 2})
    train(path)
    run = tmp_path / "run"
    recipe = load_recipe(str(path), ["train.epochs=2"])
    completed = (run / "summary.json").read_bytes()

    def warnings() -> list[Any]:
        code, out, err = cli("evaluate", str(run))
        assert code == 0, err
        return find_problems(out, "older-model model")

    assert not warnings()
    with pytest.raises(FastloopError, match="too early"):
        execute(build(resolve(recipe), [EndsEarly()], resume=run))
    (warning,) = warnings()
    assert "step 13" in str(warning)
    assert json.loads((run / "evaluation" / "validation.json").read_text())["steps"] is None
    (run / "summary.json").write_bytes(completed)  # as after a loss of power
    for manifest in run.glob("checkpoints/*/manifest.json"):
        os.utime(manifest, (1e9, 1e9))  # as if the clock had been set back
    (warning,) = warnings()
    assert "step 12" in str(warning)
    execute(build(resolve(recipe), resume=run))
    assert not warnings()
    summary = json.loads((run / "summary.json").read_text())
    summary["steps"] = 9  # the run resumed from an earlier checkpoint, and left a later one
    (run / "summary.json").write_text(json.dumps(summary))
    assert not warnings()
    summary["steps"] = 18
    del summary["model_step"]  # that of an older version
    (run / "summary.json").write_text(json.dumps(summary))
    assert not warnings()


def test_files_that_are_refused(trained, cli):
    rows = texts(6)
    other = write_csv(Path("other.csv"), [row | {"label": row["label"].replace("fine", "odd")} for row in rows])
    error = refused(cli, trained / "run", "--file", other)
    assert_problem(error, "unknown-label line 3: 'label' data.label 'odd'")
    assert "'bad', 'fine', 'good'" in error
    beyond = write_csv(Path("beyond.csv"), [row | {"label": 3} for row in rows])
    assert_problem(refused(cli, trained / "run", "--file", beyond), "unknown-label '3'")
    unlabelled = write_csv(Path("unlabelled.csv"), [{"text": row["text"]} for row in rows])
    assert "there is no column 'label'" in refused(cli, trained / "run", "--file", unlabelled)
    assert_problem(refused(cli, trained / "run", "--file", "nowhere.csv"), "file-missing")
    assert "there is no split 'dev'" in refused(cli, trained / "run", "--split", "dev")


def test_only_plugins_for_inference_take_part(trained):
    recipe = load_recipe(str(trained / "recipe.yaml"), with_plugins=["amp", "ema", "checkpoint-best", "compile"])
    recipe.inference = Inference(trained / "run" / "model", "test")
    assert resolve(recipe).plugins.names() == ["amp", "compile", "metric-check", "text-classification"]


@pytest.mark.slow
def test_metrics_equal_those_of_training_on_two_processes(tmp_path):
    recipe = write_recipe(tmp_path, ["ddp"])

    def call(*arguments: str) -> None:
        done = forked.run("-m", "fastloop", *arguments, "--nproc", "2")
        assert done.returncode == 0, done.stdout + done.stderr

    call("train", str(recipe))
    call("evaluate", str(tmp_path / "run"), "--json", "two.json")
    found = json.loads(Path("two.json").read_text())
    assert found["world_size"] == 2
    assert found["metrics"] == near(summary(tmp_path / "run")["test"])
    assert sum(row["samples"] for row in found["classes"]) == 30
