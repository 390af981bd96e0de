"""Selected plugins: one that fails with a run's model leaves the run, and the trial that shows it changes nothing.

Modules:
    plugins/fastloop_plugins/_selection.py
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import yaml
from image_helpers import write_images
from log_lines import find_lines
from text_helpers import rows
from training_runs import execute

from fastloop import FastloopError, Plugin, PluginError, Run, Strategy, Trainer, hookimpl
from fastloop.errors import PluginCrash
from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import Recipe, load_recipe, make_recipe
from fastloop.runtime.hardware import Machine
from fastloop.testing import assert_problem, expect_problem, find_problems

CPU = Machine("cpu", "AVX512", ("fp32", "bf16"), ("bf16",))
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
}
QUIET = [{name: False} for name in ("log", "progress", "speed-check", "module", "allocator", "dataloader-workers")]
TRAIN = {"epochs": 1, "batch_size": 8, "lr": 1e-3, "device": "cpu", "save_every": None}
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}


SELECT = """
from fastloop import Recommendation
from fastloop_plugins.auto import Auto


class Chooses(Auto):
    name = "chooses"

    def select_plugins(self, recipe, machine):
        amp = Recommendation(why="fast", options={"dtype": "bf16"})
        return {"amp": amp, "ddp": Recommendation(why="joins processes")}
"""


@pytest.fixture(autouse=True)
def _this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests select for a CPU with fast bf16, on any machine."""
    monkeypatch.setattr("fastloop.runtime.hardware.this_machine", lambda device="auto": CPU)


def text_recipe(kind: str, *plugins: Any, **config: Any) -> Recipe:
    with Path("a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["text", "label"])
        writer.writeheader()
        writer.writerows(rows())
    return make_recipe(
        {
            "model": {"config": {"model_type": kind, **SIZES, **config}, "tokenizer": {"kind": "word"}},
            "data": {
                "files": {"train": "a.csv", "validation": "a.csv"},
                "text": "text",
                "label": "label",
                "max_length": 32,
            },
            "train": TRAIN,
            "plugins": [*plugins, *QUIET],
            "output": "run",
        },
        Path("recipe.yaml"),
    )


def image_recipe(*plugins: Any) -> Recipe:
    if not Path("images").exists():
        write_images(Path("images"))
    data = {"images": "images", "image_size": 16}
    return make_recipe(
        {"model": {"config": RESNET}, "data": data, "train": TRAIN, "plugins": [*plugins, *QUIET], "output": "run"}
    )


def make(recipe: Recipe, *objects: Plugin) -> Run:
    return build(resolve(recipe, CPU, objects))


def weights(run: Run) -> dict[str, torch.Tensor]:
    execute(run)
    return {name: tensor.clone() for name, tensor in run.model.state_dict().items()}


class ReadsMean(Plugin):
    """Changes a model so that it classifies by the mean of its positions."""

    name = "reads-mean"
    runs_before = ("cls-last-layer",)

    @hookimpl
    def before_prepare(self, model: Any) -> None:
        whole = model.bert.pooler.forward
        model.bert.pooler.forward = lambda states: whole(states.mean(1, keepdim=True))


class Count(Plugin):
    """Counts the builds, the losses that are computed before training, and the calls of ``teardown``."""

    name = "count"

    def __init__(self) -> None:
        super().__init__()
        self.builds = self.losses = self.teardowns = 0

    @hookimpl
    def check_run(self) -> None:
        self.builds, self.losses = self.builds + 1, 0

    @hookimpl(wrapper=True)
    def compute_loss(self) -> Iterator[None]:
        self.losses += 1
        return (yield)

    @hookimpl
    def teardown(self) -> None:
        self.teardowns += 1


@pytest.mark.slow
def test_a_plugin_whose_trial_fails_leaves_with_its_reason(caplog):
    """Transformers' DeBERTa fills a bf16 tensor with the smallest number of float32."""
    recipe, count = text_recipe("deberta", "auto"), Count()
    with caplog.at_level(logging.WARNING, "fastloop"):
        run = make(recipe, count)
    assert len(find_problems(caplog, "plugin-left-out")) == 1
    assert_problem(caplog, "plugin-left-out auto: amp: DebertaForSequenceClassification: RuntimeError: value")
    assert run.accelerator.mixed_precision == "no"
    assert {"fast-dropout", "fused-optimizer"} <= set(run.plugins.names())
    assert not {"amp", "cpu-attention"} & {*run.plugins.names(), *run.recipe.plugins, *run.recipe.selected}, (
        "one needs the other"
    )
    assert count.teardowns == count.builds - 1, "runs that are not used are torn down"
    ours = weights(run)
    listed = load_recipe("run/recipe.yaml")
    assert "amp" not in listed.plugins
    listed.output = "again"
    theirs = weights(make(listed))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_plugins_whose_hooks_raise_leave_with_their_reasons(caplog):
    recipe = text_recipe("bert", "auto")
    with caplog.at_level(logging.WARNING, "fastloop"):
        run = make(recipe, ReadsMean())
    first, second = find_problems(caplog, "plugin-left-out auto: BertForSequenceClassification")
    assert "cls-last-layer:" in first.text
    assert "packing:" in second.text
    assert {"amp", "fast-dropout", "reads-mean"} <= set(run.plugins.names())
    assert not {"packing", "cls-last-layer"} & {*run.plugins.names(), *run.recipe.plugins}
    assert type(run.loaders.collators["train"]).__name__ == "PaddedCollator", "that of the task, without packing"
    assert execute(run)["status"] == "completed"


@pytest.mark.slow
def test_a_plugin_that_the_recipe_lists_still_is_an_error():
    with expect_problem("unsupported-model recipe.yaml: plugins.packing: BertForSequenceClassification", PluginError):
        make(text_recipe("bert", "auto", "packing"), ReadsMean())
    with expect_problem("plugin-crashed BFloat16 without overflow", PluginCrash):
        execute(make(text_recipe("deberta", "auto", {"amp": {"dtype": "bf16"}})))


def errors(recipe: Callable[..., Recipe], *objects: Any) -> list[str]:
    """The errors of a recipe without and with ``auto``."""
    found = []
    for plugins in ([], ["auto"]):
        with pytest.raises(FastloopError) as caught:
            execute(make(recipe(*plugins), *(other() for other in objects)))
        found.append(f"{type(caught.value).__name__}: {caught.value}")
    return found


class BreaksLoss(Plugin):
    """Fails in the first step, and in every trial."""

    name = "breaks-loss"

    @hookimpl(wrapper=True)
    def compute_loss(self) -> Iterator[None]:
        yield
        raise ValueError("a bug of its author")


class BreaksModel(Plugin):
    """Changes the model, so that the task's loss fails."""

    name = "breaks-model"

    @hookimpl
    def before_prepare(self, model: Any) -> None:
        model.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(ValueError("a bug of its model")))


