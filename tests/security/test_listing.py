"""``fastloop plan --untrusted``: a stranger's recipe is listed, not run, and code that is not installed is refused.

The hostile code of these tests creates the file ``pwned`` when it is imported or called; a control shows that it does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from fastloop.recipe import make_recipe
from fastloop_tools.untrusted.effects import effects
from fastloop_tools.untrusted.origin import find_module, find_name

PLUGIN = """
from fastloop import Plugin
class Evil(Plugin):
    name = "evil"
"""


@pytest.fixture
def pwned(tmp_path: Path):
    """The file that hostile code creates. No test of this file may leave it, except for the control, which removes
    it."""
    yield tmp_path / "pwned"
    assert not (tmp_path / "pwned").exists(), "code of the recipe was run"


@pytest.fixture
def hostile(pwned: Path) -> str:
    """The text of a module that is a plugin, and whose import creates ``pwned``."""
    return f"import pathlib\npathlib.Path({str(pwned)!r}).touch()\ndef data(**given): ...\n{PLUGIN}"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


def install(site: Path, name: str, code: str, plugins: str = "", requires: str = "") -> None:
    """Install a package of one module, with the metadata that pip writes."""
    module, metadata = f"{name.replace('-', '_')}.py", f"{name.replace('-', '_')}-1.2.dist-info"
    (site / module).write_text(code)
    (site / metadata).mkdir()
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    (site / metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n{needs}")
    (site / metadata / "entry_points.txt").write_text(f"[fastloop.plugins]\n{plugins}\n")
    (site / metadata / "RECORD").write_text(
        f"{module},,\n{metadata}/METADATA,,\n{metadata}/entry_points.txt,,\n{metadata}/RECORD,,\n"
    )


def recipe(**sections: Any) -> str:
    """Write a recipe to r.yaml."""
    usual = {"model": {"config": {"model_type": "bert"}}, "data": {"files": {"train": "rows.csv"}, "text": "text"}}
    Path("r.yaml").write_text(yaml.safe_dump(usual | sections))
    return "r.yaml"


def listed(out: str) -> dict[str, dict[str, Any]]:
    """Key -> code of a listing in JSON."""
    return {code["key"]: code for code in json.loads(out)["code"]}


# -- installed code ----------------------------------------------------------------------------------------------------


def test_installed_code_is_listed_and_not_imported(cli, site, hostile):
    """a recipe that names installed code: listed, and not imported"""
    install(site, "warm-pack", f"import subprocess\n{hostile}", "evil = warm_pack:Evil", "fastloop-train>=0.1")
    name = recipe(
        data={
            "module": "fastloop_plugins.datasets.reviews:reviews",
            "arguments": {"train": 8, "api_key": "sesame-open"},
        },
        plugins=[{"warm-pack:evil": {"degrees": 3}}, "ema"],
        output="out",
    )
    code, out, err = cli("plan", name, "--untrusted")
    assert (code, err) == (0, "")
    assert "  plugins.warm-pack:evil: warm-pack:evil  (warm-pack 1.2)\n" in out
    code, out, _ = cli("plan", name, "--untrusted", "--json", "-")
    assert code == 0
    found = listed(out)
    file = str(site / "warm_pack.py")
    plugin = found["plugins.warm-pack:evil"]
    assert {key: plugin[key] for key in ("kind", "file", "package", "version", "arguments", "note")} == {
        "kind": "plugin", "file": file, "package": "warm-pack", "version": "1.2", "arguments": {"degrees": 3},
        "note": "",
    }  # fmt: skip
    assert plugin["effects"] == {"starts commands": file}
    reviews = found["data.module"]
    lines = Path(reviews["file"]).read_text().splitlines()
    assert lines[reviews["line"] - 1].startswith("def reviews(")
    assert (reviews["package"], reviews["arguments"]) == ("fastloop-train", {"train": 8, "api_key": "sesame-open"})
    assert found["plugins.ema"]["file"].endswith("ema.py")
    assert found["plugins.text-classification"]["kind"] == "default plugin"
    assert {"key": "output", "what": str(Path("out").absolute()), "use": "writes"} in json.loads(out)["files"]
    assert "warm_pack" not in sys.modules


@pytest.mark.slow
def test_listing_imports_nothing_by_the_audit_of_python(site, hostile):
    """a listing under Python's audit hook: no code of the recipe, a plugin or torch is imported"""
    install(site, "warm-pack", hostile, "evil = warm_pack:Evil")
    name = recipe(
        data={"module": "torch.nn.functional:cross_entropy"},
        model={"module": "warm_pack:Evil"},
        plugins=["evil", "ema"],
    )
    code = (
        "import sys; names = []; sys.addaudithook(lambda event, args: names.append(args[0]) if event == 'import' "
        "else None)\n"
        f"sys.argv = ['fastloop', 'plan', {name!r}, '--untrusted', '--json', 'list.json']\n"
        "from fastloop.cli import main\n"
        "try:\n    main()\nexcept SystemExit as done:\n    assert not done.code, done.code\n"
        "print('IMPORTED', *{name.partition('.')[0] for name in names})"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    imported = set(done.stdout.splitlines()[-1].split())
    assert {"fastloop_tools", "yaml"} < imported
    assert not imported & {"warm_pack", "torch", "transformers"}
    assert {code["key"] for code in json.loads(Path("list.json").read_text())["code"]} > {
        "plugins.evil",
        "data.module",
        "model.module",
    }


def test_text_that_only_looks_like_an_import_is_not_refused(cli):
    """control: text that only looks like an import is not refused"""
    name = recipe(
        data={
            "module": "fastloop_plugins.datasets.chats:chats",
            "arguments": {"prompt": "Answer:yes", "url": "Q. Who?:me"},
        }
    )
    code, out, _ = cli("plan", name, "--untrusted", "--json", "-")
    assert code == 0
    assert set(listed(out)) >= {"data.module"}
    assert "data.arguments.prompt" not in listed(out)


@pytest.mark.slow
def test_function_that_is_not_written_for_fastloop_is_marked(cli):
    """a function that is not written for fastloop: the list marks it"""
    code, out, _ = cli("plan", recipe(data={"module": "torchmetrics:Accuracy"}), "--untrusted", "--json", "-")
    found = listed(out)["data.module"]
    assert code == 0
    assert "torchmetrics/classification" in found["file"], "the definition, not the module that imports it"
    assert found["note"].startswith("not written for fastloop")


def test_addresses_and_files_are_listed(cli):
    """a recipe that reads addresses and files: the list shows them"""
    Path("rows.csv").write_text("text\nyes\n")
    name = recipe(
        model={"name": "owner/model", "revision": "abc", "weights": "start.pt"},
        data={"files": {"train": ["rows.csv", "s3://bucket/*.parquet"]}, "text": "text"},
        output="~/elsewhere",
    )
    code, out, _ = cli("plan", name, "--untrusted", "--json", "-")
    assert code == 0
    found = [tuple(item.values()) for item in json.loads(out)["files"]]
    assert found == [
        ("model.name", "owner/model at revision abc", "downloads from the hub"),
        ("model.weights", str(Path("start.pt").absolute()), "reads"),
        ("data.files.train", str(Path("rows.csv").absolute()), "reads"),
        ("data.files.train", "s3://bucket/*.parquet", "may open the URL"),
        ("recipe", str(Path("r.yaml").absolute()), "reads"),
        ("output", str(Path("~/elsewhere").expanduser()), "writes"),
    ]


def test_untrusted_goes_before_estimates(cli):
    """another option of plan that builds the model: the listing refuses first"""
    code, out, err = cli("plan", recipe(), "--untrusted", "--device-memory", "1GiB")
    assert (code, err) == (0, "")
    assert "All code is installed." in out
    assert "gradients" not in out


# -- code that is not installed ----------------------------------------------------------------------------------------

EVERYWHERE: dict[str, Any] = {
    "model": {"module": "X"},
    "data": {"module": "X", "arguments": {"deep": [{"er": "X"}], "X": {"as": "a key"}}},
    "train": {"optimizer": {"name": "X", "momentum": 0.9}},
    "plugins": [
        {"lr-scheduler": {"schedule": "X"}},
        {"module": {"collate": "X", "loss": {"name": "X"}}},
        {"text-classification": {"metrics": {"own": {"type": "X"}}}},
        {"transformers-callbacks": {"callbacks": ["X", {"X": {"rate": 0.5}}]}},
        {"ema": {"other": "X"}},
    ],
}
"""A recipe that names one object, X, under every key that fastloop imports, and under some that it does not know."""
KEYS = (
    *(
        "model.module",
        "data.module",
        "data.arguments.deep.er",
        "data.arguments",
        "train.optimizer.name",
        "plugins.lr-scheduler.schedule",
    ),
    *(
        "plugins.module.collate",
        "plugins.module.loss.name",
        "plugins.text-classification.metrics.own.type",
        "plugins.transformers-callbacks.callbacks",
        "plugins.transformers-callbacks.callbacks",
        "plugins.ema.other",
    ),
)
SHORT = {"train": {"optimizer": "X"}, "plugins": [{"module": {"loss": "X"}}]}


def filled(tree: Any, value: str) -> Any:
    """A tree with ``X`` replaced."""
    if isinstance(tree, dict):
        return {filled(key, value): filled(item, value) for key, item in tree.items()}
    if isinstance(tree, list):
        return [filled(item, value) for item in tree]
    return value if tree == "X" else tree


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("evil.py:data", "evil.py: a local file, and not of an installed package."),
        ("loose:data", "no installed package lists the file "),
        ("os:system", "module os is of Python's standard library, whose functions can run any command."),
        ("other_pack:run", "module subprocess is of Python's standard library"),
    ],
    ids=["file", "folder on the path", "standard library", "taken from it"],
)
def test_import_of_code_that_is_not_installed_is_refused(reference, said, cli, site, hostile):
    """every key that imports, with a local file or the standard library: refused, with the key"""
    Path("evil.py").write_text(hostile)
    (site / "loose.py").write_text(hostile)
    install(site, "other-pack", "from subprocess import run\n")
    for tree, keys in ((EVERYWHERE, KEYS), (SHORT, ("train.optimizer", "plugins.module.loss"))):
        code, out, err = cli("plan", recipe(**filled(tree, reference)), "--untrusted")
        assert code == 2
        assert err.startswith("error: r.yaml: it runs code that is not installed:\n")
        refused = {line.split(": ")[0].strip(): line for line in err.splitlines() if line.startswith("  ")}
        assert set(refused) == set(keys)
        assert all(said in line for line in refused.values()), err
        assert all(f"  {key}: {reference}" in out for key in keys), out
    assert not {"evil", "loose", "other_pack"} & set(sys.modules)


