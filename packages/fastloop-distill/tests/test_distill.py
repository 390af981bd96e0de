"""Students train beside other plugins, export without parts of the distillation, and refuse what does not fit."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from distill_runs import recipe, teacher
from fastloop import FastloopError, Plugin, checkpoint, hookimpl
from fastloop.testing import VECTORS, expect_problem, run_commands, train
from transformers import AutoModelForSequenceClassification

from fastloop_distill.teacher import Teacher


class Watch(Plugin):
    """Records the initial weights, and counts the teacher's passes of each epoch."""

    name = "watch-teacher"

    def __init__(self):
        super().__init__()
        self.passes = [0]

    @hookimpl(trylast=True)
    def before_fit(self, run):
        self.optimized = {id(weight) for group in run.optimizer.param_groups for weight in group["params"]}
        self.weights = {name: weight.clone() for name, weight in run.unwrap_model().state_dict().items()}
        self.teacher = next(plugin for plugin in run.plugins if plugin.name == "distill").teacher_model.model
        self.teacher.register_forward_hook(lambda *_: self.count())

    def count(self):
        assert not self.teacher.training
        self.passes[-1] += 1

    @hookimpl
    def after_epoch(self):
        self.passes.append(0)


def test_the_teacher_is_no_part_of_the_student_and_known_texts_are_not_computed_again():
    shutil.copytree(teacher("texts"), "copy")
    watch = Watch()
    options = {"teacher": "copy"}
    found = train(recipe("texts", epochs=3, save_every=2, options=options), watch)
    assert watch.passes == [5, 0, 0, 0]
    assert not {id(weight) for weight in watch.teacher.parameters()} & watch.optimized
    assert not any(weight.requires_grad for weight in watch.teacher.parameters())
    model, state = checkpoint.read(sorted(Path("run", "checkpoints").iterdir())[-1])
    assert model.keys() == watch.weights.keys() and len(state["plugins"]["distill"]["known"][0][0]) == 35
    other = AutoModelForSequenceClassification.from_pretrained("copy/model")
    torch.nn.init.normal_(other.classifier.bias)
    other.save_pretrained("copy/model")
    with expect_problem("weights-differ", FastloopError):
        train(recipe("texts", epochs=4, save_every=2, options=options), resume=Path("run"))
    again = train(recipe("texts", epochs=3, options={"cache_mb": 0}), (plain := Watch()))
    assert plain.passes == [5, 5, 5, 0]
    assert found.losses == pytest.approx(again.losses, rel=1e-5)


def test_evaluation_and_a_weight_of_0_are_those_of_the_task():
    plain = recipe("texts")
    plain["plugins"] = plain["plugins"][1:]
    expected = train(plain)
    found = train(recipe("texts", options={"weight": 0.0}))
    assert found.losses == expected.losses and found.metrics == expected.metrics


def test_a_student_of_some_layers_begins_with_the_teachers_and_is_exported_without_projections():
    model = f"{teacher('texts')}/model"
    watch = Watch()
    train(recipe("texts", model={"name": model}, options={"layers": [0, 3], "states": "cosine"}), watch)
    theirs = AutoModelForSequenceClassification.from_pretrained(model).state_dict()
    for name, weight in watch.weights.items():
        assert torch.equal(weight, theirs[name.replace("layer.1.", "layer.3.")]), name
    assert json.loads(Path("run/model/config.json").read_text())["num_hidden_layers"] == 2
    train(recipe("texts", options={"states": "mse"}))
    for folder in ("run", "run.1" if Path("run.1").exists() else "run"):
        _, notes = AutoModelForSequenceClassification.from_pretrained(f"{folder}/model", output_loading_info=True)
        assert not notes["unexpected_keys"] and not notes["missing_keys"]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # peft uses this name of transformers
def test_the_adapter_of_a_teacher_is_merged_into_its_base():
    peft = pytest.importorskip("peft")
    lora = {"r": 2, "target_modules": ["query", "value"], "merge": False}
    of_teacher = recipe("texts", {"lora": lora}, model={"name": f"{teacher('texts')}/model"}) | {"output": "adapted"}
    of_teacher["plugins"] = of_teacher["plugins"][1:]
    train(of_teacher)
    assert not Path("adapted/model/config.json").exists()
    base = AutoModelForSequenceClassification.from_pretrained(f"{teacher('texts')}/model")
    merged = peft.PeftModel.from_pretrained(base, "adapted/model").merge_and_unload().state_dict()
    for name in ("adapted", "adapted/model"):
        watch = Watch()
        train(recipe("texts", options={"teacher": name}), watch)
        weights = watch.teacher.state_dict()
        assert weights.keys() == merged.keys()
        for key, weight in merged.items():
            assert torch.allclose(weights[key], weight, atol=1e-6), key


BESIDE = {
    "packing": ("texts", {}, ("packing", "cls-last-layer"), 1e-5),
    "compile": ("language", {}, ({"compile": {"backend": "eager", "cache": False}},), 1e-5),
    "checkpointing": ("texts", {"states": "mse"}, ("activation-checkpointing",), 1e-5),
    "amp": ("language", {"states": "mse"}, ("amp",), 0.05),
}
MARKS = {"compile": pytest.mark.slow}


@pytest.mark.parametrize("case", [pytest.param(case, marks=MARKS.get(case, ())) for case in BESIDE])
def test_losses_are_the_same_beside_other_plugins(case):
    kind, options, plugins, tolerance = BESIDE[case]
    keys = {"micro_batch_size": 4, "evaluate_every": None}
    plain = train(recipe(kind, options=options, **keys))
    found = train(recipe(kind, *plugins, options=options, **keys))
    assert found.losses == pytest.approx(plain.losses, rel=tolerance)
    assert not found.hooks


