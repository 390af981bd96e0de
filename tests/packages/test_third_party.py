"""Plugins of other packages, files and scripts work like fastloop's own: names, versions, hooks, errors.

Modules:
    plugins/fastloop_tools/plan/code_files.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training_runs import execute

import fastloop
from fastloop import Plugin, PluginCrash, PluginError, RecipeError, Trainer, UsageError, hookimpl, hookspec, option
from fastloop.cli.hook_timing import HookTimer
from fastloop.lifecycle import build
from fastloop.plugins.hook_replacement import replace
from fastloop.plugins.installed import load
from fastloop.plugins.manager import PluginSet
from fastloop.plugins.resolve import resolve
from fastloop.recipe import load_recipe, make_recipe
from fastloop.testing import assert_problem, expect_problem, find_problems, tiny_data, tiny_model
from fastloop_tools.bench.selected_recipe import text
from fastloop_tools.plan.code_files import code_files
from fastloop_tools.profile.suggestions import candidates

pytest_plugins = ["installing"]

QUIET = [{"log": False}, {"progress": False}]

WARMTH = """
from fastloop import Plugin, hookimpl, option

class Warmth(Plugin):
    "How warm it is."
    name = "warmth"

    degrees: float = option("How warm.", default=20.0)

    def __init__(self, **options):
        super().__init__(**options)
        self.steps = 0

    @hookimpl
    def after_step(self, run):
        self.steps += 1

    @hookimpl
    def save_state(self):
        return {"steps": self.steps}

    @hookimpl
    def load_state(self, state):
        self.steps = state["steps"]

    @hookimpl
    def write_summary(self, summary):
        summary["warmth"] = [self.degrees, self.steps]
"""
COLD = """
class Cold(Plugin):
    name = "cold"
"""


def write(path: str, text: str) -> Path:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)
    return Path(path)


DATA = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def data():
    inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    return {"train": TensorDataset(inputs, inputs[:, :3].argmax(1))}

def net():
    return nn.Linear(4, 3)
"""


def recipe_file(path: str, *plugins: Any, **train: Any) -> Path:
    """A recipe of the task `module`, with its code beside it."""
    write(f"{Path(path).parent}/code_of_test.py", DATA)
    tree = {
        "model": {"module": "code_of_test.py:net"},
        "data": {"module": "code_of_test.py:data"},
        "train": {"epochs": 1, "batch_size": 8, "lr": 0.1, "device": "cpu", **train},
        "plugins": [*plugins, {"module": {"loss": "cross_entropy"}}, *QUIET],
        "output": "out",
    }
    return write(path, json.dumps(tree))


def train(path: str, *overrides: str, resume: bool = False, **arguments: Any) -> dict[str, Any]:
    recipe = load_recipe(path, overrides, **arguments)
    return execute(build(resolve(recipe), resume=Path(recipe.output) if resume else None))


# -- one name, two packages --------------------------------------------------------------------------------------------


@pytest.fixture
def two(install: Any) -> None:
    install("warm-pack", WARMTH, warmth="warm_pack:Warmth")
    install("hot.pack", WARMTH.replace("20.0", "90.0"), warmth="hot.pack:Warmth")
    site = Path(sys.path[0])
    (site / "hot.pack.py").rename(write(str(site / "hot" / "__init__.py"), "").with_name("pack.py"))