def test_hostile_code_of_these_tests_is_hostile(cli, hostile, pwned):
    """control: without the option, planning imports a plugin in a local file"""
    Path("evil.py").write_text(hostile)
    cli("plan", recipe(plugins=["./evil.py"]))
    assert pwned.exists()
    pwned.unlink()


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"plugins": ["./evil.py"]}, "plugins../evil.py: "),
        ({"plugins": ["nowhere"]}, "plugins.nowhere: no plugin 'nowhere' is installed"),
        ({"plugins": ["gone"]}, "plugins.gone: gone: module gone_pack.there is not installed"),
        ({"plugins": ["shadowed"]}, "plugins.shadowed: shadowed: no installed package lists the file "),
        (
            {"data": {"module": "nowhere.at_all:data"}},
            "data.module: nowhere.at_all:data: module nowhere.at_all is not installed",
        ),
        ({"data": {"module": "fastloop_plugins.nowhere:x"}}, "has no module fastloop_plugins.nowhere"),
        (
            {"model": {"name": "owner/model", "trust_remote_code": True}},
            "model.trust_remote_code: True: runs the code that comes with",
        ),
        (
            {"model": {"name": "owner/model", "attn_implementation": "owner/kernel"}},
            "downloads a kernel from the hub and runs it",
        ),
        (
            {"data": {"module": "torch:load", "arguments": {"f": "x.pkl"}}},
            "data.arguments.f: x.pkl: a file that may hold pickles",
        ),
        (
            {"data": {"module": "torch:load", "arguments": {"weights_only": False}}},
            "data.arguments.weights_only: False: loads pickles",
        ),
        ({"plugins": [{"deepspeed": {"config": "ds.json"}}]}, "lower_precision_safe_modules: evil_classes:Layer: "),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_other_code_that_is_not_installed_is_refused(sections, said, cli, site, hostile, monkeypatch, tmp_path):
    """code of the hub, a missing package, a pickle or DeepSpeed's JSON: refused"""
    Path("evil.py").write_text(hostile)
    Path("ds.json").write_text(json.dumps({"torch_autocast": {"lower_precision_safe_modules": ["evil_classes.Layer"]}}))
    install(site, "gone-pack", "", "gone = gone_pack.there:Evil")
    (site / "gone_pack.py").unlink()
    install(site, "real-pack", PLUGIN, "shadowed = real_pack:Evil")
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "real_pack.py").write_text(hostile)
    monkeypatch.syspath_prepend(tmp_path / "first")
    code, _, err = cli("plan", recipe(**sections), "--untrusted")
    assert code == 2
    assert said in err, err


