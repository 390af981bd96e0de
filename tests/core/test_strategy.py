"""``Strategy``: the plugin in the slot ``strategy``, its errors, and how it is listed.

``test_hooks`` computes norms and clips.

Modules:
    core/fastloop/strategy.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fastloop import Plugin, PluginCrash, PluginError, Strategy, hookimpl
from fastloop.cli.plugins import listing
from fastloop.plugins.installed import entry_points
from fastloop.plugins.manager import PluginSet
from fastloop.plugins.plugin import NOT_DECLARED
from fastloop.strategy import METHODS, method_that_raised
from fastloop.testing import expect_problem


def test_a_run_without_a_strategy_has_the_default(tiny_run):
    run = tiny_run(epochs=1).trainer.run
    assert type(run.strategy) is Strategy
    assert run.plugins.in_slot("strategy") is None


def test_the_default_methods_inherited_by_a_plugin_change_nothing(tiny_run):
    class Inherits(Strategy):
        name = "inherits"

    plain, result = tiny_run(max_grad_norm=0.1), tiny_run([inherits := Inherits()], max_grad_norm=0.1)
    assert result.trainer.run.strategy is inherits
    assert result.losses == plain.losses
    assert all(torch.equal(result.weights[name], plain.weights[name]) for name in plain.weights)


class Fails(Strategy):
    """Raises in one method."""

    name = "fails"

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method

    def backward(self, run: Any, loss: Any) -> None:
        self.act("backward", run, loss)

    def optimizer_state(self, run: Any) -> Any:
        return self.act("optimizer_state", run)

    def prepare(self, run: Any, model: Any, optimizer: Any) -> Any:
        return self.act("prepare", run, model, optimizer)

    def act(self, method: str, run: Any, *arguments: Any) -> Any:
        if method == self.method:
            raise KeyError("broken")
        return getattr(Strategy, method)(self, run, *arguments)


@pytest.mark.parametrize("method", ["prepare", "backward", "optimizer_state"])
def test_an_error_names_the_strategy_and_its_method(tiny_run, method):
    with expect_problem(f"plugin-crashed 'fails' KeyError 'broken' {method}", PluginCrash):
        tiny_run([Fails(method)])


def test_an_error_of_unsharded_is_the_strategys():
    class Gathers(Strategy):
        name = "gathers"

        @contextmanager
        def unsharded(self, run: Any) -> Iterator[None]:
            raise KeyError("broken")
            yield

    strategy = Gathers()
    with pytest.raises(KeyError) as raised, strategy.unsharded(None):
        pass
    assert method_that_raised(strategy, raised.value) == "unsharded"


@pytest.mark.slow
def test_an_error_of_the_core_below_a_method_is_not_the_strategys(tiny_run):
    class Calls(Strategy):
        name = "calls"

        def backward(self, run: Any, loss: Any) -> None:
            super().backward(run, loss.detach())  # a tensor without a graph: torch raises in the core's method

    with pytest.raises(RuntimeError, match="does not require grad") as raised:
        tiny_run([Calls()])
    assert not isinstance(raised.value, PluginCrash)


@pytest.mark.slow
def test_a_hook_that_a_strategys_method_calls_is_named(tiny_run):
    class Breaks(Plugin):
        name = "breaks"

        @hookimpl
        def before_step(self) -> None:
            raise KeyError("broken")

    class Calls(Strategy):
        name = "calls"

        def backward(self, run: Any, loss: Any) -> None:
            super().backward(run, loss)

    with expect_problem("plugin-crashed 'breaks' before_step", PluginCrash):
        tiny_run([Calls(), Breaks()])


@pytest.mark.parametrize("result", [None, (torch.nn.Linear(1, 1),), (1, 2)])
def test_prepare_must_return_a_model_and_an_optimizer(tiny_run, result):
    class Wrong(Strategy):
        name = "wrong"

        def prepare(self, run: Any, model: Any, optimizer: Any) -> Any:
            return result

    found = type(result).__name__
    with expect_problem(f"wrong-result 'wrong' {found}", PluginError):
        tiny_run([Wrong()])


def test_a_plugin_in_the_slot_that_is_no_strategy_is_refused(tiny_run):
    class Claims(Plugin):
        name, slot = "claims", "strategy"

    class Elsewhere(Strategy):
        name, slot = "elsewhere", "task"

    for plugin in (Claims(), Elsewhere()):
        with expect_problem(f"invalid-declaration {plugin.name!r} {plugin.slot!r} fastloop.Strategy", PluginError):
            tiny_run([plugin])


@pytest.mark.parametrize(
    ("overridden", "inherited"), [("clip_gradients", "gradient_norm"), ("gradient_norm", "clip_gradients")]
)
def test_a_strategy_that_overrides_one_of_norm_and_clipping_is_refused(tiny_run, overridden, inherited):
    class Own(Strategy):
        name = "own"

    class Derived(Own):
        """Inherits all methods."""

    setattr(Own, overridden, lambda self, *arguments: getattr(Strategy, overridden)(self, *arguments))
    for cls in (Own, Derived):
        with expect_problem(f"method-not-overridden 'own' Own {overridden} {inherited} super()", PluginError):
            tiny_run([cls()])
    setattr(Own, inherited, lambda self, *arguments: getattr(Strategy, inherited)(self, *arguments))
    tiny_run([Derived()], max_steps=1, max_grad_norm=0.1)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_is_marked_as_a_hook_is_refused(method):
    plugin = type("Marked", (Plugin,), {"name": "marked", method: hookimpl(lambda self: None)})()
    with expect_problem(f"unknown-hook 'marked' '{method}' fastloop.Strategy @hookimpl", PluginError):
        PluginSet([plugin]).hooks  # noqa: B018


def test_a_strategy_is_listed_with_its_slot_without_being_imported(monkeypatch, tmp_path, cli):
    package = tmp_path / "halves-1.0.dist-info"
    package.mkdir()
    Path(tmp_path, "halves.py").write_text(
        '"""Halves."""\nfrom fastloop import Strategy\nraise SystemExit("imported")\nclass Halves(Strategy):\n    name '
        '= "halves"\n'
    )
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: halves\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[fastloop.plugins]\nhalves = halves:Halves\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    code, out, _ = cli("plugins", "--json")
    (row,) = (row for row in json.loads(out) if row["name"] == "halves")
    assert (code, row["slot"], row["numerics"], "halves" in sys.modules) == (0, "strategy", NOT_DECLARED, False)
    assert listing("ddp", entry_points("fastloop.plugins")["ddp"]).slot == "strategy"