@pytest.mark.slow
@pytest.mark.parametrize("broken", [BreaksLoss, BreaksModel])
def test_an_error_that_the_recipe_has_by_itself_comes_unchanged(broken, caplog):
    without, found = errors(lambda *plugins: text_recipe("deberta-v2", *plugins), broken)
    assert "a bug of its" in without
    assert found == without
    assert not find_problems(caplog, "plugin-left-out")
    assert "amp" in yaml.safe_load(Path("run/recipe.yaml").read_text())["plugins"][0], "the selection stays as it was"


def test_an_error_of_the_data_comes_unchanged_and_at_once():
    def recipe(*plugins: Any) -> Recipe:
        made = text_recipe("bert", *plugins)
        Path("a.csv").write_text("text,label\nonly one,\n")
        return made

    without, found = errors(recipe)
    assert found == without


def test_the_trial_changes_no_weight_buffer_or_random_number():
    """ResNet has batch norm, whose running statistics any forward pass in train mode changes."""
    recipe, count = image_recipe("auto"), Count()
    run = make(recipe, count)
    assert (count.builds, count.losses) == (1, 2)  # in train mode, and in eval mode
    assert all(parameter.grad is None for parameter in run.model.parameters())
    assert all(not count for name, count in run.model.named_buffers() if "num_batches" in name)
    state = torch.get_rng_state()
    ours = weights(run)
    count = Count()
    listed = make(
        image_recipe(*({name: options} for name, options in run.recipe.plugins.items() if options is not False)), count
    )
    assert count.losses == 0, "no plugin is selected, so there is nothing to try"
    assert torch.equal(state, torch.get_rng_state())
    theirs = weights(listed)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


