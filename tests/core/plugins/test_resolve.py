"""Plugins: found by metadata, checked together, and ordered once.

The installed plugins here are real distributions: folders with metadata on the import path.

Modules:
    core/fastloop/plugins/installed.py
    core/fastloop/plugins/order.py
    core/fastloop/plugins/resolve.py
"""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any

import pytest

from fastloop import (
    Device,
    Dtype,
    Package,
    Plugin,
    PluginError,
    Problem,
    RecipeError,
    When,
    hookimpl,
    option,
)
from fastloop.plugins.installed import installed
from fastloop.plugins.resolve import resolve
from fastloop.recipe import Recipe, make_recipe
from fastloop.runtime.hardware import Machine
from fastloop.testing import assert_problem, expect_problem

pytest_plugins = ["installing"]

CPU = Machine("cpu", "AVX2", ("fp32", "bf16"))
QUIET = {"log": False, "metric-check": False, "optimizer-check": False, "progress": False, "speed-check": False}


def make(name: str, **members: Any) -> Plugin:
    """An object of a new plugin class."""
    return type(name.title().replace("-", ""), (Plugin,), {"name": name, **members})()


def recipe(*plugins: Any) -> Recipe:
    return make_recipe({"plugins": [*plugins, *({name: False} for name in QUIET)]})


def order(*plugins: Plugin) -> list[str]:
    return resolve(recipe(), CPU, plugins).plugins.names()


def problem_of(*plugins: Any, machine: Machine = CPU) -> Problem:
    """The problem of plugins that the resolver refuses."""
    named = [plugin for plugin in plugins if not isinstance(plugin, Plugin)]
    with pytest.raises(PluginError) as refused:
        _ = resolve(recipe(*named), machine, [plugin for plugin in plugins if isinstance(plugin, Plugin)]).plugins.hooks
    return refused.value.problem


PLUGIN = """
from fastloop import Plugin, hookimpl, option

class Warmth(Plugin):
    name = "warmth"

    degrees: float = option("How warm.", default=20.0)

    @hookimpl
    def after_fit(self):
        raise KeyError("cold")
"""

# -- installed plugins -------------------------------------------------------------------------------------------------


def test_an_installed_plugin_is_found_without_being_imported_and_loaded_when_named(install):
    install("warm-pack", PLUGIN, warmth="warm_pack:Warmth")
    assert installed()["warmth"].dist.name == "warm-pack"
    assert resolve(recipe(), CPU).plugins.names() == []
    assert "warm_pack" not in sys.modules  # installed is not active
    (plugin,) = resolve(recipe({"warmth": {"degrees": 25.0}}), CPU).plugins
    assert plugin.degrees == 25.0
    assert "warm_pack" in sys.modules


def test_metadata_is_read_once_until_a_package_is_installed(install, monkeypatch):
    install("warm-pack", PLUGIN, warmth="warm_pack:Warmth")
    read, calls = importlib.metadata.entry_points, []
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **given: calls.append(given) or read(**given))
    assert "warmth" in installed()
    assert "warmth" in installed()
    assert not installed("fastloop.no-such-group")
    assert calls == [{}], "one reading for all groups"
    install("cold-pack", PLUGIN, frost="cold_pack:Warmth")
    assert {"warmth", "frost"} < installed().keys()


def test_an_installed_plugin_cannot_turn_itself_on(install):
    wants_to_be_on = PLUGIN + "\nWarmth.auto_enable = classmethod(lambda cls, recipe: 'always')\n"
    install("warm-pack", wants_to_be_on, warmth="warm_pack:Warmth")
    assert resolve(recipe(), CPU).plugins.names() == []
    assert "warm_pack" not in sys.modules


def test_option_error_of_installed_plugin_names_its_key(install):
    install("warm-pack", PLUGIN, warmth="warm_pack:Warmth")
    with expect_problem("unknown-option plugins.warmth.degree 'degrees'", RecipeError):
        resolve(recipe({"warmth": {"degree": 1}}), CPU)


def test_unknown_plugin_is_rejected_with_closest_name(install):
    install("warm-pack", PLUGIN, warmth="warm_pack:Warmth")
    problem = problem_of("ema", "warmht")
    assert_problem(problem, "unknown-plugin 'warmht' 'warmth' `fastloop plugins`")
    assert problem.place == "recipe: plugins[1]"


def test_without_unknown_plugin_is_rejected():
    problem = problem_of({"progres": False})
    assert_problem(problem, "unknown-plugin 'progres' 'progress'")
    assert problem.place == "recipe: plugins.progres"