@pytest.mark.parametrize(
    ("switch", "safe"), [("weights_only", True), ("allow_pickle", False), ("trust_remote_code", False)]
)
def test_switch_that_is_not_the_safe_boolean_is_refused(switch, safe, cli, record_property):
    """a safety switch with a value that libraries take for unsafe: refused"""
    values: list[Any] = [[], {}, [False], {"a": 1}, 0, 1, "false", "true", "", None, 0.0, not safe]
    record_property("faults", len(values))
    arguments = {
        "f": "x",
        switch: safe,
        **{f"at{chr(97 + index)}": {switch: value} for index, value in enumerate(values)},
    }
    code, _, err = cli("plan", recipe(data={"module": "torch:load", "arguments": arguments}), "--untrusted")
    assert code == 2
    refused = [line.strip() for line in err.splitlines() if line.startswith("  ")]
    assert [line.partition(": ")[0] for line in refused] == [
        f"data.arguments.at{chr(97 + index)}.{switch}" for index in range(len(values))
    ]
    assert all(line.endswith(f" Expected {str(safe).lower()}.") for line in refused)


ALIASES = {
    "plain": "import pickle\nload = pickle.loads\n",
    "renamed": "import pickle as p\nload = p.loads\n",
    "of an alias": "from pickle import loads as _l\nother = _l\nload = other\n",
    "annotated": "import pickle\nload: object = pickle.loads\n",
    "tuple": "import pickle\nsave, load = pickle.dumps, pickle.loads\n",
    "argument": "import functools, pickle\nload = functools.partial(pickle.loads, fix_imports=False)\n",
    "fallback": "try:\n    from numpy import load\nexcept ImportError:\n    import pickle\n    load = pickle.loads\n",
    "choice": "import sys, numpy, pickle\nload = numpy.load if len(sys.argv) > 99 else pickle.loads\n",
    "all names": "from _pickle import *\nfrom alias_pack_inner import *\n",
    "built-in": "load = exec\n",
    "module of a package": "import alias_pack_inner as inner\nload = inner.load\n",
}
"""Ways in which a module of an installed package gives the name ``load`` to a function that runs its argument."""