@pytest.fixture
def forget() -> Any:
    yield
    for name in ("hot", "hot.pack"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("two", "forget")
def test_qualified_plugin_name_with_options_overrides_and_without():
    recipe_file("r.yaml", {"hot.pack:warmth": {"degrees": 80.0}})
    assert train("r.yaml")["warmth"] == [80.0, 3]
    assert train("r.yaml", "plugins.warmth.degrees=81.0")["warmth"] == [81.0, 3]
    assert train("r.yaml", "plugins.hot.pack:warmth.degrees=82.0")["warmth"] == [82.0, 3]
    for without in ("warmth", "hot.pack:warmth"):
        assert "warmth" not in train("r.yaml", without_plugins=[without])["plugins"]
    recipe_file("s.yaml", "warm-pack:warmth")
    assert train("s.yaml")["warmth"] == [20.0, 3]
    recipe_file("t.yaml")
    assert train("t.yaml", "plugins.warmth.degrees=5.0", with_plugins=["Warm_Pack:warmth"])["warmth"] == [5.0, 3]
    assert load_recipe("out/recipe.yaml").references == {"warmth": "Warm_Pack:warmth"}


@pytest.mark.usefixtures("two", "forget")
def test_messages_name_a_plugin_as_the_recipe_does():
    with expect_problem("ambiguous-name 0 'warmth'", PluginError) as refused:
        resolve(make_recipe({"plugins": ["warmth"]}))
    assert "hot.pack:warmth or warm-pack:warmth" in str(refused.value) or "warm-pack:warmth or hot.pack:warmth" in str(
        refused.value
    )
    with expect_problem("unknown-option plugins.hot.pack warmth.degree 'degrees'", RecipeError):
        resolve(make_recipe({"plugins": [{"hot.pack:warmth": {"degree": 1.0}}]}))
    with expect_problem("listed-twice 'warmth'", RecipeError):
        make_recipe({"plugins": ["hot.pack:warmth", "warm-pack:warmth"]})
    with expect_problem("unknown-plugin 'cold-pack:warmth'", PluginError):
        load("cold-pack:warmth")


def test_a_package_that_takes_a_name_of_ours_leaves_what_is_on_by_default_alone(install, caplog):
    install("rogue", WARMTH.replace('"warmth"', '"log"'), log="rogue:Warmth")
    resolution = resolve(make_recipe({})).plugins
    assert resolution.names() == ["log", "metric-check", "optimizer-check", "progress", "speed-check"]
    assert type(resolution.plugins[0]).__module__ == "fastloop_plugins.observe.log"
    assert "rogue" not in sys.modules
    assert resolve(make_recipe({"plugins": [{"log": False}]}), any_machine=True).plugins.names() == [
        "metric-check",
        "optimizer-check",
        "progress",
        "speed-check",
    ]
    with expect_problem("ambiguous-name 'log'", PluginError):
        resolve(make_recipe({"plugins": ["log"]}))
    assert (
        type(resolve(make_recipe({"plugins": ["fastloop-train:log"]})).plugins.plugins[0]).__module__
        == "fastloop_plugins.observe.log"
    )


# -- the range of versions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requires", "fits"),
    [
        ("fastloop-train", True),
        (f"fastloop-train>=0.0.1,<={fastloop.__version__}", True),
        (f"FastLoop-Train[lora]=={fastloop.__version__}", True),
        ("fastloop-train>=99; extra == 'all'", True),
        ("fastlooper>=99", True),
        ("", True),
        ("fastloop-train>=99", False),
        ("fastloop-train<0.0.1", False),
    ],
)
def test_a_package_runs_on_the_versions_that_its_own_dependency_names(install, requires, fits):
    install("warm-pack", WARMTH, requires=requires, warmth="warm_pack:Warmth")
    if fits:
        assert load("warmth").name == "warmth"
        return
    with pytest.raises(PluginError) as refused:
        load("warmth", "r.yaml: plugins[0]")
    wanted = requires.removeprefix("fastloop-train")
    assert str(refused.value) == (
        f"r.yaml: plugins[0]: plugin 'warmth' (warm_pack:Warmth of warm-pack 1.2) is made for fastloop {wanted}, and "
        f"this is {fastloop.__version__}. Install versions that fit: "
        f"`pip install -U warm-pack 'fastloop-train{wanted}'`."
    )
    assert "warm_pack" not in sys.modules, "what does not fit is not imported"


def test_a_package_that_requires_the_other_project_is_refused(install):
    install("warm-pack", WARMTH, requires="fastloop>=0.1.0,<0.2", warmth="warm_pack:Warmth")
    with expect_problem("unsupported-version 'fastloop>=0.1.0,<0.2' 'fastloop-train'", PluginError):
        load("warmth", "r.yaml: plugins[0]")


