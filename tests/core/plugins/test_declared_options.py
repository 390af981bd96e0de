"""Options that plugins declare as attributes of their class.

Modules:
    core/fastloop/plugins/declared_options.py
    core/fastloop/plugins/plugin.py
"""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
from pydantic import PositiveInt

from fastloop import Device, Plugin, PluginError, RecipeError, Strategy, When, hookimpl, option
from fastloop.cli.option_table import describe
from fastloop.plugins.declared_options import check_declared, options_of
from fastloop.plugins.plugin import listed_at
from fastloop.testing import expect_problem

if TYPE_CHECKING:
    from decimal import Decimal


class Warmth(Plugin):
    """Warms ``models`` a lot, by 20
    degrees. It takes a while.

    And more.
    """

    name = "warmth"
    degrees: float = option("How warm.", default=20.0, ge=0)
    where_to: str | list[str] = option("Rooms.")
    workers: PositiveInt | Literal["auto"] = option("Heaters.", default="auto")
    names: list[str] = option("Names.", default_factory=list)
    seen: Decimal | None = None  # no option, so its type may be imported for type checkers only


class Sauna(Warmth):
    """Is hotter."""

    name = "sauna"
    degrees: float = option("How hot.", default=90.0, ge=60)
    steam: bool = option("Add steam.", default=True)


def test_options_are_attributes_with_defaults():
    plugin = Warmth(where_to="attic", degrees=3)
    assert (plugin.degrees, plugin.where_to, plugin.workers, plugin.names) == (3.0, "attic", "auto", [])
    assert isinstance(plugin.degrees, float)
    assert plugin.names is not Warmth(where_to="attic").names
    assert plugin.option_values() == {"degrees": 3.0, "where_to": "attic", "workers": "auto", "names": []}
    assert repr(Warmth(where_to=["a"])) == "Warmth(degrees=20.0, where_to=['a'], workers='auto', names=[])"


def test_subclass_inherits_and_replaces_options():
    sauna = Sauna(where_to="shed")
    assert sauna.option_values() == {
        "degrees": 90.0,
        "where_to": "shed",
        "workers": "auto",
        "names": [],
        "steam": True,
    }
    assert Warmth(where_to="shed").degrees == 20.0
    with expect_problem("invalid-value sauna.degrees 3", RecipeError):
        Sauna(where_to="shed", degrees=3.0)


def test_description_is_the_first_sentence_of_the_docstring():
    assert Warmth.description == "Warms models a lot, by 20 degrees"
    assert Sauna.description == "Is hotter"
    with expect_problem("invalid-declaration Told.description", PluginError):
        type("Told", (Plugin,), {"description": "is told twice"})


@pytest.mark.parametrize(
    ("options", "expected"),
    {
        "unknown": ({"where_to": "a", "degree": 1.0}, "r.yaml: plugins.warmth.degree: no such option. Did you mean"),
        "missing": ({}, "r.yaml: plugins.warmth.where_to: missing"),
        "in a union": ({"where_to": 3}, "r.yaml: plugins.warmth.where_to: found 3 (int)"),
        "a choice": ({"where_to": "a", "workers": "aut"}, "r.yaml: plugins.warmth.workers: found 'aut' (str)"),
        "out of bounds": ({"where_to": "a", "degrees": -1.0}, "r.yaml: plugins.warmth.degrees: found -1.0 (float)"),
        "in a list": ({"where_to": "a", "names": ["a", 1]}, "r.yaml: plugins.warmth.names: found 1 (int)"),
        "on_error": ({"where_to": "a", "on_error": "disable"}, "r.yaml: plugins.warmth.on_error: "),
    }.values(),
)
def test_wrong_option_is_an_error_with_its_place(options, expected):
    with listed_at("r.yaml: plugins.warmth"), pytest.raises(RecipeError) as refused:
        Warmth(**options)
    assert str(refused.value).startswith(expected)


def test_only_read_only_plugins_have_the_option_on_error():
    class Watch(Plugin):
        name = "watch"
        read_only = True

    assert [row.name for row in describe(options_of(Watch))] == ["on_error"]
    assert Watch(on_error="disable").on_error == "disable"
    assert "on_error" not in [row.name for row in describe(options_of(Warmth))]
    assert Warmth(where_to="a").on_error == "raise"


def test_options_cannot_be_assigned_but_a_launcher_may_set_them():
    plugin = Warmth(where_to="attic")
    with expect_problem("option-assigned warmth.degrees", PluginError):
        plugin.degrees = 5.0
    assert plugin.degrees == 20.0
    plugin.set_option("degrees", 5.0)
    assert plugin.degrees == 5.0


def test_option_read_before_the_plugin_has_any_is_an_error_with_the_remedy():
    class Early(Plugin):
        name = "early"
        degrees: float = option("How warm.", default=20.0)

        def __init__(self, **options: Any) -> None:
            self.twice = 2 * self.degrees
            super().__init__(**options)

    with expect_problem("no-value-yet Early.degrees", PluginError):
        Early()


HOOKS = ("predict", "evaluate", "after_step")


@pytest.mark.parametrize("base", [Plugin, Strategy])
@pytest.mark.parametrize(
    "taken",
    ["name", "log", "error", "numerics", "where", "where_is", "option_values", "on_teardown", *HOOKS, "prepare"],
)
def test_option_with_the_name_of_an_attribute_or_hook_is_refused(base, taken):
    if taken == "where_is" or (taken == "prepare" and base is Plugin):
        type("Free", (base,), {"__annotations__": {taken: int}, taken: option("Any.", default=1)})
        return
    with expect_problem(f"invalid-declaration Taken.{taken}", PluginError):
        type("Taken", (base,), {"__annotations__": {taken: int}, taken: option("Any.", default=1)})


