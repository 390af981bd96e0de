"""Plugins whose declarations do not fit each other or their code are refused or reported before training.

Modules:
    core/fastloop/default_hooks.py
    core/fastloop/plugins/declarations.py
    core/fastloop/plugins/hook_checks.py
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import forked
import pytest
from torch import nn

from fastloop import Output, Plugin, PluginError, RecipeError, hookimpl, hookspecs
from fastloop.plugins.declarations import (
    REFERENCES,
    check_exclusive_hooks,
    exclusive_hooks,
    nearest,
)
from fastloop.plugins.hook_checks import check_hooks
from fastloop.plugins.installed import load
from fastloop.plugins.manager import PluginSet
from fastloop.plugins.resolve import resolve
from fastloop.recipe import load_recipe, make_recipe
from fastloop.testing import assert_problem, expect_problem
from fastloop_plugins._own_plugins import own_plugins

QUIET = [
    {"log": False},
    {"metric-check": False},
    {"optimizer-check": False},
    {"progress": False},
    {"speed-check": False},
]
CODE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def data():
    inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    return {"train": TensorDataset(inputs, inputs[:, :3].argmax(1))}

def net():
    return nn.Linear(4, 3)
"""
PLUGIN = """
import torch
from fastloop import Plugin, hookimpl

class It(Plugin):
    name = "{name}"
"""
OPTIMIZER = """
    @hookimpl
    def build_optimizer(self, run, model):
        return torch.optim.{cls}(model.parameters(), lr=0.1)
"""


def recipe(*plugins: Any, **sections: Any) -> Path:
    """A recipe of the task ``module``, in the current folder."""
    Path("code_of_test.py").write_text(CODE)
    tree = {
        "model": {"module": "code_of_test.py:net"},
        "data": {"module": "code_of_test.py:data"},
        "train": {"epochs": 1, "batch_size": 8, "device": "cpu"},
        "plugins": [{"module": {"loss": "cross_entropy"}}, *plugins],
        "output": "out",
        **sections,
    }
    Path("r.yaml").write_text(json.dumps(tree))
    return Path("r.yaml")


def file_plugin(name: str, body: str) -> str:
    Path(f"{name}.py").write_text(PLUGIN.format(name=name) + body)
    return f"./{name}.py"


def fastloop(*arguments: str) -> tuple[int, str, str]:
    done = forked.run("-m", "fastloop", *arguments)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def make(name: str, **members: Any) -> Plugin:
    return type(name.title(), (Plugin,), {"name": name, **members})()


def answer(result: Any = None, **marks: Any) -> Any:
    return hookimpl(**marks)(lambda self: result)


def resolved(*plugins: Plugin) -> PluginSet:
    resolution = resolve(make_recipe({"plugins": QUIET}), objects=plugins).plugins
    assert resolution.hooks is not None
    return resolution


# -- two plugins that answer one hook ----------------------------------------------------------------------------------


def test_plan_refuses_two_plugins_that_build_the_optimizer():
    first = file_plugin("lion", OPTIMIZER.format(cls="SGD"))
    second = file_plugin("muon", OPTIMIZER.format(cls="Adagrad"))
    recipe(first, second)
    code, out, err = fastloop("plan", "r.yaml")
    assert code == 2
    assert "1. " not in out
    names = "r.yaml: 'lion' 'muon' build_optimizer muon lion hookimpl(wrapper=True) fallback_hooks"
    assert_problem(err, f"hook-implemented-twice {names}")
    assert resolve(load_recipe("r.yaml", without_plugins=["muon"])).plugins.names()[:3] == ["module", "lion", "log"]


