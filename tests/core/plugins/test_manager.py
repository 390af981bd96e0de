"""The hooks of a run: chains, and errors that name the plugin that raised them.

Modules:
    core/fastloop/core_modules.py
    core/fastloop/plugins/call.py
    core/fastloop/plugins/manager.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fastloop
from fastloop import Plugin, PluginCrash, PluginError, hookimpl
from fastloop.core_modules import MODULES
from fastloop.plugins.installed import load
from fastloop.plugins.manager import PluginSet
from fastloop.testing import assert_problem, expect_problem

pytest_plugins = ["installing"]

COLD = """
from fastloop import Plugin, hookimpl

class Warmth(Plugin):
    name = "warmth"

    @hookimpl
    def after_fit(self):
        raise KeyError("cold")
"""


def make(name: str, **members: Any) -> Plugin:
    """An object of a new plugin class."""
    return type(name.title(), (Plugin,), {"name": name, **members})()


def test_chain_hook_passes_result_to_next_plugin():
    seen = []

    def link(name: str, result: str | None) -> Plugin:
        @hookimpl
        def before_prepare(self: Plugin, model: str) -> str | None:
            seen.append((self.name, model))
            return result

        return make(name, before_prepare=before_prepare)

    plugins = PluginSet([link("a", "second"), link("b", None), link("c", "third")])
    assert plugins.chain("before_prepare", "first", run=None) == "third"
    assert seen == [("a", "first"), ("b", "second"), ("c", "second")]


# -- errors ------------------------------------------------------------------------------------------------------------


def blamed(hook: str, *plugins: Plugin, **arguments: Any) -> PluginCrash | None:
    resolution = PluginSet(list(plugins))
    with pytest.raises(Exception) as failed:
        getattr(resolution.hooks, hook)(**arguments)
    return resolution.attribute_error(failed.value)


def deep(depth: int) -> None:
    if depth == 0:
        raise ValueError("broken")
    deep(depth - 1)


class Broken(Plugin):
    name = "broken"

    @hookimpl
    def before_epoch(self) -> None:
        deep(5)

    @hookimpl
    @torch.no_grad()
    def evaluate(self) -> None:
        deep(1)


class Around(Plugin):
    name = "around"

    @hookimpl(wrapper=True)
    def evaluate(self) -> Iterator[None]:
        return (yield)


class Decorated(Plugin):
    name = "decorated"

    @hookimpl
    @torch.no_grad()
    def after_epoch(self) -> None: ...

    @hookimpl
    @torch.no_grad()
    def after_fit(self) -> None: ...


def test_an_error_in_a_plugin_names_plugin_hook_and_error():
    crash = blamed("before_epoch", make("other"), Broken(), run=None)
    assert_problem(crash.problem, f"plugin-crashed 'broken' ({__name__}) before_epoch: ValueError: broken")
    assert isinstance(crash.__cause__, ValueError)
    assert crash.exit_code == 1


def test_the_distribution_of_an_installed_plugin_is_named(install):
    install("warm-pack", COLD, warmth="warm_pack:Warmth")
    assert_problem(
        blamed("after_fit", load("warmth")(), run=None).problem, "plugin-crashed 'warmth' 1.2 after_fit KeyError"
    )


def test_wrapper_is_not_named_for_error_it_passes_on():
    for plugins in ([Around(), Broken()], [Broken(), Around()]):
        assert "plugin 'broken' (" in str(blamed("evaluate", *plugins, run=None, split="validation"))
    assert blamed("evaluate", Around(), run=None, split="validation") is None  # the core's own loop fails without a run


def test_wrapper_is_named_for_its_own_error():
    class Before(Plugin):
        name = "before"

        @hookimpl(wrapper=True)
        def evaluate(self) -> Iterator[None]:
            deep(1)
            return (yield)

    class After(Plugin):
        name = "after"

        @hookimpl(wrapper=True)
        def evaluate(self) -> Iterator[None]:
            yield
            deep(1)

    class Answer(Plugin):
        name = "answer"

        @hookimpl
        def evaluate(self) -> dict[str, float]:
            return {}

    assert "plugin 'before' (" in str(blamed("evaluate", Before(), Answer(), run=None, split="validation"))
    assert "plugin 'after' (" in str(blamed("evaluate", After(), Answer(), run=None, split="validation"))


def test_decorated_hook_is_not_named_for_error_of_another():
    assert "plugin 'broken' (" in str(blamed("evaluate", Broken(), Decorated(), run=None, split="validation"))
    # the core's own loop is under no_grad too
    assert blamed("evaluate", Decorated(), run=None, split="validation") is None


def test_inherited_hook_error_names_the_failing_plugin():
    class Base(Plugin):
        @hookimpl
        def after_fit(self) -> None:
            if self.name == "second":
                deep(1)

    first, second, third = (type(name, (Base,), {"name": name})() for name in ("first", "second", "third"))
    assert "plugin 'second' (" in str(blamed("after_fit", first, second, third, run=None))


def test_error_outside_plugins_names_no_plugin():
    with pytest.raises(ValueError) as failed:
        deep(3)
    assert PluginSet([Broken(), Around()]).attribute_error(failed.value) is None


def test_run_error_names_the_plugin(tiny_run):
    with expect_problem("plugin-crashed 'broken' before_epoch ValueError", PluginCrash):
        tiny_run([Broken()])


@pytest.mark.parametrize(
    ("hook", "error"),
    [*((hook, ValueError) for hook in ("check_recipe", "build_scheduler", "before_prepare")), ("load_state", OSError)],
)
def test_build_or_load_error_names_the_plugin(tiny_run, hook, error):
    def fails(self: Any) -> None:
        raise error("on purpose")

    def saves(self: Any) -> dict[str, int]:
        return {"a": 1}

    plain = type("Plain", (Plugin,), {"name": "early", "save_state": hookimpl(saves)})
    broken = type("Broken", (plain,), {hook: hookimpl(fails)})
    tiny_run([plain()], epochs=1, output="run")
    with expect_problem(f"plugin-crashed 'early' {hook}: {error.__name__}: on purpose", PluginCrash):
        tiny_run([broken()], epochs=1, output="run", resume=True)


def test_unsaveable_state_error_names_the_plugin(tiny_run):
    class Odd(Plugin):
        name = "odd"

        @hookimpl
        def save_state(self) -> dict[str, object]:
            return {"what": object()}

    with expect_problem("invalid-state save_state state.plugins.odd.what", PluginError):
        tiny_run([Odd()], epochs=1)


def test_a_run_registers_each_module_of_the_core_with_a_hook():
    folder = Path(fastloop.__file__).parent
    names = set()
    for file in folder.rglob("*.py"):
        if re.search(r"^@hookimpl\b", file.read_text(encoding="utf-8"), re.MULTILINE):
            names.add(".".join(("fastloop", *file.relative_to(folder).with_suffix("").parts)))
    assert {module.__name__ for module in MODULES} == names