def test_the_other_project_beside_this_one_is_refused(cli, tmp_path, monkeypatch):
    (tmp_path / "site" / "fastloop-0.1.128.dist-info").mkdir(parents=True)
    (tmp_path / "site" / "fastloop-0.1.128.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: fastloop\nVersion: 0.1.128\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    code, out, err = cli("plan", "quickstart")
    assert (code, out) == (2, "")
    assert err.startswith("error: two distributions with the import name fastloop are installed")


# -- plugins in files --------------------------------------------------------------------------------------------------


def test_a_file_beside_the_recipe_is_a_plugin_and_runs_when_it_is_resolved(caplog):
    write("deep/warm.py", "print('ran')\n" + WARMTH)
    recipe_file("deep/r.yaml", {"./warm.py": {"degrees": 30.0}})
    before = set(sys.modules)
    recipe = load_recipe("deep/r.yaml")
    assert (next(iter(recipe.plugins)), recipe.references) == ("warmth", {"warmth": "./warm.py"})
    assert not [name for name in set(sys.modules) - before if name.startswith("fastloop_file_warm_")], (
        "a recipe is read without running code"
    )
    assert [path.name for path in code_files(recipe)] == ["warm.py", "code_of_test.py"]
    assert train("deep/r.yaml")["warmth"] == [30.0, 3]
    assert train("deep/r.yaml", "plugins.warmth.degrees=31.0")["warmth"] == [31.0, 3]
    assert train("deep/r.yaml", "plugins../warm.py.degrees=32.0")["warmth"] == [32.0, 3]
    for without in ("warmth", "./warm.py"):
        assert "warmth" not in train("deep/r.yaml", without_plugins=[without])["plugins"]
    write("here.py", WARMTH)
    recipe_file("plain.yaml")
    assert train("plain.yaml", with_plugins=["here.py"])["warmth"] == [20.0, 3]


def test_a_run_folder_resumes_with_it_and_its_recipe_finds_the_file():
    write("deep/warm.py", WARMTH)
    recipe_file("deep/r.yaml", "./warm.py")
    assert train("deep/r.yaml", "train.max_steps=2")["warmth"] == [20.0, 2]
    saved = load_recipe("out/recipe.yaml")
    assert saved.references == {"warmth": str(Path("deep/warm.py").resolve())}
    assert [plugin.name for plugin in resolve(saved, any_machine=True).plugins] == [
        "warmth",
        "module",
        "metric-check",
        "optimizer-check",
        "speed-check",
    ]
    assert train("deep/r.yaml", resume=True)["warmth"] == [20.0, 3]


def test_of_several_plugins_in_a_file_the_class_says_which():
    write("both.py", WARMTH + COLD)
    with expect_problem("ambiguous-name both.py", RecipeError):
        make_recipe({"plugins": ["both.py"]})
    recipe = make_recipe({"plugins": ["both.py:Cold", {"both.py:Warmth": {"degrees": 1.0}}, *QUIET]})
    assert resolve(recipe).plugins.names() == ["cold", "warmth", "metric-check", "optimizer-check", "speed-check"]
    assert (
        make_recipe(recipe.to_dict()).references
        == recipe.references
        == {"cold": "both.py:Cold", "warmth": "both.py:Warmth"}
    )
    with expect_problem("not-a-plugin both.py:Warmt: 'Warmth'", RecipeError):
        make_recipe({"plugins": ["both.py:Warmt"]})


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (None, "file-missing p.py"),
        ("def broken(:", "invalid-python p.py line 1"),
        (
            "class Warm: name = 'warm'\nclass Other: pass",
            "no-plugin",
        ),
        ("x = 1", 'no-plugin fastloop.Plugin "..."'),
    ],
    ids=["missing", "syntax", "other classes", "no class"],
)
def test_a_file_that_is_no_plugin_is_refused_when_the_recipe_is_read(code, expected):
    if code is not None:
        write("p.py", code)
    with pytest.raises(RecipeError) as refused:
        make_recipe({"plugins": ["p.py"]})
    assert_problem(refused.value.problem, expected)
    assert str(refused.value).startswith("recipe: plugins: p.py: ")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (
            "from fastloop import Plugin\nclass Warm(Plugin):\n    name = 'warm'\n1 / 0",
            "import-failed ZeroDivisionError p.py 4",
        ),
        ("import sys\nclass Warm(int):\n    name = 'warm'\nsys.exit(0)", "import-failed SystemExit 0"),
        ("class Warm(int):\n    name = 'warm'", "not-a-plugin fastloop.Plugin"),
        (
            "from fastloop import Plugin, option\nclass Warm(Plugin):\n    name = 'warm'\n    log: int = option('')",
            "import-failed PluginError: Warm.log",
        ),
        (
            "from fastloop import Plugin\nclass Warm(Plugin):\n    name = 'warm'\n    def __init__(self): 1 / 0",
            "invalid-plugin plugins.p.py p.py ZeroDivisionError",
        ),
    ],
    ids=["error", "exit", "no plugin", "config", "constructor"],
)
def test_a_file_that_fails_when_it_runs_is_refused_with_its_place(code, expected):
    write("p.py", code)
    with expect_problem(expected, UsageError):
        resolve(make_recipe({"plugins": ["p.py"]}))