@pytest.mark.parametrize("hook", exclusive_hooks())
def test_every_hook_with_one_answer_is_checked(hook):
    with expect_problem(f"hook-implemented-twice 'a' 'c' {hook}", PluginError):
        resolved(make("a", **{hook: answer()}), make("b"), make("c", **{hook: answer(tryfirst=True)}))

    def around(self: Plugin) -> Any:
        return (yield)

    assert resolved(make("a", **{hook: answer()}), make("b", **{hook: hookimpl(wrapper=True)(around)})).names() == [
        "a",
        "b",
    ]


def test_exclusive_hooks_are_firstresult_hooks():
    first = {name for name, spec in vars(hookspecs).items() if getattr(spec, "fastloop_spec", {}).get("firstresult")}
    assert set(exclusive_hooks()) == first - {"recover"}
    assert resolved(make("a", recover=answer()), make("b", recover=answer())).names() == ["a", "b"]


def test_fallback_hook_is_called_last_and_shown_by_plan():
    asked: list[str] = []

    def build_metrics(self: Any) -> str:
        asked.append(self.name)
        return self.name

    def fallback() -> Plugin:
        return make("fallback", build_metrics=hookimpl(build_metrics), fallback_hooks=("build_metrics",))

    for plugins in (
        [fallback(), make("mine", build_metrics=hookimpl(build_metrics))],
        [make("mine", build_metrics=hookimpl(build_metrics)), fallback()],
    ):
        resolution = resolved(*plugins)
        assert resolution.hooks.build_metrics(run=None) == "mine"
        assert resolution.reasons == {
            "fallback": "given in Python; leaves build_metrics to 'mine'",
            "mine": "given in Python",
        }
    assert asked == ["mine", "mine"]
    assert resolved(fallback()).hooks.build_metrics(run=None) == "fallback"


def test_a_fallback_comes_before_the_core():
    collate = make("mine", build_collator=answer("mine"), fallback_hooks=("build_collator",))
    assert resolved(collate).hooks.build_collator(run=None, split="train") == "mine"
    assert (
        resolved(make("last", build_collator=answer("mine", trylast=True))).hooks.build_collator(
            run=None, split="train"
        )
        == "mine"
    )


def test_a_loss_of_a_plugin_replaces_the_tasks_in_any_order(tiny_run):
    class Doubled(Plugin):
        name = "doubled"
        numerics = "changes-training"

        @hookimpl
        def compute_loss(self, model: nn.Module, batch: Any) -> Output:
            inputs, targets = batch
            return Output(2 * nn.functional.cross_entropy(model(inputs), targets))

    plain, doubled = tiny_run(epochs=1), tiny_run([Doubled()], epochs=1)
    assert doubled.losses[0] == pytest.approx(2 * plain.losses[0])
    body = (
        "    @hookimpl\n    def compute_loss(self, model, batch):\n        from fastloop import Output\n"
        "        return Output(model(batch[0]).sum() * 0 + 7)\n"
    )
    recipe(file_plugin("seven", body))  # after the task: without the task's fallback, it would never be asked
    resolution = resolve(load_recipe("r.yaml")).plugins
    assert resolution.names()[:2] == ["module", "seven"]
    assert resolution.reasons["module"] == "listed in the recipe; leaves compute_loss to 'seven'"


def test_options_decide_whether_a_plugin_answers():
    batches = file_plugin("batches", "    @hookimpl\n    def build_collator(self):\n        return list\n")
    recipe(batches)
    assert resolve(load_recipe("r.yaml")).plugins.names()[:2] == ["module", "batches"]
    with expect_problem("hook-implemented-twice 'module' 'batches' build_collator", PluginError):
        resolve(load_recipe("r.yaml", ["plugins.module.collate=code_of_test.py:data"]))
    own = make("own", build_optimizer=answer())
    assert resolve(make_recipe({"plugins": ["fused-optimizer", *QUIET]}), objects=[own]).plugins.names() == [
        "fused-optimizer",
        "own",
    ]
    with expect_problem("hook-implemented-twice 'fused-optimizer' 'own' build_optimizer", PluginError):
        check_exclusive_hooks([load("fused-optimizer")(implementation="8bit"), own], {}, "recipe")


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        (
            {"fallback_hooks": ("build_modle",), "build_model": answer()},
            "unknown-hook fallback_hooks 'build_modle' 'build_model'",
        ),
        (
            {"fallback_hooks": ("build_model",)},
            "unknown-hook fallback_hooks 'build_model' *first* plugin",
        ),
        ({"fallback_hooks": ("after_fit",), "after_fit": answer()}, "unknown-hook fallback_hooks 'after_fit'"),
    ],
    ids=["misspelled", "not implemented", "not a first hook"],
)
def test_invalid_fallback_is_rejected(members, expected):
    with expect_problem(expected, PluginError):
        resolved(make("a", **members))


