"""Recipes: how files, overrides and plugins are merged, and the errors if they cannot be.

Modules:
    core/fastloop/recipe/interpolation.py
    core/fastloop/recipe/loading.py
    core/fastloop/recipe/other_names.py
    core/fastloop/recipe/overrides.py
    core/fastloop/recipe/paths.py
    core/fastloop/recipe/plugin_references.py
    core/fastloop/recipe/recipe.py
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastloop import Problem, RecipeError
from fastloop.plugins.installed import installed
from fastloop.recipe import Train, find_recipe, load_recipe, make_recipe, shipped_recipes
from fastloop.recipe.other_names import IN_TRAIN
from fastloop.testing import assert_problem, expect_problem

BASE = """
model: {name: small, config: {layers: 2, width: 8}}
train: {epochs: 2, lr: 1e-3}
plugins:
  - amp: {dtype: bf16}
  - log: false
  - module: {loss: mse, metrics: {accuracy: {type: Accuracy, top_k: 1}}}
  - ema
output: runs/base
"""


def write(text: str, name: str = "r.yaml") -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)
    return name


def problem_of(name: str, *arguments: object, **options: object) -> Problem:
    with pytest.raises(RecipeError) as refused:
        load_recipe(name, *arguments, **options)  # type: ignore[arg-type]
    return refused.value.problem


# -- reading -----------------------------------------------------------------------------------------------------------


def test_a_file_becomes_a_typed_recipe():
    recipe = load_recipe(write(BASE))
    assert (recipe.train.epochs, recipe.train.lr, recipe.train.batch_size) == (2, 1e-3, 32)
    assert list(recipe.plugins) == ["amp", "log", "module", "ema"]
    assert recipe.plugins["ema"] == {}
    assert recipe.plugins["log"] is False
    assert recipe.output == "runs/base"
    assert recipe.source == Path("r.yaml")


def test_the_output_is_named_after_the_file_when_it_is_not_given():
    assert load_recipe(write("train: {epochs: 1}", "deep/mine.yaml")).output == "runs/mine"


UNREADABLE = {
    "indentation": ("train:\n  epochs: 2\n lr: 1\n", "invalid-yaml r.yaml, line 3: YAML"),
    "a tab": ("train:\n\tepochs: 2\n", "invalid-yaml r.yaml, line 2: YAML"),
    "a key twice": ("train: {epochs: 2}\ntrain: {lr: 1}\n", "repeated-key r.yaml, line 2: 'train' line 1"),
    "code": (
        "model: {name: !!python/object/apply:os.getcwd []}",
        "yaml-tag r.yaml, line 1: !!python/object/apply:os.getcwd",
    ),
    "nothing": ("", "wrong-type r.yaml: model, data, train, plugins, output"),
    "a list": ("- train", "wrong-type r.yaml:"),
    "a number": ("3", "wrong-type r.yaml:"),
    "half an interpolation": ("output: ${train.", "wrong-format r.yaml: output: '${train.'"),
}


@pytest.mark.parametrize(("text", "expected"), UNREADABLE.values(), ids=UNREADABLE.keys())
def test_unreadable_recipe_error_has_file_and_line(text, expected):
    with expect_problem(expected, RecipeError) as refused:
        load_recipe(write(text))
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_text_is_refused():
    Path("r.yaml").write_bytes(b"\xff\xfe\x00train")
    assert_problem(problem_of("r.yaml"), "file-unreadable r.yaml")


WRONG = {
    "unknown section": ("trian: {}", "unknown-section r.yaml: trian: 'train'"),
    "model as a name": ("model: small", "wrong-type r.yaml: model: 'small' {name:"),
    "train as a list": ("train: [1]", "wrong-type r.yaml: train: [1] list"),
    "unknown key": ("train: {epoch: 1}", "unknown-option r.yaml: train.epoch: 'epochs'"),
    "key of another trainer": (
        "train: {per_device_train_batch_size: 8}",
        "unknown-option r.yaml: train.per_device_train_batch_size: train.batch_size train.micro_batch_size",
    ),
    "output as a mapping": ("output: {a: 1}", "wrong-type r.yaml: output: {'a': 1}"),
    "output as a URL": ("output: s3://a/b", "wrong-type r.yaml: output: 's3://a/b'"),
    "plugins as a word": ("plugins: amp", "wrong-type r.yaml: plugins: 'amp'"),
    "a plugin twice": ("plugins: [amp, ema, {amp: {dtype: bf16}}]", "listed-twice r.yaml: plugins: 'amp'"),
    "a plugin as a number": ("plugins: [amp, 3]", "wrong-type r.yaml: plugins[1]: 3"),
    "two plugins in one entry": (
        "plugins: [{amp: {}, ema: {}}]",
        "wrong-type r.yaml: plugins[0]: {'amp': {}, 'ema': {}}",
    ),
    "options as a word": ("plugins: [{amp: bf16}]", "wrong-type r.yaml: plugins.amp: 'bf16' false"),
    "a value to fill in": ("model: {name: '???'}", "missing-value r.yaml: model.name: '???'"),
    "a value to fill in, named before": (
        "data: {text: '${data.files[0]}', files: ['???']}\noutput: ${nothing}",
        "missing-value r.yaml: data.files[0]: '???'",
    ),
    "all values to fill in": (
        "model: {name: '???'}\ndata: {files: '???', label: '???'}\nplugins: [{ema: {decay: '???'}}]",
        "missing-value r.yaml: data.files data.label model.name plugins.ema.decay: '???'",
    ),
}


@pytest.mark.parametrize(("text", "expected"), WRONG.values(), ids=WRONG.keys())
def test_invalid_value_error_has_file_and_key(text, expected):
    with expect_problem(expected, RecipeError):
        load_recipe(write(text))


def test_keys_of_other_trainers_are_replaced_by_keys_and_plugins_that_exist():
    keys = {field.name for field in dataclasses.fields(Train)}
    assert not keys & IN_TRAIN.keys()
    for remedy in IN_TRAIN.values():
        assert set(re.findall(r"train\.(\w+)", remedy)) <= keys
        plugins = re.findall(r"List the plugin ([\w-]+)", remedy)
        assert set(plugins) <= installed().keys()


# -- interpolation -----------------------------------------------------------------------------------------------------


def test_a_key_may_stand_for_another_keys_value():
    recipe = load_recipe(
        write(
            "train: {seed: 7}\nplugins: [{progress: {every: '${train.seed}'}}]\noutput: "
            "runs/${train.seed}-${train.lr}\n"
        ),
        ["train.lr=0.5"],
    )
    assert recipe.output == "runs/7-0.5"
    assert recipe.plugins["progress"] == {"every": 7}


@pytest.mark.parametrize(
    "text", ["${oc.env:HOME}", "a/${oc.env:HOME}/b", "${ oc.env : HOME }", "${${data.r}:HOME}", "${oc.decode:1}"]
)
def test_a_recipe_reads_nothing_but_itself(text, monkeypatch):
    monkeypatch.setenv("HOME", "/secret")
    name = write(yaml.safe_dump({"data": {"r": "oc.env", "deep": [{"path": text}]}}))
    problem = problem_of(name)
    assert_problem(problem, "wrong-format r.yaml data.deep[0].path")
    assert "secret" not in str(problem)
    assert_problem(problem_of(write("train: {epochs: 1}"), [f"output={text}"]), "wrong-format output")


def test_dangling_interpolations_are_rejected():
    for text, place in (
        ("output: ${train.nothing}", "output: '${train.nothing}'"),
        ("output: ${output}", "output: '${output}'"),
        ("output: ${..x}", "output: '${..x}'"),
        ("data: {files: {train: '${data.files}'}}", "data.files.train: '${data.files}'"),
        ("data: {label: ['${data.label[5]}']}", "data.label[0]: '${data.label[5]}'"),
        ("data: {a.b: '${data.text.x}', text: 3}", "data.a.b: '${data.text.x}'"),
    ):
        problem = problem_of(write(text))
        assert_problem(problem, f"unresolved-interpolation r.yaml: {place}")
        assert problem.remedy


def test_a_backslash_keeps_an_interpolation_as_text():
    assert load_recipe(write("data: {prompt: '\\${name}'}")).data == {"prompt": "${name}"}


OTHER_KINDS = {
    "a mapping": ("data.label={x: 1}", "data.label", ["data.label=null", "data.label={x: 1}"]),
    "a list": ("data.files=[a.csv]", "data.files", ["data.files=null", "data.files=[a.csv]"]),
    "a section": ("data={files: [a.csv]}", "data.files", ["data.files=null", "data={files: [a.csv]}"]),
    "a key with a dot": ("data.a\\.b=[1]", "data.a\\.b", ["data.a\\.b=null", "data.a\\.b=[1]"]),
    "a list as a section": ("train=[1]", "train", ["train=null"]),
}


@pytest.mark.parametrize(("override", "key", "overrides"), OTHER_KINDS.values(), ids=OTHER_KINDS.keys())
def test_override_of_another_kind_error_names_the_key_and_sets_it_to_null_first(override, key, overrides):
    recipe = write("data: {files: {train: a.csv}, label: [a, b], a.b: {c: 1}}\ntrain: {lr: 0.1}")
    problem = problem_of(recipe, [override])
    assert_problem(problem, f"override-failed {override} r.yaml {key}")
    assert problem.found
    assert f"{key}=null" in problem.remedy
    load_recipe(recipe, overrides)


def bomb(first: Any, grow: Callable[[str], Any], level: str = "${.a%d}") -> str:
    """A recipe in which eight values each expand to ten times the one before."""
    return write(yaml.safe_dump({"data": {"a": {"a0": first} | {f"a{i + 1}": grow(level % i) for i in range(8)}}}))


@pytest.mark.parametrize("text", ["${", "a ${b", "${output.}", "${}", "{{ x }} ${", "${x y}", "${ref(x)}"])
def test_interpolations_that_cannot_be_read_are_refused_with_their_key(text):
    name = write(yaml.safe_dump({"data": {"deep": [{"template": text}]}}))
    assert_problem(problem_of(name), f"wrong-format r.yaml data.deep[0].template: {text[text.index('${') :]}")


def test_interpolations_that_grow_without_bound_are_refused():
    for level in ("${data.a.a%d}", "${.a%d}", "${ ..a.a%d }", "${data[a].a%d}", "${[data][a][a%d]}"):
        problem = problem_of(bomb("x" * 10, lambda one: one * 10, level))
        assert_problem(problem, "too-large r.yaml: data.a.a4: 1,000,000")
    wide = bomb({"k": "v"}, lambda one: {str(j): one for j in range(10)}, "${data.a.a%d}")
    assert_problem(problem_of(wide), "too-large data.a.a4:")
    mixed = bomb(["v"], lambda one: {"z": one, "l": [one] * 9}, "${data.a.a%d}")
    assert_problem(problem_of(mixed), "too-large data.a.")
    # through another one
    deep = {f"m{i + 1}": {"z": f"${{data.m{i}}}", "k": f"${{data.m{i + 1}.z.k}}" * 10} for i in range(8)}
    assert_problem(problem_of(write(yaml.safe_dump({"data": {"m0": {"k": "x" * 10}} | deep}))), "too-large data.m")
    numbers = {0: "x" * 10} | {i + 1: f"${{data.0{i}}}" * 10 for i in range(8)}
    assert_problem(problem_of(write(yaml.safe_dump({"data": numbers}))), "too-large data[4]:")
    long = {"a": "x" * 1000, "b": ["y${data.a}"] * 1000}
    assert_problem(problem_of(write(yaml.safe_dump({"data": long}))), "too-large data.b:")
    chain = {f"a{i}": f"${{data.a{i + 1}}}" for i in range(3000)}
    assert_problem(problem_of(write(yaml.safe_dump({"data": chain}))), "unresolved-interpolation r.yaml: ${...}")


def test_interpolations_of_interpolations_are_resolved():
    data = {
        "a": "x",
        "b": "${data.a}${.a}",
        "m": {"k": "${..b}-${data[b]}"},
        "n": "${data.m}",
        "o": "${data.n.k}",
        "l": ["${data.o}"],
    }
    found = load_recipe(write(yaml.safe_dump({"data": data})), ["data.a=y"]).data
    assert found == {"a": "y", "b": "yy", "m": {"k": "yy-yy"}, "n": {"k": "yy-yy"}, "o": "yy-yy", "l": ["yy-yy"]}


# -- extends -----------------------------------------------------------------------------------------------------------


def test_extends_merges_deep_and_keeps_the_bases_order():
    write(BASE, "base.yaml")
    recipe = load_recipe(
        write(
            """
            extends: base.yaml
            model: {config: {layers: 4}}
            train: {lr: 0.1}
            plugins:
              - progress
              - module: {metrics: {accuracy: {top_k: 5}}}
              - ema: false
            """
        )
    )
    assert recipe.model == {"name": "small", "config": {"layers": 4, "width": 8}}
    assert (recipe.train.epochs, recipe.train.lr) == (2, 0.1)
    assert list(recipe.plugins.items()) == [
        ("amp", {"dtype": "bf16"}),
        ("log", False),
        ("module", {"loss": "mse", "metrics": {"accuracy": {"type": "Accuracy", "top_k": 5}}}),
        ("ema", False),
        ("progress", {}),
    ]
    assert recipe.output == "runs/base"


def test_plugin_disabled_in_base_stays_disabled_until_listed():
    write(BASE, "base.yaml")
    assert load_recipe(write("extends: base.yaml\ntrain:\n")).plugins["log"] is False
    assert load_recipe(write("extends: base.yaml\nplugins: [log]")).plugins["log"] == {}


def test_an_empty_section_takes_nothing_away_from_the_base():
    write(BASE, "base.yaml")
    assert load_recipe(write("extends: base.yaml\ntrain:\nplugins:\n")).train.epochs == 2


def test_extends_finds_what_is_beside_the_file_and_shipped_recipes_by_name():
    write("train: {epochs: 9}", "deep/base.yaml")
    write("extends: base.yaml", "deep/middle.yaml")
    assert load_recipe(write("extends: middle.yaml\noutput: x", "deep/top.yaml")).train.epochs == 9
    assert load_recipe(write("extends: quickstart\ntrain: {epochs: 1}")).model == load_recipe("quickstart").model


def test_an_extended_recipe_of_another_folder_keeps_its_files():
    """Those of the same name beside the recipe that extends it are others."""
    for path in ("base/train.csv", "base/part-1.csv", "base/code.py", "base/model/config.json", "top/train.csv"):
        write("", path)
    write("", "here.csv")
    write(
        """
        model: {name: model, config: {layers: 2}}
        data: {files: {train: [train.csv, part-*.csv, here.csv], test: none.csv}, module: "code.py:rows", text: text}
        plugins: [{module: {loss: "code.py:loss", metrics: {accuracy: {top_k: 1}}}}]
        output: runs/base
        """,
        "base/base.yaml",
    )
    recipe = load_recipe(write("extends: ../base/base.yaml\ndata: {label: train.csv}", "top/top.yaml"))
    base = Path("base").resolve()
    assert recipe.model == {"name": f"{base}/model", "config": {"layers": 2}}
    assert recipe.data == {
        "files": {"train": [f"{base}/train.csv", f"{base}/part-*.csv", "here.csv"], "test": "none.csv"},
        "module": f"{base}/code.py:rows",
        "text": "text",
        "label": "train.csv",
    }
    assert recipe.plugins == {"module": {"loss": f"{base}/code.py:loss", "metrics": {"accuracy": {"top_k": 1}}}}
    assert recipe.output == "runs/base"


def test_cyclic_extends_is_rejected():
    write("extends: b.yaml", "a.yaml")
    write("extends: a.yaml", "b.yaml")
    with expect_problem("extends-itself a.yaml b.yaml a.yaml:", RecipeError):
        load_recipe("a.yaml")


def test_invalid_extends_is_rejected():
    assert_problem(problem_of(write("extends: [a.yaml]")), "wrong-type r.yaml extends 'a.yaml'")
    assert_problem(problem_of(write("extends: nothing.yaml")), "file-missing nothing.yaml")


# -- overrides, --with, --without --------------------------------------------------------------------------------------


def test_overrides_set_keys_of_every_section():
    recipe = load_recipe(
        write(BASE),
        [
            "train.lr=1e-4",
            "model.config.width=16",
            "data.files.train=a=b.csv",
            "plugins.amp.dtype=fp16",
            "plugins.ema=false",
            "output=x",
        ],
    )
    assert recipe.train.lr == 1e-4
    assert recipe.model["config"] == {"layers": 2, "width": 16}
    assert recipe.data == {"files": {"train": "a=b.csv"}}
    assert recipe.plugins["amp"] == {"dtype": "fp16"}
    assert recipe.plugins["ema"] is False
    assert recipe.output == "x"


OVERRIDES = {
    "train.lr": "not-an-override train.lr: train.lr=1e-4",
    "=3": "not-an-override =3:",
    "trian.lr=1": "unknown-section trian.lr=1: 'trian' 'train'",
    "train.lr=x": "invalid-value r.yaml: train.lr: 'x' str float",
    "train.lr=": "invalid-value r.yaml: train.lr: None",
    "train.lr=[": "invalid-yaml train.lr=[: quotes",
    "data.drop=[{column:": "invalid-yaml data.drop=[{column:: space quotes",
    "data.drop=[{column:a}": "invalid-yaml data.drop=[{column:a}: space quotes",
    "train.epochs.x=1": "invalid-value r.yaml: train.epochs: {'x': 1} dict",
    "train=5": "wrong-type r.yaml: train: 5 int",
    "plugins.am.dtype=fp16": "plugin-not-listed plugins.am.dtype=fp16: r.yaml 'am' 'amp' --with",
    "plugins.log.on_error=disable": "plugin-not-listed plugins.log.on_error=disable: r.yaml 'log'",
    "plugins=[ema]": "not-an-override plugins=[ema]: plugins.NAME.OPTION=value --with",
    "model.sizes[1]=4": "override-failed model.sizes[1]=4: model.sizes list",
    "model.sizes.1=4": "override-failed model.sizes.1=4: model.sizes list",
    "model.config.parts.0.width=4": "override-failed model.config.parts.0.width=4: model.config.parts list",
    "model.name=${": "wrong-format model.name: '${'",
    "plugins.amp=fp16": "wrong-type r.yaml: plugins.amp: 'fp16'",
}


@pytest.mark.parametrize(("override", "expected"), OVERRIDES.items(), ids=OVERRIDES.keys())
def test_invalid_override_is_rejected(override, expected):
    with expect_problem(expected, RecipeError):
        load_recipe(write(BASE.replace("width: 8}", "width: 8, parts: [{width: 4}]}, sizes: [1, 2]")), [override])


@pytest.mark.parametrize(
    "key",
    [
        "model..a",
        "model.",
        ".model",
        "model.a.",
        "model[]",
        "model[a]..b",
        "model.[a]",
        "model[a",
        "model[a]b",
        "data.[0]",
    ],
)
def test_override_with_an_empty_or_incomplete_name_is_rejected(key):
    assert_problem(problem_of(write(BASE), [f"{key}=1"]), f"not-an-override {key}=1: {key!r} model.config.width")


def test_names_of_an_override_may_be_in_brackets_or_have_escaped_dots():
    recipe = load_recipe(write(BASE), ["model.config[width]=16", "data.a\\.b=1", "data.c\\=d=2", "data.e[f.g]=3"])
    assert recipe.model["config"]["width"] == 16
    assert (recipe.data["a.b"], recipe.data["c=d"], recipe.data["e"]) == (1, 2, {"f.g": 3})


def test_with_adds_without_removes_and_an_added_plugin_takes_overrides():
    recipe = load_recipe(
        write(BASE), ["plugins.early-stopping.patience=3"], ["early-stopping", "amp", "log"], ["ema", "progress"]
    )
    assert recipe.plugins["early-stopping"] == {"patience": 3}
    assert recipe.plugins["amp"] == {"dtype": "bf16"}  # as it was
    assert recipe.plugins["log"] == {}  # on again
    assert recipe.plugins["ema"] is False
    assert recipe.plugins["progress"] is False


# -- finding and writing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["quickstart", "quickstart.yaml", "recipes/quickstart.yaml"])
def test_shipped_recipes_are_found_from_any_folder(name):
    assert find_recipe(name).is_file()
    assert find_recipe(name).name == "quickstart.yaml"


def test_a_file_comes_before_a_shipped_recipe_of_its_name():
    assert find_recipe(write("train: {}", "quickstart.yaml")) == Path("quickstart.yaml")


def test_missing_recipe_is_rejected_with_closest_name():
    assert_problem(problem_of("quikstart"), "file-missing quikstart 'quickstart'")
    Path("folder").mkdir()
    assert_problem(problem_of("folder"), "file-missing folder:")
    assert_problem(problem_of("/nowhere/quickstart.yaml"), "file-missing /nowhere/quickstart.yaml")


def test_every_shipped_recipe_loads_and_survives_being_written():
    assert shipped_recipes()
    for name in shipped_recipes():
        recipe = load_recipe(name)
        again = load_recipe(write(yaml.safe_dump(recipe.to_dict(), sort_keys=False), f"copies/{name}.yaml"))
        assert again.to_dict() == recipe.to_dict()


def test_a_recipe_written_as_yaml_reads_the_same():
    recipe = load_recipe(write(BASE), ["train.evaluate_every=5", "train.max_grad_norm=1"])
    again = load_recipe(write(yaml.safe_dump(recipe.to_dict(), sort_keys=False), "again.yaml"))
    assert (again.train, again.plugins, again.model, again.data) == (
        recipe.train,
        recipe.plugins,
        recipe.model,
        recipe.data,
    )


def test_error_of_python_recipe_says_recipe_instead_of_file():
    with expect_problem("invalid-value recipe train.lr 'x'", RecipeError):
        make_recipe({"train": {"lr": "x"}})


def test_paths_resolve_to_current_folder_then_recipe_folder():
    recipe = load_recipe(write("train: {}", "deep/r.yaml"))
    write("", "deep/beside.csv")
    assert recipe.find("beside.csv") == Path("deep/beside.csv")
    write("", "beside.csv")
    assert recipe.find("beside.csv") == Path("beside.csv")
    assert recipe.find("nowhere.csv") == Path("nowhere.csv")
    assert recipe.find("~/x") == Path(os.path.expanduser("~/x"))  # noqa: PTH111