def test_a_file_that_a_base_recipe_lists_is_found_from_its_folder():
    write("base/warm.py", WARMTH)
    recipe_file("base/base.yaml", {"./warm.py": {"degrees": 3.0}})
    write("top/top.yaml", "extends: ../base/base.yaml\nplugins: [{warmth: {degrees: 4.0}}]\n")
    recipe = load_recipe("top/top.yaml")
    assert recipe.references == {"warmth": str(Path("base/warm.py").resolve())}
    assert resolve(recipe, any_machine=True).plugins.plugins[0].degrees == 4.0


def test_bench_calls_estimate_of_file_plugin_and_writes_its_entry():
    write("warm.py", WARMTH)
    recipe = make_recipe({"plugins": [{"warm.py": {"degrees": 1.0}}]})
    (line,) = [line for line in text(recipe, [], {"warmth": "hot"}).splitlines() if "warm" in line]
    assert line.split() == ["-", "warm.py:", "{degrees:", "1.0}", "#", "hot"]
    assert [cls.name for cls in candidates(recipe)][-1] == "warmth"


def test_an_error_in_a_file_plugin_names_the_file(tiny_run):
    write("p.py", WARMTH.replace("self.steps += 1", "self.steps / 0"))
    with expect_problem("plugin-crashed 'warmth' p.py after_step ZeroDivisionError", PluginCrash):
        tiny_run(["./p.py"])


# -- objects -----------------------------------------------------------------------------------------------------------


def test_objects_of_python_have_the_rights_of_listed_plugins(tiny_run):
    namespace: dict[str, Any] = {"__name__": __name__}
    exec(WARMTH, namespace)
    warmth = namespace["Warmth"]

    class Cold(Plugin):
        name = "cold"
        slot = "weather"
        conflicts = {"warmth": "both heat."}

    result = tiny_run([warmth(degrees=7.0)], epochs=1, output="run", max_steps=2)
    assert result.summary["plugins"][0] == "warmth"
    assert result.summary["warmth"] == [7.0, 2]
    assert tiny_run([warmth(degrees=7.0)], epochs=1, output="run", max_steps=4, resume=True).summary["warmth"] == [
        7.0,
        4,
    ]
    with expect_problem("excluded-plugin 'cold' 'warmth'", PluginError):
        tiny_run([warmth(), Cold()])
    with expect_problem("invalid-value warmth.degrees 'hot'", RecipeError):
        warmth(degrees="hot")


# -- hooks of third parties --------------------------------------------------------------------------------------------


class WarmHooks:
    @hookspec
    def after_warmth(self, run: Any, degrees: float) -> None:
        """It is warm."""

    @hookspec(firstresult=True)
    def how_warm(self, run: Any) -> float | None:
        """First. The degrees."""


class Oven(Plugin):
    """Owns two hooks, and calls them."""

    name = "oven"
    hookspecs = WarmHooks

    @hookimpl
    def after_epoch(self, run: Any) -> None:
        run.hooks.after_warmth(run=run, degrees=run.hooks.how_warm(run=run))


class Guest(Plugin):
    """Implements hooks of the oven."""

    name = "guest"
    requires = ("oven",)

    def __init__(self) -> None:
        super().__init__()
        self.felt: list[float] = []

    @hookimpl
    def how_warm(self) -> float:
        return 200.0

    @hookimpl
    def after_warmth(self, degrees: float) -> None:
        self.felt.append(degrees)


def hooks_of(*plugins: Plugin) -> Any:
    return PluginSet(list(plugins)).hooks


def test_a_plugin_implements_the_hooks_of_another(tiny_run):
    guest = Guest()
    tiny_run([guest, Oven()])
    assert guest.felt == [200.0, 200.0]


