"""Mistakes of a plugin's author end with an error that names plugin and hook, at the latest in the first steps."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from fastloop import Output, Plugin, PluginCrash, PluginError, hookimpl
from fastloop.checks.hook_results import STEP_HOOKS, STEPS
from fastloop.plugins.declarations import check_declarations
from fastloop.plugins.installed import load
from fastloop.plugins.manager import PluginSet
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop.testing import assert_problem, expect_problem
from fastloop_plugins._own_plugins import own_plugins

ROOT = Path(__file__).parents[2]
QUIET = [
    {"log": False},
    {"metric-check": False},
    {"optimizer-check": False},
    {"progress": False},
    {"speed-check": False},
]


def make(name: str, **members: Any) -> Plugin:
    """A plugin whose functions are its hooks; the other values are attributes of its class."""
    marked = {
        key: hookimpl(value)
        if callable(value) and not isinstance(value, type) and not hasattr(value, "fastloop_impl")
        else value
        for key, value in members.items()
    }
    return type(name.title(), (Plugin,), {"name": name, **marked})()


def resolved(*plugins: Plugin, **recipe: Any) -> PluginSet:
    return resolve(make_recipe({"plugins": QUIET, **recipe}), objects=plugins).plugins


# -- declarations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("conflict", {"ema": "why"}, "conflicts"),
        ("conflict", ("ema",), "conflicts"),
        ("confilcts", {"ema": "why"}, "conflicts"),
        ("run_before", ("ema",), "runs_before"),
        ("run_after", "ema", "runs_after"),
        ("numeric", "changes-training", "numerics"),
        ("readonly", True, "read_only"),
        ("require", ["ema"], "requires"),
        ("requirement", (), "requirements"),
        ("fallback_hook", ("compute_loss",), "fallback_hooks"),
        ("add_metrics", {"f1": "max"}, "adds_metrics"),
        ("hook_specs", nn, "hookspecs"),
    ],
)
def test_a_misspelled_declaration_is_refused_with_the_nearest(name, value, meant):
    with expect_problem(f"unknown-declaration 'a' {name} {meant}", PluginError):
        resolved(make("a", **{name: value}))


@pytest.mark.parametrize("mode", ["lower", "maximize", True, 1])
def test_a_metric_of_a_plugin_is_better_lower_or_higher_or_neither(mode):
    with expect_problem(f"invalid-declaration 'a' adds_metrics 'f1' {mode!r} 'min'", PluginError):
        resolved(make("a", adds_metrics={"f1": mode}))
    for accepted in ("min", "max", None):
        resolved(make("a", adds_metrics={"f1": accepted}))


def test_a_misspelled_class_method_is_refused():
    cls = type("Auto", (Plugin,), {"name": "a", "auto_enabled": classmethod(lambda cls, recipe: None)})
    with expect_problem("unknown-declaration 'auto_enabled' 'auto_enable'", PluginError):
        resolved(cls())


def test_a_property_is_not_read_before_the_run(tiny_run):
    class Reports(Plugin):
        name = "reports"
        steps: list[int]

        @property
        def last(self) -> int:
            return self.steps[-1]

        @hookimpl
        def before_fit(self):
            self.steps = [0]

        @hookimpl
        def after_step(self, run):
            self.steps.append(run.state.step)

    plugin = Reports()
    result = tiny_run([plugin], epochs=1)
    assert plugin.last == len(result.losses) > 0


def test_attributes_of_a_plugin_of_its_own_are_accepted():
    class Mixin:
        needs = ("anything",)

    class Own(Mixin, Plugin):
        name = "own"
        names = ("a", "b")
        slots = ("left", "right")
        required = ("input_ids",)
        published = False
        section = "model"
        needs = 3
        _parity = "exact"

        def forecast(self) -> str:
            return "rain"

        @property
        def observes(self) -> bool:
            return True

    class Both(Plugin):
        """It also works with an earlier version."""

        name = "both"
        parity = "exact"
        numerics = "changes-training"

    assert resolved(Own(), Both()).names() == ["own", "both"]


def test_our_own_plugins_and_the_examples_declare_what_a_plugin_declares(monkeypatch):
    required = {"freeze": {"match": "*"}, "remote-output": {"url": "uploads"}, "vllm-server": {"folder": "served"}}
    plugins = [load(name)(**required.get(name, {})) for name in own_plugins()]
    for code in sorted(ROOT.glob("examples/*/src")):
        monkeypatch.syspath_prepend(code)
        (package,) = (path.name for path in code.iterdir() if (path / "__init__.py").exists())
        module = __import__(package)
        for cls in vars(module).values():
            if isinstance(cls, type) and issubclass(cls, Plugin) and cls.name:
                plugins.append(cls(**required.get(cls.name, {})))
        monkeypatch.delitem(sys.modules, package)
    assert len(plugins) > 50
    for plugin in plugins:
        check_declarations(plugin, "recipe")


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ({"runs_before": "ema"}, "runs_before 'ema' tuple"),
        ({"requires": "ema"}, "requires 'ema' tuple"),
        ({"conflicts": ("ema",)}, "conflicts ('ema',) dict"),
    ],
    ids=["order", "requires", "conflicts"],
)
def test_a_declaration_of_another_type_is_refused(declared, expected):
    with expect_problem(f"invalid-declaration 'a' {expected}", PluginError):
        resolved(make("a", **declared))


def test_a_missing_call_of_the_base_class_is_named():
    class Forgets(Plugin):
        name = "forgets"

        def __init__(self, **options: Any) -> None:
            self.seen = 0

    with pytest.raises(PluginError) as refused:
        resolved(Forgets())
    assert str(refused.value) == (
        "recipe: plugin 'forgets': its __init__ does not call super().__init__(**options), which sets its options. "
        "Call it first."
    )


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["metric-check", "optimizer-check", "log"])
def test_a_plugin_object_with_the_name_of_a_default_plugin_does_not_replace_it(tiny_run, name):
    with pytest.raises(PluginError) as refused:
        tiny_run([make(name)])
    assert str(refused.value) == (
        f"recipe: plugin {name!r} ({__name__}) has the name of a plugin that is on by default, and would replace it. "
        "Rename it. "
        f"To leave the other one out, add {{{name!r}: False}} to the plugins."
    )
    assert name in tiny_run([make(name), {name: False}], epochs=1).summary["plugins"]


def test_a_default_plugin_may_be_given_as_an_object_or_derived_from(tiny_run):
    check = load("metric-check")
    assert "metric-check" in tiny_run([check()], epochs=1).summary["plugins"]
    derived = type("Stricter", (check,), {})
    assert "metric-check" in tiny_run([derived()], epochs=1).summary["plugins"]


def test_a_file_does_not_replace_a_default_plugin():
    Path("checks.py").write_text('from fastloop import Plugin\n\nclass Mine(Plugin):\n    name = "metric-check"\n')
    with expect_problem("name-taken 'metric-check' checks.py", PluginError):
        resolve(make_recipe({"plugins": ["./checks.py"]}))


# -- the end of the process --------------------------------------------------------------------------------------------


def leave(self: Any) -> None:
    sys.exit(0)


@pytest.mark.parametrize(
    "hook", ["check_recipe", "before_fit", "after_step", "after_evaluate", "save_state", "write_summary", "teardown"]
)
def test_sys_exit_in_a_hook_fails_the_run(tiny_run, hook):
    with pytest.raises(PluginCrash) as failed:
        tiny_run([make("leaves", **{hook: leave})], epochs=1)
    assert_problem(failed.value.problem, f"plugin-crashed 'leaves' ({__name__}) {hook} SystemExit: 0")
    if hook != "check_recipe":
        summary = json.loads(Path("run0/summary.json").read_text())
        assert (summary["status"], summary["reason"]) == ("failed", str(failed.value))


def test_sys_exit_in_a_wrapper_fails_the_run(tiny_run):
    def evaluate(self: Any) -> Any:
        yield
        sys.exit(0)

    with expect_problem("plugin-crashed 'leaves' SystemExit 0", PluginCrash):
        tiny_run([make("leaves", evaluate=hookimpl(wrapper=True)(evaluate))], epochs=1)


def test_sys_exit_of_a_disabled_observer_does_not_end_the_run(tiny_run):
    observer = type("Leaves", (Plugin,), {"name": "leaves", "read_only": True, "after_step": hookimpl(leave)})
    summary = tiny_run([observer(on_error="disable")], epochs=1).summary
    assert summary["status"] == "completed"
    assert "after_step: SystemExit: 0" in summary["disabled"]["leaves"]


def test_sys_exit_in_the_constructor_names_the_plugin():
    body = "    def __init__(self, **options):\n        import sys\n        sys.exit(0)\n"
    Path("leaves.py").write_text(f'from fastloop import Plugin\n\nclass It(Plugin):\n    name = "leaves"\n\n{body}')
    with expect_problem("invalid-plugin leaves.py SystemExit 0", PluginError):
        resolve(make_recipe({"plugins": ["./leaves.py"]}))


def test_sys_exit_in_the_users_model_does_not_leave_with_success(tiny_run):
    class Leaves(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            sys.exit(0)

    with pytest.raises(Exception, match=r"test_plugin_contract\.py:\d+ in forward: SystemExit: 0"):
        tiny_run(model=Leaves(8, 3))


def test_the_command_line_exits_with_1_if_a_hook_calls_sys_exit():
    code = "import sys\nfrom fastloop import Plugin, hookimpl\n\nclass It(Plugin):\n    name = 'leaves'\n\n"
    Path("leaves.py").write_text(code + "    @hookimpl\n    def after_step(self):\n        sys.exit(0)\n")
    task = {"model": {"module": "fastloop.testing.tasks:Network"}, "data": {"module": "fastloop.testing.tasks:vectors"}}
    plugins = [{"module": {"loss": "cross_entropy"}}, "./leaves.py"]
    Path("r.yaml").write_text(
        json.dumps(task | {"plugins": plugins, "train": {"batch_size": 8, "device": "cpu"}, "output": "out"})
    )
    done = forked.run("-m", "fastloop", "train", "r.yaml")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("after_step: SystemExit: 0 [plugin-crashed]")
    assert json.loads(Path("out/summary.json").read_text())["status"] == "failed"


# -- what hooks must leave alone ---------------------------------------------------------------------------------------


def steps_optimizer(self: Any, run: Any) -> None:
    run.optimizer.step()


def third_time(function: Callable[..., None]) -> Any:
    """A hook that calls ``function`` in its third call."""

    def hook(self: Any, run: Any, **more: Any) -> None:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 3:
            function(run)

    return hook


def set_counter(name: str) -> Any:
    return third_time(lambda run: setattr(run.state, name, 0))


OPTIMIZER = "run.apply_gradients train_step"
BATCHES = "`inputs` `loss_weight`"
COUNTER = "run.state.{} run.state.request_stop(reason)"
EFFECTS: dict[str, tuple[str, Any, str]] = {
    "optimizer after backward": ("after_backward", steps_optimizer, OPTIMIZER),
    "optimizer before its step": ("before_optimizer_step", steps_optimizer, OPTIMIZER),
    "optimizer in one of the first steps": ("after_step", third_time(lambda run: run.optimizer.step()), OPTIMIZER),
    "cleared batches": ("before_step", lambda self, batches: batches.clear(), BATCHES),
    "fewer batches": ("before_step", lambda self, batches: batches.__delitem__(0), BATCHES),
    "reordered batches": ("before_step", lambda self, batches: batches.reverse(), BATCHES),
    "another number of samples": ("before_step", lambda self, batches: setattr(batches[0], "samples", 1), BATCHES),
    "other ids": ("before_step", lambda self, batches: setattr(batches[0], "ids", ()), BATCHES),
    "step": ("after_step", set_counter("step"), COUNTER.format("step")),
    "samples": ("before_step", set_counter("samples"), COUNTER.format("samples")),
    "epoch_samples": ("before_optimizer_step", set_counter("epoch_samples"), COUNTER.format("epoch_samples")),
    "step after an evaluation": (
        "after_evaluate",
        lambda self, run: setattr(run.state, "step", 0),
        COUNTER.format("step"),
    ),
    "epoch": ("after_epoch", lambda self, run: setattr(run.state, "epoch", 0), COUNTER.format("epoch")),
}


@pytest.mark.parametrize("effect", EFFECTS)
def test_a_hook_that_changes_what_only_fastloop_changes_is_refused(tiny_run, effect):
    hook, function, message = EFFECTS[effect]
    with pytest.raises(PluginError) as refused:
        tiny_run([make("other"), make("wrong", **{hook: function})], micro_batch_size=4)
    assert_problem(refused.value.problem, f"wrong-result recipe: 'wrong' {hook} {message}")


def test_another_optimizer_of_a_plugin_may_step(tiny_run):
    class Probe(Plugin):
        name = "probe"
        steps = 0

        @hookimpl
        def before_fit(self) -> None:
            self.weight = nn.Parameter(torch.zeros(1))
            self.optimizer = torch.optim.SGD([self.weight], lr=0.1)

        @hookimpl
        def after_backward(self) -> None:
            self.weight.grad = torch.ones(1)
            self.optimizer.step()
            self.steps += 1

    probe = Probe()
    assert tiny_run([probe]).losses == tiny_run().losses
    assert probe.steps == 18


def test_what_a_plugin_does_to_metrics_is_its_own(tiny_run):
    seen: list[dict[str, float]] = []
    kept: list[dict[str, float]] = []

    def change(self: Any, metrics: dict[str, float]) -> None:
        metrics["loss"] = 0.0
        metrics["more"] = 1.0

    def evaluate(self: Any) -> Any:
        kept.append((yield))
        return kept[-1]

    plugins = [
        make("changes", after_evaluate=hookimpl(tryfirst=True)(change)),
        make("sees", after_evaluate=lambda self, metrics: seen.append(metrics)),
        make("keeps", evaluate=hookimpl(wrapper=True)(evaluate), write_summary=lambda self: kept[-1].clear()),
    ]
    result, plain = tiny_run(plugins), tiny_run()
    assert (
        [metrics for _, metrics in result.recorder.metrics]
        == seen
        == [metrics for _, metrics in plain.recorder.metrics]
    )
    assert result.summary["validation"] == result.trainer.run.state.metrics["validation"] == plain.summary["validation"]
    result.summary["validation"].clear()
    assert result.trainer.run.state.metrics["validation"] == plain.summary["validation"]


# -- results -----------------------------------------------------------------------------------------------------------


async def awaits(self: Any) -> None: ...


def yields(self: Any) -> Any:
    yield


def wraps(self: Any) -> Any:
    yield


DESCRIBED = "docs/loop.md"
LOSS = "fastloop.Output(loss)"
SAMPLER = "torch.utils.data.BatchSampler"
PLATEAU = "CosineAnnealingLR after_evaluate step(metrics['loss'])"
RESULTS: dict[str, tuple[str, Any, str]] = {
    "a tensor as loss": (
        "compute_loss",
        lambda self, model, batch: model(batch[0]).sum(),
        f"Tensor Output {LOSS}",
    ),
    "a loss per sample": (
        "compute_loss",
        lambda self, model, batch: Output(model(batch[0]).sum(1)),
        f"Output Tensor (8,) {LOSS}",
    ),
    "a number as loss": ("compute_loss", lambda self: Output(1.0), f"Output float {LOSS}"),  # type: ignore[arg-type]
    "a wrapper that loses the loss": ("compute_loss", hookimpl(wrapper=True)(wraps), f"None Output {LOSS}"),
    "a wrapper that loses the metrics": (
        "evaluate",
        hookimpl(wrapper=True)(wraps),
        f"None dict[str, float] {DESCRIBED}",
    ),
    "a list as sampler": ("build_sampler", lambda self: [1, 2], f"list BatchSampler {SAMPLER}"),
    "a sampler of samples": (
        "build_sampler",
        lambda self: torch.utils.data.SequentialSampler(range(4)),
        f"SequentialSampler BatchSampler {SAMPLER}",
    ),
    "no model": ("before_prepare", lambda self: True, f"bool nn.Module {DESCRIBED}"),
    "no prepared model": ("after_prepare", lambda self, model: [model], f"list nn.Module {DESCRIBED}"),
    "a plateau": (
        "build_scheduler",
        lambda self, optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        f"ReduceLROnPlateau {PLATEAU}",
    ),
    "no scheduler": (
        "build_scheduler",
        lambda self: 0.1,
        f"float LRScheduler Mapping[str, LRScheduler] {PLATEAU}",
    ),
    "a dict of metrics": (
        "build_metrics",
        lambda self: {"accuracy": 1},
        f"dict MetricCollection {DESCRIBED}",
    ),
    "no state": ("save_state", lambda self: [1], f"list dict[str, Any] {DESCRIBED}"),
    "a result of before_step": (
        "before_step",
        lambda self, batches: batches,
        f"list {DESCRIBED}",
    ),
    "no settings": ("configure", lambda self: 3, f"int mapping {DESCRIBED}"),
    "a summary": ("write_summary", lambda self: {"a": 1}, f"dict {DESCRIBED}"),
    "a generator": (
        "after_step",
        yields,
        f"generator yield @hookimpl(wrapper=True) {DESCRIBED}",
    ),
}


@pytest.mark.parametrize("result", RESULTS)
def test_a_wrong_result_of_a_hook_is_refused_by_name(tiny_run, result):
    hook, function, message = RESULTS[result]
    with pytest.raises(PluginError) as refused:
        tiny_run([make("other"), make("wrong", **{hook: function})])
    assert_problem(refused.value.problem, f"wrong-result recipe: 'wrong' {hook} {message}")


def test_a_loss_of_none_is_refused_if_no_other_plugin_computes_one():
    from fastloop.testing import VECTORS, train

    def nothing(self: Any) -> None: ...

    members = {"name": "task", "compute_loss": hookimpl(nothing)}
    task = type("Task", (load("module"),), members)(loss="cross_entropy")
    with expect_problem("wrong-result 'task' compute_loss fastloop.Output", PluginError):
        train({**VECTORS, "plugins": [], "train": {"batch_size": 8, "device": "cpu"}, "output": "out"}, task)


def test_a_loss_of_none_is_reported_if_another_plugin_computes_each(tiny_run, caplog):
    def sometimes(self: Any, run: Any, model: nn.Module, batch: Any) -> Output | None:
        return Output(nn.functional.cross_entropy(model(batch[0]), batch[1])) if run.state.step == 2 else None

    assert tiny_run([make("sometimes", compute_loss=sometimes)]).losses == tiny_run().losses
    assert not [record for record in caplog.records if "compute_loss" in record.getMessage()]
    tiny_run([make("never", compute_loss=lambda self: None)])
    assert_problem(caplog, f"no-result 'never' compute_loss None {LOSS}")


@pytest.mark.parametrize("hook", ["after_step", "before_fit", "compute_loss", "teardown"])
def test_an_async_hook_is_refused_before_the_run(tiny_run, hook):
    with pytest.raises(PluginError) as refused:
        tiny_run([make("waits", **{hook: awaits})])
    assert (
        str(refused.value) == f"plugin 'waits': {hook} is an `async def`, and nothing would await it. Make it a `def`."
    )


def test_an_error_in_write_summary_names_the_plugin_and_leaves_a_summary(tiny_run):
    def fails(self: Any, summary: dict[str, Any]) -> None:
        summary["before"] = 1
        raise ValueError("on purpose")

    with pytest.raises(PluginCrash) as failed:
        tiny_run([make("fails", write_summary=fails)], epochs=1)
    assert_problem(failed.value.problem, f"plugin-crashed 'fails' ({__name__}) write_summary ValueError: on purpose")
    summary = json.loads(Path("run0/summary.json").read_text())
    assert (summary["status"], summary["reason"], summary["steps"]) == ("failed", str(failed.value), 9)


@pytest.mark.slow
def test_an_error_in_write_summary_does_not_hide_the_error_of_the_run(tiny_run, caplog):
    def fails(self: Any) -> None:
        raise ValueError("on purpose")

    def first(self: Any) -> None:
        raise KeyError("first")

    with expect_problem("plugin-crashed 'fails' after_step KeyError 'first'", PluginCrash):
        tiny_run([make("fails", after_step=first, write_summary=fails)])
    assert_problem(caplog, "plugin-crashed 'fails' write_summary: ValueError: on purpose")


def test_a_value_of_the_summary_that_is_no_json_is_refused_by_name(tiny_run):
    def adds(self: Any, summary: dict[str, Any]) -> None:
        summary["norm"] = torch.tensor(1.0)

    with expect_problem("not-json 'adds' write_summary 'norm'", PluginError):
        tiny_run([make("adds", write_summary=adds)], epochs=1)
    assert json.loads(Path("run0/summary.json").read_text())["norm"] == "tensor(1.)"


# -- cost --------------------------------------------------------------------------------------------------------------


def test_the_checks_of_a_step_end_after_the_first_steps(tiny_run):
    class Looks(Plugin):
        name = "looks"
        found: dict[int, list[str]] = {}
        hooks: dict[int, int] = {}

        @hookimpl
        def before_optimizer_step(self, run: Any) -> None: ...

        @hookimpl
        def after_step(self, run: Any) -> None:
            manager = run.plugins.manager
            own = [
                (impl, hook)
                for plugin in run.plugins
                for impl, hook in manager.implementations(plugin)
                if hook in STEP_HOOKS
            ]
            self.found[run.state.step] = [hook for impl, hook in own if "HookChecks" in impl.function.__qualname__]
            self.hooks[run.state.step] = len(torch_optimizer._global_optimizer_pre_hooks)

    before = len(torch_optimizer._global_optimizer_pre_hooks)
    tiny_run([Looks()])
    assert {"compute_loss", "before_optimizer_step", "after_step"} <= set(Looks.found[1])
    assert Looks.hooks[1] == before + 1
    assert not any(Looks.found[step] for step in range(STEPS + 2, 19))
    assert {Looks.hooks[step] for step in range(STEPS + 2, 19)} == {before}


def test_a_short_run_leaves_no_hook_behind(tiny_run):
    before = len(torch_optimizer._global_optimizer_pre_hooks)
    tiny_run(max_steps=2)
    with pytest.raises(PluginError):
        tiny_run([make("wrong", after_backward=steps_optimizer)])
    assert len(torch_optimizer._global_optimizer_pre_hooks) == before