@pytest.mark.parametrize("code", ALIASES.values(), ids=ALIASES.keys())
def test_aliases_are_followed_to_python_s_own_functions(code, cli, site):
    """an alias of a function that runs its argument: refused"""
    install(site, "alias-pack-inner", "from pickle import loads\nload = loads\n")
    install(site, "alias-pack", code)
    code, _, err = cli("plan", recipe(data={"module": "alias_pack:load"}), "--untrusted")
    assert code == 2
    assert "is of Python's standard library, whose functions can run any command." in err


def test_aliases_of_installed_packages_are_followed_to_their_definition(site):
    """control: attributes of compiled code, and modules that name each other in a circle, are listed"""
    install(
        site,
        "alias-pack",
        "import torch.nn as n\nclass Own: ...\nLoss = n.CrossEntropyLoss\na = b\nb = a\nmade = print(Own)\n",
    )
    found = {name: find_name("alias_pack", name) for name in ("Loss", "Own", "a", "made", "nothing")}
    assert all(origin is not None and not origin.problem for origin in found.values())
    assert found["Loss"].file.endswith("loss.py")
    assert (found["Own"].line, found["made"].line) == (2, 6)
    for reference in (
        "torch:relu",
        "torch.nn.functional:conv2d",
        "transformers:AutoModel",
        "numpy:array",
        "torch.optim:AdamW",
    ):
        origin = find_name(*reference.split(":"))
        assert origin is not None
        assert not origin.problem, reference