def test_hooks_of_a_package_are_known_only_with_their_owner():
    class Odd(Plugin):
        name = "odd"

        @hookimpl
        def zzz(self) -> None: ...

    class Near(Plugin):
        name = "near"

        @hookimpl
        def after_warmt(self) -> None: ...

    class Wrong(Plugin):
        name = "wrong"

        @hookimpl
        def after_warmth(self, degree: float) -> None: ...

    class May(Plugin):
        name = "may"
        felt: list[float] = []

        @hookimpl(optionalhook=True)
        def after_warmth(self, degrees: float) -> None:
            self.felt.append(degrees)

    for plugins, expected in [
        ([Odd()], "unknown-hook 'odd': 'zzz' optionalhook=True"),
        ([Near(), Oven()], "unknown-hook 'near': 'after_warmt' 'after_warmth'"),
        ([Wrong(), Oven()], "unknown-argument 'wrong': after_warmth: 'degree' 'degrees'"),
    ]:
        with expect_problem(expected, PluginError):
            hooks_of(*plugins)
    assert hooks_of(May())
    hooks_of(May(), Oven()).after_warmth(run=None, degrees=3.0)
    assert May.felt == [3.0]


def test_a_hook_has_one_owner():
    class Stove(Plugin):
        name = "stove"
        hookspecs = type("Own", (), {"after_warmth": hookspec(lambda self, run: None)})

    class Thief(Plugin):
        name = "thief"
        hookspecs = type("Own", (), {"after_step": hookspec(lambda self, run: None)})

    class Empty(Plugin):
        name = "empty"
        hookspecs = type("Own", (), {})

    class Sister(Oven):
        name = "sister"

    for plugins, expected in [
        ([Oven(), Stove()], "hook-declared-twice 'stove' 'oven' 'after_warmth'"),
        ([Thief()], "hook-declared-twice 'thief' fastloop 'after_step'"),
        ([Empty()], "no-hooks 'empty': `hookspecs` fastloop.hookspec"),
    ]:
        with expect_problem(expected, PluginError):
            hooks_of(*plugins)
    assert hooks_of(Oven(), Sister()), "plugins of one package may share theirs"


def test_an_error_in_a_hook_of_a_third_party_names_who_failed_in_it(tiny_run):
    class Clumsy(Guest):
        name = "clumsy"

        @hookimpl
        def after_warmth(self, degrees: float) -> None:
            raise ValueError("burnt")

    with expect_problem("plugin-crashed 'clumsy' after_warmth ValueError burnt", PluginCrash):
        tiny_run([Oven(), Clumsy()])
    with expect_problem("plugin-crashed 'oven' after_epoch TypeError", PluginCrash):
        tiny_run([type("Cool", (Oven,), {"after_epoch": hookimpl(lambda self, run: None + 1)})()])


# -- read-only plugins -------------------------------------------------------------------------------------------------


class Watcher(Plugin):
    """Fails at the third step."""

    name = "watcher"
    read_only = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.steps = 0

    every: int = option("Steps between two looks.", default=1)

    @hookimpl
    def after_step(self, run: Any) -> None:
        self.steps += 1
        if self.steps == 3:
            raise OSError("disk is full")

    @hookimpl
    def save_state(self) -> dict[str, int]:
        return {"steps": self.steps}


def test_failing_observer_is_disabled_with_unchanged_numbers(tiny_run, caplog):
    plain = tiny_run()
    watcher = Watcher(on_error="disable", every=2)
    result = tiny_run([watcher])
    assert (result.losses, watcher.steps, watcher.every) == (plain.losses, 3, 2)
    assert all(torch.equal(result.weights[name], plain.weights[name]) for name in plain.weights)
    why = f"plugin 'watcher' ({__name__}) failed in after_step: OSError: disk is full"
    assert result.summary["disabled"] == {"watcher": why}
    assert result.summary["status"] == "completed"
    assert plain.summary["disabled"] == {}
    (disabled,) = find_problems(caplog, "plugin-disabled watcher")
    assert why in disabled.text
    with expect_problem("plugin-crashed after_step OSError disk is full", PluginCrash):
        tiny_run([Watcher()])