class ReadsNumbers(torch.nn.Module):
    """Converts activations to numpy, which knows no bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

    def forward(self, inputs):
        hidden = self.first(inputs)
        self.seen = float(hidden.detach().numpy().mean())
        return self.second(hidden)


def test_trainer_leaves_a_plugin_out_for_good(caplog):
    data = [(torch.randn(4), index % 2) for index in range(16)]
    found = []
    for plugins in ([], ["auto"]):
        torch.manual_seed(0)
        model = ReadsNumbers()
        trainer = Trainer(
            model,
            data,
            data,
            plugins=[*plugins, *QUIET],
            loss=torch.nn.functional.cross_entropy,
            batch_size=8,
            epochs=2,
            device="cpu",  # the model takes its tensor as an array
        )
        trainer.recipe.output = f"run{len(plugins)}"
        trainer.fit()
        found.append((model.first.weight.detach().clone(), trainer.validate()))
    assert_problem(caplog, "plugin-left-out auto: amp: ReadsNumbers: TypeError: BFloat16")
    assert "amp" not in {*trainer.recipe.plugins, *trainer.resolved.plugins.names()}
    torch.testing.assert_close(found[0], found[1])


def test_nothing_is_tried_for_plugins_that_compute_nothing():
    count = Count()
    run = make(image_recipe({"auto": {"numerics": "reassociated"}}), count)
    assert list(run.recipe.selected) == ["fused-optimizer"]
    assert (count.builds, count.losses) == (1, 0)


@pytest.mark.slow
def test_a_command_keeps_the_plugin_that_it_adds():
    """`fastloop profile` and others build a set of their own."""
    recipe, count = text_recipe("bert", "auto"), Count()
    resolved = resolve(recipe, CPU, [ReadsMean()])
    run = build(resolved, [count])
    assert run.plugins.plugins[0] is count
    expected = [name for name in resolved.plugins.names() if name not in ("packing", "cls-last-layer")]
    assert run.plugins.names()[1:] == expected, "in the same order"
    assert run.plugins.reasons["amp"].startswith("auto: ")
    assert all(
        plugin not in resolved.plugins.plugins for plugin in run.plugins if plugin.name not in ("count", "reads-mean")
    )


def test_the_hooks_of_the_last_build_are_timed(cli):
    Path("recipe.yaml").write_text(yaml.safe_dump(text_recipe("deberta", "auto").to_dict()))
    code, out, err = cli("train", "recipe.yaml", "--trace-hooks")
    assert code == 0, err
    (calls,) = [
        line.split() for line in out.splitlines() if line.split()[:2] == ["text-classification", "compute_loss"]
    ]
    assert int(calls[2]) >= 6, "three steps and an evaluation of three batches"


@pytest.mark.slow
def test_a_quick_check_and_a_resumed_run_leave_the_same_plugin_out(cli):
    tree = text_recipe("deberta", "auto").to_dict()
    Path("recipe.yaml").write_text(yaml.safe_dump(tree))
    code, out, err = cli("train", "recipe.yaml", "--fast-dev-run")
    assert code == 0, err
    assert find_lines(out, "fast-dev-run: 2 1")
    whole = load_recipe("recipe.yaml", ["output=whole"])
    expected = weights(make(whole))
    first = load_recipe("recipe.yaml", ["train.max_steps=2", "train.save_every=1"])
    execute(make(first))
    resumed = load_recipe("recipe.yaml")
    run = build(resolve(resumed, CPU), resume=Path("run"))
    assert "amp" not in run.plugins.names()
    found = weights(run)
    assert run.state.step == 3
    assert all(torch.equal(expected[name], found[name]) for name in expected)


class Refuses(Strategy):
    """Takes no fused optimizer, or no bf16.

    Args:
        setting: ``fused``, ``bf16`` or ``everything``.
    """

    name = "refuses"

    def __init__(self, setting: str) -> None:
        super().__init__()
        self.setting = setting

    @hookimpl
    def before_prepare(self, run: Run) -> None:
        if self.setting == "bf16" and run.accelerator.mixed_precision == "bf16":
            raise PluginError("recipe.yaml: plugins.refuses: takes no bf16")

    def prepare(self, run: Run, model: Any, optimizer: Any) -> tuple[Any, Any]:
        if self.setting == "everything" or (self.setting == "fused" and optimizer.defaults["fused"]):
            raise PluginError(f"recipe.yaml: plugins.refuses: takes no {self.setting}")
        return super().prepare(run, model, optimizer)


@pytest.mark.parametrize(
    ("setting", "left_out", "kept"), [("fused", "fused-optimizer", "amp"), ("bf16", "amp", "fused-optimizer")]
)
def test_a_plugin_leaves_whose_setting_the_strategy_refuses(setting, left_out, kept):
    recipe = text_recipe("bert", "auto")
    assert {left_out, kept} <= resolve(recipe, CPU, [Refuses("nothing")]).recipe.selected.keys()
    execute(make(recipe, Refuses(setting)))
    trained = load_recipe("run/recipe.yaml").plugins
    assert left_out not in trained
    assert kept in trained


def test_the_refusal_of_a_strategy_that_no_selected_plugin_causes_is_raised():
    with pytest.raises(PluginError, match="takes no everything"):
        make(text_recipe("bert", "auto"), Refuses("everything"))


@pytest.mark.slow
def test_processes_leave_the_same_plugin_out():
    """On any machine: the recipe's own plugin selects amp, and the strategy without which there is no run."""
    Path("chooses.py").write_text(SELECT)
    tree = text_recipe("deberta").to_dict() | {"plugins": ["text-classification", "./chooses.py", *QUIET]}
    Path("recipe.yaml").write_text(yaml.safe_dump(tree))
    done = forked.run("-m", "fastloop", "train", "recipe.yaml", "--nproc", "2", timeout=300)
    assert done.returncode == 0, done.stderr
    assert_problem(done.stdout + done.stderr, "plugin-left-out chooses: amp: DebertaForSequenceClassification")
    listed = load_recipe("run/recipe.yaml").plugins
    assert "ddp" in listed
    assert "amp" not in listed