def test_alias_of_a_loader_in_a_package_that_many_have_is_refused(cli):
    """an alias of a pickle loader in a package that many have: refused"""
    pytest.importorskip("jupyter_client")
    code, _, err = cli("plan", recipe(data={"module": "jupyter_client.session:pickle_unpacker"}), "--untrusted")
    assert code == 2
    assert "data.module: jupyter_client.session:pickle_unpacker: module pickle is of Python's standard library" in err


def test_parents_of_the_recipe_are_listed(cli, tmp_path):
    """code in a parent that the recipe extends: the list shows the parents"""
    (tmp_path / "far").mkdir()
    Path(recipe()).rename("far/base.yaml")
    Path("far/middle.yaml").write_text("extends: base.yaml\n")
    Path("r.yaml").write_text(f"extends: {tmp_path}/far/middle.yaml\n")
    code, out, _ = cli("plan", "r.yaml", "--untrusted")
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("  extends: ")] == [
        f"  extends: reads {tmp_path}/far/{name}.yaml" for name in ("middle", "base")
    ]


def test_file_beside_the_recipe_cannot_replace_installed_code(cli, hostile, monkeypatch, tmp_path):
    """a module beside the recipe that shadows an installed one: refused"""
    (tmp_path / "theirs").mkdir()
    Path("theirs/torchmetrics.py").write_text(hostile)
    Path(recipe()).rename("theirs/r.yaml")
    assert cli("plan", "theirs/r.yaml", "--untrusted")[0] == 0
    monkeypatch.syspath_prepend(tmp_path / "theirs")
    code, _, err = cli("plan", "theirs/r.yaml", "--untrusted")
    assert code == 2
    assert f"import path: {tmp_path / 'theirs'}: Python imports modules from there" in err


@pytest.mark.parametrize("text", ["${oc.env:CANARY}", "${touch:x}", "${oc.decode:'${touch:x}'}"])
def test_no_resolver_runs(text, cli, pwned, monkeypatch):
    """a resolver of OmegaConf, registered by any package: refused, and not called"""
    monkeypatch.setenv("CANARY", "yellow-bird")
    OmegaConf.register_resolver("touch", lambda _: pwned.touch())
    try:
        code, out, err = cli("plan", recipe(output=text), "--untrusted")
    finally:
        OmegaConf.clear_resolver("touch")
    assert (code, out) == (2, "")
    assert "r.yaml: output: found " in err
    assert "yellow-bird" not in err