def test_usage_error_of_observer_stops_run(tiny_run):
    class Picky(Watcher):
        @hookimpl
        def check_run(self, run: Any) -> None:
            raise RecipeError("not this run")

    class Broken(Watcher):
        @hookimpl
        def check_run(self, run: Any) -> None:
            raise ValueError("broken")

    with pytest.raises(RecipeError, match=r"^not this run$"):
        tiny_run([Picky(on_error="disable")])
    assert (
        tiny_run([Broken(on_error="disable")], epochs=1)
        .summary["disabled"]["watcher"]
        .endswith("failed in check_run: ValueError: broken")
    )


def test_plugin_can_be_listed_only_where_allowed(install):
    code = WARMTH + "\nclass Watcher(Warmth):\n    name = 'watcher'\n    read_only = True\n"
    install("warm-pack", code, warmth="warm_pack:Warmth", watcher="warm_pack:Watcher")
    plugin, *_ = resolve(
        make_recipe({"plugins": [{"watcher": {"on_error": "disable", "degrees": 1.0}}, *QUIET]})
    ).plugins
    assert (plugin.on_error, plugin.degrees) == ("disable", 1.0)
    for options, expected in [
        ({"watcher": {"on_error": "ignore"}}, "invalid-value plugins.watcher.on_error: 'ignore' raise | disable"),
        ({"warmth": {"on_error": "disable"}}, "not-read-only plugins.warmth.on_error: 'warmth'"),
    ]:
        with expect_problem(expected, RecipeError):
            resolve(make_recipe({"plugins": [options]}))


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        (
            {"numerics": "reassociated"},
            "invalid-declaration 'watcher' read_only",
        ),
        (
            {"build_model": hookimpl(lambda self: None)},
            "invalid-hook build_model read_only",
        ),
        ({"before_prepare": hookimpl(lambda self: None)}, "invalid-hook before_prepare"),
        ({"configure": hookimpl(lambda self: None)}, "invalid-hook"),
        (
            {"after_fit": hookimpl(wrapper=True)(lambda self: (yield))},
            "invalid-hook after_fit read_only",
        ),
    ],
)
def test_plugin_that_changes_run_cannot_be_observer(members, expected):
    with expect_problem(expected, PluginError):
        hooks_of(type("Liar", (Watcher,), members)())


# -- what hooks take ---------------------------------------------------------------------------------------------------