@pytest.mark.parametrize(
    ("code", "value", "expected"),
    [
        (
            "import nothing_of_this_name",
            "warm_pack:Warmth",
            "import-failed ModuleNotFoundError 'nothing_of_this_name'",
        ),
        ("1 / 0", "warm_pack:Warmth", "import-failed ZeroDivisionError"),
        (PLUGIN, "warm_pack:Warm", "import-failed AttributeError"),
        ("class Warmth: pass", "warm_pack:Warmth", "not-a-plugin fastloop.Plugin"),
        (
            PLUGIN.replace('"warmth"', '"heat"'),
            "warm_pack:Warmth",
            "name-differs 'heat'",
        ),
    ],
    ids=["missing import", "error", "missing class", "no plugin", "another name"],
)
def test_load_error_names_plugin_and_distribution(install, code, value, expected):
    install("warm-pack", code, warmth=value)
    problem = problem_of("warmth")
    assert str(problem).startswith(f"recipe: plugins[0]: plugin 'warmth' ({value} of warm-pack 1.2) ")
    assert_problem(problem, expected)


def test_same_plugin_name_in_two_distributions(install):
    install("warm-pack", PLUGIN, warmth="warm_pack:Warmth")
    install("hot-pack", PLUGIN, warmth="hot_pack:Warmth")
    assert_problem(problem_of("warmth"), "ambiguous-name recipe plugins[0] 'warmth' hot-pack:warmth warm-pack:warmth")
    assert type(resolve(recipe("hot-pack:warmth"), CPU).plugins.plugins[0]).__module__ == "hot_pack"


# -- the core's own defaults -------------------------------------------------------------------------------------------


def test_default_plugins_come_last_with_reason_and_can_be_disabled():
    resolution = resolve(make_recipe({"plugins": [{"progress": False}]}), CPU, [make("mine")]).plugins
    assert resolution.names() == ["mine", "log", "metric-check", "optimizer-check", "speed-check"]
    assert resolution.reasons["log"].startswith("on by default: ")
    assert resolution.reasons["mine"] == "given in Python"


def test_a_default_plugin_that_is_listed_keeps_its_options_and_place():
    resolution = resolve(make_recipe({"plugins": [{"progress": {"every": 3}}, "ema"]}), CPU).plugins
    assert resolution.names() == ["progress", "ema", "log", "metric-check", "optimizer-check", "speed-check"]
    assert resolution.plugins[0].every == 3
    assert resolution.reasons["progress"] == "listed in the recipe"


# -- order -------------------------------------------------------------------------------------------------------------


def test_hooks_are_called_in_the_recipes_order():
    called = []

    def plugin(name: str) -> Plugin:
        @hookimpl
        def after_fit(self: Plugin) -> None:
            called.append(self.name)

        return make(name, after_fit=after_fit)

    names = ["c", "a", "d", "b"]
    resolution = resolve(recipe(), CPU, [plugin(name) for name in names]).plugins
    resolution.hooks.after_fit(run=None)
    assert called == names
    assert [plugin.name for plugin, _ in resolution.each("after_fit")] == names


def test_order_constraints_move_plugins_minimally():
    assert order(make("a"), make("b", runs_after=("d",)), make("c"), make("d"), make("e")) == ["a", "c", "d", "b", "e"]
    assert order(make("a"), make("b"), make("c", runs_before=("a",))) == ["b", "c", "a"]
    assert order(make("a", runs_after=("slot:task",)), make("b", slot="task")) == ["b", "a"]
    assert order(make("a", runs_after=("nowhere", "slot:nothing")), make("b", runs_before=("nowhere",))) == ["a", "b"]
    assert order(make("a", slot="x", runs_after=("slot:x",)), make("b")) == ["a", "b"]  # not after itself


def test_reordered_plugin_has_reason():
    resolution = resolve(recipe(), CPU, [make("a", runs_after=("c",)), make("b"), make("c")]).plugins
    assert resolution.reasons == {
        "a": "given in Python; moved after 'c'",
        "b": "given in Python",
        "c": "given in Python",
    }


def test_cyclic_order_is_rejected_with_its_members():
    problem = problem_of(
        make("a", runs_after=("b",)),
        make("free"),
        make("b", runs_after=("c",)),
        make("c", runs_after=("a",)),
        make("late", runs_after=("a",)),
    )
    assert_problem(problem, "ordering-cycle recipe: --without")
    for declaration in ("'c' runs_after 'a'", "'b' runs_after 'c'", "'a' runs_after 'b'"):
        assert declaration in str(problem)


# -- together ----------------------------------------------------------------------------------------------------------


def test_two_plugins_in_one_slot_are_refused():
    problem = problem_of(make("a", slot="precision"), make("b"), make("c", slot="precision"))
    assert_problem(problem, "slot-filled-twice recipe: 'a' 'c' 'precision'")
    assert problem.proposals == ["--without c", "--without a"]


def test_duplicate_plugin_is_rejected():
    assert_problem(problem_of("ema", make("ema")), "listed-twice recipe 'ema'")


def test_a_plugin_without_a_name_is_refused():
    class Nameless(Plugin):
        pass

    assert_problem(problem_of(Nameless()), "unnamed-plugin")


