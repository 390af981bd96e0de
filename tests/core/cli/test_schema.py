"""The JSON Schema of recipes says of a file what `fastloop plan` says of it.

Modules:
    core/fastloop/cli/recipe_schema.py
    core/fastloop/cli/schema.py
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from omegaconf import OmegaConf

from fastloop.cli.option_table import describe
from fastloop.cli.recipe_schema import recipe_schema
from fastloop.cli.schema import schema as command
from fastloop.errors import UsageError
from fastloop.plugins.declared_options import options_of
from fastloop.plugins.installed import installed, is_own, load
from fastloop.recipe import SECTIONS, Train, shipped_recipes
from fastloop.testing import expect_problem
from fastloop_tools.plan.command import plan

OURS = [name for name, point in installed().items() if is_own(point)]
FINE = """
model: {module: "net.py:net"}
data: {module: "net.py:data"}
plugins:
  - module: {loss: cross_entropy}
"""


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    made, problems = recipe_schema()
    assert problems == []
    return made


def refusals(schema: dict[str, Any], text: str) -> list[str]:
    tree = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    return [error.message for error in Draft202012Validator(schema).iter_errors(tree)]


def test_schema_is_valid_and_lists_plugins(schema):
    Draft202012Validator.check_schema(schema)
    assert set(schema["properties"]) == {*SECTIONS, "extends"}
    train = schema["$defs"]["train"]["properties"]
    assert [(row.name, row.help) for row in describe(Train)] == [
        (name, value["description"]) for name, value in train.items()
    ]
    assert train["seed"]["anyOf"][0] == {"type": "integer", "minimum": 0, "exclusiveMaximum": 2**32}
    assert train["lr"]["default"] == 5e-5


@pytest.mark.parametrize("name", OURS)
def test_it_has_every_option_of_every_plugin(schema, name):
    options, cls = schema["$defs"][f"plugins.{name}"]["properties"], load(name)
    rows = describe(options_of(cls))
    assert {row.name: row.help for row in rows} == {key: value["description"] for key, value in options.items()}


@pytest.mark.parametrize("name", [name for name in OURS if load(name).slot == "task"])
def test_schema_of_tasks_lists_data_keys(schema, name):
    for section, keys in load(name).sections.items():
        (mine,) = [
            made
            for key, made in schema["$defs"].items()
            if key.startswith(f"{section}.") and name in made["description"]
        ]
        assert list(mine["properties"]) == [row.name for row in describe(keys)]
    assert set(load(name).sections) == {"model", "data"}


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_shipped_recipes_match_schema(schema, name):
    assert refusals(schema, shipped_recipes()[name].read_text()) == []


@pytest.mark.parametrize("name", OURS)
def test_docstring_recipes_match_schema(schema, name):
    doc = inspect.cleandoc(inspect.getmodule(load(name)).__doc__ or "")
    (snippet,) = re.findall(r"(?m)^(?:    .*\n)+(?=\n)", doc + "\n\n")[:1]
    assert f"- {name}" in snippet
    assert refusals(schema, textwrap.dedent(snippet)) == []


@pytest.mark.parametrize(
    "change",
    [
        "train:",
        "train: {lr: '${model.arguments.rate}'}\nmodel: {module: 'net.py:net', arguments: {rate: 0.1}}",
        "train: {evaluate_every: 10, save_every: null}",
        "train: {on_save_error: stop, on_data_change: warn}",
        "train: {lr: 1}",
        "plugins: [ema, {module: {loss: cross_entropy}}, {log: }, {progress: false}]",
        "plugins: [{module: {loss: cross_entropy}}, {dataloader-workers: {num_workers: 0}}]",
        "output: null",
    ],
)
def test_schema_accepts_valid_recipes(schema, change):
    Path("net.py").write_text("def net(rate=0): ...\ndef data(): ...\n")
    OmegaConf.save(OmegaConf.merge(OmegaConf.create(FINE), OmegaConf.create(change)), "recipe.yaml")
    assert refusals(schema, Path("recipe.yaml").read_text()) == []
    plan("recipe.yaml")


@pytest.mark.parametrize(
    "change",
    [
        "training: {lr: 0.1}",
        "train: {learning_rate: 0.1}",
        "train: {lr: 0}",
        "train: {lr: fast}",
        "train: {batch_size: 1.5}",
        "train: {epochs: true}",
        "train: {evaluate_every: never}",
        "train: {on_save_error: ignore}",
        "train: {on_data_change: yes}",
        "train: [1]",
        "model: {modul: 'net.py:net'}",
        "model: net.py",
        "data: {module: 'net.py:data', arguments: 3}",
        "plugins: [amp2]",
        "plugins: [{module: {loss: cross_entropy}}, {amp: {dtype: fp12}}]",
        "plugins: [{module: {loss: cross_entropy}}, {amp: {dtipe: bf16}}]",
        "plugins: [{module: {loss: cross_entropy}}, {ema: {decay: 1.5}}]",
        "plugins: [{module: {loss: cross_entropy}}, {dataloader-workers: {num_workers: -1}}]",
        "plugins: [{module: {loss: cross_entropy}}, {amp: bf16}]",
        "plugins: [{module: {loss: cross_entropy}, amp: {}}]",
        "plugins: [3]",
        "plugins: amp",
        "output: 3",
    ],
)
def test_schema_rejects_only_what_plan_rejects(schema, change):
    Path("net.py").write_text("def net(): ...\ndef data(): ...\n")
    merged = OmegaConf.merge(OmegaConf.create(FINE), {}).copy()
    for key, value in OmegaConf.create(change).items():
        merged[key] = value
    OmegaConf.save(merged, "recipe.yaml")
    assert refusals(schema, Path("recipe.yaml").read_text())
    with pytest.raises(UsageError):
        plan("recipe.yaml")


@pytest.mark.parametrize("listed", ["./mine.py", "plugins/mine.py:Second", "warm-pack:warmth"])
def test_schema_allows_third_party_options_and_sections(schema, listed):
    assert refusals(schema, f"model: {{warm: 3}}\nplugins: [{{'{listed}': {{a: 1}}}}]") == []
    assert refusals(schema, f"model: {{warm: 3}}\nplugins: ['{listed}']") == []
    assert refusals(schema, "model: {warm: 3}\nextends: base.yaml") == []
    assert refusals(schema, "model: {warm: 3}\nplugins: [amp]")


WARMTH = """
from fastloop import Plugin, option