def test_our_own_plugins_answer_one_hook_only_where_they_share_a_slot():
    required = {"freeze": {"match": "*"}, "remote-output": {"url": "uploads"}}
    ours = [load(name)(**required.get(name, {})) for name in own_plugins()]
    known = PluginSet([]).manager
    for plugin in ours:
        check_hooks(plugin, known.known, known.first)
        for reference in (name for declaration in REFERENCES for name in getattr(plugin, declaration)):
            found = nearest(reference, {other.name for other in ours}, {other.slot for other in ours if other.slot})
            assert found in ("", reference)
    for plugin in ours:
        for other in ours:
            if plugin is not other and (plugin.slot is None or plugin.slot != other.slot):
                check_exclusive_hooks([plugin, other], {}, "recipe")


# -- methods without a mark --------------------------------------------------------------------------------------------


def test_a_hook_without_its_mark_is_refused_with_its_line():
    recipe(file_plugin("silent", "    def after_step(self, run):\n        print(run.state.step)\n"))
    with pytest.raises(PluginError) as refused:
        _ = resolve(load_recipe("r.yaml")).plugins.hooks
    assert str(refused.value) == (
        f"plugin 'silent': the method after_step ({Path('silent.py').resolve()}, line 7) has the name of a hook but no "
        "@hookimpl, so it would never be called. Mark it with @hookimpl, or rename it: _after_step."
    )
    code, _, err = fastloop("plan", "r.yaml")
    assert (code, err) == (2, f"error: {refused.value} [{refused.value.problem.code}]\n")


def test_an_override_of_a_marked_hook_needs_the_mark_too():
    class Base(Plugin):
        name = "base"

        @hookimpl
        def after_fit(self) -> None: ...

    class Child(Base):
        name = "child"

        def after_fit(self) -> None: ...

    assert resolved(Base()).names() == ["base"]
    with expect_problem("unmarked-hook 'child' after_fit test_plugin_declarations.py", PluginError):
        resolved(Child())


def test_helpers_and_values_are_no_hooks():
    class Fine(Plugin):
        name = "fine"
        prepare = True
        recover: Any = None

        def _evaluate(self) -> None: ...

        @hookimpl(specname="after_fit")
        def finish(self) -> None: ...

    assert resolved(Fine()).names() == ["fine"]


# -- names in declarations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numerics", "hint"),
    [
        ("bitwize", "Did you mean 'bitwise'?"),
        ("about right", "Expected one of: bitwise, changes-training, reassociated, reduced-precision."),
    ],
)
def test_an_unknown_numerics_is_refused(numerics, hint):
    recipe(file_plugin("odd", f"    numerics = {numerics!r}\n"))
    with pytest.raises(PluginError) as refused:
        resolve(load_recipe("r.yaml"))
    assert (
        str(refused.value)
        == f"r.yaml: plugin 'odd' declares the numerics {numerics!r}, which is no numerics class. {hint}"
    )