@pytest.mark.parametrize("kind", ["texts", "language"])
def test_logged_losses_do_not_depend_on_micro_batches(kind):
    """The last batch of an epoch has micro-batches of two samples and of one."""
    values = {}
    for name, size in (("whole", 8), ("parts", 2)):
        keys = {"micro_batch_size": size, "evaluate_every": None, "log_every": 1}
        train(recipe(kind, options={"states": "mse"}, **keys) | {"output": name})
        lines = [json.loads(line) for line in Path(name, "metrics.jsonl").read_text().splitlines()]
        logged = ("distill/soft_loss", "distill/states_loss")
        values[name] = [[line[key] for key in logged] for line in lines if logged[0] in line]
    assert len(values["whole"]) > 2
    for found, expected in zip(values["parts"], values["whole"], strict=True):
        assert found == pytest.approx(expected, rel=1e-4)


def test_it_trains_beside_plugins_that_change_the_training():
    for plugins in (("auto", "length-bucketing"), ("lora", "auto") if importlib.util.find_spec("peft") else ("auto",)):
        watch = Watch()
        train(recipe("texts", *plugins, options={"states": "mse"} if "lora" in plugins else {}), watch)
        assert watch.passes[0] > 0


@pytest.mark.parametrize("kind", ["texts", "language"])
def test_new_adapters_do_not_change_the_first_loss(kind):
    pytest.importorskip("peft")
    plain = train(recipe(kind))
    found = train(recipe(kind, {"lora": {"target_modules": "all-linear"}}))
    assert found.losses[0] == pytest.approx(plain.losses[0], rel=1e-6)


def longer_student():
    """A student that takes more tokens than its teacher, which takes 48. Its copy of the tokenizer states no limit."""
    model = recipe("texts")["model"]
    shutil.copytree(model["tokenizer"], "tokenizer")
    settings = Path("tokenizer", "tokenizer_config.json")
    kept = json.loads(settings.read_text())
    del kept["model_max_length"]
    settings.write_text(json.dumps(kept))
    return model | {"tokenizer": "tokenizer", "config": model["config"] | {"max_position_embeddings": 64}}


def rename_labels():
    for path in Path("texts").iterdir():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("\n".join(json.dumps(row | {"label": ["bad", "good"][row["label"]]}) for row in rows))


REFUSED = {
    "no folder": (
        lambda: recipe("texts", options={"teacher": "./nowhere"}),
        "distill.teacher: .*nowhere: no such folder",
    ),
    "no model": (lambda: recipe("texts", options={"teacher": "texts"}), "texts holds no config.json"),
    "own tokenizer": (
        lambda: recipe("texts", model=recipe("texts")["model"] | {"tokenizer": {"kind": "word"}}),
        "texts-teacher has a tokenizer, and the student's is made from the training texts. .* Set model.tokenizer=/",
    ),
    "other tokenizer": (
        lambda: recipe("texts", data={"max_length": 16}, options={"teacher": teacher("language")}),
        "the tokenizer of .*language-teacher has .* tokens, and the student's has",
    ),
    "long": (
        lambda: recipe("texts", data={"max_length": 60}, model=longer_student()),
        "max_length: found 60, and .*texts-teacher/model takes 48 tokens at most",
    ),
    "labels": (
        lambda: rename_labels() or recipe("texts"),
        "the classes of .* are 0, 1, and those of the data bad, good",
    ),
    "regression": (lambda: recipe("texts", data={"label_type": "number"}), "found number, and distill needs class"),
    "class weights": (
        lambda: recipe("texts", {"text-classification": {"loss": {"class_weights": "balanced"}}}),
        "loss.class_weights: the soft loss counts all samples alike",
    ),
    "task": (
        lambda: VECTORS | {"plugins": [*VECTORS["plugins"], {"distill": {"teacher": teacher("texts")}}]},
        "the task is module, expected causal-lm",
    ),
    "layers": (lambda: recipe("texts", options={"layers": [0]}), "found \\[0\\], expected layers of model.name"),
    "no layer": (
        lambda: recipe("texts", model={"name": f"{teacher('texts')}/model"}, options={"layers": [1, 4]}),
        "found \\[1, 4\\], and BertForSequenceClassification has 1 list of 4 layers",
    ),
    "pairs": (
        lambda: recipe("texts", options={"teacher_layers": [1]}),
        "expected one of the teacher's 4 layers for each",
    ),
    "fused-loss": (lambda: recipe("language", "fused-loss"), "it computes no logits"),
    "cls-last-layer": (
        lambda: recipe("texts", "cls-last-layer", options={"states": "mse"}),
        "leaves out hidden states",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_teacher_that_does_not_fit_is_refused(case, monkeypatch):
    make, message = REFUSED[case]
    monkeypatch.setattr(Teacher, "load", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(FastloopError, match=message):
        train(make())


def test_a_plan_counts_the_teacher():
    made = recipe("texts")
    made["plugins"] = [*made["plugins"], "text-classification"]
    weights = []
    for plugins in (made["plugins"], made["plugins"][1:]):
        Path("recipe.yaml").write_text(json.dumps(made | {"plugins": plugins}))
        run_commands([(Path.cwd(), "plan", "recipe.yaml", "--device-memory", "8GB", "--json", "plan.json")])
        weights.append(json.loads(Path("plan.json").read_text())["variants"][0]["weights"])
    with_teacher, alone = weights
    model = AutoModelForSequenceClassification.from_pretrained(f"{teacher('texts')}/model")
    size = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert with_teacher - alone == pytest.approx(size, rel=0.01)