def test_seconds_are_a_plugins_own_and_calls_are_counted_in_the_order_of_the_first(monkeypatch):
    now = [1.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def clock() -> float:
        sleep(1e-6)  # no two readings are equal
        return now[0]

    monkeypatch.setattr("fastloop.cli.hook_timing.perf_counter", clock)

    class Inner(Plugin):
        name = "inner"

        @hookimpl
        def evaluate(self) -> dict[str, float]:
            sleep(0.05)
            return {}

    class Outer(Plugin):
        name = "outer"

        @hookimpl(wrapper=True)
        def evaluate(self) -> Any:
            sleep(0.02)
            result = yield
            sleep(0.02)
            return result

    class Caller(Plugin):
        name = "caller"

        @hookimpl
        def after_fit(self, run: Any) -> None:
            run.hooks.evaluate(run=run, split="test")

    resolution = PluginSet([Inner(), Outer(), Caller()])
    timer = HookTimer()
    undo = replace(resolution, timer)
    run: Any = type("Run", (), {"hooks": resolution.hooks})
    resolution.hooks.after_fit(run=run)
    resolution.hooks.evaluate(run=run, split="test")
    undo()
    resolution.hooks.evaluate(run=run, split="test")
    calls = timer.sorted_calls()
    assert [(call.plugin, call.hook, call.count) for call in calls] == [
        ("caller", "after_fit", 1),
        ("outer", "evaluate", 2),
        ("inner", "evaluate", 2),
    ]
    seconds = {call.plugin: call.seconds for call in calls}
    assert seconds == pytest.approx({"inner": 0.1, "outer": 0.08, "caller": 0.0}, abs=1e-3)


# -- code of packages that recipes refer to ----------------------------------------------------------------------------

KINDS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from fastloop import Output, Plugin, hookimpl

class Sign(torch.optim.SGD):
    pass

class Double(MulticlassAccuracy):
    def compute(self):
        return 2 * super().compute()

def data():
    inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    return {split: TensorDataset(inputs, inputs[:, :3].argmax(1)) for split in ("train", "validation")}

def net(bias=True):
    return nn.Linear(4, 3, bias=bias)

number = 3

class Mine(Plugin):
    name = "mine"
    slot = "task"

    @hookimpl
    def build_datasets(self):
        return data()

    @hookimpl
    def build_model(self):
        return net()

    @hookimpl
    def compute_loss(self, model, batch):
        return Output(nn.functional.cross_entropy(model(batch[0]), batch[1]))
"""


@pytest.fixture
def kinds(install: Any) -> dict[str, Any]:
    install("kind-pack", KINDS, mine="kind_pack:Mine")
    metrics = {
        "accuracy": {"type": "MulticlassAccuracy", "num_classes": 3},
        "twice": {"type": "kind_pack:Double", "num_classes": 3},
    }
    return {
        "model": {"module": "kind_pack:net", "arguments": {"bias": False}},
        "data": {"module": "kind_pack:data"},
        "train": {"optimizer": "kind_pack:Sign", "epochs": 1, "batch_size": 8, "lr": 0.1, "device": "cpu"},
        "plugins": [{"module": {"loss": "cross_entropy", "metrics": metrics}}, *QUIET],
        "output": "out",
    }


def test_model_data_optimizer_and_metrics_come_from_a_package(kinds):
    recipe = make_recipe(kinds)
    run = build(resolve(recipe))
    assert type(run.optimizer).__name__ == "Sign"
    assert [name for name, _ in run.unwrap_model().named_parameters()] == ["weight"]
    found = execute(run)["validation"]
    assert found["twice"] == pytest.approx(2 * found["accuracy"])
    recipe = make_recipe(kinds)
    assert execute(build(resolve(recipe), resume=Path("out")))["steps"] == 3


def test_a_task_comes_from_a_package(kinds):
    recipe = make_recipe({"train": kinds["train"], "plugins": ["mine", *QUIET], "output": "out"})
    summary = execute(build(resolve(recipe)))
    assert (summary["plugins"], summary["steps"]) == (["mine", "metric-check", "optimizer-check", "speed-check"], 3)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ("kind_pack:Sing", "unknown-name recipe train.optimizer kind_pack 'Sing' 'Sign'"),
        (
            "kind_pack:net",
            "unknown-argument recipe train.optimizer.lr kind_pack:net(bias=True",
        ),
        ("kind_pack:number", "wrong-type recipe train.optimizer kind_pack:number torch.optim.Optimizer"),
        ("kindpack:Sign", "not-installed recipe train.optimizer 'kindpack'"),
        ("AdmW", "unknown-optimizer recipe train.optimizer torch.optim 'AdmW' 'AdamW'"),
        ("nothing.py:Sign", "file-missing recipe train.optimizer nothing.py"),
    ],
)
def test_invalid_optimizer_is_rejected_with_its_key(kinds, optimizer, expected):
    kinds["train"]["optimizer"] = optimizer
    recipe = make_recipe(kinds)
    with expect_problem(expected, RecipeError):
        build(resolve(recipe))
    assert not Path("out").exists()


def test_invalid_metric_is_rejected_with_its_key(kinds):
    metrics = kinds["plugins"][0]["module"]["metrics"]
    place = "plugins.module.metrics.twice.type:"
    for kind, expected in [
        ("kind_pack:Duble", f"unknown-name {place} kind_pack 'Duble' 'Double'"),
        ("kind_pack:net", f"unknown-metric {place} kind_pack:net torchmetrics.Metric update compute Trainer"),
        ("MulticlasAccuracy", f"unknown-metric {place} torchmetrics 'MulticlasAccuracy' 'MulticlassAccuracy'"),
    ]:
        metrics["twice"]["type"] = kind
        recipe = make_recipe(kinds)
        with expect_problem(expected, RecipeError):
            build(resolve(recipe))


def test_a_trainer_takes_an_optimizer_of_a_package(kinds):
    loss = nn.functional.cross_entropy
    trainer = Trainer(
        tiny_model(), tiny_data(), plugins=QUIET, loss=loss, optimizer="kind_pack:Sign", batch_size=8, epochs=1
    )
    trainer.fit()
    assert type(trainer.run.optimizer).__name__ == "Sign"
