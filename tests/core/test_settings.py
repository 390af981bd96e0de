"""``Settings``: what plugins set in ``configure``, who set it, and conflicts.

Modules:
    core/fastloop/settings.py
"""

from __future__ import annotations

from typing import Any

from fastloop import Plugin, PluginError, Settings, hookimpl
from fastloop.plugins.resolve import resolve
from fastloop.recipe import Recipe, make_recipe
from fastloop.runtime.hardware import Machine
from fastloop.testing import expect_problem

CPU = Machine("cpu", "AVX2", ("fp32", "bf16"))


def make(name: str, configure: Any) -> Plugin:
    """An object of a new plugin class that implements ``configure``."""
    return type(name.title(), (Plugin,), {"name": name, "configure": hookimpl(configure)})()


def writer(name: str, **values: Any) -> Plugin:
    return make(name, lambda self: values)


def configured(*plugins: Plugin, data: dict[str, Any] | None = None, **train: Any) -> Settings:
    given = make_recipe({"data": data or {}, "train": train})
    return resolve(given, CPU, plugins).plugins.configure(given)


def test_two_plugins_that_set_one_field_are_refused_by_name():
    with expect_problem("conflicting-values 'a' 'b' num_workers", PluginError):
        configured(writer("a", num_workers=2), writer("b", pin_memory=True, num_workers=2))


def test_settings_record_who_set_them_and_reject_unknown_names():
    settings = configured(writer("a", num_workers=2), writer("b", pin_memory=True), data={"pad_to_multiple_of": 8})
    assert settings.writers == {"num_workers": "a", "pin_memory": "b"}
    assert (settings.num_workers, settings.pin_memory, settings.pad_to_multiple_of) == (2, True, 8)
    assert Settings().num_workers == 0  # each run has its own
    with expect_problem("unknown-setting 'a' 'num_worker' 'num_workers'", PluginError):
        configured(writer("a", num_worker=2))
    with expect_problem("unknown-setting 'a' 'writers'", PluginError):
        configured(writer("a", writers=2))
    with expect_problem("wrong-result 'a'", PluginError):
        configured(writer("a", optimizer="fused"))


def test_values_for_a_split_yield_to_those_of_another_plugin_in_any_order():
    own = {"train": {"num_workers": 2, "timeout": 9.0}, "test": {"num_workers": 3}}
    task, sets = writer("task", by_split=own), writer("sets", num_workers=1)
    for plugins in ((task, sets), (sets, task)):
        settings = configured(*plugins)
        assert (settings.num_workers, settings.timeout) == (1, 9.0)
        assert [settings.of(split)["num_workers"] for split in ("train", "test", "validation")] == [1, 1, 1]
    settings = configured(task)
    assert settings.num_workers == 2
    assert [settings.of(split)["num_workers"] for split in ("train", "test", "validation")] == [2, 3, 2]
    assert settings.writers == {"by_split['train']": "task", "by_split['test']": "task"}


def test_a_plugin_reads_the_settings_so_far():
    def configure(self: Plugin, recipe: Recipe, settings: Settings) -> dict[str, Any] | None:
        return {"pad_to_multiple_of": 64} if settings.pad_to_multiple_of is None else None

    weak = [make(name, configure) for name in "ab"]
    assert configured(*weak).writers == {"pad_to_multiple_of": "a"}
    assert configured(*weak, data={"pad_to_multiple_of": 8}).pad_to_multiple_of == 8


def test_mappings_of_two_plugins_merge_by_key():
    settings = configured(writer("a", optimizer={"fused": True}), writer("b", optimizer={"maximize": False}))
    assert settings.optimizer == {"fused": True, "maximize": False}
    assert settings.writers == {"optimizer['fused']": "a", "optimizer['maximize']": "b"}
    own = {"name": "AdamW", "fused": True}
    for plugins, names, train in (
        (("a", "b"), "'a' 'b'", {}),
        (("b",), "'train.optimizer' 'b'", {"optimizer": own}),
    ):
        with expect_problem(f"conflicting-values recipe: {names} optimizer['fused']", PluginError):
            configured(*(writer(name, optimizer={"fused": name == "a"}) for name in plugins), **train)


def test_a_conflict_of_settings_names_the_recipe(tmp_path):
    (tmp_path / "two.py").write_text(
        "from fastloop import Plugin, hookimpl\n\n"
        + "\n\n".join(
            f"class {name.upper()}(Plugin):\n    name = '{name}'\n\n    @hookimpl\n"
            f"    def configure(self):\n        return {{'optimizer': {{'fused': True}}}}\n"
            for name in "ab"
        )
    )
    listed = make_recipe({"plugins": [f"{tmp_path}/two.py:A", f"{tmp_path}/two.py:B"]}, tmp_path / "r.yaml")
    with expect_problem("conflicting-values r.yaml 'a' 'b' optimizer['fused']", PluginError):
        resolve(listed, CPU).plugins.configure(listed)
