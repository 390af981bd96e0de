"""`fastloop lr-find`: a range test of the learning rate."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import yaml
from inference_runs import write_recipe

from fastloop import hookimpl
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop_tools.lr_find.command import range_test
from fastloop_tools.lr_find.finder import LRFinder, smooth, suggest

CODE = """
import torch
from torch import nn
from torch.nn.functional import mse_loss

SCALES = torch.tensor([1.0, 0.5, 0.1])

def rows(noise=0.0):
    generator = torch.Generator().manual_seed(0)
    x = torch.linalg.qr(torch.randn(24, 3, generator=generator))[0] * 24 ** 0.5 * SCALES
    y = x @ torch.ones(3, 1) + noise * torch.randn(24, 1, generator=generator)
    return {"train": [(x[i], y[i]) for i in range(24)]}

class Net(nn.Linear):
    def __init__(self):
        super().__init__(3, 1, bias=False)
        nn.init.zeros_(self.weight)

class Flat(Net):
    def forward(self, x):
        return super().forward(x) * 0 + self.weight.sum() * 0
"""
STABLE = 1.0
"""Gradient descent on the loss of ``rows``, all of them in a step, is stable below this rate. The loss is w'Hw with H =
diag(SCALES ** 2), so the Hessian's largest eigenvalue is 2, and the limit is 2 / 2."""


def recipe(folder: Path | None = None, model: str = "Net", **sections: Any) -> dict[str, Any]:
    home = folder or Path.cwd()
    (home / "code.py").write_text(CODE)
    tree: dict[str, Any] = {
        "model": {"module": f"code.py:{model}"},
        "data": {"module": "code.py:rows"},
        "train": {"batch_size": 24, "lr": 1e-3, "optimizer": "SGD", "device": "cpu"},
        "plugins": [{"module": {"loss": "mse_loss"}}],
        "output": "run",
    }
    for name, section in sections.items():
        tree[name] = tree[name] | section if isinstance(section, dict) else section
    (home / "recipe.yaml").write_text(yaml.safe_dump(tree))
    return tree