def warnings_of(caplog: pytest.LogCaptureFixture, **declared: Any) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "fastloop"):
        for _ in range(2):  # a command resolves several times
            resolved(make(f"a{len(repr(declared))}", **declared), make("warmth", slot="weather"))
    return [record.getMessage().partition(": plugin ")[2] for record in caplog.records]


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ({"runs_after": ("warmht",)}, "runs_after 'warmht' 'warmth'"),
        (
            {"runs_before": ("checkpoint-bset",)},
            "runs_before 'checkpoint-bset' 'checkpoint-best'",
        ),
        (
            {"conflicts": {"dpp": "why"}, "runs_after": ("slot:wether",)},
            "'slot:wether'",
        ),
        (
            {"runs_before": ("slots:weather",)},
            "runs_before 'slots:weather' 'slot:weather'",
        ),
        (
            {"runs_after": ("my-package:warmth",)},
            "'my-package:warmth' 'warmth'",
        ),
    ],
    ids=["in the run", "installed", "slot", "prefix", "package"],
)
def test_a_misspelled_name_in_a_declaration_is_reported_once(caplog, declared, expected):
    (warning,) = warnings_of(caplog, **declared)
    assert all(name in warning for name in expected.split())


def test_a_misspelled_requirement_is_refused_with_the_nearest():
    with expect_problem("missing-plugin 'a' 'lorra' 'lora'", PluginError):
        resolved(make("a", requires=("lorra",)))


def test_a_constraint_on_an_optional_plugin_is_silent(caplog):
    constraints = {
        "runs_after": ("muon-optimizer", "slot:strategy", "ema"),
        "conflicts": {"zero-bubble": "both schedule."},
    }
    assert warnings_of(caplog, **constraints) == []


# -- the command line --------------------------------------------------------------------------------------------------


def test_with_and_without_accumulate():
    recipe(file_plugin("warm", ""), file_plugin("cold", ""))
    code, out, err = fastloop(
        "plan",
        "r.yaml",
        "--with",
        "ema",
        "--with",
        "amp,lr-scheduler",
        "--without",
        "warm",
        "--without",
        "log,cold",
        "--with",
        "ema",
    )
    assert (code, err.count("error")) == (0, 0), err
    assert [line.split()[1] for line in out.splitlines() if line[:3].strip().rstrip(".").isdigit()] == [
        "module",
        "ema",
        "amp",
        "lr-scheduler",
        "metric-check",
        "optimizer-check",
        "progress",
        "speed-check",
    ]


def test_overrides_reach_plugins_that_are_on_by_default():
    recipe()
    loaded = load_recipe("r.yaml", ["plugins.progress.every=1", "plugins.log.on_error=disable"])
    plugins = {plugin.name: plugin for plugin in resolve(loaded).plugins}
    assert plugins["progress"].every == 1
    assert plugins["log"].on_error == "disable"
    assert make_recipe(loaded.to_dict()).plugins == loaded.plugins, "the run folder's recipe keeps it"
    assert (
        "progress"
        not in resolve(
            load_recipe("r.yaml", ["plugins.progress.every=1"], without_plugins=["progress"])
        ).plugins.names()
    )
    recipe(plugins=[])
    (task,) = [
        plugin
        for plugin in resolve(load_recipe("r.yaml", ["plugins.module.loss=mse_loss"])).plugins
        if plugin.slot == "task"
    ]
    assert task.loss == "mse_loss"


def test_an_override_turns_no_other_task_on():
    recipe(plugins=[])
    with pytest.raises(RecipeError) as refused:
        load_recipe("r.yaml", ["plugins.text-classification.x=1"])
    assert str(refused.value) == (
        "r.yaml: plugins.text-classification: an override sets its options, but the recipe does not list it, and it is "
        "not on by default here. Add it with --with text-classification."
    )
    with expect_problem("plugin-not-listed 'lgo' 'log'", RecipeError):
        load_recipe("r.yaml", ["plugins.lgo.every=1"])
    with expect_problem("plugin-not-listed 'ema' --with", RecipeError):
        load_recipe("r.yaml", ["plugins.ema.decay=0.9"])