class Warmth(Plugin):
    '''Keeps it warm.'''
    name = "warmth"

    degrees: float = option("How warm.", default=20.0, ge=0)
"""


@pytest.fixture
def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs a distribution with the plugin ``warmth`` and one that fails on import."""
    site = tmp_path / "site"
    metadata = site / "warm_pack-1.2.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: warm-pack\nVersion: 1.2\n")
    (metadata / "entry_points.txt").write_text(
        "[fastloop.plugins]\nwarmth = warm_pack:Warmth\nfrost = cold_pack:Frost\n"
    )
    (site / "warm_pack.py").write_text(WARMTH)
    (site / "cold_pack.py").write_text("raise OSError('too cold')\n")
    monkeypatch.syspath_prepend(site)
    yield
    sys.modules.pop("warm_pack", None)


@pytest.mark.usefixtures("others")
def test_other_packages_are_imported_only_when_asked_for(capsys):
    command(None)
    printed = capsys.readouterr()
    made = json.loads(printed.out)
    assert "warm_pack" not in sys.modules
    assert printed.err == ""
    assert refusals(made, "plugins: [warmth, frost, {warmth: {degrees: -1}}]") == []
    assert refusals(made, "model: {warm: 3}\nplugins: [warmth]") == []  # it may be a task

    command(Path("made.json"), every=True)
    printed = capsys.readouterr()
    made = json.loads(Path("made.json").read_text())
    assert printed.out == ""
    assert printed.err.startswith(
        "frost is left out: PluginError: plugins: plugin 'frost' (cold_pack:Frost of warm-pack 1.2) cannot be imported"
    )
    assert refusals(made, "plugins: [{warmth: {degrees: 3}}]") == []
    assert refusals(made, "plugins: [{warmth: {degrees: -1}}]")
    assert refusals(made, "plugins: [frost]")
    assert made["$defs"]["plugins.warmth"]["description"] == "Keeps it warm."


def test_schema_reports_unwritable_file():
    with expect_problem("file-not-writable --output", UsageError):
        command(Path("nowhere/made.json"))


@pytest.mark.slow
def test_schema_imports_no_torch():
    code = (
        "import sys; from fastloop.cli.recipe_schema import recipe_schema; recipe_schema(); print('torch' in "
        "sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600).stdout
        == "False\n"
    )