def test_key_gives_an_option_another_name_in_recipes():
    class Forecast(Plugin):
        name = "forecast"
        column: str = option("The column to predict.", default="text", key="predict")

    assert Forecast(predict="other").column == "other"
    assert Forecast().option_values() == {"predict": "text"}
    with expect_problem("unknown-option forecast.column", RecipeError):
        Forecast(column="other")
    with expect_problem("invalid-value forecast.predict 3", RecipeError):
        Forecast(predict=3)


@pytest.mark.parametrize("hidden", [3, property(lambda self: 3), lambda self: 3])
def test_attribute_that_hides_an_inherited_option_is_refused(hidden):
    with expect_problem("invalid-declaration Hiding.degrees 'degrees'", PluginError):
        type("Hiding", (Warmth,), {"degrees": hidden})


def test_option_without_a_type_is_refused():
    with expect_problem("invalid-declaration Untyped.degrees", PluginError):
        type("Untyped", (Plugin,), {"degrees": option("How warm.", default=1.0)})


def test_type_that_is_not_imported_is_an_error_with_the_remedy():
    class Precise(Plugin):
        name = "precise"
        degrees: Decimal | None = option("How warm.", default=None)

    with expect_problem("invalid-declaration 'Decimal' TYPE_CHECKING", PluginError):
        check_declared(Precise, "plugins.precise")


def test_default_that_all_plugins_would_share_is_refused():
    class Shared(Plugin):
        name = "shared"
        names: list[str] = option("Names.", default=[])

    with expect_problem("invalid-declaration default_factory", PluginError):
        Shared()


def test_condition_of_a_requirement_reads_the_plugin():
    need = When(lambda plugin: plugin.degrees > 50, Device("oven"))

    class Machine:
        device = "cpu"

    assert need.missing(Warmth(where_to="a"), Machine()) is None
    assert "oven" in str(need.missing(Sauna(where_to="a"), Machine()))


def test_plugin_can_be_pickled():
    again = pickle.loads(pickle.dumps(Sauna(where_to=["a", "b"], steam=False)))
    assert again.option_values() == Sauna(where_to=["a", "b"], steam=False).option_values()


def test_error_names_the_recipe_the_plugin_and_the_option():
    with listed_at("r.yaml: plugins.warmth"):
        plugin = Warmth(where_to="attic")
    assert str(plugin.error("where_to", "there is none.")) == "r.yaml: plugins.warmth.where_to: there is none."
    assert str(plugin.error("", "it is cold.")) == "r.yaml: plugins.warmth: it is cold."
    assert isinstance(plugin.error("where_to", ""), RecipeError)


def test_log_begins_with_the_name(caplog):
    with caplog.at_level(logging.INFO, "fastloop"):
        Warmth(where_to="attic").log.info("%d degrees", 20)
    assert [(record.name, record.getMessage()) for record in caplog.records] == [("fastloop", "warmth: 20 degrees")]


class Undoing(Plugin):
    """Records the calls of a run's end."""

    name = "undoing"
    read_only = True

    def __init__(self, calls: list[str], name: str = "undoing", fails: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.calls = calls
        self.name = name  # type: ignore[misc]
        self.fails = fails

    @hookimpl
    def before_fit(self) -> None:
        for call in ("first", "second", "third"):
            self.on_teardown(self.record, call)
        if self.fails == "before_fit":
            raise RuntimeError("it is cold")

    def record(self, call: str) -> None:
        if self.fails == call:
            raise RuntimeError("it is cold")
        self.calls.append(f"{self.name} {call}")

    @hookimpl
    def teardown(self) -> None:
        self.calls.append(f"{self.name} teardown")


TEARDOWN = ["a teardown", "b teardown"]
UNDONE = ["b third", "b second", "b first", "a third", "a second", "a first"]


@pytest.mark.parametrize("fails", ["", "before_fit", "second"])
def test_on_teardown_undoes_in_reverse_order_after_the_hooks(tiny_run, fails):
    calls: list[str] = []
    plugins = [Undoing(calls, "a"), Undoing(calls, "b", fails)]
    if fails:
        with pytest.raises(Exception, match="it is cold"):
            tiny_run(plugins)
    else:
        tiny_run(plugins)
    assert calls == TEARDOWN + [call for call in UNDONE if call != f"b {fails}"]


def test_failing_undo_of_a_plugin_that_may_be_disabled_does_not_fail_the_run(tiny_run):
    calls: list[str] = []
    result = tiny_run([Undoing(calls, "a", "second", on_error="disable")])
    assert result.summary["status"] == "completed"
    assert calls == ["a teardown", "a third", "a first"]


def test_plugin_of_a_file_declares_options(tmp_path):
    from fastloop.plugins.resolve import resolve
    from fastloop.recipe import load_recipe

    Path(tmp_path, "warm.py").write_text(
        "from __future__ import annotations\nfrom fastloop import Plugin, option\n\n"
        "class Warm(Plugin):\n    '''Warms.'''\n    name = 'warm'\n"
        "    degrees: float | None = option('How warm.', default=None, ge=0)\n"
    )
    Path(tmp_path, "r.yaml").write_text("extends: quickstart\nplugins:\n  - ./warm.py: {degrees: 3}\n")
    plugins = resolve(load_recipe(str(tmp_path / "r.yaml")), any_machine=True).plugins
    (plugin,) = [plugin for plugin in plugins if plugin.name == "warm"]
    assert plugin.degrees == 3.0
    assert plugin.description == "Warms"