def find(cli: Any, *arguments: str) -> dict[str, Any]:
    code, _, err = cli("lr-find", "recipe.yaml", *arguments, "--json", "found.json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(Path("found.json").read_text())
    return found


def test_the_suggestion_is_stable_and_fast_for_a_quadratic(cli):
    recipe()
    found = find(cli, "--min", "1e-4")
    assert found["diverged"]
    assert STABLE < found["rates"][-1] < 10  # a few steps above the limit
    lr = found["suggestion"]["lr"]
    assert STABLE / 100 < lr < STABLE / 2
    code, _, err = cli("train", "recipe.yaml", f"train.lr={lr}", "train.epochs=60", "train.log_every=1")
    assert code == 0, err
    losses = [json.loads(line)["loss"] for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < 0.05 * losses[0]


def test_rates_grow_from_min_to_max_by_a_factor(cli):
    recipe()
    found = find(cli, "--min", "1e-6", "--max", "1e-2", "--steps", "41")
    assert not found["diverged"]
    assert found["rates"] == pytest.approx([1e-6 * 10 ** (step / 10) for step in range(41)])
    assert found["suggestion"]["at_end"]
    assert found["smoothed"] == pytest.approx(smooth(found["losses"], 41))


def test_losses_are_those_of_plain_gradient_descent(cli):
    recipe()
    found = find(cli, "--min", "1e-2", "--max", "0.5", "--steps", "20")
    scales, weight = torch.tensor([1.0, 0.5, 0.1], dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for rate, loss in zip(found["rates"], found["losses"], strict=True):
        assert loss == pytest.approx(float(((weight - 1) ** 2 * scales**2).sum()), rel=1e-4)
        weight -= rate * 2 * (weight - 1) * scales**2


def test_the_table_the_suggestion_and_the_chart(cli):
    recipe()
    code, out, err = cli("lr-find", "recipe.yaml", "--min", "1e-4", "--svg", "chart.svg")
    assert code == 0, err
    lr = next(line.removeprefix("Suggestion: ") for line in out.splitlines() if line.startswith("Suggestion: "))
    assert cli("plan", "recipe.yaml", lr)[0] == 0
    assert re.search(r"train\.lr +loss +smoothed", out)
    assert "1.0e-04" in out
    picture = ElementTree.parse("chart.svg").getroot()
    texts = [element.text or "" for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0].endswith(lr.replace("=", " "))
    assert {"1e-4", "1e-2", "1e0"} <= set(texts)
    kinds = [element.get("class", "") for element in picture.iter("{http://www.w3.org/2000/svg}path")]
    assert {"line s0", "line s1"} <= set(kinds)


def test_nothing_of_the_run_is_written(cli):
    recipe(plugins=[{"module": {"loss": "mse_loss"}}, "checkpoint-best", "log", "early-stopping", "nan-guard"])
    Path("run").mkdir()
    Path("run/notes.txt").write_text("mine")
    find(cli, "--min", "1e-4")
    assert [path.name for path in Path("run").iterdir()] == ["notes.txt"]
    assert sorted(path.name for path in Path().iterdir() if path.name != "__pycache__") == [
        "code.py", "found.json", "recipe.yaml", "run", "runs"
    ]  # fmt: skip
    assert [path.name for path in Path("runs").iterdir()] == ["lr-find-recipe.svg"]


def finder_of(tree: dict[str, Any], steps: int = 12) -> tuple[LRFinder, Any]:
    finder = LRFinder(1e-5, 1e-2, steps)
    return finder, range_test(make_recipe(tree, Path("recipe.yaml")), finder)


def test_parameter_groups_keep_their_ratio():
    class Record(LRFinder):
        @hookimpl
        def after_step(self, run, loss):
            seen.append([group["lr"] for group in run.optimizer.param_groups])
            super().after_step(run, loss)

    seen: list[list[float]] = []
    code = CODE.replace("super().__init__(3, 1, bias=False)", "super().__init__(3, 1)")
    tree = recipe(train={"parameter_groups": [{"match": "bias", "lr": 1e-2}]})
    Path("code.py").write_text(code)
    finder = Record(1e-5, 1e-2, 12)
    range_test(make_recipe(tree, Path("recipe.yaml")), finder)
    for step, rates in enumerate(seen, start=1):  # the rates are those of the next step
        assert sorted(rates) == pytest.approx([finder.rate(step), 10 * finder.rate(step)])


@pytest.mark.parametrize("schedule", ["cosine", "OneCycleLR"])
def test_the_recipes_schedule_takes_no_part(schedule):
    plain, _ = finder_of(recipe(train={"optimizer": {"name": "SGD", "momentum": 0.9}}))
    warmup = {"warmup": 0.5} if schedule == "cosine" else {}
    plugins = [{"module": {"loss": "mse_loss"}}, {"lr-scheduler": {"schedule": schedule, **warmup}}]
    scheduled, _ = finder_of(recipe(train={"optimizer": {"name": "SGD", "momentum": 0.9}}, plugins=plugins))
    assert scheduled.losses == plain.losses


@pytest.mark.parametrize("optimizer", ["AdamW", "Muon", {"name": "RMSprop", "alpha": 0.9}])
def test_optimizers_and_reduced_precision(optimizer):
    finder, run = finder_of(
        recipe(train={"optimizer": optimizer}, plugins=[{"module": {"loss": "mse_loss"}}, {"amp": {"dtype": "bf16"}}])
    )
    assert len(finder.losses) == 12
    assert all(math.isfinite(loss) for loss in finder.losses)
    assert run.state.step == 12


def test_a_loss_that_becomes_nan_ends_the_test(cli):
    recipe(train={"optimizer": {"name": "SGD", "momentum": 0.9}})
    Path("code.py").write_text(CODE.replace("return {", "x[5] *= 1e18\n    return {"))
    found = find(cli)
    assert found["diverged"]
    assert found["suggestion"] is None
    code, out, _ = cli("lr-find", "recipe.yaml")
    assert code == 0
    assert "No suggestion" in out


def test_no_suggestion_for_a_loss_that_does_not_fall(cli):
    recipe(model="Flat", data={"arguments": {"noise": 1.0}}, train={"batch_size": 4})
    found = find(cli)
    assert found["suggestion"] is None
    assert len(found["rates"]) == 100


def test_suggestions_from_losses():
    rates = [10 ** (-6 + step / 10) for step in range(80)]
    losses = [2.0 - 1.5 / (1 + math.exp(-(step - 40) / 3)) + max(0.0, (step - 65) / 3) for step in range(80)]
    found = suggest(rates, losses, 80)
    assert found is not None
    assert 55 <= rates.index(found.minimum) <= 65  # the loss rises from 65 on
    assert found.lr == found.minimum / 10
    assert not found.at_end
    assert suggest(rates[:9], losses[:9], 80) is None
    assert suggest(rates, [*losses[:70], math.nan, *losses[71:]], 80) == found


def test_options_that_are_refused(cli):
    recipe()
    for options in (["--min", "1", "--max", "0.1"], ["--min", "0"]):
        code, _, err = cli("lr-find", "recipe.yaml", *options)
        assert code == 2
        assert "expected two rates above 0, the lower one first" in err
    code, _, err = cli("lr-find", "recipe.yaml", "--json", "-")
    assert code == 2
    assert "--json -: this command writes to a file only" in err


def test_a_task_that_exports_and_evaluates(tmp_path, cli):
    write_recipe(tmp_path, ["checkpoint-best", {"lr-scheduler": {"warmup": 0.1}}])
    found = find(cli, "--max", "1", "--steps", "20")
    assert len(found["losses"]) == 20
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_digits_recipe(cli):
    pytest.importorskip("sklearn")
    code, _, err = cli("lr-find", "digits_module", "train.device=cpu", "--json", "found.json")
    assert code == 0, err
    found = json.loads(Path("found.json").read_text())
    assert 7e-4 < found["suggestion"]["lr"] < 7e-3  # its own rate is 2e-3


def test_resolving_leaves_the_recipe_as_it_is():
    tree = recipe(plugins=[{"module": {"loss": "mse_loss"}}, "checkpoint-best"])
    given = make_recipe(tree, Path("recipe.yaml"))
    before = given.to_dict()
    range_test(given, LRFinder(1e-5, 1e-2, 10))
    assert given.to_dict() == before
    assert "checkpoint-best" in resolve(given).plugins.names()