@pytest.mark.parametrize("reference", ["a", "slot:speed"])
def test_a_conflict_is_refused_with_its_reason(reference):
    problem = problem_of(make("a", slot="speed"), make("b", conflicts={reference: "both move the weights."}))
    assert_problem(problem, "excluded-plugin recipe 'b' 'a'")


def test_missing_required_plugin_is_rejected_with_repair():
    assert_problem(problem_of(make("a", requires=("ema",))), "missing-plugin recipe 'a' 'ema' --with")
    assert problem_of({"ema": False}, make("a", requires=("ema",))).proposals == ["--without ema,a"]
    problem = problem_of(make("a", requires=("slot:strategy",)))
    assert_problem(problem, "missing-plugin recipe 'a' 'strategy'")
    assert "--with slot" not in str(problem)
    assert order(make("a", requires=("b", "slot:x")), make("b", slot="x")) == ["a", "b"]


def test_a_task_that_is_required_by_name_is_explained():
    problem = problem_of(make("a", requires=("module",)), make("my-task", slot="task"))
    assert_problem(problem, "missing-plugin recipe 'a' 'module' 'my-task' 'slot:task'")


# -- needs -------------------------------------------------------------------------------------------------------------


def test_missing_or_old_package_is_rejected_with_install_command(install):
    install("warm-pack")
    missing = problem_of(make("a", requirements=(Package("nothing-of-this-name", ">=2"),)))
    assert_problem(missing, "requirement-missing recipe: 'a' nothing-of-this-name>=2")
    assert missing.proposals == ["pip install 'nothing-of-this-name>=2'", "--without a"]
    of_an_extra = problem_of(make("a", requirements=(Package("nothing-of-this-name", extra="lora"),)))
    assert of_an_extra.proposals == ["pip install 'fastloop-train[lora]'", "--without a"]
    old = problem_of(make("a", requirements=(Package("warm-pack", ">=2"),)))
    assert_problem(old, "requirement-missing 'a' warm-pack>=2 1.2")
    assert old.proposals == ["pip install -U 'warm-pack>=2'", "--without a"]
    assert order(make("a", requirements=(Package("warm-pack", ">=1"), Package("warm-pack")))) == ["a"]


def test_missing_device_or_dtype_is_rejected_with_available_ones():
    device = problem_of(make("a", requirements=(Device("cuda", "xpu"),)))
    assert_problem(device, "requirement-missing 'a' cuda xpu cpu")
    dtype = problem_of(make("a", requirements=(Dtype("fp8"),)))
    assert_problem(dtype, "requirement-missing 'a' fp8 cpu fp32 bf16")
    assert order(make("a", requirements=(Device("cuda", "cpu"), Dtype("bf16")))) == ["a"]


def test_requirement_may_depend_on_options():
    class Picky(Plugin):
        name = "picky"
        requirements = (When(lambda plugin: plugin.fast, Device("cuda")),)

        fast: bool = option("Whether it is fast.", default=False)

    assert order(Picky()) == ["picky"]
    assert_problem(problem_of(Picky(fast=True)), "requirement-missing 'picky' cuda")


def test_custom_requirement():
    class Full:
        def missing(self, plugin: Plugin, machine: Machine) -> str | None:
            return f"needs a full moon over the {machine.device}."

    problem = problem_of(make("a", requirements=(Full(),)))
    assert_problem(problem, "requirement-missing recipe: 'a' moon cpu")
    assert problem.proposals == ["--without a"]


# -- hooks that are written wrongly ------------------------------------------------------------------------------------


def test_a_misspelled_hook_is_refused():
    class Wrong(Plugin):
        name = "wrong"

        @hookimpl
        def after_stp(self) -> None: ...

    assert_problem(problem_of(Wrong()), "unknown-hook 'wrong': 'after_stp' 'after_step'")


def test_unknown_hook_argument_is_rejected():
    class Wrong(Plugin):
        name = "wrong"

        @hookimpl
        def after_step(self, run: Any, los: Any) -> None: ...

    assert_problem(problem_of(Wrong()), "unknown-argument 'wrong': after_step: 'los' 'loss'")


def test_hook_argument_with_default_is_rejected():
    class Default(Plugin):
        name = "default"

        @hookimpl
        def after_step(self, run: Any = None) -> None: ...

    class Keyword(Plugin):
        name = "keyword"

        @hookimpl
        def after_step(self, *, run: Any) -> None: ...

    for plugin in (Default(), Keyword()):
        assert_problem(problem_of(plugin), f"invalid-hook {plugin.name!r}: after_step: 'run'")


def test_invalid_wrapper_is_rejected():
    class Chain(Plugin):
        name = "chain"

        @hookimpl(wrapper=True)
        def before_prepare(self, model: Any) -> Any:
            return (yield)

    class Silent(Plugin):
        name = "silent"

        @hookimpl(wrapper=True)
        def after_fit(self) -> None:
            return None

    assert_problem(problem_of(Chain()), "invalid-hook 'chain' before_prepare")
    assert_problem(problem_of(Silent()), "invalid-hook 'silent': after_fit")