def test_listing_cannot_be_hidden_by_terminal_sequences(cli, hostile):
    """terminal sequences in a recipe: the list shows them as text"""
    Path("evil.py").write_text(hostile)
    name = recipe(data={"module": "evil.py:data", "files": {"train": "a://\x1b[2K\x1b[1A\u202e"}})
    code, out, err = cli("plan", name, "--untrusted")
    assert code == 2
    assert not {"\x1b", "\u202e"} & set(out + err)
    assert "a://\\x1b[2K\\x1b[1A\\u202e" in out


def test_recipe_cannot_blank_the_list_by_declaring_its_text_secret(cli, monkeypatch):
    """a recipe whose keys are called like secrets: their values stay in the list"""
    monkeypatch.setenv("HUB_TOKEN", "yellow-bird")
    blanks = {
        "token": "os:system",
        "password": "standard library",
        "api_key": "rm -rf /home",
        "secret": "data.module",
        "sibling": "x",
    }
    arguments = {**blanks, "auth_token": "sibling", "command": "rm -rf /home", "url": "https://yellow-bird@host/x"}
    name = recipe(data={"module": "os:system", "arguments": arguments})
    code, out, err = cli("plan", name, "--untrusted")
    assert code == 2
    assert "  data.module: os:system\n" in out
    assert "'command': 'rm -rf /home'" in out
    assert "data.module: os:system: module os is of Python's standard library" in err
    assert "yellow-bird" not in out + err
    code, out, _ = cli("plan", name, "--untrusted", "--json", "-")
    assert code == 2
    assert listed(out)["data.module"]["arguments"] == arguments | {"url": "https://(hidden)@host/x"}


# -- parts -------------------------------------------------------------------------------------------------------------


def test_submodules_are_found_without_their_parents(site, hostile):
    """a module within namespace packages: found without an import of its parents"""
    (site / "deep" / "inner").mkdir(parents=True)  # a namespace package in another one
    (site / "deep" / "inner" / "leaf.py").write_text(hostile)
    found = find_module("deep.inner.leaf")
    assert found is not None
    assert found.file == str(site / "deep" / "inner" / "leaf.py")
    assert found.problem
    assert not {name for name in sys.modules if name.partition(".")[0] == "deep"}
    assert find_module("deep") is None, "a folder without code"
    assert find_module("..up") is None
    assert find_name("nowhere", "x") is None


def test_effects_follow_imports_within_the_package(site):
    """commands and native code in an imported module: the list shows them"""
    (site / "pack").mkdir()
    (site / "pack" / "__init__.py").write_text("from os import system\nimport os\nos.system('true')\n")
    (site / "pack" / "plain.py").write_text("def run():\n    from . import helper\n")
    (site / "pack" / "helper.py").write_text(
        "import ctypes\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import socket\n"
    )
    helper, init = str(site / "pack" / "helper.py"), str(site / "pack" / "__init__.py")
    assert effects("pack.plain") == {"calls native code": helper, "starts commands": init}


def test_effects_of_our_own_kernels_name_the_compiler():
    """control: our kernels are listed as starting a compiler, and ema as starting nothing"""
    found = effects("fastloop_cpu.cpu_attention")
    assert found["starts commands"].endswith("_native.py")
    assert "starts commands" not in effects("fastloop_plugins.training.ema")


def test_recipe_made_in_python_has_no_file():
    """control: a recipe made in Python has no file"""
    from fastloop_tools.untrusted.listing import list_recipe

    found = list_recipe(make_recipe({"plugins": ["ema"]}))
    assert [item["key"] for item in found.files] == ["output"]


def test_processes_of_the_launcher_do_not_import_from_the_current_folder():
    """a file in the current folder named like an installed module: processes of --nproc do not import it"""
    Path("typer.py").write_text("raise SystemExit('the local typer')\n")
    code = (
        "from pathlib import Path; from fastloop.cli.launch import launch; exit(launch(['recipes'], 1, 1, 0, "
        "None, Path('run')))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "the local typer" in done.stderr, "control: the launcher itself imports from there, if Python does"
